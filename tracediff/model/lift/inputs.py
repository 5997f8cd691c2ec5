"""What llama.cpp sets at each step by itself, outside of its graph: as ops of the step's positions, known by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tracediff.model.lift.compressed import BLOCKS
from tracediff.model.lift.patterns import Attrs
from tracediff_reference.description import POSITIONS, Node


@dataclass(frozen=True, slots=True)
class Made:
    """An op that reads positions: those of the step, and with `of_keys` those of all keys too."""

    name: str
    kind: str
    attrs: Attrs
    of_keys: bool = False


def made_of_positions(node: Node, metadata: Mapping[str, Any]) -> Made | None:
    """The op whose value an input of the graph holds; None where nobody knows what it is (src/llama-graph.cpp)."""
    name, arch = node.name, metadata.get("general.architecture")
    if found := _OF_BLOCKS.fullmatch(name):
        return _of_blocks(*found.groups())
    if name.endswith("kq_mask"):
        return Made("attn_mask", "mask", {}, of_keys=True)
    if name == "inp_attn_scale":
        return Made("attn_temperature", "temperature", _temperature(metadata))
    if name.endswith(("_k_rot", "_v_rot")):
        return Made("attn_rot", "hadamard", {"n": node.shape[-1]})
    if name.startswith("pos_bucket"):
        n = metadata[f"{arch}.attention.relative_buckets_count"]
        return Made(name, "relative_buckets", {"n": n, "causal": node.shape[-1] == POSITIONS}, of_keys=True)
    if name in _DECAYS:
        return Made(name, "decays", {"heads": metadata[f"{arch}.attention.head_count"], "of": name.partition("_")[0]})
    return None


_OF_BLOCKS = re.compile(rf"dsv4_({'|'.join(BLOCKS)})_(kq_mask|state_pos|state_write_pos)")


def _of_blocks(cache: str, what: str) -> Made:
    """What is made of where a token is in its block (src/llama-kv-cache-dsv4.cpp, dsv4_build_comp_plan)."""
    n = BLOCKS[cache]
    match what:
        case "kq_mask":
            return Made(f"{cache}_mask", "mask", {"block": n}, of_keys=True)
        case "state_pos":
            return Made(f"{cache}_place", "place_in_block", {"n": n})
    return Made(f"{cache}_start", "block_start", {"n": n})


_DECAYS = ("slopes", "q_decay_exp", "k_decay_exp", "diag_decay_exp")  # src/models/minimax-01.cpp


def _temperature(metadata: Mapping[str, Any]) -> Attrs:
    """How queries grow with their position (src/models/*.cpp)."""
    arch = metadata["general.architecture"]
    if arch == "llama4":
        return {"scale": 0.1, "every": 8192, "offset": 1.0}
    key = "attention.temperature_length" if f"{arch}.attention.temperature_length" in metadata else _TRAINED
    every = metadata.get(f"{arch}.{key}", metadata.get(f"{arch}.context_length"))
    return {"scale": metadata[f"{arch}.attention.temperature_scale"], "every": every, "offset": 0.0}


_TRAINED = "rope.scaling.original_context_length"
