"""Keys that are compressed over blocks of tokens (deepseek4): as rows of tokens they are judged like any others."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import trace_graph

from tracediff.diagnose.solve.loops.bound import bind
from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.families import load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Extent, Op
from tracediff.model.weights import Weights
from tracediff.names import local_name
from tracediff.numerics.arithmetic import EXACT
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.kinds.compressed import compress
from tracediff.pipeline import Effort, check_trace, compare_traces
from tracediff.trace.reader import Trace

Tiny = Callable[[str], Path]
# Blocks of 4 and of 128 tokens end in the prompt, and one of 4 in the steps after it.
PROMPT, AFTER = [(37 * i + 11) % 320 for i in range(130)], [5, 77, 130]
SHORT = PROMPT[:23]


@pytest.fixture(scope="session")
def theirs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deepseek4") / "llama.cpp.trace"
    passes = [(token,) for token in AFTER]
    LlamaCpp(tiny("deepseek4"), Prompt(tokens=tuple(PROMPT)), out, passes=passes).wait()
    return out


def test_llama_cpp_is_right(theirs: Path, tiny: Tiny) -> None:
    result = check_trace(theirs, tiny("deepseek4"))
    assert result.verdict == "match"
    assert result.coverage
    assert not result.coverage.unjudged


def test_torch_computes_what_llama_cpp_does(theirs: Path, tiny: Tiny) -> None:
    path, trace = tiny("deepseek4"), Trace(theirs)
    graph = load_graph(path)
    engine = TorchEngine(graph, Weights(GGUFFile(path), torch.float64))
    # Of more blocks than are chosen some tie, for scores of which all products are negative are 0: any may be taken.
    n = 4 * graph["blk.1.lid_score_masked.top_k"].axes[-1]
    logits = engine.run(0, StepInput(tuple(PROMPT[:n]), tuple(range(n))))
    recorded = torch.from_numpy(trace.values(trace.ops[0, "output"])[:n]).double()
    assert float((recorded - logits).square().sum() / recorded.square().sum()) < 1e-10


def test_without_a_model_choices_tell_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """ggml_top_k orders nothing, and takes hidden keys where there are too few others: no drift. A mask has -inf."""
    model = tiny("deepseek4")
    LlamaCpp(model, Prompt(tokens=tuple(SHORT)), theirs := tmp_path / "l.trace").wait()
    ours = trace_torch(model, tmp_path / "t.trace", TorchOptions(), SHORT)
    result = compare_traces(theirs, ours)
    assert (result.verdict, {op.status for op in result.ops}) == ("undecided", {"ok", "undecided", "unmatched"})
    assert {local_name(op.op) for op in result.ops if op.status == "undecided"} == {
        "fill", "fill#2", "lid_score_masked.top_k"
    }  # fmt: skip


def test_what_is_chosen_is_recorded_as_places_of_tokens(theirs: Path) -> None:
    trace = Trace(theirs)
    chosen = trace.values(trace.ops[0, "blk.1.lid_score_masked.top_k"])
    assert np.all(chosen % 4 == 3)
    assert {*chosen[15]} >= {3, 7, 11, 15}  # of its own block and all before


def test_a_graph_has_a_row_for_each_token(tiny: Tiny) -> None:
    graph = load_graph(tiny("deepseek4"))
    assert graph["blk.1.csa_state_compress"].attrs == {"n": 4, "overlap": True}
    assert graph["blk.2.hca_state_compress"].attrs == {"n": 128, "overlap": False}
    assert graph["blk.1.attn_scores"].axes == (6, "T", Extent(s=2))
    assert graph["blk.0.attn_probs"].attrs["window"] == 5
    assert graph["csa_mask"].attrs == {"block": 4}
    assert graph["blk.0.ffn_moe_topk"].inputs == ("tokens",)  # a table has the experts of each token
    assert all(size is not None for op in graph for size in op.axes)


def by_hand(values: np.ndarray, scores: np.ndarray, n: int, overlap: bool) -> np.ndarray:
    d = values.shape[1] // (2 if overlap else 1)
    y = np.zeros((len(values), d))
    for end in range(n - 1, len(values), n):
        for c in range(d):
            of_block = [(p, c + d * overlap) for p in range(end - n + 1, end + 1)]
            before = [(p, c) for p in range(end - 2 * n + 1, end - n + 1) if p >= 0]
            at = (before if overlap else []) + of_block
            weights = [math.exp(scores[place]) for place in at]
            y[end, c] = sum(w * values[place] for w, place in zip(weights, at, strict=True)) / sum(weights)
    return y


@pytest.mark.parametrize("overlap", [True, False])
def test_a_row_is_the_weighted_mean_of_its_block(overlap: bool, tiny: Tiny) -> None:
    random, n, length = np.random.default_rng(0), 3, 11
    values, scores = random.standard_normal((2, length, 8))
    right = torch.from_numpy(by_hand(values, scores, n, overlap))
    keys = torch.arange(length)
    given = [torch.from_numpy(values), torch.from_numpy(scores), keys[4:], keys]
    assert torch.allclose(compress(*given, n=n, overlap=overlap), right[4:], rtol=1e-12)
    op = Op("y", "compress", ("v", "s", "p", "k"), ("T", right.shape[1]), attrs={"n": n, "overlap": overlap})
    loops = bind(op, given, Weights(GGUFFile(tiny("deepseek4"))), EXACT)
    assert loops
    assert torch.allclose(torch.from_numpy(loops.output()), right[4:], rtol=1e-12)


@pytest.mark.parametrize("kind", ["soft_max", "lightning_indexer"])
def test_loops_of_attention_to_compressed_keys_compute_what_the_kinds_do(kind: str, tiny: Tiny) -> None:
    weights, graph = Weights(GGUFFile(tiny("deepseek4"))), load_graph(tiny("deepseek4"))
    op = next(op for op in graph if op.kind == kind)
    random = torch.Generator().manual_seed(0)
    axes = [graph.axes_read(op, i) for i in range(len(op.inputs))]
    shapes = [tuple({"T": 5, "S": 9}.get(str(a), a if isinstance(a, int) else 18) for a in of) for of in axes]
    given = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    loops = bind(op, given, weights, EXACT)
    assert loops
    made = torch.from_numpy(loops.output())
    assert torch.allclose(made, evaluate(op, given, weights).reshape(made.shape), rtol=1e-9)


def without_relu(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    products = q @ k.reshape(len(k), -1).T
    return (products * weights.reshape(*q.shape[:2], 1)).sum(-2) + mask.reshape(len(q), -1)


def without_sinks(x: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor, *, scale: float) -> torch.Tensor:
    return torch.softmax(x * scale + mask, -1)


def from_zeros(
    values: torch.Tensor, scores: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, *, n: int, overlap: bool
) -> torch.Tensor:
    """What lies before the first block counts as zeros."""
    if not overlap:
        return compress(values, scores, positions, keys, n=n, overlap=overlap)
    rows = [torch.cat((torch.zeros_like(x[:n]), x)) for x in (values, scores)]
    return compress(*rows, positions + n, torch.cat((keys[:1], keys + n)), n=n, overlap=overlap)


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize(
    ("function", "of", "said"),
    [
        (without_relu, "lid_score_masked", "computed with products, where products if products > 0 else 0 belongs"),
        (without_sinks, "attn_probs", "over the keys + exp(attn_sinks.weight - largest) belongs"),
        (from_zeros, "csa_state_compress", "if oldest + j >= 0 else 0 belongs"),
    ],
)
def test_a_mistake_that_no_list_has_is_put_into_words(
    function: Callable[..., torch.Tensor], of: str, said: str, tiny: Tiny, tmp_path: Path
) -> None:
    path = tiny("deepseek4")
    graph = load_graph(path)
    ops = [op for op in graph if local_name(op.name) == of and op.kind != "softmax"]
    wrong = graph.changed(*(replace(op, function=function) for op in ops))
    trace = trace_graph(wrong, GGUFFile(path), tmp_path / "t.trace", SHORT, *([token] for token in AFTER))
    result = check_trace(trace, path, effort=Effort(seconds=120))
    assert {op.op for op in result.faulty} == {op.name for op in ops}
    assert any(said in finding.text for finding in result.findings), [finding.text for finding in result.findings]


def test_what_is_not_turned_back_is_named(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("deepseek4")
    graph = load_graph(path)
    ops = [op for op in graph if local_name(op.name) == "attn_derope"]
    wrong = graph.changed(*(op.with_attrs(rope=replace(op.attrs["rope"], back=False)) for op in ops))
    trace = trace_graph(wrong, GGUFFile(path), tmp_path / "t.trace", SHORT)
    result = check_trace(trace, path)
    assert [finding.text for finding in result.findings if "attn_derope" in finding.text] == [
        "attn_derope in all 5 layers: rope turns the wrong way: the sine's sign is flipped."
    ]


def test_hidden_states_alone_match(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("deepseek4")
    after = ([token] for token in AFTER)
    trace = trace_graph(load_graph(path), GGUFFile(path), tmp_path / "t.trace", PROMPT[:11], *after, capture="layers")
    assert check_trace(trace, path).verdict == "match"
