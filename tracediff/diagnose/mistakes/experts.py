"""Mistakes in mixtures of experts: in the choice, in the weights of the chosen, in whose matrix multiplies."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import (
    Area,
    Context,
    Variant,
    Variants,
    Where,
    computing,
    first_alone,
    second_alone,
)
from tracediff.diagnose.rearranged import Reread
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Graph, Op
from tracediff.model.weights import reading, values_of
from tracediff.names import layer_of
from tracediff.numerics.evaluate import computed, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.elementwise import repeated
from tracediff.numerics.kinds.kind import Call, Made
from tracediff.numerics.kinds.layout import get_rows
from tracediff.numerics.kinds.reduction import argsort

AREA = Area()
CHOSEN = ("ranked", "table")  # parts of scores that experts are chosen by, or weighted with


@AREA.mistake(
    "router_softmax", "the router's scores are a softmax where they should be a sigmoid", "the gating function",
    Where(("sigmoid",), CHOSEN), "llama.cpp#18980",
)  # fmt: skip
def _softmax(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x: torch.softmax(x, -1)), "a softmax is taken where a sigmoid belongs"


@AREA.mistake(
    "router_sigmoid", "the router's scores are a sigmoid where they should be a softmax", "the gating function",
    Where(("soft_max",), CHOSEN),
)  # fmt: skip
def _sigmoid(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, scale=1.0: torch.sigmoid(x * scale)), "a sigmoid is taken where a softmax belongs"


@AREA.mistake(
    "selection_bias_in_weights", "the bias that experts are chosen with is in their weights too",
    "which scores the weights are taken from: those without the bias", Where(("get_rows",)),
    "PaddleFormers#3452",
)  # fmt: skip
def _biased(op: Op, context: Context) -> Variants:
    graph, choice = context.graph, context.graph.ops.get(op.inputs[-1])
    if not choice or choice.kind != "top_k" or len(op.inputs) != 2 or choice.inputs[0] == op.inputs[0]:
        return
    if _is_of_choice(op, graph):
        own, chosen_by = op.inputs[0], choice.inputs[0]
        has_bias = own in graph[chosen_by].inputs
        others = f"the weights are those of {chosen_by}, which experts are chosen by, in place of those of {own}"
        words = "the weights have the bias of the choice in them" if has_bias else others
        yield replace(op, inputs=(chosen_by, op.inputs[1])), words


@AREA.mistake(
    "groups_ignored", "experts are chosen among all groups, not among the chosen ones",
    "the mask of groups, and what stands for their experts' scores", Where(("top_k", "fill")),
)  # fmt: skip
def _groups_ignored(op: Op, context: Context) -> Variants:
    if op.kind == "fill":
        if op.attrs["value"] == -math.inf and any(by.kind == "set_rows" for by, _ in context.graph.readers(op.name)):
            words = "scores of experts outside the chosen groups are 0, where they are -inf"
            yield replace(op, attrs={**op.attrs, "value": 0.0}), words
        return
    masked = context.graph.ops.get(op.inputs[0])
    fill = context.graph.ops.get(masked.inputs[-1]) if masked and masked.kind == "set_rows" else None
    if fill and fill.kind == "fill" and fill.inputs:
        words = "experts are chosen by their scores alone, whatever group they are in"
        yield replace(op, inputs=(fill.inputs[0], *op.inputs[1:])), words


@AREA.mistake(
    "selection_bias_on_logits", "the bias that experts are chosen with is added before the gating function",
    "what the bias of the choice is added to", Where(("add",), ("ranked",)),
)  # fmt: skip
def _bias_on_logits(op: Op, context: Context) -> Variants:
    gate = context.graph.ops.get(op.inputs[0])
    if gate and gate.kind in ("sigmoid", "soft_max") and len(op.weights) == 1 == len(op.inputs):
        gated = partial(KINDS[gate.kind].function, **gate.attrs)
        added = replace(op, inputs=gate.inputs, function=lambda x, bias: gated(x + bias))
        yield added, f"the bias of the choice is added before the {gate.kind.replace('soft_max', 'softmax')}"


@AREA.mistake(
    "weights_by_all", "the weights of the chosen experts are divided by the sum over all experts, or the first",
    "which experts the sum of weights is taken over", Where(("sum_rows",)),
)  # fmt: skip
def _by_all(op: Op, context: Context) -> Variants:
    rows = context.graph.ops.get(op.inputs[0])
    if rows and rows.kind == "get_rows" and _is_of_choice(rows, context.graph):
        summed = replace(op, inputs=rows.inputs[:1], views=(), function=lambda x: x.flatten(1).sum(-1, keepdim=True))
        yield summed, "the weights are divided by the sum over all experts, where the chosen ones are summed"
        n = math.prod(axis for axis in rows.axes if isinstance(axis, int))
        first = replace(summed, function=lambda x: x.flatten(1)[:, :n].sum(-1, keepdim=True))
        yield first, f"the weights are divided by the sum over experts 0 to {n - 1}, where the chosen ones are summed"


@AREA.mistake(
    "weights_sorted", "the weights of the chosen experts are in another order than these",
    "whether weights and numbers of experts are sorted alike", Where(("get_rows", "div")),
)  # fmt: skip
def _weights_sorted(op: Op, context: Context) -> Variants:
    rows = op if op.kind == "get_rows" else context.graph.ops.get(op.inputs[0])
    if rows and rows.kind == "get_rows" and len(op.inputs) == 2 and _is_of_choice(rows, context.graph):
        ids = rows.inputs[1]

        def function(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
            right = KINDS[op.kind].function(a, b)
            return right.gather(1, ids.flatten(1).argsort(-1).reshape(right.shape))

        words = "the weights are in the order of the experts' numbers, the experts in that of their scores"
        yield computing(op.also_reading((ids, False)), function), words


def _is_of_choice(rows: Op, graph: Graph) -> bool:
    """Whether these are rows of what experts, not groups, were chosen by."""
    choice = graph.ops.get(rows.inputs[-1])
    if choice is None or choice.kind != "top_k" or len(choice.axes) > 2:  # of each group its best
        return False
    n_chosen, n_own = (math.prod(map(int, graph[one.inputs[0]].shape(1)[1:])) for one in (choice, rows))
    return n_chosen == n_own


@AREA.mistake(
    "weights_not_normalised", "the weights of the chosen experts are not divided by their sum",
    "norm_topk_prob of the model", Where(("div",)), "torchtitan#1448",
)  # fmt: skip
def _not_normalised(op: Op, context: Context) -> Variants:
    if len(op.inputs) == 2 and op.inputs[0] in _ancestors(op.inputs[1], context.graph, 3):
        yield computing(op, lambda a, b: a), "the weights are not divided by their sum"
        yield computing(op, lambda a, b: a / repeated(b, a).square()), "the weights are divided by their sum twice"
        words = "the weights are exp(x - the largest x), which no sum divides"
        yield computing(op, lambda a, b: (a.flatten(1) / a.flatten(1).amax(-1, keepdim=True)).reshape(a.shape)), words
        words = "the weights are divided by the root of the sum of their squares, where by their sum"  # F.normalize
        yield computing(op, lambda a, b: a / repeated(a.flatten(1).square().sum(-1).sqrt().reshape(b.shape), a)), words
        words = "a softmax is taken of the weights, where they are divided by their sum"
        yield computing(op, lambda a, b: torch.softmax(a.flatten(1), -1).reshape(a.shape)), words


@AREA.mistake(
    "weights_normalised", "the weights of the chosen experts are divided by their sum, which this model does not do",
    "norm_topk_prob, or a softmax over the chosen scores alone", Where(("get_rows",)), "mlxcel#391",
)  # fmt: skip
def _normalised(op: Op, context: Context) -> Variants:
    if len(op.inputs) == 2 and _is_of_choice(op, context.graph):

        def function(table: Tensor, ids: Tensor) -> Tensor:
            rows = get_rows(table, ids)
            return rows / rows.sum(-2, keepdim=True)

        yield computing(op, function), "the weights are divided by their sum"


def _of_chosen(op: Op, graph: Graph) -> Op | None:
    """What a softmax over the chosen experts' scores reads: the rows that were chosen; None of any other op."""
    rows = graph.ops.get(op.inputs[0])
    choice = graph.ops.get(rows.inputs[-1]) if rows and rows.kind == "get_rows" else None
    return rows if choice and choice.kind == "top_k" and len(op.inputs) == 1 else None


@AREA.mistake(
    "router_softmax_axis", "the softmax of a router runs over tokens", "the axis of the softmax: experts, the last one",
    Where(("soft_max",)),
)  # fmt: skip
def _over_tokens(op: Op, _: Context) -> Variants:
    if len(op.inputs) == 1 and not op.weights and op.axes[0] == "T":
        words = "the softmax runs over the tokens of a step instead of experts"
        yield computing(op, lambda x, scale=1.0, **_: torch.softmax(x * scale, 0)), words


@AREA.mistake(
    "softmax_before_choice", "the softmax of the router is over all experts, where it is over the chosen ones",
    "the order of softmax and choice in the router", Where(("soft_max",)),
)  # fmt: skip
def _before_choice(op: Op, context: Context) -> Variants:
    rows = _of_chosen(op, context.graph)
    if rows is None:
        return

    def function(logits: Tensor, ids: Tensor, **_: float) -> Tensor:
        return get_rows(torch.softmax(logits, -2), ids).reshape(op.shape(ids.shape[0]))

    changed = replace(op, inputs=rows.inputs, views=rows.views, function=function)
    yield changed, "the softmax is over all experts, before the choice, not over the chosen ones"


@AREA.mistake(
    "chosen_weighted_otherwise", "the weights of the chosen experts are no softmax of their scores",
    "the softmax over the chosen experts: its exponentials, and the loop that adds them up", Where(("soft_max",)),
)  # fmt: skip
def _weighted_otherwise(op: Op, context: Context) -> Variants:
    if _of_chosen(op, context.graph) is None:
        return
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "a sigmoid is taken where a softmax belongs": torch.sigmoid,
        "exponentials are not divided by their sum": lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
        "exponentials are divided by a sum that lacks the last chosen expert's": lambda x: _over_some(
            x, slice(None, -1)
        ),
        "exponentials are divided by a sum that lacks the first chosen expert's": lambda x: _over_some(
            x, slice(1, None)
        ),
    }
    for words, way in ways.items():
        yield computing(op, lambda x, way=way, **_: way(x)), words


def _over_some(x: Tensor, some: slice) -> Tensor:
    """exp(x) over the sum of some of them."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights[..., some].sum(-1, keepdim=True)


@AREA.mistake(
    "too_few_experts", "fewer experts are used than the model chooses", "the number of experts used",
    Where(("get_rows",)),
)  # fmt: skip
def _too_few(op: Op, context: Context) -> Variants:
    choice = context.graph.ops.get(op.inputs[-1])
    if not choice or choice.kind != "top_k":
        return
    chosen = choice.attrs["k"]
    for used in range(chosen - 1, 0, -1):

        def function(table: Tensor, ids: Tensor, used: int = used) -> Tensor:
            rows = get_rows(table, ids).clone()
            rows[..., used:, :] = 0.0
            return rows

        yield computing(op, function), _counting(op, context.graph, used, chosen)


def _counting(op: Op, graph: Graph, used: int, chosen: int) -> str:
    """In words that so few of the chosen count: experts, or what stands before a further choice, as of groups."""
    layer, after = layer_of(op.name), graph.after([op.name])
    if not any(other.kind == "top_k" and other.name in after and layer_of(other.name) == layer for other in graph):
        return f"only {used} of the {chosen} chosen experts count"
    if any(reader.kind == "sum_rows" for reader, _ in graph.readers(op.name)):
        best = "that of its best expert" if used == 1 else f"of its best {used} experts"
        return f"the score of a group is {best}, where its best {chosen} belong"
    return f"only {used} of the {chosen} chosen groups count"


def _ancestors(name: str, graph: Graph, depth: int) -> set[str]:
    """What a value is computed from, so many ops before it."""
    before = graph.ops[name].inputs if depth and name in graph else ()
    return {*before}.union(*(_ancestors(one, graph, depth - 1) for one in before))


_MOVED: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("the weight of each slot goes to the slot at the other end", lambda weights: weights.flip(-2)),
    ("the weight of each slot goes to the one after it", lambda weights: weights.roll(1, -2)),
    ("the weight of each slot goes to the one before it", lambda weights: weights.roll(-1, -2)),
    ("all slots have the weight of the first", lambda weights: weights[..., :1, :].expand_as(weights)),
)


@AREA.mistake(
    "expert_order", "the outputs of experts are weighted in another order",
    "the order of slots after sorting by expert", Where(("mul",)),
)  # fmt: skip
def _order(op: Op, context: Context) -> Variants:
    if len(op.inputs) == 2 and any(_is_of_experts(name, context.graph) for name in op.inputs):
        for words, move in _MOVED:

            def moved(a: Tensor, b: Tensor, move: Callable[[Tensor], Tensor] = move) -> Tensor:
                return a * move(repeated(b, a))

            yield computing(op, moved), words


@AREA.mistake(
    "experts_sorted", "experts are sorted by their numbers, and their weights by their size",
    "whether both are sorted alike before tokens are gathered by expert", Where(("mul",)),
)  # fmt: skip
def _sorted(op: Op, context: Context) -> Variants:
    ids = context.graph[op.inputs[0]].inputs[-1] if _is_of_experts(op.inputs[0], context.graph) else None
    if ids is None or len(op.inputs) != 2:
        return

    def function(outputs: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        rank = ids.argsort(-1).argsort(-1).reshape(weights.shape)
        return outputs * repeated(weights.gather(-2, rank), outputs)

    words = "the experts of a token are sorted by number, their weights by size"
    yield computing(op.also_reading((ids, False)), function), words


@AREA.mistake(
    "experts_left_out", "some of a token's chosen experts do not count",
    "the bounds of the loop over experts, and whether what each makes is added to what others made", Where(("mul",)),
)  # fmt: skip
def _left_out(op: Op, context: Context) -> Variants:
    product = context.graph.ops.get(op.inputs[0])
    if product is None or not _is_of_experts(product.name, context.graph) or len(op.inputs) != 2:
        return
    last = product.weights[0].shape[0] - 1
    overwritten = "as if each overwrote what others had made of the token"
    for words, counts in (
        (f"expert {last}, the last, is left out", lambda ids: ids != last),
        ("expert 0 is left out", lambda ids: ids != 0),
        (
            f"the expert of the largest number alone counts, {overwritten}",
            lambda ids: ids == ids.amax(-1, keepdim=True),
        ),
        (
            f"the expert of the smallest number alone counts, {overwritten}",
            lambda ids: ids == ids.amin(-1, keepdim=True),
        ),
    ):

        def function(x: Tensor, weights: Tensor, ids: Tensor, counts: Callable[[Tensor], Tensor] = counts) -> Tensor:
            return x * repeated(torch.where(counts(ids).reshape(weights.shape), weights, 0.0), x)

        yield computing(op.also_reading((product.inputs[-1], False)), function), words


@AREA.mistake(
    "experts_not_cleared", "what experts made of the tokens before is still in the sum",
    "whether the buffer that experts add to is cleared for each token", Where(("add",)),
)  # fmt: skip
def _not_cleared(op: Op, context: Context) -> Variants:
    weighted = context.graph.ops.get(op.inputs[-1])
    if weighted is None or weighted.kind != "mul" or not _is_of_experts(weighted.inputs[0], context.graph):
        return
    if not any(weighted.name in reader.inputs for reader, _ in context.graph.readers(op.name)):  # the last slot's
        added = computing(op, lambda a, b: (a + b).cumsum(0))
        yield added, "each token's sum begins with that of the token before: the buffer is not cleared"


def _is_of_experts(name: str, graph: Graph) -> bool:
    return name in graph and graph[name].kind in ("linear_id", "add_id")


@AREA.mistake(
    "expert_weights", "the outputs of experts have other weights", "what multiplies the output of each chosen expert",
    Where(("mul",)),
)  # fmt: skip
def _weights(op: Op, context: Context) -> Variants:
    if len(op.inputs) != 2 or not _is_of_experts(op.inputs[0], context.graph):
        return
    before = _ancestors(op.inputs[1], context.graph, 3)
    yield computing(op, lambda a, b: a), "the outputs are not multiplied by their weights: each counts in whole"
    yield computing(op, lambda a, b: a / a.shape[-2]), "each of the chosen experts has the same weight"
    if not any(name in context.graph and context.graph[name].kind == "div" for name in (*before, op.inputs[1])):
        words = "the weights are divided by their sum, which this model does not do"
        yield computing(op, lambda a, b: a * (b / b.sum(-2, keepdim=True))), words


@AREA.mistake(
    "expert_off_by_one", "the weights of an expert, or of a head, stand under another's number",
    "the offset of each one's matrix in the stacked weight", Where(("linear_id", "mul_mat", "of_latent")),
)  # fmt: skip
def _off_by_one(op: Op, _: Context) -> Variants:
    if not op.weights or len(op.weights[0].shape) < 3:
        return
    each = "expert" if op.kind == "linear_id" else "head"
    for by, words in ((1, "before"), (-1, "after")):

        def read(file: GGUFFile, info: TensorInfo, by: int = by) -> Tensor:
            return values_of(file, info).roll(by, 0)

        with_bias = reading(op, read, 1) if len(op.weights) > 1 else op
        if with_bias is not op:
            yield (
                reading(with_bias, read),
                f"each {each} multiplies with the matrix of the one {words} it, bias and all",
            )
            yield with_bias, f"the bias of each {each} is that of the one {words} it"
        yield reading(op, read), f"each {each} multiplies with the matrix of the one {words} it"


@AREA.mistake(
    "bias_not_weighted", "an expert's bias is added when its product is weighted already",
    "whether the bias of the down projection is added before or after the token's weight", Where(("mul",)),
)  # fmt: skip
def _bias_not_weighted(op: Op, context: Context) -> Variants:
    down = context.graph.ops.get(op.inputs[0])
    if down is None or down.kind != "linear_id" or len(down.weights) < 2 or len(op.inputs) != 2 or op.seen[0]:
        return
    product = replace(down, name=f"{op.name}.product", weights=down.weights[:1])

    def function(x: Tensor, weight: Tensor, chosen: Tensor, bias: Tensor) -> Tensor:
        return x * weight + bias[chosen.long()]

    more = op.also_reading((down.inputs[1], False))
    inputs = (product.name, *more.inputs[1:])
    changed = replace(more, inputs=inputs, weights=down.weights[1:], function=function)
    words = f"{down.weights[1].name} is added after the token's weight is multiplied in"
    yield Variant(changed, words, before=(product,))


@AREA.mistake(
    "expert_not_looked_up", "another expert's matrix multiplies, whichever was chosen",
    "whether the chosen expert's number is used to find its matrix", Where(("linear_id",)),
)  # fmt: skip
def _not_looked_up(op: Op, _: Context) -> Variants:
    def of_first(file: GGUFFile, info: TensorInfo) -> Tensor:
        values = values_of(file, info)
        return values[:1].expand_as(values)

    yield reading(op, of_first), "expert 0 multiplies, whichever was chosen"
    yield replace(op, rework=_Sorted()), "experts are taken in the order of their numbers, not in that of their scores"
    yield replace(op, rework=_BySlot()), "the first slot is of expert 0, the second of expert 1, whichever were chosen"
    if len(op.weights) > 1:
        yield replace(op, rework=_BiasBySlot()), "the bias is that of the slot's number, and not of the expert in it"


@dataclass(frozen=True, slots=True)
class _BySlot(Reread):
    """The number of a slot stands for that of its expert."""

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The input, and the slots' own numbers."""
        x, ids = inputs
        return [x, torch.arange(ids.shape[-1], device=ids.device, dtype=ids.dtype).expand_as(ids)]


@dataclass(frozen=True, slots=True)
class _Sorted(Reread):
    """Experts stand in the order of their numbers."""

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The input, and the chosen numbers, sorted."""
        x, ids = inputs
        return [x, ids.sort(-1).values]


@dataclass(frozen=True, slots=True)
class _BiasBySlot:
    """The number of a slot stands for that of its expert where the bias is added."""

    def compute(self, call: Call) -> Tensor:
        """The output."""
        matrix, *biases = call.op.weights
        y = computed(replace(call.op, rework=None, weights=(matrix,)), call)
        for bias in biases:  # none, where another mistake left it out
            y = y + call.weights.load(bias)[: y.shape[1]].to(y)
        return y

    def noise(self, made: Made) -> Noise:
        """That of the right op."""
        return noise_of(replace(made.op, rework=None), made)


@AREA.mistake("top_k_off_by_one", "the best expert is passed over", "the first rank of the choice", Where(("top_k",)))
def _off_by_one_rank(op: Op, context: Context) -> Variants:
    def function(x: Tensor, k: int) -> Tensor:
        return argsort(x, descending=True)[..., 1 : k + 1]

    if context.graph.axes_read(op, 0)[-1] == op.attrs["k"]:
        return  # all are chosen
    yield computing(op, function), "the choice begins with the second best"


@AREA.mistake(
    "top_k_smallest", "the experts of the smallest scores are chosen", "the order of the sort", Where(("top_k",))
)
def _smallest(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, k: argsort(x)[..., :k]), "the smallest scores are chosen"


@AREA.mistake(
    "gate_ignored", "a value is not multiplied by its gate", "the gate of a shared expert, or of attention",
    Where(("mul",)),
)  # fmt: skip
def _ungated(op: Op, context: Context) -> Variants:
    for position, name in enumerate(op.inputs):
        if len(op.inputs) == 2 and name in context.graph and context.graph[name].kind in ("sigmoid", "silu"):
            kept = op.inputs[1 - position]
            function = second_alone if position == 0 else first_alone
            yield computing(op, function), f"{kept} is not multiplied by {name}"
