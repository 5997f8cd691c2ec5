"""What every format is read as: named entries whose values are loaded one at a time."""

import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.trace.format import STORAGE, Statistics

# What numpy, zipfile and torch raise for a file that is not what it should be (numpy parses headers as Python).
_BROKEN: tuple[type[Exception], ...] = (
    OSError, ValueError, EOFError, RuntimeError, SyntaxError, LookupError, ArithmeticError, AssertionError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip

_SHOWN = 12  # names in one message
ROWS = ".rows"  # after the name of a value that is of some tokens only: the array of their indices in the step
Say = Callable[[str], None]  # tells the user what was left out, and why


@dataclass(frozen=True, slots=True)
class Array:
    """Values as `trace.format.STORAGE` holds them; `dtype` is numpy's own name for those that no trace can hold."""

    values: np.ndarray
    dtype: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of values that were not kept. No `shape`: the file does not say it."""

    shape: tuple[int, ...] | None
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Entry:
    """One named value of a foreign file. `load` raises InterchangeError for broken contents.

    `op` is set where the format identifies it by more than its name, `whose` with it where its layout is another's;
    `no_op` says what it is instead of an op's output.
    """

    step: int
    name: str
    load: Callable[[], Array | Summary]
    op: str | None = None
    no_op: str | None = None
    whose: str | None = None


def array(values: np.ndarray) -> Array:
    """Numpy values, little-endian, with their dtype's name in a trace; others keep numpy's name."""
    for name, storage in STORAGE.items():
        if name != "bf16" and values.dtype.kind == "f" and values.dtype.itemsize == storage.itemsize:
            return Array(values.astype(storage, copy=False), name)
    return Array(values, str(values.dtype))


def summary(shape: tuple[int, ...] | None, numbers: Mapping[str, float | None], nan: int = 0, inf: int = 0) -> Summary:
    """A summary of printed numbers: one that is NaN or infinite becomes a count of at least one."""
    finite = {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}
    others = [value for value in numbers.values() if value is not None and not math.isfinite(value)]
    nan = max(nan, int(any(map(math.isnan, others))))
    inf = max(inf, int(any(map(math.isinf, others))))
    min_, max_, mean, rms = (finite.get(key) for key in ("min", "max", "mean", "rms"))
    return Summary(shape, Statistics(min_, max_, mean, rms, nan, inf))


@contextmanager
def reading(path: Path, what: str, *also: type[Exception]) -> Iterator[None]:
    """Turns what libraries raise for a missing or broken file, `also` included, into one InterchangeError."""
    try:
        yield
    except InterchangeError:
        raise
    except FileNotFoundError:
        raise InterchangeError(f"{path}: there is no such file or folder. Check the path.") from None
    except (*_BROKEN, *also) as error:
        said = str(error).strip().splitlines()
        raise InterchangeError(
            f"{path}: cannot read it as {what}: {said[0] if said else type(error).__name__}. "
            "It may be cut off, or of another format: write it again, or name the right FORMAT."
        ) from None


def files(folder: Path, pattern: str, what: str) -> list[Path]:
    """The files below a folder that match; raises InterchangeError where there are none."""
    with reading(folder, "a folder"):
        if not folder.exists():
            raise FileNotFoundError
        found = sorted(folder.rglob(pattern)) if folder.is_dir() else []
    if not found:
        raise InterchangeError(f"{folder}: no {pattern} in it. Give the folder that holds {what}.")
    return found


def some(names: list[str]) -> str:
    """Names with N for numbers, each once."""
    patterns = list(dict.fromkeys(re.sub(r"\d+", "N", name) for name in names))
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return ", ".join(patterns[:_SHOWN]) + more
