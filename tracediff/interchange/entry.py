"""What every format is read as: named entries whose values are loaded one at a time."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.inputs import require_file
from tracediff.trace.format import STORAGE, Statistics

_SHOWN = 12  # names in one message
_SMALL, _PACKED = 256 << 20, 64  # what any file may unpack to, in bytes; and how many times its size
_DIGITS = 400  # of the largest float64, and some
_OBJECTS = re.compile("pickle|weights.only", re.IGNORECASE)
_LIMITS = re.compile("set_int_max_str_digits|max_header_size|unsafe|trust", re.IGNORECASE)
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
def reading(path: Path, what: str) -> Iterator[None]:
    """Around what a library does with the file at `path`, and nothing else: whatever it raises is one InterchangeError.

    Whatever: zipfile, numpy and torch raise what comes up where a file is not what it should be (struct.error,
    tokenize.TokenError, AttributeError, MemoryError).
    """
    try:
        require_file(path)
        yield
    except InterchangeError:
        raise
    except FileNotFoundError:
        raise InterchangeError(f"{path}: there is no such file or folder. Check the path.") from None
    except Exception as error:
        raise InterchangeError(
            f"{path}: cannot read it as {what}: {_said(error)}. "
            "It may be cut off, or of another format: write it again, or name the right FORMAT."
        ) from None


@contextmanager
def in_form(path: Path, what: str) -> Iterator[None]:
    """Around taking JSON apart that should be `what`: of other JSON whatever comes up is one InterchangeError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InterchangeError(f"{path}: it is JSON, but not {what} ({said}). Name the right FORMAT.") from None


def _said(error: Exception) -> str:
    """The first line of what a library says, but none of its advice to load what may run code, or to lift a limit."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).strip().partition("\n")[0]
    if _OBJECTS.search(said):
        return "it is damaged, or holds Python objects, which are not loaded: that can run any code"
    return said if said and not _LIMITS.search(said) else type(error).__name__


def check_unpacked(path: Path, nbytes: int) -> None:
    """Raises InterchangeError where the values in a file take up far more than the file: limits follow its size."""
    if nbytes > max(_SMALL, _PACKED * path.stat().st_size):
        raise InterchangeError(
            f"{path}: its values take up {nbytes:,} bytes, which is more than {_PACKED} times the file. If that is "
            "meant, save them whole and without compression."
        )


def from_json(text: str) -> Any:
    """What JSON stands for. Raises ValueError or RecursionError where it is none or a number has too many digits."""
    return json.loads(text, parse_int=_whole)


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def files(folder: Path, pattern: str, what: str) -> list[Path]:
    """The files below a folder that match; raises InterchangeError where there are none."""
    if not folder.exists():
        raise InterchangeError(f"{folder}: there is no such file or folder. Check the path.")
    try:
        found = sorted(folder.rglob(pattern)) if folder.is_dir() else []
    except OSError as error:
        raise InterchangeError(f"{folder}: cannot look into it: {error.strerror}. Check its permissions.") from None
    if not found:
        raise InterchangeError(f"{folder}: no {pattern} in it. Give the folder that holds {what}.")
    return found


def some(names: list[str]) -> str:
    """Names with N for numbers, each once."""
    patterns = list(dict.fromkeys(re.sub(r"\d+", "N", name) for name in names))
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return ", ".join(patterns[:_SHOWN]) + more
