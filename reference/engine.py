"""Runs a model in llama.cpp for a request: load, tokenise, decode, all of it observed."""

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np

from tracediff.errors import EngineError
from tracediff.trace.writer import TraceWriter
from tracediff_reference import ggml
from tracediff_reference.observer import Observer
from tracediff_reference.protocol import Message, Options, Request

_KV_TYPES = {"f32": llama.GGML_TYPE_F32, "f16": llama.GGML_TYPE_F16, "q8_0": llama.GGML_TYPE_Q8_0}
_SHOWN = (3, 4)  # GGML_LOG_LEVEL_WARN and _ERROR, ggml.h
_PAD = 256  # the KV cache grows in such steps (llama_kv_cache::get_n_kv)


def trace(request: Request, send: Callable[[Message], None]) -> None:
    """Write the trace that `request` asks for; raises EngineError for what llama.cpp refuses."""
    start_library()
    model = _load(request)
    tokens = _tokens(request, model)
    send(Message(tokens=tuple(tokens)))
    if request.out is not None:
        _trace(request, model, tokens, lambda fraction: send(Message(progress=fraction)))
    llama.llama_model_free(model)


def start_library() -> None:
    """Once, before anything else; raises EngineError for a llama.cpp that is laid out differently."""
    ggml.check_layout()
    llama.llama_log_set(_log, ctypes.c_void_p())
    llama.llama_backend_init()


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: object) -> None:
    """Warnings and errors only: the last lines of the log are shown when llama.cpp dies."""
    if level in _SHOWN:
        os.write(2, text)


def _trace(request: Request, model: llama.llama_model_p, tokens: list[int], progress: Callable[[float], None]) -> None:
    fed = [tokens, *map(list, request.passes)]
    n_fed = sum(map(len, fed))
    _check_length(request, n_fed)
    engine = f"llama.cpp (llama-cpp-python {ggml.llama_version()})"
    model_name = Path(request.model).name
    of, context = Path(request.out or ""), request.options.n_ctx or None
    told = (engine, request.arch, model_name, request.weights, context)
    with TraceWriter(of, *told, rounding=request.rounding) as writer:
        observer = Observer(request, writer, progress)
        longest = max(map(len, fed))
        n_sequences = max(chain((0,), *request.sequences)) + 1
        context, _callback = _context(request.options, model, n_fed + request.n_decode, longest, observer, n_sequences)
        cells: list[int] = []  # of the cache: whose each is
        ends: Counter[int] = Counter()  # the next position of each sequence
        for step in range(len(fed) + request.n_decode):
            tokens = fed[step] if step < len(fed) else tokens
            whose = request.sequences[step] if step < len(request.sequences) else (0,) * len(tokens)
            positions = []
            for sequence in whose:
                positions.append(ends[sequence])
                ends[sequence] += 1
            cells += whose
            writer.step(step, tokens, positions, whose)
            observer.begin(step, range(len(cells) - len(whose), len(cells)), cells if n_sequences > 1 else ())
            logits = _decode(context, observer, tokens, positions, whose, request)
            tokens = [int(logits.argmax())]
        llama.llama_free(context)


def _load(request: Request) -> llama.llama_model_p:
    layers = request.options.gpu_layers
    if layers and not llama.llama_supports_gpu_offload():
        raise EngineError(
            f"--gpu-layers {layers}: this build of llama.cpp has no GPU back end. Leave the option out, name the "
            "folder of another build with --llama-lib, or install llama-cpp-python for your GPU."
        )
    params = llama.llama_model_default_params()
    params.n_gpu_layers = layers
    params.use_extra_bufts = request.options.extra_bufts
    params.vocab_only = request.out is None
    return loaded(request.model, params)


def loaded(path: str, params: llama.llama_model_params) -> llama.llama_model_p:
    """The model of a GGUF file; raises EngineError where llama.cpp refuses it."""
    model = llama.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise EngineError(
            f"llama.cpp cannot load {path}, for the reason below. Convert the model again, or install the "
            f"llama-cpp-python that it was made for ({ggml.llama_version()} is installed)."
        )
    return model


def _tokens(request: Request, model: llama.llama_model_p) -> list[int]:
    if request.tokens is not None:
        return list(request.tokens)
    vocab = llama.llama_model_get_vocab(model)
    text = (request.prompt or "").encode()
    room = len(text) + 16
    buffer = (llama.llama_token * room)()
    n = llama.llama_tokenize(vocab, text, len(text), buffer, room, True, True)
    if n < 0:
        raise EngineError(f"llama.cpp cannot tokenise the prompt (it answered {n}).")
    if n == 0:
        raise EngineError("the prompt is empty: no tokens. Give some text with -p or ids with --tokens 1,2,3.")
    return list(buffer[:n])


def _check_length(request: Request, n_tokens: int) -> None:
    need, room = n_tokens + request.n_decode, request.options.n_ctx or request.n_ctx_train
    if need > room:
        raise EngineError(
            f"the prompt of {n_tokens} tokens and {request.n_decode} decode steps do not fit the context of {room}. "
            "Shorten the prompt, or raise --ctx if the model can take it."
        )


def context_params(options: Options) -> llama.llama_context_params:
    """Those of the options that change the graph; sizes are the caller's."""
    params = llama.llama_context_default_params()
    params.n_threads = params.n_threads_batch = options.threads
    params.type_k = params.type_v = _KV_TYPES[options.kv_type]
    params.flash_attn_type = (
        llama.LLAMA_FLASH_ATTN_TYPE_ENABLED if options.flash_attn else llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.no_perf = True
    return params


def _context(
    options: Options, model: llama.llama_model_p, need: int, longest: int, observer: Observer, n_sequences: int
) -> tuple[llama.llama_context_p, object]:
    params = context_params(options)
    params.n_seq_max, params.kv_unified = n_sequences, n_sequences > 1  # their cells in one row, in the order of tokens
    params.n_ctx = options.n_ctx or -(-need // _PAD) * _PAD
    params.n_batch = options.n_batch or longest
    params.n_ubatch = min(options.n_ubatch, params.n_batch)
    callback = llama.ggml_backend_sched_eval_callback(observer)
    params.cb_eval = callback
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise EngineError(
            "llama.cpp cannot make a context with these options, for the reason below. Try without them "
            "(--ctx, --batch, --ubatch, --kv-type, --flash-attn, --gpu-layers)."
        )
    return context, callback  # the callback must live as long as the context


def _decode(
    context: llama.llama_context_p,
    observer: Observer,
    tokens: Sequence[int],
    positions: Sequence[int],
    sequences: Sequence[int],
    request: Request,
) -> np.ndarray:
    """One step, in as many batches as it takes; returns the logits of its last token."""
    n_batch = request.options.n_batch or len(tokens)
    for first in range(0, len(tokens), n_batch):
        part = tokens[first : first + n_batch]
        result = decoded(context, part, positions[first:], sequences[first:])
        if observer.error:
            raise observer.error
        if result:
            raise EngineError(
                f"llama.cpp cannot decode the {len(part)} tokens from position {positions[first]} on: llama_decode "
                f"answered {result}. Try other options (--ctx, --batch, --ubatch, --kv-type, --gpu-layers)."
            )
    _check_seen(observer, request)
    pointer = llama.llama_get_logits_ith(context, -1)
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (request.n_vocab,))


def decoded(
    context: llama.llama_context_p, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
) -> int:
    """One batch of these tokens: what llama_decode answers, or llama_encode for an encoder alone."""
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, positions[i]
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[i]
        batch.logits[i] = 1  # every row, or the last layer is pruned to the last row
    run = llama.llama_encode if is_encoder(llama.llama_get_model(context)) else llama.llama_decode
    result = run(context, batch)
    llama.llama_batch_free(batch)
    return int(result)


def is_encoder(model: llama.llama_model_p) -> bool:
    """Whether it is an encoder without a decoder: then all tokens see one another, which llama_decode does not know."""
    return bool(llama.llama_model_has_encoder(model)) and not llama.llama_model_has_decoder(model)


def _check_seen(observer: Observer, request: Request) -> None:
    """Every op must have come, but flash attention hides scores and probabilities."""
    hidden = ("attn_scores", "attn_scores_scaled", "attn_probs") if request.options.flash_attn else ()
    missing = [role for role in observer.axes if role not in observer.seen and not role.endswith(hidden)]
    if missing:
        raise EngineError(
            f"llama.cpp's graph does not show {len(missing)} ops, the first {missing[0]!r}: this version builds it "
            f"differently. llama-cpp-python {ggml.llama_version()} is installed; tracediff knows 0.3.36."
        )
