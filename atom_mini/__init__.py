"""atom_mini: an LLM serving engine that reads like a book. The notebooks in `nbs/` are its source."""

__version__ = "0.1.0"

import atom_mini.assemble  # noqa: F401 - first: it lets the later parts in
from atom_mini.config import Config, SamplingParams
from atom_mini.llm import LLM, RequestOutput

__all__ = ["LLM", "RequestOutput", "Config", "SamplingParams", "__version__"]
