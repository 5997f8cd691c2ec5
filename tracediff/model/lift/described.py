"""The description of a model's graph: from a child process, once, then from the user's cache on disk.

What changes a graph is in the key: the file's header (metadata and the tensors' shapes and types), the options, and the
version of llama.cpp. TRACEDIFF_CACHE names another folder; where it is empty nothing is kept.
"""

import hashlib
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec

from tracediff import files
from tracediff.errors import EngineError, OutputError
from tracediff.inputs import url_of
from tracediff.model.gguf_file import GGUFFile
from tracediff_reference.child import Child
from tracediff_reference.description import VERSION, Description, decode
from tracediff_reference.protocol import DescribeRequest, Options

_MOST = 200  # descriptions of 20 to 200 kB; the oldest go first
_DIGEST = hashlib.sha256().digest_size


def describe(file: GGUFFile, options: Options | None = None) -> Description:
    """The graph that llama.cpp builds of `file`; raises EngineError with its words where it builds none."""
    options = _of_graph(options or Options())
    place = _place(file, options)
    found = _kept(place) if place else None
    if found is None:
        data = _ask(file, options)
        found = decode(data)
        if found is None:
            raise EngineError("llama.cpp's graph did not come whole from the child process. Try again.")
        if place:
            _keep(place, data)
    return found


def _of_graph(options: Options) -> Options:
    """The options that change the graph, all others as they are by default."""
    return Options(flash_attn=options.flash_attn, kv_type=options.kv_type, library=options.library)


def _ask(file: GGUFFile, options: Options) -> bytes:
    with files.temporary_folder() as folder:
        out = folder / "graph"
        Child(DescribeRequest(model=str(_local(file, folder)), out=str(out), options=options)).wait()
        return out.read_bytes()


def _local(file: GGUFFile, folder: Path) -> Path:
    """A file that llama.cpp can open: of one in some storage the header, and nothing where its tensors would be."""
    if not url_of(file.path):
        return file.path
    for part in file.parts:  # by their names, which tell llama.cpp where the others are
        path = folder / part.path.name
        path.write_bytes(part.header)
        with path.open("r+b") as header:
            header.truncate(part.size)
    return folder / file.path.name


def _place(file: GGUFFile, options: Options) -> Path | None:
    folder = _folder()
    if folder is None:
        return None
    key = hashlib.sha256()
    for part in file.parts:
        key.update(part.header)
    key.update(msgspec.json.encode([VERSION, version("llama-cpp-python"), options, _build(options.library)]))
    return folder / f"{key.hexdigest()}.graph"


def _build(library: str | None) -> list[tuple[str, int, int]]:
    """What tells one build in a folder from the next: names, sizes and times of its libraries."""
    found = sorted(Path(library).glob("*llama*")) if library else ()
    return [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in found if path.is_file()]


def _kept(place: Path) -> Description | None:
    """None where nothing is kept, or it is damaged: then it is made again."""
    try:
        content = place.read_bytes()
    except OSError:
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    return decode(data) if hashlib.sha256(data).digest() == digest else None


def _keep(place: Path, data: bytes) -> None:
    """A cache that cannot be written is none: nothing but time is lost."""
    with suppress(OSError, OutputError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(place, lambda head: True) as part:
            part.write_bytes(hashlib.sha256(data).digest() + data)
        ours = place.parent.glob(f"{'?' * 64}.graph")  # TRACEDIFF_CACHE may hold other files too
        entries = sorted(ours, key=lambda entry: entry.stat().st_mtime)
        for entry in entries[:-_MOST]:
            entry.unlink(missing_ok=True)


def _folder() -> Path | None:
    """Where descriptions are kept: by the XDG base directories, or what macOS has in their place."""
    said = os.environ.get("TRACEDIFF_CACHE")
    if said is not None:
        return Path(said) if said else None
    home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home) / "tracediff"
