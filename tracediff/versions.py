"""The versions that a result may depend on."""

import platform
from collections.abc import Iterator
from importlib import metadata

from tracediff import __version__


def lines() -> Iterator[str]:
    """A line for each, without importing any of it."""
    yield f"tracediff {__version__}"
    yield f"Python {platform.python_version()} ({platform.system()} {platform.machine()})"
    for name in ("torch", "numpy", "llama-cpp-python", "gguf", "transformers"):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed"
