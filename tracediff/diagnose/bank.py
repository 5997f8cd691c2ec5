"""The bank of known mistakes. Each is a small change to an op, declared once: planted it makes a fault for tests
and demos, tried on a faulty op it is a hypothesis.

A mistake yields variants of the op. Given what the engine made of the op (`Seen`), parameters are fitted to it;
without, the usual wrong value is planted.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.dequant import BLOCK_MISTAKES, read_with
from tracediff.errors import TracediffError
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Graph, Op, Weight
from tracediff.model.weights import dequantize, raw_rows
from tracediff.names import layer_of, split
from tracediff.numerics import ops

NORMS = ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm", "output_norm")
LAYER_LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LINEARS = (*LAYER_LINEARS, "output")
ROPES = ("attn_q_rope", "attn_k_rope")


@dataclass(frozen=True, slots=True)
class Seen:
    """What an engine made of an op: its inputs as recorded and its output, all float64."""

    inputs: tuple[Tensor, ...]
    output: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """What a mistake may look at besides the op."""

    graph: Graph
    file: GGUFFile
    seen: Seen | None = None


Variants = Iterator[tuple[Op, str]]  # the op as a mistaken engine has it, and what is wrong in words


@dataclass(frozen=True, slots=True)
class Mistake:
    """One known mistake. `ops` are the local names that it applies to; `look` says where to look in one's code."""

    name: str
    text: str
    look: str
    ops: tuple[str, ...]
    change: Callable[[Op, Context], Variants]
    link: str = ""


BANK: dict[str, Mistake] = {}
# From the outside of a segment these are one mistake: silu(up) * gate is what comes of swapped weights too, rope in the
# other pairing is the right rope of rows permuted (q and k alike, so that q.k is the same), and so on.
ALIKE = {
    a: b
    for pair in (
        ("act_swapped", "gate_up_swapped"), ("rope_pairing", "rope_permuted"), ("attention_scale", "scores_scaled"),
    )
    for a, b in (pair, pair[::-1])
}  # fmt: skip


def _mistake(
    name: str, text: str, look: str, applies_to: tuple[str, ...], link: str = ""
) -> Callable[[Callable[[Op, Context], Variants]], Callable[[Op, Context], Variants]]:
    def register(change: Callable[[Op, Context], Variants]) -> Callable[[Op, Context], Variants]:
        BANK[name] = Mistake(name, text, look, applies_to, change, link)
        return change

    return register


def undoes(changed: Op, op: Op) -> bool:
    """Whether a mistake in an op that has one already puts itself in its place."""
    replaced = [(op.function, changed.function)]
    replaced += [(weight.read, other.read) for weight, other in zip(op.weights, changed.weights, strict=False)]
    return any(before is not None and before is not after for before, after in replaced)


def plant(graph: Graph, file: GGUFFile, fault: str) -> Graph:
    """The graph with a fault planted, as in "rope_pairing" (every layer), "rope_pairing@3" or "eps@output_norm".

    Raises TracediffError when there is no such fault, nothing in this model that it applies to, or another fault that
    it would undo.
    """
    name, _, place = fault.partition("@")
    if name not in BANK:
        raise TracediffError(f"unknown fault {name!r}. `tracediff faults` lists them: {', '.join(BANK)}.")
    mistake = BANK[name]
    changed = []
    for op in graph:
        local = split(op.name)[1]
        if local in mistake.ops and (not place or place in (local, op.name, str(layer_of(op.name)))):
            variant = next(mistake.change(op, Context(graph, file)), None)
            if variant and undoes(variant[0], op):
                raise TracediffError(
                    f"the fault {fault!r} would undo the one that is in {op.name} already: plant them in different ops."
                )
            if variant:
                changed.append(variant[0])
    if not changed:
        raise TracediffError(
            f"the fault {fault!r} applies to nothing in this {graph.hparams.arch} model of "
            f"{graph.hparams.n_layer} layers. It is made for: {', '.join(mistake.ops)}."
        )
    return graph.changed(*changed)


# --- weights -----------------------------------------------------------------------------------------------------


def _values(file: GGUFFile, info: TensorInfo) -> Tensor:
    return dequantize(info, raw_rows(file, info)).reshape(info.shape)


def _reading(op: Op, read: Callable[[GGUFFile, TensorInfo], Any], weight: int = 0) -> Op:
    weights = list(op.weights)
    weights[weight] = replace(weights[weight], read=read)
    return replace(op, weights=tuple(weights))


@_mistake(
    "weight_transposed", "the matmul reads its weight transposed",
    "the leading dimension and the transpose flag of the GEMM call", LINEARS, "llama-orch 63343209",
)  # fmt: skip
def _transposed(op: Op, _: Context) -> Variants:
    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        n_out, n_in = info.shape
        return _values(file, info).reshape(n_in, n_out).T

    yield _reading(op, read), f"{op.weights[0].name} is read transposed (leading dimension of the wrong side)"


@_mistake(
    "embedding_transposed", "the embedding table is read column by column",
    "the stride of the embedding lookup", ("token_embd",), "rustorch 22a94650",
)  # fmt: skip
def _embedding_transposed(op: Op, _: Context) -> Variants:
    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        n_vocab, n_embd = info.shape
        return _values(file, info).reshape(n_embd, n_vocab).T

    yield _reading(op, read), "the embedding table is read column by column: row t is the column t"


@_mistake(
    "weight_zero", "the weight was never loaded: zeros", "the loader's table of tensor names",
    LINEARS, "llama-orch 8bb3f6e5",
)  # fmt: skip
def _zero(op: Op, _: Context) -> Variants:
    yield (
        _reading(op, lambda file, info: torch.zeros(info.shape)),
        f"{op.weights[0].name} is all zeros: it was never loaded",
    )


@_mistake(
    "bias_missing", "the bias is not added", "whether the loader reads the .bias tensors and the kernel adds them",
    LINEARS, "ANEForge#253",
)  # fmt: skip
def _no_bias(op: Op, _: Context) -> Variants:
    if len(op.weights) > 1:
        yield replace(op, weights=op.weights[:1]), f"{op.weights[1].name} is not added"


@_mistake(
    "bias_twice", "the bias is added twice", "a bias both fused into the matmul and added after it", LINEARS,
)  # fmt: skip
def _bias_twice(op: Op, _: Context) -> Variants:
    if len(op.weights) > 1:
        yield (
            _reading(op, lambda file, info: 2 * _values(file, info), 1),
            f"{op.weights[1].name} is added twice",
        )


def _permuting(heads: int, inverse: bool) -> Callable[[GGUFFile, TensorInfo], Tensor]:
    """Rows from halves to neighbours in each head, as converters of Llama do; or back."""

    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        w = _values(file, info)
        shape = (heads, -1, 2, w.shape[1]) if inverse else (heads, 2, -1, w.shape[1])
        return w.reshape(shape).swapaxes(1, 2).reshape(w.shape)

    return read


@_mistake(
    "rope_permuted", "the projection's rows are permuted for the other rope layout (once too often, or never)",
    "the loader's or converter's permutation of Q and K", ("attn_q", "attn_k"), "llama.cpp#22611",
)  # fmt: skip
def _permuted(op: Op, context: Context) -> Variants:
    h = context.graph.hparams
    own = h.n_head if split(op.name)[1] == "attn_q" else h.n_head_kv

    yield _reading(op, _permuting(own, inverse=False)), "Q/K rows are permuted from halves to neighbours"
    yield _reading(op, _permuting(own, inverse=True)), "Q/K rows are permuted from neighbours to halves"


@_mistake(
    "kv_permuted_as_q", "the rows of K are permuted with the number of query heads",
    "n_head where n_head_kv belongs in the permutation", ("attn_k",), "transformers#31788",
)  # fmt: skip
def _permuted_as_q(op: Op, context: Context) -> Variants:
    h = context.graph.hparams
    n_rows = op.weights[0].shape[0]
    if h.n_head_kv != h.n_head and n_rows % (2 * h.n_head) == 0:
        read = _permuting(h.n_head, inverse=False)
        yield _reading(op, read), f"K rows are permuted as {h.n_head} heads; K has {h.n_head_kv}"


@_mistake(
    "head_is_embedding", "the embedding is used as the output head of a model that has its own",
    "tie_word_embeddings, and whether output.weight is loaded", ("output",), "ComfyUI#15048",
)  # fmt: skip
def _embedding_head(op: Op, context: Context) -> Variants:
    if op.weights[0].name != "token_embd.weight":
        tied = Weight("token_embd.weight", op.weights[0].shape)
        yield (
            replace(op, weights=(tied, *op.weights[1:])),
            "token_embd.weight is the head; output.weight is in the file",
        )


@_mistake(
    "wrong_layer", "the weight of another layer is read", "the layer index in the loader",
    (*LAYER_LINEARS, *NORMS[:-1]),
)  # fmt: skip
def _other_layer(op: Op, context: Context) -> Variants:
    layer = layer_of(op.name)
    assert layer is not None
    near = [n for n in (layer - 1, layer + 1, 0) if 0 <= n < context.graph.hparams.n_layer and n != layer]
    for n in dict.fromkeys(near):
        weights = tuple(replace(w, name=w.name.replace(f"blk.{layer}.", f"blk.{n}.")) for w in op.weights)
        yield replace(op, weights=weights), f"the weights of layer {n} are used"


@_mistake(
    "gate_up_swapped", "gate and up are swapped", "the order of the two halves of a fused gate-up weight",
    ("ffn_gate", "ffn_up"), "mlx-lm#767",
)  # fmt: skip
def _swapped(op: Op, _: Context) -> Variants:
    names = {"gate": "up", "up": "gate"}
    this = "gate" if "ffn_gate" in op.name else "up"
    weights = tuple(replace(w, name=w.name.replace(f"ffn_{this}", f"ffn_{names[this]}")) for w in op.weights)
    yield replace(op, weights=weights), f"ffn_{this} multiplies with ffn_{names[this]}.weight"


for _block in BLOCK_MISTAKES:

    def _dequantised(op: Op, context: Context, block: Any = _block) -> Variants:
        if op.weights and context.file.tensors[op.weights[0].name].type.name == block.type:
            yield _reading(op, read_with(block)), f"{block.text} ({op.weights[0].name})"

    BANK[_block.name] = Mistake(
        _block.name, _block.text, f"the dequantisation of {_block.type} blocks", (*LINEARS, "token_embd"), _dequantised,
        _block.link,
    )  # fmt: skip


# --- rows --------------------------------------------------------------------------------------------------------


def _with_function(op: Op, function: Callable[..., Tensor]) -> Op:
    return replace(op, function=function)


@_mistake(
    "row_before", "each row is the result of the row before it", "the row offset into the batch",
    LINEARS, "llama-cpp-python#1179",
)  # fmt: skip
def _row_before(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return ops.linear(torch.cat((x[:1], x[:-1])), w, b)

    yield _with_function(op, function), "row t is computed from the input of row t - 1"


@_mistake(
    "first_row_only", "every row of the batch is computed from row 0", "the stride of the batch in the kernel",
    LINEARS, "llama.cpp#7903",
)  # fmt: skip
def _first_row(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return ops.linear(x[:1].expand_as(x), w, b)

    yield _with_function(op, function), "every row is computed from the input of row 0"


# --- embedding and norms -----------------------------------------------------------------------------------------


@_mistake(
    "embedding_scaled", "the embedding is multiplied by sqrt(n_embd), which is Gemma's alone",
    "the embedding scale of another family", ("token_embd",), "vllm#48010",
)  # fmt: skip
def _embedding_scaled(op: Op, context: Context) -> Variants:
    scale = math.sqrt(context.graph.hparams.n_embd)
    yield (
        _with_function(op, lambda rows: rows * scale),
        f"embedding rows are multiplied by sqrt(n_embd) = {scale:.4g}",
    )


@_mistake(
    "eps", "another epsilon in the norm", "the epsilon: it is read from the file, 1e-5 and 1e-6 are both common",
    NORMS, "llama.cpp#2373",
)  # fmt: skip
def _eps(op: Op, context: Context) -> Variants:
    right = op.attrs["eps"]
    if context.seen is None:
        yield op.with_attrs(eps=right * 10), f"eps is {right * 10:g} instead of {right:g}"
        return
    for eps in (
        *(e for e in (1e-5, 1e-6, 1e-12, 1e-8, 0.0, 1e-4, 1e-3, 1e-7) if not math.isclose(e, right)),
        _fitted_eps(op, context),
    ):
        if eps is not None:
            yield op.with_attrs(eps=eps), f"eps is {eps:.3g} instead of {right:g}"


def _fitted_eps(op: Op, context: Context) -> float | None:
    """From y = x w / sqrt(ms + eps) in the row where eps weighs most: the one of the smallest mean square."""
    assert context.seen
    x = context.seen.inputs[0].flatten(0, -2)
    y = context.seen.output.flatten(0, -2)
    ms = x.square().mean(-1)
    row = int(ms.argmin())
    weight = _values(context.file, context.file.tensors[op.weights[0].name]).double().flatten()
    ratio = (x[row] * weight) @ y[row] / (y[row] @ y[row])
    eps = float(ratio.square() - ms[row])
    return eps if 0 < eps < 1 else None


@_mistake(
    "norm_weight_minus_one", "1 is taken from the norm weight", "a 1 + w convention: GGUF weights have their 1 already",
    NORMS, "Liger-Kernel#74",
)  # fmt: skip
def _minus_one(op: Op, _: Context) -> Variants:
    yield _reading(op, lambda file, info: _values(file, info) - 1), f"{op.weights[0].name} is used as w - 1"


@_mistake(
    "norm_weight_plus_one", "1 is added to the norm weight", "a 1 + w convention of another family (Gemma)",
    NORMS, "mold#1078",
)  # fmt: skip
def _plus_one(op: Op, _: Context) -> Variants:
    yield _reading(op, lambda file, info: _values(file, info) + 1), f"{op.weights[0].name} is used as 1 + w"


@_mistake(
    "norm_scaled", "the norm's result is multiplied by a factor",
    "a 'repaired' norm weight: weights far from 1 are normal", NORMS, "llama-orch",
)  # fmt: skip
def _norm_scaled(op: Op, context: Context) -> Variants:
    factor = 0.1401
    if context.seen:
        right = ops.rms_norm(context.seen.inputs[0], _weight_of(op, context), op.attrs["eps"])
        factor = float((right * context.seen.output).sum() / right.square().sum())
    if factor != 1.0:
        yield (
            _reading(op, lambda file, info: _values(file, info) * factor),
            f"{op.weights[0].name} or the result is multiplied by {factor:.4g}",
        )


def _weight_of(op: Op, context: Context) -> Tensor:
    return _values(context.file, context.file.tensors[op.weights[0].name]).double()


@_mistake(
    "norm_skipped", "the norm is skipped", "whether the norm is applied at all", NORMS, "aprender#2085",
)  # fmt: skip
def _skipped(op: Op, _: Context) -> Variants:
    yield _with_function(op, lambda x, w, eps: x), "the input passes through unchanged"


@_mistake("norm_without_weight", "the norm's weight is not applied", "whether the weight is loaded", NORMS)
def _no_weight(op: Op, _: Context) -> Variants:
    yield _reading(op, lambda file, info: torch.ones(info.shape)), f"{op.weights[0].name} is not applied"


@_mistake(
    "layer_norm", "the mean is subtracted: LayerNorm instead of RMS norm", "which norm the family uses", NORMS,
)  # fmt: skip
def _layer_norm(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x - x.mean(-1, keepdim=True), w, eps)

    yield _with_function(op, function), "the mean is subtracted before norming"


@_mistake(
    "norm_f16_overflow", "the mean of squares is taken in float16, which overflows beyond |x| = 256",
    "the accumulator's type in the norm", NORMS, "llama#1048",
)  # fmt: skip
def _norm_f16(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, eps: float) -> Tensor:
        squares = x.half().square()
        mean = squares.double().mean(-1, keepdim=True).to(x.dtype)
        return x * torch.rsqrt(mean + eps) * w

    yield _with_function(op, function), "squares are float16: infinite where |x| > 256"


# --- rope --------------------------------------------------------------------------------------------------------


@_mistake(
    "rope_pairing", "rope pairs the wrong channels", "the rope kernel's pairing, and the family's rope type",
    ROPES, "ik_llama.cpp#2290",
)  # fmt: skip
def _pairing(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    words = {"halves": "halves (i, i + n/2)", "neighbours": "neighbouring channels (2i, 2i + 1)"}
    wrong = "halves" if rope.pairing == "neighbours" else "neighbours"
    yield (
        op.with_attrs(rope=replace(rope, pairing=wrong)),
        f"rope pairs {words[wrong]}; this model pairs {words[rope.pairing]}",
    )


@_mistake(
    "rope_theta", "another base frequency", "rope.freq_base of the file, not a default", ROPES, "candle#3746",
)  # fmt: skip
def _theta(op: Op, context: Context) -> Variants:
    rope = op.attrs["rope"]
    tried = [t for t in (1e4, 1e6, 5e5, 1e5) if t != rope.theta]
    if context.seen is None:
        tried = tried[:1]
    elif (fitted := _fitted_theta(op, context.seen)) is not None:
        tried.append(fitted)
    for theta in tried:
        yield (
            op.with_attrs(rope=replace(rope, theta=theta)),
            f"rope's base is {theta:.6g} instead of {rope.theta:.6g}",
        )


def _angles_of(op: Op, seen: Seen) -> tuple[Tensor, Tensor] | None:
    """Angle by which each pair turned at the first position that turns at all, and that position."""
    rope, x, y = op.attrs["rope"], seen.inputs[0], seen.output
    positions = seen.inputs[1]
    rows = torch.nonzero(positions > 0).flatten()
    if not len(rows):
        return None
    row = rows[0]
    axis = -1 if rope.pairing == "neighbours" else -2
    shape = (-1, 2) if rope.pairing == "neighbours" else (2, -1)
    (a, b), (c, d) = (v[row, ..., : rope.n_rot].unflatten(-1, shape).unbind(axis) for v in (x, y))
    turned = torch.atan2((a * d - b * c).sum(0), (a * c + b * d).sum(0))
    return turned, positions[row]


def _fitted_theta(op: Op, seen: Seen) -> float | None:
    """From the slope of log(angle) over the pairs: angle_i = p theta^(-2i/n)."""
    found = _angles_of(op, seen)
    if found is None:
        return None
    angles, position = found
    n = op.attrs["rope"].n_rot
    usable = [i for i in range(1, n // 2) if angles[i] > 1e-9 and float(position) < math.pi]
    if not usable:
        return None
    i = usable[-1]
    return float((float(angles[i]) / float(position)) ** (-n / (2 * i)))


@_mistake(
    "rope_factors_ignored", "the frequency factors of rope_freqs.weight are ignored",
    "whether rope_freqs.weight divides the frequencies (Llama 3.1 and later)", ROPES, "llama.cpp#8676",
)  # fmt: skip
def _no_factors(op: Op, _: Context) -> Variants:
    if op.weights:
        yield replace(op, weights=()), "rope_freqs.weight is ignored"


@_mistake(
    "rope_scaling_ignored", "rope scaling is ignored", "rope.scaling.* of the file", ROPES,
)  # fmt: skip
def _no_scaling(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    plain = replace(rope, freq_scale=1.0, ext_factor=0.0, magnitude=1.0)
    if plain != rope:
        yield op.with_attrs(rope=plain), "rope scaling is ignored: plain frequencies are used"


@_mistake(
    "rope_magnitude", "YaRN's attention factor is dropped or applied twice", "mscale in the rope kernel",
    ROPES, "llama.cpp#17945",
)  # fmt: skip
def _magnitude(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    if rope.magnitude != 1.0:
        yield op.with_attrs(rope=replace(rope, magnitude=1.0)), "YaRN's attention factor is dropped"
        yield (
            op.with_attrs(rope=replace(rope, magnitude=rope.magnitude**2)),
            "YaRN's attention factor is applied twice",
        )


@_mistake(
    "rope_dim", "frequencies are spread over the whole head, not over the rotary dimension",
    "the denominator of the frequency exponent", ROPES, "pie#602",
)  # fmt: skip
def _rope_dim(op: Op, context: Context) -> Variants:
    rope, head_dim = op.attrs["rope"], context.graph.hparams.head_dim
    if rope.n_rot != head_dim:
        theta = rope.theta ** (rope.n_rot / head_dim)
        yield (
            op.with_attrs(rope=replace(rope, theta=theta)),
            "frequencies use head_dim where the rotary dimension belongs",
        )
        yield (
            op.with_attrs(rope=replace(rope, n_rot=head_dim)),
            "all channels are rotated, not only the rotary dimension",
        )


@_mistake("rope_reversed", "rope turns the wrong way", "the sign of the sine", ROPES)
def _reversed(op: Op, _: Context) -> Variants:
    def function(x: Tensor, positions: Tensor, factors: Tensor | None = None, **attrs: Any) -> Tensor:
        return ops.rope(x, -positions, factors, **attrs)

    yield _with_function(op, function), "rope turns the wrong way: the sine's sign is flipped"


def _repositioned(op: Op, move: Callable[[Tensor], Tensor]) -> Op:
    def function(x: Tensor, positions: Tensor, factors: Tensor | None = None, **attrs: Any) -> Tensor:
        return ops.rope(x, move(positions), factors, **attrs)

    return replace(op, function=function)


@_mistake(
    "rope_decode_at_zero", "decode steps are rotated as if at position 0", "the cache offset of the position ids",
    ROPES, "mlx-vlm#1983",
)  # fmt: skip
def _at_zero(op: Op, _: Context) -> Variants:
    def move(positions: Tensor) -> Tensor:
        return positions * 0 if len(positions) == 1 else positions

    yield _repositioned(op, move), "the decode step is rotated as if at position 0"


@_mistake(
    "rope_chunk_restarts", "a later chunk of tokens restarts its positions at 0", "the position ids of later chunks",
    ROPES, "transformers#43082",
)  # fmt: skip
def _chunk(op: Op, _: Context) -> Variants:
    yield _repositioned(op, lambda p: p - p[0]), "positions of this step restart at 0"


@_mistake(
    "rope_decode_shifted", "decode positions are off by one", "the position of the first decoded token", ROPES,
    "openpi#705",
)  # fmt: skip
def _decode_shifted(op: Op, _: Context) -> Variants:
    for by in (1, -1):
        yield (
            _repositioned(op, lambda p, by=by: p + by if len(p) == 1 else p),  # type: ignore[misc]
            f"decode positions are shifted by {by:+d}",
        )


@_mistake("rope_shifted", "positions are shifted", "the first position of the sequence", ROPES)
def _shifted(op: Op, context: Context) -> Variants:
    for by in (1,) if context.seen is None else (1, -1, 2, -2, 3, -3):
        yield _repositioned(op, lambda p, by=by: p + by), f"positions are shifted by {by:+d}"  # type: ignore[misc]


@_mistake("rope_skipped", "rope is not applied", "whether rope is applied at all", ROPES)
def _no_rope(op: Op, _: Context) -> Variants:
    yield (
        _with_function(op, lambda x, positions, factors=None, rope=None: x),
        "the input passes through unrotated",
    )


# --- attention ---------------------------------------------------------------------------------------------------


def _nothing_hidden(queries: Tensor, keys: Tensor) -> Tensor:
    return ops.causal(queries, keys) & False


@_mistake(
    "no_mask", "there is no causal mask", "the mask of the prefill", ("attn_probs",), "TinyLLM#17",
)  # fmt: skip
def _no_mask(op: Op, _: Context) -> Variants:
    yield op.with_attrs(mask=_nothing_hidden), "no causal mask: every query sees every key"


@_mistake(
    "mask_shifted", "the causal mask is off by one", "the diagonal of the mask", ("attn_probs",), "tt-metal#48899",
)  # fmt: skip
def _mask_shifted(op: Op, _: Context) -> Variants:
    yield (
        op.with_attrs(mask=lambda q, k: k[None, :] > q[:, None] + 1),
        "the mask is off by one: each query sees the next token",
    )
    yield (
        op.with_attrs(mask=lambda q, k: (k[None, :] >= q[:, None]) & (k[None, :] != k[0])),
        "the mask is off by one: a query does not see its own token",
    )


@_mistake(
    "mask_without_offset", "the causal mask does not count the cache", "the cache length in the mask",
    ("attn_probs",), "hyprstream#1521",
)  # fmt: skip
def _mask_offset(op: Op, _: Context) -> Variants:
    yield (
        op.with_attrs(mask=lambda q, k: k[None, :] - k[0] > (q - q[0])[:, None]),
        "the mask begins at 0: it does not count the cached positions",
    )


@_mistake(
    "cache_ignored", "a step sees only its own tokens, not the cache", "the cache length: stuck at 0?",
    ("attn_probs",), "rustorch 213b9180",
)  # fmt: skip
def _cache_ignored(op: Op, _: Context) -> Variants:
    yield (
        op.with_attrs(mask=lambda q, k: (k[None, :] > q[:, None]) | (k[None, :] < q[0])),
        "the step sees only its own tokens: cached positions are not attended to",
    )


@_mistake(
    "attention_scale", "another attention scale", "the scale: 1/sqrt(head_dim), applied once", ("attn_probs",),
    "llama.cpp#8444",
)  # fmt: skip
def _scale(op: Op, context: Context) -> Variants:
    h, right = context.graph.hparams, op.attrs["scale"]
    named = {
        1.0: "missing", right**2: "applied twice", 1 / math.sqrt(h.n_embd / h.n_head): "1/sqrt(n_embd/n_head)",
        1 / math.sqrt(h.n_embd): "1/sqrt(n_embd)", 1 / h.head_dim: "1/head_dim",
    }  # fmt: skip
    for scale, word in named.items():
        if not math.isclose(scale, right):
            yield (
                op.with_attrs(scale=scale),
                f"the attention scale is {word} ({scale:.4g} instead of {right:.4g})",
            )
    if context.seen and (fitted := _fitted_scale(context.seen)) is not None:
        yield op.with_attrs(scale=fitted), f"the attention scale is {fitted:.6g} instead of {right:.6g}"


@_mistake(
    "scores_scaled", "scores are multiplied by the attention scale", "where the scale is applied, or what is recorded",
    ("attn_scores",),
)  # fmt: skip
def _scaled_scores(op: Op, context: Context) -> Variants:
    scale = context.graph.hparams.attention_scale
    yield (
        _with_function(op, lambda q, k: ops.scores(q, k) * scale),
        f"the scores have the scale ({scale:.4g}) in them; if they are only recorded so, call them {op.name}_scaled",
    )


def _fitted_scale(seen: Seen) -> float | None:
    """From two visible keys of the last query: log(p_a / p_b) = scale (s_a - s_b)."""
    p, s = seen.output[:, -1], seen.inputs[0][:, -1]
    usable = p > 1e-6
    high = torch.where(usable, s, -math.inf).argmax(-1, keepdim=True)
    low = torch.where(usable, s, math.inf).argmin(-1, keepdim=True)
    gap = (s.gather(1, high) - s.gather(1, low)).flatten()
    ratio = (p.gather(1, high) / p.gather(1, low)).log().flatten()
    head = int(gap.argmax())
    return float(ratio[head] / gap[head]) if float(gap[head]) > 0 else None


@_mistake(
    "softmax_half", "the softmax's sum runs over half of the row", "the reduction across the thread block",
    ("attn_probs",), "llama-orch bf9f4fba",
)  # fmt: skip
def _half_row(op: Op, _: Context) -> Variants:
    def function(s: Tensor, q: Tensor, k: Tensor, *, scale: float, mask: ops.Mask = ops.causal) -> Tensor:
        x = (ops.wide(s) * scale).masked_fill(mask(q, k), -math.inf)
        weights = torch.exp(x - x.amax(-1, keepdim=True))
        half = weights[..., : max(1, weights.shape[-1] // 2)].sum(-1, keepdim=True)
        return (weights / half).to(s.dtype)

    yield _with_function(op, function), "probabilities are divided by the sum of half the row"


def _interleaved(x: Tensor, groups: int) -> Tensor:
    """Query heads so ordered that the honest grouping reads key head h % groups."""
    return x.unflatten(0, (-1, groups)).swapaxes(0, 1).flatten(0, 1)


def _deinterleaved(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(0, (groups, -1)).swapaxes(0, 1).flatten(0, 1)


@_mistake(
    "gqa_heads", "query heads read the wrong key/value head: h % n_kv instead of h // group",
    "the mapping from query heads to key/value heads", ("attn_scores", "attn_kqv"), "onnx#7274",
)  # fmt: skip
def _heads(op: Op, context: Context) -> Variants:
    h = context.graph.hparams
    if h.n_head_kv in (1, h.n_head):
        return

    def scores(q: Tensor, k: Tensor) -> Tensor:
        groups = k.shape[1]
        return _deinterleaved(ops.scores(_interleaved(q.swapaxes(0, 1), groups).swapaxes(0, 1), k), groups)

    def values(p: Tensor, v: Tensor) -> Tensor:
        groups, d = v.shape[1], v.shape[2]
        y = ops.weighted_values(_interleaved(p, groups), v).unflatten(1, (-1, d)).swapaxes(0, 1)
        return _deinterleaved(y, groups).swapaxes(0, 1).flatten(1)

    yield (
        _with_function(op, scores if op.kind == "scores" else values),
        f"query head h reads key/value head h % {h.n_head_kv}; it is h // {h.n_head // h.n_head_kv}",
    )


@_mistake(
    "scores_f16", "scores are kept in float16, which overflows at 65,504", "the type of the score buffer",
    ("attn_scores",), "llama.cpp#8025",
)  # fmt: skip
def _scores_f16(op: Op, _: Context) -> Variants:
    yield replace(op, stored="f16"), "scores are float16: coarse, and infinite beyond 65,504"


@_mistake(
    "cached_k_rotated_again", "cached keys are rotated again at every step", "rope applied to the whole cache",
    ("attn_scores",), "shainet#110",
)  # fmt: skip
def _rotated_again(op: Op, context: Context) -> Variants:
    rope_op = next(o for o in context.graph if o.name == op.inputs[1])
    if rope_op.kind != "rope":
        return

    def function(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        n_new = len(q)
        turned = ops.rope(k[:-n_new], positions[:-n_new], rope=rope_op.attrs["rope"]) if len(k) > n_new else k[:0]
        return ops.scores(q, torch.cat((turned, k[-n_new:])))

    yield (
        replace(op, inputs=(*op.inputs, "positions"), past=(*op.past, True), function=function),
        "cached keys are rotated once more by this step",
    )


@_mistake(
    "cache_zeros", "some cached positions are zero", "which slots of the cache are written",
    ("attn_scores",), "tt-metal#54413",
)  # fmt: skip
def _cache_zeros(op: Op, context: Context) -> Variants:
    zero = torch.arange(1, 2)
    if context.seen:
        zero = torch.nonzero((context.seen.output == 0).all(0).all(0)).flatten()
        if not len(zero):
            return

    def function(q: Tensor, k: Tensor) -> Tensor:
        k = k.clone()
        k[zero[zero < len(k)]] = 0
        return ops.scores(q, k)

    yield _with_function(op, function), f"the keys at positions {zero.tolist()} are zero"


# --- feed-forward and residual -----------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "act_gelu": ("GELU is used for SiLU", lambda g, u: torch.nn.functional.gelu(g) * u),
    "act_gelu_tanh": ("GELU (tanh) is used for SiLU", lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u),
    "act_relu": ("ReLU is used for SiLU", lambda g, u: torch.relu(g) * u),
    "act_swapped": ("SiLU is applied to up instead of gate", lambda g, u: torch.nn.functional.silu(u) * g),
    "act_no_silu": ("SiLU is not applied", lambda g, u: g * u),
    "act_sigmoid": ("the sigmoid is not multiplied by its argument", lambda g, u: torch.sigmoid(g) * u),
    "act_no_gate": ("up is not multiplied in", lambda g, u: torch.nn.functional.silu(g)),
}  # fmt: skip

for _name, (_text, _function) in _ACTIVATIONS.items():

    def _activation(op: Op, context: Context, text: str = _text, function: Any = _function) -> Variants:
        yield _with_function(op, function), text

    BANK[_name] = Mistake(
        _name, _text, "the activation of the gated feed-forward", ("ffn_act",), _activation, "candle#3745"
    )


@_mistake(
    "ffn_act_f16", "the activations of the down projection are kept in float16, which overflows at 65,504",
    "the type of the feed-forward's buffer", ("ffn_act",), "llama.cpp#27016",
)  # fmt: skip
def _act_f16(op: Op, _: Context) -> Variants:
    yield replace(op, stored="f16"), "activations are float16: coarse, and infinite beyond 65,504"


@_mistake(
    "residual_dropped", "the residual is not added", "the residual connection",
    ("attn_residual", "ffn_residual"),
)  # fmt: skip
def _no_residual(op: Op, _: Context) -> Variants:
    yield _with_function(op, lambda a, b: a), f"{op.inputs[1]} is not added"
    yield _with_function(op, lambda a, b: b), f"{op.inputs[0]} is not added"


@_mistake(
    "residual_twice", "the residual is added twice", "a residual both fused and added after",
    ("attn_residual", "ffn_residual"),
)  # fmt: skip
def _twice(op: Op, _: Context) -> Variants:
    yield _with_function(op, lambda a, b: a + 2 * b), f"{op.inputs[1]} is added twice"
    yield _with_function(op, lambda a, b: 2 * a + b), f"{op.inputs[0]} is added twice"


@_mistake(
    "residual_normed", "the residual takes the normed value", "which buffer the residual reads",
    ("attn_residual", "ffn_residual"),
)  # fmt: skip
def _normed(op: Op, context: Context) -> Variants:
    layer, local = split(op.name)
    norm = f"blk.{layer}.{'attn_norm' if local == 'attn_residual' else 'ffn_norm'}"
    yield replace(op, inputs=(op.inputs[0], norm)), f"{norm} is added where {op.inputs[1]} belongs"
