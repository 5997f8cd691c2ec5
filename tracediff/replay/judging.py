"""The records of a model's traces judged together: op by op, so that each weight is read once for all steps and sides.

Judging is a pure function of plan, trace and weights: layers may be judged in any order.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import NamedTuple

import numpy as np
import torch

from tracediff.model.model import Model
from tracediff.names import layer_of
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.schemes import scheme_named
from tracediff.replay.look import Look, look_together
from tracediff.replay.misshapen import misshapen
from tracediff.replay.plan import Plan
from tracediff.replay.replay import IsMistaken, Replay
from tracediff.result import Local
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

# Tokens of a matmul that are computed at once: of more a token takes as long, and the memory grows.
_TOKENS = 512


_KEEP = 128 << 20  # bytes of weights that stay dequantised: all of a small model, a layer or two of a real one


@dataclass(frozen=True, slots=True)
class Subject:
    """A trace to be judged: values that it `held` of weights in place of the file's, and its arithmetic if given.

    `wrong` are others that it recorded, which no op should have been computed with, `mistakes` the known ones by which
    these are wrong.
    """

    trace: Trace
    held: Mapping[str, np.ndarray]
    arithmetic: str | None = None
    wrong: Mapping[str, np.ndarray] = field(default_factory=dict)
    mistakes: Mapping[str, str] = field(default_factory=dict)


def replays_of(
    model: Model,
    subjects: Sequence[Subject],
    plans: Iterable[Plan | None] = repeat(None),
    device: str = "cpu",
    is_mistaken: IsMistaken | None = None,
    only: Collection[str] | None = None,
) -> list[Replay]:
    """Replays of traces of one model, which read its weights together. Records of other shapes than the model's ops are
    left out of them. Values are computed on this device. It may be asked which records a mistake explains; and records
    of some ops `only` be planned and judged.

    Raises TraceError for a trace of another model, or one whose positions leave a gap.
    """
    weights = model.weights(device=device, keep_bytes=_KEEP)
    replays = []
    for subject, plan in zip(subjects, plans, strict=False):
        wrong = misshapen(subject.trace, model.graph)
        trace = subject.trace.without(wrong) if wrong else subject.trace
        scheme = scheme_named(subject.arithmetic) if subject.arithmetic else None
        replays.append(Replay(trace, model.graph, weights.holding(subject.held), scheme, plan, is_mistaken, only))
    return replays


class JudgedRecord(NamedTuple):
    """A record of one of several replays, and its local error."""

    side: int
    record: OpRecord
    local: Local


def judge_all(
    replays: Sequence[Replay], progress: Callable[[float], None] = lambda fraction: None
) -> Iterator[JudgedRecord]:
    """Every record with data: ops in the graph's order, of each op the replays, of these the steps."""
    n, done = n_records(replays), 0
    for ops in layers(replays):
        for one in judge_ops(replays, ops):
            yield one
            done += 1
            progress(done / n)
    for replay in replays:
        replay.forget(all_of_it=True)


def n_records(replays: Sequence[Replay]) -> int:
    """How many records there are to judge."""
    return sum(len(records) for replay in replays for records in replay.records.values())


def layers(replays: Sequence[Replay]) -> list[tuple[str, ...]]:
    """The ops that have records, in the graph's order: those of a layer, or between two, together."""
    names = [op.name for op in replays[0].graph if any(op.name in replay.records for replay in replays)]
    return [tuple(ops) for _, ops in groupby(names, layer_of)]


@torch.inference_mode()
def judge_ops(replays: Sequence[Replay], ops: Sequence[str]) -> Iterator[JudgedRecord]:
    """The records of these ops, which follow one another."""
    for name in ops:
        asked = [(side, record) for side, replay in enumerate(replays) for record in replay.records.get(name, ())]
        for batch in _batches(replays, asked):
            looked = _looked(replays, batch)
            for (side, record), looks in zip(batch, looked, strict=True):
                yield JudgedRecord(side, record, replays[side].judge(record, looks))
        for replay in replays:
            replay.forget_until(name)


def _batches(replays: Sequence[Replay], asked: Sequence[tuple[int, OpRecord]]) -> Iterator[list[tuple[int, OpRecord]]]:
    """So many at a time as are computed at once."""
    batch: list[tuple[int, OpRecord]] = []
    n = 0
    for side, record in asked:
        n_tokens = len(replays[side].trace.steps[record.step].tokens)
        if batch and n + n_tokens > _TOKENS:
            yield batch
            batch, n = [], 0
        batch.append((side, record))
        n += n_tokens
    if batch:
        yield batch


def _looked(replays: Sequence[Replay], batch: Sequence[tuple[int, OpRecord]]) -> list[dict[Scheme, Look]]:
    """What is seen of each, looked at together where that spares anything."""
    looked: list[dict[Scheme, Look]] = [{} for _ in batch]
    if len(batch) > 1 and KINDS[replays[0].graph[batch[0][1].op].kind].together:
        places = [(i, asked) for i, (side, record) in enumerate(batch) for asked in replays[side].asks(record)]
        looks = look_together([asked for _, asked in places]) if places else []
        for (i, asked), look in zip(places, looks, strict=True):
            looked[i][asked.scheme] = look
    return looked
