"""What a hypothesis is: the mistakes that it assumes, the ops as they would be, and what replay leaves under them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tracediff.model.graph import Op, Tokens
from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.score import (
    EDITED_IN_SEGMENT,
    FAR_BELOW,
    FITTED,
    KNOWN,
    KNOWN_BLINDLY,
    KNOWN_IN_SEGMENT,
    MARGIN,
    WIDER,
    score,
)
from tracediff.result import Local

# Errors of independent mistakes add up: of five the largest makes a fifth, and undone it leaves 0.8.
PART = 0.9
_OF_TOKENS = {None: "", "one": ", in steps of one token alone", "several": ", in steps of several tokens alone"}
_TELLS = 1e-2  # NMSE: what leaves more tells nothing, however little an honest engine is held to there
SOLVED = "solved"  # the name of a mistake that no known one is


@dataclass(frozen=True, slots=True)
class Assumed:
    """One mistake of a hypothesis: its variant apart from the op that it is in, and what is wrong in words."""

    mistake: str
    variant: str
    text: str
    fitted: bool
    look: str = ""  # where in an engine, of what no known mistake is
    number: float | None = None  # that was fitted to a segment
    in_some_steps: bool = False  # other steps do not have it
    tokens: Tokens | None = None  # of the steps that have it
    n_edits: int = 1
    is_said: bool = False  # of another record, whose op is wrong by itself
    common: str = ""  # what is wrong in words that suit it in other ops, where its own do not

    @property
    def words(self) -> str:
        """What is wrong, and in which steps alone."""
        return self.text + _OF_TOKENS[self.tokens]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Mistakes tried on a record: the ops as they would be, and what replay leaves under them."""

    parts: tuple[Assumed, ...]
    ops: tuple[Op, ...]
    local: Local

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Their names, in the order in which they were tried."""
        return tuple(part.mistake for part in self.parts)

    @property
    def in_some_steps(self) -> bool:
        """Whether it is known not to be made in all steps."""
        return self.parts[-1].in_some_steps

    def but_in_some_steps(self) -> "Hypothesis":
        """The same, where other steps contradict it."""
        return replace(self, parts=(*self.parts[:-1], replace(self.parts[-1], in_some_steps=True)))

    def of_tokens(self, tokens: Tokens | None) -> "Hypothesis":
        """The same in steps of so many tokens alone: what it leaves is another's."""
        parts = tuple(replace(part, tokens=tokens) for part in self.parts)
        return replace(self, parts=parts, ops=tuple(replace(op, tokens=tokens) for op in self.ops))

    @property
    def left(self) -> float:
        """NMSE; infinite where it is NaN."""
        return self.local.left

    @property
    def assumes(self) -> tuple[bool, int, int]:
        """How much, whatever segment it is tried on: something that no list has, how many edits, how many numbers."""
        edits, numbers = sum(part.n_edits for part in self.parts), sum(part.fitted for part in self.parts)
        return SOLVED in self.mistakes, edits, numbers

    @property
    def price(self) -> float:
        """Of all that it assumes, in nats of squared error."""
        known = KNOWN_BLINDLY if self.local.blind else KNOWN_IN_SEGMENT
        in_segment = EDITED_IN_SEGMENT if SOLVED in self.mistakes else known
        each = KNOWN if len(self.local.segment) == 1 else in_segment
        return sum(part.n_edits * each + (FITTED if part.fitted else 0.0) for part in self.parts)

    @property
    def score(self) -> float:
        """Comparable with those of other explanations of the record."""
        return score(self.local.nmse, self.price)

    @property
    def may_turn(self) -> bool:
        """Whether it is that values are rounded, and within its floor: where one of a few goes the other way than in
        the engine, that leaves as much as all of them do.
        """
        return not self.local.faulty and all(op.stored != "f64" for op in self.ops)

    def pays(self, error: Local) -> bool:
        """Whether it is the better explanation of a record that is so far off without it; where only single values
        are, of these, and as a whole no worse, but by what roundings make of so little.
        """
        no_worse = score(self.left) >= score(error.nmse) - MARGIN
        better = no_worse if is_of_single_values(error) else self.score > score(error.nmse)
        return not self.local.faulty and self.left <= _TELLS and better and not self._rests_on_noise(error)

    def _rests_on_noise(self, error: Local) -> bool:
        """Whether it is within the floor of a segment because that is wide, where the right ops' is not: what divides
        by a tiny number hides much behind it. The mistake that was made comes nearer than an honest engine may be off.
        (By itself an op that rounds to half precision has such a floor, and comes no nearer.)
        """
        is_wide = len(error.segment) > 1 and self.local.floor > WIDER * error.floor
        return is_wide and self.left > FAR_BELOW * self.local.floor


class Least:
    """Of each set of mistakes the variant that leaves least."""

    def __init__(self) -> None:
        self._of: dict[frozenset[str], Hypothesis] = {}

    def update(self, tried: Iterable[Hypothesis]) -> None:
        """Keep these where they leave less."""
        for one in tried:
            key = frozenset(one.mistakes)
            self._of[key] = min(self._of.get(key, one), one, key=lambda h: h.left)

    def first(self, n: int) -> list[Hypothesis]:
        """The best `n`."""
        return sorted(self._of.values(), key=lambda h: h.left)[:n]


@dataclass(frozen=True, slots=True)
class Way:
    """How mistakes are tried on a segment: the arithmetic to look under first, in which layer, and in steps of how many
    tokens; None: in all.
    """

    plain: Scheme | None = None
    layer: int | None = None
    tokens: Tokens | None = None


IN_ALL_LAYERS = Way()


def to_beat(error: Local) -> float:
    """The NMSE of which a hypothesis must take a part away; infinite where single values alone are wrong."""
    return math.inf if is_of_single_values(error) else error.left


def is_of_single_values(error: Local) -> bool:
    """Whether the whole is within its floor and single values are not within their bounds, as those that leak through a
    mask.

    At the end of a segment bounds are of noise that is sampled: what adds noise widens them, and explains nothing. (So
    rope's positions in bfloat16 were believed of a right engine, though they left as much.)
    """
    return error.nmse <= error.floor and len(error.segment) == 1
