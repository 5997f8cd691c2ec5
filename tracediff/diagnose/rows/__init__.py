"""Rows that an op read and that are not its own: what came of them tells which, whatever the code that chose them.

Of what attention read in the `cached` keys and values, or the `keys` and values by themselves where scores and
probabilities were recorded; and of an op that makes each token's row of that token's own, the `tokens` whose rows it is
made of; and of `states`, with whose a sequence begins. They are other positions', or other sequences' in a batch. Of an
embedding the `ids` that were looked up, and of `streams` which go into several ops and are recorded as what comes of
them. Each says what it has `told`.
"""

from tracediff.diagnose.rows import cached, ids, keys, states, streams, tokens
from tracediff.diagnose.rows.told import Told
from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord


def told(replay: Replay, record: OpRecord, scheme: Scheme) -> Told | None:
    """Which rows were read for a record under an arithmetic; None where that cannot be told."""
    ways = (of.told(replay, record, scheme) for of in (streams, states, cached, keys, tokens, ids))
    return next(filter(None, ways), None)
