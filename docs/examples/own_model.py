"""Serve a model family that the engine does not know: python docs/examples/own_model.py

The family here is Llama's, except that each MLP's output is halved. First we write a tiny checkpoint with random weights.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atom_mini import LLM, SamplingParams
from atom_mini.checkpoint import ModelRegistry, ModelSpec, read_spec
from atom_mini.models import MLP, MODELS, CausalLM


class HalvedMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class HalvedForCausalLM(CausalLM):
    def make_mlp(self, layer: int) -> torch.nn.Module:
        return HalvedMLP(self.spec, self.ops)


class HalvedSpec(ModelSpec):
    pass


# From here on the engine knows the architecture by the name that config.json gives it, and the model by the spec's class.
ModelRegistry.register_model("HalvedForCausalLM", lambda config, raw: read_spec(config, HalvedSpec))
MODELS[HalvedSpec] = HalvedForCausalLM

with tempfile.TemporaryDirectory() as name:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 100, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(name)
    file = Path(name) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["HalvedForCausalLM"]}))
    with LLM(name) as llm:  # there is no tokenizer in the folder, so prompts are token ids
        print(type(llm.engine_core.runner.model).__name__)
        print(llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))[0].token_ids)
