"""The arithmetic of an engine: which roundings it makes where, by kind of op. The roundings are in roundings.py."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tracediff.model.graph import Tokens
from tracediff.names import TABLED
from tracediff.numerics.exponentials import exponential_named
from tracediff.numerics.roundings import held_before, rounding_named

_ON_TENSOR_CORES = ("f16", "bf16", "tf32", "tf32 away", "scaled tf32")  # beside integers and float8
# What `operands` and `stored` of an Arithmetic are, by kind of op.
_ROLES = MappingProxyType(
    {
        "linear": ("activations", "weights"),
        "linear_id": ("activations", "weights"),
        "scores": ("Q", "K cache"),
        "weighted_values": ("probabilities", "V cache"),
        "rms_norm": ("normed values", "norm weights"),
        "embedding": ("", "table"),
        "rope": ("", "rope tables"),
        "add": ("what is added to the residual", "biases"),
        "softmax": ("scaled scores", "sinks"),
        "state": ("", "states"),
        "columns": ("", "columns of convolutions"),
        "swiglu": ("activated values", ""),
        **dict.fromkeys(TABLED, ("activations looked up", "")),
    }
)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine computes a matmul, beyond its mathematics. "f64" stands for "as it is, not rounded".

    `operands`: what activations are rounded to (of attention: Q and the probabilities).
    `stored`: what the other operand is held in: weights, requantised ones too, or K and V in the cache.
    `biases`: what a matmul's biases are held in, which engines leave in the file's type where weights alone are short.
    `before_bias`: what a matmul's sums are rounded to before a bias is added that is held in more, as in PyTorch, whose
    matmul of bfloat16 gives bfloat16.
    `accumulate`: the type that sums run in; "tensor cores" cut off what float32 cannot hold, and round nothing. "i32":
    products of a block are added up as integers, and blocks in float32.
    `parts`: of attention's sums in f16, which can be followed term by term: how many threads share the keys of a
    decoded token, each adding up its own (see `split_keys`). 0: in an order that is not known. Of sums in float32 then
    exponentials of what is left of the largest score so far are rounded, tile by tile, and divided by their sum after.
    `ubatch`: tokens that come in so many at a time have neither `operands` nor `accumulate`: only the last ones of a
    prompt, too few for it, do. 0: all do.
    `exponential`: how exponentials are approximated; empty: to a few units of float32.
    `products`: what each product is rounded to before it is added up, in steps of one token alone: of such a matmul XLA
    makes a multiplication and a sum on GPUs, and the multiplication is in the type of its operands (JAX 0.11, H200).
    """

    operands: str = "f64"
    stored: str = "f64"
    accumulate: str = "f32"
    biases: str = "f64"
    parts: int = 1
    ubatch: int = 0
    exponential: str = ""
    products: str = "f64"
    before_bias: str = "f64"
    single: bool = False  # whether an engine in float64 computes this op in float32
    fresh: bool = False  # of attention: whether K and V of the step itself are read before they are cached

    @property
    def undivided(self) -> bool:
        """Whether probabilities are rounded before they are divided by their sum, as flash attention on GPUs does
        (https://arxiv.org/abs/2307.08691, algorithm 1).
        """
        return not self.parts and self.accumulate != "f16"

    @property
    def truncates(self) -> bool:
        """Whether sums run on tensor cores."""
        return self.accumulate.endswith("tensor cores")

    @property
    def suits_tensor_cores(self) -> bool:
        """Whether its operands are rounded to what these multiply, and its sums are in float32."""
        return self.operands in _ON_TENSOR_CORES and self.accumulate == "f32" and bool(self.parts)

    @property
    def counts_tokens(self) -> bool:
        """Whether what it makes of a token depends on how many others are in its step."""
        return bool(self.ubatch) or self.fresh or (self.accumulate == "f16" and bool(self.parts))

    def on_tensor_cores(self) -> "Arithmetic":
        """The same there, where these multiply such operands; itself where they do not, or where it is there."""
        short = {self.operands, self.stored} <= {"f64", *_ON_TENSOR_CORES} and self.accumulate == "f32"
        return replace(self, accumulate="tensor cores") if short else self

    def whole_ubatches(self, n_tokens: int) -> int:
        """How many of the first tokens are in ubatches that are full."""
        return n_tokens // self.ubatch * self.ubatch if self.ubatch else 0

    def said(self, kind: str) -> list[str]:
        """What it rounds in an op of this kind, as phrases: `activations in q8_0 blocks`. None: nothing."""
        operands, stored = _ROLES.get(kind, ("operands", "weights"))
        after = f" after whole ubatches of {self.ubatch}" if self.ubatch else ""
        said = []
        if self.operands != "f64":
            said.append(phrase(operands, self.operands) + after + " before they are divided" * self.undivided)
        if self.stored != "f64":
            said.append(phrase(stored, self.stored) + FRESH * self.fresh)
        if self.biases not in ("f64", self.stored):
            said.append(phrase("biases", self.biases))
        if self.before_bias != "f64":
            said.append(phrase("sums before biases", self.before_bias))
        if self.products != "f64":
            said.append(phrase("products", self.products))
        if self.truncates:
            said.append(f"sums on {self.accumulate}")
        elif self.accumulate not in ("f32", "i32"):
            threads = f" on {self.parts} threads" if self.parts > 1 else "" if self.parts else " in an unknown order"
            said.append(phrase("sums", self.accumulate) + threads + after)
        if self.single:
            said.append("computed in float32")
        if self.exponential:
            said.append(exponential_named(self.exponential).words)
        return said


FRESH = " but for the step's own"


def phrase(role: str, rounding: str) -> str:
    """What is rounded so: `activations in q8_0 blocks`."""
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
_FLOATS = ("F64", "F32", "F16", "BF16")  # matrices that no block is decoded of


def _of_table(held: str) -> str:
    """What an embedding is held in beside such matrices: rows that are read one by one share no scale with others, so
    it stays as the matrices were before.
    """
    return held if rounding_named(held).n_rows == 1 else held_before(held)


ON_TENSOR_CORES = " on tensor cores"
AS_IN_GGML = "as in ggml"  # operands, by the weight's type
EXPONENTIAL = ("exponential", "gated", "softmax")  # entries of a scheme that say how exponentials are approximated


@dataclass(frozen=True, slots=True)
class Scheme:
    """The arithmetic of a whole engine. Activations that are rounded `AS_IN_GGML` follow the weight's type.

    `prompts`: what it does in steps of several tokens, where it does otherwise in those of one: what these read of
    earlier steps, as K and V of a cache, was made so. None: the same.
    """

    name: str
    linear: Arithmetic = EXACT
    scores: Arithmetic = EXACT
    values: Arithmetic = EXACT
    held: str = "f64"  # what the embedding is held in
    norms: str = "f64"  # and the weights of norms
    vectors: str = "f64"  # and others that are no matrices: kernels of convolutions, biases and gains by themselves
    normed: str = "f64"  # what a norm of values held in that type gives is rounded to before its weight multiplies it
    activated: str = "f64"  # and what an activation of such a gate gives, before it multiplies another value
    tables: str = "f64"  # cosines and sines of rope
    states: str = "f64"  # what recurrent states are held in between steps
    columns: str = "f64"  # and the columns of convolutions, for which engines have a type of their own
    exponentials: str = ""
    scaled: str = "f64"  # what scores are rounded to when they are scaled
    added: str = "f64"  # what a layer adds to the residual is rounded to: each rank's term, as it is sent to the others
    prompts: "Scheme | None" = None
    single: bool = False  # norms, rope and softmax are computed in float32, whatever the rest: transformers' models
    floats_alike: bool = (
        True  # activations are rounded beside matrices of floats, too: not those of quantised ones alone
    )
    looked_up: bool = False  # GELU in a table of every float16, which who rounds as ggml does has too (ggml-cpu/vec.h)

    def in_steps_of(self, tokens: Tokens) -> "Scheme":
        """What it does in steps of so many."""
        if tokens == "one" or (self.prompts is None and self.linear.products == "f64"):
            return self
        return self.prompts or replace(self, linear=replace(self.linear, products="f64"))

    @property
    def is_ggml(self) -> bool:
        """Whether activations are rounded as ggml rounds them."""
        return self.linear.operands == AS_IN_GGML

    @property
    def mixes_tokens(self) -> bool:
        """Whether what a token's activations are rounded to depends on the others', or which are in its step."""
        is_whole = not self.is_ggml and rounding_named(self.linear.operands).is_whole
        return is_whole or self.scores.fresh or self.values.fresh

    def of(self, kind: str, weight_type: str = "F32") -> Arithmetic:
        """The arithmetic of an op of this kind; `weight_type` is its matrix's ggml type."""
        match kind:
            case "linear" if self.is_ggml:
                operands = _LLAMA_CPP_OPERANDS.get(weight_type, "f64")
                sums = "i32" if rounding_named(operands).in_blocks else "f32"
                return replace(self.linear, operands=operands, accumulate=sums)
            case "linear" if weight_type in _FLOATS and not self.floats_alike:
                return replace(self.linear, operands="f64")
            case "linear":
                return self.linear
            case "scores":
                return self.scores
            case "weighted_values":
                return self.values
            case "embedding":
                return Arithmetic(stored=_of_table(self.held))
            case "rope":
                return Arithmetic(stored=self.tables, single=self.single)
            case "table" if self.is_ggml or self.looked_up:
                return Arithmetic("f16")
            case "rms_norm":
                return Arithmetic(self.normed, self.norms, single=self.single)
            case "norm":
                return Arithmetic(stored=self.norms, single=self.single)
            case "vectors":
                return Arithmetic(stored=self.vectors, single=self.single)
            case "residual":
                return Arithmetic(self.added)
            case "state":
                return Arithmetic(stored=self.states)
            case "columns":
                return Arithmetic(stored=self.columns)
            case "exponential":
                return Arithmetic(exponential=self.exponentials)
            case "gated":
                return Arithmetic(self.activated, exponential=self.exponentials)
            case "softmax":
                return Arithmetic(self.scaled, self.norms, exponential=self.exponentials, single=self.single)
        return EXACT

    def of_values(self) -> Arithmetic:
        """The arithmetic of a matmul of two values, none of which is cached: that of any other where both operands are
        rounded to one type, as under torch.autocast.
        """
        operands = self.linear.operands
        alike = operands == self.linear.stored and not self.is_ggml and not rounding_named(operands).in_blocks
        return replace(self.linear, stored="f64", biases="f64", before_bias="f64") if alike else EXACT

    def on_tensor_cores(self) -> "Scheme":
        """The same with every matmul there that they could do."""
        linear, scores, values = (of.on_tensor_cores() for of in (self.linear, self.scores, self.values))
        name = f"{self.name}{ON_TENSOR_CORES}"
        return replace(self, name=name, linear=linear, scores=scores, values=values)
