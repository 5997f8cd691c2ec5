"""Maps of slices along an axis: which is found where, in closed form and in words, and by their values.

Heads reversed, rows repeated or exchanged, a slot of a cache that is stale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from tracediff.english import nth, plural

ZERO = -1  # in a map: the slice is 0
_MATCHED = 1 << 22  # values of an output that are matched: of larger ones some slices of the other axes
_AROUND = 3  # slices on either side of where a sum of one is sought among those of all
_LISTED = 12  # places of a list that are told
_SLOTS = 16  # of a cache, that are sought as the first that was written elsewhere
_OF_SLOTS = ("early", "late", "overwritten")
_FEW = 8  # slices: heads, rather than channels
LOOK_AT_CACHE = "which slots of the cache are written, when, and which are read"
_BITS, _NUMBER, _EACH = 12.0, 4.0, 12.0  # of a map in closed form, of a number in it, and of each place of a list


@dataclass(frozen=True, slots=True)
class Map:
    """Which slice along an axis is found at each place: `of(n)` for an axis of n; `words` say it of a noun."""

    kind: str
    numbers: tuple[int, ...] = ()

    def of(self, n: int) -> np.ndarray:
        """For each of `n` places the place that its values are from; -1 where they are 0. Of shorter axes, as in steps
        of one token, places that are from one beyond the last stay.
        """
        source = self._of(n)
        return np.where(source < n, source, np.arange(n))

    def _of(self, n: int) -> np.ndarray:
        at = np.arange(n)
        match self.kind, self.numbers:
            case "reversed", ():
                return at[::-1].copy()
            case "shifted", (by,):
                return np.where((at + by >= 0) & (at + by < n), at + by, ZERO)
            case "rotated", (by,):
                return (at + by) % n
            case "modulo", (m,):
                return at % m
            case "repeated", (m,):
                return at // m
            case "strided", (m,):
                return at * m % n
            case "firsts", (m,):
                return at // m * m
            case "transposed", (m,):
                return at.reshape(m, -1).T.ravel() if n % m == 0 else at
            case "all", (one,):
                return np.full(n, one)
            case "held", (by,):
                return np.clip(at + by, 0, n - 1)
            case "capped", (last,):
                return np.minimum(at, last)
            case "every", (first, step, by):
                return np.where(
                    (at >= first) & ((at - first) % step == 0) & (at + by >= 0) & (at + by < n), at + by, at
                )
            case "last", (by,):
                return np.where(at == max(n - 1, by), at - by, at)
            case "early", (first,):  # from there on each is stored a slot before its own
                return np.where((at < first) | (n == first + 1), at, np.where(at < n - 1, at + 1, ZERO))
            case "late", (first,):
                return np.where(at < first, at, np.where(at == first, ZERO, at - 1))
            case "overwritten", (first,):
                return np.where(at < first, at, np.minimum(at + 1, n - 1))
            case "doubled", ():  # in steps that add one each
                return np.where(at == n - 2, n - 1, at)
            case "prepended", (first,):
                return np.concatenate((at[first:][::-1], at[:first]))
            case "within", (size,):  # reversed within groups
                return at // size * size + np.minimum(size, n - at // size * size) - 1 - at % size
        listed = dict(zip(self.numbers[::2], self.numbers[1::2], strict=True))
        return np.array([listed.get(i, i) for i in range(n)])

    def words(self, noun: str, n: int) -> str:
        """What it does to the slices called so, of which there are `n`."""
        all_of = plural(noun)
        match self.kind, self.numbers:
            case "reversed", ():
                return f"{all_of} reversed"
            case "shifted", (by,):
                other = f"the {nth(by)} after it" if by > 0 else f"the {nth(-by)} before it"
                end = f"the last {by} are" if by > 1 else "the last is" if by == 1 else ""
                end = end or (f"the first {-by} are" if by < -1 else "the first is")
                return f"each {noun} has the values of {other}, {end} 0"
            case "rotated", (by,):
                return f"{all_of} rotated: {noun} {max(0, -by)} has the values of {noun} {max(0, by)}, and so on around"
            case "modulo", (m,) if n == m + 1:
                return f"{noun} {m} has the values of {noun} 0"
            case "modulo", (m,):
                return f"{all_of} from {m} on repeat the first {m}"
            case "repeated", (m,):
                return f"{all_of} repeated {m} times each: {noun} i has the values of {noun} i // {m}"
            case "firsts", (m,):
                return f"every {noun} has the values of the first in its {m}"
            case "strided", (m,):
                return f"{noun} i has the values of {noun} i * {m} % {n}"
            case "transposed", (m,):
                return f"{all_of} transposed, as {m} by {n // m}"
            case "all", (one,) if one == ZERO:
                return "all values are 0"
            case "all", (one,):
                return f"every {noun} has the values of {noun} {one}"
            case "held", (by,):
                other, end = (f"the {nth(by)} after", "last") if by > 0 else (f"the {nth(-by)} before", "first")
                ends = f"the {end} {noun} is right" if abs(by) == 1 else f"and the {end} {abs(by)} those of the {end}"
                return f"each {noun} has the values of {other} it, {ends}"
            case "capped", (last,):
                return f"{all_of} from {last + 1} on have the values of {noun} {last}"
            case "every", (first, step, by):
                other = f"the {nth(by)} after it" if by > 0 else f"the {nth(-by)} before it"
                return f"every {nth(step)} {noun} from {first} on has the values of {other}"
            case "last", (by,):
                return f"the last {noun} has the values of the {nth(by)} before it"
            case "early", (first,):
                return f"from {noun} {first} on each has the values of the next, the last is 0: stored a slot early"
            case "late", (first,) if first == n - 1:
                return f"{noun} {first}, the last, is 0"
            case "late", (first,):
                return f"{noun} {first} is 0, each after it has the values of the one before: stored a slot late"
            case "overwritten", (first,):
                return f"from {noun} {first} on each has the values of the next, but the last: that overwrites it"
            case "prepended", (first,):
                return f"each {noun} from {first} on is put before those that are there already, not after them"
            case "doubled", ():
                return f"the last {noun} but one has the values of the last"
            case "within", (size,):
                return f"{all_of} reversed in each group of {size}"
        pairs = list(zip(self.numbers[::2], self.numbers[1::2], strict=True))
        if len(pairs) == 2 and pairs[0] == pairs[1][::-1]:
            return f"{all_of} {pairs[0][0]} and {pairs[0][1]} are exchanged"
        return _listed(noun, pairs)

    @property
    def bits(self) -> float:
        """What it takes to say it."""
        return _EACH * len(self.numbers) / 2 if self.kind == "listed" else _BITS + _NUMBER * len(self.numbers)


def _listed(noun: str, pairs: Sequence[tuple[int, int]]) -> str:
    """Runs of places that are from others: channels 256 to 767 are 0 to 511, then 0 to 255; or from one."""
    runs: list[list[tuple[int, int]]] = []
    for to, source in pairs:
        if runs and to == runs[-1][-1][0] + 1 and _goes_on(runs[-1], source):
            runs[-1].append((to, source))
        else:
            runs.append([(to, source)])
    return ", ".join(_run(noun, run) for run in runs)


def _goes_on(run: Sequence[tuple[int, int]], source: int) -> bool:
    """Whether what comes next is from there: from one more than before, or from the same place, as all of them are."""
    sources = [one for _, one in run]
    step = 0 if sources[-1] == ZERO else sources[1] - sources[0] if len(run) > 1 else source - sources[0]
    return step in (0, 1) and source == sources[-1] + step


def _run(noun: str, run: Sequence[tuple[int, int]]) -> str:
    """Places that come one after the other, and where they are from."""
    (first, source), (last, end) = run[0], run[-1]
    alone = first == last
    place = f"{noun} {first}" if alone else f"{plural(noun)} {first} to {last}"
    if source == ZERO:
        return f"{place} {'is' if alone else 'are'} 0"
    origin = f"{noun} {source}" if source == end else f"{plural(noun)} {source} to {end}"
    return f"{place} {'has' if alone else 'have'} the values of {origin}"


def named(source: np.ndarray, *, of_keys: bool) -> Sequence[Map]:
    """The map in closed form, or as a list where that is short; none for the identity, or what is neither. What is in
    the last place may be there by its number, or in the last place of every step: both. So is what is in the last but
    one. Keys, of which a step has some more than the one before, may be put before these: of one it is a rotation.
    """
    n = len(source)
    wrong = np.flatnonzero(source != np.arange(n))
    if not len(wrong):
        return []
    first = source[0]
    candidates = [Map("reversed"), Map("all", (int(first),))]
    shift = {int(s - i) for i, s in enumerate(source) if s != ZERO}
    candidates += [Map("shifted", (by,)) for by in shift if len(shift) == 1]
    candidates += [Map("rotated", (int(first) if first <= n // 2 else int(first) - n,))] if first > 0 else []
    middle = int(source[n // 2]) - n // 2
    candidates += [Map("held", (middle,))] if middle else []
    candidates += [Map("modulo", (m,)) for m in {int(source.max()) + 1} if m < n]
    repeats = np.flatnonzero(source != first)
    candidates += [Map("repeated", (int(repeats[0]),))] if len(repeats) and repeats[0] > 1 else []
    candidates += [Map(kind, (int(wrong[0]),)) for kind in ("early", "late", "overwritten")]
    capped = [Map("capped", (int(source.max()),))]
    candidates += capped if len(wrong) > 1 else []
    candidates += [Map("firsts", (m,)) for m in range(2, n) if n % m == 0]
    candidates += [Map("transposed", (m,)) for m in range(2, n) if n % m == 0]
    candidates += [Map("within", (int(first) + 1,))] if first > 0 else []
    candidates += [Map("strided", (int(source[1]),))] if n > 1 and source[1] > 1 else []
    if len(wrong) > 2:
        first, step = int(wrong[0]), int(wrong[1] - wrong[0])
        candidates += [Map("every", (first, step, int(source[first]) - first))] if step > 1 else []
    prepended = [Map("prepended", (n - int(np.argmax(source == 0)),))] if of_keys else []
    candidates += prepended
    for one in candidates:
        if (one.of(n) == source).all():  # what overwrites one place may do so in every step, or once for all
            also = {Map("overwritten", (n - 2,)): [Map("doubled")], Map("rotated", (-1,)): prepended}
            return [*also.get(one, ()), one]
    runs = 1 + sum(source[b] - source[a] != b - a for a, b in pairwise(wrong))
    listed = Map("listed", tuple(int(x) for i in wrong for x in (i, source[i])))
    last = [Map("last", (n - 1 - int(source[-1]),))] if wrong[0] == n - 1 and source[-1] != ZERO else []
    last += capped if last and source[-1] == n - 2 else []
    return [*last, listed] if runs <= _LISTED else []


@lru_cache(64)
def usual_of(n: int) -> Sequence[Map]:
    """Maps of an axis of `n`, without those that are the same."""
    sizes = [k for k in range(1, n) if n <= _FEW or k <= 4 or n % k == 0 or n - k == 1]
    every = [Map("reversed"), Map("last", (1,)), Map("all", (0,)), Map("all", (n - 1,))]
    for k in sizes:
        every += (Map(kind, (k,)) for kind in ("modulo", "repeated", "transposed", "within", "strided"))
        every += (Map(kind, (by,)) for kind in ("rotated", "shifted", "held") for by in (k, -k))
    if n <= _FEW:
        every += (Map("listed", (a, b, b, a)) for a, b in combinations(range(n), 2))
    distinct = {tuple(one.of(n).tolist()): one for one in reversed(every)}
    distinct.pop(tuple(range(n)), None)
    return list(reversed(distinct.values()))


def of_slots(n: int) -> Iterator[Map]:
    """Maps of the slots of a cache of which the last few were written elsewhere, or never but by the first of them."""
    yield from (Map(kind, (k,)) for k in range(max(1, n - _SLOTS), n) for kind in _OF_SLOTS)
    yield from (Map("capped", (k,)) for k in range(max(0, n - _SLOTS), n - 1))
    yield from (Map("prepended", (k,)) for k in range(max(1, n - _SLOTS), n))
    yield from [Map("doubled")] if n > 2 else []


def by_any_number(n: int) -> Iterator[Map]:
    """Maps of an axis of `n` in closed form, by each number there is."""
    yield from (Map("all", (k,)) for k in range(n))
    for k in range(1, n):
        yield from (Map(kind, (k,)) for kind in ("modulo", "repeated") if k > 1)
        yield from (Map("shifted", (by,)) for by in (k, -k))
        yield Map("rotated", (k if k <= n // 2 else k - n,))


def matched(there: np.ndarray, right: np.ndarray, near: np.ndarray, axis: int) -> np.ndarray | None:
    """For each slice of `there` along the axis the slice of `right` that it is, -1 where it is 0; None where some slice
    is none.
    """
    a, b, within = (np.moveaxis(_some(x, axis), axis, 0).reshape(x.shape[axis], -1) for x in (there, right, near))
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return None
    source = np.arange(len(a))
    wrong = np.flatnonzero((np.abs(a - b) > within).any(1))
    zero = wrong[~a[wrong].any(1)]
    source[zero] = ZERO
    wrong = np.setdiff1d(wrong, zero)
    if len(wrong):
        # A sum of a slice that hardly any two have alike tells which to compare.
        mix = np.random.default_rng(0).standard_normal(a.shape[1])
        keys, sought = b @ mix, a[wrong] @ mix
        order = np.argsort(keys, kind="stable")
        at = np.searchsorted(keys[order], sought)
        for by in range(-_AROUND, _AROUND):
            found = order[np.clip(at + by, 0, len(order) - 1)]
            fits = (np.abs(a[wrong] - b[found]) <= within[wrong]).all(1)
            source[wrong[fits]] = found[fits]
            wrong, at = wrong[~fits], at[~fits]
    if len(wrong):
        return None
    return source if a.shape[1] > 1 or len(a) > 2 else None


def _some(x: np.ndarray, axis: int) -> np.ndarray:
    """Of a large output some slices along another axis: they tell which places along this one are which."""
    other = 0 if axis else x.ndim - 1
    n = x.shape[other]
    some = min(n, max(_FEW, n * _MATCHED // x.size))
    return x if some == n else np.take(x, np.linspace(0, n - 1, some).astype(int), other)


def slices(x: Tensor, how: Map, axis: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor whose slices along an axis are elsewhere, seen in a shape, of which an axis may be -1; () as it is."""
    seen = x.reshape(shape) if shape else x
    source = torch.from_numpy(how.of(seen.shape[axis])).to(x.device)
    moved = seen.index_select(axis, source.clamp(min=0))
    keep = (source != ZERO).reshape([-1 if a == axis else 1 for a in range(seen.ndim)])
    return (moved * keep).reshape(x.shape)
