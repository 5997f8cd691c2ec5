"""What is asked while the plan is made: whether a record that no arithmetic fits has a known mistake."""

from tracediff.diagnose.budget import ENDLESS
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord


def is_mistaken(replay: Replay, record: OpRecord) -> bool:
    """Whether a known mistake leaves next to nothing of the record, in an arithmetic that most engines have.

    What tries mistakes is imported where there is one to be tried: a tenth of a second.
    """
    from tracediff.diagnose.kin import Faulty, Kin
    from tracediff.diagnose.search import Search

    _, error = next(replay.plain_looks(record))
    kin = Kin(replay, ENDLESS, {(record.step, record.op): error}, [])
    return Search(kin).known_beyond_doubt(Faulty(0, record, error), lambda fraction: None) is not None
