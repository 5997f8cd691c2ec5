"""The torch engine as several ranks in one process: tensor parallel, experts apart, a trace of each rank.

    python benchmarks/sharded.py [--out docs/sharding.md]

Each rank holds full buffers of which only its own part is filled: a column-parallel op is computed and cut, a
row-parallel one sees zeros where others have values, so what it makes is its term of the sum. A mistake is a change
to one of these places.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import tiny_models
import torch
from pages import write_page
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape, write_model
from tracediff.names import split
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.views import seen
from tracediff.pipeline import check_trace
from tracediff.trace.format import DType, Shard
from tracediff.trace.writer import TraceWriter

LAYER = "blk.1."
DTYPES: dict[torch.dtype, DType] = {torch.float32: "f32", torch.bfloat16: "bf16"}
_HEADS = {"attn_q": 1, "attn_q_norm": 1, "attn_q_rope": 1, "attn_scores": 0, "attn_probs": 0, "attn_kqv": 1}
_KV = ("attn_k", "attn_k_norm", "attn_k_rope", "attn_v")
_FFN = ("ffn_gate", "ffn_up", "ffn_act", "output")
_REDUCED = ("attn_output", "ffn_down")
_OF_EXPERTS = {"ffn_down": "ffn_moe_out", "ffn_up": "attn_q"}  # where there are experts
SHAPE = Shape("llama", n_layer=3, n_embd=64, n_head=8, n_head_kv=2, n_ff=96, n_vocab=320, eps=1e-5)
_PAGE = """# Sharded engines

Made by `python benchmarks/sharded.py --out docs/sharding.md`: the torch engine as four ranks in one process, a trace of
each, judged by `check rank*.trace`. Attention is split by heads (two KV heads, each on two ranks), feed-forward and
vocabulary by rows, experts over the ranks; the embedding and experts are recorded as terms of a sum. Each mistake is
planted in layer 1, but those of the vocabulary and of experts.

| mistake | model | first faulty op | said |
|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Place:
    """How an op's output lies on the ranks: along an axis, from where to where on each, and which part that is."""

    axis: int
    bounds: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]

    def cut(self, rank: int) -> tuple[slice, ...]:
        """The index of a rank's part."""
        return (*(slice(None),) * self.axis, slice(*self.bounds[rank]))

    def shard(self, rank: int) -> Shard:
        """What a rank's record says of it."""
        return Shard(self.parts[rank], max(self.parts) + 1, self.axis)


class Engine:
    """A graph on so many ranks. `mistake` names one of `MISTAKES`."""

    def __init__(self, model: Model, n: int, dtype: torch.dtype = torch.float32, mistake: str = "") -> None:
        self.graph, self.n, self.mistake = model.graph, n, mistake
        self.weights = model.weights(dtype)
        self.arch, self.name = model.graph.hparams.arch, model.path.name
        experts = next((op.weights[0].shape[0] for op in self.graph if op.kind == "linear_id"), 0)
        self.experts = [{e for e in range(experts) if e % n == rank} for rank in range(n)]
        if mistake == "an expert on two ranks":
            self.experts[3].add(1)
        summed = {op.name for op in self.graph if op.kind == "linear_id"}
        for op in self.graph:  # what is made of experts' outputs alone
            if any(name in summed for name in op.inputs) and op.kind != "linear_id":
                known = summed | {i for i in op.inputs if "ffn_moe_weights" in i}
                if set(op.inputs) <= known:
                    summed.add(op.name)
        self.summed = {name for name in summed if not name.endswith("ffn_moe_out")}

    def trace(self, folder: Path, tokens: Sequence[int], n_decode: int = 1) -> list[Path]:
        """Write a trace of each rank: the prompt, and so many greedy steps."""
        paths = [folder / f"rank{rank}.trace" for rank in range(self.n)]
        writers = [
            TraceWriter(path, "ranks of torch", self.arch, self.name, rank=(rank, self.n))
            for rank, path in enumerate(paths)
        ]
        past: list[dict[str, Tensor]] = [{} for _ in range(self.n)]
        fed, first = list(tokens), 0
        for writer in writers:
            writer.__enter__()
        self._record_weights(writers)
        for step in range(n_decode + 1):
            positions = range(first, first + len(fed))
            for writer in writers:
                writer.step(step, fed, positions)
            logits = self._run(step, fed, positions, past, writers)
            first, fed = first + len(fed), [int(logits[-1].argmax())]
        for writer in writers:
            writer.__exit__(None, None, None)
        return paths

    def _record_weights(self, writers: Sequence[TraceWriter]) -> None:
        for rank, writer in enumerate(writers):
            for weight in {weight.name: weight for weight in self.graph.norm_weights()}.values():
                values = self.weights.load(weight)
                if self._is("another norm weight on a rank", weight.name, "attn_norm.weight") and rank == 2:
                    values = values * 1.25
                writer.weight(weight.name, _bits(values), DTYPES[values.dtype])

    def _run(
        self, step: int, fed: Sequence[int], positions: Sequence[int], past: list[dict[str, Tensor]],
        writers: Sequence[TraceWriter],
    ) -> Tensor:  # fmt: skip
        sources = {"tokens": torch.tensor([*fed]), "positions": torch.tensor([*positions])}
        values: list[dict[str, Tensor]] = [{**sources} for _ in range(self.n)]
        for op in self.graph:
            made = [self._one(op, rank, self._inputs(op, values[rank], past[rank])) for rank in range(self.n)]
            made, held = self._joined(op, made, [self._inputs(op, values[r], past[r])[0] for r in range(self.n)])
            for rank, y in enumerate(made):
                values[rank][op.name] = y
            self._record(op, step, held or made, writers, held is not None)
            for rank in range(self.n):
                for name in self.graph.cached() & {op.name, "positions"}:
                    if name == op.name or op is next(iter(self.graph)):
                        before = past[rank].get(name, values[rank][name][:0])
                        past[rank][name] = torch.cat([before, values[rank][name]])
        return torch.stack([held[op.name] for held in values]).sum(0)  # each rank has its part of the vocabulary

    def _inputs(self, op: Op, values: dict[str, Tensor], past: dict[str, Tensor]) -> list[Tensor]:
        n = len(values["tokens"])
        total = n + int(values["positions"][0])
        whole = [past[name] if before else values[name] for name, before in op.reads]
        return [seen(view, n, total, x) if view else x for x, view in zip(whole, op.seen, strict=True)]

    def _one(self, op: Op, rank: int, inputs: list[Tensor]) -> Tensor:
        """What a rank computes before it talks to others: zeros where it holds nothing."""
        local, place = split(op.name)[1], self.place(op)
        if op.name == "token_embd":
            return self._embedding(op, rank, inputs)
        if self._is("another norm weight on a rank", op.name, "attn_norm") and rank == 2:
            return evaluate(op, inputs, self.weights) * 1.25
        if self._is("a rank's rope pairs otherwise", op.name, "attn_q_rope") and rank == 3:
            other = {"halves": "neighbours", "neighbours": "halves"}[op.attrs["rope"].pairing]
            op = op.with_attrs(rope=replace(op.attrs["rope"], pairing=other))
        y = evaluate(op, inputs, self.weights)
        if op.kind == "linear_id":
            chosen = inputs[-1]
            mine = torch.tensor([[int(e) in self.experts[rank] for e in row] for row in chosen])
            return y * mine[..., None]
        if place is None:
            return y
        cut = self._held(place, rank, local, op.name)
        out = torch.zeros_like(y)
        out[place.cut(rank)] = y[cut]
        return out

    def _held(self, place: Place, rank: int, local: str, name: str) -> tuple[slice, ...]:
        """What a rank takes for its part."""
        bounds = list(place.bounds)
        if self._is("shards in another order", name, "ffn_up" if f"{LAYER}ffn_up" in self.graph else "attn_q"):
            bounds[1], bounds[3] = bounds[3], bounds[1]
        if self._is("KV heads duplicated wrongly", name, "attn_v"):
            n = max(place.parts) + 1
            bounds = [bounds[place.parts.index(r % n)] for r in range(self.n)]
        if self.mistake == "a vocabulary shard shifted" and name == "output":
            start, stop = bounds[2]
            bounds[2] = start + 1, stop + 1
        return (*(slice(None),) * place.axis, slice(*bounds[rank]))

    def _embedding(self, op: Op, rank: int, inputs: list[Tensor]) -> Tensor:
        n_vocab = self.graph.hparams.n_vocab
        start, stop = (n_vocab * r // self.n for r in (rank, rank + 1))
        shift = 2 if self.mistake == "an embedding shard shifted" and rank == 0 else 0
        mine = (inputs[0] >= start) & (inputs[0] < stop)
        rows = evaluate(op, [(inputs[0] + shift).clamp(0, n_vocab - 1)], self.weights)
        return rows * mine[:, None]

    def _joined(self, op: Op, made: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        """What every rank holds after it has talked to others, and what it records where that is another."""
        local = split(op.name)[1]
        if self._is("a norm over the local part", op.name, "attn_norm"):
            return self._norm_of_parts(op, inputs)
        if op.name == "token_embd":
            return self._summed(made), made
        if self._is("the residual added on every rank", op.name, "attn_residual"):
            return [y + (self.n - 1) * evaluate(op, [torch.zeros_like(y), self._layer_input], self.weights)  # type: ignore[has-type]
                    for y in made], None  # fmt: skip
        if self.mistake and local == "attn_norm":
            self._layer_input = inputs[0]
        if local not in _REDUCED and local != "ffn_moe_out":
            return made, None
        if self._is("an all-reduce left out", op.name, "attn_output"):
            return made, None
        total = self._summed(made)
        if self._is("an all-reduce left out on one rank", op.name, "attn_output"):
            return [made[2] if rank == 2 else y for rank, y in enumerate(total)], None
        if self._is("an all-reduce done twice", op.name, "ffn_down", "ffn_moe_out"):
            return self._summed(total), None
        if self._is("a rank missing in an all-reduce", op.name, "attn_output"):
            return self._summed(made[:3]) + self._summed(made[:3])[:1], None
        return total, None

    def _summed(self, terms: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack([*terms]).to(torch.float32).sum(0).to(terms[0].dtype)
        return [total.clone() for _ in terms]

    def _norm_of_parts(self, op: Op, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """A norm whose every rank has the mean of squares of its own part."""
        size, gain = inputs[0].shape[-1], self.weights.load(op.weights[0])
        parts = []
        for rank, x in enumerate(inputs):
            cut = slice(size * rank // self.n, size * (rank + 1) // self.n)
            mine = x[:, cut]
            parts.append(mine * torch.rsqrt(mine.square().mean(-1, keepdim=True) + op.attrs["eps"]) * gain[cut])
        whole = torch.cat(parts, -1)
        return [whole.clone() for _ in inputs], parts

    def _record(self, op: Op, step: int, made: Sequence[Tensor], writers: Sequence[TraceWriter], cut: bool) -> None:
        for rank, (y, writer) in enumerate(zip(made, writers, strict=True)):
            place, shard = self.place(op), None
            if op.name == "token_embd" or op.name in self.summed:
                shard = Shard(rank, self.n, sum=True)
            elif cut:
                shard = Shard(rank, self.n, 1)
            elif place:
                y, shard = y[place.cut(rank)], place.shard(rank)
            writer.op(step, op.name, _bits(y), DTYPES[y.dtype], shard=shard)

    def place(self, op: Op) -> Place | None:
        """Where the op's output lies; None for copies, and sums."""
        local, h = split(op.name)[1], self.graph.hparams
        copies = self.n // h.n_head_kv  # ranks that share KV heads
        if local in _KV:
            bounds = tuple((r // copies, r // copies + 1) for r in range(self.n))
            return Place(1, bounds, tuple(r // copies for r in range(self.n)))
        if local in _HEADS:
            ends = [self._end(rank) * (h.head_dim if local == "attn_kqv" else 1) for rank in range(self.n + 1)]
            return Place(_HEADS[local], _bounds(ends), tuple(range(self.n)))
        if local in _FFN:
            size = op.shape(1)[1]
            return Place(1, _bounds([size * r // self.n for r in range(self.n + 1)]), tuple(range(self.n)))
        return None

    def _end(self, rank: int) -> int:
        """The first query head of a rank: heads of a group are shared by the ranks that hold its KV head."""
        h = self.graph.hparams
        copies, group = self.n // h.n_head_kv, h.n_head // h.n_head_kv
        return rank // copies * group + -(-group * (rank % copies) // copies)

    def _is(self, mistake: str, name: str, *local: str) -> bool:
        return self.mistake == mistake and any(name == f"{LAYER}{one}" for one in local)


def _bounds(ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(ends))


def _bits(x: Tensor):  # type: ignore[no-untyped-def]
    x = x.contiguous()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


MISTAKES = {
    "an all-reduce left out": "attn_output",
    "an all-reduce left out on one rank": "attn_output",
    "an all-reduce done twice": "ffn_down",
    "a rank missing in an all-reduce": "attn_output",
    "the residual added on every rank": "attn_residual",
    "a norm over the local part": "attn_norm",
    "shards in another order": "ffn_up",
    "KV heads duplicated wrongly": "attn_v",
    "a vocabulary shard shifted": "output",
    "an embedding shard shifted": "token_embd",
    "an expert on two ranks": "ffn_gate_exps",
    "a rank's rope pairs otherwise": "attn_q_rope",
    "another norm weight on a rank": "attn_norm",
}
TOKENS = [5, 84, 104, 101, 32, 113, 200, 310]
N = 4


def rows(models: dict[str, Path], folder: Path) -> Iterator[tuple[str, ...]]:
    """Each mistake on four ranks of each model: the first faulty op, and what is said."""
    for mistake, op in {"none": "", **MISTAKES}.items():
        for name, path in models.items():
            model = Model(path)
            if not op or any(split(known.name)[1] in (op, _OF_EXPERTS.get(op)) for known in model.graph):
                result = check_trace(Engine(model, N, mistake=mistake).trace(folder, TOKENS), model)
                first = result.first_divergence.op if result.first_divergence else result.verdict
                yield mistake, name, first, " ".join(finding.text for finding in result.findings)


def page(folder: Path) -> str:
    """The document."""
    models = {"llama": write_model(folder / "llama.gguf", SHAPE, "F32"),
              "qwen3moe": tiny_models.write("qwen3moe", folder / "moe.gguf")}  # fmt: skip
    lines = [f"| {' | '.join(row)} |" for row in rows(models, folder)]
    return "\n".join((_PAGE, *lines)) + "\n"


if __name__ == "__main__":
    sys.exit(write_page(__doc__, page))
