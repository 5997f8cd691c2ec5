"""Logits as users see them: the next token, its rivals, and whether a flip means anything."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tracediff.result import Logits, Token
from tracediff.trace.reader import Trace

_TOP = 8


def compare_logits(reference: Trace, candidate: Trace, model: Path | None = None) -> Iterator[Logits]:
    """The distributions after the last token of each step that both sides recorded with data."""
    texts = _Vocabulary(model)
    for step in sorted(reference.steps.keys() & candidate.steps.keys()):
        records = [trace.ops.get((step, "output")) for trace in (reference, candidate)]
        if not all(record and record.has_data for record in records) or not records[0] or not records[1]:
            continue
        shapes = [record.shape for record in records if record]
        if any(len(shape) != 2 or 0 in shape for shape in shapes) or shapes[0][1] != shapes[1][1]:
            continue  # not [T, n_vocab], or of another vocabulary
        r = reference.values(records[0])[-1].astype(np.float64)
        c = candidate.values(records[1])[-1].astype(np.float64)
        if np.isfinite(r).all() and np.isfinite(c).all():
            yield _compare(step, r, c, texts)


def _compare(step: int, r: np.ndarray, c: np.ndarray, texts: "_Vocabulary") -> Logits:
    log_p, log_q = _log_softmax(r), _log_softmax(c)
    best = np.sort(r)[-2:]
    return Logits(
        step=step,
        reference=tuple(_top(r, log_p, c, texts)),
        candidate=tuple(_top(c, log_q, r, texts)),
        kl=float(np.sum(np.exp(log_p) * (log_p - log_q))),
        same_argmax=bool(r.argmax() == c.argmax()),
        margin=float(best[-1] - best[0]),
        max_diff=float(np.abs(r - c).max()),
        nmse=float(np.sum((c - r) ** 2) / max(np.sum(r**2), 1e-300)),
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max()
    return shifted - np.log(np.exp(shifted).sum())


def _top(x: np.ndarray, log_p: np.ndarray, other: np.ndarray, texts: "_Vocabulary") -> Iterator[Token]:
    for token in np.argsort(-x, kind="stable")[:_TOP]:
        rank = int((other > other[token]).sum()) + 1
        yield Token(int(token), texts[int(token)], float(x[token]), float(np.exp(log_p[token])), rank)


class _Vocabulary:
    """Token texts of a GGUF file; None for each where there is no model."""

    def __init__(self, model: Path | None) -> None:
        self._texts: list[str] = []
        if model:
            from tracediff.model.gguf_file import GGUFFile

            self._texts = list(GGUFFile(model).strings("tokenizer.ggml.tokens"))

    def __getitem__(self, token: int) -> str | None:
        return self._texts[token] if token < len(self._texts) else None
