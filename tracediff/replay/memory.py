"""How much memory a process takes that judges a trace: at most, and said before it does."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from tracediff.replay.look import PART
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

# What Python, torch and this package take, and the weights that stay dequantised; and how many float64 values are
# there at once for each of what is judged: noise, bounds, what they are made of, and memory that was freed and is in
# pieces (benchmarks/scale.py measures both: 15 of 3.7 million scores).
_ALWAYS, _TIMES = 450e6, 16


class Need(NamedTuple):
    """Bytes of memory, and the op whose record takes most of it."""

    n_bytes: float
    op: str

    def __str__(self) -> str:
        return f"up to {self.n_bytes / 1e9:.1f} GB of memory, most of it for {self.op}"


def needed(replays: Sequence[Replay]) -> Need:
    """What a process takes that judges the records of these together: that of the largest of each, with all that is
    recomputed for it.
    """
    records = [(_values(replay, record), record.op) for replay in replays for record in chain(*replay.records.values())]
    n_values, op = max(records, default=(0, "nothing"))
    return Need(memory_of(n_values * len(replays)), op)


def memory_of(n_values: int) -> float:
    """Bytes that a process takes at most which judges so many values at once."""
    return _ALWAYS + 8 * _TIMES * n_values


def _values(replay: Replay, record: OpRecord) -> int:
    """How many values are there at once."""
    *before, _ = replay.segment(record)
    if before:
        return record.size + replay.n_before(record)
    return min(record.size, PART) if replay.graph[record.op].kind == "linear" else record.size
