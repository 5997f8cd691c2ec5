"""From the names of others to ours: steps, canonical names, the table in `names.py`, and a map that the user gives."""

import re
from dataclasses import dataclass
from pathlib import Path

from tracediff.errors import InterchangeError
from tracediff.inputs import require_file
from tracediff.interchange.entry import from_json
from tracediff.names import ALIASES, NAMES, NOT_OPS, StepOf, split

OUTSIDE = ("token_embd", "output_norm", "output", "token_logprobs")  # the ops that belong to no layer
FOREIGN = ("transformers", "transformer_lens", "llama_cpp")
_STEP = re.compile(r"step[ _-]?(\d{1,9})(?: of sequence (\d{1,6}))?[./_-](?=.)")  # as `StepOf` is written
_LAYER = re.compile(r"(?<=\.)\d{1,9}(?=\.|$)|(?<=-)\d{1,9}$")
_ROOT = re.compile(r"^(?:\w+\.)*model\.(?=.)")  # model., model.model., language_model.model.
_OUTPUT = re.compile(r"\.output(\.0)?$")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a foreign name stands for: an op and whose name it was, or `no_op`: what it is instead."""

    op: str | None = None
    whose: str | None = None
    no_op: str | None = None


def split_step(name: str) -> tuple[int, str]:
    """The step in front of a name: ("step2/blk.0.attn_q") -> (2, "blk.0.attn_q"); 0 where there is none."""
    found = _STEP.match(name)
    if not found:
        return 0, name
    step, of = int(found[1]), found[2]
    return (step if of is None else StepOf(step, int(of))), name[found.end() :]


def split_layer(name: str, mark: str = "N") -> tuple[str, int | None]:
    """A name with a mark for its first layer number: ("blk.3.attn_q") -> ("blk.N.attn_q", 3)."""
    found = _LAYER.search(name)
    return (name[: found.start()] + mark + name[found.end() :], int(found[0])) if found else (name, None)


def is_op(name: str) -> bool:
    """Whether a name is canonical: in the table, with a layer where it needs one."""
    layer, local = split(name)
    return local in NAMES and (layer is None) == (local in OUTSIDE)


def meaning(name: str, whose: tuple[str, ...] = FOREIGN) -> Meaning:
    """What the table knows of a name, suffixes like `.output` aside; an empty Meaning where it knows nothing."""
    if is_op(name):
        return Meaning(name)
    name = _ROOT.sub("", name)
    for form in (name, _OUTPUT.sub("", name)):
        for column in whose:
            pattern = split_layer(form)[0]
            for expression, no_op in NOT_OPS.get(column, {}).items():
                if re.fullmatch(expression, pattern) or re.fullmatch(expression, form):
                    return Meaning(None, column, no_op)
            op = _lookup(_TABLE[column], form)
            if op:
                return Meaning(op, column)
    return Meaning()


def _lookup(table: dict[str, str], name: str) -> str | None:
    pattern, layer = split_layer(name)
    after, _ = split_layer(name, "N+1")
    if name in table:  # one without a layer, or of a certain one
        return table[name]
    if layer and after in table:
        return f"blk.{layer - 1}.{table[after]}"
    return f"blk.{layer}.{table[pattern]}" if layer is not None and pattern in table else None


def _column(column: str) -> dict[str, str]:
    own = {getattr(name, column): name.local for name in NAMES.values() if getattr(name, column) is not None}
    if column == "llama_cpp":
        own = {name if local in OUTSIDE else f"{name}-N": local for name, local in own.items()}
    return {**own, **ALIASES.get(column, {})}


_TABLE = {column: _column(column) for column in (*FOREIGN, "sglang")}


class NameMap:
    """The user's map, FOREIGN=CANONICAL per line or a JSON object; {N} on both sides stands for any layer number.

    Raises InterchangeError for a file that is neither. `unused` are the entries that matched nothing so far.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._map = _read_map(path) if path else {}
        self.unused = set(self._map)

    def __call__(self, name: str) -> str | None:
        """The canonical name that the map gives, None where it says nothing of the name."""
        pattern, layer = split_layer(name, "{N}")
        for form in (name, pattern):
            if form in self._map:
                self.unused.discard(form)
                return self._map[form].replace("{N}", str(layer))
        return None


def _read_map(path: Path) -> dict[str, str]:
    try:
        text = require_file(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InterchangeError(f"{path}: cannot open the map: {error.strerror}. Check the path.") from None
    except UnicodeDecodeError:
        raise InterchangeError(f"{path}: the map is not UTF-8 text. Write FOREIGN=CANONICAL on each line.") from None
    try:
        found = from_json(text) if text.lstrip().startswith("{") else _lines(path, text)
    except (ValueError, RecursionError) as error:
        raise InterchangeError(f"{path}: the map is no JSON: {error}. Correct it.") from None
    for name, op in found.items():
        if not isinstance(op, str) or not op.strip() or ("{N}" in op and "{N}" not in name):
            raise InterchangeError(
                f"{path}: the map has {op!r} for {name!r}. Give an op's name, such as blk.0.attn_q, or "
                "blk.{N}.attn_q for a foreign name with {N} in it."
            )
    if not found:
        raise InterchangeError(f"{path}: the map is empty. Write FOREIGN=CANONICAL on each line.")
    return found


def _lines(path: Path, text: str) -> dict[str, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        foreign, equals, op = (part.strip() for part in line.rpartition("="))
        if not equals or not foreign or foreign in found:
            raise InterchangeError(f"{path}:{number}: {line!r} is not a new FOREIGN=CANONICAL. Correct the line.")
        found[foreign] = op
    return found


_ORDER = {local: number for number, local in enumerate(NAMES)}


def execution_order(op: str) -> tuple[int, int, int]:
    """A key that sorts ops as a decoder runs them; names that are not in the table come last in their layer."""
    layer, local = split(op)
    if layer is not None:
        return 1, layer, _ORDER.get(local, len(_ORDER))
    return (0 if local == "token_embd" else 2), 0, _ORDER.get(local, len(_ORDER))
