"""Latent attention in the two forms that engines have: keys and values of each head, and llama.cpp's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from conftest import some_of, trace_graph

from tracediff import Recorder
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import TraceError
from tracediff.inspect.validate import validate
from tracediff.judge import Policy
from tracediff.model.families import load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph
from tracediff.model.latent import expanded
from tracediff.model.model import Model
from tracediff.model.synthetic import quantize
from tracediff.model.weights import Weights
from tracediff.names import Capture
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace, compare_traces
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

TOKENS, NEXT = (5, 9, 17, 33, 70, 2, 14, 21, 8), 8
CACHED = scheme_named("exact, KV cache in float16")
Tiny = Callable[[str], Path]


def of_heads(path: Path) -> Graph:
    graph = expanded(load_graph(path))
    assert graph
    return graph


# With rope and without, queries scaled by their positions, values gated.
@pytest.mark.parametrize("arch", ["deepseek2", "kimi-linear", "mistral4", "bailingmoe3"])
def test_both_forms_compute_the_same(arch: str, tiny: Tiny) -> None:
    model = Model(tiny(arch))
    made = []
    for graph in (model.graph, of_heads(model.path)):
        engine = TorchEngine(graph, Weights(model.file, torch.float64))
        steps = StepInput(TOKENS, tuple(range(len(TOKENS)))), StepInput((NEXT,), (len(TOKENS),))
        made.append(torch.cat([engine.run(step, given) for step, given in enumerate(steps)]))
    assert torch.allclose(*made, rtol=1e-12, atol=1e-12)


def test_other_attention_has_one_form(tiny: Tiny) -> None:
    assert expanded(load_graph(tiny("minicpm3"))) is None  # whose graph has keys and values of each head
    assert expanded(load_graph(tiny("gemma2"))) is None


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_an_engine_that_caches_keys_and_values_of_each_head_is_right(capture: str, tiny: Tiny, tmp_path: Path) -> None:
    """In float16, which rounds others than the latent: that alone was wrong by 2e-8."""
    model = Model(tiny("deepseek2"))
    graph = of_heads(model.path)
    path = trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS, (NEXT,), capture=capture, scheme=CACHED)
    result = check_trace(path, model.path)
    assert result.verdict == "match"
    assert any("judged with keys and values of each head" in note for note in result.notes)
    assert validate(path, model.path).n_violations == 0


def test_either_form_may_be_recorded_call_by_call(tiny: Tiny, tmp_path: Path) -> None:
    """A recorder that knew the model refused heads where it knows latents."""
    model = Model(tiny("deepseek2"))
    for n, graph in enumerate((model.graph, of_heads(model.path))):
        path = trace_graph(graph, model.file, tmp_path / f"{n}.trace", TOKENS)
        trace = Trace(path)
        with Recorder(tmp_path / f"{n}.again.trace", gguf=model.path) as recorder:
            recorder.step(TOKENS)
            for (_, op), record in trace.ops.items():
                recorder(op, trace.values(record))
            recorder.step(TOKENS[:1])
            with pytest.raises(TraceError, match=r"shape \[1, 6, 7\] in step 1; this model's is \[.*\] or \[.*\] for"):
                recorder("blk.0.attn_q_rope", np.zeros((1, 6, 7), np.float32))
        assert check_trace(tmp_path / f"{n}.again.trace", model.path).verdict == "match"


def test_records_of_each_head_are_judged_though_they_are_most(tiny: Tiny, tmp_path: Path, cli) -> None:
    """Of other shapes than llama.cpp's: the trace was refused as that of another model."""
    model = Model(tiny("deepseek2"))
    graph = of_heads(model.path)

    def unlike(probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cos(3 * torch.einsum("hts,shd->thd", probs, values)).flatten(1)

    wrong = replace(graph["blk.1.attn_kqv"], function=unlike)
    whole = trace_graph(graph.changed(wrong), model.file, tmp_path / "all.trace", TOKENS)
    names = ("attn_q_rope", "attn_k_rope", "attn_v", "attn_probs", "attn_kqv")
    kept = {f"blk.{n}.{name}" for n in range(2) for name in names}
    path = some_of(whole, tmp_path / "t.trace", kept.__contains__)
    result = check_trace(path, model.path, effort=Effort(seconds=5))
    assert {op.op for op in result.faulty} == {"blk.1.attn_kqv"}
    given = ("reproduce", path, "--model", model.path, "--op", "blk.1.attn_kqv", "--out", tmp_path / "case")
    code, text, said = cli(*given)
    assert code == 0, (text, said)


def test_what_two_sides_make_in_two_ways_is_not_compared(tiny: Tiny, tmp_path: Path, llama_cpp_trace) -> None:
    model = Model(tiny("deepseek2"))
    reference = llama_cpp_trace(model.path, tokens=TOKENS, n_decode=0)
    path = trace_graph(of_heads(model.path), model.file, tmp_path / "t.trace", TOKENS, scheme=CACHED)
    result = compare_traces(reference, path, model=model.path)
    assert result.verdict == "match"
    apart = {op.op for op in result.ops if op.note and "in another way" in op.note}
    assert apart >= {"blk.1.attn_k_b", "blk.1.attn_q_rope", "blk.1.attn_k_rope", "blk.1.attn_kqv", "blk.1.attn_v_b"}


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["all", "layers"])
def test_mistakes_of_keys_and_values_of_each_head_are_named(capture: str, tiny: Tiny, tmp_path: Path) -> None:
    model = Model(tiny("deepseek2"))
    graph = of_heads(model.path)
    keys = graph["blk.1.attn_k_nope"]
    of_another_layer = replace(keys, weights=(replace(keys.weights[0], name="blk.0.attn_k_b.weight"),))
    wrong = graph.changed(of_another_layer)
    path = trace_graph(wrong, model.file, tmp_path / "t.trace", TOKENS, (NEXT,), capture=capture, scheme=CACHED)
    (finding,) = check_trace(path, model.path).findings
    assert finding.mistake == "wrong_layer"
    assert "attn_k_nope" in finding.text
    assert "the weights of the layer before are used" in finding.text


def test_mistakes_elsewhere_are_judged_in_the_models_own_form(tiny: Tiny, tmp_path: Path) -> None:
    model = Model(tiny("deepseek2"))
    wrong = model.graph.changed(model.graph["blk.1.attn_probs"].with_attrs(scale=24**-0.5))
    path = trace_graph(wrong, model.file, tmp_path / "t.trace", TOKENS, (NEXT,), scheme=CACHED)
    result = check_trace(path, model.path)
    assert [op.op for op in result.faulty] == ["blk.1.attn_probs"] * 2
    assert not any("each head" in note for note in result.notes)


@pytest.mark.parametrize(
    ("power", "words"), [(0, "without YaRN's mscale^2"), (1, "times YaRN's mscale, which belongs squared")]
)
def test_the_power_of_mscale_that_a_scale_has_is_said(power: int, words: str, tmp_path: Path) -> None:
    """Scores of latent attention are scaled by mscale^2 / sqrt(40) here."""
    yarn = {"type": "yarn", "factor": 8.0, "original_context_length": 64, "yarn_log_multiplier": 0.0707}
    others = {f"rope.scaling.{name}": value for name, value in yarn.items()}
    model = Model(tiny_models.write("deepseek2", tmp_path / "yarn.gguf", others=others | {"context_length": 512}))
    scaled = [op for op in model.graph if op.kind == "softmax"]
    right = scaled[0].attrs["scale"]
    scale = right / (right * 40**0.5) ** (1 - power / 2)
    wrong = (op.with_attrs(scale=scale) for op in scaled)
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", TOKENS)
    (finding,) = check_trace(path, model.path).findings
    assert finding.text.endswith(f"the attention scale is 1/sqrt(40) {words} ({scale:.4g} instead of {right:.4g}).")


def test_a_table_in_half_precision_hides_no_mistake_of_a_trace_in_float32(tiny: Tiny, tmp_path: Path) -> None:
    """All its rows fit bfloat16: that says nothing of what the engine stores them in."""
    model = quantize(tiny("deepseek2"), tmp_path / "bf16.gguf", "BF16")
    path = trace_graph(load_graph(model), GGUFFile(model), tmp_path / "t.trace", TOKENS)
    result = check_trace(path, model, policy=Policy(resolve=1e-6))
    assert result.verdict == "match"


def in_both_forms(
    model: Model,
    *graphs: Graph,
    out: Path,
    capture: Capture = "all",
    steps: Sequence[Sequence[int]] = (TOKENS, (NEXT,), TOKENS[:1]),
) -> Path:
    """The trace of an engine that computes the prompt as the first graph has it, and decode steps as the other; in
    float64, in which its cache is the same by either.
    """
    engines, at = [TorchEngine(graph, model.weights(torch.float64)) for graph in graphs], 0
    with TraceWriter(out, "server", model.graph.hparams.arch) as writer:
        for step, tokens in enumerate(steps):
            given = StepInput(tuple(tokens), tuple(range(at, at + len(tokens))))
            at += len(tokens)
            for form, engine in enumerate(engines):
                if form == min(step, 1):
                    engine.run(step, given, TensorWriter(writer, capture))
                else:
                    engine.run(step, given)
    return out


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_prompts_may_have_keys_of_each_head_and_decode_steps_the_latent(
    capture: str, tiny: Tiny, tmp_path: Path
) -> None:
    """As vLLM and SGLang compute: one form was chosen for all of a trace, and every step in the other was misshapen."""
    model = Model(tiny("deepseek2"))
    path = in_both_forms(model, of_heads(model.path), model.graph, out=tmp_path / "t.trace", capture=capture)
    result = check_trace(path, model.path)
    assert result.verdict == "match"
    assert sum("1 step (first 0) of 3 judged with keys and values of each head" in n for n in result.notes) == (
        capture == "all"
    )
    assert validate(path, model.path).n_violations == 0


def test_what_two_sides_make_alike_in_some_steps_is_compared_there(tiny: Tiny, tmp_path: Path, llama_cpp_trace) -> None:
    model = Model(tiny("deepseek2"))
    reference = llama_cpp_trace(model.path, tokens=TOKENS, n_decode=2)
    fed = [step.tokens for step in Trace(reference).steps.values()]
    path = in_both_forms(model, of_heads(model.path), model.graph, out=tmp_path / "t.trace", steps=fed)
    result = compare_traces(reference, path, model=model.path)
    assert result.verdict == "match"
    assert {op.step for op in result.ops if op.op == "blk.1.attn_kqv" and op.note and "in another way" in op.note} == {
        0
    }
    assert {op.step for op in result.ops if op.op == "blk.1.attn_kqv" and op.drift} == {1, 2}


@pytest.mark.parametrize(("op", "steps"), [("attn_v", (0,)), ("attn_v_b", (1, 2))])
def test_a_mistake_in_either_form_is_explained_as_it_was_computed(
    op: str, steps: tuple[int, ...], tiny: Tiny, tmp_path: Path
) -> None:
    model = Model(tiny("deepseek2"))

    def mistaken(graph: Graph) -> Graph:
        right = graph.ops.get(f"blk.1.{op}")
        of_another_layer = [replace(w, name=w.name.replace("blk.1", "blk.0")) for w in right.weights] if right else ()
        return graph.changed(replace(right, weights=tuple(of_another_layer))) if right and of_another_layer else graph

    graphs = map(mistaken, (of_heads(model.path), model.graph))
    path = in_both_forms(model, *graphs, out=tmp_path / "t.trace")
    (finding,) = check_trace(path, model.path).findings
    assert (finding.mistake, finding.ops, finding.steps) == ("wrong_layer", (f"blk.1.{op}",), steps)
