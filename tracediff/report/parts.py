"""What reports share: a heading, a line, a table. A terminal's width is the caller's affair."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tracediff.result import Verdict

STYLES = MappingProxyType(
    {
        "ok": "green",
        "faulty": "bold red",
        "inherited": "yellow",
        "drift": "red",
        "unmatched": "magenta",
        "undecided": "cyan",
    }
)
ALARM = "bold red"
LEVELS = MappingProxyType({"plain": "", "warning": "yellow", "alarm": ALARM})
_VERDICTS = MappingProxyType({"match": "bold green", "diverged": ALARM, "undecided": "bold yellow"})
_GLUE = "\ue000"  # a space at which no line breaks: rich takes U+00A0 for a space like any other
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # of a command as shlex.join writes it
_SHORT = re.compile(r"\([^()]{1,24}\)")


def heading(text: str) -> Text:
    """A section's title, after an empty line."""
    return Text(f"\n{text}", style="bold")


def table(*columns: str, left: int = 1) -> Table:
    """A table without lines: the first `left` columns of words, the others of numbers."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return table


def kept_in(width: int, wide: Mapping[str, int], spare: Sequence[tuple[str, ...]]) -> list[str]:
    """The columns that there is room for, `wide` each and two apart: groups of `spare` go, one after another."""
    kept = [*wide]
    for group in spare:
        if sum(wide[column] + 2 for column in kept) <= width:
            break
        kept = [column for column in kept if column not in group]
    return kept


Rows = list[dict[str, str | Text]]  # a table's cells by column


def fitting(columns: list[str], rows: Rows, width: int, spare: Sequence[tuple[str, ...]], left: int = 1) -> Padding:
    """A table that is as wide as the terminal at most: columns of `spare` go, one group after another, until it is.

    A column's header is its name up to a colon.
    """
    headers = {column: column.partition(":")[0] for column in columns}
    wide = {c: max([len(headers[c]), *(cell_len(str(row[c])) for row in rows)]) for c in columns}
    kept = kept_in(width, wide, spare)
    shown = table(*(headers[column] for column in kept), left=left)
    for row in rows:
        shown.add_row(*(row[column] for column in kept), style=str(row.get("style", "")))
    return indented(shown)


def indented(what: RenderableType, by: int = 2) -> Padding:
    """A table or some text, each of its lines moved to the right."""
    return Padding(what, (0, 0, 0, by), expand=False)


def line(*parts: str | tuple[str, str], style: str = "", by: int = 2) -> Padding:
    """A sentence of its own, indented where it wraps too; parts may carry a style."""
    return indented(glued(Text.assemble(*parts, style=style)), by)


def headline(verdict: Verdict, said: str) -> Table:
    """How it ended, in one word and one sentence."""
    return hanging(f"{verdict.upper()}:", Text(said), _VERDICTS[verdict])


def hanging(first: str, text: Text, style: str = "", wide: int = 0) -> Table:
    """Text that wraps to the right of what it begins with, which takes `wide` columns at least."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, min_width=wide, style=style)
    grid.add_column()
    grid.add_row(first, glued(text))
    return grid


def glued(text: Text) -> Text:
    """The same text, in which no short parenthesis will be broken: (2i, 2i + 1) is one word."""
    glued = text.copy()
    glued.plain = _SHORT.sub(lambda found: found[0].replace(" ", _GLUE), text.plain)
    return glued


class Command:
    """A command of a shell: where it is wider than there is room for, lines end so that it can be copied, unless a word
    is wider.
    """

    _BY, _MORE = 2, " \\"

    def __init__(self, command: str) -> None:
        self._words = _WORD.findall(command)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, lines = options.max_width - len(self._MORE), [" " * self._BY]
        for word in self._words:
            joined = f"{lines[-1]}{word}"
            if cell_len(joined) > width and lines[-1].strip():
                lines[-1] = lines[-1].rstrip() + self._MORE
                joined = f"{' ' * 2 * self._BY}{word}"
                lines.append("")
            lines[-1] = f"{joined} "
        yield from (Text(of.rstrip(" ")) for of in lines)


class Trimmed:
    """What it is given, without spaces at the ends of lines: a pipe keeps them, and files and diffs show them."""

    def __init__(self, what: RenderableType) -> None:
        self._what = what

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for row in console.render_lines(self._what, options, pad=False):
            while row and not row[-1].text.strip():
                row.pop()
            for i, segment in enumerate(row):
                text = segment.text.replace(_GLUE, " ")
                yield Segment(text.rstrip() if i == len(row) - 1 else text, segment.style, segment.control)
            yield Segment.line()
