"""What `llama-debug --save-logits` writes: NAME.bin, float32 logits of the last token, and NAME-tokens.bin, int32 ids.

(llama.cpp, examples/debug/debug.cpp, save_output_data.)
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import ROWS, Array, Entry, Say, reading


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """The logits after the last token, and all tokens. Raises InterchangeError for embeddings, or empty files."""
    if path.stem.endswith("-embeddings"):
        raise InterchangeError(
            f"{path}: these are embeddings. Give the .bin that --save-logits wrote without --embedding."
        )
    tokens_path = path.with_name(f"{path.stem}-tokens.bin")
    logits, tokens = _read(path, "<f4"), _read(tokens_path, "<i4")
    if not np.isfinite(logits).all() or not logits.any():
        raise InterchangeError(
            f"{path}: the logits are all 0, or not finite. Look at what llama-debug prints of the run."
        )
    yield Entry(0, "tokens", partial(Array, tokens.astype(np.int64), "int64"))
    yield Entry(0, "output", partial(Array, logits[None], "f32"))
    if len(tokens) > 1:
        yield Entry(0, "output" + ROWS, partial(Array, np.array([len(tokens) - 1]), "int64"))


def _read(path: Path, dtype: str) -> np.ndarray:
    with reading(path, "what llama-debug --save-logits writes"):
        content = path.read_bytes()
    if not content or len(content) % 4:
        raise InterchangeError(f"{path}: {len(content)} bytes are no numbers of 4 bytes. Run llama-debug again.")
    return np.frombuffer(content, dtype)
