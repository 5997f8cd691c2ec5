"""Mistakes in the code for prompts alone, or for decoded tokens: behind hidden states, which hold no cache, and where a
state was not recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import SHAPES, Models, some_of, trace_graph

from tracediff.diagnose.budget import ENDLESS
from tracediff.diagnose.hypothesis import Assumed, Hypothesis
from tracediff.diagnose.kin import Faulty, Kin
from tracediff.model.graph import Graph, Op, View
from tracediff.model.model import Model
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.recurrent import ssm_conv
from tracediff.numerics.views import seen
from tracediff.pipeline import check_trace
from tracediff.replay.judging import Subject, replays_of
from tracediff.trace.reader import Trace

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12)

Edit = Callable[[Graph], Sequence[Op]]


def where(tokens: str, ops: Sequence[Op], wrong: Callable[..., torch.Tensor]) -> list[Op]:
    """The ops computed by `wrong` in steps of one token, or of several."""

    def as_it_is(op: Op) -> Callable[..., torch.Tensor]:
        right = KINDS[op.kind].function

        def function(x: torch.Tensor, *others: torch.Tensor, **attrs: object) -> torch.Tensor:
            return (wrong if (len(x) == 1) == (tokens == "one") else right)(x, *others, **attrs)

        return function

    return [replace(op, function=as_it_is(op)) for op in ops]


def named(graph: Graph, tail: str) -> list[Op]:
    return [op for op in graph if op.name.endswith(f".{tail}")]


def same(x: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
    return x


def halved(*given: torch.Tensor) -> torch.Tensor:
    return 0.5 * KINDS["linear"].function(*given)


def findings(model: Model, out: Path, ops: Sequence[Op], capture: str) -> list[str]:
    path = trace_graph(model.graph.changed(*ops), model.file, out, TOKENS, (97,), (110,), capture=capture)  # type: ignore[arg-type]
    return [finding.text for finding in check_trace(path, model.path).findings]


@pytest.mark.parametrize(
    ("tail", "tokens", "text"),
    [
        ("attn_k_norm", "one", "all {} layers (seen in ffn_residual), in steps 1, 2: attn_k_norm: the input passes "
         "through unchanged, in steps of one token alone."),
        pytest.param("attn_k_norm", "several", "all {} layers (seen in ffn_residual): attn_k_norm: the input passes "
                     "through unchanged, in steps of several tokens alone.", marks=pytest.mark.slow),
        pytest.param("attn_k_rope", "several", "all {} layers (seen in ffn_residual): attn_k_rope: the input passes "
                     "through unrotated, in steps of several tokens alone.", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_mistake_in_keys_of_one_sort_of_steps_is_named(
    tail: str, tokens: str, text: str, models: Models, tmp_path: Path
) -> None:
    model = Model(models("qwen3"))
    ops = where(tokens, named(model.graph, tail), same)
    assert findings(model, tmp_path / "mine.trace", ops, "layers") == [text.format(len(ops))]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["one", "several"])
def test_an_edit_that_nobody_listed_is_found_in_one_sort_of_steps(tokens: str, models: Models, tmp_path: Path) -> None:
    model = Model(models(replace(SHAPES["qwen2"], n_layer=2, n_embd=48, n_ff=64)))
    ops = where(tokens, named(model.graph, "attn_v"), halved)
    where_, said = {"one": (", in steps 1, 2", "one token"), "several": ("", "several tokens")}[tokens]
    assert findings(model, tmp_path / "mine.trace", ops, "layers") == [
        f"both layers (seen in ffn_residual){where_}: attn_v: every value is 0.5 times what it should be, "
        f"in steps of {said} alone."
    ]


@pytest.mark.slow
def test_a_mistake_of_decode_behind_a_state_is_named(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """What the convolution makes of the prompt is in the state that decode steps begin with."""
    model = Model(tiny("qwen3next"))
    ops = where("one", named(model.graph, "conv_output_silu"), same)
    said = findings(model, tmp_path / "mine.trace", ops, "layers")
    assert len(said) == 1
    assert said[0].endswith("in steps 1, 2: conv_output_silu: silu is not applied, in steps of one token alone.")


@pytest.mark.parametrize("recorded", ["every op", "no scaled scores"])
def test_prompts_with_another_window_and_decoding_without_one_are_two_mistakes(
    recorded: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """As candle's quantized gemma3 masks: keys up to the window's length back in prompts, and nothing of one token."""
    model = Model(tiny("gemma3"))
    of_window = [op for op in model.graph if op.kind == "softmax" and op.attrs.get("window") == 5]

    def masked(
        scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, *, scale: float, window: int
    ) -> torch.Tensor:
        if len(queries) > 1:
            return KINDS["softmax"].function(scores, queries, keys, scale=scale, window=window + 1)
        return KINDS["softmax"].function(scores, queries, keys, scale=scale)

    graph = model.graph.changed(*(replace(op, function=masked) for op in of_window))
    path = trace_graph(graph, model.file, tmp_path / "whole.trace", TOKENS, [7], [40])
    if recorded != "every op":
        path = some_of(path, tmp_path / "some.trace", lambda op: not op.endswith("attn_scores_scaled"))
    texts = {finding.text for finding in check_trace(path, model).findings}
    assert {text[text.index("in step") :] for text in texts} == {
        f"in step 0: {'' if recorded == 'every op' else 'attn_probs: '}a window of 6 instead of one of 5.",
        f"in steps 1, 2: {'' if recorded == 'every op' else 'attn_probs: '}no window instead of one of 5.",
    }


def test_new_keys_before_those_that_are_cached_are_told(models: Models, tmp_path: Path) -> None:
    """torch.cat((k, cached)): in the first decoded step the keys are rotated by one, in no other."""
    model = Model(models("qwen3"))
    n = len(TOKENS)

    def newest_first(q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        return KINDS["scores"].function(q, torch.cat((cached[n:].flip(0), cached[:n])))

    wrong = [replace(op, function=newest_first) for op in model.graph if op.kind == "scores"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", TOKENS, [7], [40], [9])
    (finding,) = check_trace(path, model).findings
    assert finding.text == (
        f"attn_scores in all 3 layers, in steps 1 to 3: each key from {n} on is put before those that are there "
        "already, not after them."
    )


@pytest.mark.slow
def test_a_sum_over_whole_blocks_of_keys_is_told_in_all_steps(models: Models, tmp_path: Path) -> None:
    """The exponentials of a softmax, of which a loop takes four at a time: in steps of 11, 13 and 14 keys other numbers
    are left out, and in that of 12 none.
    """
    model = Model(models("qwen3"))

    def softmax(scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, *, scale: float) -> torch.Tensor:
        hidden = keys[None, :] > queries[:, None]
        e = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        return e / e[..., : len(keys) // 4 * 4].sum(-1, keepdim=True)

    wrong = [replace(op, function=softmax) for op in model.graph if op.kind == "softmax"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", TOKENS, [7], [40], [9])
    (finding,) = check_trace(path, model).findings
    assert finding.text == (
        "attn_probs in all 3 layers, in steps 0, 2, 3: the sum takes whole blocks of 4 keys alone: those of a last one "
        "that is not full are left out."
    )


@pytest.mark.parametrize(
    ("taps", "said"),
    [([1, 2, 3, 0], "the taps of the kernel are rotated: the last column meets tap 0 of 4"), ([3, 1, 2, 0], "")],
)
def test_what_explains_steps_of_no_state_alone_is_not_said(
    taps: list[int], said: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Token by token: in the first the last tap is all that is told, so a ring that begins at another column, and two
    taps that are exchanged, were "in the reverse order" there.
    """
    model = Model(tiny("mamba"))
    convs = [op for op in model.graph if op.kind == "ssm_conv"]
    wrong = [replace(op, function=lambda x, w: ssm_conv(x, w[..., taps])) for op in convs]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", *([token] for token in TOKENS))
    some = some_of(path, tmp_path / "some.trace", lambda op: "conv" not in op or op.endswith(".add"))
    (finding,) = check_trace(some, model).findings
    assert said in finding.text
    assert "reverse" not in finding.text


def test_what_attention_reads_of_this_step_is_no_choice(models: Models, tmp_path: Path) -> None:
    """A mistake in K was taken for one that only chooses, for attention reads K of all steps: single rows told little
    of it then.
    """
    model = Model(models("qwen3"))
    path = trace_graph(model.graph, model.file, tmp_path / "mine.trace", TOKENS, capture="layers")
    (replay,) = replays_of(model, [Subject(Trace(path), {})])
    record = replay.trace.ops[0, "blk.0.ffn_residual"]
    one = Faulty(0, record, replay.judge(record))
    kin = Kin(replay, ENDLESS, {}, [one])
    tried = Hypothesis((Assumed("norm_skipped", "", "", False),), (model.graph["blk.0.attn_k_norm"],), one.error)
    assert not kin.only_chooses(tried, record)


def test_a_view_of_what_is_a_part_of_another_begins_where_that_does() -> None:
    """Of one token a part of a row lies in one piece, and was not copied."""
    row = torch.arange(12.0).reshape(1, 12)
    part = seen(View(("T", 2, 3), (12, 3, 1), 6), 1, 1, row)
    assert seen(View(("T", 6), (6, 1), 0), 1, 1, part).tolist() == [[6, 7, 8, 9, 10, 11]]
