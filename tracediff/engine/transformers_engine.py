"""The transformers engine: hooks on a Hugging Face model that record what it computes, under the GGUF's op names.

Nothing is computed here. A value without a module of its own is taken where transformers hands it on: rotated Q and K
are what an attention function is called with, a residual sum is what the next norm reads. What transformers shows
nowhere is left out.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tracediff.engine.recorder import Recorder
from tracediff.engine.torch_engine import StepInput
from tracediff.errors import EngineError
from tracediff.model.checkpoint import PERMUTED_ARCHITECTURES, PERMUTED_OPS
from tracediff.model.graph import Graph, Op
from tracediff.model.pairing import neighbours
from tracediff.names import split
from tracediff.numerics.growing import Growing
from tracediff.numerics.kinds.attention import causal

IMPLEMENTATION = "tracediff"  # the name of our attention function among transformers'

# transformers' names (modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py), with the side of the module on which
# the value stands: where nothing else happens between two modules, one's input is the other's output.
_Side = Literal["input", "output"]
_OF_LAYER: dict[str, tuple[str, _Side]] = {
    "attn_norm": ("input_layernorm", "output"),
    "attn_q": ("self_attn.q_proj", "output"),
    "attn_k": ("self_attn.k_proj", "output"),
    "attn_v": ("self_attn.v_proj", "output"),
    "attn_q_norm": ("self_attn.q_norm", "output"),
    "attn_k_norm": ("self_attn.k_norm", "output"),
    "attn_kqv": ("self_attn.o_proj", "input"),
    "attn_output": ("self_attn.o_proj", "output"),
    "attn_residual": ("post_attention_layernorm", "input"),
    "ffn_norm": ("post_attention_layernorm", "output"),
    "ffn_gate": ("mlp.gate_proj", "output"),
    "ffn_up": ("mlp.up_proj", "output"),
    "ffn_act": ("mlp.down_proj", "input"),
    "ffn_down": ("mlp.down_proj", "output"),
    "ffn_residual": ("", "output"),
}
_OF_MODEL: dict[str, tuple[str, _Side]] = {
    "token_embd": ("model.embed_tokens", "output"),
    "output_norm": ("model.norm", "output"),
    "output": ("lm_head", "output"),
}


class TransformersEngine:
    """A transformers model with hooks that record each op of `graph`. One object runs one sequence.

    The model's attention must run by the name IMPLEMENTATION: `_register` puts it there. `attention` is the one that
    it is: eager, or another of transformers', such as sdpa, which shows no scores and probabilities.
    """

    def __init__(
        self,
        graph: Graph,
        model: Any,
        recorder: Recorder,
        progress: Callable[[float], None] = lambda fraction: None,
        attention: str = "eager",
    ) -> None:
        self._implementation = attention
        self.logits = torch.empty(0)
        self._graph = graph
        self._model = model
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._recorder = recorder
        self._progress = progress
        self._cache: Any = None
        self._step = 0
        self._given = StepInput((), ())
        self._positions = Growing()
        self._hidden = torch.empty(0)  # which scores of this step the mask hides
        self._seen: set[str] = set()

    @torch.inference_mode()
    def run(self, step: int, given: StepInput) -> Tensor:
        """One forward pass, positions and cache being transformers' own; the logits, [T, n_vocab]."""
        self._step, self._given = step, given
        positions = torch.tensor(given.positions, device=self._model.device)
        self._positions.append(positions)
        self._hidden = causal(positions, self._positions.rows)
        self._recorder.step(step, given.tokens, given.positions)
        ids = torch.tensor([given.tokens], device=self._model.device)
        with ExitStack() as hooks:
            for op in self._graph:
                self._hook(op, hooks)
            _register(self._attention, self._implementation)
            result = self._model(ids, past_key_values=self._cache, use_cache=True)
        self._cache = result.past_key_values
        self.logits = result.logits[0]
        return self.logits

    def record_weights(self) -> None:
        """The norm weights as the model holds them."""
        for op in self._graph:
            module = self._module(op.name)
            if op.kind == "rms_norm" and module is not None:
                self._recorder.weight(op.weights[0].name, module.weight)

    def left_out(self) -> list[str]:
        """Ops of the graph that no step so far has recorded, by their local names."""
        missing = [split(op.name)[1] for op in self._graph if op.name not in self._seen]
        return list(dict.fromkeys(missing))

    def _place(self, name: str) -> tuple[str, _Side] | None:
        layer, local = split(name)
        if layer is None:
            return _OF_MODEL.get(local)
        path, side = _OF_LAYER.get(local, (None, "output"))
        return None if path is None else (f"model.layers.{layer}.{path}".rstrip("."), side)  # type: ignore[return-value]

    def _module(self, name: str) -> Any:
        """The module at which an op is recorded; None where this model has none."""
        place = self._place(name)
        return self._modules.get(place[0]) if place else None

    def _hook(self, op: Op, hooks: ExitStack) -> None:
        module, place = self._module(op.name), self._place(op.name)
        if module is None or place is None:
            return
        if place[1] == "input":
            handle = module.register_forward_pre_hook(lambda module, inputs: self._record(op.name, inputs[0][0]))
        else:
            handle = module.register_forward_hook(lambda module, inputs, output: self._record(op.name, _first(output)))
        hooks.callback(handle.remove)

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The model's own attention, watched. `query` is [1, H, T, D], `key` [1, G, S, D] with the cache."""
        blk = f"blk.{module.layer_idx}"
        self._record(f"{blk}.attn_q_rope", query[0].transpose(0, 1))
        self._record(f"{blk}.attn_k_rope", key[0, :, -query.shape[2] :].transpose(0, 1))
        if self._implementation != "eager":
            return _implementation(self._implementation)(module, query, key, value, mask, **kwargs)
        with _Product(query, lambda product: self._record(f"{blk}.attn_scores", product[0])):
            output, probs = _eager(module)(module, query, key, value, mask, **kwargs)
        self._record(f"{blk}.attn_probs", probs[0])
        return output, probs

    def _record(self, name: str, values: Tensor) -> None:
        """A value of this model's layout, without its batch axis, to the trace in the GGUF's."""
        if name not in self._graph:
            return
        op = self._graph[name]
        n_tokens = len(self._given.tokens)
        shape = op.shape(n_tokens, len(self._positions) - n_tokens)
        if tuple(values.shape) not in (shape, (n_tokens, values.numel() // n_tokens)) or values.numel() != _size(shape):
            raise EngineError(
                f"{name} has the shape {list(values.shape)} in transformers, {list(shape)} in this GGUF file: "
                "the two are not the same model, or its attention has a window. Check --hf."
            )
        values = values.reshape(shape)
        if self._graph.hparams.arch in PERMUTED_ARCHITECTURES and split(name)[1] in PERMUTED_OPS:
            values = neighbours(values, values.shape[-1])
        self._recorder.op(self._step, name, values, self._hidden if op.kind == "scores" else None)
        self._seen.add(name)
        self._progress(len(self._seen) / len(self._graph.ops))


def _first(output: Any) -> Tensor:
    """The hidden state, without its batch axis, of a module that may return a tuple."""
    return (output[0] if isinstance(output, tuple) else output)[0]


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _eager(module: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`eager_attention_forward` of the file that the attention class, or one that it inherits from, stands in."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function:
            return function
    raise EngineError(
        f"{type(module).__name__}: no eager_attention_forward beside it: this version of transformers is laid out "
        "otherwise. Version 5 is what this engine was made for."
    )


def _implementation(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: Callable[..., tuple[Tensor, Tensor]] = ALL_ATTENTION_FUNCTIONS[name]
    return found


def _register(attention: Callable[..., Any], implementation: str) -> None:
    """Make `attention` what transformers calls for IMPLEMENTATION, with the masks that `implementation` gets."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS[implementation])


class _Product(TorchFunctionMode):
    """Hands on the first matmul of `left`, this very tensor: of Q, the scores before anything is done to them."""

    def __init__(self, left: Tensor, found: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._left: Tensor | None = left
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__) and args[0] is self._left:
            self._left = None
            self._found(result)
        return result
