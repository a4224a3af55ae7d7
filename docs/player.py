"""The player on the landing page: the five requests of chapter 04, computed by the engine and its built-in model."""

from html import escape

REQUESTS = [  # a prompt, its length in tokens, and tokens of output; the last two come after four steps
    ("Once upon a time there was a cat.", 9, 18), ("12 + 7 =", 6, 22),
    ("Ada lives in Rome. Mia has a red cat. Mia has", 13, 6), ("One day", 3, 12), ("3 + 4 =", 5, 4),
]  # fmt: skip
LIMITS = {"kv_cache_block_size": 4, "num_kvcache_blocks": 10, "max_num_batched_tokens": 16}

# It starts by itself, and again at its end, until somebody touches it; not for those who asked for less motion.
LOOP = """<style>body { font-size: 12px } p { margin: 8px 0 2px } #about { height: 5.2em }</style>
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
    """The page that plays the run, made now. Raises ValueError if a prompt has not the length it should have."""
    from atom_mini import LLM, SamplingParams

    with LLM("tiny", device="cpu", trace=True, **LIMITS) as llm:
        for n, (prompt, _, output) in enumerate(REQUESTS):
            for _ in range(4 * (n == 3)):
                llm.step()
            llm.add_request(prompt, SamplingParams(max_tokens=output, ignore_eos=True))
        while llm.step():
            pass
        trace = llm.trace
    trace.check()
    lengths = [
        (request["prompt"], len(request["token_ids"]) - request["prompt"]) for request in trace.requests.values()
    ]
    if lengths != [(prompt, output) for _, prompt, output in REQUESTS]:
        raise ValueError(f"the five requests have {lengths} tokens of prompt and output: mend REQUESTS")
    return trace.to_html()


def player() -> str:
    """A frame for the landing page. It has the page in it, so that it needs no server."""
    page = escape(record() + LOOP)
    return f'<iframe class="player" title="Five requests in the engine, step by step" srcdoc="{page}"></iframe>\n'
