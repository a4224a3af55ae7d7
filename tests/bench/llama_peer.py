"""llama.cpp, for real.py: run by a Python of its own, which has `llama-cpp-python`.

`python llama_peer.py FILE.gguf THREADS` loads the file, then answers each line of its input, prompts and numbers of tokens
as JSON, with a line: token ids and seconds. One request after another, greedily, without an end token.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice


def main(file: str, threads: str) -> None:
    from llama_cpp import Llama

    llama = Llama(model_path=file, n_ctx=2048, n_threads=int(threads), n_threads_batch=int(threads), verbose=False)
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, outputs = json.loads(line)
        start, found = time.perf_counter(), []
        for prompt, num in zip(prompts, outputs, strict=True):
            llama.reset()  # it would find the last prompt's beginning in its cache
            found.append([*islice(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), num)])
        print(json.dumps([found, time.perf_counter() - start]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
