"""A listing as a table."""

from rich.console import RenderableType
from rich.table import Table

from tracediff.report.parts import Trimmed, kept_in
from tracediff.result import Listing

_WORDS = ("mistake", "look at", "weights", "ops", "at", "from")  # columns that may break
_WORD = 22  # columns of the terminal for each of them, at least
_SPARE = (("nan", "inf"), ("dtype",), ("min", "max"), ("mean",), ("shape",))  # what goes first


def narrowest(listing: Listing) -> int:
    """How wide the table is at least, of all columns."""
    return sum(n + 2 for n in _wide(listing).values())


def _wide(listing: Listing) -> dict[str, int]:
    cells = zip(listing.columns, *listing.rows, strict=True)
    return {column: _WORD if column in _WORDS else max(map(len, (column, *rest))) for column, *rest in cells}


def render(listing: Listing, width: int | None) -> RenderableType:
    """The table. Words wrap; of numbers those go that a narrow terminal has no room for; names are never cut."""
    kept = listing.columns if width is None else kept_in(width, _wide(listing), _SPARE)
    table = Table(box=None, padding=(0, 2, 0, 0), title=listing.title, title_justify="left", header_style="dim")
    for column in kept:
        table.add_column(column, no_wrap=column not in _WORDS)
    for row in listing.rows:
        table.add_row(*(cell for column, cell in zip(listing.columns, row, strict=True) if column in kept))
    return Trimmed(table)
