"""The texts of a model's tokens, as its GGUF file spells them and as people read them."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracediff.model.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # llama_token_type, include/llama.h
_SPELLED = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte, as SentencePiece writes it
# Byte-level BPE writes each byte as a printable character (bytes_to_unicode, openai/gpt-2/src/encoder.py).
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}


class Vocabulary:
    """Token texts and special tokens of a GGUF file; empty where there is no model."""

    def __init__(self, file: "GGUFFile | None" = None) -> None:
        self._file = file
        self._places = file.places("tokenizer.ggml.tokens") if file else ()
        self._metadata: dict[str, object] = file.metadata if file else {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def spelled(self, token: int) -> str | None:
        """The token as the file spells it, with its marks for spaces."""
        return self._file.string(self._places[token]) if self._file and 0 <= token < len(self._places) else None

    def special(self, name: str) -> int | None:
        """The id of the "bos", "eos" or "padding" token."""
        found = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) else None

    def is_special(self, token: int) -> bool:
        """Whether the token stands for no text of its own: <|im_start|>, </s>."""
        return token < len(self._types) and self._types[token] in (_CONTROL, _USER_DEFINED)

    def decode(self, tokens: Iterable[int]) -> str:
        """Their text. A byte that is no UTF-8 by itself becomes U+FFFD."""
        return b"".join(map(self._bytes, tokens)).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        text = self.spelled(token) or ""
        if self.is_special(token):
            return text.encode()
        if self._metadata.get("tokenizer.ggml.model") == "gpt2":
            return b"".join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in text)
        byte = _SPELLED.fullmatch(text)
        if byte and token < len(self._types) and self._types[token] == _BYTE:
            return bytes.fromhex(byte[1])
        return text.replace("\u2581", " ").encode()

    @cached_property
    def _types(self) -> list[int]:
        types = self._metadata.get("tokenizer.ggml.token_type")
        return types if isinstance(types, list) else []
