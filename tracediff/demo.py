"""What `tracediff demo` shows: a small model as loud as a real one, with a mistake planted in one engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.files import replacing
from tracediff.model.synthetic import DEMO, write_model
from tracediff.result import Result

if TYPE_CHECKING:
    from tracediff.model.model import Model

PROMPT = "The quick brown fox jumps over the lazy dog, and the engine answers the same word again."
FAULT = "rope_pairing"


def make_model(folder: Path) -> Path:
    """A qwen2 model of 8 layers: final-norm weights from -0.011 to 16.75, a massive activation, large K biases."""
    out = folder / "demo.gguf"
    with replacing(out, lambda head: f"random {DEMO.arch}".encode() in head) as part:
        write_model(part, DEMO, "F16")
    return out


def not_found(result: Result, model: "Model", faults: Sequence[str]) -> list[str]:
    """What the result does not say of the planted faults, or says of other ops: a sentence each; none if all is well.

    A fault is found where at least one op that it was planted in has its name.
    """
    from tracediff.diagnose.planting import plant

    graph = model.graph
    planted = {
        fault: {op.name for op in plant(graph, model.file, fault) if op is not graph[op.name]} for fault in faults
    }
    right = {(op, fault.partition("@")[0]) for fault, ops in planted.items() for op in ops}
    named = [(op.op, name) for op in result.faulty for name in (op.cause.each if op.cause else ["no known mistake"])]
    missed = [
        f"{fault} was planted and is not named"
        for fault, ops in planted.items()
        if not {(op, fault.partition("@")[0]) for op in ops} & {*named}
    ]
    return missed + [f"{op} was called faulty ({name})" for op, name in dict.fromkeys(named) if (op, name) not in right]
