"""atom_mini: an LLM serving engine that reads like a book. The notebooks in `nbs/` are its source."""

__version__ = "0.1.0"
