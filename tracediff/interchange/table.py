"""A table of statistics as people print them: CSV, JSON or Markdown, one row per op or per layer."""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Entry, Say, Summary, from_json, reading, summary
from tracediff.interchange.naming import meaning

_COLUMNS = {
    "layer": "layer", "block": "layer", "blk": "layer", "op": "op", "name": "op", "tensor": "op", "step": "step",
    "min": "min", "max": "max", "mean": "mean", "avg": "mean", "average": "mean", "rms": "rms", "std": "std",
    "stddev": "std", "nan": "nan", "nans": "nan", "inf": "inf", "infs": "inf", "shape": "shape",
}  # fmt: skip
_DIGITS = 20  # of a size that no tensor has
_NONE = ("", "-", "n/a", "na", "none", "null")


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """One entry per row. A row that names a layer and no op is the hidden state after that layer."""
    rows = _rows(path)
    ignored = sorted({key for row in rows for key in row} - set(_COLUMNS))
    if ignored:
        say(f"columns that no trace holds, left out: {', '.join(ignored)}")
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        known = {_COLUMNS[key]: value for key, value in row.items() if key in _COLUMNS}
        name = _name(where, known)
        found = _summary(where, known)
        yield Entry(_integer(where, known, "step"), name, partial(_same, found), _op(known))


def _same(found: Summary) -> Summary:
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows, column names in lower case."""
    with reading(path, "text"):
        text = path.read_text(encoding="utf-8-sig")
    start = text.lstrip()[:1]
    if start and start in "{[":
        rows = _json(path, text)
    elif re.search(r"^[ \t]*\|", text, re.MULTILINE):
        rows = _markdown(path, text)
    else:
        rows = _csv(path, text)
    rows = [{str(key).strip().lower(): value for key, value in row.items()} for row in rows]
    if not rows:
        raise InterchangeError(f"{path}: no rows in it. Give a CSV, JSON or Markdown table with a header.")
    return rows


def _json(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        found = from_json(text)
    except (ValueError, RecursionError) as error:
        raise InterchangeError(f"{path}: it begins like JSON and is none: {error}. Write it again.") from None
    rows = found
    if isinstance(found, dict):
        rows = [{"op": name, **row} if isinstance(row, dict) else row for name, row in found.items()]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InterchangeError(f"{path}: the JSON is no list of objects and no object of objects, one per op.")
    return rows


def _markdown(path: Path, text: str) -> list[dict[str, Any]]:
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.strip().startswith("|")]
    rule = [i for i, cells in enumerate(lines) if all(re.fullmatch(r":?-+:?", cell.strip()) for cell in cells)]
    if rule != [1]:
        raise InterchangeError(f"{path}: {len(rule)} Markdown tables in it. Keep one, with a header and a |---| line.")
    return _records(path, [[cell.strip(" `*") for cell in cells] for cells in (lines[0], *lines[2:])])


def _csv(path: Path, text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    separator = max(",;\t", key=lines[0].count) if lines else ","
    try:
        return _records(path, list(csv.reader(lines, delimiter=separator, skipinitialspace=True)))
    except csv.Error as error:
        raise InterchangeError(f"{path}: it is no CSV: {error}. Close its quotes.") from None


def _records(path: Path, rows: list[list[str]]) -> list[dict[str, Any]]:
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise InterchangeError(
                f"{path}: row {number} has {len(row)} cells, the header {len(rows[0])}. Quote cells that hold commas."
            )
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def _name(where: str, row: Mapping[str, Any]) -> str:
    """As the file has it: the op's name, the layer's in front where both are given."""
    op, layer = (str(row.get(key, "")).strip() for key in ("op", "layer"))
    if not op and not layer:
        raise InterchangeError(f"{where} names no op and no layer. Give a column `layer`, `op`, `name` or `tensor`.")
    return f"{layer} {op}" if op and layer else op or f"layer {layer}"


def _op(row: Mapping[str, Any]) -> str | None:
    """The op of a row where its layer column is needed to know it."""
    op, layer = (str(row.get(key, "")).strip() for key in ("op", "layer"))
    found = re.fullmatch(r"(?:layers?|blk|block|l)?[ ._-]*(\d{1,9})", layer or op, re.IGNORECASE)
    if not layer:
        return f"blk.{int(found[1])}.ffn_residual" if found else None
    if not op:
        return f"blk.{int(found[1])}.ffn_residual" if found else meaning(layer).op
    candidates = (op, f"blk.{found[1]}.{op}", f"layers.{found[1]}.{op}", f"{op}-{found[1]}") if found else (op,)
    return next((known for name in candidates if (known := meaning(name).op)), None)


def _summary(where: str, row: Mapping[str, Any]) -> Summary:
    """rms = sqrt(mean^2 + std^2), which is exact for a standard deviation that divides by n."""
    numbers = {key: _number(where, row, key) for key in ("min", "max", "mean", "rms", "std")}
    mean, std = numbers["mean"], numbers.pop("std")
    if numbers["rms"] is None and mean is not None and std is not None:
        numbers["rms"] = math.hypot(mean, std)
    if all(value is None for value in numbers.values()):
        raise InterchangeError(f"{where} holds none of min, max, mean, rms and std. Name the columns so, or drop it.")
    if (numbers["rms"] or 0.0) < 0:
        raise InterchangeError(f"{where} has the rms {numbers['rms']}, which is negative. Correct it.")
    return summary(_shape(where, row), numbers, _integer(where, row, "nan"), _integer(where, row, "inf"))


def _number(where: str, row: Mapping[str, Any], key: str) -> float | None:
    text = str(row.get(key, "") if row.get(key) is not None else "").strip()
    if text.lower() in _NONE:
        return None
    try:
        return float(text)
    except ValueError:
        raise InterchangeError(f"{where}: {key} is {text!r}, which is no number. Correct it.") from None


def _integer(where: str, row: Mapping[str, Any], key: str) -> int:
    number = _number(where, row, key) or 0.0
    if not math.isfinite(number) or not 0 <= number < 2**53 or number != int(number):
        raise InterchangeError(f"{where}: {key} is {number}, which is no count. Correct it.")
    return int(number)


def _shape(where: str, row: Mapping[str, Any]) -> tuple[int, ...] | None:
    """[3, 896], 3x896 or (3, 896)."""
    text = str(row.get("shape") or "").strip()
    if text.lower() in _NONE:
        return None
    sizes = re.split(r"[\s,xX]+", text.removeprefix("torch.Size").strip("[]() "))
    if not all(size.isdecimal() and len(size) < _DIGITS for size in sizes):
        raise InterchangeError(f"{where}: the shape {text!r} is not understood. Write it as 3x896.")
    return tuple(int(size) for size in sizes)
