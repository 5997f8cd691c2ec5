"""Findings: one cause is one entry, and its sentence is true of all that it names."""

from dataclasses import replace

import pytest

from tracediff.audit.causes import IN_MEMORY
from tracediff.diagnose.mistakes import BANK
from tracediff.findings.mistakes import findings, in_common, unnamed
from tracediff.findings.places import runs
from tracediff.names import kind_of, layer_of
from tracediff.result import Cause, Local, OpResult, WeightResult, Worst

WORST = Worst((0,), 0.0, 1.0)
SOUND = Local(1e-15, 1e-12, 0.1, WORST, "exact", ("x",), "sound")


def sound(name: str, step: int = 0, type: str | None = None) -> OpResult:
    return OpResult(name, step, layer_of(name), kind_of(name), "ok", local=replace(SOUND, weight_type=type))


def faulty(op: OpResult, mistake: str = "", text: str = "", shape: str | None = None, nmse: float = 0.5) -> OpResult:
    assert op.local
    cause = Cause(mistake, 1e-15, text, 1e-12, "exact", {mistake: text}, {mistake: "the code"}) if mistake else None
    local = replace(op.local, nmse=nmse, judgement="faulty")
    return replace(op, status="faulty", local=local, cause=cause, shape=shape)


def model(n_layer: int = 3, steps: int = 1) -> list[OpResult]:
    """Norms, projections of Q4_K and Q6_K, logits of Q6_K."""
    types = {"attn_norm": None, "attn_q": "Q4_K", "attn_v": "Q6_K", "ffn_norm": None}
    ops = []
    for step in range(steps):
        ops += [sound(f"blk.{n}.{name}", step, type) for n in range(n_layer) for name, type in types.items()]
        ops += [sound("output_norm", step), sound("output", step, "Q6_K")]
    return ops


def texts(ops: list[OpResult], weights: tuple[WeightResult, ...] = ()) -> list[str]:
    return [finding.text for finding in findings(ops, weights)]


def made_wrong(ops: list[OpResult], which, mistake: str, text: str) -> list[OpResult]:
    return [faulty(op, mistake, text.format(op=op.op)) if which(op) else op for op in ops]


def wrong_weight(name: str, note: str, cause: str | None = None, type: str | None = "F32") -> WeightResult:
    return WeightResult(name, "wrong", None, None, 1.0, note, cause, "the loader", type)


def test_all_norms_are_one_finding() -> None:
    ops = made_wrong(model(), lambda op: op.kind == "rms_norm", "eps", "eps is 1e-05 instead of 1e-06")
    assert texts(ops) == ["all 7 norms: eps is 1e-05 instead of 1e-06."]


def test_every_tensor_of_a_type_is_one_finding() -> None:
    def which(op: OpResult) -> bool:
        return op.local is not None and op.local.weight_type == "Q6_K"

    ops = made_wrong(model(), which, "q6_k_order", "Q6_K's values are in the order of their bytes ({op}.weight)")
    assert texts(ops) == ["every Q6_K tensor (4): Q6_K's values are in the order of their bytes."]
    one_is_right = [sound("blk.1.attn_v", 0, "Q6_K") if op.op == "blk.1.attn_v" else op for op in ops]
    assert texts(one_is_right) == [
        "attn_v in 2 of 3 layers (0, 2), and output: Q6_K's values are in the order of their bytes."
    ]


def test_matmuls_of_a_type_that_nothing_explains_are_one_finding() -> None:
    """A table of the same type is right: another function reads it. One more finding for each name was hard to read."""
    ops = [sound("token_embd", 0, "Q6_K"), *model()]
    wrong = {"blk.0.attn_v", "blk.1.attn_v", "blk.2.attn_v", "output"}
    ops = [faulty(op, shape="no value is right") if op.op in wrong else op for op in ops]
    (finding,) = findings(ops, ())
    assert finding.text == "all 4 matmuls of Q6_K weights: wrong, and no known mistake explains it (no value is right)."
    assert finding.look == (
        "what they share, and ops that are right do not: how blocks of Q6_K are read and multiplied"
    )
    one_is_right = [sound(op.op, 0, "Q6_K") if op.op == "blk.1.attn_v" else op for op in ops]
    assert [text.partition(":")[0] for text in texts(one_is_right)] == ["attn_v in 2 of 3 layers (0, 2)", "output"]


def test_a_place_is_true_of_each_op_that_it_names() -> None:
    """attn_q is wrong everywhere, attn_v in one layer alone."""
    wrong = {"blk.0.attn_q", "blk.1.attn_q", "blk.2.attn_q", "blk.1.attn_v"}
    ops = made_wrong(model(), lambda op: op.op in wrong, "bias_missing", "{op}.bias is not added")
    assert texts(ops) == ["attn_q in all 3 layers, and attn_v in layer 1: the bias is not added."]


def test_other_layers_are_named_from_where_the_op_stands() -> None:
    def text(n: int) -> str:
        return f"blk.{n}.attn_norm is added where blk.{n - 1}.ffn_residual belongs"

    ops = [faulty(sound(f"blk.{n}.attn_residual"), "residual_normed", text(n)) for n in (1, 2)]
    assert texts(ops) == [
        "attn_residual in both layers: attn_norm is added where ffn_residual of the layer before belongs."
    ]
    assert unnamed("blk.4.attn_q is read", "output") == "blk.4.attn_q is read"


def test_one_mistake_in_ops_that_read_others_is_one_finding() -> None:
    def op(which: str, layer: int) -> OpResult:
        text = f"channels from 4 on: attn_{which} passes through unchanged"
        return replace(faulty(sound(f"blk.{layer}.attn_{which}_rope"), "solved", text), reads=f"attn_{which}")

    assert texts([op("q", 0), op("k", 0), op("q", 1), op("k", 1)]) == [
        "attn_q_rope and attn_k_rope in both layers: channels from 4 on: its input passes through unchanged."
    ]
    assert texts([op("q", 0), op("q", 1)]) == [
        "attn_q_rope in both layers: channels from 4 on: attn_q passes through unchanged."
    ]


def test_the_stream_is_one_value_in_all_layers() -> None:
    """What the first layer reads is called otherwise than what the others do."""

    def wrong(first: str, text: str) -> list[str]:
        return texts(
            [
                replace(
                    faulty(op, "solved", text.format(first if op.layer == 0 else f"blk.{op.layer - 1}.ffn_residual")),
                    reads="attn_output",
                )
                if op.op.endswith("ffn_norm")
                else op
                for op in model()
            ]
        )

    said = "reads attn_output + {} where attn_output belongs"
    everywhere = "ffn_norm in all 3 layers: " + said.format("the layer's input") + "."
    for first in ("token_embd", "token_embd_scaled", "inpL"):
        assert wrong(first, said) == [everywhere]
    assert wrong("attn_q", said) == [
        f"ffn_norm in layer 0: {said.format('attn_q')}.",
        f"ffn_norm in 2 of 3 layers (1, 2): {said.format('ffn_residual of the layer before')}.",
    ]


def test_own_weights_are_not_named_where_ops_are_several() -> None:
    def op(name: str) -> OpResult:
        text = f"the output is computed with x + {name}.weight, where x * {name}.weight belongs"
        return faulty(sound(f"blk.0.{name}"), "solved", text)

    assert texts([op("attn_norm"), op("ffn_norm")]) == [
        "all 2 norms: the output is computed with x + the weight, where x * the weight belongs."
    ]


def test_a_mistake_that_has_words_for_several_ops_is_one_finding() -> None:
    def op(name: str, layer: int) -> OpResult:
        wrong = faulty(sound(f"blk.{layer}.{name}"), "residual_dropped", f"blk.{layer}.{name[:4]} is not added")
        return replace(wrong, common={"residual_dropped": "the residual stream is not added"})

    ops = [op("attn_residual", 0), op("ffn_residual", 0), op("attn_residual", 1), op("ffn_residual", 1)]
    assert texts(ops) == ["attn_residual and ffn_residual in both layers: the residual stream is not added."]
    assert texts(ops[:1]) == ["attn_residual in layer 0: blk.0.attn is not added."]


def test_fitted_numbers_are_a_range_and_counts_are_not() -> None:
    ops = [faulty(sound(f"blk.{n}.attn_norm"), "eps", f"eps is {3.5 + n}e-06 instead of 1e-06") for n in range(3)]
    assert texts(ops) == ["attn_norm in all 3 layers: eps is 3.5e-06 to 5.5e-06 instead of 1e-06."]
    heads = [faulty(sound(f"blk.{n}.attn_k"), "kv_permuted_as_q", f"permuted as {n + 4} heads") for n in range(2)]
    assert texts(heads) == ["attn_k in layer 0: permuted as 4 heads.", "attn_k in layer 1: permuted as 5 heads."]
    assert in_common(["by 2.5e-01", "by 1.5"]) == "by 2.5e-01 to 1.5"


def test_steps_are_said_where_the_mistake_is_not_in_all() -> None:
    def which(op: OpResult) -> bool:
        return op.op.endswith("attn_q") and op.step > 0

    ops = made_wrong(model(steps=4), which, "cache_ignored", "a step sees only its own tokens")
    assert texts(ops) == ["attn_q in all 3 layers, in steps 1 to 3: a step sees only its own tokens."]


def test_steps_are_those_of_each_op_that_is_named() -> None:
    """In layer 2 it is in the last step alone: layers and steps are no rectangle, but where others only hide it."""

    def which(op: OpResult) -> bool:
        return op.op.endswith("attn_q") and (op.layer != 2 or op.step == 2)

    def in_some(ops: list[OpResult]) -> list[OpResult]:
        return [replace(op, in_some_steps=op.status == "faulty") for op in ops]

    ops = made_wrong(model(steps=3), which, "cache_ignored", "a step sees only its own tokens")
    assert texts(ops) == ["attn_q in all 3 layers: a step sees only its own tokens."]
    assert texts(in_some(ops)) == [
        "attn_q in 2 of 3 layers (0, 1), in every step; attn_q in layer 2, in step 2: a step sees only its own tokens."
    ]
    later = made_wrong(model(steps=3), lambda op: which(op) and op.step > 0, "cache_ignored", "sees its own tokens")
    assert texts(in_some(later)) == [
        "attn_q in 2 of 3 layers (0, 1), in steps 1, 2; attn_q in layer 2, in step 2: sees its own tokens."
    ]


def test_the_shape_of_an_error_is_of_the_step_that_it_is_of() -> None:
    shapes = ["wrong in 2 of 5 tokens: 3-4", "all values are zero"]
    ops = [faulty(sound("blk.0.attn_q", step), shape=shape) for step, shape in enumerate(shapes)]
    assert texts(ops) == [
        "attn_q in layer 0: wrong, and no known mistake explains it (blk.0.attn_q in step 0: wrong in 2 of 5 tokens: "
        "3-4)."
    ]


def test_what_is_explained_comes_first_and_shapes_are_of_the_op_that_they_are_of() -> None:
    ops = [
        faulty(sound("blk.0.attn_q"), shape="every value is 2 times what it should be"),
        faulty(sound("blk.1.attn_q"), shape="all values are zero"),
        faulty(sound("blk.1.attn_v"), "weight_zero", "never loaded"),
    ]
    assert texts(ops) == [
        "attn_v in layer 1: never loaded.",
        "attn_q in both layers: wrong, and no known mistake explains it (blk.0.attn_q: every value is 2 times what it "
        "should be).",
    ]


def test_a_wrong_weight_and_the_ops_that_it_spoils_are_one() -> None:
    names = ("blk.0.attn_norm", "blk.1.attn_norm", "blk.2.attn_norm")
    ops = [faulty(op, "norm_scaled", "multiplied by 0.14") if op.op in names else op for op in model()]
    weights = tuple(wrong_weight(f"{name}.weight", "multiplied by 0.14", "norm_scaled") for name in names)
    (found,) = findings(ops, weights)
    assert found.text == (
        "attn_norm.weight in all 3 layers: wrong in memory: multiplied by 0.14; so attn_norm in all 3 layers are wrong."
    )
    assert (found.mistake, found.ops, found.nmse, found.look) == ("norm_scaled", names, 0.5, "the loader")
    assert found.weights == tuple(f"{name}.weight" for name in names)


def test_another_mistake_in_the_same_op_stays_apart() -> None:
    op = faulty(sound("output_norm"), "eps", "eps is 1e-05 instead of 1e-06")
    weight = wrong_weight("output_norm.weight", "1 was added to every value", "norm_weight_plus_one")
    assert texts([op], (weight,)) == [
        "output_norm.weight: wrong in memory: 1 was added to every value.",
        "output_norm: eps is 1e-05 instead of 1e-06.",
    ]


def test_an_op_that_a_wrong_weight_does_not_explain_stays_apart() -> None:
    """Judged with the weight as it is held, it is as wrong."""
    op, weight = faulty(sound("output_norm"), shape="all values are NaN"), wrong_weight("output_norm.weight", "doubled")
    assert texts([op], (weight,)) == [
        "output_norm.weight: wrong in memory: doubled.",
        "output_norm: wrong, and no known mistake explains it (all values are NaN).",
    ]


def test_a_weight_that_spoils_nothing_is_said_to_be_another_form() -> None:
    (said,) = texts(model(1), (wrong_weight("blk.0.attn_norm.weight", "1 was taken from every value"),))
    assert said == (
        "blk.0.attn_norm.weight: wrong in memory: 1 was taken from every value; yet attn_norm in layer 0 is computed "
        "as it should be: is the weight recorded in another form than the one that is used?"
    )


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([3], "3"), ([0, 1], "0, 1"), ([1, 2, 3, 7], "1 to 3, 7"), ([0, 2, 4, 6, 8, 10, 12], "0, 2, 4, 6, 8, 10, ...")],
)
def test_runs(numbers: list[int], said: str) -> None:
    assert runs(numbers) == said


def test_loaders_mistakes_have_one_name() -> None:
    """Those of recorded weights are the bank's, or in a list of their own, with where to look."""
    import inspect
    import re

    from tracediff.audit import causes, held

    source = inspect.getsource(causes) + inspect.getsource(held)
    named = {*re.findall(r'Reading\(\s*"(\w+)"', source), *re.findall(r'(?:=|return|if|else) "(\w+_\w+)"', source)}
    assert len(named) > 10
    assert named <= {*BANK, *IN_MEMORY}
    assert not {*BANK} & {*IN_MEMORY}
