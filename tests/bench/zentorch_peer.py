"""zentorch, AMD's plugin of torch for EPYC processors, for real.py: run by a Python of its own, which has `zentorch`,
the torch that this one is made for, and `transformers`.

`python zentorch_peer.py CHECKPOINT THREADS` prints a line about itself, then answers each line of its input, prompts and
numbers of tokens as JSON, with a line: token ids and seconds. It is transformers' `generate`, whose forward pass
`torch.compile(backend="zentorch")` compiles. Weights, arithmetic and cache are float32. The prompts of a line have one
length. The head gets weights of its own: zentorch 2.13 reorders weights where they are, and an embedding that shares its
memory with the head would read the reordered numbers (tokens are wrong from the second call on).
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version


def main(folder: str, threads: str) -> None:
    import torch
    import zentorch  # noqa: F401  registers the backend
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.forward = torch.compile(model.forward, backend="zentorch")
    print(json.dumps({"version": f"zentorch {version('zentorch')}"}), flush=True)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for line in sys.stdin:
        prompts, outputs = json.loads(line)
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max(outputs), **options)
        seconds = time.perf_counter() - start
        tokens = [row[ids.shape[1] :][:n].tolist() for row, n in zip(out, outputs, strict=True)]
        print(json.dumps([tokens, seconds]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
