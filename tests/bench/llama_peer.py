"""llama.cpp, for real.py: run by a Python of its own, which has `llama-cpp-python`, `gguf` and `safetensors`.

`python llama_peer.py CHECKPOINT THREADS` writes the checkpoint as GGUF files, of F32 by the `gguf` package and from that
one of the other kinds by llama.cpp itself, and prints a line: each kind's bytes of weights, as JSON. Then it answers each
line of its input, a kind, prompts and numbers of tokens, with a line: token ids and seconds.

Requests are decoded together, as a server does it: all prompts in batches of 2,048 tokens, then in each step a token of
every sequence that still wants one. Greedily, without an end token, with the binding's low-level functions.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {"F32": 0, "BF16": 32, "Q8_0": 7, "Q4_1": 3}  # llama.cpp's `llama_ftype`
BATCH = 2048
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def name_in_gguf(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`. KeyError for one that the two models do not have."""
    *_, layer, rest = ["", *name.removeprefix("model.").removesuffix(".weight").removeprefix("layers.").split(".", 1)]
    if layer.isdigit():
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[name.removeprefix('model.').removesuffix('.weight')]}.weight"


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of a Llama's queries or keys as llama.cpp rotates them: neighbors, where a checkpoint has halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_f32(folder: Path, file: Path) -> None:
    """A Llama or Qwen3 of transformers as a GGUF file without a tokenizer: it is asked with token ids."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, kv, kind = config["num_attention_heads"], config["num_key_value_heads"], config["model_type"]
    out = gguf.GGUFWriter(file, kind)
    out.add_file_type(KINDS["F32"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, weight in load_file(folder / "model.safetensors").items():
        if kind == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, heads if "q_proj" in name else kv)
        out.add_tensor(name_in_gguf(name), np.ascontiguousarray(weight, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Slot(NamedTuple):
    """A token of a batch, and whether the next one is wanted."""

    sequence: int
    position: int
    token: int
    is_last: bool


class Model:
    """One GGUF file, and contexts for so many sequences."""

    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(bytes(file), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self.vocab, self.threads = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)), threads
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.bytes = llama_cpp.llama_model_size(self.model)

    def context(self, num: int, length: int) -> Any:
        """Memory for `num` sequences of `length` tokens, keys and values in 16 bits as llama.cpp has them by default."""
        params = self.lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx = num, num * length
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = self.threads
        return self.lib.llama_init_from_model(self.model, params)

    def decode(self, context: Any, slots: list[Slot]) -> dict[int, int]:
        """One batch: sequence -> its likeliest next token, where one is wanted."""
        import numpy as np

        for i, slot in enumerate(slots):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = slot.token, slot.position, slot.is_last
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, slot.sequence
        self.batch.n_tokens = len(slots)
        if code := self.lib.llama_decode(context, self.batch):
            raise RuntimeError(f"llama_decode returned {code}")
        rows = {s.sequence: self.lib.llama_get_logits_ith(context, i) for i, s in enumerate(slots) if s.is_last}
        return {k: int(np.ctypeslib.as_array(row, (self.vocab,)).argmax()) for k, row in rows.items()}

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> tuple[list[list[int]], float]:
        """Tokens of each request, and the seconds without making the context."""
        longest = max(len(p) + n for p, n in zip(prompts, outputs, strict=True))
        context = self.context(len(prompts), longest)
        found: list[list[int]] = [[] for _ in prompts]
        start = time.perf_counter()
        waiting = [Slot(k, i, t, i + 1 == len(p)) for k, p in enumerate(prompts) for i, t in enumerate(p)]
        while waiting:
            now, waiting = waiting[:BATCH], waiting[BATCH:]
            for k, token in self.decode(context, now).items():
                found[k].append(token)
            if not waiting:  # a step: a token of each that wants another
                waiting = [
                    Slot(k, len(p) + len(found[k]) - 1, found[k][-1], True)
                    for k, p in enumerate(prompts) if len(found[k]) < outputs[k]
                ]  # fmt: skip
        seconds = time.perf_counter() - start
        self.lib.llama_free(context)
        return found, seconds


def quantize(source: Path, target: Path, kind: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = KINDS[kind]
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {kind}")


def main(folder: str, threads: str) -> None:
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    models: dict[str, Model] = {}
    with tempfile.TemporaryDirectory() as home:
        write_f32(Path(folder), f32 := Path(home) / "F32.gguf")
        for kind in KINDS:
            file = Path(home) / f"{kind}.gguf"
            if file != f32:
                quantize(f32, file, kind)
            models[kind] = Model(file, int(threads))
        said = {"version": f"llama-cpp-python {version('llama-cpp-python')}", "bytes": {k: m.bytes for k, m in models.items()}}
        print(json.dumps(said), flush=True)
        for line in sys.stdin:
            kind, prompts, outputs = json.loads(line)
            print(json.dumps(models[kind].generate(prompts, outputs)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
