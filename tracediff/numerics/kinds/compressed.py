"""What attention to compressed keys adds (DeepSeek V4): tokens are taken together in blocks of n."""

import math

import torch
from torch import Tensor

from tracediff.numerics.kinds.kind import Kind, none


def compress(values: Tensor, scores: Tensor, positions: Tensor, keys: Tensor, *, n: int, overlap: bool) -> Tensor:
    """[S, w], [S, w], positions [T] of the step and [S] of all -> [T, d]: the row of each block, where a token ends it.

    Of each channel the mean over the block's tokens, with softmax(scores) as weights. Blocks that overlap have rows of
    2 d channels: the first half is that of the tokens of the block before, the second of its own. Rows of tokens that
    end no block are 0. (src/models/deepseek4.cpp, build_overlap_compressed_kv_from_state)
    """
    d = values.shape[-1] // (2 if overlap else 1)
    is_end = (positions + 1) % n == 0
    tokens = (positions[is_end] - keys[0])[:, None] + torch.arange(1 - n, 1, device=positions.device)  # [blocks, n]
    parts = [(tokens, slice(values.shape[-1] - d, None))]
    if overlap:
        parts.insert(0, (tokens - n, slice(0, d)))
    x = torch.cat([values[at.clamp(min=0)][..., of] for at, of in parts], 1)
    of_each = [scores[at.clamp(min=0)][..., of].masked_fill((at < 0)[..., None], -math.inf) for at, of in parts]
    rows = (x * torch.softmax(torch.cat(of_each, 1), 1)).sum(1)
    row_of = torch.where(is_end, is_end.cumsum(0) - 1, len(tokens))
    return torch.cat((rows, torch.zeros_like(values[:1, :d])))[row_of]


def place_in_block(positions: Tensor, *, n: int) -> Tensor:
    """[T] -> [T]: which token of its block it is."""
    return positions % n


def block_start(positions: Tensor, *, n: int) -> Tensor:
    """[T] -> [T]: the position of the first token of a block that ends here."""
    return (positions - (n - 1)).clamp(min=0)


KINDS = (
    Kind("compress", compress, ("values", "scores", "positions", "keys"), ("token", "channel")),
    Kind("place_in_block", place_in_block, ("positions",), ("token",), noise=none),
    Kind("block_start", block_start, ("positions",), ("token",), noise=none),
)
