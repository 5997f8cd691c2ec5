"""Routed experts, as vLLM and SGLang return them for routing replay: ids [tokens, MoE layers, experts a token].

An .npy file, or the answer of a vLLM server with `prompt_routed_experts` and `routed_experts` as nested lists
(docs.vllm.ai, "Routed Experts Return"). The file counts layers that have experts alone: which these are, the model
tells; without it `routed_experts.J` is to be named with --map.
"""

import operator
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Array, Entry, Say, from_json, in_form, reading

if TYPE_CHECKING:
    from tracediff.model.graph import Graph

_MAGIC = b"\x93NUMPY"
_CHOSEN = "ffn_moe_topk"


def entries(path: Path, say: Say, graph: "Graph | None" = None) -> Iterator[Entry]:
    """One entry a layer, and the tokens where an answer holds them. Raises InterchangeError for other arrays."""
    with reading(path, "an .npy file or JSON"):
        with path.open("rb") as file:
            is_npy = file.read(len(_MAGIC)) == _MAGIC
        answer = None if is_npy else from_json(path.read_text(encoding="utf-8"))
        routes: np.ndarray = np.load(path, allow_pickle=False) if is_npy else np.empty(0)
    with in_form(path, "an answer with routed experts"):
        routes = routes if is_npy else np.array(_routes(answer))
        # The last token that was sampled is not fed.
        tokens = [operator.index(token) for token in (_tokens(answer) if answer else ())][: len(routes)]
        fed = np.array(tokens, np.int64)
    _check(path, routes)
    layers = [name for name in graph.ops if name.endswith(_CHOSEN)] if graph else []
    if graph and len(layers) != routes.shape[1]:
        raise InterchangeError(
            f"{path}: routes of {routes.shape[1]} layers, where the model has {len(layers)} with experts. Is it of "
            "this model, and of all pipeline ranks?"
        )
    if tokens:
        yield Entry(0, "tokens", partial(Array, fed, "int64"))
    for layer in range(routes.shape[1]):
        values = routes[:, layer].astype(np.float32)
        yield Entry(0, f"routed_experts.{layer}", partial(Array, values, "f32"), layers[layer] if layers else None)


def _routes(answer: Any) -> list[Any]:
    choice = answer["choices"][0] if isinstance(answer, dict) and answer.get("choices") else answer
    if isinstance(choice, list):
        return choice
    prompt = choice.get("prompt_routed_experts") or answer.get("prompt_routed_experts") or []
    return [*prompt, *(choice.get("routed_experts") or [])]


def _tokens(answer: Any) -> list[int]:
    if not isinstance(answer, dict):
        return []
    choice = answer["choices"][0] if answer.get("choices") else answer
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    return [*prompt, *(choice.get("token_ids") or [])] if prompt else []


def _check(path: Path, routes: np.ndarray) -> None:
    wrong = None
    if routes.ndim != 3 or not routes.size:
        wrong = f"its shape is {list(routes.shape)}, where [tokens, layers, experts a token] is expected"
    elif routes.dtype.kind not in "iu":
        wrong = f"it holds {routes.dtype}, and ids of experts are whole numbers"
    elif routes.min() < 0:
        wrong = f"it holds {routes.min()}, which stands for tokens that were not routed"
    elif not routes.any():
        wrong = "all ids are 0: of a buffer that nobody has filled"
    elif routes.shape[2] > 1 and (np.diff(np.sort(routes, -1), axis=-1) == 0).any():
        wrong = "a token goes twice to the same expert: ranks were added up, or the axes are others"
    if wrong:
        raise InterchangeError(f"{path}: {wrong}. Record the routes again.")
