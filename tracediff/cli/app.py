"""The command line: the only place that prints and the only place that catches."""

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tracediff import __version__
from tracediff.cli.output import INTERRUPTED, UNDECIDED
from tracediff.errors import TracediffError


class _Commands(TyperGroup):
    """Runs a command and turns every expected failure into one message and an exit code.

    Within typer, for what typer catches itself changes: Ctrl-C was Abort, then Exit(130); a closed pipe is
    exit code 1, which here says that something diverges.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _complain("interrupted. What was traced so far is readable where it was saved (-o, --save).")
            code = INTERRUPTED
        except TracediffError as error:
            code = _complain(str(error))
        except UnicodeError as error:
            code = _complain(f"{error}. Paths and prompts must be UTF-8.")
        except BrokenPipeError:  # the reader of our output went away: `tracediff ... | head`
            code = UNDECIDED
            _drop_output()
        except (OSError, MemoryError) as error:
            code = _complain(f"{type(error).__name__}: {error}. Check the path, the permissions and the space left.")
            _drop_output()
        raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Find the first op at which an LLM engine goes wrong, and what the mistake is. llama.cpp is the reference.",
    epilog="Exit code 0: nothing diverges. 1: something does. 2: it could not be decided.",
)


def main() -> None:
    """The entry point."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows ? for them
    app()


def _complain(message: str) -> int:
    print(f"tracediff: {message}", file=sys.stderr)  # noqa: T201
    return UNDECIDED


def _drop_output() -> None:
    """Drop what standard output does not take any more: Python would try again at exit, and complain again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Hold the options that belong to no command."""
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit
