"""What the scripts that write a page have in common."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_page(about: str | None, page: Callable[[Path], str]) -> int:
    """Print the page that is made in a folder of its own, and write it where --out says."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        text = page(Path(name))
    if options.out:
        options.out.write_text(text)
    print(text)
    return 0
