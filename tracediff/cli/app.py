"""The command line: the only place that prints and the only place that catches."""

import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tracediff import __version__
from tracediff.cli.output import INTERRUPTED, UNDECIDED
from tracediff.errors import TracediffError
from tracediff.printable import printable

_DEBUG = "--debug"
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, whether typer imports click or brings its own


class _Commands(TyperGroup):
    """Runs a command and turns every failure into one message and an exit code, which is never 1: that is a verdict.

    Within typer, for what typer catches itself changes: Ctrl-C was Abort, then Exit(130); a closed pipe is
    exit code 1, which here says that something diverges.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except _UsageError as error:
            error.message = printable(error.message)
            raise
        except KeyboardInterrupt as error:
            _complain("interrupted.", error)
            code = INTERRUPTED
        except TracediffError as error:
            code = _complain(str(error), error)
        except UnicodeError as error:
            code = _complain(printable(f"{error}. Paths and prompts must be UTF-8."))
        except BrokenPipeError:  # the reader of our output went away: `tracediff ... | head`
            code = UNDECIDED
            _drop_output()
        except (OSError, MemoryError) as error:
            said = printable(f"{type(error).__name__}: {error}")
            code = _complain(f"{said}. Check the path, the permissions and the space left.")
            _drop_output()
        except Exception as error:
            if ctx.obj[_DEBUG]:
                traceback.print_exc()
            code = _complain(printable(_bug(error)))
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
    """The entry point. `--debug` may stand before or after the command's name, so no command needs to know of it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows ? for them
    arguments = sys.argv[1:]
    app([argument for argument in arguments if argument != _DEBUG], obj={_DEBUG: _DEBUG in arguments})


def _complain(message: str, error: BaseException | None = None) -> int:
    """Say it, and what was noted of the error on its way here: what was kept, and where."""
    notes = map(printable, getattr(error, "__notes__", ()))
    print(f"tracediff: {message}", *notes, sep="\n", file=sys.stderr)  # noqa: T201
    return UNDECIDED


def _bug(error: Exception) -> str:
    """What is said of an error that nobody foresaw, in one line."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        f"this is a bug of tracediff {__version__}, and no verdict: {said} (in {frame.name}, line {frame.lineno} of "
        f"{os.path.basename(frame.filename)}). Please report it with the command and what it prints with --debug added."
    )


def _drop_output() -> None:
    """Drop what standard output does not take any more: Python would try again at exit, and complain again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of a bug; also after a command.")] = False,
) -> None:
    """Hold the options that belong to no command."""
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit
