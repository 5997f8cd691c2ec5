"""Logits as users see them: the next token, its rivals, and whether a flip means anything."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tracediff.model.vocabulary import Vocabulary
from tracediff.result import Logits, Token
from tracediff.trace.reader import Trace
from tracediff.trace.statistics import ratio

if TYPE_CHECKING:
    from tracediff.model.graph import Op
    from tracediff.model.model import Model
    from tracediff.model.tensors import FileTensors

_TOP = 8


def compare_logits(reference: Trace, candidate: Trace, model: "Model | None") -> Iterator[Logits]:
    """The distributions after the last token of each step that both sides recorded with data."""
    texts, head = (model.vocabulary, _Head.of(model)) if model else (Vocabulary(), None)
    for step in sorted(reference.steps.keys() & candidate.steps.keys()):
        r, c = (trace.last_row(step, "output") for trace in (reference, candidate))
        if r is None or c is None or r.ndim != 1 or r.shape != c.shape or r.size < 2:
            continue  # not of the last token, not [T, n_vocab], or of another vocabulary
        r, c = _wide(r), _wide(c)
        if np.isfinite(r).all() and np.isfinite(c).all():
            logits = _compare(step, r, c, texts)
            yield _recomputed(logits, head, reference, candidate) if head else logits


@np.errstate(invalid="ignore")  # a signalling NaN that is cast
def _wide(row: np.ndarray) -> np.ndarray:
    return row.astype(np.float64)


@np.errstate(over="ignore", invalid="ignore")  # squares of 1e200
def _compare(step: int, r: np.ndarray, c: np.ndarray, texts: Vocabulary) -> Logits:
    log_p, log_q = log_softmax(r), log_softmax(c)
    best = np.partition(r, -2)[-2:]
    return Logits(
        step=step,
        reference=tuple(_top(r, log_p, c, texts)),
        candidate=tuple(_top(c, log_q, r, texts)),
        kl=float(np.sum(np.exp(log_p) * (log_p - log_q))),
        same_argmax=bool(r.argmax() == c.argmax()),
        margin=float(best[-1] - best[0]),
        max_diff=float(np.abs(r - c).max()),
        nmse=ratio(float(np.sum((c - r) ** 2)), float(np.sum(r**2))),
    )


def _recomputed(logits: Logits, head: "_Head", reference: Trace, candidate: Trace) -> Logits:
    return replace(
        logits,
        head=head.name,
        reference=head.given(logits.reference, logits.step, reference),
        candidate=head.given(logits.candidate, logits.step, candidate),
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64; -inf stays -inf."""
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _top(x: np.ndarray, log_p: np.ndarray, other: np.ndarray, texts: Vocabulary) -> Iterator[Token]:
    likeliest = np.flatnonzero(x >= np.partition(x, -_TOP)[-_TOP]) if x.size > _TOP else np.arange(x.size)
    for token in likeliest[np.argsort(-x[likeliest], kind="stable")][:_TOP]:
        rank = int((other > other[token]).sum()) + 1
        yield Token(int(token), texts.spelled(int(token)), float(x[token]), float(np.exp(log_p[token])), rank)


class _Head:
    """The output matrix of a GGUF file: logits one by one, as products in float64."""

    def __init__(self, op: "Op", tensors: "FileTensors") -> None:
        self._tensors = tensors
        self._state = op.inputs[0]
        self.name, *self._bias = (weight.name for weight in op.weights)

    @classmethod
    def of(cls, model: "Model") -> "_Head | None":
        """None where logits are no product: of encoders, and where they are scaled or capped."""
        op = model.graph.ops.get("output")
        return cls(op, model.tensors) if op and op.kind == "linear" else None

    def given(self, tokens: Iterable[Token], step: int, trace: Trace) -> tuple[Token, ...]:
        """The tokens with the logits that the trace's own final hidden state gives them, where it was recorded."""
        tokens, state = tuple(tokens), trace.last_row(step, self._state)
        if state is None:
            return tokens
        ids = [token.id for token in tokens]
        logits = self._tensors.rows(self.name, ids) @ state.reshape(-1).astype(np.float64)
        for bias in self._bias:
            logits += self._tensors.get(bias)[ids]
        return tuple(replace(token, recomputed=float(x)) for token, x in zip(tokens, logits, strict=True))
