"""tracediff: a layer-by-layer numerical diff debugger for LLM inference engines."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracediff.engine.record import record
    from tracediff.engine.stepwise import Recorder

__all__ = ["Recorder", "__version__", "record"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`record` and `Recorder` on first use: they need torch, which many commands do without."""
    if name == "record":
        from tracediff.engine.record import record

        return record
    if name == "Recorder":
        from tracediff.engine.stepwise import Recorder

        return Recorder
    raise AttributeError(f"module 'tracediff' has no attribute {name!r}")
