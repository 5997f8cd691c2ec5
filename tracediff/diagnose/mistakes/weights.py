"""Mistakes in loading a weight, or in how a matmul reads it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.blocks import subnormals
from tracediff.diagnose.mistakes.masks import SOFTMAX
from tracediff.diagnose.mistakes.mistake import (
    MATMUL,
    NORM,
    Area,
    Context,
    Variant,
    Variants,
    Where,
    computing,
    is_gated,
    parts_of,
)
from tracediff.diagnose.rearranged import Reread
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op, Weight
from tracediff.model.pairing import neighbours
from tracediff.model.weights import reading, values_of
from tracediff.names import layer_of, local_name
from tracediff.numerics.floats import HALVES, Rounding
from tracediff.numerics.roundings import rounding_named

AREA = Area()
LOOK_AT_ROUNDING = "the conversion to half precision: to the nearest number, of two the even one"


@AREA.mistake(
    "weight_transposed", "the matmul reads its weight transposed",
    "the leading dimension and the transpose flag of the GEMM call", Where((*MATMUL.kinds, "mul_mat")),
    "llama-orch 63343209",
)  # fmt: skip
def _transposed(op: Op, context: Context) -> Variants:
    if not op.weights or len(context.file.tensors[op.weights[0].name].shape) < 2:
        return  # of a single row

    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        *experts, n_out, n_in = info.shape
        return values_of(file, info).reshape(*experts, n_in, n_out).mT

    yield reading(op, read), f"{op.weights[0].name} is read transposed (leading dimension of the wrong side)"


@dataclass(frozen=True, slots=True)
class _TransposedOperand(Reread):
    """Rows and columns of an operand's matrices exchanged: `Op.rework`."""

    at: int

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, with this one's transposed."""
        return [x.mT if i == self.at else x for i, x in enumerate(inputs)]


@AREA.mistake(
    "operand_transposed", "a matmul of two values reads one of them transposed",
    "the transpose flag of the GEMM call, and which axis of a coefficients' matrix is summed", Where(("mul_mat",)),
)  # fmt: skip
def _operand_transposed(op: Op, context: Context) -> Variants:
    for at, name in enumerate(() if op.weights else op.inputs):
        view = op.seen[at]
        axes = view.shape if view else context.graph[name].axes if name in context.graph else ()
        if len(axes) > 1 and axes[-1] == axes[-2]:
            words = f"as it reads {local_name(name)}, rows and columns are exchanged"
            yield replace(op, rework=_TransposedOperand(at)), words


@AREA.mistake(
    "weight_zero", "the weight was never loaded: zeros", "the loader's table of tensor names",
    MATMUL, "llama-orch 8bb3f6e5",
)  # fmt: skip
def _zero(op: Op, _: Context) -> Variants:
    words = f"{op.weights[0].name} counts as zeros: it was never loaded, its product never computed, or of zeros"
    yield reading(op, lambda file, info: torch.zeros(info.shape)), words


@AREA.mistake(
    "weight_cut", "the weight is cut off to half precision, where rounding belongs", LOOK_AT_ROUNDING,
    Where((*MATMUL.kinds, *NORM.kinds, "embedding")),
)  # fmt: skip
def _cut(op: Op, _: Context) -> Variants:
    for cut, words in cut_off(op.weights[0].name) if op.weights else ():
        yield reading(op, lambda file, info, cut=cut: cut(values_of(file, info))), words  # type: ignore[misc]


@AREA.mistake(
    "weight_subnormal", "float16 weights are converted without a care for subnormal numbers",
    "the conversion of float16 whose exponent is 0: the mantissa times 2^-24", Where((*MATMUL.kinds, "embedding")),
)  # fmt: skip
def _subnormal(op: Op, context: Context) -> Variants:
    name = op.weights[0].name if op.weights else ""
    if name not in context.file.tensors or context.file.tensors[name].type.name != "F16":
        return
    ways = {"half of what they are": (0.5, 0.0), "twice what they are": (2.0, 0.0),
            "2^-15 (1 + m), as if they were not": (0.5, 2.0**-15)}  # fmt: skip
    for words, (times, more) in ways.items():
        read = partial(_with_subnormals, times=times, more=more)
        yield reading(op, read), f"{name}'s float16 numbers that are subnormal, below 6.1e-5, are {words}"


def _with_subnormals(file: GGUFFile, info: TensorInfo, times: float, more: float) -> Tensor:
    return torch.from_numpy(subnormals(values_of(file, info).numpy(), times, more))


def cut_off(what: str) -> Iterator[tuple[Rounding, str]]:
    """Each type in half precision that something may be cut off to, in words."""
    for name in HALVES:
        words = f"{what} is cut off to {rounding_named(name).words}, towards 0, where rounding belongs"
        yield rounding_named(f"cut {name}"), words


@AREA.mistake(
    "bias_missing", "the bias is not added", "whether the loader reads the .bias tensors and the kernel adds them",
    MATMUL, "ANEForge#253",
)  # fmt: skip
def without_bias(op: Op, _: Context) -> Variants:
    """The op without its second weight."""
    if len(op.weights) > 1:
        yield replace(op, weights=op.weights[:1]), f"{op.weights[1].name} is not added"


@AREA.mistake(
    "bias_twice", "the bias is added twice", "a bias both fused into the matmul and added after it",
    Where((*MATMUL.kinds, "add")),
)  # fmt: skip
def _bias_twice(op: Op, _: Context) -> Variants:
    if op.kind == "add" and op.weights:
        yield computing(op, lambda x, b: x + b + b), f"{op.weights[0].name} is added twice"
    elif len(op.weights) > 1:
        yield reading(op, lambda file, info: 2 * values_of(file, info), 1), f"{op.weights[1].name} is added twice"


def _permuted(op: Op, heads: int, inverse: bool = False) -> Op:
    """With the rows of each head from halves to neighbours, as converters of Llama put them; or back."""

    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        return neighbours(values_of(file, info), info.shape[0] // heads, 0, inverse)

    return reading(op, read)


@AREA.mistake(
    "rope_permuted", "the projection's rows are permuted for the other rope layout (once too often, or never)",
    "the loader's or converter's permutation of Q and K", Where(("linear",), ("q", "k")), "llama.cpp#22611",
)  # fmt: skip
def _other_layout(op: Op, _: Context) -> Variants:
    heads = op.axes[1]
    if isinstance(heads, int) and op.weights[0].shape[0] % (2 * heads) == 0:
        yield _permuted(op, heads), "Q/K rows are permuted from halves to neighbours"
        yield _permuted(op, heads, inverse=True), "Q/K rows are permuted from neighbours to halves"


@AREA.mistake(
    "kv_permuted_as_q", "the rows of K are permuted with the number of query heads",
    "n_head where n_head_kv belongs in the permutation", Where(("linear",), ("k",)), "transformers#31788",
)  # fmt: skip
def _permuted_as_q(op: Op, context: Context) -> Variants:
    n_head, n_head_kv = context.graph.hparams.n_head, op.axes[1]
    if n_head_kv != n_head and op.weights[0].shape[0] % (2 * n_head) == 0:
        yield _permuted(op, n_head), f"K rows are permuted as {n_head} heads; K has {n_head_kv}"


@AREA.mistake(
    "head_is_embedding", "the embedding is used as the output head of a model that has its own",
    "tie_word_embeddings, and whether output.weight is loaded", Where(("linear",), ("logits",)), "ComfyUI#15048",
)  # fmt: skip
def _embedding_head(op: Op, _: Context) -> Variants:
    if op.weights[0].name != "token_embd.weight":
        tied = Weight("token_embd.weight", op.weights[0].shape)
        words = "token_embd.weight is the head; output.weight is in the file"
        yield replace(op, weights=(tied, *op.weights[1:])), words


@AREA.mistake(
    "logits_shifted", "every logit of a token is less by one number, as in a softmax",
    "what is recorded as logits: before a softmax makes them less by their largest, or probabilities",
    Where(("linear",), ("logits",)),
)  # fmt: skip
def _shifted(op: Op, _: Context) -> Variants:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "the largest logit of each token is taken from all of its logits": lambda y: y - y.amax(-1, keepdim=True),
        "logarithms of probabilities stand for logits": lambda y: torch.softmax(y, -1).log(),
        "probabilities stand for logits": lambda y: torch.softmax(y, -1),
    }
    whole = replace(op, name=f"{op.name}.whole")  # a matrix is multiplied by parts of its rows
    for words, way in ways.items():
        changed = Op(op.name, "scale", (whole.name,), op.axes, attrs={"scale": 1.0}, function=partial(_unscaled, way))
        yield Variant(changed, words, before=(whole,))


def _unscaled(way: Callable[[Tensor], Tensor], y: Tensor, *, scale: float) -> Tensor:
    return way(y)


@AREA.mistake(
    "wrong_layer", "the weight of another layer is read", "the layer index in the loader",
    Where(
        (*MATMUL.kinds, "mul_mat", "of_latent", *NORM.kinds, *SOFTMAX.kinds, "ssm_scan", "ssm_conv", "mul"),
        in_layer=True,
    ),
)  # fmt: skip
def _other_layer(op: Op, context: Context) -> Variants:
    layer = layer_of(op.name)
    if layer is None or not op.weights:
        return
    near = {"the layer before": layer - 1, "the layer after": layer + 1, "layer 0": 0}
    for words, n in near.items():
        if not 0 <= n < context.graph.hparams.n_layer or n == layer:
            continue
        weights = tuple(replace(w, name=w.name.replace(f"blk.{layer}.", f"blk.{n}.")) for w in op.weights)
        tensors = context.file.tensors
        if all(w.name in tensors and tensors[w.name].shape == w.shape for w in weights):
            yield replace(op, weights=weights), f"the weights of {words} are used"


@AREA.mistake(
    "gate_up_swapped", "gate and up are swapped", "the order of the two halves of a fused gate-up weight",
    Where(MATMUL.kinds, ("gate", "up")), "mlx-lm#767",
)  # fmt: skip
def _swapped(op: Op, context: Context) -> Variants:
    other, _ = _beside(op, context) or (None, 0)
    if other is None:
        return
    if other is op:  # one weight for both

        def read(file: GGUFFile, info: TensorInfo) -> Tensor:
            return values_of(file, info).roll(info.shape[-2] // 2, -2)

        yield reading(op, read), f"the halves of {op.weights[0].name} are swapped"
    elif other.kind == op.kind:
        names = (local_name(o.name) for o in (op, other))
        words = "{} multiplies with {}.weight".format(*names)
        yield Variant(replace(op, weights=other.weights), words, name="each multiplies with the other's weight")


@AREA.mistake(
    "qkv_order", "the product of joined Q, K and V weights is split in another order than they were joined in",
    "the order in which Q, K and V are split from one product", Where(("linear",), ("q", "k", "v")),
)  # fmt: skip
def _other_order(op: Op, context: Context) -> Variants:
    joined = _joined(op, context)
    names, sizes = [one.name for one in joined], [one.weights[0].shape[0] for one in joined]
    if op.name not in names:
        return
    own = names.index(op.name)
    begin, n = sum(sizes[:own]), sizes[own]
    for order in permutations(range(3)):
        first = sum(sizes[i] for i in order[: order.index(own)])
        if first == begin:
            continue
        whole = [local_name(o.name) for i, o in enumerate(joined) if (sum(sizes[:i]), sizes[i]) == (first, n)]
        rows = f"rows {first} to {first + n - 1} of Q, K and V, one below the other"
        words = f"it multiplies with {f'the rows of {whole[0]}' if whole else rows}"
        both = f"Q, K and V are split from one product in the order {', '.join('QKV'[i] for i in order)}"
        weights = tuple(
            replace(weight, read=partial(_rows, of=tuple(o.weights[i].name for o in joined), first=first))
            for i, weight in enumerate(op.weights)
        )
        yield Variant(replace(op, weights=weights), words, name=both)


def _joined(op: Op, context: Context) -> list[Op]:
    """The three ops that project what this one does to Q, K and V, each by weights of its own; else none."""
    beside = [other for other, _ in context.graph.readers(op.inputs[0]) if other.kind == "linear"]
    of_each = [[other for other in beside if part in parts_of(other, context.graph)] for part in ("q", "k", "v")]
    joined = [found[0] for found in of_each if len(found) == 1 and len(found[0].weights) == len(op.weights)]
    return joined if len({one.name for one in joined}) == 3 else []


def _rows(file: GGUFFile, info: TensorInfo, of: Sequence[str], first: int) -> Tensor:
    """As many rows as the tensor has, of those of several, one below the other."""
    return torch.cat([values_of(file, file.tensors[name]) for name in of])[first : first + info.shape[0]]


@AREA.mistake(
    "gate_up_by_turns", "rows of gate and up that lie by turns are taken for halves, or halves for rows by turns",
    "how a fused gate-up weight is split", Where(MATMUL.kinds, ("gate", "up")),
)  # fmt: skip
def _by_turns(op: Op, context: Context) -> Variants:
    other, position = _beside(op, context) or (None, 0)
    if other is None or other.kind != op.kind or len(other.weights) != len(op.weights):
        return
    for is_by_turns, words in (
        (True, "rows of gate and up lie by turns in one matrix, whose halves are taken for them"),
        (False, "gate and up are halves of one matrix, whose rows are taken for theirs by turns"),
    ):
        weights = tuple(
            replace(own, read=partial(_split_otherwise, other=beside.name, place=position, by_turns=is_by_turns))
            for own, beside in zip(op.weights, other.weights, strict=True)
        )
        yield Variant(replace(op, weights=weights), words, name=words)


def _beside(op: Op, context: Context) -> tuple[Op, int] | None:
    """Of gate and up the one that is multiplied with what this op makes, and which of the two this op is."""
    for reader, position in context.graph.readers(op.name):
        if is_gated(reader):
            return context.graph[reader.inputs[1 - position]], position
    return None


def _split_otherwise(file: GGUFFile, info: TensorInfo, other: str, place: int, by_turns: bool) -> Tensor:
    """What is taken for gate, or in the second `place` for up, of both in one; of a tensor that is both, all of it."""
    axis = -1 if info.name.endswith("bias") else -2
    own = values_of(file, info)
    if other == info.name:
        halves = own.chunk(2, axis)
        return torch.stack(halves, axis).flatten(axis - 1, axis) if by_turns else _every_other(own, axis)
    pair = [own, values_of(file, file.tensors[other])][:: 1 - 2 * place]
    if by_turns:
        return torch.stack(pair, axis).flatten(axis - 1, axis).chunk(2, axis)[place]
    return _every_other(torch.cat(pair, axis), axis).chunk(2, axis)[place]


def _every_other(rows: Tensor, axis: int) -> Tensor:
    """The first, the third and so on, then the others."""
    order = torch.arange(rows.shape[axis]).view(-1, 2).T.flatten()
    return rows.index_select(axis, order)
