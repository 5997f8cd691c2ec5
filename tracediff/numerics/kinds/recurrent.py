"""What is computed token after token, with a state that one hands on to the next: one sequence.

Kinds that ggml computes in one op return the values of all tokens and the state after the last, one after the other in
one dimension; those with `snapshots` also states before it, the latest first, zeros where there is none.
Shapes: T tokens, H heads, D channels of a head, N of its state.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tracediff.numerics.kinds.elementwise import softplus, softplus_as_computed
from tracediff.numerics.kinds.kind import Kind, expressed_as
from tracediff.numerics.kinds.layout import identity

# Tokens that a kernel computes at once: Mamba-2's chunk_size (mamba_ssm, ops/triton/ssd_combined.py; FLA and ggml: 64).
_CHUNK = 256
_LEAST_LOG = -103.0  # exp of less is 0 in float32

Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # state before, token -> state after, value


def _over_tokens(step: Step, state: Tensor, n_tokens: int, snapshots: int = 1) -> Tensor:
    values, states = [], []
    for t in range(n_tokens):
        state, value = step(state, t)
        values.append(value.flatten())
        states.append(state.flatten())
    latest = states[: -snapshots - 1 : -1]
    blanks = [torch.zeros_like(state).flatten()] * (snapshots - len(latest))
    return torch.cat((*values, *latest, *blanks))


def in_chunks(log: Tensor) -> Tensor:
    """Logarithms of decays [T, ...] less exactly, as kernels have them that compute many tokens at once: differences of
    their sums since a chunk's first token, which round at the size of these.
    """
    log = log.clamp(min=_LEAST_LOG)
    sums = torch.cat([chunk.cumsum(0) for chunk in log.detach().split(_CHUNK)])
    return (log + sums) - sums


def ssm_conv(x: Tensor, kernel: Tensor) -> Tensor:
    """[D, K - 1 + T], [D, K] -> [T, D]: of each channel a convolution over tokens (https://arxiv.org/abs/2312.00752)."""
    return (x.unfold(-1, kernel.shape[-1], 1) * kernel[:, None]).sum(-1).swapaxes(0, 1)


def scan_step(state: Tensor, log: Tensor, inflow: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a token, which decays by exp(log), and what c reads of it."""
    state = state * torch.exp(log) + inflow
    return state, (state * c).sum(-1)


def ssm_scan(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    *,
    snapshots: int = 1,
    softplus: Callable[[Tensor], Tensor] = softplus,
    step: Callable[..., tuple[Tensor, Tensor]] = scan_step,
    logs: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """State [H, D, N], x [T, H, D], dt [T, H], b and c [T, groups, N], a [H, N] or [H, 1].

    state = state exp(softplus(dt) a) + b x softplus(dt); value = state . c (https://arxiv.org/abs/2405.21060).
    """
    n_head = x.shape[1]
    rate = softplus(dt)[..., None]
    log = logs(rate * a.reshape(n_head, -1))[:, :, None]  # T, H, 1, N or 1
    heads = n_head // b.shape[1]
    b, c = (z.repeat_interleave(heads, 1)[:, :, None] for z in (b, c))  # T, H, 1, N
    inflow = (x * rate)[..., None] * b

    def at(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        return step(state, log[t], inflow[t], c[t])

    return _over_tokens(at, state.reshape(n_head, x.shape[2], -1), len(x), snapshots)


def times(state: Tensor, x: Tensor) -> Tensor:
    """[H, D, D], [H, D] -> [H, D]: the product of each head."""
    return (state @ x[..., None]).squeeze(-1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """[H, D], [H, D] -> [H, D, D]."""
    return a[..., None] * b[:, None]


def delta_step(state: Tensor, forget: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a token, and the value that q finds in it."""
    state = state * forget
    state = state + outer((v - times(state, k)) * beta, k)
    return state, times(state, q)


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    snapshots: int = 1,
    step: Callable[..., tuple[Tensor, Tensor]] = delta_step,
    logs: Callable[[Tensor], Tensor] = identity,
) -> Tensor:
    """Q and k [T, heads, D], v [T, H, D], gate [T, H, D or 1], beta [T, H, 1], state [H, D, D].

    Head h reads query h % heads. Of the state a row belongs to a channel of v: it forgets by exp(gate), and turns to v
    where k points: state += beta (v - state k) k^T; value = state q / sqrt(D) (https://arxiv.org/abs/2412.06464).
    """
    n_tokens, n_head, size = v.shape
    q, k = (z.repeat(1, n_head // z.shape[1], 1) for z in (q, k))
    forget = torch.exp(logs(gate.reshape(n_tokens, n_head, 1, -1)))
    beta = beta.reshape(n_tokens, n_head, 1)

    def at(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state, value = step(state, forget[t], q[t], k[t], v[t], beta[t])
        return state, value / math.sqrt(size)

    return _over_tokens(at, state.flatten()[: n_head * size * size].reshape(n_head, size, size), n_tokens, snapshots)


def _heads(state: Tensor, like: Tensor) -> Tensor:
    """A state as [H, D, D], for values [T, H, D]."""
    _, n_head, size = like.shape
    return state.reshape(n_head, size, size)


def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, gate: Tensor, state: Tensor, *, scale: float) -> Tensor:
    """All [T, H, D] (https://arxiv.org/abs/2312.06635): state = gate state + k v^T; value = scale q^T state."""
    gate, k, q = (z.reshape(v.shape)[..., None] for z in (gate, k, q))

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        state = state * gate[t] + k[t] * v[t][:, None]
        return state, (state * (q[t] * scale)).sum(1)

    return _over_tokens(step, _heads(state, v), len(v))


def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, decay: Tensor, state: Tensor, first: Tensor) -> Tensor:
    """All [T, H, D], first [H, D] (https://arxiv.org/abs/2404.05892): value = r^T (first k v^T + state); then
    state = decay state + k v^T.
    """
    k, r, decay = (z.reshape(v.shape)[..., None] for z in (k, r, decay))
    first = first.reshape(*v.shape[1:], 1)

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        product = k[t] * v[t][:, None]
        return state * decay[t] + product, ((product * first + state) * r[t]).sum(1)

    return _over_tokens(step, _heads(state, v), len(v))


def rwkv_wkv7(r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """All [T, H, D]: state = decay state + v k^T + (state a) b^T; value = state r (https://arxiv.org/abs/2503.14456)."""
    r, decay, k, a, b = (z.reshape(v.shape)[:, :, None] for z in (r, decay, k, a, b))  # T, H, 1, D: of the keys

    def step(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        removed = (state * a[t]).sum(-1, keepdim=True)
        state = state * decay[t] + v[t][..., None] * k[t] + removed * b[t]
        return state, (state * r[t]).sum(-1)

    return _over_tokens(step, _heads(state, v), len(v))


def solve_tri(a: Tensor, b: Tensor) -> Tensor:
    """[..., n, n], [..., n, m] -> [..., n, m]: x of a x = b, where a is lower triangular; row by row."""
    rows: list[Tensor] = []
    for i in range(a.shape[-1]):
        rest = b[..., i, :]
        if rows:
            rest = rest - (a[..., i : i + 1, :i] @ torch.stack(rows, -2)).squeeze(-2)
        rows.append(rest / a[..., i, i, None])
    return torch.stack(rows, -2)


KINDS = (
    Kind("ssm_conv", ssm_conv, ("x",), scheme="vectors"),
    Kind(
        "ssm_scan",
        ssm_scan,
        ("state", "x", "dt", "b", "c"),
        ("value",),
        scheme="vectors",
        shaped_as="x",
        noise=expressed_as(partial(ssm_scan, softplus=softplus_as_computed, logs=in_chunks)),
    ),
    Kind(
        "gated_delta_net",
        gated_delta_net,
        ("q", "k", "v", "gate", "beta", "state"),
        ("value",),
        shaped_as="v",
        noise=expressed_as(partial(gated_delta_net, logs=in_chunks)),
    ),
    Kind("gated_linear_attn", gated_linear_attn, ("k", "v", "q", "gate", "state"), ("value",), shaped_as="v"),
    Kind("rwkv_wkv6", rwkv_wkv6, ("k", "v", "r", "decay", "state"), ("value",), scheme="vectors", shaped_as="v"),
    Kind("rwkv_wkv7", rwkv_wkv7, ("r", "decay", "k", "v", "a", "b", "state"), ("value",), shaped_as="v"),
    Kind("solve_tri", solve_tri, ("a", "b")),
)
