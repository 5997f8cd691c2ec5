"""A listing as a table."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table

from tracediff.report.parts import Trimmed
from tracediff.result import Listing

_WORDS = ("mistake", "look at", "weights", "ops")  # columns that may break
_WORD = 24  # columns of the terminal for each of them, at least
_SPARE = (("nan", "inf"), ("dtype",), ("min", "max"), ("mean",), ("shape",))  # what goes first


def narrowest(listing: Listing, columns: Sequence[str] | None = None) -> int:
    """How wide the table is at least, of all columns or of some."""
    wide = [max(map(len, cells)) for cells in zip(listing.columns, *listing.rows, strict=True)]
    return sum(
        _WORD if column in _WORDS else n + 2
        for column, n in zip(listing.columns, wide, strict=True)
        if columns is None or column in columns
    )


def render(listing: Listing, width: int | None) -> RenderableType:
    """The table. Words wrap; of numbers those go that a narrow terminal has no room for; names are never cut."""
    kept = list(listing.columns)
    for group in _SPARE:
        if width is None or narrowest(listing, kept) <= width:
            break
        kept = [column for column in kept if column not in group]
    table = Table(box=None, padding=(0, 2, 0, 0), title=listing.title, title_justify="left", header_style="dim")
    for column in kept:
        table.add_column(column, no_wrap=column not in _WORDS)
    for row in listing.rows:
        table.add_row(*(cell for column, cell in zip(listing.columns, row, strict=True) if column in kept))
    return Trimmed(table)
