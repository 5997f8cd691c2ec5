"""Each kind of op against ggml's own: the value is right, and the floor holds what ggml errs by, and little more."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chunked import ssd
from ggml_op import Quantised, compute
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op, Weight
from tracediff.model.weights import Weights
from tracediff.names import NAMES, axes_of
from tracediff.numerics.arithmetic import Arithmetic, Scheme
from tracediff.numerics.evaluate import arithmetic_of, evaluate, noise
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import mask, softmax, temperature
from tracediff.numerics.kinds.kind import Energy
from tracediff.numerics.kinds.layout import hadamard, set_rows
from tracediff.numerics.kinds.positional import decays, relative_buckets, scale_by_tokens
from tracediff.numerics.kinds.reduction import argsort, top_k
from tracediff.numerics.nmse import nmse
from tracediff.numerics.schemes import scheme_named

T, H, D, N = 7, 3, 16, 40  # tokens, heads, channels of a head, channels
GGML, EXACT = scheme_named("llama.cpp"), scheme_named("exact")


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Values as loud as real ones: channels differ."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape) * rng.uniform(0.2, 3.0, shape[-1]) * scale).astype(np.float32)


def within(low: float, high: float, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


def ids(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([7, *shape]).integers(0, high, shape).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """An op of a kind with its operands, and the same in ggml: that function, these operands and `numbers`."""

    kind: str
    inputs: tuple[np.ndarray, ...]
    weights: tuple[Any, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    ggml: str | Callable[..., np.ndarray] = ""  # by default of the kind's name
    numbers: tuple[Any, ...] = ()
    note: str = ""
    floor: float = 1e-11  # the NMSE of the whole that must be seen
    past: tuple[bool, ...] = ()
    scheme: Scheme = GGML

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.note)))

    def by_ggml(self) -> np.ndarray:
        if callable(self.ggml):
            return self.ggml(*self.inputs, *self.weights)
        return compute(self.ggml or self.kind, *self.inputs, *self.weights, *self.numbers)


def one(kind: str, *inputs: np.ndarray, **rest: Any) -> Case:
    return Case(kind, inputs, **rest)


X, Y, W = normal(T, N), normal(T, N, seed=1), normal(N)
HALF = within(-1, 1, T, 9).astype(np.float16)
CHOSEN = np.stack([np.random.default_rng(t).permutation(5)[:2] for t in range(T)]).astype(np.int32)
STATE, Q, K, V = (
    normal(H, D, D),
    normal(T, H, D, scale=0.3),
    normal(T, H, D, seed=1, scale=0.3),
    normal(T, H, D, seed=2),
)
OF_64 = [normal(T, H, 64, seed=i, scale=0.1) for i in range(5)]  # ggml's AVX-512 reads beyond heads of 16 channels
FORGET, BETA = within(0.6, 0.99, T, H, D), within(0.1, 0.9, T, H, 1)
LOWER = np.tril(normal(8, 8)) + 4 * np.eye(8, dtype=np.float32)
UNARY = (
    "silu", "gelu", "gelu_quick", "gelu_erf", "relu", "sigmoid", "tanh", "elu", "hardsigmoid", "hardswish", "softplus",
    "exp", "expm1", "sqr", "neg", "abs", "floor", "ceil", "round", "trunc", "step", "sgn", "sin", "cos", "argmax",
)  # fmt: skip


def quantised(*types: str, columns: int = 64) -> list[Quantised]:
    return [Quantised(normal(5, 24, columns), name) for name in types]


def scan(state, x, dt, b, c, a):  # type: ignore[no-untyped-def]
    operands = state[None], x[None], dt[None], a, b[None], c[None], np.zeros(1, np.int32)
    return compute("ssm_scan", *operands, 1)


def delta(*operands: np.ndarray) -> np.ndarray:
    return compute("gated_delta_net", *(x[None] for x in operands), 1)


def xielu(x: np.ndarray) -> np.ndarray:  # ggml takes logarithms of what it keeps
    alpha_n, alpha_p = np.log(np.expm1(0.8 - 0.5)), np.log(np.expm1(0.7))
    return compute("xielu", x, float(alpha_n), float(alpha_p), 0.5, -1e-6)


CASES = [
    # Of a sigmoid that is a half and an odd function more entries of a table may be the next.
    *(one(name, X, floor=2e-11 if name == "gelu_quick" else 1e-11) for name in UNARY),
    *(one(name, np.abs(X) + np.float32(1e-3)) for name in ("sqrt", "log")),
    *(one(name, 20 * X, note="loud") for name in ("silu", "gelu", "tanh", "softplus", "sigmoid")),
    *(one(name, X, Y, ggml=f"{name}_split") for name in ("swiglu", "geglu", "reglu", "geglu_erf", "geglu_quick")),
    one("swiglu_oai", X, Y, attrs={"alpha": 1.702, "limit": 2.0}, numbers=(1.702, 2.0)),
    one("swiglu_clamp", X, Y, attrs={"limit": 1.5}, numbers=(1.5,)),
    one("xielu", X, attrs={"alpha_n": 0.8, "alpha_p": 0.7, "beta": 0.5, "eps": -1e-6}, ggml=xielu, floor=1e-9),
    *(one(name, X, Y) for name in ("add", "sub", "mul", "div")),
    *(one(name, X, weights=(W,), note="of a weight") for name in ("add", "mul", "div")),
    one("mul", normal(T, H, D), normal(T, 1, D), note="repeated"),
    one("scale", X, attrs={"scale": 0.3}, numbers=(0.3,)),
    one("scale", X, attrs={"scale": 0.3, "bias": 0.7}, ggml="scale_bias", numbers=(0.3, 0.7), note="and bias"),
    one("clamp", X, attrs={"low": -1.0, "high": 0.5}, numbers=(-1.0, 0.5)),
    *(one(name, X) for name in ("sum_rows", "mean", "cumsum")),
    one("sum", X, floor=1e-9),
    one("soft_max", X, attrs={"scale": 0.7}, ggml=lambda x: compute("soft_max_ext", x, None, 0.7, 0.0)),
    one("soft_max", normal(H, T, 9), HALF.astype(np.float32), attrs={"scale": 0.7}, note="masked",
        ggml=lambda x, mask: compute("soft_max_ext", x, mask, 0.7, 0.0)),
    one("layer_norm", X, attrs={"eps": 1e-5}, ggml="norm", numbers=(1e-5,)),
    *(one(name, X, attrs={"eps": 1e-5}, numbers=(1e-5,)) for name in ("rms_norm", "l2_norm")),
    one("group_norm", normal(10, 1, N), attrs={"groups": 4, "eps": 1e-5}, numbers=(4, 1e-5)),
    *(one("tri", normal(N, N), attrs={"part": i}, numbers=(i,), note=str(i)) for i in range(4)),
    one("concat", X, Y, attrs={"axis": -1}, numbers=(0,)),
    one("concat", X, Y, attrs={"axis": -3}, numbers=(2,), note="along a new axis"),
    one("repeat", X, attrs={"times": (3, 1, 2)}, ggml="repeat_4d", numbers=(2 * N, T, 3, 1)),
    one("get_rows", X, ids(T, 4)),
    one("get_rows", normal(T, N, 1), ids(N, T, 2), note="of each token"),
    one("get_rows", ids(5, 4), weights=(normal(5, N),), ggml=lambda at, w: compute("get_rows", w, at),
        note="of a weight"),
    one("set_rows", normal(3, N), np.array([5, 1, 2], np.int64), X,
        ggml=lambda x, at, into: compute("set_rows", into, x, at)),
    one("pad", X, attrs={"before_after": (1, 2, 0, 3, 0, 0, 0, 0)}, ggml="pad_ext", numbers=(1, 2, 0, 3, 0, 0, 0, 0)),
    one("roll", X, attrs={"shifts": (3, -2, 0, 0)}, numbers=(3, -2, 0, 0)),
    one("diag", normal(1, N)),
    one("set", X, normal(5), attrs={"first": 9}, ggml="set_1d", numbers=(36,)),
    one("fill", X, attrs={"value": 0.25}, numbers=(0.25,)),
    one("copy", X, ggml="cont"),
    one("add_id", normal(T, 2, N), CHOSEN, weights=(normal(5, N),), ggml=lambda x, at, w: compute("add_id", x, w, at)),
    one("ssm_conv", normal(N, T + 3), weights=(normal(N, 4),), ggml=lambda x, w: compute("ssm_conv", x[None], w)),
    one("solve_tri", LOWER, normal(8, 5), numbers=(True, True, False)),
    *(one("ssm_scan", normal(H, D, 8), normal(T, H, D), normal(T, H), normal(T, 1, 8), normal(T, 1, 8, seed=1),
          weights=(a,), attrs={"snapshots": 1}, ggml=scan, note=f"decay of {a.shape[1]}")
      for a in (-within(0.1, 1.0, H, 8), -within(0.1, 1.0, H, 1))),
    *(one("gated_delta_net", Q, K, V, -within(0.01, 1.0, T, H, n), BETA, STATE, attrs={"snapshots": 1}, ggml=delta,
          note=f"gate of {n}") for n in (1, D)),
    one("gated_linear_attn", K, V, Q, FORGET, STATE.reshape(1, -1), attrs={"scale": 0.25}, numbers=(0.25,)),
    one("rwkv_wkv6", K, V, Q, FORGET, STATE.reshape(1, -1), weights=(normal(H, D),),
        ggml=lambda k, v, r, decay, state, first: compute("rwkv_wkv6", k, v, r, first, decay, state)),
    one("rwkv_wkv7", OF_64[0], within(0.6, 0.99, T, H, 64), *OF_64[1:], normal(1, H * 64 * 64)),
    one("lightning_indexer", normal(T, H, D), normal(9, D), normal(T, H), HALF.astype(np.float32),
        ggml=lambda q, k, w, _: compute("lightning_indexer", *(x[None] for x in (q, k[:, None], w[None], HALF[None])))),
    one("dsv4_hc_comb", normal(T, 24), weights=(normal(3), normal(24)), attrs={"eps": 1e-6, "iterations": 3},
        numbers=(1e-6, 3)),
    one("dsv4_hc_pre", normal(T, 4, N), normal(T, 4), attrs={"scale": 1.0}),
    one("dsv4_hc_post", X, normal(T, 4, N), normal(T, 4), normal(T, 4, 4)),
    one("mul_mat", normal(H, 9, 32), normal(2 * H, T, 32), note="of values"),
    one("mul_mat", normal(H, 9, 32), normal(2 * H, T, 32), note="of a float16 cache", past=(True, False),
        ggml=lambda a, b: compute("mul_mat", a.astype(np.float16), b), scheme=scheme_named("attention in float16")),
    *(one("mul_mat", normal(5, T, 64), weights=(q,), ggml=lambda x, w: compute("mul_mat", w, x),
          note=f"of {q.type} matrices")
      for q in quantised("F16", "Q8_0", "Q4_1")),
    *(one("of_latent", normal(T, 64), weights=(q,), note=f"of {q.type} matrices",
          ggml=lambda x, w: compute("mul_mat", w, np.stack([x] * 5)).reshape(5, T, 24).swapaxes(0, 1).copy())
      for q in quantised("F32", "F16", "Q8_0")),
    *(one("linear_id", normal(T, n, 64), CHOSEN, weights=(q,), ggml=lambda x, at, w: compute("mul_mat_id", w, x, at),
          note=f"of {q.type}, {n} rows a token")
      for q in quantised("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "MXFP4") for n in (1, 2)),
    one("linear_id", normal(T, 1, 256), CHOSEN, weights=(quantised("TQ2_0", columns=256)[0],), note="of TQ2_0",
        ggml=lambda x, at, w: compute("mul_mat_id", w, x, at)),
]  # fmt: skip


def opened(case: Case, folder: Path) -> tuple[Op, GGUFFile]:
    """The op, and a file of its weights."""
    path = folder / "model.gguf"
    writer = GGUFWriter(path, "llama")
    for i, weight in enumerate(case.weights or (np.zeros(1, np.float32),)):
        if isinstance(weight, Quantised):
            writer.add_tensor(f"w{i}", weight.raw, raw_dtype=GGMLQuantizationType[weight.type])
        else:
            writer.add_tensor(f"w{i}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    weights = tuple(Weight(f"w{i}", file.tensors[f"w{i}"].shape) for i in range(len(case.weights)))
    inputs = tuple(f"x{i}" for i in range(len(case.inputs)))
    return Op("op", case.kind, inputs, ("T",), weights, case.attrs, case.past), file


def made(op: Op, file: GGUFFile, inputs: list[Tensor], scheme: Scheme, storage: str = "f32") -> tuple[Tensor, Noise]:
    """What the kind computes, and its noise."""
    weights, energy = Weights(file), Energy()
    arithmetic = arithmetic_of(op, scheme, weights)
    y = evaluate(op, inputs, weights, arithmetic, energy)
    return y, noise(op, inputs, y, weights, energy, arithmetic, storage)


def excess(recorded: Tensor, exact: Tensor, floor: Noise) -> tuple[float, float]:
    """How many times its bound an element errs at most, and its noise the whole."""
    error = (recorded - exact).abs()
    whole = float(error.square().sum()) / max(floor.margin * floor.energy(), 1e-300)
    return float((error / floor.bound().clamp(min=1e-300)).max()), whole


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ggml_computes_the_same_to_within_the_floor(case: Case, tmp_path: Path) -> None:
    exact, floor = made(*opened(case, tmp_path), [torch.from_numpy(x).double() for x in case.inputs], case.scheme)
    recorded = torch.from_numpy(case.by_ggml().astype(np.float64)).reshape(exact.shape)
    worst, whole = excess(recorded, exact, floor)
    signal = float(exact.square().sum())
    assert worst <= 1
    assert whole <= 1
    assert 4 * floor.energy() <= case.floor * signal
    assert excess(recorded * (1 + 1e-4), exact, floor)[1] > 1 or not signal


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
HELD = {"f32": EXACT, "bf16": scheme_named("weights in bfloat16"), "f16": scheme_named("weights in float16")}


@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if not (case.kind == "linear_id" and case.note)], ids=str)
def test_the_torch_engine_stays_within_the_floor(case: Case, storage: str, tmp_path: Path) -> None:
    op, file = opened(case, tmp_path)
    stored = [
        torch.from_numpy(x) if x.dtype.kind == "i" else torch.from_numpy(x).to(DTYPES[storage]) for x in case.inputs
    ]
    exact, floor = made(op, file, [x.double() for x in stored], HELD[storage], storage)
    engine = evaluate(op, stored, Weights(file, DTYPES[storage])).double()
    beyond = engine.isinf()  # what float16 cannot hold
    worst, whole = excess(engine.masked_fill(beyond, 0.0), exact.masked_fill(beyond, 0.0), floor)
    assert beyond.sum() < 0.1 * beyond.numel()
    assert worst <= 1
    assert whole <= 1


def test_what_is_one_row_of_values_and_states_has_no_tokens_to_count() -> None:
    """A report said "at token 4184" of 11 tokens."""
    in_one_row = {name for name, kind in KINDS.items() if kind.shaped_as} | {"state"}
    assert {name for name in KINDS if axes_of("rwkv_wkv7", 1, name) == ("value",)} == in_one_row


@pytest.mark.parametrize("n_head", [1, 6, 8])
def test_alibi_is_that_of_ggml(n_head: int) -> None:
    distance = -np.abs(np.arange(T)[:, None] - np.arange(9)[None, :]).astype(np.float32)
    x = normal(n_head, T, 9)
    positions = torch.arange(T), torch.arange(9)
    ours = softmax(torch.from_numpy(x).double(), *positions, scale=0.3, max_bias=8.0, causal=False)
    theirs = torch.tensor(compute("soft_max_ext", x, distance, 0.3, 8.0)[0]).double()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-9)


def test_a_sink_takes_its_share_and_a_soft_cap_bends() -> None:
    x, sinks = torch.from_numpy(normal(H, T, T)).double(), torch.tensor([0.5, -1.0, 3.0], dtype=torch.float64)
    at = torch.arange(T)
    capped = 2 * np.tanh(0.7 / 2 * x.numpy())
    weights = np.exp(capped) * (at[:, None] >= at[None, :]).numpy()
    by_hand = weights / (weights.sum(-1, keepdims=True) + np.exp(sinks.numpy())[:, None, None])
    np.testing.assert_allclose(softmax(x, at, at, sinks, scale=0.7, softcap=2.0), by_hand, rtol=1e-12)


def test_a_scale_is_a_constant_that_roundings_made(tmp_path: Path) -> None:
    """YaRN's mscale^2 / sqrt(40) for a factor of 40: in float64, and as llama.cpp has it, 2.5 units from that."""
    in_float64, theirs = (0.1 * math.log(40) + 1) ** 2 / math.sqrt(40), 0.2962823212146759
    at = torch.arange(T)
    op = Op("softmax", "softmax", ("x", "positions", "positions"), (H, "T", "S"), attrs={"scale": theirs})
    scores = 120 * torch.from_numpy(normal(H, T, T))
    file = opened(CASES[0], tmp_path)[1]
    exact, floor = made(op, file, [scores.double(), at, at], HELD["f32"], "f32")
    engine = evaluate(op.with_attrs(scale=float(np.float32(in_float64))), [scores, at, at], Weights(file)).double()
    assert excess(engine, exact, floor)[0] <= 1


@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"window": 3}, [4, 5, 6]),
        ({"chunk": 4}, [4, 5, 6]),
        ({"causal": False}, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ({"causal": False, "window": 4}, [4, 5, 6, 7, 8]),
        ({"block": 3}, [2, 5]),  # which end one
    ],
)
def test_what_a_token_at_position_6_sees(visible: dict[str, Any], keys: list[int]) -> None:
    seen = mask(torch.tensor([6]), torch.arange(9), **visible)[0] == 0
    assert torch.nonzero(seen).flatten().tolist() == keys


def test_of_equal_scores_any_may_be_picked(tmp_path: Path) -> None:
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.9, 0.2], [0.5, 0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    picks = KINDS["top_k"].picks
    assert picks
    ours = top_k(scores, k=2)
    assert ours.tolist() == [[1, 3], [0, 1]]
    assert torch.equal(picks(scores, ours), picks(scores, torch.tensor([[3.0, 1.0], [1.0, 0.0]])))
    assert not torch.equal(picks(scores, ours), picks(scores, torch.tensor([[3.0, 2.0], [1.0, 0.0]])))
    assert picks(scores, torch.tensor([[3.0, 1e9], [0.5, 0.0]])).isfinite().sum() == 2
    theirs = compute("top_k", scores.float().numpy(), 2)[0, 0]
    assert torch.equal(picks(scores, ours), picks(scores, torch.from_numpy(theirs.copy())))
    assert argsort(scores[1:]).tolist() == compute("argsort", scores[1:].float().numpy(), 0)[0, 0].tolist()


def test_fewer_scores_than_are_picked_are_all_picked() -> None:
    """llama.cpp picks of a padded cache: what is picked beyond the tokens so far is hidden, and goes nowhere."""
    scores = torch.tensor([[0.1, 0.9, -math.inf]], dtype=torch.float64)
    assert top_k(scores, k=5).tolist() == [[1, 0, 2, 3, 4]]
    picks = KINDS["top_k"].picks
    assert picks
    assert picks(scores, torch.tensor([[0.0, 1.0, 70.0, 2.0, 9.0]])).tolist() == [[0.9, 0.1, *[-math.inf] * 3]]
    into, rows = torch.full((2, 3, 1), -math.inf), torch.zeros(2, 2, 1)
    assert set_rows(rows, torch.tensor([[1, 0], [2, 70]]), into).isfinite().tolist() == [
        [[True], [True], [False]], [[False], [False], [True]]
    ]  # fmt: skip


def test_what_llama_cpp_makes_of_positions() -> None:
    found = temperature(torch.tensor([0, 3, 4, 8]), scale=0.1, every=4, offset=0.0)
    assert found.flatten().tolist() == [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    matrix = hadamard(torch.tensor([0]), n=8)
    assert torch.allclose(matrix @ matrix.T, torch.eye(8, dtype=torch.float64), atol=1e-15)
    assert (matrix.sign()[:2] == torch.tensor([[1.0] * 8, [1.0, -1.0] * 4])).all()


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_distances_are_those_of_transformers(causal: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    at = torch.arange(300)
    theirs = t5.T5Attention._relative_position_bucket(at[None] - at[:, None], not causal, 32, 128)
    assert torch.equal(relative_buckets(at, at, n=32, causal=causal), theirs)


def test_decays_of_lightning_attention() -> None:
    """Of two heads (slopes 1/16 and 1/256) and three tokens after five others."""
    at = torch.tensor([5, 6, 7])
    q, k, diag = (decays(at, heads=2, of=of) for of in ("q", "k", "diag"))
    assert decays(at, heads=2, of="slopes").tolist() == [1 / 16, 1 / 256]
    assert (q[..., 0] * -256).tolist() == [[16, 1], [32, 2], [48, 3]]
    assert (k[..., 0] * -256).tolist() == [[32, 2], [16, 1], [0, 0]]
    assert (diag[1] * -256).tolist() == [[0, math.inf, math.inf], [1, 0, math.inf], [2, 1, 0]]
    assert scale_by_tokens(torch.ones(1), at, each=-0.5).tolist() == [-1.5]


def test_every_kind_is_tested_here_or_runs_in_the_hand_written_families() -> None:
    families = {name.kind for name in NAMES.values()} - {"logprobs"}  # which no op of a graph makes
    elsewhere = {"top_k", "argsort", "mask", "state", "temperature", "hadamard"}
    elsewhere |= {"relative_buckets", "decays", "scale_by_tokens"}
    elsewhere |= {"compress", "place_in_block", "block_start"}  # test_compressed.py
    assert families <= set(KINDS)
    assert set(KINDS) == families | {case.kind for case in CASES} | elsewhere


@pytest.mark.parametrize("values", [range(-7, 8), None])
def test_a_norm_that_adds_up_in_sequence_stays_within_the_floor(values: range | None, tmp_path: Path) -> None:
    """A prompt, and row by row as an engine without vectors is fed; equal values, as of 4-bit embeddings, err alike."""
    rng, n = np.random.default_rng(0), 2048
    x = (rng.choice(values, (200, n)) * 0.013 if values else rng.standard_normal((200, n))).astype(np.float32)
    op, file = opened(Case("rms_norm", (x,), attrs={"eps": 1e-6}), tmp_path)
    op = replace(op, axes=("T", n))
    total = np.zeros(len(x), np.float32)
    for column in x.T:
        total += column * column
    recorded = x / np.sqrt(total[:, None] / np.float32(n) + np.float32(1e-6))
    for rows in (slice(None), *(slice(i, i + 1) for i in range(len(x)))):
        exact, floor = made(op, file, [torch.from_numpy(x[rows]).double()], EXACT)
        assert max(excess(torch.from_numpy(recorded[rows]).double(), exact, floor)) <= 1
        assert excess(exact * (1 + 1e-4), exact, floor)[1] > 1


@pytest.mark.parametrize("alike", [True, False])
def test_values_of_one_token_over_and_over_stay_within_the_floor(alike: bool, tmp_path: Path) -> None:
    """Added up key by key: what is equal errs to the same side each time, 20 sigma in the end."""
    n = 10_000
    probs, v = np.full((1, 1, n), 1 / n, np.float32), np.full((n, 1, 1), 0.8, np.float32)
    if not alike:
        v[:, 0, 0] = np.random.default_rng(0).standard_normal(n)
    v[0] = -0.45 * v[1:].sum()
    op, file = opened(Case("weighted_values", (probs, v)), tmp_path)
    recorded = np.cumsum(probs[0, 0] * v[:, 0, 0], dtype=np.float32)[-1:].reshape(1, 1)
    inputs = [torch.from_numpy(x).double() for x in (probs, v)]
    exact, floor = made(replace(op, axes=("T", 1)), file, inputs, EXACT)
    assert excess(torch.from_numpy(recorded).double(), exact, floor)[0] <= 1


@pytest.mark.parametrize("chunk", [64, 256])
def test_a_scan_that_computes_many_tokens_at_once_stays_within_the_floor(chunk: int, tmp_path: Path) -> None:
    """Its sums of logarithms round at their size, a hundred and more."""
    n, heads, states = 300, 3, 8
    x, dt, b, c = normal(n, heads, D), normal(n, heads, scale=2.0), normal(n, 1, states), normal(n, 1, states, seed=1)
    state, a = normal(heads, D, states), -within(0.01, 3.0, heads, 1)
    inputs = [torch.from_numpy(z) for z in (state, x, dt, b, c, a)]
    op, file = opened(Case("ssm_scan", (state, x, dt, b, c, a)), tmp_path)
    exact, floor = made(op, file, [z.double() for z in inputs], EXACT)
    assert max(excess(ssd(*inputs, chunk=chunk).double(), exact, floor)) <= 1
    assert excess(exact * (1 + 1e-4), exact, floor)[1] > 1


@pytest.mark.parametrize("kind", ["silu", "sigmoid", "swiglu"])
def test_a_sigmoid_whose_exponential_overflows_in_float16_stays_within_the_floor(kind: str, tmp_path: Path) -> None:
    """As candle has it, x / (1 + exp(-x)) with every step in float16: 0 below -11.09, and "channel 113 is 0"."""
    x, up = torch.linspace(-12.0, 12.0, 8 * D).reshape(8, D).half(), torch.from_numpy(normal(8, D)).half()
    inputs = [x, up][: 1 + (kind == "swiglu")]
    op, file = opened(Case(kind, tuple(map(np.asarray, inputs))), tmp_path)
    exact, floor = made(op, file, [one.double() for one in inputs], EXACT, "f16")
    divisor = 1 + (-x).exp()
    assert divisor.isinf().any()
    engine = {"silu": x / divisor, "sigmoid": 1 / divisor, "swiglu": x / divisor * up}[kind].double()
    assert excess(engine.reshape(exact.shape), exact, floor)[0] <= 1
    assert excess(exact * (1 + 1e-2), exact, floor)[0] > 1


def test_exponentials_are_rounded_before_they_are_divided_as_torch_has_them(tmp_path: Path) -> None:
    """Its fused attention on the CPU, of which reports said "KV cache in float16" where all is bfloat16."""
    q, k, v = (torch.from_numpy(normal(3, 40, 16, seed=seed)).bfloat16() for seed in range(3))
    recorded = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], scale=0.5, is_causal=True)[0]
    scores = 0.5 * q.double() @ k.double().mT
    probs = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1)
    values = v.double().transpose(0, 1)
    op, file = opened(Case("weighted_values", (probs.numpy(), values.numpy())), tmp_path)
    weights, made = Weights(file), recorded.double().transpose(0, 1).flatten()
    undivided, divided, exact = (Arithmetic("bf16", parts=0), Arithmetic("bf16"), Arithmetic())

    def left(arithmetic: Arithmetic) -> float:
        return nmse(made, evaluate(op, [probs, values], weights, arithmetic).flatten().bfloat16().double())

    assert left(undivided) < 0.2 * min(left(divided), left(exact))
