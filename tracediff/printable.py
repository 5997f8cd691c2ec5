"""What others wrote, made fit to be shown: a name in a trace must not clear a screen, nor look like a verdict.

Names, paths and texts are kept as they are wherever they are compared and looked up. They are made printable where
they leave: in the message of an error, in a result before any report of it, and in JSON by its own escapes, so that
whoever reads JSON has them as they are.
"""

import dataclasses
import json
import re
from typing import Any, TypeVar

T = TypeVar("T")
_NOT_ASCII_TEXT = re.compile(r"[^\n\x20-\x7e]")


def printable(what: T) -> T:
    """A text in which Python's escapes, such as \\x1b, stand for every character that does not print.

    Those are control characters of all kinds, line breaks too, and what turns or hides text (`str.isprintable`). Of a
    tuple, list, dict or dataclass every text in it; a printable one is returned itself.
    """
    return what if _is_printable(what) else _changed(what)


def escape_json(text: str) -> str:
    """JSON with its own escapes for what does not print: the same values."""
    return _NOT_ASCII_TEXT.sub(lambda found: _escaped_in_json(found[0]), text)


def _is_printable(what: object) -> bool:
    """Whether nothing in it needs a change, seen at one glance: to visit each text of a long result takes seconds."""
    if isinstance(what, str):
        return what.isprintable()
    import msgspec

    try:
        text = msgspec.json.encode(what, enc_hook=str).decode()
    except UnicodeError:
        return False
    return text.isprintable() and "\\" not in text


def _changed(what: Any) -> Any:
    if isinstance(what, str):
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in what)
    if isinstance(what, tuple | list):
        return type(what)(map(_changed, what))
    if isinstance(what, dict):
        return {_changed(key): _changed(value) for key, value in what.items()}
    if dataclasses.is_dataclass(what) and not isinstance(what, type):
        fields = [field.name for field in dataclasses.fields(what) if field.init]
        return dataclasses.replace(what, **{name: _changed(getattr(what, name)) for name in fields})
    return what


def _escaped_in_json(c: str) -> str:
    return c if c.isprintable() else json.dumps(c)[1:-1]
