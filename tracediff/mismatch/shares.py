"""What each kind of op makes of the gap: B's put into A one kind at a time, and A's into B.

The share of a kind is the projection of what it makes on the gap: <made, gap> / <gap, gap>. Shares of small errors add
up to 1; where contributions interact, or routes flip, what a kind makes alone differs from what is gone without it.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
from torch import Tensor

from tracediff.compare.logits import log_softmax
from tracediff.files import temporary_folder
from tracediff.mismatch.lanes import STORAGE, Lanes
from tracediff.mismatch.sides import ROUTES, Known, alone, in_one_pass, label, sides_of
from tracediff.model.model import Model
from tracediff.result import Share
from tracediff.trace.reader import Trace

_SMALL = 0.01  # of the gap: kinds that make less are not put back one by one
_MOST = 8  # kinds that are
_FAR, _KIN = 16.0, 4.0  # times its noise: an op errs beyond doubt; its kin does not
_MARGIN = 2.0  # a gap of so many times what noise makes is not noise


@dataclass(frozen=True, slots=True)
class Explained:
    """Shares of the gap, largest first; the share that all ops together leave; and the mean |gap| that noise makes,
    were both sides computed as the finer one is: what a mismatch must exceed, and what no repair takes away.
    """

    shares: tuple[Share, ...]
    rest: float
    floor: float
    chance: float  # mean |gap| that roundings of the coarser side make


def explain(
    model: Model, a: Trace, b: Trace, gap: np.ndarray, progress: Callable[[float], None] = lambda fraction: None
) -> Explained:
    """The shares of `gap` [T], A's log-probabilities less B's; NaN and infinity are left out.

    Raises MismatchError for NaN or Inf in what was recorded, TraceError for a trace of another model.
    """
    with temporary_folder() as folder:
        traces = in_one_pass(a, folder, "a"), in_one_pass(b, folder, "b")
        return _Explainer(model, sides_of(model, traces), gap, progress).explained()


class _Explainer:
    def __init__(
        self, model: Model, known: tuple[Known, Known], gap: np.ndarray, progress: Callable[[float], None]
    ) -> None:
        self._graph = model.graph
        self._known = known
        self._tokens = known[0].side.trace.tokens  # of one sequence after another
        self._at = np.flatnonzero(np.isfinite(gap))
        self._gap = gap[self._at]
        self._groups = {op.name: label(op) for op in self._graph}
        self._lanes = Lanes(self._graph, (known[0].side, known[1].side), lambda name: self._groups[name])
        self._progress = progress

    def explained(self) -> Explained:
        a, b, noisy_a, noisy_b = self._run([], noisy=True, part=0)
        noise = sorted(float(np.abs(x - y).mean()) for x, y in ((noisy_a, a), (noisy_b, b)))
        other = self._single_out()
        groups = self._lanes.groups()
        a, b, *each = self._run([[group] for group in groups], part=1)
        shares = {group: self._share(a - made) for group, made in zip(groups, each, strict=True)}
        ordered = sorted((g for g in groups if abs(shares[g]) >= _SMALL), key=lambda g: -abs(shares[g]))[:_MOST]
        without = [[g for g in groups if g != group] for group in ordered]
        first = [ordered[: n + 1] for n in range(len(ordered))]
        a, b, *more = self._run([*without, *first], part=2)
        last = [1 - self._share(a - made) - self._rest(a, b) for made in more[: len(ordered)]]
        added = np.diff([0.0, *(self._share(a - made) for made in more[len(ordered) :])])
        found = tuple(
            self._worded(group, shares[group], last[n], float(added[n]), other) for n, group in enumerate(ordered)
        )
        return Explained(found, self._rest(a, b), _MARGIN * math.sqrt(2) * noise[0], noise[1])

    def _rest(self, a: np.ndarray, b: np.ndarray) -> float:
        return 1 - self._share(a - b)

    def _run(self, of_b: list[list[str]], part: int, noisy: bool = False) -> list[np.ndarray]:
        """The log-probabilities of the tokens of the gap, of A, of B and of each mixture."""
        logits = self._lanes.run(of_b, noisy, lambda fraction: self._progress((part + fraction) / 3))
        return [self._logprobs(rows) for rows in logits]

    def _logprobs(self, logits: Tensor) -> np.ndarray:
        return np.array([log_softmax(logits[i - 1].numpy())[self._tokens[i]] for i in self._at])

    def _share(self, made: np.ndarray) -> float:
        whole = float(self._gap @ self._gap)
        return float(made @ self._gap) / whole if whole else 0.0

    def _single_out(self) -> dict[str, str]:
        """Ops with a weight that err where their kin do not: groups of their own. By op, the side that errs."""
        erring, found = self._lanes.erring, {}
        for side, name in (("A", 0), ("B", 1)):
            of_side = {op: excess for (which, op), excess in erring.items() if which == name}
            for op in self._graph:
                kin = [of_side.get(o, 0.0) for o, group in self._groups.items() if group == label(op) and o != op.name]
                if op.weights and kin and of_side.get(op.name, 0.0) > _FAR and median(kin) < _KIN:
                    found[op.name] = side
        for op_name in found:
            self._groups[op_name] = alone(self._graph[op_name])
        return found

    def _flips(self, ops: Iterable[str]) -> set[int]:
        """The tokens for which the sides chose other experts anywhere."""
        found: set[int] = set()
        for op in ops:
            chosen = (_chosen(known, op) for known in self._known)
            found |= {token for token, (x, y) in enumerate(zip(*chosen, strict=False)) if x != y}
        return found

    def _worded(self, group: str, alone_: float, last: float, added: float, other: dict[str, str]) -> Share:
        if group == STORAGE:
            stored = [_storages(known) for known in self._known]
            return Share(group, "storage", (), alone_, last, added, *stored)
        ops = [op for op in self._graph if self._groups[op.name] == group]
        names = tuple(op.name for op in ops)
        if len(names) == 1 and names[0] in other:
            said = {"A": "with the file's weight", "B": "with the file's weight"}
            said[other[names[0]]] = f"not with the file's {ops[0].weights[0].name}: stale, or loaded wrongly"
            return Share(group, "stale_weights", names, alone_, last, added, said["A"], said["B"])
        if group == ROUTES and (flips := self._flips(names)):
            flipped = f"{len(flips)} of {len(self._tokens)} tokens go to other experts"
            return Share(group, "routes_flipped", names, alone_, last, added, flipped, flipped)
        a, b = (known.how(ops) for known in self._known)
        return Share(group, _slug(a, b), names, alone_, last, added, a, b)


def _chosen(known: Known, op: str) -> list[set[int]]:
    """Of each token what was chosen for it; nothing where that was not recorded."""
    trace, found = known.side.trace, []
    for number, step in trace.steps.items():
        record = trace.ops.get((number, op))
        if record is None or not record.has_data or record.rows is not None:
            return []
        found += [set(row) for row in trace.values(record).reshape(len(step.tokens), -1).astype(int).tolist()]
    return found


def _storages(known: Known) -> str:
    types = [way.storage for way in known.side.ways.values()]
    return max(set(types), key=types.count)


def _slug(a: str, b: str) -> str | None:
    """A name for machines of what one side does and the other does not."""
    phrases = sorted((*_phrases(a, b), *_phrases(b, a)), key=lambda phrase: not phrase.startswith("sums"))
    return re.sub(r"\W+", "_", phrases[0]) if phrases else None


def _phrases(of: str, other: str) -> Iterator[str]:
    yield from (part for part in of.split(", ") if part != "exact" and part not in other.split(", "))
