"""The arrow diagram of `mismatch`: two traces -> tokens lined up -> gap -> floors -> what makes it -> result."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tracediff.audit.held import compare_weights, refuse_another_model
from tracediff.compare.logits import log_softmax
from tracediff.compare.sides import side_of
from tracediff.compare.tokens import describe_difference
from tracediff.errors import MismatchError
from tracediff.judge import GROWTH, Policy, coarsest
from tracediff.mismatch.logprobs import Told
from tracediff.mismatch.processed import Sampled, Sampling
from tracediff.mismatch.words import with_words
from tracediff.model.vocabulary import Vocabulary
from tracediff.pipeline import Progress, opened
from tracediff.result import Gap, Mismatch, Processed, TokenGap, Verdict, WeightResult
from tracediff.trace.reader import Trace
from tracediff.trace.runs import open_trace

if TYPE_CHECKING:
    from tracediff.mismatch.shares import Explained
    from tracediff.model.model import Model

_WORST = 8
_VALUES, _ROWS = 1 << 20, 8  # logits that sampling is solved from: rows enough to tell a rule, few enough for seconds
_USELESS = 1e-3  # nats: what changes the ratio of two probabilities by less is of no consequence
_SHIFTED = 0.1  # of the gap: a shift that leaves less is one
_BY_CHANCE = 0.3  # of the gap
_EXPLAINED = 0.05  # of the gap: what sampling leaves where it explains it


@dataclass(frozen=True, slots=True)
class Floors:
    """Mean |gap| in nats up to which roundings explain it, and from which on they do not; and of what they are."""

    match: float
    mismatch: float
    noise: str


def mismatch_traces(
    a: Path,
    b: Path,
    *,
    model: "Path | Model | None" = None,
    tolerance: float | None = None,
    prompt: int = 1,
    progress: Progress = lambda stage, fraction: None,
) -> Mismatch:
    """The log-probabilities of two traces' tokens from the index `prompt` on; with the model, which op makes the gap.

    Raises MismatchError where the two are not of the same tokens at the same positions, or tell nothing of them.
    """
    one, other = Told(open_trace(a)), Told(open_trace(b))
    model = opened(model, one.trace, other.trace) if model else None
    vocabulary = model.vocabulary if model else Vocabulary()
    _same_tokens(one, other, vocabulary)
    _refuse_shifted(one, other)
    x, y = (_from(told, prompt) for told in (one, other))
    if not (np.isfinite(x) & np.isfinite(y)).any():
        raise MismatchError(
            f"no token from index {prompt} on has a log-probability on both sides. Record the same ones."
        )
    weights = _wrong_weights(one.trace, other.trace, model)
    gap, floors = _gap(x, y, one, other), _floors(one, other, tolerance)
    differs = gap.mean_abs > floors.match or gap.impossible > 0
    processed = _processed(one, other, prompt, gap.mean_abs, floors) if differs else None
    notes = [f"{side.path}: cut off: {side.cut}." for side in (one.trace, other.trace) if side.cut]
    explained = None
    if model and not processed:  # of the same logits, processed in two ways, no op makes the gap
        explained = _explained(model, one.trace, other.trace, x - y, progress)
        notes += _chance(explained.chance, gap)
        if tolerance is None:
            floors = Floors(explained.floor, explained.floor, "noise, were both computed as the finer one is")
    verdict = _verdict(gap, floors, weights, processed)
    if verdict == "match":
        explained = None  # shares of noise
    result = Mismatch(
        verdict=verdict,
        a=side_of(one.trace),
        b=side_of(other.trace),
        gap=gap,
        floor=floors.match,
        beyond=floors.mismatch,
        noise=floors.noise,
        worst=tuple(_worst(x, y, one.tokens, vocabulary)),
        processed=processed,
        shares=explained.shares if explained else (),
        rest=explained.rest if explained else None,
        weights=weights,
        notes=tuple(notes),
    )
    return with_words(result)


def _explained(model: "Model", a: Trace, b: Trace, gap: np.ndarray, progress: Progress) -> "Explained":
    """Replay needs torch, which the gap alone does without."""
    from tracediff.mismatch.shares import explain

    return explain(model, a, b, gap, lambda fraction: progress("replay", fraction))


def _chance(chance: float, gap: Gap) -> Iterator[str]:
    if chance > _BY_CHANCE * gap.mean_abs:
        yield (
            f"Roundings of the coarser side alone make a mean |gap| of {chance:.2g} nats by chance: shares of that "
            "size say little, and another run has others."
        )


# --- the same tokens at the same positions --------------------------------------------------------------------------


def _same_tokens(a: Told, b: Told, vocabulary: Vocabulary) -> None:
    if not np.array_equal(a.places, b.places) or a.tokens != b.tokens:
        lines = [
            *describe_difference(0, (*a.tokens,), (*b.tokens,), (str(a.trace.path), str(b.trace.path)), vocabulary)
        ]
        if vocabulary and vocabulary.decode(a.tokens) == vocabulary.decode(b.tokens):
            lines.append("Both are the same text: it was tokenised anew.")
        lines.append("Log-probabilities are of tokens: hand the rollout's ids to the trainer, and never its text.")
        raise MismatchError("\n".join(lines).replace(" in step 0, first", ", first"))
    positions = a.positions, b.positions
    if positions[0] != positions[1]:
        at = next(i for i, (p, q) in enumerate(zip(*positions, strict=True)) if p != q)
        raise MismatchError(
            f"the positions are shifted: token {at} is at {positions[0][at]} in {a.trace.path}, and at "
            f"{positions[1][at]} in {b.trace.path}. Feed the same positions."
        )


def _refuse_shifted(a: Told, b: Told) -> None:
    """Raises MismatchError where one side's rows are the other's, some tokens later."""
    for by, off in ((1, "one token late"), (-1, "one token early"), (2, "two tokens late"), (-2, "two tokens early")):
        here, shifted = _distance(a, b, 0), _distance(a, b, by)
        if here > 0 and shifted < _SHIFTED * here:
            raise MismatchError(
                f"off by {abs(by)}: what {b.trace.path} says of a token stands {off}, where it lines up with "
                f"{a.trace.path} (which leaves {shifted / here:.1g} of the difference). Logits after token i predict "
                "token i + 1; a log-probability belongs to the token that it is of. Shift one side."
            )


def _distance(a: Told, b: Told, by: int) -> float:
    """The median distance of b's rows from a's, `by` tokens before; of log-probabilities where rows are not told."""
    indices = [i for i in range(len(a.tokens)) if a.has_logits(i) and b.has_logits(i + by)]
    if len(indices) >= 2:
        some = indices[:: max(1, len(indices) // 16)]
        return float(np.median([_apart(a.logits(i), b.logits(i + by)) for i in some]))
    x, y = a.logprobs[max(0, -by) :], b.logprobs[max(0, by) :]
    n = min(len(x), len(y))
    apart = np.abs(x[:n] - y[:n])
    apart = apart[np.isfinite(apart)]
    return float(np.mean(apart)) if len(apart) >= 4 else math.nan


def _apart(x: np.ndarray, y: np.ndarray) -> float:
    """Between two rows of logits, whatever was added to all of one; infinite where one side has none."""
    if x.shape != y.shape:
        raise MismatchError(
            f"the vocabularies differ: {x.size:,} logits a token on one side, {y.size:,} on the other. Cut padding."
        )
    both = np.isfinite(x) & np.isfinite(y)
    difference = x[both].astype(np.float64) - y[both]
    return float(difference.std()) if both.sum() > 1 else math.inf


# --- figures --------------------------------------------------------------------------------------------------------


def _from(told: Told, prompt: int) -> np.ndarray:
    """The log-probabilities without those of the first tokens of each sequence."""
    return np.where(told.places < prompt, np.nan, told.logprobs)


def _gap(x: np.ndarray, y: np.ndarray, a: Told, b: Told) -> Gap:
    told = ~(np.isnan(x) | np.isnan(y))
    both = np.isfinite(x) & np.isfinite(y)
    gap = x[both] - y[both]
    kls = [*_kls(a, b, [int(i) - 1 for i in np.flatnonzero(both)])]
    return Gap(
        n=len(gap),
        mean=float(gap.mean()),
        mean_abs=float(np.abs(gap).mean()),
        k3=float((np.expm1(gap) - gap).mean()),
        kl=float(np.mean(kls)) if len(kls) == len(gap) else None,
        largest=float(np.abs(gap).max()),
        impossible=int((told & ~both & ~(np.isneginf(x) & np.isneginf(y))).sum()),
    )


def _kls(a: Told, b: Told, indices: list[int]) -> Iterator[float]:
    """KL(B, A) of the distributions after these tokens: how far the trainer's are from the rollout's."""
    for index in indices:
        if a.has_logits(index) and b.has_logits(index):
            p, q = log_softmax(a.logits(index)), log_softmax(b.logits(index))
            kept = np.isfinite(q)
            yield float(np.sum(np.exp(q[kept]) * (q[kept] - p[kept])))


def _worst(x: np.ndarray, y: np.ndarray, tokens: list[int], vocabulary: Vocabulary) -> Iterator[TokenGap]:
    gap = np.nan_to_num(np.abs(x - y), nan=-1.0, posinf=math.inf)
    for index in np.argsort(-gap, kind="stable")[:_WORST]:
        if gap[index] > 0:
            token = tokens[index]
            yield TokenGap(int(index), token, vocabulary.spelled(token), float(x[index]), float(y[index]))


def _floors(a: Told, b: Told, tolerance: float | None) -> Floors:
    """From the types of the logits: one rounding of all operands, and what deep models make of it on the way.

    A relative error of e in logits that spread by s puts log-probabilities off by about sqrt(2) e s.
    """
    if tolerance is not None:
        return Floors(tolerance, tolerance, "--tolerance")
    storage = coarsest((a.storage, b.storage), ())
    spread = max(_spread(told) for told in (a, b))
    high = math.sqrt(2 * Policy().tolerance("output", storage)) * spread
    one = high / math.sqrt(GROWTH)
    return Floors(
        high if high <= _USELESS else one,
        high,
        f"one rounding to {storage} makes {one:.1g}, a deep model {high:.1g}",
    )


def _spread(told: Told) -> float:
    """Of the logits, or of the log-probabilities where there are none."""
    rows = [i for i in range(len(told.tokens)) if told.has_logits(i)][:_ROWS]
    values = [row[np.isfinite(row)].astype(np.float64) for row in map(told.logits, rows)]
    values = values or [told.logprobs[np.isfinite(told.logprobs)]]
    return float(max(row.std() for row in values if row.size))


def _verdict(gap: Gap, floors: Floors, other: object, processed: Processed | None) -> Verdict:
    if gap.mean_abs > floors.mismatch or other or processed or gap.impossible:
        return "diverged"
    return "match" if gap.mean_abs <= floors.match else "undecided"


# --- causes ---------------------------------------------------------------------------------------------------------


def _processed(a: Told, b: Told, prompt: int, gap: float, floors: Floors) -> Processed | None:
    """Which side's log-probabilities are the other's after sampling; None where that does not take the gap away."""
    found = [
        (side, solved) for side, raw, said in (("B", a, b), ("A", b, a)) if (solved := _sampling(raw, said, prompt))
    ]
    if not found:
        return None
    side, best = min(found, key=lambda one: (one[1].mean_abs, one[1].n_set))
    if not best.n_set or not best.mean_abs <= min(max(_EXPLAINED * gap, floors.match), floors.mismatch):
        return None
    first = "temperature" if best.temperature_first else "truncation"
    return Processed(side, best.temperature, best.top_k, best.top_p, best.min_p, first, best.mean_abs)  # type: ignore[arg-type]


def _sampling(raw: Told, said: Told, prompt: int) -> Sampling | None:
    """What makes the one of the other, on all tokens; None where there are no raw logits, or too few tokens."""
    told = [int(i) for i in np.flatnonzero(np.isfinite(_from(said, prompt))) if raw.has_logits(int(i) - 1)]
    if len(told) < 2 or not all(np.isfinite(raw.logits(i - 1)).all() for i in told[:_ROWS]):
        return None
    rows = max(_ROWS, _VALUES // raw.logits(told[0] - 1).size)
    some = told[:: max(1, math.ceil(len(told) / rows))]

    def sampled(indices: list[int]) -> Sampled:
        logits = np.stack([raw.logits(i - 1) for i in indices])
        return Sampled(logits, np.array([raw.tokens[i] for i in indices]), said.logprobs[indices])

    best = sampled(some).solved()
    parts = [told[at : at + rows] for at in range(0, len(told), rows)]
    left = [sampled(part).under(best).mean_abs * len(part) for part in parts]
    return Sampling(best.temperature, best.top_k, best.top_p, best.min_p, best.temperature_first, sum(left) / len(told))


def _wrong_weights(a: Trace, b: Trace, model: "Model | None") -> dict[str, tuple[WeightResult, ...]]:
    """Weights that a side holds and that are not the file's; without a file, those of B that are not A's."""
    if model is None:
        found = {"B": tuple(compare_weights(a, b, None))}
    else:
        traces = {"A": a, "B": b}
        found = {side: tuple(compare_weights(None, trace, model)) for side, trace in traces.items()}
        for side, trace in traces.items():
            refuse_another_model(found[side], trace, model)
    return {side: wrong for side, all_ in found.items() if (wrong := tuple(w for w in all_ if w.status == "wrong"))}
