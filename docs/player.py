"""The player on the landing page: the five requests of chapter 02, computed by the engine and its built-in model."""

import sys
from html import escape

from map import ROOT

sys.path.insert(0, str(ROOT / "nbs" / "_book"))
from show import TIGHT, check_trace, five_requests

PROMPTS = [  # each of as many tokens as its request has, and with an answer that is as long
    "Once upon a time there was a cat.", "Once upon a time a girl", "Ben likes plums. Mia has a red cat. What does Mia",
    "Once upon a", "What does Mia have?",
]  # fmt: skip

# It starts by itself, and again at its end, until the reader touches it; it does not if the reader asked for less motion.
LOOP = """<style>body { font-size: 12px } p { margin: 5px 0 1px }
#what { min-height: 3em } #about { height: 3em; padding: 4px 0 }</style>
<script type="module">
const [scrub, play, speed] = ["scrub", "play", "speed"].map(id => document.getElementById(id));
let touched = matchMedia("(prefers-reduced-motion: reduce)").matches, rest = 2;
for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, () => touched = true);
speed.value = 2;
setInterval(() => {
  if (touched || !+scrub.max || play.textContent === "pause" || ++rest < 3) return;
  if (scrub.value === scrub.max) { scrub.value = 0; scrub.dispatchEvent(new Event("input")); }
  rest = 0;
  play.click();
}, 700);
</script>"""


def record() -> str:
    """The page that plays the run, made now. Raises ValueError if a prompt or an answer has another length."""
    from atom_mini import LLM, SamplingParams

    requests, clock = five_requests(), 0
    with LLM("tiny", device="cpu", trace=True, **TIGHT) as llm:
        for prompt, request in zip(PROMPTS, requests, strict=True):
            while clock < request.arrival:
                clock += bool(llm.step())
            llm.add_request(prompt, SamplingParams(max_tokens=request.max_tokens))
        while llm.step():
            pass
        trace = llm.trace
    check_trace(trace)
    lengths = [
        (request["prompt"], len(request["token_ids"]) - request["prompt"]) for request in trace.requests.values()
    ]
    if lengths != [(len(request.prompt), request.max_tokens) for request in requests]:
        raise ValueError(f"the five requests have {lengths} tokens of prompt and output: mend PROMPTS")
    return trace.to_html()


def player() -> str:
    """A frame for the landing page. It has the page in it, so that it needs no server."""
    page = escape(record() + LOOP)
    return f'<iframe class="player" title="Five requests in the engine, step by step" srcdoc="{page}"></iframe>\n'
