"""tracediff: a layer-by-layer numerical diff debugger for LLM inference engines.

An `engine/` runs a `model/` and writes a `trace/`; `interchange/` makes one of the files of others. `pipeline` takes it
from there: `compare/` has two traces beside each other, `replay/` recomputes each op by `numerics/`, `judge` gives
verdicts, `audit/` looks at weights, `diagnose/` seeks causes, and `findings/` says in a `result/` what came out, which
`report/` shows. The other commands: `threeway`, `itself/`, `mismatch/`, `ci/`, `inspect/`, `reproduce`, `bundle`,
`demo`. All are called by `cli/`, within a `process` of its own, and in tests of an engine by `testing`
(`pytest_plugin`). Below all lie `names` of ops, `errors`, what is opened (`inputs`) and written (`files`), `versions`,
and how words are put (`english`, `printable`).
"""

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
