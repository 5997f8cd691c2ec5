"""What lifted ops are called: by their weight, else as llama.cpp calls their value, else by what they are made of."""

import re
from collections.abc import Container
from types import MappingProxyType

from tracediff.names import ALIASES, NAMES, split

_LLAMA_CPP = MappingProxyType(
    {name.llama_cpp: name.local for name in NAMES.values() if name.llama_cpp} | ALIASES["llama_cpp"]
)
# llama_context::graph_get_cb appends the layer; ggml numbers what has no name, and says of a view what it is a view of.
_OF_LAYER = re.compile(r"(.+)-(\d+)")
_NO_NAME = re.compile(r"(node|leaf)_\d+|.*[ {}].*|norm|norm_w|norm_b|")
_WEIGHT = re.compile(r"\.(weight|bias|scale)$")
_LONGEST = 2  # kinds behind a name: one more says less than the kind alone
_MADE_OF = MappingProxyType({  # kind, and of what
    ("add", "attn_output"): "attn_residual",
    ("concat", "conv_state"): "conv_input",
    ("scale", "token_embd"): "token_embd_scaled",
})  # fmt: skip


def of_weight(weight: str) -> str:
    """The op that multiplies with a weight."""
    return _WEIGHT.sub("", weight)


def of_value(name: str) -> str | None:
    """The canonical name of the value that llama.cpp calls `name`; None where it has none."""
    found = _OF_LAYER.fullmatch(name.removesuffix(" (cont)"))
    local = found[1] if found else name
    if _NO_NAME.fullmatch(local):
        return None
    return in_layer(int(found[2]) if found else None, _LLAMA_CPP.get(local, local))


def of_parts(kind: str, source: str | None) -> str:
    """A name for an op of this kind, made of the value `source`."""
    number, local = split(re.sub(r"#\d+$", "", source or ""))
    known = _MADE_OF.get((kind, local))
    if known or not local or local.count(".") >= _LONGEST:
        return in_layer(number, known or kind)
    return in_layer(number, f"{local}.{kind}")


def unique(name: str, taken: Container[str]) -> str:
    """The name, or with a number behind it the first that is free."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free


def rotated(source: str) -> str:
    """The name of a value after rotary embedding."""
    return re.sub(r"_norm$", "", source) + "_rope"


def cache(name: str) -> tuple[str, str]:
    """Letter and layer of a cache, as in cache_k_l0; elsewhere the name that the model gives it, and its layer."""
    found = re.fullmatch(r"cache_(.+)_l(\d+)", name) or re.fullmatch(r"(.+)-(\d+)", name)
    return (found[1], found[2]) if found else (name, "0")


def in_layer(number: int | None, local: str) -> str:
    """A name in a layer, or outside of all."""
    return local if number is None else f"blk.{number}.{local}"
