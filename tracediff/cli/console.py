"""The terminal that reports are printed on. Apart from the command line, whose help needs none of rich."""

import os
import shutil
import sys

from rich.console import Console as RichConsole


class Console(RichConsole):
    """Rich's, which ends with exit code 1 when a pipe is closed: here that says that something diverges."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command line."""
        raise  # the BrokenPipeError that is being handled


_NARROWEST, _PIPE = 40, 100  # columns


def has_width() -> bool:
    """Whether standard output is so many columns wide, by its terminal or by COLUMNS: a pipe is not."""
    return sys.stdout.isatty() or os.environ.get("COLUMNS", "0").strip("0").isdecimal()


def standard_output() -> Console:
    """In a pipe plain text, 100 columns wide unless COLUMNS says otherwise.

    Never narrower than words are: some terminals and scripts say 0, of which rich makes an empty report.
    """
    width = shutil.get_terminal_size((_PIPE, 0)).columns
    return Console(width=max(width, _NARROWEST), highlight=False, markup=False, soft_wrap=False)
