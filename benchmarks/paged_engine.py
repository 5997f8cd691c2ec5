"""A serving engine of Qwen3 in float32: a paged cache, several sequences in a pass, prompts in chunks (serving.py).

What a pass is fed is a `Batch`, which a mistake changes before the pass reads it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from tracediff import Recorder

BLOCK = 4  # positions
N_BLOCKS = 24
N_SLOTS = N_BLOCKS * BLOCK
BUDGET = 9  # tokens of a pass


@dataclass
class Request:
    """A sequence, what was computed of it, and the blocks that it has in the cache."""

    number: int
    tokens: list[int]
    n_new: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)

    @property
    def is_done(self) -> bool:
        """Whether all tokens that were asked for are there."""
        return len(self.tokens) == self.n_prompt + self.n_new


@dataclass
class Part:
    """One sequence's part of a pass: `n` tokens, of which those before are cached. Slots are where these are written
    to, and the keys that they read, as far as `length`, are found by the `table` of blocks.
    """

    request: Request
    n: int
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    table: list[int]
    length: int
    begin: int  # the first of its rows in the pass
    row: int  # that logits are made of
    first: int = 0  # the first key that is read
    read_by: int = BLOCK  # positions that a block of the table is taken to have

    @property
    def decodes(self) -> bool:
        """Whether it has one new token alone."""
        return self.n == 1 and self.request.computed >= self.request.n_prompt

    @property
    def read(self) -> list[int]:
        """The slots of the keys that it reads."""
        by, table = self.read_by, [*self.table, (self.table[-1] + 1) % N_BLOCKS]
        places = (table[j // by] * by + j % by for j in range(self.first, self.length))
        return [place % N_SLOTS for place in places]


Batch = list[Part]
Change = Callable[[Batch], None]


class Engine:
    """Runs requests until all are done, each pass with as many tokens as the budget allows, and records every op."""

    def __init__(self, model: Path, record: Recorder, change: Change, layer_read: Callable[[int, Part], int]) -> None:
        reader = gguf.GGUFReader(model)
        self._weights = {
            tensor.name: torch.from_numpy(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).copy()
            )
            for tensor in reader.tensors
        }
        fields = {name: one.contents() for name, one in reader.fields.items() if not name.startswith("tokenizer")}
        self._n_layer, self._heads, self._groups, self._dim, self._eps, self._theta = (
            fields[f"qwen3.{name}"]
            for name in ("block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length",
                         "attention.layer_norm_rms_epsilon", "rope.freq_base")
        )  # fmt: skip
        self._record, self._change, self._layer_read = record, change, layer_read
        left = torch.Generator().manual_seed(0)  # what an earlier batch left there
        self._cache = torch.randn(2, self._n_layer, N_SLOTS, self._groups, self._dim, generator=left)
        self._free = iter(range(N_BLOCKS))
        for name, weight in self._weights.items():
            if name.endswith("norm.weight"):
                record.weight(name, weight)

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> None:
        """Feed them until each has its new tokens."""
        while batch := [*self._batch(requests)]:
            tokens = [token for part in batch for token in part.tokens]
            positions = [position for part in batch for position in part.positions]
            self._record.step(tokens, positions, [part.request.number for part in batch for _ in part.tokens])
            rows = [part.row for part in batch]
            self._change(batch)
            logits = self._forward(batch)
            self._record("output", logits, rows=tuple(rows))
            for part, of in zip(batch, logits, strict=True):
                part.request.computed += part.n
                if part.request.computed == len(part.request.tokens):
                    part.request.tokens.append(int(of.argmax()))

    def _batch(self, requests: list[Request]) -> Iterator[Part]:
        """What comes next of each that is not done, as far as the budget goes."""
        begin = 0
        for request in requests:
            done, fed = request.computed, request.tokens
            n = 0 if request.is_done else min(len(fed) - done, BUDGET - begin)
            if n > 0:
                while len(request.blocks) * BLOCK < done + n:
                    request.blocks.append(next(self._free))
                at = [*range(done, done + n)]
                slots = [request.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in at]
                table, row = [*request.blocks], begin + n - 1
                yield Part(request, n, fed[done : done + n], at, slots, table, done + n, begin, row)
                begin += n

    def _forward(self, batch: Batch) -> Tensor:
        """The logits of a pass, one row for each part."""
        weights, record = self._weights, self._record
        positions = torch.tensor([position for part in batch for position in part.positions])
        x = weights["token_embd.weight"][[token for part in batch for token in part.tokens]]
        record("token_embd", x)
        for layer in range(self._n_layer):

            def op(name: str, values: Tensor, at: str = f"blk.{layer}.") -> Tensor:
                record(at + name, values)
                return values

            def linear(name: str, values: Tensor, at: str = f"blk.{layer}.") -> Tensor:
                return values @ weights[f"{at}{name}.weight"].T

            def normed(name: str, values: Tensor, at: str = f"blk.{layer}.") -> Tensor:
                return op(name, self._norm(values, weights[f"{at}{name}.weight"]))

            h = normed("attn_norm", x)
            q, k, v = (op(f"attn_{of}", linear(f"attn_{of}", h).unflatten(1, (-1, self._dim))) for of in "qkv")
            q, k = normed("attn_q_norm", q), normed("attn_k_norm", k)
            q, k = op("attn_q_rope", self._rope(q, positions)), op("attn_k_rope", self._rope(k, positions))
            attended = op("attn_kqv", self._attention(layer, batch, q, torch.stack((k, v))))
            x = op("attn_residual", x + op("attn_output", linear("attn_output", attended)))
            h = normed("ffn_norm", x)
            gate, up = (op(f"ffn_{of}", linear(f"ffn_{of}", h)) for of in ("gate", "up"))
            down = linear("ffn_down", op("ffn_act", torch.nn.functional.silu(gate) * up))
            x = op("ffn_residual", x + op("ffn_down", down))
        h = self._norm(x, weights["output_norm.weight"])
        record("output_norm", h)
        head = weights.get("output.weight", weights["token_embd.weight"])
        return h[[part.row for part in batch]] @ head.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        rates = self._theta ** (-torch.arange(0, self._dim, 2) / self._dim)
        angles = (positions[:, None] * rates)[:, None]
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _attention(self, layer: int, batch: Batch, q: Tensor, new: Tensor) -> Tensor:
        """Writes keys and values [2, T, G, D] to their slots; then each part's queries read those of its table."""
        slots = torch.tensor([slot for part in batch for slot in part.slots])
        self._cache[:, layer, slots[slots >= 0]] = new[:, slots >= 0]
        out = torch.zeros(len(q), self._heads * self._dim)
        for part in batch:
            rows = slice(part.begin, part.begin + part.n)
            k, v = self._cache[:, self._layer_read(layer, part), part.read].repeat_interleave(
                self._heads // self._groups, 2
            )
            scores = torch.einsum("qhd,khd->hqk", q[rows], k) / math.sqrt(self._dim)
            at = torch.arange(part.length - part.n, part.length)
            hidden = torch.arange(part.first, part.length) > at[:, None]
            probs = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num()
            out[rows] = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
        return out
