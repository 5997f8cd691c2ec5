"""Mistakes in what one step hands on to the next, and in what is computed with it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where, computing
from tracediff.diagnose.rearranged import SomeHeads
from tracediff.model.graph import Extent, Op
from tracediff.model.weights import reading, values_of
from tracediff.names import local_name, split
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.elementwise import softplus_as_computed
from tracediff.numerics.kinds.recurrent import delta_step, gated_delta_net, outer, scan_step, ssm_conv, ssm_scan, times

AREA = Area()


@AREA.mistake(
    "state_not_carried", "a step begins with an empty state",
    "where the state is kept between steps, and when it is reset", Where(("state",)),
)  # fmt: skip
def _not_carried(op: Op, _: Context) -> Variants:
    yield computing(op, torch.zeros_like), f"{op.name} is zeros: the step before left another"


@AREA.mistake(
    "state_of_another_layer", "a layer begins with the state of another",
    "the layer's index in the states that are kept", Where(("state",)),
)  # fmt: skip
def _of_another_layer(op: Op, context: Context) -> Variants:
    layers = [layer for layer in dict.fromkeys(split(of.name)[0] for of in context.graph) if layer is not None]
    own = split(op.inputs[0])[0]

    def of(layer: int) -> tuple[str, ...]:
        return tuple(f"blk.{layer}.{local_name(name)}" for name in op.inputs)

    def is_alike(layer: int) -> bool:
        pairs = [
            (context.graph.ops.get(there), context.graph[here])
            for there, here in zip(of(layer), op.inputs, strict=True)
        ]
        return all(there is not None and (there.kind, there.axes) == ("copy", here.axes) for there, here in pairs)

    alike = [layer for layer in layers if is_alike(layer)]
    if own not in alike:
        return
    at = alike.index(own)
    for place, whose in {0: "first of such layers", at + 1: "next such layer", at - 1: "such layer before"}.items():
        if 0 <= place < len(alike) and place != at:
            others = of(alike[place])  # of a layer before this one the state of this step is there
            kind = "copy" if place < at and len(others) == 1 else op.kind
            words = f"{op.name} is what {' and '.join(others)} left, where {' and '.join(op.inputs)} belongs"
            name = f"it is what the {whose} left, where its own state belongs"
            yield Variant(replace(op, inputs=others, kind=kind), words, name=name)


@AREA.mistake(
    "written_once", "steps after the first leave the state as it is",
    "where the state is written: by a prompt's kernel and by that of decode steps", Where(("copy",)),
)  # fmt: skip
def _not_written(op: Op, context: Context) -> Variants:
    state, at = next(((of, i) for of, i in context.graph.readers(op.name) if of.kind == "state"), (None, 0))
    if state is None or len(op.inputs) != 1:
        return
    before = [math.prod(context.graph[name].shape(1)) for name in state.inputs[:at]]  # of as many tokens in each step

    def function(new: Tensor, held: Tensor, positions: Tensor) -> Tensor:
        own = held.flatten()[sum(before) :][: new.numel()]
        return own.reshape(new.shape) if int(positions[0]) else new

    yield (
        replace(op, inputs=(*op.inputs, state.name, "positions"), views=(*op.seen, None, None), function=function),
        "the step does not write it: the next finds what the one before left",
    )


@AREA.mistake(
    "state_transposed", "the state is handed on transposed", "the order of its two axes, of keys and of values",
    Where(("copy",)),
)  # fmt: skip
def _handed_transposed(op: Op, context: Context) -> Variants:
    is_state = any(reader.kind == "state" for reader, _ in context.graph.readers(op.name))
    if is_state and len(op.axes) == 3 and op.axes[1] == op.axes[2]:
        yield computing(op, lambda x: x.mT), "the next step finds it transposed"


@AREA.mistake(
    "state_read_transposed", "the state of the step before is read transposed",
    "the order of its two axes, of keys and of values", Where(("rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn")),
)  # fmt: skip
def _read_otherwise(op: Op, _: Context) -> Variants:
    kind = KINDS[op.kind]
    of_state, of_values = kind.inputs.index("state"), kind.inputs.index(kind.shaped_as)

    def function(*inputs: Tensor, **attrs: Any) -> Tensor:
        read, size = [*inputs], inputs[of_values].shape[-1]
        read[of_state] = read[of_state].flatten().unflatten(0, (-1, size, size)).mT.flatten()
        return kind.function(*read, **attrs)

    yield computing(op, function), "the state of the step before is read transposed"


@AREA.mistake(
    "conv_window_misplaced", "a convolution keeps other columns for the next step than its last ones",
    "which columns of its input are kept, before or after the step's own are there", Where(("copy",)),
)  # fmt: skip
def _misplaced(op: Op, context: Context) -> Variants:
    view = next(iter(op.views), None)
    if view is None or view.offset != "T" or all(of.kind != "state" for of, _ in context.graph.readers(op.name)):
        return
    n, columns = len(view.shape), view.strides.index(1)
    early, first = (op.seeing({0: replace(view, offset=offset)}) for offset in (Extent(-1, t=1), 0))
    yield early, "the columns that it keeps end one token early: the step's last is not among them"
    yield first, f"it keeps its first {view.shape[columns]} columns in place of the last: those of before the step"
    yield computing(op, lambda x: x.flip(columns - n)), "it keeps its columns in the reverse order, the newest first"


@AREA.mistake(
    "conv_reversed", "the convolution runs the other way, or from another tap on", "the order of the kernel's taps",
    Where(("ssm_conv",)),
)  # fmt: skip
def _reversed(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, w: ssm_conv(x, w.flip(-1))), "the taps of the kernel are in the reverse order"
    n = op.weights[0].shape[-1]
    for by in range(1, n):  # as in a ring of columns whose first is another
        words = f"the taps of the kernel are rotated: the last column meets tap {by - 1} of {n}"
        yield computing(op, lambda x, w, by=by: ssm_conv(x, w.roll(-by, -1))), words


@AREA.mistake(
    "conv_acausal", "the convolution reads tokens that come after", "how its input is padded: on the left alone",
    Where(("ssm_conv",)),
)  # fmt: skip
def _acausal(op: Op, _: Context) -> Variants:
    n_taps = op.weights[0].shape[-1]
    yield computing(op, partial(_later, late=1, repeats=True)), f"{_LATE.format('the token')}, and the last again"
    for late in dict.fromkeys((1, (n_taps - 1) // 2, n_taps - 1)):
        if late:
            words = _LATE.format("the token" if late == 1 else f"{late} tokens")
            yield computing(op, partial(_later, late=late)), f"{words}, and zeros after the last"


_LATE = "every tap reads {} after its own"


def _later(x: Tensor, w: Tensor, late: int, repeats: bool = False) -> Tensor:
    after = x[:, -1:].expand(-1, late) if repeats else torch.zeros_like(x[:, :late])
    return ssm_conv(torch.cat((x[:, late:], after), 1), w)


Delta = Callable[..., tuple[Tensor, Tensor]]


def _turned(predicted: Callable[..., Tensor]) -> Delta:
    """The delta rule with another change of what the state has where k points."""

    def step(s: Tensor, forget: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        return _read(s * forget + outer(predicted(s, s * forget, k, v, beta), k), q)

    return step


def _read(s: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return s, times(s, q)


def _early(s: Tensor, forget: Tensor, q: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return delta_step(s, forget, q, *others)[0], times(s * forget, q)


def _transposed(s: Tensor, forget: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    after = s * forget
    after = after + outer((v - times(after.mT, k)) * beta, k)
    return after, times(after.mT, q)


def _read_transposed(s: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    after, _ = delta_step(s, *others)
    return after, times(after.mT, others[1])


_DELTA: Mapping[str, Delta] = MappingProxyType({
    "what k finds is taken from the state before it forgets": _turned(lambda s, f, k, v, b: (v - times(s, k)) * b),
    "what k finds is not taken from v: k v^T is added": _turned(lambda s, f, k, v, b: v * b),
    "beta scales v, and not what k finds": _turned(lambda s, f, k, v, b: v * b - times(f, k)),
    "beta (v - what k finds) is added along v's channels and k's exchanged": lambda s, f, q, k, v, b: (
        _read(s * f + outer((v - times(s * f, k)) * b, k).mT, q)
    ),
    "the state decays by 1 + g, where by exp(g)": lambda s, f, *others: delta_step(s, 1 + torch.log(f), *others),
    "beta is left out": _turned(lambda s, f, k, v, b: v - times(f, k)),
    "q reads the state before k and v have changed it": _early,
    "the state does not forget": lambda s, forget, *others: delta_step(s, torch.ones_like(forget), *others),
    "k and q read the state transposed": _transposed,
    "q reads the state transposed": _read_transposed,
    "q is not divided by sqrt(D)": lambda s, forget, q, *others: (
        delta_step(s, forget, q * math.sqrt(q.shape[-1]), *others)
    ),
})  # fmt: skip


@AREA.mistake(
    "delta_rule", "the delta rule of a state is another",
    "the recurrence: the state forgets, k finds what it holds, beta (v - that) is added along k, q reads the result",
    Where(("gated_delta_net",)),
)  # fmt: skip
def _delta_rule(op: Op, _: Context) -> Variants:
    for words, step in _DELTA.items():
        yield computing(op, partial(gated_delta_net, step=step)), words

    def handed(*inputs: Tensor, **attrs: Any) -> Tensor:
        q, k, v, gate, beta, state = inputs
        size = v.shape[-1]
        return gated_delta_net(q, k, v, gate, beta, state.flatten().unflatten(0, (-1, size, size)).mT, **attrs)

    yield computing(op, handed), "the state of the step before is read transposed"


Scan = Callable[..., tuple[Tensor, Tensor]]


def _decayed(after: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Scan:
    """A state that is another after a token, by what it was, the logarithm of its decay and what flows in."""

    def step(state: Tensor, log: Tensor, inflow: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state = after(state, log, inflow)
        return state, (state * c).sum(-1)

    return step


_SCANS: Mapping[str, Scan] = MappingProxyType({
    "the state decays by 1 + dt a, where by exp(dt a)": _decayed(lambda s, log, inflow: s * (1 + log) + inflow),
    "the state does not decay": _decayed(lambda s, log, inflow: s + inflow),
    "what flows in decays at once": _decayed(lambda s, log, inflow: (s + inflow) * torch.exp(log)),
    "what flows in is (exp(dt a) - 1) / a B x, where dt B x belongs": _decayed(
        lambda s, log, inflow: s * torch.exp(log) + inflow * torch.expm1(log) / log
    ),
    "C reads the state before the token has changed it": lambda s, log, inflow, c: (
        scan_step(s, log, inflow, c)[0], (s * c).sum(-1)
    ),
})  # fmt: skip


_scan = partial(ssm_scan, softplus=softplus_as_computed)  # whose noise engines have


@AREA.mistake(
    "state_space", "the recurrence of a state space is another",
    "the recurrence: state = exp(dt a) state + dt B x, and C reads the result", Where(("ssm_scan",)),
)  # fmt: skip
def _state_space(op: Op, _: Context) -> Variants:
    for words, step in _SCANS.items():
        yield computing(op, partial(_scan, step=step)), words
    for words, read in (("C stands for B too", (0, 1, 2, 4, 4, 5)), ("B stands for C too", (0, 1, 2, 3, 3, 5))):
        yield computing(op, lambda *x, read=read, **attrs: _scan(*(x[i] for i in read), **attrs)), words

    def without_rate(state: Tensor, x: Tensor, dt: Tensor, *others: Tensor, **attrs: Any) -> Tensor:
        return _scan(state, x / softplus_as_computed(dt)[..., None], dt, *others, **attrs)

    yield computing(op, without_rate), "what flows in is B x, where dt B x belongs"

    def transposed(state: Tensor, x: Tensor, *others: Tensor, **attrs: Any) -> Tensor:
        n_head, size = x.shape[1:]
        return _scan(state.reshape(n_head, -1, size).mT.reshape(n_head, size, -1), x, *others, **attrs)

    yield computing(op, transposed), "the state of the step before is read transposed"


@AREA.mistake(
    "scan_groups", "a head reads what is another group's",
    "the mapping from heads to groups: repeat, or repeat_interleave", Where(("ssm_scan", "gated_delta_net")),
)  # fmt: skip
def _other_groups(op: Op, context: Context) -> Variants:
    names, shared, head = (("B", "C"), (3, 4), 1) if op.kind == "ssm_scan" else (("q", "k"), (0, 1), 2)
    n_groups, n_heads = (context.graph.axes_read(op, i)[1] for i in (shared[0], head))
    assert isinstance(n_groups, int)
    assert isinstance(n_heads, int)
    if n_groups in (1, n_heads):
        return
    at = torch.arange(n_heads)
    by_turns, in_runs = (f"h % {n_groups}", at % n_groups), (f"h // {n_heads // n_groups}", at // (n_heads // n_groups))
    right, wrong = (in_runs, by_turns) if op.kind == "ssm_scan" else (by_turns, in_runs)
    for chosen in (shared, shared[:1], shared[1:]):
        read = {i: (wrong if i in chosen else right)[1].tolist() for i in shared}
        words = " and ".join(name for i, name in zip(shared, names, strict=True) if i in chosen)
        yield replace(op, rework=SomeHeads(read)), f"head h reads {words} of group {wrong[0]}; it is {right[0]}"


@AREA.mistake(
    "rate_without_softplus", "the rate of the state is taken as it is, without its softplus", "the softplus of dt",
    Where(("ssm_scan",)),
)  # fmt: skip
def _rate(op: Op, _: Context) -> Variants:
    def function(*operands: Tensor, snapshots: int = 1) -> Tensor:
        return ssm_scan(*operands, snapshots=snapshots, softplus=lambda x: x)

    yield computing(op, function), "dt is used without its softplus"


@AREA.mistake(
    "decay_as_logarithm", "the decay of the state is taken for its logarithm", "A_log: GGUF files hold -exp(A_log)",
    Where(("ssm_scan", "mul")),
)  # fmt: skip
def _logarithm(op: Op, _: Context) -> Variants:
    if not op.weights or "ssm_a" not in op.weights[0].name:
        return
    words = f"{op.weights[0].name} is used as -exp(a): a file holds that already"
    yield reading(op, lambda file, info: -torch.exp(values_of(file, info))), words
    yield (
        reading(op, lambda file, info: -torch.log(-values_of(file, info))),
        f"{op.weights[0].name} is used as -log(-a): A_log without its exp",
    )
    yield reading(op, lambda file, info: -values_of(file, info)), f"{op.weights[0].name} is used with the other sign"
