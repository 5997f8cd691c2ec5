"""One score for every explanation of a record: how little it leaves of the values, less the price of what it assumes.

"It is sound in this arithmetic", "it has mistake m", "it is 1.04 times what it should be" and "something else is
wrong" all predict the same recorded values. Floors are upper bounds, so the scale of each explanation's noise is free
below its floor; the likelihood of n values is then residual^-n. Values are not independent: many of them err by one
rounding that turned, so n is far less than their number: here a nat is an e-th of the squared error, whatever the size
of the record, and the prices are what clean and faulty runs were seen to need. Least residual wins, and a wide floor
buys nothing: "times 1.04", which leaves 1e-14, beats a quantised cache, which leaves 1e-3 under a floor of 1e-2.

All constants that choose between explanations stand here. Prices are in nats of squared error: what costs ln 4 must
leave a quarter.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tracediff.result import Judgement

# Next to nothing is left: no rounding of an operand is so small (float16's is 4e-8), but where a bias outweighs the
# product. What leaves less needs no rival, but what leaves as little as float32 does.
NOTHING = 1e-9
# What float32 leaves of an op or a layer is a tenth of this; exponentials to degree 4 leave 3e-12 to 1e-10 of a layer
# (distributed-llama).
FINE = 1e-12
# What an op leaves at least that an engine in float64 computes in float32: one rounding, of 3e-16, or an eighth of it.
SINGLE = 4e-17
_LEAST = 1e-60
# A floor beyond this hides everything, but where what is left is so small a part of it, a sixteenth of the noise that
# has a margin of 16 there: an engine that rounds as the floor allows comes no nearer by chance. So this one rounds
# less, and a mistake would add to what is left. (Scores not rounded before the softmax, in bfloat16: 1e-6 of 0.1.)
BLIND, FAR_BELOW = 0.05, 4e-3
# So much wider than that of the right op is a floor of its own. (Norms divided by the sum of magnitudes "explained"
# what a padded softmax and a window of values made of a layer, all but 1e-4 of it, for rope's Q and K were next to 0
# then: the floor was 2e-4, and 1e-10 with the right mistakes, which left 1e-13.)
WIDER = 1e3
# Beyond the same no rounding is asked for what it explains but of weights in four bits, whose values are known to the
# bit: they leave 0.02 to 0.06 of a layer of generated models, and nothing leaves more than this.
COARSE = 0.25

# Prices. Through 16 layers of llama.cpp's 8-bit blocks the right arithmetic left 0.5 to 1.6 times what the plain one
# did, for by then most roundings have turned some other way: that something unknown is wrong must leave less than that.
UNKNOWN = math.log(2.0)
# A factor or an offset that nobody knows of. Numbers that are cut instead of rounded are 1 - u off on average: to take
# that out leaves a quarter.
SHAPE = math.log(50.0)
# One known mistake of some hundred, in its usual form; of one op, whose values are many and independent, and of a
# segment, where wrong ones leave half by chance, less where the floor hides everything.
KNOWN, KNOWN_IN_SEGMENT, KNOWN_BLINDLY = math.log(2.0), math.log(10.0), math.log(20.0)
EDITED_IN_SEGMENT = math.log(3000.0)  # one edit of some thousand, of an op that was not recorded
# Arithmetic that is not listed, as of weights that the engine quantised by itself in one of some thirty ways: several
# leave as much of a mistaken record as the file's weights do, and have wider floors; of a right one in bfloat16 eight
# bits left a seventh. And what cannot be followed bit by bit, whose bound alone has room for what is left: beside what
# most engines do a right one leaves a tenth, whose cache can be followed, and a mistaken one as much.
COMPOSED = math.log(4.0)
# Or, where half precision lets replay go a part of the way with the engine alone, it must explain so much of the error
# that no more than this share is left: wrong ones explained 0.3% of it and less. Whether what is left is within the
# floor is asked besides.
UNEXPLAINED = 0.75
# A part of it must then leave less than this share unexplained: of what is rounded otherwise at each try chance
# explains 2.5% of 30,000 values, the best of 150.
LESS_UNEXPLAINED = 0.95
# A part of it that is done in another way must take away this share at least. Of a wrong way chance takes away z^2 / n
# at most, where z^2 is the luck of the best of 170 ways and n how many values err by themselves. What leaves up to
# `ALIKE` times as much as the best is its rival.
LESS, LUCKY, ALIKE = 1 / 200, 7.5, 4.0
# Arithmetic of a segment that does a part otherwise than some record of the trace tells beyond doubt. Engines that
# leave their head as it is have such: then it leaves 1e-7 of a layer and less where the other leaves 1e-4. Of mistaken
# layers 8-bit rows with zeros left a tenth of what is right.
UNLIKE = math.log(1000.0)
# Or of one row in so many: behind integers one rounding that turned turns others in all that follows of a token, and of
# those together the right one leaves a thirtieth. Of three layers it left 1e-10 of half of the rows, a wrong one 0.4 or
# more of each.
IN_ROWS = 10
# What storing in half precision makes of the squared error, a twelfth of a square unit, is known to this share of it.
STORED_TO = 0.05
FITTED = math.log(4.0)  # a number that was fitted, beyond a usual one: two fits to within the noise differ by so much
# One place further down the list of arithmetics, which begins with the most usual: between two that leave the same.
RARER = 0.01
# Between the best explanation that calls the engine right and the best that does not.
MARGIN = math.log(2.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one explanation leaves of a record: NMSE, and the price of what it assumes. `sound`: the engine is right.

    `noise` is the NMSE that the explanation expects, where it expects one. To leave less costs nothing, for floors are
    upper bounds; to leave more is the less likely the more it is.
    """

    nmse: float
    sound: bool
    price: float = 0.0
    noise: float = math.inf

    @property
    def score(self) -> float:
        """In nats; comparable between explanations of the same values."""
        own = score(self.nmse, self.price)
        return own - max(0.0, score(self.noise) - score(self.nmse)) if math.isfinite(self.noise) else own


def score(nmse: float, price: float = 0.0) -> float:
    """Higher is better; of what is NaN or infinite nothing is explained."""
    return -math.log(max(nmse, _LEAST)) - price if math.isfinite(nmse) else -math.inf


def lead(explanations: Iterable[Explanation]) -> float:
    """By how many nats the best explanation that calls the engine mistaken beats the best that does not."""
    best = {True: -math.inf, False: -math.inf}
    for one in explanations:
        best[one.sound] = max(best[one.sound], one.score)
    return math.inf if best[True] == -math.inf else best[False] - best[True]


def judge(lead: float) -> Judgement:
    """Sound or faulty, where either wins by a margin."""
    return "faulty" if lead > MARGIN else "undecided" if lead > 0 else "sound"
