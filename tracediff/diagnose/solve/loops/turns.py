"""Loops that compute in place, run all at once: whether one turn of them touches what another has stored."""

import numpy as np

_NOBODY, _SEVERAL = -1, -2


class OutOfTurnError(Exception):
    """What comes out depends on the order of turns, which running them all at once does not keep."""


class Touched:
    """Which turn stored each element of an output, and which read it."""

    def __init__(self, n: int) -> None:
        self._stored, self._read = (np.full(n, _NOBODY) for _ in range(2))

    def store(self, places: np.ndarray, turns: np.ndarray) -> None:
        """Raises OutOfTurnError where another turn has stored or read one of these."""
        places, turns = self._inside(places, turns)
        _check(self._stored[places], turns)
        _check(self._read[places], turns)
        self._stored[places] = turns

    def read(self, places: np.ndarray, turns: np.ndarray) -> None:
        """Raises OutOfTurnError where another turn has stored one of these."""
        places, turns = self._inside(places, turns)
        _check(self._stored[places], turns)
        before = self._read[places]
        self._read[places] = turns
        several = (self._read[places] != turns) | ((before != _NOBODY) & (before != turns))
        self._read[places[several]] = _SEVERAL

    def _inside(self, places: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of the output's, each with its turn."""
        places, turns = np.broadcast_arrays(places, turns)
        inside = (places >= 0) & (places < len(self._stored))
        return places[inside], turns[inside]


def _check(before: np.ndarray, turns: np.ndarray) -> None:
    if ((before != _NOBODY) & (before != turns)).any():
        raise OutOfTurnError
