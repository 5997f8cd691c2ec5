"""An explained op by numbers: what goes in at a few places, what should come out, what the mistake makes, what did."""

from tracediff.errors import TracediffError
from tracediff.result import Listing, OpResult, Result


def evidence(result: Result, op: str) -> Listing | str:
    """The places of the first step in which the op is explained, or why there are none. Raises TracediffError for an op
    that the trace has not.
    """
    records = [one for one in result.ops if one.op == op]
    if not records:
        raise TracediffError(f"--explain {op}: the trace has no such record. `tracediff inspect TRACE` lists them.")
    faulty = [one for one in records if one.status == "faulty"]
    told = result.explained(op)
    if told is None or told.cause is None:
        return f"--explain {op}: {_why_not(op, faulty)}"
    rows = tuple(place.row for place in told.cause.places)
    head = ("at", "from", "right", "by the mistake", "recorded")
    return Listing(f"{op} in step {told.step}: {told.cause.text}", head, rows)


def _why_not(op: str, faulty: list[OpResult]) -> str:
    """What there is instead."""
    if not faulty:
        return "nothing is wrong with it by itself, so there is nothing to explain. Ask for one of the faulty ops."
    if faulty[0].local and len(faulty[0].local.segment) > 1:
        return "it was judged together with ops before it that were not recorded. Record these, and ask again."
    numbers = (
        f"`tracediff reproduce TRACE --model MODEL --op {op} -o FOLDER` writes what it reads, what is right and what"
    )
    return f"no explanation was found ({faulty[0].shape or faulty[0].note}). {numbers} was recorded."
