"""Choices that differ though nobody is wrong: experts whose scores lie closer to one another than the router's noise.

Such a choice is a tie. What follows it is judged under the choice that was recorded, so nothing else need be done
about it but to say so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.errors import TraceError
from tracediff.model.graph import Graph, Op
from tracediff.names import local_name
from tracediff.numerics.evaluate import is_covered
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.layout import as_places
from tracediff.replay.replay import Replay
from tracediff.result import Local
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace


def refuse_no_choice(trace: Trace, graph: Graph) -> None:
    """Raises TraceError for choices that were not recorded whole: of fewer tokens than there are, or zeros alone, of
    several tokens or wherever the op was recorded.
    """
    records = [r for r in trace.ops.values() if r.op in graph and _chooses(graph[r.op]) and r.has_data]
    empty = {(record.step, record.op) for record in records if not trace.values(record).any()}
    written = {local_name(record.op) for record in records if (record.step, record.op) not in empty}
    for record in records:
        n_tokens = len(trace.steps[record.step].tokens)
        if record.rows is None and record.shape[0] < n_tokens:
            wrong = f"has choices for {record.shape[0]} of {n_tokens} tokens, and does not say which"
            then = "Record them for all, or name the tokens in 'rows'"
        elif (
            record.shape[-1] > 1
            and (record.step, record.op) in empty
            and (n_tokens > 1 or local_name(record.op) not in written)
        ):
            wrong = "holds zeros alone: nobody takes one expert twice"
            then = "Record it after its kernel has run, and before its buffer is used again"
        else:
            continue
        raise TraceError(f"{trace.path}: {record.op} in step {record.step} {wrong}. {then}.")


def _chooses(op: Op) -> bool:
    return is_covered(op) and KINDS[op.kind].picks is not None


@dataclass(slots=True)
class _Count:
    """Tokens of an op in all layers and steps: all, those that chose otherwise, and those of these that are ties."""

    tokens: int = 0
    otherwise: int = 0
    ties: int = 0


def ties(replay: Replay, locals_: Mapping[tuple[int, str], Local], reference: Trace | None) -> Iterator[str]:
    """What is to be said of choices other than the reference's, or than the exact scores': a sentence for each op.

    Of a choice that is a fault the verdict says more.
    """
    counts: dict[str, _Count] = {}
    for record in replay.trace.ops.values():
        op = replay.graph.ops.get(record.op)
        local = locals_.get((record.step, record.op))
        if op is not None and local and not local.faulty and KINDS[op.kind].picks:
            _add(counts.setdefault(local_name(op.name), _Count()), replay, record, op, reference)
    for name, count in counts.items():
        if count.otherwise:
            yield _said(name, count, replay.trace, reference)


def _said(name: str, count: _Count, trace: Trace, reference: Trace | None) -> str:
    whose = f"than in {reference.path}" if reference else "than its scores say"
    parts = [f"{count.ties} of these are ties: the scores lie closer to one another than the router's noise"]
    if count.otherwise > count.ties:
        parts.append(f"{count.otherwise - count.ties} follow from scores that differ")
    return (
        f"{trace.path}: {name} is another choice {whose} in {count.otherwise} of {count.tokens} tokens of all layers; "
        f"{'; '.join(parts)}. What follows is judged under the choice that was recorded."
    )


@torch.inference_mode()
def _add(count: _Count, replay: Replay, record: OpRecord, op: Op, reference: Trace | None) -> None:
    known = replay.known(record)
    scores, chosen, other = known.inputs[0], known.recorded, known.exact
    if reference:
        theirs = reference.ops.get((record.step, record.op))
        if theirs is None or not theirs.has_data or theirs.shape != record.shape or theirs.rows != record.rows:
            return
        other = torch.from_numpy(reference.values(theirs)).to(chosen).reshape(chosen.shape)
    ours, others = (_members(x, scores.shape[-1]) for x in (chosen, other))
    differ = (ours != others).any(-1)
    count.tokens += len(differ)
    count.otherwise += int(differ.sum())
    if bool(differ.any()):
        apart = scores.masked_fill(~(ours & ~others), float("-inf")).amax(-1)
        apart = apart - scores.masked_fill(~(others & ~ours), float("inf")).amin(-1)
        count.ties += int((differ & (apart.abs() <= _noise(replay, record, op, scores))).sum())


def _members(ids: Tensor, n: int) -> Tensor:
    """[..., k] places -> [..., n]: which are among them."""
    places, is_place = as_places(ids, n)
    among = torch.zeros((*ids.shape[:-1], n), device=ids.device)
    return among.scatter_add(-1, places, is_place.to(among.dtype)) > 0


def _noise(replay: Replay, record: OpRecord, op: Op, scores: Tensor) -> Tensor:
    """[T]: how far two scores may be apart by rounding alone, that of the scores and of the router's matmul.

    No gating function has a slope beyond 1: what a logit is off by, its score is at most.
    """
    bounds, name = torch.zeros_like(scores), op.inputs[0]
    while name in replay.graph:
        before = replay.trace.ops.get((record.step, name))
        if before is not None and before.has_data:
            bound = replay.known(before).bound
            bounds = bounds + (bound if bound.shape == bounds.shape else bound.amax())
        if replay.graph[name].weights or not replay.graph[name].inputs:
            break
        name = replay.graph[name].inputs[0]
    return 2 * bounds.amax(-1)
