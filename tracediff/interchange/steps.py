"""Which tokens at which positions each step of a foreign file was fed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracediff.errors import InterchangeError
from tracediff.interchange.border import rows
from tracediff.interchange.entry import Array, Entry, Say
from tracediff.names import kind_of, local_name

_GIVE = "Give --tokens 1,2,3 with all ids in order, or an array called tokens (or input_ids) beside the others"


@dataclass(frozen=True, slots=True)
class Named:
    """An entry and the op that it is the output of; `whose` name it had, as the columns of `names.py` are called.

    `rows` holds the indices of its tokens in the step, where those are not all.
    """

    op: str
    entry: Entry
    whose: str | None
    rows: Entry | None = None


def by_step(ops: Iterable[Named]) -> dict[int, list[Named]]:
    """The ops of each step, in their order."""
    found: defaultdict[int, list[Named]] = defaultdict(list)
    for named in ops:
        found[named.entry.step].append(named)
    return found


Fed = tuple[Sequence[int], Sequence[int]]  # tokens, positions


def steps_of(
    ops: list[Named],
    tokens: dict[int, Entry],
    positions: dict[int, Entry],
    given: Sequence[int],
    path: Path,
    say: Say,
) -> dict[int, Fed]:
    """Tokens and positions of each step, ascending; raises InterchangeError where they are missing or do not fit.

    Ids in one piece (`given`, or a single array for several steps) are dealt out by how many rows each step has.
    Positions go on from one step to the next where the file has none.
    """
    numbers = sorted({named.entry.step for named in ops})
    if given and tokens:
        say("--tokens is taken in place of the token ids in the file")
    if not given and not tokens:
        raise InterchangeError(f"{path}: which tokens was it fed? {_GIVE}.")
    if given or len(tokens) == 1 < len(numbers):
        ids = _deal(given or integers(next(iter(tokens.values()))), numbers, ops, path)
    else:
        ids = {step: integers(entry) for step, entry in tokens.items()}
    wrong = [token for tokens_of in ids.values() for token in tokens_of if not 0 <= token < 2**31]
    if wrong:
        raise InterchangeError(f"{path}: {wrong[0]} is no token id. {_GIVE}.")
    missing = [str(step) for step in numbers if not ids.get(step)]
    if missing:
        raise InterchangeError(f"{path}: no token ids for step {', '.join(missing)}. {_GIVE}, stepN/ in front.")
    return _with_positions({step: ids[step] for step in numbers}, positions, path)


def _with_positions(ids: dict[int, Sequence[int]], positions: dict[int, Entry], path: Path) -> dict[int, Fed]:
    steps: dict[int, Fed] = {}
    after = 0
    for step, tokens in ids.items():
        places = integers(positions[step]) if step in positions else range(after, after + len(tokens))
        if len(places) != len(tokens):
            raise InterchangeError(
                f"{path}: step {step} has {len(tokens)} tokens and {len(places)} positions. Correct one of them."
            )
        steps[step] = tokens, places
        after = places[-1] + 1
    return steps


def _deal(ids: Sequence[int], numbers: list[int], ops: list[Named], path: Path) -> dict[int, Sequence[int]]:
    if len(numbers) == 1:
        return {numbers[0]: ids}
    of_step = by_step(ops)
    lengths = {step: _length(of_step[step], path) for step in numbers}
    if sum(lengths.values()) != len(ids):
        raise InterchangeError(
            f"{path}: {len(ids)} token ids for steps of {', '.join(map(str, lengths.values()))} rows. {_GIVE}."
        )
    dealt, at = {}, 0
    for step, length in lengths.items():
        dealt[step], at = ids[at : at + length], at + length
    return dealt


def _length(ops: list[Named], path: Path) -> int:
    """The rows of the step's first op that has a row per token and nothing between."""
    for named in ops:
        if kind_of(named.op) in ("embedding", "rms_norm", "add") and not local_name(named.op).endswith(
            ("q_norm", "k_norm")
        ):
            loaded = named.entry.load()
            shape = loaded.values.shape if isinstance(loaded, Array) else loaded.shape
            while shape and len(shape) > 2 and shape[0] == 1:
                shape = shape[1:]
            if shape:
                return rows(named.op, shape)
    raise InterchangeError(f"{path}: how many tokens has each of its steps? {_GIVE}, one for each step: stepN/tokens.")


def integers(entry: Entry) -> list[int]:
    """Ids, positions or indices, a batch axis of 1 dropped."""
    loaded = entry.load()
    if not isinstance(loaded, Array) or loaded.values.dtype.kind not in "iu" or loaded.dtype == "bf16":
        kind = loaded.dtype if isinstance(loaded, Array) else "statistics"
        raise InterchangeError(f"{entry.name} holds {kind}, not whole numbers. Save it as int64, or give --tokens.")
    values = loaded.values.reshape(-1)
    if loaded.values.size != max(loaded.values.shape, default=1):
        raise InterchangeError(f"{entry.name} has the shape {list(loaded.values.shape)}: one sequence at a time.")
    if not values.size or values.min() < 0:
        raise InterchangeError(f"{entry.name} holds {'a negative number' if values.size else 'nothing'}. Correct it.")
    return [int(n) for n in values]
