"""What an engine's outputs become in a trace: everything, the hidden states only, or statistics."""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.names import Capture, token_axis, wanted
from tracediff.trace.format import DType, Rows, Statistics
from tracediff.trace.sketch import sketch
from tracediff.trace.statistics import Moments
from tracediff.trace.writer import TraceWriter

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
}  # fmt: skip
_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in DTYPES.items()}  # type: ignore[misc]


class TensorWriter:
    """Writes tensors to a trace as `capture` says. Statistics are computed on the tensor's own device.

    Raises EngineError for a capture that is none.
    """

    def __init__(self, writer: TraceWriter, capture: Capture = "all") -> None:
        if capture not in get_args(Capture):
            raise EngineError(f"capture {capture!r} is none of {', '.join(get_args(Capture))}")
        self._writer = writer
        self._capture = capture

    def step(
        self, step: int, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int] | None = None
    ) -> None:
        """Begin a step, of one sequence or of one for each token."""
        self._writer.step(step, tokens, positions, sequences)

    def weight(self, name: str, values: Tensor) -> None:
        """A weight as the engine holds it."""
        self._writer.weight(name, _bits(values), _NAMES[values.dtype])

    def op(
        self,
        step: int,
        op: str,
        values: Tensor,
        hidden: Tensor | None = None,
        rows: Rows = None,
        sequence: int | None = None,
    ) -> None:
        """An op's output; statistics leave out what `hidden` [T, S] marks: scores that the mask will hide."""
        if self._capture in ("stats", "sketch"):
            visible = values if hidden is None else values[..., ~hidden]
            sketched = _sketch(op, values, hidden) if self._capture == "sketch" else None
            self._writer.op_statistics(step, op, tuple(values.shape), statistics(visible), rows, sequence, sketched)
        elif wanted(op, self._capture):
            self._writer.op(step, op, _bits(values), _NAMES[values.dtype], rows, sequence)

    def parts(self, step: int, op: str, values: Mapping[int, Tensor], hidden: Mapping[int, Tensor | None]) -> None:
        """An op's output for the tokens of each sequence of the step: together where its rows are the tokens'."""
        if len(values) == 1:
            (sequence,) = values
            self.op(step, op, values[sequence], hidden[sequence])
        elif self._capture in ("stats", "sketch") or token_axis(op):
            for sequence, part in values.items():
                self.op(step, op, part, hidden[sequence], sequence=sequence)
        else:
            self.op(step, op, torch.cat([*values.values()]))


def _sketch(op: str, values: Tensor, hidden: Tensor | None) -> bytes:
    wide = values.detach().to("cpu", torch.float64).numpy()
    return sketch(wide, token_axis(op), None if hidden is None else hidden.cpu().numpy())


def _bits(x: Tensor):  # type: ignore[no-untyped-def]
    x = x.detach().contiguous().cpu()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def statistics(x: Tensor) -> Statistics:
    """Min, max, mean and RMS over the finite values, accumulated in float64, and counts of the others."""
    x = x.detach().flatten()
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):  # ten times as fast as torch's sums
        seen = Moments()
        seen.add(x.numpy())
        return seen.statistics()
    n_nan = n_inf = 0
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    if not norm.isfinite():
        finite = x.isfinite()
        n_nan = int(x.isnan().sum())
        n_inf = x.numel() - n_nan - int(finite.sum())
        x = x[finite]
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    if not x.numel():
        return Statistics(None, None, None, None, n_nan, n_inf)
    low, high = torch.aminmax(x)
    mean = torch.sum(x, dtype=torch.float64) / x.numel()
    return Statistics(float(low), float(high), float(mean), float(norm / x.numel() ** 0.5), n_nan, n_inf)
