"""Right runs in arithmetics that nobody listed: replay may call none of their records faulty.

    python benchmarks/arithmetics.py [--seed N] [--runs N] [--only N] [--unlisted] [--processes N] [--out PAGE]

An engine of its own computes small models in float32, and rounds what it is told to: its activations, its weights, its
cache, Q and the probabilities, rope's tables, the weights of norms, what layers add. Each of them is left as it is
every other time, and else rounded in one of the ways that engines have, whatever the others are. Activations are
rounded in all steps, or every other time in those of several tokens alone, as GPUs do.
"""

import argparse
import math
import random
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import gguf
import numpy as np
import torch
from architectures import table
from detection import SHAPES, WEIGHTS, make_model
from half_precision import CAPTURES, NO_SEARCH
from msgspec import Struct
from torch import Tensor

from tracediff import Recorder
from tracediff.names import Capture
from tracediff.pipeline import check_trace

Rounding = Callable[[Tensor], Tensor]


def cast(dtype: torch.dtype) -> Rounding:
    """To a shorter type and back."""
    return lambda x: x.to(dtype).float()


def integers(
    size: int, bits: int = 8, scales: torch.dtype = torch.float32, last: float = 0.0, by_kept: bool = False
) -> Rounding:
    """Symmetric integers in groups of `size` values of a row, or of all of it (0), with a scale each, such that the
    largest becomes the `last`; quotients by the scale before it is kept in its type, or `by_kept` ones.
    """

    def rounded(x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, size or x.shape[-1]))
        top = (1 << bits - 1) - 1
        scale = (groups.abs().amax(-1, keepdim=True) / (last or top)).clamp(min=1e-30)
        kept = scale.to(scales).float()
        return ((groups / (kept if by_kept else scale)).round().clamp(-top, top) * kept).flatten(-2)

    return rounded


def microscaled(x: Tensor) -> Tensor:
    """MXINT8: integers of 32 values times a power of two (https://arxiv.org/abs/2310.10537)."""
    groups = x.unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 6)
    return ((groups / scale).round().clamp(-127, 127) * scale).flatten(-2)


ROUNDINGS: Mapping[str, Rounding] = {
    "f16": cast(torch.float16),
    "bf16": cast(torch.bfloat16),
    "e4m3": cast(torch.float8_e4m3fn),
    "e5m2": cast(torch.float8_e5m2),
    "q8_0": integers(32, scales=torch.float16),
    "int8/32": integers(32),
    "int8/64": integers(64),
    "int8/row": integers(0),
    "int4/32": integers(32, bits=4),
    "int8/16": integers(16),
    "int6/32": integers(32, bits=6),
    "int8/32 to 128": integers(32, last=128.0),
    "int8/32 by bf16": integers(32, scales=torch.bfloat16, by_kept=True),
    "int8/row clipped": integers(0, last=127 / 0.9),
    "MXINT8": microscaled,
}
# In the place of those that are listed, where it is asked for.
UNLISTED = (
    "int8/16",
    "int6/32",
    "int8/32 to 128",
    "int8/32 by bf16",
    "int8/row clipped",
    "MXINT8",
)
PARTS: Mapping[str, Sequence[str]] = {
    "activations": ("f16", "bf16", "q8_0", "int8/32", "int8/64", "int8/row"),
    "weights": ("f16", "bf16", "q8_0", "int8/32", "int8/row", "int4/32"),
    "cache": ("f16", "bf16", "q8_0", "int8/row", "e4m3", "e5m2"),
    "attention": ("f16", "bf16"),
    "tables": ("f16", "bf16"),
    "norms": ("f16", "bf16"),
    "added": ("bf16", "q8_0"),
}
VERDICTS = ("match", "undecided", "diverged")
LENGTHS, N_DECODE = (19, 90), 2  # tokens of a prompt
ALONE = "in prompts alone"


class Run(Struct):
    """What came of one run: the verdict, and the report's first finding or what is undecided."""

    family: str
    weights: str
    capture: Capture
    rounded: dict[str, str]
    n_prompt: int
    in_prompts: bool  # activations are rounded there alone
    verdict: str = ""
    why: str = ""


class Engine:
    """Llama, Qwen2 or Qwen3 in float32, which rounds by `rounded`."""

    def __init__(self, model: Path, rounded: Mapping[str, str], in_prompts: bool, record: Recorder) -> None:
        reader = gguf.GGUFReader(model)
        fields = {name: one.contents() for name, one in reader.fields.items() if not name.startswith("tokenizer")}
        arch = fields["general.architecture"]
        self._rounded, self._in_prompts, self._record = rounded, in_prompts, record
        self._n_layer, self._heads, self._groups, self._eps, self._theta, width = (
            fields[f"{arch}.{name}"]
            for name in ("block_count", "attention.head_count", "attention.head_count_kv",
                         "attention.layer_norm_rms_epsilon", "rope.freq_base", "embedding_length")
        )  # fmt: skip
        self._dim = fields.get(f"{arch}.attention.key_length", width // self._heads)
        self._by_pairs = arch == "llama"
        self._weights = {one.name: self._held(one) for one in reader.tensors}
        self._cache: list[Tensor] = [torch.zeros(2, 0, self._groups, self._dim)] * self._n_layer

    def _held(self, tensor: gguf.ReaderTensor) -> Tensor:
        """A weight as the engine holds it: matrices alone are rounded as `weights`, and norms' as `norms`."""
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = "norms" if tensor.name.endswith("norm.weight") else "weights" if values.ndim > 1 else ""
        return self._as(part, torch.from_numpy(values.copy()))

    def _as(self, part: str, values: Tensor) -> Tensor:
        return ROUNDINGS[self._rounded[part]](values) if part in self._rounded else values

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], n_prompt: int) -> None:
        """A prompt, then a token a step."""
        steps = [tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]
        for step in steps:
            self._record.step([*step])
            self._forward(torch.tensor(step))

    def _forward(self, tokens: Tensor) -> None:
        weights, begin = self._weights, self._cache[0].shape[1]
        positions = torch.arange(begin, begin + len(tokens))
        x = self._op("token_embd", weights["token_embd.weight"][tokens])
        for layer in range(self._n_layer):
            x = self._layer(layer, f"blk.{layer}.", x, positions)
        h = self._norm("output_norm", x)
        head = weights.get("output.weight", weights["token_embd.weight"])
        self._op("output", self._activations(h) @ head.T)

    def _layer(self, layer: int, at: str, x: Tensor, positions: Tensor) -> Tensor:
        h = self._norm(f"{at}attn_norm", x)
        q, k, v = (self._linear(f"{at}attn_{of}", h, self._dim) for of in "qkv")
        if f"{at}attn_q_norm.weight" in self._weights:
            q, k = self._norm(f"{at}attn_q_norm", q), self._norm(f"{at}attn_k_norm", k)
        q, k = (self._op(f"{at}attn_{of}_rope", self._rope(x, positions)) for of, x in (("q", q), ("k", k)))
        new = self._as("cache", torch.stack((k, v)))
        self._cache[layer] = torch.cat((self._cache[layer], new), 1)
        attended = self._op(f"{at}attn_kqv", self._attention(q, self._cache[layer], positions))
        x = self._op(f"{at}attn_residual", x + self._as("added", self._linear(f"{at}attn_output", attended)))
        h = self._norm(f"{at}ffn_norm", x)
        gate, up = (self._linear(f"{at}ffn_{of}", h) for of in ("gate", "up"))
        act = self._op(f"{at}ffn_act", torch.nn.functional.silu(gate) * up)
        return self._op(f"{at}ffn_residual", x + self._as("added", self._linear(f"{at}ffn_down", act)))

    def _op(self, name: str, values: Tensor) -> Tensor:
        self._record(name, values)
        return values

    def _activations(self, x: Tensor) -> Tensor:
        return x if self._in_prompts and len(x) == 1 else self._as("activations", x)

    def _linear(self, name: str, x: Tensor, width: int = 0) -> Tensor:
        y = self._activations(x) @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", 0.0)
        return self._op(name, y.unflatten(1, (-1, width)) if width else y)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self._weights[f"{name}.weight"]
        return self._op(name, y)

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        rates = self._theta ** (-torch.arange(0, self._dim, 2) / self._dim)
        if (factors := self._weights.get("rope_freqs.weight")) is not None:
            rates = rates / factors
        angles = positions[:, None, None] * rates
        cos, sin = (self._as("tables", of) for of in (angles.cos(), angles.sin()))
        a, b = (x[..., 0::2], x[..., 1::2]) if self._by_pairs else x.chunk(2, -1)
        turned = a * cos - b * sin, b * cos + a * sin
        return torch.stack(turned, -1).flatten(-2) if self._by_pairs else torch.cat(turned, -1)

    def _attention(self, q: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
        k, v = cache.repeat_interleave(self._heads // self._groups, 2)
        scores = torch.einsum("qhd,khd->hqk", self._as("attention", q), self._as("attention", k))
        hidden = torch.arange(len(k)) > positions[:, None]
        probs = (scores / math.sqrt(self._dim)).masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", self._as("attention", probs), self._as("attention", v)).flatten(1)


def _parts(is_unlisted: bool) -> Mapping[str, Sequence[str]]:
    return {**PARTS, "activations": UNLISTED} if is_unlisted else PARTS


def drawn(number: int, seed: int, is_unlisted: bool) -> Run:
    """The run of this number: one of each family, weight type and capture, and then again with other roundings."""
    rng = random.Random(f"{seed} {number}")
    family = [*SHAPES][number % len(SHAPES)]
    weights = WEIGHTS[number // len(SHAPES) % len(WEIGHTS)]
    capture = [*CAPTURES][number // len(SHAPES) // len(WEIGHTS) % len(CAPTURES)]
    rounded = {part: rng.choice(ways) for part, ways in _parts(is_unlisted).items() if rng.random() < 0.5}
    return Run(family, weights, capture, rounded, rng.choice(LENGTHS), rng.random() < 0.5)


def done(number: int, seed: int, is_unlisted: bool, folder: Path) -> Run:
    """Record it, and judge it."""
    torch.set_num_threads(1)
    run = drawn(number, seed, is_unlisted)
    model = make_model(folder, run.family, run.weights)
    numbers = random.Random(number)
    tokens = [numbers.randrange(5, 200) for _ in range(run.n_prompt + N_DECODE)]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "run.trace"
        with Recorder(path, gguf=model, capture=run.capture) as record:
            Engine(model, run.rounded, run.in_prompts, record).run(tokens, run.n_prompt)
        result = check_trace(path, model, effort=NO_SEARCH)
    run.verdict = result.verdict
    run.why = next(iter([finding.text for finding in result.findings] or result.undecided), "")
    return run


_HEAD = """# Right runs in arithmetics that nobody listed

{about} Written by

    python benchmarks/arithmetics.py --seed {seed} --runs {n}{unlisted} --out PAGE

A prompt of {lengths} random tokens and {n_decode} decode steps of {families} in {weights}, recorded with every op or
with its hidden states alone. {n} runs, of which {n_rounded} round in two parts or more. None has a mistake, so none may
diverge. *Undecided*: the report says of some record that its roundings may hide any mistake."""


def page(runs: Sequence[Run], seed: int, is_unlisted: bool) -> str:
    """The document."""
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    counts = Counter((run.capture, run.verdict) for run in runs)
    rows = [(CAPTURES[capture], *(counts[capture, verdict] for verdict in VERDICTS)) for capture in CAPTURES]
    rest = [
        (run.family, run.weights, CAPTURES[run.capture], str(run.n_prompt), _said(run), run.verdict, run.why)
        for run in runs
        if run.verdict != "match"
    ]
    head = _HEAD.format(
        about=textwrap.fill(about, 118),
        seed=seed,
        n=len(runs),
        unlisted=" --unlisted" * is_unlisted,
        lengths=" or ".join(map(str, LENGTHS)),
        n_decode=N_DECODE,
        families=", ".join(SHAPES),
        weights=", ".join(WEIGHTS),
        n_rounded=sum(len(run.rounded) > 1 for run in runs),
    )
    parts = _parts(is_unlisted).items()
    ways = table(("part", "as it is, or rounded to"), ((part, ", ".join(ways)) for part, ways in parts))
    head_of_rest = "model", "weights", "recorded", "tokens", "rounded", "verdict", "the first finding"
    listed = table(head_of_rest, rest) if rest else "None."
    counted = table(("recorded", *VERDICTS), rows)
    return "\n\n".join((head, counted, ways, f"## All that do not match\n\n{listed}")) + "\n"


def _said(run: Run) -> str:
    alone = {"activations": f" {ALONE}"} if run.in_prompts else {}
    return ", ".join(f"{part} {name}{alone.get(part, '')}" for part, name in run.rounded.items()) or "nothing"


def main() -> int:
    """Run them, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=192)
    parser.add_argument("--only", type=int, help="the run of this number")
    parser.add_argument("--unlisted", action="store_true", help="activations in integers that no list has")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    numbers = range(arguments.runs) if arguments.only is None else [arguments.only]
    with tempfile.TemporaryDirectory() as name:
        for family in SHAPES:
            for weights in WEIGHTS:
                make_model(Path(name), family, weights)
        work = partial(done, seed=arguments.seed, is_unlisted=arguments.unlisted, folder=Path(name))
        runs = []
        with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
            for number, run in zip(numbers, pool.map(work, numbers), strict=True):
                runs.append(run)
                said = f"{run.family}, {run.weights}, {CAPTURES[run.capture]}, {run.n_prompt} tokens, {_said(run)}"
                print(f"{number}: {said}: {run.verdict}", run.why, flush=True)
    if arguments.out:
        arguments.out.write_text(page(runs, arguments.seed, arguments.unlisted))
    return int(any(run.verdict == "diverged" for run in runs))


if __name__ == "__main__":
    sys.exit(main())
