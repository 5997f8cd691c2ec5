"""Numbers, counts, ordinals, plurals and lists in words."""

from collections.abc import Sequence
from itertools import pairwise

_LISTED = 6  # ranges that are told one by one
_DIGITS, _MOST_DIGITS = 6, 12


def nth(n: int) -> str:
    """As in "the 2nd after it" and "the one after it"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th") if n // 10 % 10 != 1 else "th"
    return "one" if n == 1 else f"{n}{ending}"


def plural(noun: str) -> str:
    """Of what loops count."""
    return f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"


def count(n: int, noun: str) -> str:
    """As in "1 key" and "2 keys"."""
    return f"{n} {noun if n == 1 else plural(noun)}"


def few(items: Sequence[object], most: int = 6, between: str = ", ") -> str:
    """As in "1, 2, 3, ...": the first of more than `most`."""
    return between.join([*map(str, items[:most]), *["..."] * (len(items) > most)])


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names with commas, "and" before the last; only the first where there are more than `most`."""
    if len(names) > most:
        return f"{', '.join(names[:most])}, ..."
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers, which ascend: of 3, 8, 9 and 10 it is (3, 3), (8, 10)."""
    breaks = [(a, b) for a, b in pairwise(numbers) if b != a + 1]
    return [*zip([numbers[0], *(b for _, b in breaks)], [*(a for a, _ in breaks), numbers[-1]], strict=True)]


def ranges(places: Sequence[int]) -> str:
    """As in "3, 8 to 11 and 2 more"."""
    parts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs(places)]
    return ", ".join(parts[:_LISTED]) + (f" and {len(parts) - _LISTED} more" if len(parts) > _LISTED else "")


def told_apart(number: float, right: float) -> tuple[str, str]:
    """Two numbers to as many digits as tell them apart: six as a rule."""
    both = ((f"{number:.{n}g}", f"{right:.{n}g}") for n in range(_DIGITS, _MOST_DIGITS))
    return next((pair for pair in both if pair[0] != pair[1]), (f"{number!r}", f"{right!r}"))
