"""The arithmetics that engines have: the usual ones, the ways in which each part is done, and what both are called."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

from tracediff.errors import EngineError
from tracediff.numerics.arithmetic import (
    AS_IN_GGML,
    EXACT,
    FRESH,
    ON_TENSOR_CORES,
    UBATCH,
    Arithmetic,
    Scheme,
    phrase,
)
from tracediff.numerics.floats import HALVES
from tracediff.numerics.roundings import (
    BY,
    RULE,
    THEN,
    as_held,
    as_read,
    held_before,
    integers_named,
    read_as,
    rounding_named,
)

_FLOATS_APART = "floats as they are"
GGML = "activations as ggml rounds them"  # to the weight type's dot-product type
_GGML_TYPES = {"f64", "f16", "bf16", "q8_0"}  # of a cache on the CPU
_FLOAT8 = ("e4m3", "e5m2")  # whose scale is 1: of a cache, vLLM's kv_cache_dtype; of activations, Keras' float8
_Q8_2 = "int8/32 to 127 by bf16"  # iqk_quantize.cpp, quantize_row_q8_1_x4_T
_SHORTER = ("e5m2", "e4m3", "gf4")
_IN_CACHES = ("q8_0", "q8_K", "int8/32", "int8/row")  # what activations are rounded to beside a cache in half precision
TF32S = ("tf32", "tf32 away")  # which matmuls of float32 may be made in
_IN_FLOAT8 = "fp8 tensor cores"  # what sums of products in float8 run on
_BEFORE = ("", *(f"{held} " for held in reversed(HALVES)))  # what values were held in that are quantised then
# Of float8 with scales in half precision bfloat16's alone: under float16's an H200's own, whose scales are float32,
# left less than under its own, for what tensor cores cut off is not followed.
_SCALED = (
    "fp8/row", "fp8/128", "fp8/tensor", "int8/tensor", "uint8/tensor", "uint7/tensor", "uint8/32",
    *(f"{held}wide int8/row" for held in _BEFORE), "wide int8/tensor", "divided int8/row", "mxfp8/32",
    "bf16 held fp8/row then bf16", *(f"{held} held divided int8/row then {held}" for held in HALVES),
    *(f"{held} held inverse int8/row" for held in HALVES),
)  # fmt: skip
GROUPS = ("int8/32", "int8/64", "int8/128", "int8/256", "int8/row", "uint8/row")  # others can be asked for

_BY_BFLOAT = "int8/row to 127 by bf16"  # JAX engines on TPUs: quotients by scales as they are kept
# What engines quantise the file's weights to by themselves: MLX, bitsandbytes (with scales in the type that it computes
# in), ONNX Runtime, torchao, compressed-tensors (vLLM's), MNN, and who writes an engine of their own.
_OWN = (
    *(f"{scales}{own}" for own in ("affine4/64", "nf4/64") for scales in _BEFORE), "affine8/64",
    *(f"{kind}{size}" for kind in ("int4/", "full int4/", "uint4/") for size in (32, 64, 128)),
    *(f"{held}{of}/{size}" for size in ("row", "tensor") for of in ("int8", "fp8") for held in _BEFORE),
    *(f"{held}fp8/128x128" for held in _BEFORE),
    *(f"{held} held int8/row" for held in HALVES),
    *(f"{held} held {of}/row then {held}" for held in HALVES for of in ("int8", "fp8")),
    *(f"{held}shifted4/128" for held in _BEFORE), "shifted4/32", "shifted4/64", "bf16 centred4/128",
    "int8/32", "int8/64", "int8/128", *(f"{held}wide int8/row" for held in _BEFORE), "wide int8/tensor",
    "full int8/32", "uint8/32", "divided int8/row", *(f"{held} typed fp8/row then {held}" for held in HALVES),
    *(f"{kind}4/{size}" for kind in ("wide int", "divided int", "away int", "even uint") for size in (32, 64, 128)),
    *(f"{kind} int8/{size}" for kind in ("away", "divided") for size in (32, 64, 128)),
    *(f"{held}mxfp{bits}/32" for bits in (4, 8) for held in _BEFORE),
    *(f"{held} held wide int4/{size} then {held}" for held in HALVES for size in (32, 64, 128)),
    *(f"{held} held divided int{of} then {held}" for held in HALVES for of in ("8/row", "8/128", "4/128")), _BY_BFLOAT,
    *(f"{held} inverse int8/row" for held in HALVES),
)  # fmt: skip


def _matmuls() -> Iterator[Scheme]:
    """What engines do where activations meet weights, most usual first."""
    yield Scheme(GGML, Arithmetic(AS_IN_GGML))
    yield Scheme("exact")
    for name in HALVES:
        yield _matmul("weights", name)
    for name in (*HALVES, *_SHORTER, "q8_0"):  # an engine in C, whose norms stay as the file has them
        yield _matmul("matrices", name)
    for name in HALVES:
        yield Scheme(phrase("rope tables", name), tables=name)
        yield Scheme(phrase("table", name), held=name)  # of embeddings
    for name in (*HALVES, *TF32S):
        yield _matmul("activations and weights", name)
    for name in HALVES:  # OpenVINO, whose biases stay as they are
        yield _matmul("activations and matrices", name)
    for name in HALVES:
        yield _matmul("activations", name)
    for name in ("q8_0", "q8_K", *GROUPS):
        yield _floats_as_they_are(_matmul("activations", name))
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
    few = held if what == "weights" and held in HALVES else "f64"  # which nobody quantises
    before = held_before(stored)  # who holds weights in half precision before they are quantised holds biases so
    biases = before if stored != before or "matrices" not in what else "f64"
    linear = Arithmetic(operands, stored, _sums(operands, stored), biases)
    return Scheme(phrase(what, rounding), linear, held=held, norms=few, vectors=few)


def _floats_as_they_are(scheme: Scheme) -> Scheme:
    """Beside matrices of floats, as routers of experts, activations stay as they are: an engine's other kernel."""
    return replace(scheme, name=f"{scheme.name}, {_FLOATS_APART}", floats_alike=False)


def _sums(operands: str, stored: str) -> str:
    """What products of such operands are added up in: two in float8 are multiplied where it is done in hardware."""
    return _IN_FLOAT8 if "fp8" in operands and "fp8" in stored else "f32"


def _of_integers(activations: str, matrices: str) -> Scheme:
    """Activations in integers of one sort, matrices in those of another."""
    name = f"activations in {activations} and matrices in {matrices}"
    return Scheme(name, Arithmetic(activations, matrices), held=matrices)


def _weighing(operands: str, parts: int, scheme: Scheme) -> Scheme:
    """Probabilities alone are rounded so, as they are multiplied, or, of 0 parts, before they are divided."""
    return replace(scheme, values=replace(scheme.values, operands=operands, parts=parts))


def _attentions() -> Iterator[Scheme]:
    """What engines do in attention, where activations meet the cache, most usual first."""
    for name in (*HALVES, *TF32S):
        both = Arithmetic(name, name)
        yield Scheme(phrase("attention", name), scores=both, values=both)
    scaled, values = (Arithmetic(name, name) for name in ("scaled tf32", "tf32"))
    yield Scheme(phrase("attention", "scaled tf32"), scores=scaled, values=values)
    for name in HALVES:  # PyTorch's autocast, whose softmax is computed in float32
        both = Arithmetic(name, name)
        yield Scheme(phrase("attention and scaled scores", name), scores=both, values=both, scaled=name)
    for name in (*HALVES, "int8/row", *_FLOAT8):
        cached = Arithmetic(stored=name)  # of f16 what ggml_compute_forward_flash_attn_ext_tiled does from 64 tokens on
        yield Scheme(phrase("KV cache", name), scores=cached, values=cached)
    for name in HALVES:
        fresh = Arithmetic(stored=name, fresh=True)
        yield Scheme(phrase("KV cache", name) + FRESH, scores=fresh, values=fresh)
    yield Scheme(phrase("KV cache", "q8_0"), scores=Arithmetic("q8_0", "q8_0"), values=Arithmetic("f64", "q8_0"))
    alone = Arithmetic(stored="q8_0")  # in ggml Q is rounded to as well, in an engine that reads a cache as float32 not
    yield Scheme(phrase("KV cache alone", "q8_0"), scores=alone, values=alone)
    in_integers = Arithmetic(_Q8_2, "q8_0")  # ik_llama.cpp, also where weights are floats
    yield Scheme("KV cache in q8_0 blocks and Q in integers", scores=in_integers, values=Arithmetic(stored="q8_0"))
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
    for name in HALVES:  # with queries as they are, or rounded as keys are
        tiled = _weighing(name, 0, Scheme("", scores=Arithmetic(stored=name), values=Arithmetic(stored=name)))
        yield replace(tiled, name=f"{phrase('KV cache', name)} and undivided probabilities")
        yield replace(tiled, name=f"tiled {phrase('attention', name)}", scores=Arithmetic(name, name))
    degree_4 = Scheme("exponentials to degree 4", exponentials="taylor4/8")
    yield degree_4
    yield replace(degree_4, name=f"{degree_4.name} and what is added in q8_0", added="q8_0")  # distributed-llama
    yield Scheme("activations looked up in float16", looked_up=True)


def _with(matmul: Scheme, attention: Scheme) -> Scheme:
    name, of = f"{matmul.name}, {attention.name}", attention
    scheme = replace(matmul, name=name, scores=of.scores, values=of.values, scaled=of.scaled)
    return replace(scheme, exponentials=of.exponentials, added=of.added, looked_up=of.looked_up)


# Caches of an engine of somebody's own that multiplies integers.
_BESIDE_INTEGERS = (*(phrase("KV cache", name) for name in HALVES), phrase("KV cache alone", "q8_0"))


def _schemes() -> Iterator[Scheme]:
    """Every way of both, and together those that engines combine: each costs a segment a pass. First the most usual."""
    matmuls, attentions = list(_matmuls()), list(_attentions())
    ggml, exact, *others = matmuls
    yield from (ggml, exact)
    in_ggml = [a for a in attentions if {a.scores.operands, a.scores.stored} <= _GGML_TYPES and not a.looked_up]
    yield from (_with(ggml, attention) for attention in in_ggml)
    for other in others:
        cached = Arithmetic(stored="f16") if other.held in _SHORTER else replace(other.linear, biases="f64")
        alike = [a for a in attentions if a.values == cached != EXACT]
        yield from (_with(other, attention) for attention in alike)
        if not alike or "activations" not in other.name:
            yield other
    # An engine of somebody's own rounds activations as ggml does, and has no table of GELU.
    in_integers = [_matmul("activations", name) for name in _IN_CACHES]
    in_integers = [scheme for one in in_integers for scheme in (_floats_as_they_are(one), one)]
    caches = [a for a in attentions if a.name in _BESIDE_INTEGERS]
    yield from (_with(matmul, cache) for cache in caches for matmul in in_integers)
    yield from (_with(exact, a) for a in attentions if a.values.accumulate == "f32" and a.values.stored not in TF32S)


# Real engines' arithmetic, most usual first. Each entry is what some engine does: a fit can excuse no mistake.
SCHEMES = tuple(_schemes())
PLAIN = SCHEMES[:2]  # what most engines do: round activations as the weights' type wants it, or not at all
EXACTLY = PLAIN[1]
IN_HALF = {name: _matmul("activations and weights", name) for name in HALVES}  # an engine that multiplies in it


@dataclass(frozen=True, slots=True)
class Way:
    """How engines may do one part of their arithmetic, whatever they do in the others."""

    part: str
    name: str
    change: Callable[[Scheme], Scheme]

    def of(self, scheme: Scheme) -> Scheme:
        """The scheme with this part done so."""
        pieces = scheme.name.split(", ")
        others = [piece for piece in pieces if (way := _way_named(piece)) is None or way.part != self.part]
        return replace(self.change(scheme), name=", ".join((*others, self.name)))

    def is_of(self, scheme: Scheme) -> bool:
        """Whether the scheme does this part so."""
        return replace(self.change(scheme), name=scheme.name) == scheme


def _ways() -> Iterator[Way]:
    """Every way of every part, of each the most usual first."""
    whole = ("f64", *HALVES)
    integers = ("q8_0", "stored q8_0", "q8_K", "older q8_K", *GROUPS, *_SCALED)
    for name in ("f64", AS_IN_GGML, *HALVES, *TF32S, *integers, *_FLOAT8):
        yield Way("activations", _named("activations", name), partial(_multiplied, name))
    for name in ("f64", *HALVES, "away f16", "q8_0", *_INTEGER_CACHES, "fp8/row", *_FLOAT8):
        words = "KV cache alone" if name == "q8_0" else "KV cache"  # which in ggml Q is rounded to as well
        yield Way("cache", _named(words, name), partial(_cached, name))
        yield Way("K cache", _named("K cache", name), partial(_cached, name, of_values=False))
        yield Way("V cache", _named("V cache", name), partial(_cached, name, of_keys=False))
        if name != "f64":
            yield Way("cache", _named(words, name) + FRESH, partial(_cached, name, fresh=True))
    for name in ("f64", *_READ):
        yield Way("attention", _named("attention", name), partial(_attended, name))
    for name in HALVES:
        yield Way("attention", f"{phrase('attention', name)} of scaled queries", partial(_attended_by_scaled, name))
    for name in HALVES:
        yield Way("probabilities", _named("undivided probabilities", name), partial(_weighing, name, 0))
        yield Way("probabilities", _named("probabilities", name), partial(_weighing, name, 1))
    for part, words in _FIELDS.items():
        for name in (*whole, *(("q8_0",) if part == "added" else ())):
            yield Way(part, _named(words, name), partial(_with_field, part, name))
    for part, words in _OF_MATMULS.items():
        for name in whole:
            yield Way(part, _named(words, name), partial(_of_matmuls, part, name))
    for name, words in _EXPONENTIALS.items():
        yield Way("exponentials", words, partial(_with_field, "exponentials", name))
    for name in ("f64", *HALVES, "normal f16", *_SHORTER, "q8_0"):
        yield Way("matrices", _named("matrices", name), partial(_held, name))
    for name in _OWN:
        yield Way("matrices", f"matrices in {name}", partial(_held, name))
    for alike, words in ((True, "floats as quantised weights"), (False, _FLOATS_APART)):
        yield Way("floats", words, partial(_with_field, "floats_alike", alike))


# Rows are a head's: with a scale each, be it kept in float16, or a minimum too (lmdeploy); or one for a token's heads.
_INTEGER_CACHES = (
    *("int8/row", "q8_0/row", "stored q8_0/row", _BY_BFLOAT, "shifted8/row", "int8/token"),
    *("stored q8_0", "q8_0 across heads"),
    *(f"{held} {of}held int8/row then {held}" for held in HALVES for of in ("", "narrow ")),
)  # fmt: skip
_READ = (*HALVES, *TF32S)  # types that both operands are multiplied in
_EXPONENTIALS = {
    "": "exponentials not approximated",
    "taylor4/8": "exponentials to degree 4",
    "f16": "exponentials looked up in float16",
}
_OF_MATMULS = {"biases": "biases", "before_bias": "sums before biases", "products": "products"}
_FIELDS = {
    "norms": "norm weights",
    "vectors": "vectors",
    "normed": "normed values",
    "activated": "activated values",
    "tables": "rope tables",
    "added": "what is added to the residual",
    "scaled": "scaled scores",
    "states": "states",
    "columns": "columns of convolutions",
    "held": "table",
}


def _named(part: str, rounding: str) -> str:
    return {"f64": f"{part} not rounded", AS_IN_GGML: GGML}.get(rounding) or phrase(part, rounding)


def _with_field(field: str, value: str | bool, scheme: Scheme) -> Scheme:
    changed: dict[str, Any] = {field: value}
    return replace(scheme, **changed)


def _multiplied(operands: str, scheme: Scheme) -> Scheme:
    """Activations are rounded so, and weights held as before."""
    return replace(scheme, linear=_summed(replace(scheme.linear, operands=operands)))


def _held(stored: str, scheme: Scheme) -> Scheme:
    """Matrices and the embedding are held so, and read as before: as activations, where both were alike."""
    linear = scheme.linear
    read = linear.operands if linear.operands in _READ and linear.stored == linear.operands else as_read(linear.stored)
    return replace(scheme, linear=_summed(replace(linear, stored=read_as(stored, read))), held=stored)


def _summed(linear: Arithmetic) -> Arithmetic:
    """The same, with sums as such operands have them; on tensor cores those stay that are there already."""
    if linear.accumulate not in ("f32", _IN_FLOAT8):
        return linear
    return replace(linear, accumulate=_sums(linear.operands, linear.stored))


def _of_matmuls(field: str, value: str, scheme: Scheme) -> Scheme:
    changed: dict[str, Any] = {field: value}
    return replace(scheme, linear=replace(scheme.linear, **changed))


def _cached(stored: str, scheme: Scheme, of_keys: bool = True, of_values: bool = True, fresh: bool = False) -> Scheme:
    """K and V, or one of them, are held so, and read as what they are multiplied in; `fresh` ones, those of the step
    itself, before they are cached.
    """
    held = _attention(scheme, lambda of: (of.operands, read_as(stored, of.operands if of.operands in _READ else "f64")))
    scores, values = (replace(of, fresh=fresh) for of in (held.scores, held.values))
    return replace(held, scores=scores if of_keys else scheme.scores, values=values if of_values else scheme.values)


def cached_in(stored: str, scheme: Scheme, what: str = "KV cache", fresh: bool = False) -> Scheme:
    """The scheme with the "K cache", the "V cache" or both held in this rounding, be it but for the step's own."""
    held = _cached(stored, scheme, of_keys=what != "V cache", of_values=what != "K cache", fresh=fresh)
    return replace(held, name=f"{scheme.name}, {what} in {stored}{FRESH * fresh}")


def _attended(operands: str, scheme: Scheme) -> Scheme:
    """Q and the probabilities are rounded so, and what K and V are held in is read so."""
    return _attention(scheme, lambda of: (operands, read_as(_own(of), operands)))


def _attended_by_scaled(operands: str, scheme: Scheme) -> Scheme:
    """The same, but that Q is scaled before it is rounded."""
    attended = _attended(operands, scheme)
    return replace(attended, scores=replace(attended.scores, operands=f"scaled {operands}"))


def _own(arithmetic: Arithmetic) -> str:
    """What the other operand is held in, beyond what both are read as."""
    both = arithmetic.operands in _READ and arithmetic.operands == arithmetic.stored
    return "f64" if both else as_held(arithmetic.stored)


def _attention(scheme: Scheme, change: Callable[[Arithmetic], tuple[str, str]]) -> Scheme:
    scores, values = (Arithmetic(*change(of), fresh=of.fresh) for of in (scheme.scores, scheme.values))
    return replace(scheme, scores=scores, values=values)


WAYS = tuple(_ways())
# What makes so little of a difference that next to nothing is left without it.
_FINE = (_named("matrices", "normal f16"), *(phrase("KV cache", name) + FRESH for name in HALVES))
FINE_WAYS = tuple(way for way in WAYS if way.part == "exponentials" or way.name in _FINE)
_BY_NAME = {way.name: way for way in WAYS}
# Of an engine of somebody's own, beside activations in integers.
_CACHES = tuple(
    _BY_NAME[name] for name in (*(phrase("KV cache", of) for of in HALVES), phrase("KV cache alone", "q8_0"))
)

# What only a user can know: sums in half precision in an order that cannot be followed, as in GPUs' kernels
# (ggml-cuda/fattn*.cuh). The floor is so wide that small mistakes hide below it: never tried unasked.
_UNORDERED = Scheme(
    "flash attention with f16 sums", scores=Arithmetic("f16", "f16"), values=Arithmetic("f64", "f16", "f16", parts=0)
)


# Integers and the like in the words of a report, which may be asked for, too.
_OF_WORDS = {rounding_named(name).words: name for name in reversed((*GROUPS, *_SCALED, *_OWN, *_INTEGER_CACHES))}
_AS_REPORTED = re.compile(
    rf"(activations|weights|matrices|table|[KV]{{1,2}} cache) in ({'|'.join(map(re.escape, _OF_WORDS))})"
    "(?=,|$| and | read as )"
)
_BY_SIZE = rf".+/\w+(?:{RULE})?(?:{THEN}(?:{'|'.join(HALVES)}))?"  # of integers
_GRAMMAR = (
    "First, llama.cpp, exact, or one of activations, weights, matrices, activations and weights, activations and "
    "matrices `in ROUNDING`; then, or alone, with commas, any of KV cache, K cache, V cache, attention, "
    f"{', '.join((*_OF_MATMULS.values(), *_FIELDS.values()))} `in ROUNDING`, flash attention, exponentials to degree 4 "
    f"or looked up in float16, and {_FLOATS_APART}: beside matrices of floats activations are not rounded. A ROUNDING "
    "is float16, bfloat16, TF32, float8 (e4m3), float8 (e5m2), q8_0, q8_K or older q8_K blocks; of activations, "
    "weights, matrices and caches also, with any N, `row`, `tensor` or, in blocks of R rows, RxN, int8/N, fp8/N, "
    "int4/N, full int4/N, wide int8/N, divided int8/N, inverse int8/N, away int4/N, uint4/N, even uint4/N, mxfp4/N, "
    "affine4/N, nf4/N, int8/N to L (the largest becomes L), with ` in bf16`, ` by bf16` or ` by 2^n` after it, or int8 "
    "by S (a scale). "
    f"At the end may stand `{ON_TENSOR_CORES.strip()}`."
)


def _shortly(name: str) -> str:
    """Integers by their names, where a report's words stand for them."""
    return integers_named(_AS_REPORTED.sub(lambda found: f"{found[1]} in {_OF_WORDS[found[2]]}", name))


def in_tf32(scheme: Scheme) -> list[Scheme]:
    """The same with matmuls in TF32."""
    words = [rounding_named(name).words for name in TF32S]
    return [_BY_NAME[f"attention in {of}"].of(_BY_NAME[f"activations in {of}"].of(scheme)) for of in words]


# Of an engine in float64: norms, rope and softmax of transformers' models ask for float32.
IN_SINGLE = replace(EXACTLY, name="exact, norms, rope and softmax in float32", single=True)


def in_ties(scheme: Scheme) -> list[Scheme]:
    """The same where only what lies halfway between two numbers tells it: one value in 8,192 that float16 holds."""
    held = {scheme.scores.stored, scheme.values.stored} == {"f16"}
    return [_BY_NAME[_named("KV cache", "away f16")].of(scheme)] if held else []


def unrounded(scheme: Scheme) -> Scheme:
    """The same, but for activations, which stay as they are."""
    return _BY_NAME[_named("activations", "f64")].of(scheme)


def scheme_named(name: str) -> Scheme:
    """A way to round in matmuls with weights (`llama.cpp` is ggml's), ways to do other parts, or both, with commas.

    With ` on tensor cores` at the end sums run there. Any rounding may stand in `activations in ROUNDING` and the like.
    Raises EngineError with those that are near, and with what there is.
    """
    if name.endswith(ON_TENSOR_CORES):
        return scheme_named(name.removesuffix(ON_TENSOR_CORES)).on_tensor_cores()
    matmuls = {"llama.cpp": SCHEMES[0]} | {scheme.name: scheme for scheme in _matmuls()}
    attentions = {scheme.name: scheme for scheme in (*_attentions(), _UNORDERED)}
    first, *others = name.split(", ")
    short = _shortly(first)
    both = re.fullmatch(rf"activations in ({_BY_SIZE}) and matrices in ({_BY_SIZE})", short)
    asked = re.fullmatch(rf"(activations and (?:weights|matrices)|activations|weights|matrices) in ({_BY_SIZE})", short)
    scheme = _of_integers(*both.groups()) if both else _matmul(asked[1], asked[2]) if asked else matmuls.get(first)
    if scheme is None:
        scheme, others = SCHEMES[0], [first, *others]
    for other in others:
        if way := _way_named(other):
            scheme = way.of(scheme)
        elif other in attentions:
            scheme = _with(scheme, attentions[other])
        else:
            known = dict.fromkeys((*(() if other in matmuls else matmuls), *attentions, *_BY_NAME))
            near = "; ".join(get_close_matches(other, known))
            raise EngineError(f"unknown arithmetic {other!r}. {f'Near: {near}. ' if near else ''}{_GRAMMAR}")
    return scheme


def way_in(part: str, rounding: str) -> Way:
    """The way in which "activations" or "matrices" are rounded so, be it on no list."""
    way = _way_named(_named(part, rounding)) or _way_named(f"{part} in {rounding}")
    assert way is not None
    return way


def beside(scheme: Scheme) -> list[Scheme]:
    """The scheme with caches that engines of somebody's own have; Q is multiplied with integers as activations are."""
    caches = [cache.of(scheme) for cache in _CACHES]
    if scheme.linear.operands == AS_IN_GGML:
        return caches
    integers = Arithmetic(scheme.linear.operands, "q8_0")
    own = replace(scheme, name=f"{scheme.name}, Q as activations and KV cache in q8_0", scores=integers)
    return [*caches, replace(own, values=Arithmetic(stored="q8_0"))]


def unlisted(scheme: Scheme) -> list[Way]:
    """What it does in ways that are on no list."""
    own = ("activations", scheme.linear.operands), ("matrices", scheme.held)
    return [way for part, of in own if of != AS_IN_GGML and (way := way_in(part, of)) not in WAYS]


@cache
def _way_named(name: str) -> Way | None:
    """A way by its name, of activations, matrices and caches in any rounding."""
    short = _shortly(name)
    in_any = rf"(?!.* and ){_BY_SIZE}|(?:narrow )?\w+{BY}\S+"
    found = re.fullmatch(rf"(activations|matrices|(?:embedding )?table|(?:KV|K|V) cache) in ({in_any})", short)
    if not found:
        return _BY_NAME.get(name)
    part, rounding = found[1].removeprefix("embedding "), found[2]
    ways: dict[str, Callable[[str, Scheme], Scheme]] = {
        "activations": _multiplied, "matrices": _held, "table": partial(_with_field, "held"),
    }  # fmt: skip
    change = ways.get(part) or partial(cached_in, what=part)
    return _BY_NAME.get(phrase(part, rounding)) or _BY_NAME.get(short) or Way(part, short, partial(change, rounding))
