"""Eight bits by one scale that was measured beforehand, for each layer's K and V in the cache, or for what each matmul
multiplies: it is sought for each.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.recognise import is_of_one_token
from tracediff.numerics.roundings import CALIBRATED, calibrated
from tracediff.numerics.schemes import EXACTLY, cached_in, way_in
from tracediff.replay.fitting import Fitting
from tracediff.replay.operands import matmul_of
from tracediff.replay.plan import Choice
from tracediff.replay.recompute import Recomputation
from tracediff.replay.score import COMPOSED, NOTHING, score
from tracediff.trace.format import OpRecord

_PARTS = {"weighted_values": "V cache", "scores": "K cache"}
# NMSE that eight bits leave of a sum of products: float8 of 3 bits 6e-4 of each value, integers (c / 127)^2 / 12, where
# c is the largest value over the RMS. Most mistakes leave more.
_LEAST, _MOST = 1e-5, 1e-2
# Quotients x / s of floats are the same but for a power of two, so an octave of scales is all there is to try; those of
# integers begin below the largest value, and go on to four times that. A scale that is half a step of these apart from
# the right one leaves a fifth to a third of what any other does.
_OCTAVE = 2.0 ** (np.arange(256) / 256)
_OF_INTEGERS = np.exp(np.arange(np.log(0.7), np.log(4.0), 0.003))
_OCTAVES = 2.0 ** np.arange(-1, 4)
_PROMISING = 0.9  # of what is left without: a wrong scale, which rounds elsewhere, leaves twice as much
# Four steps to either side of the best, each a quarter of those before: until a float32 is known.
_LEVELS, _FINER = 9, np.linspace(-4.0, 4.0, 33)
_NEAR = 2  # levels that are spared where a scale is known already, but for the octave


_Left = Callable[[str, Iterable[float]], Sequence[float]]  # what is left in a type of `CALIBRATED`, by each of scales


class Calibrating:
    """Seeks the scales of caches and of activations."""

    def __init__(self, recomputation: Recomputation, fitting: Fitting) -> None:
        self._recomputation, self._fitting = recomputation, fitting

    def calibrated(
        self, choice: Choice, records: Sequence[OpRecord], in_longer: Mapping[str, Sequence[Scheme]]
    ) -> Choice:
        """The choice of each layer's own, where that fits most of them; one may be mistaken. Those that its ops have
        `in_longer` steps are asked first, for few values tell a scale less well.
        """
        of_ops = {record.op: record for record in records}
        by_op: dict[str, tuple[Scheme, ...]] = {}
        for n, (name, record) in enumerate(of_ops.items()):
            known = (scheme for scheme in in_longer.get(name, ()) if self._fitting.fits(record, scheme))
            sought = filter(None, (self._of_layer(record, one) for one in self._starts(record, choice.schemes[0])))
            if (found := next(known, None) or next(sought, None)) is not None:
                by_op[name] = (found,)
            elif n > 2 * len(by_op):
                return choice
        if 2 * len(by_op) <= len(of_ops):
            return choice
        left = min(self._fitting.left(of_ops[name], one) for name, (one,) in by_op.items())
        schemes = dict.fromkeys(one for of in by_op.values() for one in of)
        return Choice((*schemes,), True, left, by_op=by_op)

    def _starts(self, record: OpRecord, scheme: Scheme) -> Sequence[Scheme]:
        """What is held in a scale may be all that the scheme rounds."""
        if self._recomputation.op_of(record).kind == "linear":
            return [way_in("activations", "f64").of(scheme)]
        start = EXACTLY if record.dtype == "f32" else scheme
        return [cached_in("f64", start, fresh=fresh) for fresh in ((False, True) if record.step else (False,))]

    def _of_layer(self, record: OpRecord, start: Scheme) -> Scheme | None:
        """The scheme with the scale that fits a record of a matmul, of scores, or of values that they weighted. (Behind
        a softmax, of both caches at once, it takes minutes and was not found.)
        """
        op, before = self._recomputation.op_of(record), self._fitting.left(record, start)
        if len(self._recomputation.segment(record)) > 1 or not _LEAST <= before <= _MOST:
            return None
        if op.kind == "linear":
            others = self._of_activations(record, start)
        elif op.kind in _PARTS:
            others = self._of_cache(record, op, start, before)
        else:
            return None
        found = min(others, key=lambda one: self._fitting.left(record, one), default=start)
        is_nearer = score(self._fitting.left(record, found), COMPOSED) > score(before)
        return found if is_nearer and self._fitting.fits(record, found) else None

    def _of_activations(self, record: OpRecord, scheme: Scheme) -> Iterator[Scheme]:
        """The scheme with the best scale of each type for what a matmul reads."""
        matmul = matmul_of(self._recomputation, record, scheme)
        if matmul is None or len(matmul.largest) == 1:  # of one token its own scale would do
            return

        def left(name: str, scales: Iterable[float]) -> Sequence[float]:
            return matmul.left([calibrated(name, scale) for scale in scales])

        for name, scale in _by_scales(float(matmul.x.abs().max()), left, matmul.left(["f64"])[0]):
            if not is_of_one_token(matmul.largest, scale):
                yield way_in("activations", calibrated(name, scale)).of(scheme)

    def _of_cache(self, record: OpRecord, op: Op, scheme: Scheme, before: float) -> Iterator[Scheme]:
        """The scheme with the best scale of each type for K or V, where it leaves less than it does, which is so much
        `before`.
        """
        _, cached = self._recomputation.inputs(record.step, op, scheme, record.rows)

        def by_scale(name: str, scale: float) -> Scheme:
            return cached_in(calibrated(name, scale), scheme, _PARTS[op.kind], scheme.scores.fresh)

        def left(name: str, scales: Iterable[float]) -> Sequence[float]:
            return [self._fitting.left(record, by_scale(name, scale)) for scale in scales]

        for name, scale in _by_scales(float(cached.exact.abs().max()), left, before):
            yield by_scale(name, scale)


def _by_scales(largest: float, left: _Left, before: float) -> Iterator[tuple[str, float]]:
    """Types with the best scale of each that leaves less than there is `before`, up to one that leaves nothing."""
    for name in ("e4m3", "e5m2", "int8") if 0 < largest < math.inf else ():
        of_name, (_, _, most), are_whole = partial(left, name), CALIBRATED[name], name == "int8"
        grid = largest / most * (_OF_INTEGERS if are_whole else _OCTAVE)
        best, least = _best(of_name, grid)
        if least > _PROMISING * before:
            continue
        apart = grid[1] / grid[0] - 1
        best = _refined(best, apart, of_name)
        if not are_whole:  # what is next to 0 has fewer digits: in another octave another scale is the best
            best, _ = _best(of_name, [_refined(best * octave, apart, of_name, _NEAR) for octave in _OCTAVES])
        yield name, best
        if of_name([best])[0] <= NOTHING:
            return
        if are_whole:
            yield "narrow int8", best


def _best(left: Callable[[Iterable[float]], Sequence[float]], scales: Iterable[float]) -> tuple[float, float]:
    """The scale that leaves least, and that."""
    scales = [*scales]
    return min(zip(scales, left(scales), strict=True), key=lambda one: one[1])


def _refined(scale: float, apart: float, left: Callable[[Iterable[float]], Sequence[float]], level: int = 0) -> float:
    """The scale that leaves least, about one that is right to a share `apart` at the first level."""
    for finer in range(level, _LEVELS):
        scale, _ = _best(left, scale * (1 + apart * 4.0**-finer * _FINER))
    return scale
