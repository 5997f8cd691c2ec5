"""Regions of an output in the op's own axes: which they are, and in words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracediff.diagnose.solve.words.nouns import OF_TOKENS
from tracediff.english import nth, plural, ranges


@dataclass(frozen=True, slots=True)
class Along:
    """Some places along an axis: those from `start` to before `stop`, every `step`; or a list. An open end reaches as
    far as the axis does, in longer steps too; that axis has a `size` where it is known.
    """

    axis: int
    start: int = 0
    stop: int | None = None
    step: int = 1
    listed: tuple[int, ...] = ()
    size: int = 0

    def places(self, size: int) -> np.ndarray:
        """Along an axis of this size."""
        if self.listed:
            return np.array([place for place in self.listed if place < size], int)
        return np.arange(self.start, size if self.stop is None else min(self.stop, size), self.step)

    def words(self, name: str) -> str:
        """As in `channels 32 to 63`, `token 8`, `every 2nd head from 1 on`."""
        several = plural(name)
        if self.listed:
            return f"{several} {ranges(self.listed)}"
        if self.step > 1:
            end = " on" if self.stop is None else f" to {self.stop - 1}"
            return f"every {nth(self.step)} {name} from {self.start}{end}"
        stop = self.size if self.stop is None and self.size == self.start + 1 and name not in OF_TOKENS else self.stop
        if stop is None:
            return f"{several} from {self.start} on"
        return f"{name} {self.start}" if stop == self.start + 1 else f"{several} {self.start} to {stop - 1}"

    @property
    def bits(self) -> float:
        """What it takes to say it."""
        return 12.0 * max(1, len(self.listed)) if self.listed else 8.0 + 8.0 * (self.stop is not None)


@dataclass(frozen=True, slots=True)
class Region:
    """The elements that are in all of these places, each along another axis; or, where `flat`, values one after the
    other in memory.
    """

    along: tuple[Along, ...]
    flat: bool = False

    def mask(self, shape: Sequence[int]) -> np.ndarray:
        """Bool of the shape."""
        if self.flat:
            inside = np.zeros(int(np.prod(shape)), bool)
            inside[self.along[0].places(inside.size)] = True
            return inside.reshape(shape)
        inside = np.ones(shape, bool)
        for along in self.along:
            there = np.zeros(shape[along.axis], bool)
            there[along.places(shape[along.axis])] = True
            inside &= there.reshape([-1 if axis == along.axis else 1 for axis in range(len(shape))])
        return inside

    def words(self, axes: Sequence[str]) -> str:
        """In the axes' names."""
        if self.flat:
            return self.along[0].words("value")
        return ", ".join(along.words(axes[along.axis]) for along in self.along)

    @property
    def bits(self) -> float:
        """What it takes to say it."""
        return sum(along.bits for along in self.along)


def around(mask: np.ndarray) -> list[Region]:
    """The smallest regions that hold what is true in a mask: by its axes, and in memory. Empty where nothing is: all
    may be off together, and no value beyond its own bound.
    """
    if not mask.any():
        return []
    by_axes = []
    for axis, size in enumerate(mask.shape):
        there = np.flatnonzero(mask.any(tuple(a for a in range(mask.ndim) if a != axis)))
        if len(there) < size:
            by_axes.append(_along(axis, there, size))
    found = [Region(tuple(by_axes))] if by_axes else []
    there = np.flatnonzero(mask.ravel())
    if len(there) and len(there) == there[-1] - there[0] + 1 < mask.size:
        found.append(Region((_along(0, there, mask.size),), flat=True))
    return found


def widest(region: Region, fits: np.ndarray) -> Region:
    """The region without gaps and without the axes along which it need not end: all values `fits` there as well."""
    for along in region.along:
        ends = min(along.listed, default=0), max(along.listed, default=0)
        if along.listed and not region.flat:
            whole = _along(along.axis, np.arange(ends[0], ends[1] + 1), along.size)
            wider = replace(region, along=tuple(whole if other is along else other for other in region.along))
            if fits[wider.mask(fits.shape)].all():
                return widest(wider, fits)
    for along in region.along if len(region.along) > 1 else ():
        wider = replace(region, along=tuple(other for other in region.along if other is not along))
        if fits[wider.mask(fits.shape)].all():
            return widest(wider, fits)
    return region


def _along(axis: int, there: np.ndarray, size: int) -> Along:
    steps = set(np.diff(there).tolist())
    if len(steps) > 1:
        return Along(axis, listed=tuple(there.tolist()), size=size)
    step = steps.pop() if steps else 1
    stop = None if there[-1] + step >= size and there[0] > 0 else int(there[-1]) + 1
    return Along(axis, int(there[0]), stop, step, size=size)
