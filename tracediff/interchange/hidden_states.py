"""Hidden states that vLLM saves (`extract_hidden_states`): `hidden_states` [tokens, layers asked for, channels] and
`token_ids` in one safetensors file a request.

The file does not say which layers: they are those of eagle_aux_hidden_state_layer_ids, in that order, and id N is the
state that layer N reads, which is what layer N - 1 makes: `--map` says it, `hidden_states.0=blk.1.ffn_residual` where
the first id is 2; or `--match` finds it. (docs.vllm.ai, "Hidden State Extraction".)
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange import safetensors_file
from tracediff.interchange.entry import Array, Entry, Say

_STATES, _TOKENS = "hidden_states", "token_ids"


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """One entry for each layer, and the tokens. Raises InterchangeError for a file that vLLM has not finished."""
    found = {entry.name: entry for entry in safetensors_file.entries(path, say)}
    if not {_STATES, _TOKENS} <= found.keys():
        raise InterchangeError(
            f"{path}: it holds {', '.join(found) or 'nothing'}, where vLLM writes {_STATES} and {_TOKENS}. Other "
            "files of tensors are read by `import safetensors`."
        )
    loaded, tokens = found[_STATES].load(), found[_TOKENS].load()
    assert isinstance(loaded, Array)
    assert isinstance(tokens, Array)
    states = loaded.values
    n = tokens.values.size
    if states.ndim != 3 or states.shape[0] != n:
        raise InterchangeError(
            f"{path}: {_STATES} has the shape {list(states.shape)} for {n} tokens: not [tokens, layers, channels]."
        )
    empty = [layer for layer in range(states.shape[1]) if not np.any(states[:, layer])]
    rows = [token for token in range(n) if not np.any(states[token])]
    if empty or rows:
        what = f"layer {empty[0]} of those asked for" if empty else f"token {rows[0]}"
        raise InterchangeError(
            f"{path}: all values of {what} are 0: of a buffer that was not filled when it was saved. Wait for the "
            "request to end, and switch chunked prefill off."
        )
    yield Entry(0, "tokens", found[_TOKENS].load)
    for layer in range(states.shape[1]):
        yield Entry(0, f"{_STATES}.{layer}", partial(Array, np.ascontiguousarray(states[:, layer]), loaded.dtype))
