"""The arithmetic of an engine: which roundings it makes where, by kind of op. The roundings are in roundings.py."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tracediff.errors import EngineError
from tracediff.numerics.exponentials import exponential_named
from tracediff.numerics.floats import HALVES
from tracediff.numerics.roundings import rounding_named

# What `operands` and `stored` of an Arithmetic are, by kind of op.
_ROLES = MappingProxyType(
    {
        "linear": ("activations", "weights"),
        "scores": ("Q", "K cache"),
        "weighted_values": ("probabilities", "V cache"),
        "rms_norm": ("", "norm weights"),
        "embedding": ("", "table"),
        "rope": ("", "rope tables"),
        "add": ("what is added to the residual", "biases"),
        "softmax": ("scaled scores", ""),
        **dict.fromkeys(("gelu", "geglu", "gelu_quick", "geglu_quick"), ("activations looked up", "")),
    }
)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine computes a matmul, beyond its mathematics. "f64" stands for "as it is, not rounded".

    `operands`: what activations are rounded to (of attention: Q and the probabilities).
    `stored`: what the other operand is held in: weights, requantised ones too, or K and V in the cache.
    `biases`: what a matmul's biases are held in, which engines leave in the file's type where weights alone are short.
    `accumulate`: the type that sums run in; "tensor cores" cut off what float32 cannot hold, and round nothing.
    `parts`: of attention's sums in f16, which can be followed term by term: how many threads share the keys of a
    decoded token, each adding up its own (see `split_keys`). 0: in an order that is not known.
    `ubatch`: tokens that come in so many at a time have neither `operands` nor `accumulate`: only the last ones of a
    prompt, too few for it, do. 0: all do.
    `exponential`: how exponentials are approximated; empty: to a few units of float32.
    """

    operands: str = "f64"
    stored: str = "f64"
    accumulate: str = "f32"
    biases: str = "f64"
    parts: int = 1
    ubatch: int = 0
    exponential: str = ""

    @property
    def truncates(self) -> bool:
        """Whether sums run on tensor cores."""
        return self.accumulate.endswith("tensor cores")

    def on_tensor_cores(self) -> "Arithmetic | None":
        """The same there, where these multiply such operands; None where they do not."""
        short = {self.operands, self.stored} <= {"f64", "f16", "bf16", "tf32"} and self.accumulate == "f32"
        return replace(self, accumulate="tensor cores") if short else None

    def whole_ubatches(self, n_tokens: int) -> int:
        """How many of the first tokens are in ubatches that are full."""
        return n_tokens // self.ubatch * self.ubatch if self.ubatch else 0

    def said(self, kind: str) -> list[str]:
        """What it rounds in an op of this kind, as phrases: `activations in q8_0 blocks`. None: nothing."""
        operands, stored = _ROLES.get(kind, ("operands", "weights"))
        after = f" after whole ubatches of {self.ubatch}" if self.ubatch else ""
        said = []
        if self.operands != "f64":
            said.append(_phrase(operands, self.operands) + after)
        if self.stored != "f64":
            said.append(_phrase(stored, self.stored))
        if self.truncates:
            said.append(f"sums on {self.accumulate}")
        elif self.accumulate != "f32":
            threads = f" on {self.parts} threads" if self.parts > 1 else "" if self.parts else " in an unknown order"
            said.append(_phrase("sums", self.accumulate) + threads + after)
        if self.exponential:
            said.append(exponential_named(self.exponential).words)
        return said


def _phrase(role: str, rounding: str) -> str:
    return f"{role} in {rounding_named(rounding).words}"


_PAIRS = (
    ("activations", "weights", "activations and weights"),
    ("K cache", "V cache", "KV cache"),
    ("Q", "probabilities", "Q and probabilities"),
)


def in_words(arithmetics: Iterable[tuple[str, Arithmetic]]) -> str:
    """What ops of these kinds round, each thing once: `exact` where it is nothing.

    >>> in_words([("scores", Arithmetic("f64", "f16")), ("weighted_values", Arithmetic("f64", "f16"))])
    'KV cache in float16'
    """
    said = list(dict.fromkeys(phrase for kind, arithmetic in arithmetics for phrase in arithmetic.said(kind)))
    for one, other, both in _PAIRS:
        for phrase in [phrase for phrase in said if phrase.startswith(f"{one} in ")]:
            twin = other + phrase.removeprefix(one)
            if twin in said:
                said[said.index(phrase)] = both + phrase.removeprefix(one)
                said.remove(twin)
    return ", ".join(said) or "exact"


EXACT = Arithmetic()

# ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16: from so many cells of the cache on the threads share the
# keys of a decoded token. llama.cpp shows it the cells in use, rounded up to 256 (llama-kv-cache.cpp, get_n_kv).
_SPLIT_FROM, _CELLS = 512, 256
UBATCH = 512  # tokens that llama.cpp computes at once, unless told otherwise (llama_context_default_params)
TILED_FROM = 64  # tokens of a ubatch (GGML_FA_TILE_Q)
SHARED_BEYOND = _SPLIT_FROM - _CELLS  # keys


def split_keys(n_tokens: int, n_keys: int, parts: int) -> list[slice]:
    """The keys of each thread; all in one where they are not shared."""
    if n_tokens > 1 or n_keys <= SHARED_BEYOND:
        return [slice(n_keys)]
    cells = math.ceil(n_keys / _CELLS) * _CELLS
    width = math.ceil(cells / parts)
    return [slice(at, at + width) for at in range(0, n_keys, width)]


# The dot-product type of each weight type on ggml's CPU backend (ggml-cpu/ggml-cpu.c, type_traits_cpu).
_Q8_0 = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")
_Q8_K = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
)
_LLAMA_CPP_OPERANDS: Mapping[str, str] = MappingProxyType(
    {"F16": "f16", "BF16": "bf16", "Q4_1": "q8_1", "Q5_1": "q8_1"}
    | dict.fromkeys(_Q8_0, "q8_0")
    | dict.fromkeys(_Q8_K, "q8_K")
)


EXPONENTIAL = ("exponential", "softmax")  # entries of a scheme that say how exponentials are approximated


@dataclass(frozen=True, slots=True)
class Scheme:
    """The arithmetic of a whole engine. `linear` is None where it follows the weight's type as in ggml."""

    name: str
    linear: Arithmetic | None = EXACT
    scores: Arithmetic = EXACT
    values: Arithmetic = EXACT
    held: str = "f64"  # what the embedding is held in
    norms: str = "f64"  # and the weights of norms
    tables: str = "f64"  # and cosines and sines of rope
    exponentials: str = ""
    scaled: str = "f64"  # what scores are rounded to when they are scaled
    added: str = "f64"  # what a layer adds to the residual is rounded to: each rank's term, as it is sent to the others
    looked_up: bool = False  # GELU in a table of every float16, which who rounds as ggml does has too (ggml-cpu/vec.h)

    def of(self, kind: str, weight_type: str = "F32") -> Arithmetic:
        """The arithmetic of an op of this kind; `weight_type` is its matrix's ggml type."""
        match kind:
            case "linear":
                return self.linear or Arithmetic(_LLAMA_CPP_OPERANDS.get(weight_type, "f64"))
            case "scores":
                return self.scores
            case "weighted_values":
                return self.values
            case "embedding":
                return Arithmetic(stored=self.held)
            case "rope":
                return Arithmetic(stored=self.tables)
            case "table" if self.linear is None or self.looked_up:
                return Arithmetic("f16")
            case "rms_norm":
                return Arithmetic(stored=self.norms)
            case "residual":
                return Arithmetic(self.added)
            case "exponential":
                return Arithmetic(exponential=self.exponentials)
            case "softmax":
                return Arithmetic(self.scaled, exponential=self.exponentials)
        return EXACT

    def on_tensor_cores(self) -> "Scheme":
        """The same with every matmul there that they could do."""
        linear, scores, values = ((of and of.on_tensor_cores()) or of for of in (self.linear, self.scores, self.values))
        assert scores
        assert values
        name = f"{self.name}{_ON_TENSOR_CORES}"
        return replace(self, name=name, linear=linear, scores=scores, values=values)


_ASKED = (  # with any N, or `row`
    "activations in int8/N", "activations and weights in fp8/N",
    "matrices in int4/N, full int4/N, wide int8/N, uint4/N, affine4/N or nf4/N",
    "activations in int8/N and matrices in int4/N",
)  # fmt: skip
_ON_TENSOR_CORES = " on tensor cores"
GGML = "activations as ggml rounds them"  # to the weight type's dot-product type
_GGML_TYPES = {"f64", "f16", "bf16", "q8_0"}  # of a cache on the CPU
_FLOAT8 = ("e4m3", "e5m2")  # of a cache, whose scale is 1, vLLM's kv_cache_dtype
_SHORTER = ("e5m2", "e4m3", "gf4")
_IN_CACHES = ("q8_0", "q8_K", "int8/32", "int8/row")  # what activations are rounded to beside a cache in half precision
GROUPS = ("int8/32", "int8/64", "int8/128", "int8/256", "int8/row", "uint8/row")  # others can be asked for

# What engines quantise the file's weights to by themselves: MLX, bitsandbytes (with scales in the type that it computes
# in), ONNX Runtime, torchao, and who writes an engine of their own.
_OWN = (
    *(f"{scales}{own}" for own in ("affine4/64", "nf4/64") for scales in ("", "bf16 ", "f16 ")), "affine8/64",
    *(f"{kind}{size}" for kind in ("int4/", "full int4/", "uint4/") for size in (32, 64, 128)),
    "int8/row", "int8/32", "int8/64", "int8/128", "wide int8/row", "bf16 wide int8/row", "full int8/32", "uint8/32",
)  # fmt: skip


def _matmuls() -> Iterator[Scheme]:
    """What engines do where activations meet weights, most usual first."""
    yield Scheme(GGML, None)
    yield Scheme("exact")
    for name in HALVES:
        yield _matmul("weights", name)
    for name in (*HALVES, *_SHORTER):  # an engine in C, whose norms stay as the file has them
        yield _matmul("matrices", name)
    for name in HALVES:
        yield Scheme(_phrase("rope tables", name), tables=name)
    for name in (*HALVES, "tf32"):
        yield _matmul("activations and weights", name)
    for name in HALVES:  # OpenVINO, whose biases stay as they are
        yield _matmul("activations and matrices", name)
    for name in (*HALVES, "q8_0", "q8_K", *GROUPS):
        yield _matmul("activations", name)
    for name in ("q8_0", *GROUPS):  # an engine that quantises the file's weights by itself, as llama2.c's runq.c
        yield _matmul("activations and weights", name)


def _matmul(what: str, rounding: str) -> Scheme:
    """`what` is rounded so: activations, weights or both, or of the weights matrices alone, and no norms' or biases.

    Raises EngineError for a rounding that is not known.
    """
    operands = rounding if "activations" in what else "f64"
    stored = rounding if what != "activations" else "f64"
    held = stored if stored != operands or stored in GROUPS else "f64"
    norms = held if what == "weights" and held in HALVES else "f64"  # nobody quantises these few
    sums = "fp8 tensor cores" if "fp8" in operands else "f32"
    before = stored.partition(" ")[0]  # who holds weights in half precision before they are quantised holds biases so
    biases = before if before in HALVES and (stored != before or "matrices" not in what) else "f64"
    return Scheme(_phrase(what, rounding), Arithmetic(operands, stored, sums, biases), held=held, norms=norms)


def _of_integers(activations: str, matrices: str) -> Scheme:
    """Activations in integers of one sort, matrices in those of another."""
    name = f"activations in {activations} and matrices in {matrices}"
    return Scheme(name, Arithmetic(activations, matrices), held=matrices)


def _attentions() -> Iterator[Scheme]:
    """What engines do in attention, where activations meet the cache, most usual first."""
    for name in (*HALVES, "tf32"):
        both = Arithmetic(name, name)
        yield Scheme(_phrase("attention", name), scores=both, values=both)
    for name in HALVES:  # PyTorch's autocast, whose softmax is computed in float32
        both = Arithmetic(name, name)
        yield Scheme(_phrase("attention and scaled scores", name), scores=both, values=both, scaled=name)
    for name in (*HALVES, "int8/row", *_FLOAT8):
        cached = Arithmetic(stored=name)  # of f16 what ggml_compute_forward_flash_attn_ext_tiled does from 64 tokens on
        yield Scheme(_phrase("KV cache", name), scores=cached, values=cached)
    yield Scheme(_phrase("KV cache", "q8_0"), scores=Arithmetic("q8_0", "q8_0"), values=Arithmetic("f64", "q8_0"))
    # ggml_compute_forward_flash_attn_ext_f16_one_chunk: Q to f16, values summed in f16 key by key
    flash = Scheme("flash attention", scores=Arithmetic("f16", "f16"), values=Arithmetic("f64", "f16", "f16"))
    yield flash
    after = Scheme(  # a prompt of more than one ubatch, whose last has fewer than 64 tokens
        "flash attention after whole ubatches",
        scores=replace(flash.scores, ubatch=UBATCH),
        values=replace(flash.values, ubatch=UBATCH),
    )
    yield after
    for n in (2, 3, 4, 6, 8, 12, 16):
        yield replace(after, name=f"flash attention on {n} threads", values=replace(after.values, parts=n))
    degree_4 = Scheme("exponentials to degree 4", exponentials="taylor4/8")
    yield degree_4
    yield replace(degree_4, name=f"{degree_4.name} and what is added in q8_0", added="q8_0")  # distributed-llama
    yield Scheme("activations looked up in float16", looked_up=True)


def _with(matmul: Scheme, attention: Scheme) -> Scheme:
    name, of = f"{matmul.name}, {attention.name}", attention
    scheme = replace(matmul, name=name, scores=of.scores, values=of.values, scaled=of.scaled)
    return replace(scheme, exponentials=of.exponentials, added=of.added, looked_up=of.looked_up)


def _schemes() -> Iterator[Scheme]:
    """Every way of both, and together those that engines combine: each costs a segment a pass. First the most usual."""
    matmuls, attentions = list(_matmuls()), list(_attentions())
    ggml, exact, *others = matmuls
    yield from (ggml, exact)
    in_ggml = [a for a in attentions if {a.scores.operands, a.scores.stored} <= _GGML_TYPES and not a.looked_up]
    yield from (_with(ggml, attention) for attention in in_ggml)
    for other in others:
        cached = Arithmetic(stored="f16") if other.held in _SHORTER else replace(other.linear or EXACT, biases="f64")
        alike = [a for a in attentions if a.values == cached != EXACT]
        yield from (_with(other, attention) for attention in alike)
        if not alike or "activations" not in other.name:
            yield other
    # An engine of somebody's own rounds activations as ggml does, and has no table of GELU.
    in_integers = [_matmul("activations", name) for name in _IN_CACHES]
    halves = [a for a in attentions if a.name in {_phrase("KV cache", name) for name in HALVES}]
    yield from (_with(matmul, cache) for cache in halves for matmul in in_integers)
    yield from (_with(exact, a) for a in attentions if a.values.accumulate == "f32" and a.scores.stored != "tf32")


# Real engines' arithmetic, most usual first. Each entry is what some engine does: a fit can excuse no mistake.
SCHEMES = tuple(_schemes())
PLAIN = SCHEMES[:2]  # what most engines do: round activations as the weights' type wants it, or not at all
# Those that are asked where none of these fits.
REQUANTISED = (
    *(_matmul("matrices", name) for name in _OWN),
    *(  # ONNX Runtime's MatMulNBits at accuracy level 4
        _of_integers(f"int8/{size}", f"{kind}/{size}")
        for size in (32, 128) for kind in ("int4", "full int4", "uint4", "full int8", "uint8")
    ),
)  # fmt: skip

# What only a user can know: sums in half precision in an order that cannot be followed, as in GPUs' kernels
# (ggml-cuda/fattn*.cuh). The floor is so wide that small mistakes hide below it: never tried unasked.
_UNORDERED = Scheme(
    "flash attention with f16 sums", scores=Arithmetic("f16", "f16"), values=Arithmetic("f64", "f16", "f16", parts=0)
)


def scheme_named(name: str) -> Scheme:
    """A way to round in matmuls with weights, one in attention, or both with a comma between; `llama.cpp` is ggml's.

    With ` on tensor cores` at the end sums run there. Any rounding may stand in `activations in ROUNDING` and the like.
    Raises EngineError with all names.
    """
    if name.endswith(_ON_TENSOR_CORES):
        return scheme_named(name.removesuffix(_ON_TENSOR_CORES)).on_tensor_cores()
    matmuls = {"llama.cpp": SCHEMES[0]} | {scheme.name: scheme for scheme in _matmuls()}
    attentions = {scheme.name: scheme for scheme in (*_attentions(), _UNORDERED)}
    first, _, second = name.partition(", ")
    if not second and first in attentions:
        return _with(SCHEMES[0], attentions[first])
    both = re.fullmatch(r"activations in (.+/\w+) and matrices in (.+/\w+)", first)
    asked = re.fullmatch(r"(activations and (?:weights|matrices)|activations|weights|matrices) in (.+/\w+)", first)
    matmul = _of_integers(*both.groups()) if both else _matmul(asked[1], asked[2]) if asked else matmuls.get(first)
    if matmul is None or second not in ("", *attentions):
        raise EngineError(
            f"unknown arithmetic {name!r}. Known: {'; '.join((*matmuls, *_ASKED))}; and of attention, alone or after "
            f"one of these and a comma: {'; '.join(attentions)}. At the end may stand{_ON_TENSOR_CORES!r}."
        )
    return _with(matmul, attentions[second]) if second else matmul
