"""atom_mini: an LLM serving engine that reads like a book. Most of it is exported from the notebooks in `nbs/`."""

__version__ = "0.1.0"

from importlib.util import find_spec
from typing import TYPE_CHECKING

from atom_mini.config import Config, SamplingParams
from atom_mini.llm import RequestOutput

if TYPE_CHECKING or find_spec("atom_mini.options"):
    from atom_mini.options.build import LLM
    from atom_mini.options.args import EngineArgs
else:  # the first part alone
    from atom_mini.config import Config as EngineArgs
    from atom_mini.llm import LLM

__all__ = ["LLM", "RequestOutput", "Config", "EngineArgs", "SamplingParams", "__version__"]

if TYPE_CHECKING or find_spec("atom_mini.structured"):
    from atom_mini.structured.params import StructuredOutputsParams

    __all__ += ["StructuredOutputsParams"]
