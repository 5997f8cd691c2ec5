"""Rows that are not a token's own: of the cache, where scores were not recorded, other positions', other sequences',
and what is left in a slot that nothing was written to; and of a batch, of which logits are made.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Models, some_of, trace_graph
from test_sequences import BATCHES
from torch import Tensor

from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import Cache, StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.weights import reading, values_of
from tracediff.names import StepOf, split
from tracediff.numerics.kinds import KINDS
from tracediff.pipeline import Effort, check_trace
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12)
READ = "attention reads other rows of the cache than the token's own"


def other_at_3(cached: Tensor) -> Tensor:
    return torch.cat((cached[:3], cached[1:2], cached[4:]))


def noise_like(rows: Tensor, seed: int) -> Tensor:
    return torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).to(rows)


def garbage_at_2(cached: Tensor) -> Tensor:
    """Of keys and of values others, the same in every step."""
    return torch.cat((cached[:2], noise_like(cached[:1], cached.shape[1]), cached[3:]))


def garbage_at_0_and_all_late(cached: Tensor) -> Tensor:
    return torch.cat((noise_like(cached[:1], 3), cached[:-1]))


def fused(path: Path, rows: Callable[[Tensor], Tensor], folder: Path, tokens: tuple[int, ...]) -> tuple[Path, Path]:
    """The trace of an engine that reads these rows of the cache and shows no scores, and its model."""
    model = Model(path)
    changed = [
        replace(op, function=lambda x, cached, right=KINDS[op.kind].function: right(x, rows(cached)))
        for op in model.graph
        if op.kind in ("scores", "weighted_values")
    ]
    whole = trace_graph(model.graph.changed(*changed), model.file, folder / "whole.trace", tokens, (97,))
    return some_of(whole, folder / "fused.trace", lambda op: not op.endswith(("attn_scores", "attn_probs"))), model.path


def overwrite(data: Path, record: OpRecord, values: np.ndarray) -> None:
    """A record's values in the data file by others."""
    with data.open("r+b") as file:
        file.seek(record.offset or 0)
        file.write(values.astype(np.float32).tobytes())


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (other_at_3, "the token at position 3 attends to positions 0, 2 and 2 times position 1, not to positions 0 to "
         "3"),
        pytest.param(garbage_at_2, "the tokens at positions 2 to 10 attend to a key and value that no step has cached, "
                     "in the place of position 2: as in a slot that was never written to", marks=pytest.mark.slow),
        pytest.param(garbage_at_0_and_all_late, "the tokens at positions 0 to 10 attend to a key and value that no "
                     "step has cached, in the place of the last that each should read: as in a slot that was never "
                     "written to", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_rows_of_the_cache_are_told(
    rows: Callable[[Tensor], Tensor], text: str, models: Models, tmp_path: Path
) -> None:
    path, model = fused(models("qwen3"), rows, tmp_path, TOKENS)
    (finding,) = check_trace(path, model).findings
    assert finding.text == (f"all 3 layers (seen in attn_kqv): {READ} (blk.0.attn_kqv in step 0: {text}).")


@pytest.mark.parametrize("arch", ["gpt-oss", pytest.param("deepseek2", marks=pytest.mark.slow)])
def test_rows_are_told_beside_sinks_and_of_latents(arch: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A sink is one more row; of a latent cache heads see views."""
    path, model = fused(tiny(arch), other_at_3, tmp_path, TOKENS)
    found = [finding.text for finding in check_trace(path, model).findings]
    said = "the token at position 3 attends to positions 0, 2 and 2 times position 1, not to positions 0 to 3"
    assert [text for text in found if READ in text and said in text] == found


def test_a_key_that_a_sum_leaves_out_is_no_row_that_was_never_written_to(models: Models, tmp_path: Path) -> None:
    """The sum of exponentials begins one key late, in steps of one token: two heads lie on lines that are parallel."""
    shape = Shape("llama", n_layer=2, n_embd=192, n_head=6, n_head_kv=1, n_ff=192, n_vocab=320, head_dim=32)
    model = Model(models(shape))

    def late(scores: Tensor, queries: Tensor, keys: Tensor, **attrs: Any) -> Tensor:
        probs = KINDS["softmax"].function(scores, queries, keys, **attrs)
        return probs / (1 - probs[..., :1]) if len(queries) == 1 else probs

    wrong = (replace(op, function=late) for op in model.graph if op.kind == "softmax")
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,))
    path = some_of(path, path, lambda op: op == "token_embd" or op.endswith(("attn_kqv", "ffn_residual")))
    result = check_trace(path, model.path, effort=Effort(seconds=5))
    assert {op.op for op in result.faulty} == {f"blk.{n}.attn_kqv" for n in range(2)}
    assert [finding.text for finding in result.findings if "no step has cached" in finding.text] == []


def test_rows_of_another_sequence_are_told(models: Models, tmp_path: Path) -> None:
    """What sequence 4 makes of sequence 0's keys and values, by numpy, in the place of what it made of its own."""
    model = models("qwen3", "F32")
    kept = ("attn_q_rope", "attn_k_rope", "attn_v", "attn_kqv", "ffn_residual")
    whole = trace_torch(model, tmp_path / "whole.trace", TorchOptions(), steps=BATCHES)
    last = "blk.2."
    path = some_of(
        whole, tmp_path / "some.trace", lambda op: op.endswith(kept) and op != f"{last}ffn_residual" and op != "output"
    )
    trace, here = Trace(path), StepOf(2, 4)

    def cached(name: str) -> np.ndarray:
        return np.concatenate([trace.values(trace.ops[step, last + name]) for step in (0, 1, 2)]).astype(np.float64)

    q = trace.values(trace.ops[here, f"{last}attn_q_rope"])[0].astype(np.float64)
    k, v = (cached(name).repeat(len(q) // cached(name).shape[1], 1) for name in ("attn_k_rope", "attn_v"))
    weights = np.exp(np.einsum("hd,nhd->hn", q, k) / math.sqrt(q.shape[1]))
    made = np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), v)
    overwrite(path.with_name("whole.bin"), trace.ops[here, f"{last}attn_kqv"], made)
    (finding,) = check_trace(path, model).findings
    assert finding.text == (
        "layer 2 (seen in attn_kqv), in step 2 of sequence 4: the token at position 3 attends to positions 0 to 7 of "
        "sequence 0, not to positions 0 to 3."
    )


def test_keys_of_another_sequence_are_told(models: Models, tmp_path: Path) -> None:
    """Where scores were recorded: those of sequence 4 with sequence 0's keys."""
    model, last, here = models("qwen3", "F32"), "blk.2.", StepOf(2, 4)
    whole = trace_torch(model, tmp_path / "whole.trace", TorchOptions(), steps=BATCHES)
    kept = ("attn_q_rope", "attn_k_rope", "attn_v", "ffn_residual")
    path = some_of(
        whole,
        tmp_path / "some.trace",
        lambda op: op == f"{last}attn_scores" or (op.endswith(kept) and op != f"{last}ffn_residual"),
    )
    trace = Trace(path)
    q = trace.values(trace.ops[here, f"{last}attn_q_rope"])[0]
    k = np.concatenate([trace.values(trace.ops[step, f"{last}attn_k_rope"]) for step in (0, 1, 2)])[:4]
    made = np.einsum("hd,nhd->hn", q, k.repeat(len(q) // k.shape[1], 1))
    overwrite(path.with_name("whole.bin"), trace.ops[here, f"{last}attn_scores"], made)
    (finding,) = check_trace(path, model).findings
    assert finding.text == (
        "attn_scores in layer 2, in step 2 of sequence 4: the keys at positions 0 to 3 are of positions 0 to 3 of "
        "sequence 0."
    )


def test_a_head_of_a_key_that_is_another_head_of_it_is_told(models: Models, tmp_path: Path) -> None:
    """As a decoded row is cached by a stride that is of prompts."""
    model = Model(models(Shape("qwen2", n_layer=2, n_embd=48, n_head=6, n_head_kv=2, n_ff=80)))

    def moved(q: Tensor, cached: Tensor, right: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        rows = cached.clone()
        rows[11:, 0] = cached[11:, 1]
        return right(q, rows)

    of_layer_1 = replace(model.graph["blk.1.attn_scores"], function=partial(moved, right=KINDS["scores"].function))
    graph = model.graph.changed(of_layer_1)
    trace = trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS, [9], [33])
    (finding,) = check_trace(trace, model).findings
    assert finding.text == (
        "attn_scores in layer 1, in steps 1, 2: keys are those of other positions, heads or sequences "
        "(blk.1.attn_scores in step 1: head 0 of the key at position 11 is head 1 of the same position)."
    )


def test_a_term_that_another_step_left_is_told(models: Models, tmp_path: Path) -> None:
    """The residual stream in a buffer that decoding does not fill, and what was written to another of them."""
    model, kept = Model(models("qwen3", "F32")), dict[str, Tensor]()

    def stale(name: str, y: Tensor, x: Tensor) -> Tensor:
        if len(x) > 1:
            kept[name] = {"attn_residual": x, "ffn_residual": x + y}[name][-1:]
        return (kept[name] if len(x) == 1 else x) + y

    names = ("attn_residual", "ffn_residual")
    assert all(model.graph[f"blk.1.{name}"].inputs[1].endswith("_residual") for name in names)
    changed = [replace(model.graph[f"blk.1.{name}"], function=partial(stale, name)) for name in names]
    trace = trace_graph(model.graph.changed(*changed), model.file, tmp_path / "t.trace", TOKENS, [9], [33])
    assert {finding.text for finding in check_trace(trace, model).findings} == {
        "attn_residual in layer 1, in steps 1, 2: the layer's input is that of earlier tokens "
        "(blk.1.attn_residual in step 1: the layer's input of position 11 is that of position 10).",
        "ffn_residual in layer 1, in steps 1, 2: attn_residual is ffn_residual of earlier tokens "
        "(blk.1.ffn_residual in step 1: attn_residual of position 11 is ffn_residual of position 10).",
    }


def test_logits_of_another_row_are_told(models: Models, tmp_path: Path) -> None:
    """As the last token's those of the one before it."""
    model = models("qwen3", "F32")
    path = trace_torch(model, tmp_path / "a.trace", TorchOptions(), TOKENS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (logits,) = (line for line in lines if line.get("op") == "output")
    n, width = logits["shape"]
    logits |= {"rows": [n - 1], "shape": [1, width], "offset": logits["offset"] + (n - 2) * width * 4}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = check_trace(path, model).findings
    assert finding.text == "output: the row of position 10 is that of position 9."


def test_logits_of_another_sequence_are_told(models: Models, tmp_path: Path) -> None:
    model = models("qwen3", "F32")
    path = trace_torch(model, tmp_path / "a.trace", TorchOptions(), steps=BATCHES)
    trace = Trace(path)
    records = [trace.ops[StepOf(2, sequence), "output"] for sequence in (0, 4)]
    rows = [trace.values(record) for record in records]
    for record, values in zip(records, reversed(rows), strict=True):
        overwrite(path.with_suffix(".bin"), record, values)
    (finding,) = check_trace(path, model).findings
    assert finding.text == (
        "output, in steps 2 of sequence 0, 2 of sequence 4: rows are made of those of other tokens (output in step 2 "
        "of sequence 0: the row of position 7 is that of position 3 of sequence 4)."
    )


@pytest.mark.slow
def test_what_no_rows_give_is_not_told(models: Models, tmp_path: Path) -> None:
    """Two slots that nothing was written to are more than a decoded token tells, and heads that read others no rows."""

    def two(cached: Tensor) -> Tensor:
        return torch.cat((cached[:1], noise_like(cached[:2], cached.shape[1]), cached[3:]))

    path, model = fused(models("qwen3"), two, tmp_path, TOKENS[:4])
    assert all(READ not in finding.text for finding in check_trace(path, model).findings if 1 in finding.steps)


@pytest.mark.parametrize("arch", ["mamba2", "qwen3next", "kimi-linear"])
def test_a_state_that_is_not_cleared_for_another_sequence_is_told(
    arch: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """A slot's states, of the convolution too, are there when the next request gets it."""
    model, path = Model(tiny(arch)), tmp_path / "a.trace"
    engine = TorchEngine(model.graph, model.weights(torch.float32))
    with TraceWriter(path, "torch", arch) as writer:
        fed = [0, 0]
        for step, (sequence, tokens) in enumerate([(0, TOKENS), (0, (9,)), (1, TOKENS[::-1]), (1, (7,)), (0, (5,))]):
            if sequence and not fed[sequence]:
                engine.caches[sequence] = Cache(model.graph, engine.caches[0].past, torch.float32)
                engine.caches[sequence].handed = dict(engine.caches[0].handed)
            positions = tuple(range(fed[sequence], fed[sequence] + len(tokens)))
            fed[sequence] += len(tokens)
            engine.run(step, StepInput(tokens, positions, (sequence,) * len(tokens)), TensorWriter(writer))
    result = check_trace(path, model.path)
    states = {split(op.name)[1] for op in model.graph if op.kind == "state"}
    assert {op.cause.text if op.cause else op.shape for op in result.faulty} == {
        f"{state} is what sequence 0 left: it is not cleared for another" for state in states
    }
    assert {str(op.step) for op in result.faulty} == {"2 of sequence 1"}
    (finding,) = result.findings
    assert finding.text.endswith("the sequence begins with what another left: its state is not cleared.")


@pytest.mark.parametrize("arch", ["mamba2", "lfm2"])
def test_a_state_that_sequences_share_is_told(arch: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Each goes on with what the other left, in the step before or in the one that they have in common."""
    model, path = Model(tiny(arch)), tmp_path / "a.trace"
    engine = TorchEngine(model.graph, model.weights(torch.float32))
    with TraceWriter(path, "torch", arch) as writer:
        fed = [0, 0]
        for step, (sequence, tokens) in enumerate([(0, TOKENS), (1, TOKENS[::-1]), (0, (9,)), (1, (7,)), (0, (5,))]):
            if step > 1:
                engine.caches[sequence].handed = dict(engine.caches[1 - sequence].handed)
            positions = tuple(range(fed[sequence], fed[sequence] + len(tokens)))
            fed[sequence] += len(tokens)
            engine.run(step, StepInput(tokens, positions, (sequence,) * len(tokens)), TensorWriter(writer))
    result = check_trace(path, model.path)
    assert {str(op.step) for op in result.faulty} == {"2 of sequence 0", "3 of sequence 1", "4 of sequence 0"}
    states = {split(op.name)[1] for op in model.graph if op.kind == "state"}
    assert {op.cause.text if op.cause else op.shape for op in result.faulty} == {
        f"{state} is what sequence {other} left, where its own belongs" for state in states for other in (0, 1)
    }
    (finding,) = result.findings
    assert "a sequence goes on with what another left: they share a state" in finding.text


def test_a_token_that_is_fed_the_one_before_is_told(models: Models, tmp_path: Path) -> None:
    """Not "the number of channels is taken for 768", which gave the right row in one step of three."""
    model = Model(models("qwen3"))
    late = {11: 33, 205: 11, 78: 205}
    ids = torch.tensor([late.get(token, token) for token in range(model.graph.hparams.n_vocab)])
    wrong = reading(model.graph["token_embd"], lambda file, info: values_of(file, info)[ids])
    graph = model.graph.changed(wrong)
    trace = trace_graph(graph, model.file, tmp_path / "t.trace", [1, 256, 17, 33], *([token] for token in late))
    (finding,) = check_trace(trace, model).findings
    assert finding.text == (
        "token_embd, in steps 1 to 3: rows are those of earlier tokens (token_embd in step 1: the row of position 4 is "
        "that of position 3)."
    )
