"""The command line: the only place that prints and the only place that catches."""

import io
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tracediff import __version__
from tracediff.cli.output import DIVERGED, INTERRUPTED
from tracediff.errors import TracediffError, in_one_line, wants_memory
from tracediff.printable import printable
from tracediff.process import UNDECIDED, complain, drop, interruption

_DEBUG, _ENDED = "--debug", "ended"
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
            sys.stdout.flush()  # of --version and --help too: at exit Python has a code of its own for a full disk
            raise
        except _UsageError as error:
            error.message = printable(error.message)
            raise
        except BaseException as error:
            code = _failed(error, ctx.obj[_DEBUG])
        ctx.obj[_ENDED] = True
        raise typer.Exit(code)


def _failed(error: BaseException, debug: bool) -> int:
    """Say what went wrong, and what was kept of what was being written; the exit code for it."""
    code = UNDECIDED
    match error:
        case KeyboardInterrupt():
            code = getattr(error, "code", INTERRUPTED)
            said = "interrupted." if code == INTERRUPTED else f"ended by {error}."
        case TracediffError():
            said = str(error)
        case UnicodeError():
            said = f"{error}. Paths and prompts must be UTF-8."
        case BrokenPipeError():  # the reader of our output went away: `tracediff ... | head`
            said = ""
        case MemoryError() | RuntimeError() | ImportError() if wants_memory(error):
            said = f"out of memory: {_first_line(error)}. Give it more, shorten the prompt, or use --capture layers."
        case OSError():
            said = f"{type(error).__name__}: {error}. Check the path, the permissions and the space left."
        case _:
            if debug:
                traceback.print_exception(error)
            said = _bug(error)
    drop(sys.stdout)
    if said:
        said = said if isinstance(error, TracediffError) else printable(said)
        complain("\n".join([said, *map(printable, getattr(error, "__notes__", ()))]))
    return code


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
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
    state = {_DEBUG: _DEBUG in arguments, _ENDED: False}
    try:
        app([argument for argument in arguments if argument != _DEBUG], obj=state)
    except SystemExit as ended:
        if state[_ENDED]:
            raise
        signalled = interruption(ended)  # typer has a code of its own for it
        if signalled:
            raise SystemExit(signalled.code) from None
        if ended.code == DIVERGED:  # and for a pipe that is closed while it prints help
            raise SystemExit(UNDECIDED) from None
        raise
    except OSError as error:  # standard output was full when it printed help
        raise SystemExit(_failed(error, state[_DEBUG])) from None


def _bug(error: BaseException) -> str:
    """What is said of an error that nobody foresaw, in one line."""
    return (
        f"this is a bug of tracediff {__version__}, and no verdict: {in_one_line(error)}. Please report it with the "
        "command and what it prints with --debug added."
    )


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the versions that a result may depend on.")] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of a bug; also after a command.")] = False,
) -> None:
    """Hold the options that belong to no command."""
    if version:
        from tracediff import versions

        print("\n".join(versions.lines()))  # noqa: T201
        raise typer.Exit
