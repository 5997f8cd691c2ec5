"""ggml's dequantisation against gguf-py's, on blocks of random bytes."""

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tracediff.audit.quantisation import expected_error
from tracediff.errors import ModelError
from tracediff.model import dequantise as module
from tracediff.model.dequantise import dequantise

BLOCKS = [kind for kind in quants._type_traits if GGML_QUANT_SIZES[kind][0] > 1]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # random bytes are scales of NaN and Inf too
def test_ggml_and_gguf_py_agree(kind: GGMLQuantizationType) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (7, 3 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    assert module._to_float(kind) is not None
    np.testing.assert_array_equal(dequantise(raw, kind, "w"), quants.dequantize(raw, kind))
    rows = raw[1::2]  # no copy of the file is made for it: rows that lie apart
    np.testing.assert_array_equal(dequantise(rows, kind, "w"), quants.dequantize(np.ascontiguousarray(rows), kind))


def test_a_type_that_gguf_py_cannot_read_is_measured() -> None:
    rows = np.random.default_rng(0).standard_normal((8, 256))
    whole, each = expected_error(rows, GGMLQuantizationType.Q1_0)
    assert 0.1 < whole <= each


def test_without_ggml_gguf_py_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_to_float", lambda kind: None)
    raw = np.random.default_rng(0).integers(0, 60, (2, 68), dtype=np.uint8)
    expected = quants.dequantize(raw, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(dequantise(raw, GGMLQuantizationType.Q8_0, "w"), expected)
    with pytest.raises(ModelError, match="tensor 'w' is Q8_K, which gguf-py cannot dequantise"):
        dequantise(raw, GGMLQuantizationType.Q8_K, "w")
