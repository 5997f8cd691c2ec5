"""tracediff: a layer-by-layer numerical diff debugger for LLM inference engines."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracediff.engine.record import record

__all__ = ["__version__", "record"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`tracediff.record` on first use: it needs torch, which many commands do without."""
    if name == "record":
        from tracediff.engine.record import record

        return record
    raise AttributeError(f"module 'tracediff' has no attribute {name!r}")
