"""What reports say, in words: computed once, so that every format has the same sentences."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["plain", "warning", "alarm"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, with all the ops and weights that it is in; the text is true of each of them.

    `mistake` is its name in `tracediff faults`; None where no known one explains what is wrong.
    """

    text: str
    mistake: str | None
    ops: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()  # wrong in the engine's memory
    steps: tuple[int, ...] = ()
    nmse: float | None = None  # the largest local error
    segment: tuple[str, ...] = ()  # ops of the first record that were judged as one, where they are several
    look: str | None = None  # where to look in the engine's code
    side: str = "candidate"  # the engine's name where three are compared


@dataclass(frozen=True, slots=True)
class Next:
    """What to run next, and why, with what to do before."""

    command: str
    why: str


@dataclass(frozen=True, slots=True)
class Said:
    """Anything else that a report says: what it is about and of which side or step, and whether it is an alarm."""

    about: str
    text: str
    level: Level = "plain"
    of: str = ""
