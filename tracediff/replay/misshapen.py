"""Records that have another shape than the model's op: what is wrong with each, so that the rest can be replayed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracediff.errors import TraceError
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace
from tracediff.trace.shapes import misfit

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Misshapen:
    """A record that cannot be replayed: the mistake, in words that suit other layers, and both shapes.

    `some_tokens`: it may hold some tokens of the step and not say which, which is no mistake of the engine.
    """

    text: str
    shapes: str
    some_tokens: bool
    forgets: bool = False  # keys


def misshapen(trace: Trace, graph: Graph) -> dict[tuple[int, str], Misshapen]:
    """Every such record. Raises TraceError where they are the most of each step: the trace is of another model."""
    known = {key: record for key, record in trace.ops.items() if record.op in graph}
    found = _of_other_shapes(trace, graph)
    of_steps, wrong = (Counter(step for step, _ in keys) for keys in (known, found))
    if known and all(2 * wrong[step] > n for step, n in of_steps.items()):
        (step, op), first = next(iter(found.items()))
        raise TraceError(
            f"{trace.path}: {len(found)} of {len(known)} records have other shapes than this model's ops, first {op!r} "
            f"in step {step}: {first.shapes}. Is it a trace of another model? `tracediff validate TRACE --model MODEL` "
            "says what else it may be."
        )
    return found | _of_a_window({key: known[key] for key in found}, found)


def suited(model: Model, trace: Trace) -> Model:
    """The model in the form of its latent attention that more of the records have names and shapes of."""
    other = model.expanded()
    return other if other and _unfit(trace, other.graph).total() < _unfit(trace, model.graph).total() else model


def suits_a_step(model: Model, trace: Trace) -> bool:
    """Whether of some step no fewer records fit the model's own form of its latent attention than the other."""
    other = model.expanded()
    if not other:
        return True
    own, others = _unfit(trace, model.graph), _unfit(trace, other.graph)
    return any(own[step] <= others[step] for step in trace.steps)


def _unfit(trace: Trace, graph: Graph) -> Counter[int]:
    """How many records of each step have another name or shape than the graph's ops."""
    return Counter(step for step, op in trace.ops if op not in graph) + Counter(
        step for step, _ in _of_other_shapes(trace, graph)
    )


def _of_other_shapes(trace: Trace, graph: Graph) -> dict[Key, Misshapen]:
    found = {}
    for key, record in trace.ops.items():
        if record.op in graph:
            n_tokens = len(trace.steps[record.step].tokens)
            n_rows = n_tokens if record.rows is None else len(record.rows)
            n_past = trace.n_before(record.step) + n_tokens - n_rows
            if wrong := _misshapen(record, graph[record.op].shape(n_rows, n_past)):
                found[key] = wrong
    return found


def _of_a_window(records: Mapping[Key, OpRecord], found: Mapping[Key, Misshapen]) -> dict[Key, Misshapen]:
    """Those of an op that has as many keys in every step, however many positions: one mistake, and not one a step."""
    of_ops: dict[str, list[Key]] = {}
    for key, wrong in found.items():
        if wrong.forgets:
            of_ops.setdefault(key[1], []).append(key)
    alike: dict[Key, Misshapen] = {}
    for keys in of_ops.values():
        sizes = {records[key].shape[-1] for key in keys}
        if len(sizes) == 1 and len({found[key].text for key in keys}) > 1:
            text = f"the number of keys stays {sizes.pop()}, as in a window, or in a cache that is full"
            alike |= {key: replace(found[key], text=text) for key in keys}
    return alike


def _misshapen(record: OpRecord, expected: tuple[int, ...]) -> Misshapen | None:
    wrong = misfit(record.op, record.shape, expected, may_be_flat=record.token_axis == 0)
    if wrong is None:
        return None
    shapes = f"shape {list(record.shape)}; this model's is {list(expected)}"
    if wrong.axes == ("key",):
        forgets = record.shape[-1] < expected[-1]
        did = (
            "some are forgotten" if forgets else "some are no position's (a padded cache, or keys of other sequences?)"
        )
        return Misshapen(f"{wrong.text} than positions so far: {did}", shapes, False, forgets)
    some_tokens = wrong.axes == ("token",) and record.shape[record.token_axis] < expected[record.token_axis]
    return Misshapen(f"{wrong.text} than this model's" if wrong.axes else wrong.text, shapes, some_tokens)
