"""The terminal that reports are printed on. Apart from the command line, whose help needs none of rich."""

import os
import sys

from rich.console import Console as RichConsole


class Console(RichConsole):
    """Rich's, which ends with exit code 1 when a pipe is closed: here that says that something diverges."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command line."""
        raise  # the BrokenPipeError that is being handled


def has_width() -> bool:
    """Whether standard output is so many columns wide, by its terminal or by COLUMNS: a pipe is not."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def standard_output() -> Console:
    """In a pipe plain text, 100 columns wide unless COLUMNS says otherwise."""
    return Console(width=None if has_width() else 100, highlight=False, markup=False, soft_wrap=False)
