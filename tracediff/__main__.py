"""`python -m tracediff`, and the command `tracediff`."""

import sys

from tracediff import process


def main() -> None:
    """The command line, with a net under it: 1 says that something diverges, and whatever else happens is no 1."""
    try:
        process.prepare()
        from tracediff.cli import main as command_line

        command_line()
    except process.Interrupted as error:
        sys.exit(error.code)
    except Exception as error:
        if "--debug" in sys.argv:
            sys.excepthook(type(error), error, error.__traceback__)
        *_, said = str(error).splitlines() or [type(error).__name__]
        process.complain(f"it could not start: {said}. Is the installation whole, and is there memory (ulimit -v)?")
        sys.exit(process.UNDECIDED)
    finally:
        process.wind_up()


if __name__ == "__main__":
    main()
