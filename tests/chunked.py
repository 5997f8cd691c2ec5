"""Mamba-2's scan as kernels compute it, many tokens at once (https://arxiv.org/abs/2405.21060, 6), right or not."""

import math

import torch
from torch import Tensor


def ssd(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, *, chunk: int, mistake: str = "",
    snapshots: int = 1,
) -> Tensor:  # fmt: skip
    """Values and the state after them in one row: state [H, D, N], x [T, H, D], dt [T, H], b and c [T, 1, N], a [H, 1].

    Decays are exponentials of differences of sums of logarithms.
    """
    assert snapshots == 1
    heads = x.shape[1] // b.shape[1]
    b, c = (z.repeat_interleave(heads, 1) for z in (b, c))
    h, values, rate = state, [], torch.nn.functional.softplus(dt)
    for at in range(0, len(x), chunk):
        cut = slice(at, at + chunk)
        logs = rate[cut] * a.reshape(-1)  # [t, H]
        sums, inflow = logs.cumsum(0), x[cut] * rate[cut, :, None]
        later = torch.ones(len(sums), len(sums)).triu(1).bool()[..., None]
        between = torch.exp((sums[:, None] - sums[None]).masked_fill(later, -math.inf))  # [t, s, H]
        inside = torch.einsum("thn,shn,tsh,shd->thd", c[cut], b[cut], between, inflow)
        read = sums - logs if mistake == "read early" else sums
        values.append(inside + torch.einsum("thn,th,hdn->thd", c[cut], torch.exp(read), h))
        added = sums[-1:] - sums + (logs if mistake == "added late" else 0)
        left = torch.einsum("shn,sh,shd->hdn", b[cut], torch.exp(added), inflow)
        share = {"not decayed": 1.0, "forgotten": 0.0}.get(mistake, torch.exp(sums[-1])[:, None, None])
        h = h * share + left
    return torch.cat((*(value.flatten() for value in values), h.flatten()))
