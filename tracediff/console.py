"""The terminal that reports are printed on. Apart from the command line, whose help needs none of rich."""

import os
import sys

from rich.console import Console as RichConsole


class Console(RichConsole):
    """Rich's, which ends with exit code 1 when a pipe is closed: here that says that something diverges."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command line."""
        raise  # the BrokenPipeError that is being handled


def standard_output() -> Console:
    """In a pipe plain text, 100 columns wide unless COLUMNS says otherwise."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=100 if piped else None, highlight=False, markup=False, soft_wrap=False)
