"""OpenVINO GenAI, for cpu.py and real.py: run by a Python of its own, which has `openvino-genai` and `optimum-intel`.

`python openvino_peer.py CHECKPOINT THREADS` exports the checkpoint, prints a line about itself, then answers each line of
its input, prompts and numbers of tokens as JSON, with a line: token ids and seconds. Weights, arithmetic and cache are
float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def main(folder: str, threads: str) -> None:
    import numpy as np
    import openvino
    import openvino_genai

    home = tempfile.TemporaryDirectory()
    exported = Path(home.name) / "openvino"
    tool = Path(sys.executable).parent / "optimum-cli"
    task = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    command = [tool, "export", "openvino", "--model", folder, *task, exported]
    subprocess.run(command, check=True, stdout=sys.stderr)
    room = openvino_genai.SchedulerConfig()
    room.cache_size, room.max_num_seqs, room.max_num_batched_tokens = 2, 32, 2048
    room.enable_prefix_caching = False
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": int(threads)}
    pipe = openvino_genai.ContinuousBatchingPipeline(str(exported), room, "CPU", exact)
    print(json.dumps({"version": f"OpenVINO GenAI {version('openvino-genai')}"}), flush=True)
    for line in sys.stdin:
        prompts, outputs = json.loads(line)
        params = [openvino_genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for n in outputs]
        inputs = [openvino.Tensor(np.array([p], dtype=np.int64)) for p in prompts]
        start = time.perf_counter()
        results = pipe.generate(inputs, params)
        seconds = time.perf_counter() - start
        print(json.dumps([[list(r.m_generation_ids[0]) for r in results], seconds]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
