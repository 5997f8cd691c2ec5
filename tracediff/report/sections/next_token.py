"""The next token, its rivals on both sides, and whether another choice means anything."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tracediff.findings.words import number
from tracediff.report.parts import fitting, heading, line
from tracediff.result import Result, Token

_SPARE = [
    ("recomputed:ref", "recomputed"),
    ("p:ref", "p"),
    ("rank in ref.", "rank"),
]  # what goes where the terminal is narrow


def next_token(result: Result, width: int) -> Iterator[RenderableType]:
    """The first and the last step's best logits; of a match the last step's, and fewer."""
    match = result.verdict == "match"
    for logits in dict.fromkeys((*result.logits[: 0 if match else 1], *result.logits[-1:])):
        yield heading("Next token" + (f" after step {logits.step}" if len(result.logits) > 1 else ""))
        pairs = [*zip(logits.reference, logits.candidate, strict=True)][: 3 if match else None]
        rows = [_row(rank, r, c) for rank, (r, c) in enumerate(pairs, start=1)]
        columns = [column for column in rows[0] if any(str(row[column]) != "-" for row in rows)]
        yield fitting(columns, rows, width, _SPARE, left=2)
        about = "next token", f"step {logits.step}"
        yield from (line(said.text) for said in result.said if (said.about, said.of) == about)


def _row(rank: int, r: Token, c: Token) -> dict[str, str | Text]:
    return {
        "rank": str(rank),
        "reference": r.words,
        "logit:ref": number(r.logit),
        "recomputed:ref": number(r.recomputed),
        "p:ref": f"{r.probability:.3f}",
        "candidate": c.words,
        "logit": number(c.logit),
        "recomputed": number(c.recomputed),
        "p": f"{c.probability:.3f}",
        "rank in ref.": str(c.other_rank),
    }
