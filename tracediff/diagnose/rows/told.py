"""What is told of rows that were read."""

import math
from dataclasses import dataclass

from tracediff.result import Local

FEW = 8  # numbers of a row that are alike by chance: not so many
OF_ERROR = 1e-4  # of what is wrong, which may be little: what leaves more does not explain it

Row = tuple[int, int]  # a sequence, and a position of it


@dataclass(frozen=True, slots=True)
class Told:
    """What was read, in words of the first token that tells it, and the NMSE that is left of the record; infinite where
    not all that is wrong tells. `common` is true of other records that have it too, `look` where to look. `is_sure`:
    all rows are known, so no edit would explain it better; `is_same` that the record is another value number for
    number, so that no mistake is sought.
    """

    text: str
    nmse: float
    common: str
    look: str
    is_sure: bool = True
    is_same: bool = False

    def explains(self, error: Local) -> bool:
        """Whether next to nothing is left of the record; what is cached in half precision leaves that."""
        return math.isfinite(self.nmse) and self.nmse <= max(error.floor, OF_ERROR * error.nmse)
