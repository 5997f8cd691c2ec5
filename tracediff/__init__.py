"""tracediff: a layer-by-layer numerical diff debugger for LLM inference engines."""

__version__ = "0.1.0"
