"""What quantising a tensor costs: measured on the tensor itself, with llama.cpp's own quantiser."""

import ctypes

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tracediff.model.dequantise import dequantise

_ROWS = 64  # of a tensor that are quantised for the measurement
# Other quantisers of the same type do worse: gguf-py's by up to 1.12 times, llama.cpp's own with an importance matrix
# by up to 1.13 (log-normal importance, sigma 1.5; Gaussian and Student-t weights), and by up to 11 in a row of Q5_1
# where a few channels of massive activations weigh 1e4 times as much: both are measured.
_MARGIN = 1.5
_MASSIVE, _WEIGH = 10, 1e4
_NEXT_TO_NOTHING = 1e-6  # of the mean square of all rows: what a row is measured by that has less, as untrained tokens'
_MOST = 0.95, 0.99  # an error of 1 is what zeros make: no type is so coarse


def expected_error(tensor: np.ndarray, kind: GGMLQuantizationType) -> tuple[float, float]:
    """Bounds on the relative RMS error of a [rows, columns] tensor quantised to `kind`: of the whole, of any one row.

    Rows from all over the tensor are quantised by llama.cpp (ggml_quantize_chunk) and dequantised; the bound is
    what that leaves, times a margin. So it knows of this tensor's outliers, which widen every block they are in.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, _ROWS).astype(int))].astype(np.float32)
    massive = np.ones(rows.shape[1], np.float32)
    massive[np.linspace(0, len(massive) - 1, min(_MASSIVE, len(massive))).astype(int)] = _WEIGH
    measured = []
    for importance in (None, massive):
        back = dequantise(_quantised(rows, kind, importance), kind, "of the measurement").reshape(rows.shape)
        whole, each = relative_errors(rows, back)
        measured.append((whole, float(each.max())))
    whole, row = np.max(measured, 0)
    return min(_MARGIN * float(whole), _MOST[0]), min(2 * _MARGIN * float(row), _MOST[1])


def relative_errors(right: np.ndarray, held: np.ndarray) -> tuple[float, np.ndarray]:
    """RMS of the error over RMS of the values: of the whole, and of each row."""
    sums = [_squares(right[at : at + _ROWS], held[at : at + _ROWS]) for at in range(0, len(right), _ROWS)]
    squares, errors = (np.concatenate(parts) for parts in zip(*sums, strict=True))
    least = max(_NEXT_TO_NOTHING * float(squares.mean()), 1e-300)
    each = np.sqrt(errors / np.maximum(squares, least))
    return float(np.sqrt(errors.sum() / max(squares.sum(), 1e-300))), each


def _squares(right: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over each row of the squares of the values, and of the errors."""
    wide = right.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # of a NaN there is no error to speak of: NaN
        return np.square(wide).sum(-1), np.square(held - wide).sum(-1)


def _quantised(rows: np.ndarray, kind: GGMLQuantizationType, importance: np.ndarray | None) -> np.ndarray:
    """[rows, columns] float32 -> uint8 [rows, bytes per row], by the importance of each column, if any."""
    from llama_cpp import _ggml  # llama.cpp's library: gguf-py has no quantiser of K-quants

    block, size = GGML_QUANT_SIZES[kind]
    out = np.zeros((len(rows), rows.shape[1] // block * size), np.uint8)
    quantise = _ggml.libggml.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    if importance is None and _ggml.libggml.ggml_quantize_requires_imatrix(ctypes.c_int(kind.value)) & 1:
        importance = np.ones(rows.shape[1], np.float32)
    rows = np.ascontiguousarray(rows)
    quantise(
        kind.value, rows.ctypes.data, out.ctypes.data, 0, len(rows), rows.shape[1],
        None if importance is None else importance.ctypes.data,
    )  # fmt: skip
    return out
