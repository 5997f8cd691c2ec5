"""How each side computes each op: its arithmetic as its own trace tells it, the order of casts, and what it stores."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tracediff.mismatch.lanes import Side, Way
from tracediff.mismatch.words import UNKNOWN
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.names import local_name
from tracediff.numerics.arithmetic import EXACT, Arithmetic, Scheme, in_words
from tracediff.numerics.evaluate import arithmetic_of, evaluate, is_covered, rounding
from tracediff.numerics.schemes import EXACTLY
from tracediff.replay.judging import Subject, replays_of
from tracediff.replay.replay import Replay
from tracediff.replay.storage import stored_as
from tracediff.trace.reader import Trace
from tracediff.trace.restep import restep
from tracediff.trace.writer import TraceWriter

ROUTES = "routes"  # the group of which experts were chosen
_BETTER = 0.1  # of what plain order leaves: an order of casts that leaves less is the side's
_LOOKED_AT = 3  # norms that choose it


@dataclass(frozen=True, slots=True)
class Known:
    """A side, and what is said of its ops; `weights` are those that it holds in place of the file's."""

    side: Side
    unsettled: frozenset[str]  # ops of which no arithmetic fits a record

    def how(self, ops: Iterable[Op]) -> str:
        """How the side computes these ops, which are of one group."""
        ops = list(ops)
        if any(op.name in self.unsettled for op in ops):
            return UNKNOWN
        return in_words((op.kind, self.side.ways[op.name].arithmetic) for op in ops)


def in_one_pass(trace: Trace, folder: Path, name: str) -> Trace:
    """The trace as if all tokens of each sequence had been fed at once, one sequence after another."""
    if len(trace.steps) == len(trace.sequences):
        return trace
    like, out = folder / f"{name}-like.trace", folder / f"{name}.trace"
    with TraceWriter(like, "") as writer:
        for number, sequence in enumerate(trace.sequences):
            fed = [step for step in trace.steps.values() if step.sequence == sequence]
            tokens, positions = ([x for step in fed for x in getattr(step, of)] for of in ("tokens", "positions"))
            writer.step(number, tokens, positions, (sequence,) * len(tokens))
    restep(trace, Trace(like), out)
    return Trace(out)


def sides_of(model: Model, traces: tuple[Trace, Trace]) -> tuple[Known, Known]:
    """What each trace tells of how its engine computes. Weights that it recorded are those that it is replayed with.

    Raises TraceError for a trace of another model.
    """
    subjects = [Subject(trace, _held(trace, model)) for trace in traces]
    a, b = (_known(replay, model) for replay in replays_of(model, subjects))
    return a, b


def _held(trace: Trace, model: Model) -> dict[str, np.ndarray]:
    tensors = model.tensors
    return {
        name: trace.values(weight).astype(np.float32)
        for name, weight in trace.weights.items()
        if weight.has_data and name in tensors and weight.size == np.prod(tensors.shape(name))
    }


def _known(replay: Replay, model: Model) -> Known:
    graph, step = model.graph, next(iter(replay.trace.steps))  # what an engine does in one pass it does in all
    schemes: dict[str, Scheme] = {}
    unsettled = set()
    scheme = EXACTLY
    for op in reversed([*graph]):  # what was not recorded is computed as what was, after it
        record = replay.trace.ops.get((step, op.name))
        if record is not None and op.name in replay.records:
            choice = replay.choice(record)
            scheme = choice.schemes[0]
            if not choice.settled or replay.judge(record).faulty:
                unsettled.add(op.name)
        schemes[op.name] = scheme
    if cast := _cast(replay, step):
        norms = {op.name for op in graph if _is_norm(op)}
        schemes |= {name: replace(schemes[name], normed=cast) for name in norms}
        unsettled -= norms
    ways = {op.name: _way(replay, op, schemes[op.name], step) for op in graph}
    return Known(Side(replay.trace, replay.weights, ways), frozenset(unsettled))


def _way(replay: Replay, op: Op, scheme: Scheme, step: int) -> Way:
    arithmetic = arithmetic_of(op, scheme, replay.weights) if is_covered(op) else EXACT
    record = replay.trace.ops.get((step, op.name))
    storage = "f64"
    if record is not None and record.has_data:
        storage = stored_as(torch.from_numpy(replay.trace.values(record)).double(), record.dtype or "f32")
    return Way(op, arithmetic, storage)


def _cast(replay: Replay, step: int) -> str | None:
    """What this side's norms round their values to before the weight, as transformers' LlamaRMSNorm does in half
    precision, where that leaves a tenth of what is left without, or less.
    """
    left = dict.fromkeys(("f64", "bf16", "f16"), 0.0)
    for op in [*_norms(replay, step)][:_LOOKED_AT]:
        known = replay.known(replay.trace.ops[step, op.name])
        storage = stored_as(known.recorded, replay.trace.ops[step, op.name].dtype or "f32")
        for cast in left:
            made = rounding(evaluate(op, known.inputs, replay.weights, Arithmetic(cast)), storage)
            left[cast] += float((made.reshape(known.recorded.shape) - known.recorded).square().sum())
    best = min(left, key=lambda cast: left[cast])
    return best if best != "f64" and left[best] <= _BETTER * left["f64"] else None


def _norms(replay: Replay, step: int) -> Iterator[Op]:
    """Those of which input and output were recorded."""
    for op in replay.graph:
        read = replay.trace.ops.get((step, op.inputs[0]))
        if _is_norm(op) and op.name in replay.records and read and read.has_data:
            yield op


def label(op: Op) -> str:
    """What kind of op it is, in words."""
    words = {
        "rms_norm": "norms", "layer_norm": "norms", "linear": "matmuls", "scores": "attention", "softmax": "attention",
        "weighted_values": "attention", "soft_max": "attention", "add": "sums", "swiglu": "activations",
        "linear_id": "experts", "mul_mat": "products", "of_latent": "products",
        "top_k": ROUTES, "argsort": ROUTES,
    }  # fmt: skip
    return words.get(op.kind, op.kind.replace("_", " "))


def alone(op: Op) -> str:
    """The name of a group of one op."""
    return f"{local_name(op.name)} alone ({op.name})"


def _is_norm(op: Op) -> bool:
    return op.kind == "rms_norm" and len(op.weights) == 1
