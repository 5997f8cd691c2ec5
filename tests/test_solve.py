"""The solver: an op's loops, every single edit of them, and mistakes that nobody listed."""

import ast
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Models, some_of, trace_graph

from tracediff.diagnose.budget import Budget, OutOfTime, Progress
from tracediff.diagnose.carrying import carried, transferred
from tracediff.diagnose.explain import Explainer
from tracediff.diagnose.hypothesis import SOLVED, Assumed, Hypothesis
from tracediff.diagnose.kin import Faulty
from tracediff.diagnose.low_rank import followed
from tracediff.diagnose.rearranged import SomeHeads
from tracediff.diagnose.search import Search
from tracediff.diagnose.solve.by_value import rotations
from tracediff.diagnose.solve.by_value.functions import Mapped, _cap
from tracediff.diagnose.solve.by_value.maps import Map
from tracediff.diagnose.solve.by_value.outputs import MovedOutput, RowsApart
from tracediff.diagnose.solve.by_value.readings import Moved, Reading, RowRun, words_of_rows
from tracediff.diagnose.solve.by_value.regions import Along, Region, around, widest
from tracediff.diagnose.solve.edit import AND, Edit, OtherTensor, Read, relayered
from tracediff.diagnose.solve.edits.formulas import edits
from tracediff.diagnose.solve.grammar import edited
from tracediff.diagnose.solve.loops.arrays import CannotRunError, Flat
from tracediff.diagnose.solve.loops.bound import bind
from tracediff.diagnose.solve.loops.interpret import Run
from tracediff.diagnose.solve.loops.kernels import loops_of
from tracediff.diagnose.solve.loops.program import carried_over, parse
from tracediff.diagnose.solve.segment import Segment
from tracediff.diagnose.solve.segments import SegmentSearch, _edited, told
from tracediff.diagnose.solve.solver import explanations, problem_of
from tracediff.diagnose.solve.words.places import taken
from tracediff.diagnose.solve.words.speaker import Speaker
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.findings.mistakes import findings
from tracediff.judge import Policy, judge
from tracediff.model.families import build_graph, load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op, Weight, sizes
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.names import Capture, kind_of, layer_of
from tracediff.numerics.arithmetic import EXACT
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import softmax, weighted_values
from tracediff.numerics.kinds.linear import linear
from tracediff.numerics.kinds.norm import rms_norm
from tracediff.numerics.kinds.recurrent import delta_step, gated_delta_net, outer, times
from tracediff.numerics.kinds.rope import Rope, rope_angles
from tracediff.numerics.kinds.rope import rope as turned
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import check_trace
from tracediff.replay.judging import judge_all
from tracediff.replay.look import Known
from tracediff.replay.recompute import CircularError
from tracediff.replay.replay import Replay
from tracediff.result import Local, OpResult
from tracediff.trace.format import OpRecord, Step
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

TINY = Shape("qwen2", n_layer=1, n_embd=8, n_head=4, n_head_kv=2, n_ff=12, n_vocab=300)
BROUGHT = {"past": Flat(np.array([2, 2, 2])), "starts": Flat(np.array([0, 0, 2, 2, 2]))}
PROMPT, DECODED = (256, 72, 101, 108, 3), 17


def some_inputs(op: Op, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs of an op of a step of three tokens after two."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding": [(3,)], "rms_norm": [op.shape(3)], "linear": [(3, op.weights[0].shape[-1] if op.weights else 0)],
        "rope": [op.shape(3), (3,)], "scores": [(3, 4, 2), (5, 2, 2)], "softmax": [op.shape(3, 2), (3,), (5,)],
        "weighted_values": [(4, 3, 5), (5, 2, 2)], "add": [op.shape(3)] * 2, "swiglu": [op.shape(3)] * 2,
    }[op.kind]  # fmt: skip
    integers = {"embedding": [torch.tensor([5, 0, 7])], "rope": [None, torch.tensor([2, 3, 4])]}
    integers["softmax"] = [None, torch.tensor([2, 3, 4]), torch.arange(5)]
    given = integers.get(op.kind, [None] * len(shapes))
    return [
        torch.randn(shape, generator=random, dtype=torch.float64) if known is None else known
        for shape, known in zip(shapes, given, strict=True)
    ]


def test_loops_of_a_recurrence_go_on_with_its_state(models: Models) -> None:
    weights = Weights(GGUFFile(models(TINY)))
    op = Op("y", "gated_linear_attn", ("k", "v", "q", "gate", "state"), ("T",), attrs={"scale": 0.25})
    random = torch.Generator().manual_seed(0)
    given = [torch.rand(shape, generator=random, dtype=torch.float64) for shape in [(5, 2, 3)] * 4 + [(18,)]]
    loops = bind(op, given, weights, EXACT)
    assert loops
    assert torch.allclose(torch.from_numpy(loops.output()), evaluate(op, given, weights), rtol=1e-12)


def one_of_each(graph: Graph) -> list[Op]:
    return list({(op.kind, *(len(weight.shape) for weight in op.weights)): op for op in graph}.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loops_compute_what_the_kinds_do(models: Models, family: str) -> None:
    path = models(Shape(family, n_layer=1, n_embd=8, n_head=4, n_head_kv=2, n_ff=12, n_vocab=300, head_dim=2))
    weights, graph = Weights(GGUFFile(path)), load_graph(path)
    for op in one_of_each(graph):
        inputs = some_inputs(op)
        loops = bind(op, inputs, weights, EXACT, BROUGHT)
        assert loops, op.name
        made = torch.from_numpy(loops.output())
        assert torch.allclose(made, evaluate(op, inputs, weights), rtol=1e-12, atol=1e-14), op.name


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("gpt2", {"layer_norm", "gelu"}),
        ("gemma2", {"geglu", "scale", "tanh"}),
        pytest.param("lfm2", {"swiglu", "add"}, marks=pytest.mark.slow),
        pytest.param("minimax-m2", {"sigmoid"}, marks=pytest.mark.slow),
        ("llama4", {"rms_norm"}),  # of queries and keys without a weight
        ("gpt-oss", {"rope", "linear_id"}),  # YaRN; with a bias of each expert
        pytest.param("mamba", {"ssm_conv", "ssm_scan"}, marks=pytest.mark.slow),
        ("deepseek2", {"mul_mat"}),  # of each head
        ("mamba2", {"ssm_scan", "rms_norm"}),  # one decay for all of a head; a weight of each group's own
        ("qwen35", {"gated_delta_net"}),
        ("kimi-linear", {"gated_delta_net"}),  # with a gate of each channel
        pytest.param("rwkv6", {"rwkv_wkv6"}, marks=pytest.mark.slow),
        ("rwkv7", {"rwkv_wkv7", "l2_norm"}),
    ],
)
def test_loops_of_lifted_ops_compute_what_the_kinds_do(tiny: Callable[[str], Path], arch: str, kinds: set[str]) -> None:
    path = tiny(arch)
    weights, graph = Weights(GGUFFile(path)), load_graph(path)
    random = torch.Generator().manual_seed(0)
    checked = set()
    for op in one_of_each(graph):
        if op.kind in kinds:
            axes = [graph.axes_read(op, i) if x in graph else ("T",) for i, x in enumerate(op.inputs)]
            shapes = [sizes(of, 3, 2) for of in axes]
            given = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
            if kinds >= {"linear_id"}:  # experts, or positions
                given[1] = torch.randint(2, shapes[1], generator=random)
            loops = bind(op, given, weights, EXACT, BROUGHT)
            assert loops, op.name
            made = torch.from_numpy(loops.output())
            assert torch.allclose(made, evaluate(op, given, weights), rtol=1e-9, atol=1e-14), op.name
            checked.add(op.kind)
    assert checked == kinds


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_loops_of_yarn_compute_what_rope_does(pairing: str, models: Models) -> None:
    path = models(replace(TINY, n_embd=80))
    graph, weights = load_graph(path), Weights(GGUFFile(path))
    yarn = Rope(pairing, 16, 1e4, freq_scale=0.25, ext_factor=1.0, magnitude=1.14, n_ctx_orig=64)  # pairs 0 to 7
    op = graph["blk.0.attn_q_rope"].with_attrs(rope=yarn)
    random = torch.Generator().manual_seed(0)
    given = [torch.randn((5, 4, 20), generator=random, dtype=torch.float64), torch.arange(3, 8)]
    loops = bind(op, given, weights, EXACT, BROUGHT)
    assert loops
    assert "low" in loops.numbers
    made = torch.from_numpy(loops.output())
    assert torch.allclose(made, evaluate(op, given, weights), rtol=1e-12, atol=1e-14)


def test_of_a_norm_without_a_weight_a_mistake_is_found(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    wrong = rewritten("blk.1.attn_q_norm", "for i in range(n))", "for i in range(1, n))")
    faulty = explained(tiny("llama4"), tmp_path, wrong)
    assert {op.op: op.cause and op.cause.text for op in faulty} == {
        "blk.1.attn_q_norm": "the sum of squares takes only channels 1 to 15: the first is left out"
    }


def test_a_constant_of_an_activation_is_found(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    faulty = explained(tiny("gpt2"), tmp_path, rewritten("blk.1.ffn_act", "0.044715", "0.0447"))
    assert {op.op: op.cause and op.cause.text for op in faulty} == {
        "blk.1.ffn_act": "the output is computed with 0.0447 * ffn_up, where 0.044715 * ffn_up belongs"
    }


class Beyond:
    """A flat array that gives 0 beyond its ends and keeps no store there, as buffers are taken to be."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getitem__(self, at: int) -> float:
        if int(at) != at:
            raise CannotRunError("an index is no integer")
        return self.values[int(at)] if 0 <= at < len(self.values) else 0

    def __setitem__(self, at: int, value: float) -> None:
        if 0 <= at < len(self.values):
            self.values[int(at)] = value


def by_python(source: str, numbers: dict[str, float], arrays: dict[str, np.ndarray], n: int) -> np.ndarray:
    """The loops run by Python itself, one iteration after the other."""

    def largest(of: Iterator[float]) -> float:
        return float(np.fmax.reduce([-math.inf, *of]))

    def smallest(of: Iterator[float]) -> float:
        return float(np.fmin.reduce([math.inf, *of]))

    def nth(n: int) -> Callable[[Iterator[float]], float]:
        return lambda of: ([*of] or [0.0])[n]

    tree = ast.parse(source)
    around = (node for node in ast.walk(tree) if isinstance(node, ast.For) and carried_over(node))
    loops = {node.target.id for node in around if isinstance(node.target, ast.Name)}
    sums: dict[tuple[float, ...], float] = {}

    def carried(each: float, *_: int) -> float:
        own = tuple(names[v] for v in sorted(loops - {*carried_over(tree)}) if v in names)
        sums[own] = sums.get(own, 0.0) + each
        return sums[own]

    names: dict[str, Any] = {
        "carried": carried,
        **{name: np.int64(x) if isinstance(x, int) else np.float64(x) for name, x in numbers.items()},
        **{name: Beyond(values) for name, values in arrays.items()},
        "y": Beyond(np.zeros(n)), "cache": Beyond(np.zeros(10_000)),
        "before": Beyond(np.zeros(0)), "inf": np.float64(math.inf), "max": largest,
        "min": smallest, "first": nth(0), "last": nth(-1), "sqrt": np.sqrt, "exp": np.exp, "cos": np.cos,
        "sin": np.sin, "log": np.log, "tanh": np.tanh, "abs": np.abs,
    }  # fmt: skip
    with np.errstate(all="ignore"):
        exec(source, names)
    return names["y"].values


def test_edited_loops_run_as_python_runs_them(models: Models) -> None:
    """Of each kind a sample of the edits: all iterations at once give what one after the other do."""
    path = models(TINY)
    weights, graph = Weights(GGUFFile(path)), load_graph(path)
    ran = 0
    for op in one_of_each(graph):
        inputs = some_inputs(op)
        bound = bind(op, inputs, weights, EXACT, BROUGHT)
        assert bound
        arrays = {name: np.asarray(array.take(np.arange(array.size))) for name, array in bound.arrays.items()}
        n = int(np.prod(bound.own.shape))
        found = edits(bound.source)
        goes_on = [edit for edit in found if "carried(" in edit.source]
        for edit in (*random.Random(1).sample(found, min(60, len(found))), *goes_on):
            try:
                mine = bound.with_(edit.source, {"before": Flat(np.zeros(0))}, {}).output().ravel()
            except CannotRunError:
                continue
            try:
                theirs = by_python(edit.source, dict(bound.numbers), {k: v.copy() for k, v in arrays.items()}, n)
            except (CannotRunError, TypeError, ZeroDivisionError, NameError):
                continue
            assert np.allclose(mine, theirs, rtol=1e-9, atol=1e-12, equal_nan=True), f"{op.kind}: {edit.source}"
            ran += 1
    assert ran > 290


@pytest.mark.slow
def test_edits_of_the_same_words_come_to_the_same(models: Models) -> None:
    """So the words tell which edit it was: what they say is what the loops do."""
    path = models(TINY)
    weights = Weights(GGUFFile(path))
    for op in one_of_each(load_graph(path)):
        right = bind(op, some_inputs(op), weights, EXACT, BROUGHT)
        assert right
        speaker, said = Speaker(op, right), dict[str, np.ndarray]()
        for edit in edits(right.source):
            edited = right.with_(edit.source, {"before": Flat(np.zeros(0))}, {})
            try:
                made = edited.output()
            except CannotRunError:
                continue
            words = speaker.renamed(dict(edit.renamed), edited) if edit.renamed else speaker.of(edited)
            if not np.allclose(made, right.output(), rtol=1e-9, atol=1e-12, equal_nan=True):
                before = said.setdefault(words, made)
                assert np.allclose(made, before, rtol=1e-9, atol=1e-12, equal_nan=True), f"{op.name}: {words}"


def test_regions_of_what_is_wrong() -> None:
    """Nothing may be: the whole of an op can be off though no value of it is beyond its own bound."""
    wrong = np.zeros((4, 6), bool)
    assert around(wrong) == []
    wrong[1::2, 2:] = True
    assert [region.words(("token", "channel")) for region in around(wrong)] == [
        "every 2nd token from 1 on, channels from 2 on"
    ]
    assert Along(0, 2, 5).words("query") == "queries 2 to 4"
    assert taken("head", range(12), range(0, 12, 3), False) == ("only every 3rd head", ", from 0 to 9", True)


def test_maps_of_tokens_hold_in_steps_of_one_token() -> None:
    """Token 6 is not there: the only one keeps its values."""
    for one in (Map("all", (6,)), Map("listed", (3, 7, 7, 3)), Map("rotated", (2,))):
        assert one.of(1).tolist() == [0]
    assert Map("all", (6,)).of(8).tolist() == [6] * 8


def test_a_sum_of_products_is_not_spelled_out() -> None:
    """128 tokens by 5,000 channels by 5,000 would be 25 GB."""
    source = (
        "for t in range(T):\n    for o in range(n):\n        y[t * n + o] = sum(x[t * n + i] * w[i] for i in range(n))"
    )
    arrays = {"x": Flat(np.ones(128 * 5000)), "w": Flat(np.ones(5000))}
    stores = Run(parse(source), {"T": 128, "n": 5000}, arrays, 128 * 5000).stores()
    assert np.all(stores[0].values == 5000)


def test_what_no_memory_holds_does_not_run() -> None:
    """Of NaN no matmul is asked, and all products at once would be 1 GB."""
    total = "sum(x[t * n + i] * w[o * n + i] for i in range(n))"
    source = f"for t in range(n):\n    for o in range(n):\n        y[t * n + o] = {total}"
    arrays = {"x": Flat(np.full(512 * 512, math.nan)), "w": Flat(np.ones(512 * 512))}
    with pytest.raises(CannotRunError, match="too large"):
        Run(parse(source), {"n": 512}, arrays, 512 * 512).stores()


def test_a_name_that_is_assigned_once_more_is_read_where_it_then_says() -> None:
    """And a number beyond what an array holds ends no search."""
    arrays = {"x": Flat(np.arange(0.0, 60.0, 10.0))}
    source = "for t in range(4):\n    a = t\n    a = a + 1\n    y[t] = x[a]\n"
    (stored,) = Run(parse(source), {}, arrays, 4).stores()
    assert stored.values.tolist() == [10.0, 20.0, 30.0, 40.0]
    for beyond in (1 << 64, 1 << 70):
        with pytest.raises(CannotRunError):
            Run(parse(source.replace("a + 1", f"a % {beyond}")), {}, arrays, 4).stores()


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_rows_of_a_part_of_a_matrix(models: Models, keep_bytes: int) -> None:
    """Of fused weights an op has rows from some on; kept in memory or not, they are these."""
    weights = Weights(GGUFFile(models(TINY)), keep_bytes=keep_bytes)
    whole = weights.load(Weight("blk.0.ffn_up.weight", (12, 8)))
    part = Weight("blk.0.ffn_up.weight", (6, 8), first=4)
    for _ in range(2):
        assert torch.equal(weights.rows(part, 1, 5), whole[5:9])
        assert torch.equal(weights.gather(part, torch.tensor([5, 0])), whole[[9, 4]])
        assert torch.equal(torch.cat([*weights.slices(part)]), whole[4:10])


def test_a_cap_of_the_least_numbers() -> None:
    """The product of two of them is 0."""
    right = np.array([3e-200, 1e-200])
    assert _cap(right, 2e-200 * np.tanh(right / 2e-200)) == pytest.approx(2e-200, rel=1e-4)


def test_scores_of_no_name_are_not_scaled(models: Models) -> None:
    """What is no softmax has no scaled scores, whatever a broken trace calls its records."""
    graph = load_graph(models(TINY))
    assert graph.with_scores([""]) == graph


# ---- found again


def traced(
    path: Path,
    folder: Path,
    *changed: Callable[[Graph], Op],
    capture: Capture = "all",
    n_decode: int = 1,
    prompt: tuple[int, ...] = PROMPT,
) -> Replay:
    """The trace of the torch engine that computes some ops in another way, in a prompt and decoded tokens."""
    file = GGUFFile(path)
    graph = build_graph(file)
    wrong, decoded = graph.changed(*(change(graph) for change in changed)), ((DECODED + i,) for i in range(n_decode))
    trace = trace_graph(wrong, file, folder / "t.trace", prompt, *decoded, capture=capture)
    return Replay(Trace(trace), graph, Weights(file))


def layer_of_states(replay: Replay, step: int = 0) -> tuple[Segment, OpRecord, Local]:
    """The first layer of a trace of hidden states: what lies in it, the record at its end and how that was judged."""
    record = replay.trace.ops[step, "blk.0.ffn_residual"]
    local = replay.judge(record)
    return Segment(replay, record, local.segment, scheme_named("exact")), record, local


def explained(
    path: Path, folder: Path, *changed: Callable[[Graph], Op], capture: Capture = "all", n_decode: int = 1
) -> list[OpResult]:
    """The faulty ops of that trace."""
    replay = traced(path, folder, *changed, capture=capture, n_decode=n_decode)
    return [op for op in Explainer(replay).explain(judged(replay)) if op.status == "faulty"]


def test_a_variance_of_another_row_is_found(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """As where a norm computes that of its first row alone; weights and biases are its own."""

    def normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, eps: float) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred[:1].square().mean(-1, keepdim=True) + eps) * weight + bias

    model = Model(tiny("gpt2"))
    wrong = [replace(op, function=normed) for op in model.graph if op.kind == "layer_norm"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", PROMPT, (DECODED,))
    faulty = check_trace(path, model.path).faulty
    assert {op.op for op in faulty} == {op.name for op in wrong}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {
        "of the variances, every token has that of token 0"
    }


def kept_beta(s: torch.Tensor, forget: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A delta rule without its parentheses: v - found * beta."""
    q, k, v, beta = others
    s = s * forget
    s = s + outer(v - times(s, k) * beta, k)
    return s, times(s, q)


def read_first(s: torch.Tensor, forget: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A delta rule that reads its state before anything is done to it."""
    return delta_step(s, forget, *others)[0], times(s, others[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            kept_beta,
            "gated_delta_net: the change of the state is computed with channels 128 to 255 of conv_output_silu - found"
            " * beta_sigmoid, where (channels 128 to 255 of conv_output_silu - found) * beta_sigmoid belongs",
        ),
        (read_first, "gated_delta_net: the output is computed before the state"),
    ],
)
def test_edits_of_a_recurrence_are_found(
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]], said: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Model(tiny("qwen35"))
    function = partial(gated_delta_net, step=step)
    wrong = [replace(op, function=function) for op in model.graph if op.kind == "gated_delta_net"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", PROMPT, (DECODED,), (3,))
    faulty = check_trace(path, model.path).faulty
    assert {op.op for op in faulty} == {op.name for op in wrong}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {said}


def judged(replay: Replay) -> list[OpResult]:
    """What replay says of each record."""
    found = judge_all([replay])
    ops = [OpResult(r.op, r.step, layer_of(r.op), kind_of(r.op), "ok", local=local) for _, r, local in found]
    return judge(ops, Policy())


def rewritten(name: str, old: str, new: str) -> Callable[[Graph], Op]:
    """An op with other loops."""

    def change(graph: Graph) -> Op:
        op = graph[name]
        loops = loops_of(op, [graph[x].shape(5) for x in op.inputs if x in graph])
        assert loops
        assert old in loops.source
        return Edit("", loops.source.replace(old, new)).op(op, loops)

    return change


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (
            "blk.0.attn_q_rope",
            "x[here + second] * sin",
            "x[here + second] * cos",
            "the first of each pair is computed with cos(angle), where sin(angle) belongs",
        ),
        (
            "blk.0.attn_k_rope",
            "sin(angle)",
            "cos(angle)",
            "the first of each pair is computed with cos(angle), where sin(angle) belongs; the second of each pair is",
        ),
        ("blk.1.attn_scores", "h // (H // G)", "h % G", "query head h reads key/value head h % 2; it is h // 4"),
        (
            "blk.1.attn_norm",
            "x[t * n + i] * scale * w[i]",
            "x[t * n + i] - scale * w[i]",
            "the output is computed with ffn_residual of the layer before - scale * attn_norm.weight, where",
        ),
        (
            "blk.0.attn_probs",
            "if s < visible else -inf",
            "if s != visible else -inf",
            "the mask: query t sees those with s != visible, where those with s < visible belong",
        ),
        (
            "blk.0.ffn_norm",
            "squares / n",
            "squares / T",
            "squares / T, where squares / 256 belongs (T: the number of tokens)",  # 5, and in step 1 one
        ),
        (
            "blk.1.ffn_gate",
            "for i in range(n_in)",
            "for i in range(n_in - 1)",
            "the sum takes only input channels 0 to 254: the last is left out",
        ),
        (
            "blk.0.ffn_act",
            "(1 + exp",
            "(2 + exp",
            "silu is computed with 2 + exp(-ffn_gate), where 1 + exp(-ffn_gate) belongs",
        ),
        (
            "blk.1.ffn_gate",
            "for i in range(n_in)",
            "for i in range(n_in - 7)",
            "the sum takes only input channels 0 to 248: the last 7 are left out",
        ),
        (
            "blk.0.attn_probs",
            "total = sum(y[there + s] for s in range(n))",
            "total = sum(y[there + s] for s in range(n - 2))",
            "the sum takes all keys but the last 2",
        ),
        (
            "blk.0.ffn_act",
            "(1 + exp",
            "(1.25 + exp",
            "silu is computed with 1.25 + exp(-ffn_gate), where 1 + exp(-ffn_gate) belongs",
        ),
        (
            "blk.1.attn_q",
            "o * n_in + i",
            "o + i",
            "from one channel to the next attn_q.weight is read 1 value further on, where 256 belong",
        ),
        (
            "blk.1.attn_q",
            "w[o * n_in + i]",
            "w[o * n_in + i // 16 * 16 + i % 8]",
            "as the sum reads the weight, of every 16 input channels the last 8 have the values of those before",
        ),
        (
            "blk.0.ffn_down",
            "x[t * n_in + i]",
            "x[t * n_in + i + (7 - i % 8) // 6 * 2]",
            "as the sum reads ffn_act, of every 8 input channels the first 2 have the values of those after",
        ),
        (
            "blk.0.ffn_norm",
            "sum(x[t * n + i] * x[t * n + i] for i in range(n))",
            "carried(sum(x[t * n + i] * x[t * n + i] for i in range(n)), t)",
            "the sum of squares is not set to 0 again for each row: it goes on from the one before",
        ),
        (
            "blk.0.ffn_gate",
            "sum(x[t * n_in + i] * w[o * n_in + i] for i in range(n_in))",
            "carried(sum(x[t * n_in + i] * w[o * n_in + i] for i in range(n_in)), t)",
            "the sum is not set to 0 again for each token: it goes on from the one before",
        ),
        (
            "blk.1.attn_kqv",
            "sum(\n                p[(h * T + t) * S + s] * cache[(s * G + h // (H // G)) * D + d] for s in range(S)"
            "\n            )",
            "carried(sum(p[(h * T + t) * S + s] * cache[(s * G + h // (H // G)) * D + d] for s in range(S)), h)",
            "the sum is not set to 0 again for each head: it goes on from the one before",
        ),
        pytest.param(
            "blk.0.attn_probs",
            "y[there + s] = y[there + s] / total",
            "pass",
            "the output / total is not computed: the output stays as it is before that",
            marks=pytest.mark.slow,
        ),
        (
            "blk.1.attn_q_rope",
            "y[there + first] = x[here + first] * cos(angle) - x[here + second] * sin(angle)\n"
            "            y[there + second] = x[here + first] * sin(angle) + x[here + second] * cos(angle)",
            "y[there + first] = x[here + first] * sin(angle) - x[here + second] * cos(angle)\n"
            "            y[there + second] = x[here + first] * cos(angle) + x[here + second] * sin(angle)",
            "cos and sin are exchanged",
        ),
    ],
)
def test_an_edit_that_nobody_listed_is_found(
    models: Models, tmp_path: Path, name: str, old: str, new: str, said: str
) -> None:
    faulty = explained(models("k-quants"), tmp_path, rewritten(name, old, new))
    assert {op.op for op in faulty} == {name}
    for op in faulty:
        assert op.cause, op.shape
        assert said in op.cause.text
        assert op.cause.nmse <= op.cause.floor < 1e-9


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            "blk.1.ffn_gate",
            "reads attn_norm where ffn_norm belongs; and the sum takes only input channels 0 to 254: the last is left "
            "out",
            marks=pytest.mark.slow,
        ),
        (
            "blk.1.attn_norm",
            "the scale is computed with 2 / sqrt(squares / 256 + eps), where 1 / sqrt(squares / 256 + eps) belongs; "
            "and uses ffn_norm.weight where attn_norm.weight belongs",
        ),
    ],
)
def test_two_edits_of_one_op_are_found(models: Models, tmp_path: Path, name: str, said: str) -> None:
    """And planted by the words that the report has of them."""
    model = models("k-quants")
    file = GGUFFile(model)
    op = edited(build_graph(file)[name], build_graph(file), Weights(file), said)
    assert op
    faulty = explained(model, tmp_path, lambda _: op)
    assert {op.op for op in faulty} == {name}
    for one in faulty:
        assert one.cause, one.shape
        assert {*one.cause.text.split(AND)} == {*said.split(AND)}
        assert one.cause.nmse <= one.cause.floor < 1e-9


def with_matrix(other: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A matmul of another matrix."""
    return lambda x, weight, bias=None: linear(x, other(weight.clone()), bias)


def scaled(weight: torch.Tensor, **columns: float) -> torch.Tensor:
    for column, by in columns.items():
        weight[:, int(column[1:])] *= by
    return weight


def adapted(weight: torch.Tensor) -> torch.Tensor:
    n_out, n_in = weight.shape
    return weight + 0.01 * torch.linspace(-1, 1, n_out).to(weight)[:, None] * torch.arange(n_in).to(weight).cos()


def stale(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    v = v.clone()
    v[3] = v[3].flip(-1) + 0.25
    return weighted_values(p, v)


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("attn_q", with_matrix(lambda w: scaled(w, c7=2)), "attn_norm's channel 7: it counts 2 times"),
        pytest.param(
            "ffn_up", with_matrix(lambda w: w.index_fill(1, torch.tensor([90]), 0.25)),
            "ffn_norm's channel 90: its column of ffn_up.weight is another", marks=pytest.mark.slow,
        ),
        (
            "attn_v", with_matrix(adapted),
            "as a matrix the error has rank 1: an adapter (LoRA) of that rank, or an offset of part of each row of "
            "weights, would leave such a one",
        ),
        pytest.param(
            "attn_kqv", stale, "attn_v of position 3: as if what is cached there was another", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_what_an_error_of_low_rank_follows_is_said(
    models: Models, tmp_path: Path, name: str, function: Callable[..., torch.Tensor], said: str
) -> None:
    replay = traced(
        models("k-quants"),
        tmp_path,
        lambda graph: replace(graph[f"blk.1.{name}"], function=function),
        prompt=tuple(range(3, 20)),
    )
    in_time = Budget(30)  # for one edit, not for two at once
    faulty = [op for op in Explainer(replay).explain(judged(replay), budget=in_time) if op.status == "faulty"]
    assert {op.op for op in faulty} == {f"blk.1.{name}"}
    assert not faulty[0].cause
    assert said in str(faulty[0].shape)


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        ("ffn_down", (7,), "as it reads ffn_act, channel 7 is 0"),
        ("attn_v", (7, 90), "as it reads attn_norm, channel 7 is 0, channel 90 is 0"),
    ],
)
def test_channels_that_a_matmul_with_fewer_outputs_leaves_out_are_told(
    models: Models, tmp_path: Path, name: str, lost: tuple[int, ...], said: str
) -> None:
    """As of a sum in parts that begins one too late: more channels than outputs are not solved for, few are."""
    columns = {f"c{at}": 0.0 for at in lost}
    function = with_matrix(lambda w: scaled(w, **columns))
    replay = traced(
        models("k-quants"),
        tmp_path,
        lambda graph: replace(graph[f"blk.1.{name}"], function=function),
        prompt=tuple(range(3, 20)),
    )
    faulty = [op for op in Explainer(replay).explain(judged(replay)) if op.status == "faulty"]
    assert {(op.op, op.cause.text if op.cause else "") for op in faulty} == {(f"blk.1.{name}", said)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({3}, "all that expert 3 makes is wrong, and nothing else"),
     ({3, 4}, "all that experts 3 to 4 make is wrong, and nothing else"), (set(), ""), ({0, 1, 2, 3, 4}, "")],
)  # fmt: skip
def test_what_some_experts_alone_make_wrong_is_said(wrong: set[int], said: str, models: Models) -> None:
    chosen = torch.tensor([[0, 3], [4, 1], [3, 2], [1, 0]])
    exact = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = torch.tensor([[[1.5 if int(e) in wrong else 1.0] for e in row] for row in chosen])
    known = Known(exact * factor, exact, torch.full_like(exact, 1e-6), (exact, chosen), EXACT)
    weights = Weights(GGUFFile(models("qwen2")), torch.float32)
    assert followed(Op("blk.0.ffn_up_exps", "linear_id", ("x", "ids"), ("T", 2, 5)), known, weights) == said


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([0, 0, 1, 1, 1, 0], "query heads 2, 5 read key/value heads 1, 0 where 0, 1 belong"),
        ([1, 0, 0, 1, 1, 1], "query head 0 reads key/value head 1 where 0 belongs"),
    ],
)
@pytest.mark.parametrize("name", ["attn_scores", "attn_kqv"])
def test_query_heads_that_read_other_heads_are_told(
    name: str, heads: list[int], said: str, models: Models, tmp_path: Path
) -> None:
    def change(graph: Graph) -> Op:
        op = graph[f"blk.1.{name}"]
        of = KINDS[op.kind].function
        return replace(op, function=lambda x, cached: of(x, cached[:, heads]))

    faulty = explained(models("normed"), tmp_path, change)
    assert {(op.op, op.cause and op.cause.text) for op in faulty} == {(f"blk.1.{name}", said)}


def with_squares_of(name: str, other: str, picked: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Graph], Op]:
    """A norm that divides by the roots of other means of squares."""

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, *, eps: float) -> torch.Tensor:
        return x / torch.sqrt(picked(y.square()) + eps) * w

    return lambda graph: replace(graph[name].also_reading((other, False)), function=function)


@pytest.mark.parametrize(
    ("name", "other", "picked", "said"),
    [
        ("attn_q_norm", "attn_q", lambda y: y[:, :1].mean(-1, keepdim=True).expand(-1, 6, 1),
         "of the means of squares, every head has that of head 0"),
        ("attn_q_norm", "attn_q", lambda y: y[:, ::3].mean(-1, keepdim=True).repeat_interleave(3, 1),
         "of the means of squares, every head has that of the first in its 3"),
        ("attn_k_norm", "attn_q", lambda y: y[:, :2].mean(-1, keepdim=True),
         "the mean of squares is that of attn_q where that of attn_k belongs"),
        ("attn_k_norm", "attn_q", lambda y: y.reshape(len(y), 2, -1).mean(-1, keepdim=True),
         "the mean of squares is that of attn_q, in 2 parts, where that of attn_k belongs"),
        ("ffn_norm", "attn_output", lambda y: y.mean(-1, keepdim=True),
         "the mean of squares is that of attn_output where that of attn_residual belongs"),
        ("ffn_norm", "attn_residual", lambda y: y[:1].mean(-1, keepdim=True),
         "of the means of squares, every token has that of token 0"),
    ],
)  # fmt: skip
def test_a_norm_by_another_root_mean_square_is_found(
    name: str, other: str, picked: Callable[[torch.Tensor], torch.Tensor], said: str, models: Models, tmp_path: Path
) -> None:
    faulty = explained(models("normed"), tmp_path, with_squares_of(f"blk.1.{name}", f"blk.1.{other}", picked))
    assert {(op.op, op.cause and op.cause.text) for op in faulty} == {(f"blk.1.{name}", said)}


def test_a_norm_of_a_sum_is_found(models: Models, tmp_path: Path) -> None:
    def normed_too_late(graph: Graph) -> Op:
        def function(x: torch.Tensor, y: torch.Tensor, *weight: torch.Tensor, eps: float) -> torch.Tensor:
            return rms_norm(x + y, *weight, eps=eps)

        op = graph["blk.1.ffn_norm"]
        return replace(op, inputs=(*op.inputs, "blk.1.attn_output"), function=function)

    faulty = explained(models("k-quants"), tmp_path, normed_too_late)
    assert {(op.op, op.cause and op.cause.text) for op in faulty} == {
        ("blk.1.ffn_norm", "reads attn_residual + attn_output where attn_residual belongs")
    }


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        ("attn_residual", lambda a, b: a[:1] + b, "as it reads attn_output, every token has the values of token 0"),
        ("ffn_act", lambda gate, up: torch.nn.functional.silu(gate) * up.roll(1, 1),
         "as it reads ffn_up, channels rotated: channel 1 has the values of channel 0, and so on around"),
    ],
)  # fmt: skip
def test_one_of_two_values_that_is_read_elsewhere_is_found(
    models: Models, tmp_path: Path, name: str, other: Callable[..., torch.Tensor], said: str
) -> None:
    def change(graph: Graph) -> Op:
        return replace(graph[f"blk.1.{name}"], function=other)

    faulty = explained(models("k-quants"), tmp_path, change)
    assert {(op.op, op.cause and op.cause.text) for op in faulty} == {(f"blk.1.{name}", said)}


def test_a_value_a_little_beyond_its_bound_is_no_mistake_that_changes_nothing(models: Models, tmp_path: Path) -> None:
    """An exchange of a sum's terms comes to the sum, and is allowed more noise."""

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a + b
        y[2, 5] *= 1 + 2.0**-22
        return y

    faulty = explained(
        models("k-quants"), tmp_path, lambda graph: replace(graph["blk.1.attn_residual"], function=function), n_decode=0
    )
    assert [op.op for op in faulty] == ["blk.1.attn_residual"]
    assert not faulty[0].cause


def test_a_branch_that_is_not_added_is_not_said_to_be_zero_alone(models: Models, tmp_path: Path) -> None:
    """Behind hidden states nothing tells the two."""

    def without_branch(graph: Graph) -> Op:
        return replace(graph["blk.1.ffn_residual"], function=lambda _, stream: stream)

    faulty = explained(models("qwen2"), tmp_path, without_branch, capture="layers")
    assert {op.op for op in faulty} == {"blk.1.ffn_residual"}
    for op in faulty:
        assert op.cause
        assert op.cause.text.startswith("ffn_residual: blk.1.ffn_down is not added (or ")
        assert "blk.1.ffn_down.weight counts as zeros" in op.cause.text
        assert op.cause.text.endswith(": the same from here; record ffn_gate, ffn_up and ffn_down to tell)")


@pytest.mark.slow
def test_an_edit_of_a_kernel_is_found_behind_hidden_states(models: Models, tmp_path: Path) -> None:
    """Nothing between two layers was recorded: what follows the edited ops is recomputed."""
    norms = [rewritten(f"blk.0.{name}", "squares / n", "squares / T") for name in ("attn_norm", "ffn_norm")]
    faulty = explained(models(TINY), tmp_path, *norms, capture="layers")
    assert {op.op for op in faulty} == {"blk.0.ffn_residual"}
    for op in faulty:
        assert op.cause, op.shape
        assert "attn_norm, ffn_norm: the scale is computed with squares / " in op.cause.text


def moved(name: str, how: Map, axis: int, *shape: int) -> Callable[[Graph], Op]:
    """An op whose output has slices elsewhere."""
    return lambda graph: replace(graph[name], rework=MovedOutput(how, axis, shape))


def test_rows_that_are_stored_apart_are_found(models: Models, tmp_path: Path) -> None:
    """As of a vocabulary that is padded, whose logits are read as if it were not."""

    def change(graph: Graph) -> Op:
        return replace(graph["output"], rework=RowsApart(320))

    (faulty,) = explained(models(TINY), tmp_path, change, n_decode=1)
    assert faulty.step == 0  # of one row nothing lies apart
    assert faulty.cause
    assert faulty.cause.text == "each row is stored 320 values after the one before, where 300 belong"


def mapped(name: str, function: str, *numbers: float, operand: int | None = None) -> Callable[[Graph], Op]:
    """An op with a function of its values, or of those of an input."""
    return lambda graph: replace(graph[name], rework=Mapped(function, numbers, operand))


def read(name: str, reading: Reading) -> Callable[[Graph], Op]:
    """A linear op that reads its weight otherwise."""

    def change(graph: Graph) -> Op:
        weight, *others = graph[name].weights
        return replace(graph[name], weights=(replace(weight, read=reading), *others))

    return change


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            rewritten("blk.0.ffn_norm", "in range(n))", "in range(n - 7))"),
            "the sum of squares takes only channels 0 to 16: the last 7 are left out",
        ),
        (
            rewritten("blk.0.ffn_act", "(1 + exp", "(1.37 + exp"),
            "silu is computed with 1.37 + exp(-ffn_gate), where 1 + exp(-ffn_gate) belongs",
        ),
        (mapped("blk.0.attn_v", "cap", 0.4), "every value v is capped, to 0.4 * tanh(v / 0.4)"),
        (mapped("blk.0.ffn_act", "within", -0.05, 0.05), "every value is clamped to the range from -0.05 to 0.05"),
        (moved("blk.0.attn_q", Map("listed", (0, 3, 3, 0)), 1, -1, 4, 6), "heads 0 and 3 are exchanged"),
    ],
    ids=["a sum of fewer terms", "a constant", "a function", "a clamp", "a map"],
)
def test_numbers_and_maps_are_found_behind_hidden_states(
    models: Models, tmp_path: Path, changed: Callable[[Graph], Op], said: str
) -> None:
    """The numbers are fitted to what comes out at the end, of the first tokens alone."""
    path = models(replace(TINY, n_embd=24, n_ff=20))
    replay = traced(path, tmp_path, changed, capture="layers")
    segment, _, local = layer_of_states(replay)
    problem = segment.problem(replay.graph[changed(replay.graph).name])
    assert problem
    found = SegmentSearch(segment, local.nmse, lambda: None).of_numbers(problem)
    assert said in [solved.words for solved in found]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            moved("blk.0.ffn_down", Map("listed", (3, 17, 17, 3)), 1, -1, 24),
            "ffn_down: channels 3 and 17 are exchanged",
        ),
        (
            read("blk.0.ffn_down", Reading(elements=((3, 5, 0.125),))),
            "ffn_down: row 3 of ffn_down.weight differs in column 5 alone: 0.125 where the file has",
        ),
        (
            rewritten("blk.0.ffn_residual", "+", "-"),
            "ffn_residual: the output is computed with ffn_down - attn_residual, where",
        ),
    ],
)
def test_what_is_only_added_is_told_by_the_state(
    models: Models, tmp_path: Path, changed: Callable[[Graph], Op], said: str
) -> None:
    """Without the rest of the sum it is as if it had been recorded."""
    path = models(replace(TINY, n_embd=24, n_ff=20))
    replay = traced(path, tmp_path, changed, capture="layers")
    _, record, local = layer_of_states(replay)
    solved, _ = next(told(replay, record, local.segment, lambda: None))
    assert solved.words.startswith(said)
    assert replay.under(record, solved.ops).judgement == "sound"


@pytest.mark.parametrize("other", ["attn_norm", "attn_scores"])
def test_what_an_engine_had_in_earlier_steps_is_recomputed(models: Models, tmp_path: Path, other: str) -> None:
    """An op reads what earlier steps left in a buffer of which nothing was recorded."""
    path, read = models(replace(TINY, n_embd=24, n_ff=20)), Read(f"blk.0.{other}", "before")

    def changed(graph: Graph) -> Op:
        op = graph["blk.0.ffn_up"]
        loops = loops_of(op, [graph[x].shape(5) for x in op.inputs])
        assert loops
        return Edit("", loops.source, arrays=(("x", read),)).op(op, loops)

    every = traced(path, tmp_path, changed, n_decode=2).trace
    first, then = (every.values(every.ops[step, read.name]).ravel() for step in (0, 1))
    replay = traced(path, tmp_path, changed, capture="layers", n_decode=2)
    segment, record, local = layer_of_states(replay, 2)
    assert local.faulty
    assert replay.under(record, [changed(replay.graph)]).judgement == "sound"
    problem = segment.problem(replay.graph["blk.0.ffn_up"])
    assert problem
    held = problem.held(read)
    assert held is not None
    np.testing.assert_allclose(held, [*then, *first[len(then) :]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("wrong_from", "n_tokens"), [(0, 2), (4, len(PROMPT))])
def test_the_first_tokens_of_a_segment_stand_for_all(
    models: Models, tmp_path: Path, wrong_from: int, n_tokens: int
) -> None:
    """They see no others: attention over them alone comes to the same. Where they are right, all are looked at."""
    late = partial(_wrong_from, wrong_from)
    replay = traced(
        models(TINY), tmp_path, lambda graph: replace(graph["blk.0.ffn_act"], function=late), capture="layers"
    )
    (segment, _, local), right = layer_of_states(replay), replay.graph["blk.0.ffn_act"]
    first = segment.beginning(2, local.nmse)
    assert first.n_tokens == n_tokens
    wrong = replace(right, function=late)
    assert first.left({right.name: wrong}) < 1e-12 < first.left({right.name: right})


def test_the_tokens_that_are_off_most_stand_for_all(models: Models, tmp_path: Path) -> None:
    """A glance at them, in float32 as well, tells what the whole segment tells: the mistake from no mistake."""
    late = partial(_wrong_from, 3)
    replay = traced(
        models(TINY), tmp_path, lambda graph: replace(graph["blk.0.ffn_act"], function=late), capture="layers"
    )
    (segment, _, local), right = layer_of_states(replay), replay.graph["blk.0.ffn_act"]
    part, wrong = segment.at_a_glance(2), {right.name: replace(right, function=late)}
    assert (segment.n_judged, part.n_judged, part.roughly().n_judged) == (len(PROMPT), 2, 2)
    off = segment.residual({right.name: right}).reshape(len(PROMPT), -1)
    worst = np.square(off).sum(1).argsort()[-2:]
    assert min(worst) >= 3
    ours = np.abs(part.residual({right.name: right}))
    assert ours.max() / ours.mean() == pytest.approx(np.abs(off[worst]).max() / np.abs(off[worst]).mean())
    assert part.left(wrong) < 1e-12 < local.nmse < part.left({right.name: right})
    assert part.roughly().left(wrong) < 1e-11
    assert part.roughly().left({right.name: right}) == pytest.approx(part.left({right.name: right}), rel=1e-4)


def test_what_follows_several_edits_is_computed_for_all_of_them_at_once(models: Models, tmp_path: Path) -> None:
    """It comes to what it comes to of each alone, whichever token an edit changes."""
    replay = traced(models(TINY), tmp_path, capture="layers")
    segment, *_ = layer_of_states(replay)
    right = replay.graph["blk.0.attn_output"]
    edits = [
        rewritten(right.name, "y[t * n_out + o] = sum", f"y[t * n_out + o] = {by} + sum") for by in ("t", "0.1", "o")
    ]
    changed = [{right.name: edit(replay.graph)} for edit in edits]
    alone = [segment.left(one) for one in changed]
    assert segment.lefts([segment.begun(one) for one in changed]) == pytest.approx(alone, rel=1e-9)
    assert len(set(alone)) == 3
    assert min(alone) > 1e-6


def test_what_takes_no_time_is_explained_before_segments_that_take_all_of_it(models: Models, tmp_path: Path) -> None:
    """The last norm's eps was not sought, for what lies behind the layers' states had taken the time."""
    replay = traced(
        models(TINY),
        tmp_path,
        lambda graph: graph["blk.0.ffn_norm"].with_attrs(eps=0.1),
        lambda graph: graph["output_norm"].with_attrs(eps=0.1),
        capture="layers",
    )
    ops = judged(replay)
    kins = [[ops[at].op for at in places] for places in Explainer(replay).kins(ops)]
    assert kins == [["output_norm"] * 2, ["blk.0.ffn_residual"] * 2]


@pytest.mark.parametrize(("fill", "said"), [(0.0, "zeros"), (math.nan, "NaN")])
def test_a_query_that_sees_no_key_has_what_its_softmax_makes_of_none(
    fill: float, said: str, models: Models, tmp_path: Path
) -> None:
    """In the prompt, and as one mistake with that of the decoded tokens, all of which see some."""

    def change(graph: Graph) -> Op:
        op = graph["blk.1.attn_probs"]
        blind = op.with_attrs(mask=lambda q, k: k[None, :] >= q[:, None])
        return replace(blind, function=lambda *x, **attrs: softmax(*x, **attrs).nan_to_num(fill))

    faulty = explained(models(replace(TINY, n_layer=2)), tmp_path, change)
    words = f"the mask is off by one: a query does not see its own token; the first sees none, and has {said}"
    assert [(op.step, op.op, op.cause and op.cause.text) for op in faulty] == [
        (step, "blk.1.attn_probs", words) for step in range(2)
    ]


def test_an_op_does_not_read_what_is_computed_after_it(models: Models, tmp_path: Path) -> None:
    """An edit of the last sum of a layer, made in the first one too: replay would go in circles for ever."""
    replay = traced(models(TINY), tmp_path, capture="layers")
    segment, record, _ = layer_of_states(replay)
    first, last = (segment.problem(replay.graph[f"blk.0.{name}"]) for name in ("attn_residual", "ffn_residual"))
    assert first
    assert last
    edit = Edit("", last.loops.source, arrays=(("b", Read("blk.0.ffn_down")),))
    assert _edited(last, edit)
    assert _edited(first, edit) is None
    with pytest.raises(CircularError, match=r"blk\.0\..* of step 0 follows from itself"):
        replay.under(record, [first.edited(edit)])


def test_what_is_carried_to_another_layer_is_said_as_it_is_there(models: Models, tmp_path: Path) -> None:
    """Layers share a buffer: what the last one left in the step before is, in the first, of the layer after."""
    replay = traced(models(replace(TINY, n_layer=2)), tmp_path)
    op, record = replay.graph["blk.0.attn_kqv"], replay.trace.ops[1, "blk.1.attn_kqv"]
    left = Read("blk.1.attn_kqv", "before")
    loops = loops_of(op, [(4, 1, 6), (6, 2, 2)])
    assert loops
    changed = Edit("", loops.source, arrays=(("before", left),)).op(op, loops)
    said = f"attn_probs; elsewhere the output is {left.words(op)}"
    local = replay.judge(record)
    found = Hypothesis((Assumed(SOLVED, said, said, False),), (changed,), local)
    there = carried(found, replay.graph, local.segment)
    assert there
    assert said == "attn_probs; elsewhere the output is attn_kqv of the layer after of the step before"
    assert there.parts[-1].text == "attn_probs; elsewhere the output is attn_kqv of the step before"


def test_norms_that_are_mistaken_alike_are_said_of_the_weight_of_each(models: Models, tmp_path: Path) -> None:
    """Those of queries and keys were said to add the weight of the norm before attention."""

    def added(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) + weight

    model = Model(models(replace(TINY, arch="qwen3", n_layer=2)))
    wrong = [replace(op, function=added) for op in model.graph if op.kind == "rms_norm"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", PROMPT, (DECODED,))
    assert [finding.text for finding in check_trace(path, model).findings] == [
        "all 9 norms: the output is computed with its input * scale + the weight, "
        "where its input * scale * the weight belongs."
    ]


def test_what_is_nan_is_not_the_nan_of_another_value(models: Models, tmp_path: Path) -> None:
    """Of the step before, say, or of another layer: these all have the same value."""

    def change(graph: Graph) -> Op:
        return replace(graph["blk.0.attn_norm"], function=lambda x, w, eps: x * math.nan)

    faulty = explained(models("llama"), tmp_path, change)
    assert {(op.op, op.step) for op in faulty} == {("blk.0.attn_norm", 0), ("blk.0.attn_norm", 1)}
    assert not any("attn_norm" in op.cause.text for op in faulty if op.cause)


@pytest.mark.slow
def test_zeros_alone_tell_no_edit(models: Models, tmp_path: Path) -> None:
    """Noise in as many values as heads by keys, and zeros: as many are stored where the channels of a head and the keys
    are exchanged, and all of them follow from what lies beyond the cache.
    """
    shape = replace(TINY, n_embd=64)
    faulty = explained(
        models(shape), tmp_path, lambda graph: replace(graph["blk.0.attn_kqv"], function=_noise, tokens="one")
    )
    causes = {(op.step, op.op): op.cause for op in faulty}
    assert causes[1, "blk.0.attn_kqv"] is None


def _noise(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    n_heads, n_tokens, n_keys = probs.shape
    y = torch.zeros(n_tokens, n_heads * v.shape[-1], dtype=v.dtype)
    noise = torch.randn(n_tokens, n_heads * n_keys, generator=torch.Generator().manual_seed(n_tokens))
    y[:, : n_heads * n_keys] = noise.to(v.dtype)
    return y


def _wrong_from(token: int, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.silu(gate) * up
    return torch.cat((y[:token], 1.5 * y[token:]))


GATE = "blk.0.ffn_gate"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (moved("blk.0.attn_q", Map("reversed"), 1, -1, 8, 32), "heads reversed"),
        (moved("blk.0.attn_scores", Map("rotated", (3,)), 0), "heads rotated: head 0 has the values of head 3"),
        (moved(GATE, Map("listed", (3, 7, 7, 3)), 1, -1, 512), "channels 3 and 7 are exchanged"),
        (
            moved("blk.1.attn_norm", Map("shifted", (-1,)), 0, -1, 256),
            "each token has the values of the one before it, the first is 0",
        ),
        (mapped("blk.0.ffn_act", "above", 0.5), "every value above 0.5 is 0.5"),
        (mapped("blk.0.ffn_act", "within", -0.25, 0.25), "every value is clamped to the range from -0.25 to 0.25"),
        (mapped(GATE, "within", -0.5, 1.0), "every value is clamped to the range from -0.5 to 1"),
        (
            mapped("blk.0.ffn_act", "within", -0.5, 0.5, operand=1),
            "every value of ffn_up is clamped to the range from -0.5 to 0.5",
        ),
        (  # what is activated, which the output is not linear in
            mapped("blk.0.ffn_act", "within", -0.5, 0.75, operand=0),
            "every value of ffn_gate is clamped to the range from -0.5 to 0.75",
        ),
        (mapped("blk.0.ffn_act", "above", 0.4, operand=0), "every value of ffn_gate above 0.4 is 0.4"),
        (mapped("blk.0.ffn_act", "below", -0.3, operand=0), "every value of ffn_gate below -0.3 is -0.3"),
        (mapped("blk.0.ffn_act", "linear", 1.3, 0.0, operand=0), "every value of ffn_gate is 1.3 times what it should"),
        (mapped("blk.0.attn_scores", "cap", 5.0), "capped, to 5 * tanh(v / 5)"),
        (mapped("blk.0.ffn_act", "above", 0.75, operand=1), "every value of ffn_up above 0.75 is 0.75"),
        (
            mapped("blk.1.attn_residual", "linear", 0.5, 0.0, operand=1),
            "every value of ffn_residual of the layer before is 0.5 times",
        ),
        (  # rounded before it is added: of sums near 0 that is more than one rounding of the sum
            mapped("blk.1.attn_residual", "linear", 2.6, 0.0, operand=0),
            "every value of attn_output is 2.6 times",
        ),
        (
            mapped("blk.1.attn_q", "linear", 2.0, 0.0, operand=0),
            "the product is 2 times what it should be before the bias is",
        ),
        (mapped(GATE, "linear", 0.5, 0.25), "every value is 0.5 times what it should be, more by 0.25"),
        (
            read(GATE, Reading(rows=(RowRun(100, 511, "blk.0.ffn_gate.weight", 0, 256),))),
            "channels 100 to 511 are computed with rows 0 to 411 of ffn_gate.weight",
        ),
        (
            read(GATE, Reading(rows=(RowRun(0, 511, "blk.0.ffn_gate.weight", 32, 256),))),
            "channels 0 to 511 are computed with rows that start 32 values late in ffn_gate.weight",
        ),
        (
            read("output", Reading(elements=((3, 5, 0.125),))),
            "row 3 of output.weight differs in column 5 alone: 0.125 where the file has",
        ),
        (
            read("blk.1.attn_norm", Moved(Map("rotated", (1,)))),
            "as it reads attn_norm.weight, elements rotated: element 0 has the values of element 1, and so on around",
        ),
        (
            read("blk.0.ffn_norm", Moved(Map("modulo", (32,)))),
            "as it reads ffn_norm.weight, elements from 32 on repeat the first 32",
        ),
    ],
)
def test_values_elsewhere_functions_and_readings_are_found(
    models: Models, tmp_path: Path, changed: Callable[[Graph], Op], said: str
) -> None:
    path = models("k-quants")
    name = changed(load_graph(path)).name
    faulty = explained(path, tmp_path, changed)
    assert {op.op for op in faulty} == {name}
    for op in faulty:
        assert op.cause, op.shape
        assert said in op.cause.text


def test_rows_are_read_with_their_biases(models: Models, tmp_path: Path) -> None:
    """As where V begins a head too early in one product for Q, K and V."""

    def change(graph: Graph) -> Op:
        op = graph["blk.0.attn_v"]
        n, half = op.weights[0].shape[1], op.weights[0].shape[0] // 2
        early = [(0, half - 1, "blk.0.attn_k", half), (half, 2 * half - 1, "blk.0.attn_v", 0)]
        rows = tuple(RowRun(first, last, f"{of}.weight", start * n, n) for first, last, of, start in early)
        biases = tuple(RowRun(first, last, f"{of}.bias", start, 1) for first, last, of, start in early)
        readings = Reading(rows=rows), Reading(rows=biases)
        return replace(op, weights=tuple(replace(w, read=r) for w, r in zip(op.weights, readings, strict=True)))

    faulty = explained(models("k-quants"), tmp_path, change)
    assert {op.op for op in faulty} == {"blk.0.attn_v"}
    for op in faulty:
        assert op.cause
        assert op.cause.text == (
            "channels 0 to 31 are computed with rows 32 to 63 of attn_k.weight; channels 32 to 63 are computed with "
            "rows 0 to 31 of attn_v.weight, and with their biases"
        )


@pytest.mark.slow
def test_a_head_that_reads_another_key_head_is_told_behind_its_values(models: Models, tmp_path: Path) -> None:
    """As of flash attention, which has neither scores nor probabilities to record."""
    path = models("k-quants")
    groups = (0, 0, 1, 0, 1, 1, 0, 1)
    wrong = traced(path, tmp_path, lambda graph: replace(graph["blk.1.attn_scores"], rework=SomeHeads({1: groups})))
    kept = some_of(wrong.trace.path, tmp_path / "some.trace", lambda op: not op.endswith(("attn_scores", "attn_probs")))
    replay = Replay(Trace(kept), wrong.graph, wrong.weights)
    faulty = [op for op in Explainer(replay).explain(judged(replay)) if op.status == "faulty"]
    assert {op.op for op in faulty} == {"blk.1.attn_kqv"}
    for op in faulty:
        assert op.cause, op.shape
        assert op.cause.text == "attn_scores: query heads 2, 6 read key/value heads 1, 0 where 0, 1 belong"


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([1.0] * 12 + [0.125] * 4, "pairs 12 to 15 turn 0.125 times as fast as they should"),
        ([1.0] * 10 + [0.0] * 6, "pairs 10 to 15 do not turn"),
        ([1.0] * 3 + [1.5] + [1.0] * 12, "pair 3 turns 1.5 times as fast as it should"),
        (
            [1.0] * 4 + [0.8] * 2 + [0.5] * 10,
            "pairs 4 to 5 turn 0.8 times as fast as they should, pairs 6 to 15 turn 0.5",
        ),
        (
            [1 / (1 + i / 32) for i in range(16)],
            "pairs 1 to 15 turn about 0.97 to 0.68 times as fast as they should, each at its own rate",
        ),
        (
            [1 + i * 7 % 5 / 2**12 for i in range(16)],
            "pairs 1 to 9 turn too fast or too slowly by up to 0.00098 of it, each at its own rate",
        ),
    ],
)
def test_rates_of_pairs_are_told_by_what_each_turns(
    models: Models, tmp_path: Path, times: list[float], said: str
) -> None:
    """In a prompt and in the steps that follow, of which each has one token."""
    path = models("k-quants")
    faulty = explained(path, tmp_path, lambda graph: rotations.turning(graph["blk.1.attn_k_rope"], times))
    assert {op.op for op in faulty} == {"blk.1.attn_k_rope"}
    for op in faulty:
        assert op.cause, op.shape
        assert op.cause.text.startswith(said)


def test_pairs_that_turn_as_others_should_are_told(models: Models, tmp_path: Path) -> None:
    """The exponent is made of i & ~1: "pairs 1 to 7 turn about 3.2 to 5.6 times as fast", of which half are right."""

    def by_two(graph: Graph) -> Op:
        rope = graph["blk.1.attn_k_rope"]
        right = rope_angles(torch.ones(1), None, rope.attrs["rope"])[0]
        return rotations.turning(rope, [float(right[i & ~1] / right[i]) for i in range(len(right))])

    faulty = explained(models("k-quants"), tmp_path, by_two)
    said = "pairs 1, 3, 5, 7, 9, 11 and 2 more turn as pairs 0, 2, 4, 6, 8, 10 and 2 more should"
    assert {op.op: op.cause and op.cause.text for op in faulty} == {"blk.1.attn_k_rope": said}


def in_cache(name: str, change: Callable[[torch.Tensor], torch.Tensor], decoding: bool) -> Callable[[Graph], Op]:
    """An op of attention that reads K or V changed so, [S, G, D], in all steps or in those of one token."""

    def changed(graph: Graph) -> Op:
        right = KINDS[graph[name].kind].function
        tokens = 0 if graph[name].kind == "scores" else 1

        def function(a: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
            return right(a, cached if decoding and a.shape[tokens] > 1 else change(cached.clone()))

        return replace(graph[name], function=function)

    return changed


def slot(place: int, values: Callable[[torch.Tensor], torch.Tensor | float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A cache with something else in one place."""

    def change(cached: torch.Tensor) -> torch.Tensor:
        cached[place] = values(cached)
        return cached

    return change


@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("attn_kqv", slot(3, lambda v: 0.0), "as it reads attn_v, position 3 is 0"),
        ("attn_kqv", slot(2, lambda v: v[1]), "as it reads attn_v, position 2 has the values of position 1"),
        ("attn_kqv", slot(-1, lambda v: v[-2]), "attn_v, the last position has the values of the one before it"),
        ("attn_kqv", lambda v: v.flip(1), "as it reads attn_v, value heads reversed"),
        ("attn_kqv", lambda v: torch.cat((v[:1], v[:-1])), "attn_v, each position has the values of the one before it"),
        (
            "attn_kqv",
            lambda v: v.roll(1, 0),
            "attn_v, positions rotated: position 1 has the values of position 0, and so on around",
        ),
        ("attn_scores", slot(-1, lambda k: k[-2]), "the last key has the values of the one before it"),
        ("attn_scores", lambda k: k.flip(1), "as it reads attn_k_rope, key heads reversed"),
    ],
)
def test_what_a_cache_holds_elsewhere_is_found(
    models: Models,
    tmp_path: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    said: str,
    decoding: bool,
) -> None:
    faulty = explained(models("llama"), tmp_path, in_cache(f"blk.0.{name}", change, decoding), n_decode=2)
    assert {op.step for op in faulty} == ({1, 2} if decoding else {0, 1, 2})
    for op in faulty:
        assert op.cause, op.shape
        assert said in op.cause.text
        assert ("slots of the cache" in op.cause.look["solved"]) == ("heads" not in said)


def test_values_are_found_where_the_scores_show_that_keys_are(models: Models, tmp_path: Path) -> None:
    """In steps of one token, whose sums are fewer than the positions that are wrong."""

    def over(cached: torch.Tensor) -> torch.Tensor:
        moved = cached.clone()
        moved[:2], moved[3:5] = cached[3:5], 0
        return moved

    wrong = [in_cache(f"blk.0.{name}", over, True) for name in ("attn_scores", "attn_kqv")]
    faulty = explained(models("llama"), tmp_path, *wrong, n_decode=2)
    assert {(op.op, op.step, op.cause and op.cause.text) for op in faulty if op.op.endswith("kqv")} == {
        (
            "blk.0.attn_kqv",
            step,
            "as it reads attn_v, positions 0 to 1 have the values of positions 3 to 4, positions 3 to 4 are 0, in "
            "steps of one token alone",
        )
        for step in (1, 2)
    }


def test_where_values_are_cached_is_said_of_the_cache(models: Models, tmp_path: Path) -> None:
    """Each step writes from the first slot on; the last channel is not written."""
    over = rewritten("blk.0.attn_kqv", "starts[c] * width + ", "0 * width + ")
    short = rewritten("blk.0.attn_scores", "for i in range(width)", "for i in range(width - 1)")
    causes = [(op.op, op.cause) for op in explained(models("llama"), tmp_path, over, short, n_decode=2)]
    assert {(name, cause and cause.text) for name, cause in causes} == {
        (
            "blk.0.attn_kqv",
            "cached value c is stored as position c - n (n: how many were cached before its step) of the cache, where "
            "c belongs",
        ),
        ("blk.0.attn_scores", "only channels 0 to 30 are cached: the last is left out"),
    }
    assert all("slots of the cache" in cause.look["solved"] for _, cause in causes if cause)


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        (lambda p: p.clamp(max=3), "positions beyond 3 are taken for 3"),
        (lambda p: p % 3, "position p is taken for p % 3"),
    ],
)
def test_positions_beyond_a_table_are_one_finding(
    models: Models, tmp_path: Path, taken: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """In steps of one token that is any position, and in the prompt the last token's alone."""

    def function(x: torch.Tensor, positions: torch.Tensor, *factors: torch.Tensor, rope: Rope) -> torch.Tensor:
        return turned(x, taken(positions), *factors, rope=rope)

    faulty = explained(
        models("llama"),
        tmp_path,
        *(lambda graph, which=which: replace(graph[f"blk.0.attn_{which}_rope"], function=function) for which in "qk"),
        n_decode=2,
    )
    assert sorted(op.step for op in faulty) == [0, 0, 1, 1, 2, 2]
    assert {op.cause and op.cause.text for op in faulty} == {said}


@pytest.mark.slow
def test_decode_steps_that_count_from_0_are_no_remainder_of_their_positions(models: Models, tmp_path: Path) -> None:
    """Whose first is 0 by itself, too: "position p is taken for p % 5" was said."""

    def function(x: torch.Tensor, positions: torch.Tensor, *factors: torch.Tensor, rope: Rope) -> torch.Tensor:
        at = positions - len(PROMPT) if len(positions) == 1 else positions
        return turned(x, at, *factors, rope=rope)

    faulty = explained(
        models("llama"),
        tmp_path,
        *(lambda graph, which=which: replace(graph[f"blk.0.attn_{which}_rope"], function=function) for which in "qk"),
        n_decode=2,
    )
    assert {op.step for op in faulty} == {1, 2}
    words = f"positions are {len(PROMPT)} too low, in steps of one token alone"
    assert {op.cause and op.cause.text for op in faulty} == {words}


def test_what_other_layers_have_in_all_steps_one_may_have_in_some(models: Models, tmp_path: Path) -> None:
    """A factor of one token alone may be any number: here it is the one that another layer has in every step."""

    def scaled(layer: int, keys: int) -> Callable[[Graph], Op]:
        def function(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return weighted_values(p, v) * (1.25 if p.shape[-1] >= keys else 1.0)

        return lambda graph: replace(graph[f"blk.{layer}.attn_kqv"], function=function)

    faulty = explained(models("llama"), tmp_path, scaled(0, 0), scaled(1, 6), n_decode=2)
    assert [(op.op, op.step) for op in faulty if op.layer == 1] == [("blk.1.attn_kqv", 1), ("blk.1.attn_kqv", 2)]
    assert {op.cause and op.cause.text for op in faulty} == {"every value is 1.25 times what it should be"}


@pytest.mark.parametrize(("name", "value"), [("attn_kqv", "attn_v"), ("attn_scores", "attn_k_rope")])
def test_what_decode_steps_cache_and_lose_is_said(models: Models, tmp_path: Path, name: str, value: str) -> None:
    def lost(cached: torch.Tensor) -> torch.Tensor:
        cached[len(PROMPT) : -1] = 0
        return cached

    faulty = explained(models("llama"), tmp_path, in_cache(f"blk.0.{name}", lost, decoding=True), n_decode=3)
    assert [(op.step, op.cause and op.cause.text) for op in faulty] == [
        (step, f"cached {value}, of steps after the first and before this, counts as 0") for step in (2, 3)
    ]


@pytest.mark.parametrize("name", ["attn_kqv", "attn_scores"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held, n: held[[min(i, n - 1) for i in range(len(held))]], "from 5 on have the values of"),
        (
            lambda held, n: held[[i if i < n - 1 else min(i + 1, len(held) - 1) for i in range(len(held))]],
            "4 on each has the values of the next, but the last: that overwrites it",
        ),
        (lambda held, n: held[[*range(len(held) - 2), -1, -1]], " but one has the values of the last"),
    ],
)
def test_what_decode_steps_do_to_the_cache_again_and_again_is_one_mistake(
    models: Models, tmp_path: Path, name: str, change: Callable[[torch.Tensor, int], torch.Tensor], said: str
) -> None:
    """Each of them adds what the first one did: no slot is off by as many positions in the next."""
    done = in_cache(f"blk.0.{name}", lambda held: change(held, len(PROMPT)), decoding=True)
    faulty = explained(models("llama"), tmp_path, done, n_decode=3)
    assert {op.step for op in faulty} == {1, 2, 3}
    (text,) = {op.cause.text if op.cause else op.shape for op in faulty}
    assert text
    assert said in text


@pytest.mark.parametrize(("name", "value"), [("attn_kqv", "attn_v"), ("attn_scores", "attn_k_rope")])
@pytest.mark.parametrize("heads_first", [True, False])
def test_a_prompt_that_is_cached_in_another_layout_is_said(
    models: Models, tmp_path: Path, name: str, value: str, heads_first: bool
) -> None:
    def change(cached: torch.Tensor) -> torch.Tensor:
        prompt = cached[: len(PROMPT)]
        t, g, d = prompt.shape
        lies = prompt.transpose(0, 1).reshape(t, g, d) if heads_first else prompt.reshape(g, t, d).transpose(0, 1)
        return torch.cat((lies, cached[len(PROMPT) :]))

    orders = ["[heads, tokens, channels]", "[tokens, heads, channels]"]
    lies, read = orders if heads_first else reversed(orders)
    faulty = explained(models("llama"), tmp_path, in_cache(f"blk.0.{name}", change, decoding=True), n_decode=2)
    assert [(op.step, op.cause and op.cause.text) for op in faulty] == [
        (
            step,
            f"cached {value}, of the first step, lies as {lies} and is read as {read}, in steps of one token alone",
        )
        for step in (1, 2)
    ]


def test_a_step_that_reads_its_key_before_it_is_cached_is_one_finding(models: Models, tmp_path: Path) -> None:
    wrong = in_cache("blk.0.attn_scores", slot(-1, lambda k: 0.0), decoding=True)
    faulty = explained(models("llama"), tmp_path, wrong, n_decode=3)
    assert [(op.step, op.cause and op.cause.text) for op in faulty] == [
        (step, "in steps of one token its own key is zero, as if it was read before it is cached") for step in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        pytest.param(
            "attn_kqv",
            slot(-1, lambda v: v[-2]),
            "attn_v, the last position has the values of the one before it",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "attn_scores", slot(3, lambda k: 0.0), "as it reads attn_k_rope, key 3 is 0", marks=pytest.mark.slow
        ),
        pytest.param(
            "attn_scores", lambda k: k.flip(1), "as it reads attn_k_rope, key heads reversed", marks=pytest.mark.slow
        ),
    ],
)
def test_what_a_cache_holds_elsewhere_is_found_behind_hidden_states(
    models: Models, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    shape = Shape("qwen2", n_layer=1, n_embd=48, n_head=6, n_head_kv=2, n_ff=64, n_vocab=300)
    wrong = in_cache(f"blk.0.{name}", change, decoding=True)
    faulty = explained(models(shape), tmp_path, wrong, capture="layers", n_decode=2)
    assert {op.step for op in faulty} == {1, 2}
    for op in faulty:
        assert op.cause, op.shape
        assert f"{name}: as it reads" in op.cause.text
        assert said in op.cause.text


@pytest.mark.parametrize(
    ("arithmetic", "name"),
    [
        ("activations in bfloat16", "blk.0.attn_q"),
        ("activations in q8_0 blocks", "output"),
        ("activations as ggml rounds them, KV cache in float16", "blk.0.attn_scores"),
    ],
)
def test_roundings_are_no_edit(models: Models, tmp_path: Path, arithmetic: str, name: str) -> None:
    """An honest engine in an arithmetic that is denied to it: all is off, and nothing is said to give it."""
    path = models("k-quants")
    trace_torch(path, tmp_path / "t.trace", TorchOptions(arithmetic=arithmetic), PROMPT)
    file = GGUFFile(path)
    replay = Replay(Trace(tmp_path / "t.trace"), build_graph(file), Weights(file), pinned=scheme_named("exact"))
    record = replay.trace.ops[0, name]
    before = replay.judge(record)
    assert before.faulty
    for solved, scheme in islice(explanations(replay, record, lambda: None), 8):
        assert replay.under(record, solved.ops, before.nmse, scheme).faulty, solved.words


def test_mistakes_are_tried_under_no_arithmetic_that_is_near_the_first(models: Models, tmp_path: Path) -> None:
    """What fits under it shows under the first as well, if what is to be explained is more than lies between them."""
    path = models("k-quants", "Q4_K_M")
    trace_torch(path, tmp_path / "t.trace", TorchOptions(faults=("row_before",)), PROMPT)
    file = GGUFFile(path)
    replay = Replay(Trace(tmp_path / "t.trace"), build_graph(file), Weights(file))
    record = replay.trace.ops[0, "blk.0.attn_q"]
    all_of_them = replay.plain_ones(record)
    assert len(all_of_them) > 1
    assert replay.tried_under(record, replay.judge(record).nmse) == [*all_of_them[:1]]
    assert replay.tried_under(record, 1e-9) == [*all_of_them]


def test_in_the_first_step_no_buffer_lies_about(models: Models, tmp_path: Path) -> None:
    file = GGUFFile(models("k-quants"))
    out = trace_graph(build_graph(file), file, tmp_path / "t.trace", PROMPT, PROMPT[:1])
    replay = Replay(Trace(out), build_graph(file), Weights(file))
    held = []
    for step in (0, 1):
        problem = problem_of(replay, replay.trace.ops[step, "blk.0.attn_q"], None)
        assert problem
        held.append({read.when for read in problem.others})
    assert held == [{"now"}, {"now", "before"}]


def test_a_large_head_is_looked_at_in_the_arithmetic_of_the_other_matmuls(models: Models, tmp_path: Path) -> None:
    """It is the only op of its weight type, and all of it is off: that nothing is rounded, the others tell."""
    shape = Shape("llama", n_layer=2, n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_vocab=9_000)
    path = models(shape, "Q4_K_S")
    trace_torch(path, tmp_path / "t.trace", TorchOptions(faults=("output: channels reversed",)), PROMPT)
    file = GGUFFile(path)
    replay = Replay(Trace(tmp_path / "t.trace"), build_graph(file), Weights(file))
    solved, scheme = next(explanations(replay, replay.trace.ops[0, "output"], lambda: None))
    assert solved.words == "channels reversed"
    assert scheme
    assert scheme.name == "exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("attn_kqv: the sum takes all keys but the last",) * 2,
        ("rope_shifted@attn_k_rope", "positions are shifted by +1"),
    ],
)
def test_what_is_fed_token_by_token_has_one_explanation(
    fault: str, text: str, models: Models, tmp_path: Path
) -> None:  # fmt: skip
    """Of the first tokens, with few keys, many edits are as good; zeros, as of no keys at all, tell no arithmetic."""
    model, tokens = models(replace(TINY, n_layer=2, n_embd=16), "F32"), (*PROMPT, DECODED, 65, 66, 67)
    steps = [Step(at, (token,), (at,)) for at, token in enumerate(tokens)]
    options = TorchOptions(arithmetic="exact, KV cache in float16", faults=(fault,))
    trace = trace_torch(model, tmp_path / "whole.trace", options, steps=steps)
    some = some_of(trace, tmp_path / "some.trace", lambda op: not op.endswith("attn_probs"))
    faulty = [op for op in check_trace(some, model).ops if op.status == "faulty"]
    assert {op.cause and op.cause.text for op in faulty} == {text}


@pytest.mark.slow
def test_a_search_for_which_there_is_too_little_time_is_not_begun_and_that_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a layer of billions of weights, for which no listed mistake and nothing that its end tells is the cause."""
    replay = traced(models(TINY), tmp_path, rewritten("blk.0.ffn_act", "(1 + exp", "(1.37 + exp"), capture="layers")
    _, record, local = layer_of_states(replay)
    op = OpResult(record.op, 0, 0, "add", "faulty", local=local)
    monkeypatch.setattr(
        "tracediff.diagnose.search._SECONDS", dict.fromkeys((SegmentSearch.called, SegmentSearch.computed), 1e9)
    )
    (described,) = Explainer(replay).explain([op], budget=Budget(3600))
    assert described.shape
    assert not described.cause
    assert not described.sought


@pytest.mark.slow
def test_where_the_time_ends_after_a_search_that_was_not_begun_all_that_was_not_sought_is_said(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record without its search was looked for among those that were explained: a KeyError in place of a report."""
    wrong = [rewritten(f"blk.{layer}.ffn_act", "(1 + exp", "(1.37 + exp") for layer in range(2)]
    replay = traced(models(replace(TINY, n_layer=2)), tmp_path, *wrong, capture="layers")
    records = [replay.trace.ops[0, f"blk.{layer}.ffn_residual"] for layer in range(2)]
    ops = [OpResult(r.op, 0, layer_of(r.op), "add", "faulty", local=replay.judge(r)) for r in records]
    sought = Search.of

    def until_the_time_is_over(
        self: Search, one: Faulty, progress: Progress, only_known: bool = False
    ) -> Hypothesis | None:
        if one.record.op.startswith("blk.1"):
            raise OutOfTime
        return sought(self, one, progress, only_known)

    monkeypatch.setattr(
        "tracediff.diagnose.search._SECONDS", dict.fromkeys((SegmentSearch.called, SegmentSearch.computed), 1e9)
    )
    monkeypatch.setattr(Search, "of", until_the_time_is_over)
    described = Explainer(replay).explain(ops, budget=Budget(3600))
    assert [(bool(op.shape), op.cause, op.sought) for op in described] == [(True, None, False)] * 2


def test_a_known_mistake_of_decode_steps_alone_is_named(models: Models, tmp_path: Path) -> None:
    """In all steps it would show in the prompt, which is right."""

    def decoding(name: str) -> Callable[[Graph], Op]:
        def change(graph: Graph) -> Op:
            right = graph[name].attrs["rope"]
            other = replace(right, pairing="halves")

            def function(x: torch.Tensor, positions: torch.Tensor, *, rope: Rope) -> torch.Tensor:
                return turned(x, positions, rope=other if len(positions) == 1 else rope)

            return replace(graph[name], function=function)

        return change

    changed = decoding("blk.0.attn_q_rope"), decoding("blk.0.attn_k_rope")
    faulty = explained(models("llama"), tmp_path, *changed)
    assert {(op.op, op.step, op.cause and op.cause.text) for op in faulty} == {
        (
            f"blk.0.attn_{which}_rope",
            1,
            "rope pairs halves (i, i + n/2); this model pairs neighbouring channels (2i, 2i + 1), in steps of one "
            "token alone",
        )
        for which in "qk"
    }


@pytest.mark.slow
def test_a_mistake_that_takes_the_prompt_further_off_is_made_in_some_steps_alone(
    models: Models, tmp_path: Path
) -> None:
    """Where the last token's row is not computed, a step of one token has no others: its weight is no zeros."""

    def change(graph: Graph) -> Op:
        return replace(graph["blk.1.ffn_residual"], function=lambda x, y: torch.cat((x[:-1], 0 * x[-1:])) + y)

    faulty = explained(models("qwen2"), tmp_path, change, capture="layers")
    assert [op.op for op in faulty] == ["blk.1.ffn_residual"] * 2
    texts = {op.step: op.cause.text for op in faulty if op.cause}
    assert "counts as zeros" not in texts.get(0, "")
    assert texts.keys() >= {1}


@pytest.mark.parametrize("reading", [OtherTensor("blk.0.b"), Reading((RowRun(0, 3, "blk.0.b", 0, 1),))])
def test_what_reads_another_tensor_reads_that_of_another_layer(reading: OtherTensor | Reading) -> None:
    here, there = (Op(f"blk.{n}.q", "linear", ("x",), (4,), (Weight(f"blk.{n}.a", (4, 4)),)) for n in range(2))
    (weight,) = here.weights
    carried = relayered(replace(here, weights=(replace(weight, read=reading),)), here, there)
    assert carried
    assert carried.weights == (Weight("blk.1.a", (4, 4), read=reading.renamed(lambda name: "blk.1.b")),)


def test_what_reads_the_layer_beside_reads_that_beside_another_layer() -> None:
    """It was that very layer in all: each asked for a search of its own."""
    here, there, first = (Op(f"blk.{n}.q", "linear", (f"blk.{n}.x",), (4,)) for n in (3, 7, 0))
    for other, moved in (("blk.2.x", "blk.6.x"), ("blk.4.x", "blk.8.x"), ("blk.0.x", "blk.0.x"), ("y", "y")):
        carried = relayered(replace(here, inputs=(other,)), here, there)
        assert carried
        assert carried.inputs == (moved,)
    assert relayered(replace(here, inputs=("blk.2.x",)), here, first)  # of which the caller knows that it is none


@pytest.mark.parametrize(
    ("last", "rows", "there"),
    [(5, 4, (2, 3)), (5, 9, (2, 8)), (5, 6, (2, 5)), (4, 6, (2, 4)), (4, 4, None), (5, 2, None)],
)
def test_rows_that_are_zero_up_to_the_last_are_so_in_a_weight_of_others(
    last: int, rows: int, there: tuple[int, int] | None
) -> None:
    """The channels that were said of a matmul of 120 were more than another had."""
    weight = Weight("a", (6, 3), read=Reading((RowRun(2, last, "", 0, 0),)))
    here, other = (Op(w.name, "linear", ("x",), w.shape[:1], (w,)) for w in (weight, Weight("b", (rows, 3))))
    carried = transferred(here, replace(here, weights=(replace(weight, read=None),)), other)
    read = carried and carried.weights[0].read
    assert (read and tuple((run.first, run.last) for run in read.rows)) == (there and (there,))
    assert words_of_rows(weight.read.rows, here) == {
        4: "channels 2 to 4 have their weights at 0", 5: "channels from 2 on have their weights at 0",
    }[last]  # fmt: skip


@pytest.mark.slow
def test_a_first_position_does_not_err_by_what_its_cache_rounds(models: Models, tmp_path: Path) -> None:
    """All later steps were wrong, so none told that the cache is float16: the first was explained by what changes
    nothing there.
    """
    model, tokens = models(replace(TINY, n_layer=2, n_embd=16), "F32"), (*PROMPT, DECODED)
    steps = [Step(at, (token,), (at,)) for at, token in enumerate(tokens)]
    arithmetic = "exact, KV cache in float16"
    options = TorchOptions(arithmetic=arithmetic, faults=("rope_pairing",), capture="layers")
    result = check_trace(trace_torch(model, tmp_path / "t.trace", options, steps=steps), model)
    faulty = [op for op in result.ops if op.status == "faulty"]
    assert {op.step for op in faulty} == {*range(1, len(tokens))}
    assert {op.cause and op.cause.name for op in faulty} == {"rope_pairing"}


@pytest.mark.parametrize("at", [0, 4])
def test_a_matmul_that_stores_over_what_it_reads_is_found(models: Models, tmp_path: Path, at: int) -> None:
    """calm's CPU does so with heads that are wider than its hidden state: a buffer is allocated too small."""

    def in_place(x: torch.Tensor, weight: torch.Tensor, _: None) -> torch.Tensor:
        memory, n_in, y = x.flatten().clone(), x.shape[1], x.new_zeros((len(x), len(weight)))
        for i in range(y.numel()):
            t, o = divmod(i, len(weight))
            y[t, o] = memory[t * n_in : (t + 1) * n_in] @ weight[o]
            if i + at < memory.numel():
                memory[i + at] = y[t, o]
        return y

    wrong = lambda graph: replace(graph["blk.0.attn_output"], function=in_place)  # noqa: E731
    faulty = explained(models(replace(TINY, n_embd=24, n_head=6, n_ff=40)), tmp_path, wrong, n_decode=2)
    said = f"its output is stored over attn_kqv, from value {at} on, while that is read: their buffers overlap"
    assert {(op.op, op.cause and op.cause.text) for op in faulty} == {("blk.0.attn_output", said)}


def test_a_rest_that_no_thread_computes_is_one_finding(models: Models, tmp_path: Path) -> None:
    """picolm's matmuls with a mistake in how they divide rows: what is left there is another op's in each."""
    buffers = dict[tuple[int, ...], torch.Tensor]()

    def divided(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y, rest = linear(x, weight, bias), slice(len(weight) // 3 * 3, None)
        y[:, rest] = buffers.get(y.shape, torch.zeros_like(y))[:, rest]
        buffers[y.shape] = y.clone()
        return y

    shape = replace(TINY, n_embd=32, n_ff=88, n_vocab=320)
    matmuls = [op.name for op in load_graph(models(shape)) if op.kind == "linear"]
    faulty = explained(
        models(shape), tmp_path, *(lambda graph, name=name: replace(graph[name], function=divided) for name in matmuls)
    )
    assert {op.op for op in faulty} == {*matmuls}
    (found,) = findings(faulty, ())
    assert found.text == (
        "all 8 matmuls: the last channels are as if they were not computed: they are 0, or what another op left there."
    )


def in_halves(model: Path, folder: Path, change: Callable[[Op], Op], tokens: int = 6) -> Path:
    """A trace, token by token, of an engine that changes each op so, whose cache is float16, and which shows its scores
    when they are scaled.
    """
    file = GGUFFile(model)
    graph = build_graph(file)
    wrong, scheme = graph.changed(*map(change, graph)), scheme_named("matrices in float16, KV cache in float16")
    steps = ((token,) for token in (*PROMPT, DECODED)[:tokens])
    raw = Trace(trace_graph(wrong, file, folder / "raw.trace", *steps, scheme=scheme))
    scale = np.float32(graph["blk.0.attn_probs"].attrs["scale"])
    with TraceWriter(folder / "scaled.trace", "halves", graph.hparams.arch) as writer:
        for step, given in raw.steps.items():
            writer.step(step, given.tokens, given.positions)
            for record in (record for (of, _), record in raw.ops.items() if of == step):
                values, name = raw.values(record).astype(np.float32), record.op
                is_score = name.endswith("attn_scores")
                writer.op(step, name + "_scaled" * is_score, values * scale if is_score else values, "f32")
    return folder / "scaled.trace"


@pytest.mark.slow
def test_another_value_in_a_cache_of_float16_is_found(models: Models, tmp_path: Path) -> None:
    """Of no record of that op did its arithmetic fit, and what stood for V was not rounded as V is."""

    def keys_for_values(op: Op) -> Op:
        inputs = tuple(name.replace("attn_v", "attn_k_rope") for name in op.inputs)
        return replace(op, inputs=inputs) if op.kind == "weighted_values" else op

    model = models(replace(TINY, n_layer=2, n_embd=64, n_ff=96), "F32")
    result = check_trace(in_halves(model, tmp_path, keys_for_values), model)
    assert {(op.op, op.cause and op.cause.text) for op in result.faulty} == {
        (f"blk.{n}.attn_kqv", "reads attn_k_rope where attn_v belongs") for n in (0, 1)
    }


def test_loops_of_scores_count_heads_first() -> None:
    """Heads of which none was computed were tokens, of which none was meant."""
    loops = loops_of(Op("s", "scale", ("x",), (8, "T", "S"), attrs={"scale": 0.25}), [(8, 1, 5)])
    assert loops
    assert loops.numbers == {"H": 8, "T": 1, "S": 5, "scale": 0.25}
    assert "range(H * T * S)" in loops.source


def test_what_is_only_scaled_is_told_by_the_scores(models: Models, tmp_path: Path) -> None:
    """Engines show scores when they are scaled: which values the op before had of its cache was not solved for."""

    first: list[torch.Tensor] = []

    def overlapping(op: Op) -> Op:
        """The second layer's K begins a row after the first's, which in the next step is written over it."""

        def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            first[:] = first if layer_of(op.name) else [k]
            return KINDS["scores"].function(q, torch.cat((first[0][1:], k[-1:])) if layer_of(op.name) else k)

        return replace(op, function=function) if op.kind == "scores" else op

    model = models(replace(TINY, n_layer=2, n_embd=64, n_ff=96), "F32")
    result = check_trace(in_halves(model, tmp_path, overlapping), model)
    assert {(op.op, op.cause and op.cause.text) for op in result.faulty} == {
        (
            "blk.1.attn_scores_scaled",
            "attn_scores: each layer's cached attn_k_rope begins 32 values after that of the layer before: "
            "they overlap",
        )
    }


@pytest.mark.slow
def test_an_output_is_not_explained_by_itself(models: Models, tmp_path: Path) -> None:
    """Over one key attention copies V: any output followed from V in whose place the output lies."""

    def noisy(op: Op) -> Op:
        def function(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return weighted_values(p, v + _NOISE[: v.shape[2]] if len(v) == 1 else v)

        return replace(op, function=function) if op.kind == "weighted_values" else op

    model = models(replace(TINY, n_layer=2, n_embd=64, n_ff=96), "F32")
    result = check_trace(in_halves(model, tmp_path, noisy, 2), model)
    found = {(op.op, op.step, op.cause and op.cause.text) for op in result.faulty}
    assert found == {(f"blk.{n}.attn_kqv", 0, None) for n in (0, 1)}


_NOISE = torch.randn(64, generator=torch.Generator().manual_seed(3))


def test_a_region_ends_only_where_it_must() -> None:
    """Token 0 is not rotated by right code either: that heads are not is so for all tokens."""
    fits = np.zeros((3, 4), bool)
    fits[:, 1:] = fits[0] = True
    assert widest(Region((Along(0, 1), Along(1, 1))), fits) == Region((Along(1, 1),))
    fits[0, 2] = False
    assert widest(Region((Along(0, 1), Along(1, 1))), fits) == Region((Along(0, 1), Along(1, 1)))


@pytest.mark.parametrize("noun", ["cached value", "cached key", "key"])
def test_counts_that_grow_with_the_steps_are_said_without_a_number(noun: str) -> None:
    """One step's number was said of all: "only cached values 0 to 6", of ten steps."""
    assert taken(noun, range(8), range(7), follows=True) == (f"all {noun}s but the last", "", False)


def test_a_region_has_no_gaps_where_values_would_fit_as_well() -> None:
    """A cap left out from channel 8 on changes no small value: the others were four lists, a finding each."""
    wrong, fits = np.zeros((3, 12), bool), np.zeros((3, 12), bool)
    wrong[:, [8, 9, 11]], fits[:, 8:] = True, True
    (region,) = around(wrong)
    assert region.words(("token", "channel")) == "channels 8 to 9, 11"
    assert widest(region, fits).words(("token", "channel")) == "channels from 8 on"
    fits[1, 10] = False
    assert widest(region, fits) == region
