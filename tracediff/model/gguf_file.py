"""A GGUF file, or a model of several: its metadata and the places of its tensors, read without touching the tensors.

`gguf.GGUFReader` builds a numpy view per vocabulary entry and takes 6.7 s on a vocabulary of 151,936;
this reader steps over string arrays and checks every length against the file before it believes it.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import io
import math
import mmap
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import finalize

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tracediff.errors import ModelError
from tracediff.inputs import Ranges, open_file, stamp

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q", GGUFValueType.FLOAT64: "d",
}  # fmt: skip
_MAX_DIMS = 4  # GGML_MAX_DIMS, ggml.h
_MAX_PARTS = 0xFFFF  # of a model: their number is a uint16
_AHEAD = 1 << 18  # bytes of a header that are read at once from storage
_AGAIN = "Download or convert it again."
_AGAIN_ALL = "Download all parts again, or join them: llama-gguf-split --merge {} OUT.gguf"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies, and in which part of the model. `shape` is C order, outermost first: the reverse of ggml's
    `ne`.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings that was stepped over: where each stands, for `GGUFFile.string`."""

    places: Sequence[int]


class GGUFFile:
    """Metadata and tensor directory of one GGUF file, or of a model that llama-gguf-split, or a converter, wrote as
    several: they are named NAME-00001-of-00003.gguf and so on, and the first is given.

    Raises ModelError when a file is missing, is not GGUF, or ends before what it announces, or is no part of the first
    one's model; and where a tensor is asked for and a file is not what it was when it was opened: no verdict on a
    mixture, and to touch pages that were cut off would end the process.
    """

    def __init__(self, path: Path) -> None:
        first = Part(path)
        self.path, self.metadata = path, first.metadata
        self.parts = [first, *map(Part, _others(first))]
        self.tensors: dict[str, TensorInfo] = {}
        for number, part in enumerate(self.parts):
            if part.place != (number, len(self.parts)):
                raise ModelError(
                    f"{part.path}: it is {_in_words(part.place)}; it should be "
                    f"{_in_words((number, len(self.parts)))}. "
                    f"{_AGAIN_ALL.format(path)}"
                )
            if twice := part.tensors.keys() & self.tensors:
                raise ModelError(f"{part.path}: {min(twice)!r} is in another part too. {_AGAIN_ALL.format(path)}")
            self.tensors |= part.tensors
        announced = self.metadata.get("split.tensors.count", len(self.tensors))
        if announced != len(self.tensors):
            raise ModelError(
                f"{path}: it announces {announced} tensors; its parts have {len(self.tensors)}. "
                f"{_AGAIN_ALL.format(path)}"
            )

    def raw(self, info: TensorInfo) -> memoryview:
        """The bytes of a tensor, still mapped."""
        return self.parts[info.part].raw(info)

    def places(self, key: str) -> Sequence[int]:
        """Where the strings of the array `key` stand; nothing where there is no such array."""
        strings = self.metadata.get(key)
        return strings.places if isinstance(strings, StringArray) else ()

    def string(self, place: int) -> str:
        """The string that stands there: of a vocabulary few are asked for, and to read all of them takes 0.7 s."""
        return self.parts[0].string(place)


class Part:
    """One file, memory-mapped: to read a tensor each time instead takes 0.11 s a gigabyte, as long again as to convert
    it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_file(path)
            finalize(self, self._file.close)
            self._stamp = stamp(self._file)
            self._bytes: mmap.mmap | bytes = _mapped(self._file, self._stamp[0]) if self._stamp[0] else b""
        except OSError as error:
            raise ModelError(f"{path}: cannot open the model: {error.strerror}. Check the path.") from None
        self._there: set[int] = set()  # of a file in some storage: what was read, by where it begins
        self._until = 0 if isinstance(self._file, Ranges) else len(self._bytes)  # where what is there ends
        self._need(4)
        if self._bytes[:4] != b"GGUF":
            raise ModelError(
                f"{path}: not a GGUF file (it begins with {bytes(self._bytes[:4])!r}, not b'GGUF'). "
                "Convert the model with llama.cpp's convert_hf_to_gguf.py."
            )
        self._at = 4
        self._parse()

    def _parse(self) -> None:
        version = self._number("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3, little-endian, are).")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._string()
            self.metadata[key] = self._value(self._value_type())
        number, count = (self.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1)))
        if not all(isinstance(n, int) for n in (number, count)) or not 0 <= number < max(1, count) <= _MAX_PARTS:
            raise ModelError(
                f"{self.path}: 'split.no' is {number!r}, 'split.count' {count!r}: the header is damaged. {_AGAIN}"
            )
        self.place = number, max(1, count)  # of this part among the model's
        directory = [self._tensor() for _ in range(n_tensors)]
        self._header_size = self._at
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: 'general.alignment' is {alignment!r}: the header is damaged. {_AGAIN}")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for info in directory:
            placed = replace(info, offset=start + info.offset, part=number)
            if placed.offset + placed.nbytes > len(self._bytes):
                raise self._truncated(f"tensor {info.name!r} needs {info.nbytes:,} bytes at {placed.offset:,}")
            self.tensors[info.name] = placed

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        return len(self._bytes)

    @property
    def header(self) -> memoryview:
        """The bytes before the tensors' data: all metadata, and each tensor's name, shape, type and place."""
        self._check()
        return memoryview(self._bytes)[: self._header_size]

    def raw(self, info: TensorInfo) -> memoryview:
        """The bytes of a tensor, still mapped."""
        self._check()
        if isinstance(self._file, Ranges) and info.offset not in self._there:
            self._read(info.offset, info.nbytes)
            self._there.add(info.offset)
        return memoryview(self._bytes)[info.offset : info.offset + info.nbytes]

    def string(self, place: int) -> str:
        """The string that stands there."""
        self._check()
        self._at = place
        return self._string()

    def _need(self, end: int) -> None:
        """Have the header until this byte, and some more of it: of a file in some storage."""
        if end > self._until:
            size = min(max(end - self._until, _AHEAD), len(self._bytes) - self._until)
            self._read(self._until, size)
            self._until += size

    def _read(self, at: int, size: int) -> None:
        self._file.seek(at)
        left = memoryview(self._bytes)[at : at + size]
        while left:
            n = self._file.readinto(left)
            if not n:
                raise ModelError(f"{self.path}: {len(left):,} bytes at {at:,} could not be read. Try again.")
            left = left[n:]

    def _check(self) -> None:
        if stamp(self._file) != self._stamp:
            raise ModelError(
                f"{self.path}: the model changed while it was read. Wait until what writes it has ended, and run again."
            )

    def _truncated(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path}: the file is truncated: {what}, but it has {len(self._bytes):,} bytes. {_AGAIN}"
        )

    def _take(self, size: int) -> int:
        at, self._at = self._at, self._at + size
        if self._at > len(self._bytes):
            raise self._truncated(f"its header needs {size:,} bytes at {at:,}")
        self._need(self._at)
        return at

    def _number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._bytes, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        size = self._number("Q")
        at = self._take(size)
        return bytes(self._bytes[at : at + size]).decode("utf-8", errors="replace")

    def _skip_strings(self, count: int) -> Sequence[int]:
        """Walk over them: a vocabulary has 150,000, and a call for each number would take 0.2 s."""
        size_at, at, places = struct.Struct("<Q").unpack_from, self._at, array("Q")
        try:
            for _ in range(count):
                if at + 8 > self._until:
                    self._need(min(at + 8, len(self._bytes)))
                places.append(at)
                at += 8 + size_at(self._bytes, at)[0]
        except (struct.error, OverflowError):  # beyond the end, beyond what an index can be
            raise self._truncated(f"its header needs 8 bytes at {at:,}") from None
        self._take(at - self._at)
        return places

    def _value_type(self) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ModelError(
                f"{self.path}: unknown metadata type {number} at byte {self._at - 4:,}: the header is damaged. {_AGAIN}"
            ) from None

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])
        item, count = self._value_type(), self._number("Q")
        if item == GGUFValueType.STRING:
            return StringArray(self._skip_strings(count))
        if item == GGUFValueType.ARRAY:
            raise ModelError(f"{self.path}: nested arrays in the metadata are not supported. {_AGAIN}")
        code = _SCALARS[item]
        at = self._take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self._bytes, at))

    def _tensor(self) -> TensorInfo:
        name, n_dims = self._string(), self._number("I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise ModelError(
                f"{self.path}: tensor {name!r} has {n_dims} dimensions; ggml has 1 to {_MAX_DIMS}. {_AGAIN}"
            )
        shape = tuple(reversed([self._number("Q") for _ in range(n_dims)]))
        number, offset = self._number("I"), self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(
                f"{self.path}: tensor {name!r} has the unknown type {number}. Known to gguf-py: "
                f"{', '.join(t.name for t in GGML_QUANT_SIZES)}. Try a newer gguf package."
            ) from None
        if shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of {kind.name}'s {block}. "
                f"{_AGAIN}"
            )
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // block * block_bytes)


def _others(first: Part) -> list[Path]:
    """The other parts' files, which are named as llama.cpp looks for them (llama_split_path, llama.cpp)."""
    number, count = first.place
    end = f"-{number + 1:05d}-of-{count:05d}.gguf"
    if count > 1 and not first.path.name.endswith(end):
        raise ModelError(
            f"{first.path}: it is {_in_words(first.place)}, whose name has to end in {end!r}, for the others are "
            "found by it. Rename it."
        )
    names = [f"{first.path.name.removesuffix(end)}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    if number:
        raise ModelError(
            f"{first.path}: it is {_in_words(first.place)}. Give the first: {first.path.with_name(names[0])}"
        )
    return [first.path.with_name(name) for name in names[1:]]


def _in_words(place: tuple[int, int]) -> str:
    return f"part {place[0] + 1} of {place[1]} of a model"


def _mapped(file: io.FileIO | Ranges, size: int) -> mmap.mmap:
    """The file's bytes; of one in some storage room for them, which takes memory where something is read into it.

    Private pages: numpy and torch want writable memory, and nothing else ever writes.
    """
    if isinstance(file, Ranges):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
