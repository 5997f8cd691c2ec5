"""A listing as a table."""

from rich.table import Table

from tracediff.result import Listing


def render(listing: Listing) -> Table:
    """The table, every column as wide as it needs; a terminal wraps, a pipe does not."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=listing.title, title_justify="left", header_style="dim")
    for column in listing.columns:
        table.add_column(column)
    for row in listing.rows:
        table.add_row(*row)
    return table
