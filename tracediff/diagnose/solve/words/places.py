"""Maps of places in words: what one loop reads or stores against what belongs there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tracediff.diagnose.solve.loops.accesses import Access
from tracediff.diagnose.solve.words.nouns import OF_TOKENS
from tracediff.english import nth, plural

_LISTED = 8  # values of a map that is told one by one


@dataclass(frozen=True, slots=True)
class Difference:
    """How the places of two accesses differ. One of these is set: an `axis`, along which what is read of a variable
    (`of`) is `new` where `old` belongs; a `shift` of all by so many values; a `stride` from one value of a variable
    to the next, another where one belongs; or none, where only the formula tells.
    """

    axis: str = ""
    of: str = ""
    new: str = ""
    old: str = ""
    shift: int = 0
    stride: tuple[str, int, int] | None = None


def difference(
    a: Access,
    b: Access,
    axes: Sequence[tuple[str, int]],
    nouns: Mapping[str, str],
    known: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Difference:
    """From the right access `a` to `b`, in an array with these axes; `nouns` say what each loop variable counts.
    `known` are what else places may be there, by their words.
    """
    if a.at.shape != b.at.shape:
        return Difference()
    along_a, along_b = _coordinates(a.at, axes), _coordinates(b.at, axes)
    by = b.at - a.at
    if len(axes) == 1 and (by == by[0]).all():
        return Difference(shift=int(by[0]))
    differ = [i for i in range(len(axes)) if (along_a[i] != along_b[i]).any()]
    if len(differ) == 1:
        i = differ[0]
        for name, values in a.loops.items():
            old, new = closed(name, values, along_a[i]), closed(name, values, along_b[i], known)
            if old and new:
                return Difference(axes[i][0], f"{nouns[name]} {name}", new, old)
    if (by == by[0]).all():
        return Difference(shift=int(by[0]))
    return Difference(stride=_stride(a, b, nouns))


def _coordinates(at: np.ndarray, axes: Sequence[tuple[str, int]]) -> list[np.ndarray]:
    found = []
    for _, size in reversed(axes[1:]):
        found.append(at % size)
        at = at // size
    return [at, *reversed(found)]


def closed(
    name: str, values: np.ndarray, of: np.ndarray, known: Mapping[str, np.ndarray] = MappingProxyType({})
) -> str:
    """`of` as a function of a variable that takes these values, as in "h // 4"; empty where it depends on more."""
    at, first = np.unique(values, return_index=True)
    f = of[first]
    if (f[np.searchsorted(at, values)] != of).any():
        return ""
    if (f == f[0]).all():
        return str(f[0]) if len(at) > 1 else ""
    if words := next((words for words, places in known.items() if (places == of).all()), ""):
        return words
    steps = np.unique(np.diff(f) // np.maximum(np.diff(at), 1))
    if len(steps) == 1 and (f == f[0] + steps[0] * (at - at[0])).all():
        k, c = int(steps[0]), int(f[0] - steps[0] * at[0])
        term = {1: name, -1: f"-{name}"}.get(k, f"{k} * {name}")
        if k == -1:
            return f"{c} - {name}"
        return term if not c else f"{term} {'+' if c > 0 else '-'} {abs(c)}"
    for m in range(2, int(at[-1]) + 2):
        if (f == at % m).all():
            return f"{name} % {m}"
        if (f == at // m).all():
            return f"{name} // {m}"
    return f"{', '.join(map(str, f))} in turn" if len(at) <= _LISTED else ""


def _stride(a: Access, b: Access, nouns: Mapping[str, str]) -> tuple[str, int, int] | None:
    """The one variable by which both move on by a constant, but not by the same."""
    ours, theirs = _linear(a), _linear(b)
    if ours is None or theirs is None:
        return None
    differ = [name for name in a.loops if ours[name] != theirs[name]]
    if len(differ) != 1 or ours[""] != theirs[""]:
        return None
    return nouns[differ[0]], theirs[differ[0]], ours[differ[0]]


def _linear(access: Access) -> dict[str, int] | None:
    """The coefficients by which the places follow the variables, "" for the constant; None where they do not."""
    columns = [np.ones(len(access.at)), *access.loops.values()]
    solution, *_ = np.linalg.lstsq(np.stack(columns, -1).astype(float), access.at.astype(float), rcond=None)
    whole = np.round(solution).astype(int)
    if (sum(k * np.asarray(x).astype(int) for k, x in zip(whole, columns, strict=True)) != access.at).any():
        return None
    return dict(zip(("", *access.loops), map(int, whole), strict=True))


def taken(noun: str, old: range | None, new: range | None, follows: bool) -> tuple[str, str, bool] | None:
    """What another count takes in words, what that leaves out or goes beyond, and whether it takes one thing alone.
    None where that is not known. Of tokens each step has another number: what is said is true of all of them, be it
    that the count `follows` theirs or not.
    """
    if old is None or new is None or not len(old):
        return None
    if not len(new):
        return f"no {noun}", "", True
    one, last = len(new) == 1, new[-1]
    if new.step > 1:
        return f"only every {nth(new.step)} {noun}", f", from {new[0]} to {last}", True
    said = f"{noun} {new[0]}" if one else f"{plural(noun)} {new[0]} to {last}"
    n_first, n_last = new[0] - old[0], old[-1] - last
    if n_last < 0:
        return f"all {plural(noun)}" if noun in OF_TOKENS else said, f", {-n_last} beyond the last", one
    pairs = ((n_first, "the first"), (n_last, "the last"))
    left = " and ".join(words if n == 1 else f"{words} {n}" for n, words in pairs if n > 0)
    if noun in OF_TOKENS:
        return (f"all {plural(noun)} but {left}", "", False) if follows else (f"only {said}", "", one)
    return f"only {said}", f": {left} {'is' if n_first + n_last == 1 else 'are'} left out" if left else "", one
