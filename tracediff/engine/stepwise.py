"""An engine without modules, recorded by its own calls: numpy or torch arrays, one call for each value.

with tracediff.Recorder("mine.trace", gguf="model.gguf") as r:
    r.step(ids)
    r("blk.0.attn_q", q)
"""

from collections import Counter
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tracediff.engine import recorder
from tracediff.errors import TraceError
from tracediff.model.model import Model
from tracediff.names import Capture
from tracediff.trace.format import Rows
from tracediff.trace.shapes import misfit
from tracediff.trace.staging import staged
from tracediff.trace.writer import TraceWriter

_TYPES = "A trace holds float64, float32, float16 and bfloat16."


class Recorder:
    """A trace that is written call by call, and is there when the `with` block ends.

    With `gguf`, the file of the model, names and shapes are checked as they come. Values are numpy arrays, torch
    tensors or what numpy makes arrays of, of any layout and device; each is written before the call returns, so its
    buffer may be reused. `capture` is "all", "layers" (hidden states and logits alone), "stats" or "sketch"; `context`
    for how many positions the engine was set up, where that is more than it is fed: rope of some models has other
    factors then.

    Raises TraceError for what no trace can hold, ModelError for the file.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        gguf: str | Path | None = None,
        engine: str = "an engine in Python",
        capture: Capture = "all",
        context: int | None = None,
    ) -> None:
        self._out = Path(out)
        self._context = context
        self._engine = engine
        self._capture = capture
        self._model = Model(Path(gguf)) if gguf is not None else None
        self._graph = self._model.graph if self._model else None
        of_heads = self._model.expanded() if self._model else None  # of latent attention engines may have either form
        self._forms = [model.graph for model in (self._model, of_heads) if model]
        self._step = -1
        # Of each sequence: its tokens before the step, and in it; and what was recorded of it in this step.
        self._before: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        self._done: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        model, graph = self._model, self._graph
        arch, name, type_ = (graph.hparams.arch, model.path.name, graph.matmul_type) if model and graph else (None,) * 3
        with ExitStack() as files:
            path = files.enter_context(staged(self._out, [model.path] if model else []))
            writer = files.enter_context(TraceWriter(path, self._engine, arch, name, type_, self._context))
            self._to = recorder.TensorWriter(writer, self._capture)
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def step(self, tokens: Any, positions: Any = None, sequences: Any = None) -> None:
        """A forward pass over these token ids begins; without positions, at those that follow the last step's.

        Of a batch `sequences` are the numbers of the sequences that the tokens are of, without padding.
        """
        ids = _integers(tokens)
        of = [0] * len(ids) if sequences is None else _integers(sequences)
        before = self._before + self._tokens
        following = [before[one] + of[:i].count(one) for i, one in enumerate(of)]
        at = following if positions is None else _integers(positions)
        if not ids or not len(at) == len(of) == len(ids) or min(*ids, *at, *of) < 0:
            raise TraceError(
                f"a step of the tokens {ids[:8]} at {at[:8]}: give as many positions as tokens (and sequences), none "
                "negative."
            )
        self._step, self._before, self._tokens, self._done = self._step + 1, before, Counter(of), set()
        self._to.step(self._step, ids, at, of)

    def __call__(self, op: str, values: Any, rows: Rows = None, sequence: int | None = None) -> None:
        """What an op of the step put out: for all its tokens, or for those at the indices `rows`, ascending.

        With `sequence` as if the step had the tokens of that one alone: so scores and probabilities of a batch.
        """
        tensor = _tensor(op, values)
        if self._step < 0:
            raise TraceError(f"{op}: no step has begun. Call step(tokens) before the pass.")
        of = {*self._tokens} if sequence is None else {sequence}
        if not of <= {*self._tokens}:
            raise TraceError(f"{op}: step {self._step} has no token of sequence {sequence}.")
        if self._done & {(op, one) for one in of}:
            raise TraceError(f"{op} was recorded in step {self._step} already. Call step(tokens) before each pass.")
        rows = None if rows is None else tuple(rows)
        n_tokens = sum(self._tokens[one] for one in of)
        if rows is not None and (list(rows) != sorted({*rows}) or not {*rows} <= {*range(n_tokens)}):
            raise TraceError(f"{op}: rows {list(rows)} of a step of {n_tokens} tokens: they ascend from 0.")
        n_before = sum(self._before[one] for one in of)
        self._check(op, tuple(tensor.shape), n_tokens if rows is None else len(rows), n_before + n_tokens)
        self._to.op(self._step, op, tensor, rows=rows, sequence=sequence)
        self._done |= {(op, one) for one in of}

    def weight(self, name: str, values: Any) -> None:
        """A tensor of the file as the engine holds it, by the file's name of it: norm weights are expected."""
        self._to.weight(name, _tensor(name, values))

    def _check(self, op: str, shape: tuple[int, ...], n_rows: int, n_positions: int) -> None:
        """Raises TraceError where the model has no such op, or one of another shape. More keys than there are, or
        fewer, may be the engine's mistake, which the trace is to show.
        """
        if not self._forms:
            return
        forms = [graph for form in self._forms if op in (graph := form.with_scores([op]))]
        if not forms:
            known = dict.fromkeys(name for form in self._forms for name in form.ops)
            near, arch = get_close_matches(op, known, 3) or [*known][:3], self._forms[0].hparams.arch
            raise TraceError(
                f"{op}: no op of this {arch} model. Near it: {', '.join(near)}. `tracediff inspect MODEL` lists all."
            )
        expected = [form[op].shape(n_rows, n_positions - n_rows) for form in forms]
        each = zip(forms, expected, strict=True)
        wrong = [misfit(op, shape, right, may_be_flat=form[op].axes[0] == "T") for form, right in each]
        if all(one and one.axes != ("key",) for one in wrong):
            shapes = " or ".join(dict.fromkeys(str(list(right)) for right in expected))
            raise TraceError(
                f"{op}: shape {list(shape)} in step {self._step}; this model's is {shapes} for "
                f"{n_rows} tokens of {n_positions} so far. For some tokens of the step alone give rows=[...]; of a "
                "batch give scores and probabilities with sequence=K."
            )


def _integers(values: Any) -> list[int]:
    on_host = values.cpu() if isinstance(values, Tensor) else values
    return [int(value) for value in np.asarray(on_host).flat]


def _tensor(name: str, values: Any) -> Tensor:
    """Values as a torch tensor of a type that a trace has; shorter floats become float32, exactly."""
    if not isinstance(values, Tensor):
        # Torch takes no negative strides, and warns of what nobody may write to.
        array = np.require(values, requirements=["C", "W"])
        if array.dtype.name == "bfloat16":  # of ml_dtypes, as jax has it
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype.name not in ("float64", "float32", "float16"):
            raise TraceError(f"{name}: values of type {array.dtype}. {_TYPES}")
        return torch.from_numpy(array)
    if values.dtype in recorder.DTYPES.values():
        return values
    if not values.is_floating_point():
        raise TraceError(f"{name}: values of type {values.dtype}. {_TYPES}")
    return values.float()
