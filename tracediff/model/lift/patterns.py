"""What each ggml op computes, in the graph's terms: its kind, and its parameters by name.

An op that is not listed has the kind of its ggml name in lower case and no parameters. Layouts of `op_params`: the
functions of ggml/src/ggml.c that make the nodes.
"""

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tracediff.model.hparams import Pairing, Rope, yarn_magnitude
from tracediff.model.lift.compressed import COMPRESS
from tracediff_reference.description import Node

Attrs = dict[str, Any]
# Windows of these begin at multiples of their size (LLAMA_SWA_TYPE_CHUNKED, src/models/*.cpp): no graph shows it.
CHUNKED = ("llama4",)
_KINDS = MappingProxyType({
    "RMS_NORM": "rms_norm", "NORM": "layer_norm", "MUL_MAT_ID": "linear_id",
    "CONT": "copy", "CPY": "copy", "DUP": "copy",
})  # fmt: skip


def kind(node: Node) -> str:
    """The kind of the op that the node alone makes."""
    return _KINDS.get(node.op, node.op.lower())


def follows_step(node: Node) -> bool:
    """Whether it has parameters that are others at each step, and that nobody knows."""
    read = node.params[_SET_AT : _SET_AT + 1] if is_run(node) else node.params
    return not all(isinstance(param, int) for param in read)


def is_run(node: Node) -> bool:
    """Whether a SET puts one run of elements; then how far apart rows lie is of no account."""
    return node.op == "SET" and len(node.reads) > 1 and node.reads[1] is not None and len(node.reads[1].shape) == 1


_SET_AT = 3  # of nb1, nb2, nb3, offset


def attrs(node: Node) -> Attrs:
    """Its parameters by name."""
    return _ATTRS[node.op](node) if node.op in _ATTRS else {}


def number(node: Node, i: int) -> float:
    """Parameter i as the float32 that its bits are."""
    return float(struct.unpack("<f", struct.pack("<i", integer(node, i)))[0])


def integer(node: Node, i: int) -> int:
    """Parameter i."""
    found = node.params[i] if i < len(node.params) else 0
    return found if isinstance(found, int) else 0


def rope(node: Node) -> Rope:
    """The rotation of a ROPE node. Text has the same position in all sections of a multi-modal one."""
    mode = integer(node, 2)
    pairing: Pairing = "halves" if mode & _HALVES else "neighbours"
    freq_scale, ext_factor = number(node, 6), number(node, 7)
    return Rope(
        pairing=pairing,
        n_rot=integer(node, 1),
        theta=number(node, 5),
        freq_scale=freq_scale,
        ext_factor=ext_factor,
        magnitude=number(node, 8) * (yarn_magnitude(1 / freq_scale) if ext_factor else 1.0),
        beta_fast=number(node, 9),
        beta_slow=number(node, 10),
        n_ctx_orig=integer(node, 4),
        first=integer(node, 15),
        back=node.op == "ROPE_BACK",
    )


_HALVES = 2 | 8  # GGML_ROPE_TYPE_NEOX and _MROPE, ggml.h


def _named(**of: tuple[Callable[[Node, int], Any], int]) -> Callable[[Node], Attrs]:
    return lambda node: {name: read(node, i) for name, (read, i) in of.items()}


def _axis(node: Node, i: int) -> int:
    """An axis of ggml, innermost first, as one counted from the end."""
    return -1 - integer(node, i)


def _times(node: Node) -> Attrs:
    """How often each axis of the source is repeated."""
    source = node.reads[0]
    assert source
    before = (1,) * (len(node.shape) - len(source.shape)) + source.shape
    pairs = [*zip(node.shape, before, strict=True)]
    times = tuple(a // b if isinstance(a, int) and isinstance(b, int) else 1 for a, b in pairs)
    return {"times": times} if all(isinstance(a, int) or a == b for a, b in pairs) else {}


def _dtype(node: Node) -> Attrs:
    return {} if node.type in ("f32", "i32") else {"dtype": node.type}


_FLOAT = 4  # bytes
_EPS = _named(eps=(number, 0))
_GATED = _named(alpha=(number, 2), limit=(number, 3))
_ATTRS: Mapping[str, Callable[[Node], Attrs]] = MappingProxyType({
    "RMS_NORM": _EPS, "NORM": _EPS, "L2_NORM": _EPS,
    "GROUP_NORM": _named(groups=(integer, 0), eps=(number, 1)),
    "SCALE": _named(scale=(number, 0), bias=(number, 1)),
    "CLAMP": _named(low=(number, 0), high=(number, 1)),
    "SOFT_MAX": _named(scale=(number, 0)),
    "ARGSORT": lambda node: {"descending": integer(node, 0) == 1},
    "TOP_K": lambda node: {"k": node.shape[-1]},
    "CONCAT": _named(axis=(_axis, 0)),
    "REPEAT": _times,
    "SET": lambda node: {"first": integer(node, _SET_AT) // _FLOAT},
    "FILL": _named(value=(number, 0)),
    "CONT": _dtype, "CPY": _dtype, "DUP": _dtype,
    "SWIGLU_OAI": _GATED, "SWIGLU_CLAMP": _named(limit=(number, 3)),
    "XIELU": _named(alpha_n=(number, 1), alpha_p=(number, 2), beta=(number, 3), eps=(number, 4)),
    "PAD": lambda node: {"before_after": tuple(integer(node, i) for i in range(8))},
    "ROLL": lambda node: {"shifts": tuple(integer(node, i) for i in range(4))},
    "TRI": _named(part=(integer, 0)),
    "SSM_SCAN": _named(snapshots=(integer, 0)), "GATED_DELTA_NET": _named(snapshots=(integer, 0)),
    "GATED_LINEAR_ATTN": _named(scale=(number, 0)),
    COMPRESS: lambda node: {"n": integer(node, 0), "overlap": bool(integer(node, 1))},
    "DSV4_HC_COMB": _named(eps=(number, 0), iterations=(integer, 1)),
    "DSV4_HC_PRE": _named(scale=(number, 0), sigmoid=(integer, 1)),
})  # fmt: skip
