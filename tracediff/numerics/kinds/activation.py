"""Activations, and feed-forwards that are gated by one."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tracediff.numerics.error_rules import of_sigmoid
from tracediff.numerics.floors import TINY, Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, analysed, applied, exponential, kept, rounded_between, wide
from tracediff.numerics.roundings import half, rounding_named
from tracediff.numerics.running import running

silu = torch.nn.functional.silu
_LARGEST = 65504.0  # of float16
_OVERFLOWS = math.log(_LARGEST)
_TABLE_ENDS = 10.0  # beyond, ggml takes gelu(x) for 0 or x (ggml-cpu/vec.h, ggml_vec_gelu_f32)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) as tanh approximates it (https://arxiv.org/abs/1606.08415)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


def gelu_erf(x: Tensor) -> Tensor:
    """x Phi(x)."""
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def gelu_quick(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def elu(x: Tensor) -> Tensor:
    """X where it is positive, exp(x) - 1 elsewhere."""
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0.0)))


def hardsigmoid(x: Tensor) -> Tensor:
    """(x + 3) / 6 within 0 and 1."""
    return ((x + 3) / 6).clamp(0.0, 1.0)


def hardswish(x: Tensor) -> Tensor:
    """X times that."""
    return x * hardsigmoid(x)


def xielu(x: Tensor, *, alpha_n: float, alpha_p: float, beta: float, eps: float) -> Tensor:
    """The activation of Apertus (https://arxiv.org/abs/2411.13010): a parabola, and below 0 a bend."""
    bend = (torch.expm1(x.clamp(max=eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, bend) + beta * x


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (https://arxiv.org/abs/2002.05202)."""
    return silu(gate) * up


def swiglu_oai(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """That of gpt-oss: gate sigmoid(alpha gate) (up + 1), both held within `limit`."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def swiglu_clamp(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """silu(gate) * up, both held within `limit` first."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: activation(gate) * up


def _swiglu(call: Call) -> Tensor:
    """Of a gate in half precision PyTorch's silu is rounded to that, which multiplies what may be float32."""
    between = call.arithmetic.operands
    if between == "f64" or call.op.function:
        return applied(call)
    gate, up = map(wide, call.inputs)
    return kept(rounding_named(between)(silu(gate)) * up, call.weights)


def _swiglu_noise(made: Made) -> Noise:
    """That of a sigmoid, and of its product with gate and up, be what is between them rounded."""
    own, between = _product_noise(made), made.arithmetic.operands
    if between == "f64" or made.op.function:
        return own
    gate, up = (wide(x) for x in made.inputs)
    return rounded_between(own, silu(gate), rounding_named(between), up)


def _product_noise(made: Made) -> Noise:
    gate, up = (wide(x) for x in made.inputs)
    sigma = of_sigmoid(gate).mul_(gate).mul_(up).hypot_(made.size).mul_(made.unit / math.sqrt(3))
    # 1 / (1 + exp(88.8)) is 0 where exp overflows, though it should be a denormal. In half precision MLX, whose silu is
    # x * sigmoid(x), keeps the sigmoid, too, and exp and the sum within it.
    held = made.storage if made.half or made.storage == "f64" else "f32"
    lost = gate.abs().mul_(up.abs()).mul_(TINY[held]).add_(made.stored)
    if made.half:
        lost.add_(torch.sigmoid(-gate).mul_(2).add_(1).mul_(made.size), alpha=made.kept)
    return Noise(sigma, lost.add_(_overflown(made, gate)))


def _sigmoid_noise(made: Made) -> Noise:
    """Of silu, too."""
    own = analysed(made)
    return replace(own, hard=own.hard + _overflown(made, made.inputs[0]))


def _overflown(made: Made, x: Tensor) -> Tensor:
    """What is lost of sigmoid(x), or of a product with it, where exp(-x) is infinite in half precision: candle's silu,
    x / (1 + exp(-x)) with every step in float16, is 0 there.
    """
    is_lost = made.half and made.storage == "f16"
    return made.y.abs() * (x < -_OVERFLOWS) if is_lost else torch.zeros((), dtype=made.y.dtype)


# --- looked up in a table: ggml's CPU has GELU of every float16 -----------------------------------------------------


def _looked_up(activation: Callable[[Tensor], Tensor], x: Tensor, ends: float) -> Tensor:
    found = half(activation(half(x)))
    return torch.where(x <= -ends, torch.zeros_like(x), torch.where(x >= ends, x, found))


def _table(activation: Callable[[Tensor], Tensor], ends: float) -> Callable[[Call], Tensor]:
    """The value where the arithmetic is a table's. Of a gated op the activation alone is looked up."""

    def compute(call: Call) -> Tensor:
        x, *up = map(wide, call.inputs)
        is_table = call.arithmetic.operands == "f16" and call.op.function is None
        y = _looked_up(activation, x, ends) * (up[0] if up else 1) if is_table else call.function(x, *up)
        return y.to(call.weights.dtype)

    return compute


def _table_noise(activation: Callable[[Tensor], Tensor], ends: float) -> Callable[[Made], Noise]:
    """Entries are computed in float32: one that lies on a boundary of float16 may be the next."""

    def noise(made: Made) -> Noise:
        if made.arithmetic.operands != "f16" or made.op.function:
            return analysed(made)
        x, *up = made.inputs
        x = half(x.masked_fill(x.abs() >= min(ends, _LARGEST), 0.0))
        entry, error = running(activation, [x], each=made.unit, sums=made.unit)
        bound, found = error.bound(), half(entry)
        turned = torch.maximum((half(entry + bound) - found).abs(), (half(entry - bound) - found).abs())
        turned = turned * (up[0].abs() if up else 1.0)
        return Noise(torch.zeros_like(made.y), made.stored + made.unit * made.size + turned)

    return noise


def _tabled(name: str, activation: Callable[[Tensor], Tensor], ends: float = math.inf) -> tuple[Kind, Kind]:
    alone = Kind(
        name, activation, ("x",), compute=_table(activation, ends), noise=_table_noise(activation, ends), scheme="table"
    )
    gated = replace(alone, name=name.replace("gelu", "geglu"), function=_gated(activation), inputs=("gate", "up"))
    return alone, gated


_UNARY: dict[str, Callable[..., Tensor]] = {
    "gelu_erf": gelu_erf, "relu": torch.relu, "tanh": torch.tanh, "elu": elu, "hardsigmoid": hardsigmoid,
    "hardswish": hardswish, "xielu": xielu,
}  # fmt: skip
KINDS = (
    exponential(Kind("swiglu", swiglu, ("gate", "up"), compute=_swiglu, noise=_swiglu_noise), "gated"),
    exponential(Kind("swiglu_oai", swiglu_oai, ("gate", "up"))),
    exponential(Kind("swiglu_clamp", swiglu_clamp, ("gate", "up"))),
    Kind("geglu_erf", _gated(gelu_erf), ("gate", "up")),
    Kind("reglu", _gated(torch.relu), ("gate", "up")),
    *_tabled("gelu", gelu, _TABLE_ENDS),
    *_tabled("gelu_quick", gelu_quick),
    exponential(Kind("silu", silu, ("x",), noise=_sigmoid_noise)),
    exponential(Kind("sigmoid", torch.sigmoid, ("x",), noise=_sigmoid_noise)),
    *(Kind(name, f, ("x",), keeps_part=name == "tanh") for name, f in _UNARY.items()),  # a score that is capped
)
ACTIVATIONS = frozenset(kind.name for kind in KINDS)  # of each value, or of a gate with a second one
