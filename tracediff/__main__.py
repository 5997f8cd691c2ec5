"""`python -m tracediff`."""

from tracediff.cli import main

if __name__ == "__main__":
    main()
