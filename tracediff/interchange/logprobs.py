"""Log-probabilities as servers return them, JSON of one sequence: what `mismatch` needs, and no more.

    vLLM, offline and served      prompt_logprobs: [null, {"ID": {"logprob": X, ...}, ...}, ...]
    OpenAI, vLLM, llama-server    choices[0].logprobs.content: [{"token": TEXT, "logprob": X}, ...]
    OpenAI completions, vLLM      choices[0].logprobs.token_logprobs: [X, ...], and tokens
    llama-server /completion      completion_probabilities: [{"id": ID, "logprob": X}, ...]

Ids are taken from `id`, `token_ids`, `prompt_token_ids`, and tokens of the form `token_id:ID` (vLLM's
return_tokens_as_token_ids); where a file has texts alone, from --tokens. (vllm/entrypoints/openai/protocol.py;
llama.cpp, tools/server/server-task.cpp; OpenAI's API reference, chat completions.)
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import ROWS, Array, Entry, Say, from_json, in_form, reading
from tracediff.names import TOKEN_LOGPROBS
from tracediff.trace.format import are_logprobs

_LEAST = -9998.0  # servers write -9999 for a probability of 0, which JSON's numbers lack
_ID = re.compile(r"token_id:(\d{1,9})")
_Said = list[tuple[int | None, float | None]]  # of each token its id and log-probability, where they are told


def entries(path: Path, say: Say, given: Sequence[int] = ()) -> Iterator[Entry]:
    """Ids and log-probabilities of one sequence; `given` are its ids by the user, prompt and completion.

    Raises InterchangeError for a file without log-probabilities, of several sequences, whose ids are not all known, or
    not those that were given.
    """
    with reading(path, "JSON"):
        document = from_json(path.read_text(encoding="utf-8"))
    answer, choice = _one_sequence(path, document)
    with in_form(path, "log-probabilities in a form that is known"):
        prompt, sampled = _prompt(path, answer, choice), _sampled(answer, choice, say)
        told = [(token, None if x is None else float(x)) for token, x in (*prompt, *sampled)]
        if not all(token is None or type(token) is int for token, _ in told):
            raise ValueError("ids that are no whole numbers")
    if not any(x is not None for _, x in told):
        raise InterchangeError(
            f"{path}: no log-probabilities in it. Ask for them: vLLM `prompt_logprobs: 0` and `logprobs: 0`, OpenAI "
            "`logprobs: true`, llama-server `n_probs: 1`."
        )
    first, ids = _ids(path, told, bool(prompt), given)
    held = [(first + at, x) for at, (_, x) in enumerate(told) if x is not None]
    values = np.array([-math.inf if x < _LEAST else x for _, x in held], np.float64)
    if not are_logprobs(values):
        raise InterchangeError(
            f"{path}: these are no log-probabilities: all 0 or infinite, or above 0. Natural logarithms of "
            "probabilities are expected."
        )
    yield Entry(0, "tokens", partial(Array, np.array(ids, np.int64), "int64"))
    yield Entry(0, TOKEN_LOGPROBS, partial(Array, values, "f64"))
    if len(held) < len(ids):
        rows = np.array([index for index, _ in held], np.int64)
        yield Entry(0, TOKEN_LOGPROBS + ROWS, partial(Array, rows, "int64"))


def _one_sequence(path: Path, document: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The answer, and its one choice: the answer itself where it has none."""
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    if not isinstance(document, dict):
        raise InterchangeError(f"{path}: it is no answer of a server: a JSON object is expected, of one sequence.")
    choices = document.get("choices", document.get("outputs"))
    if choices is None:
        return document, document
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise InterchangeError(f"{path}: it is not of one sequence. Keep one of its choices (n=1).")
    return document, choices[0]


def _prompt(path: Path, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> _Said:
    ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or []
    said = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
    if not said:
        return [(token, None) for token in ids]
    if ids and len(ids) != len(said):
        raise InterchangeError(
            f"{path}: {len(said)} prompt_logprobs of {len(ids)} prompt_token_ids. Ask for both anew."
        )
    return [_of_prompt(path, index, one, ids[index] if ids else None) for index, one in enumerate(said)]


def _of_prompt(path: Path, index: int, one: Any, token: int | None) -> tuple[int | None, float | None]:
    """Of one token of the prompt; the likeliest ones stand beside it."""
    if one is None:
        return token, None
    keys = list(one)
    if token is None and len(keys) > 1:
        raise InterchangeError(
            f"{path}: prompt_logprobs[{index}] lists {len(keys)} tokens and not which is the prompt's. Ask "
            "with `return_token_ids: true`, or for `prompt_logprobs: 0`."
        )
    key = keys[0] if token is None and keys else str(token)
    if key not in one:
        raise InterchangeError(
            f"{path}: prompt_logprobs[{index}] says nothing of token {key}, which is there: they are shifted, or "
            "of another prompt."
        )
    value = one[key]
    return int(key), float(value["logprob"] if isinstance(value, dict) else value)


def _sampled(answer: Mapping[str, Any], choice: Mapping[str, Any], say: Say) -> _Said:
    logprobs = choice.get("logprobs") or {}
    items = answer.get("completion_probabilities") or (logprobs.get("content") if isinstance(logprobs, dict) else None)
    ids = choice.get("token_ids") or []
    if items is not None:
        said = [(_id(item), _logprob(item)) for item in items]
        if any("prob" in item for item in items):
            say("probabilities after sampling (post_sampling_probs): processed, not raw")
    elif isinstance(logprobs, list):  # vLLM's own objects: the sampled token's is among the likeliest
        said = [_of_object(one, ids[at] if at < len(ids) else None) for at, one in enumerate(logprobs)]
    else:
        texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
        said = [(_id({"token": text}), x) for text, x in zip(texts, values, strict=True)] if texts else []
    if ids and len(ids) == len(said):
        said = [(token, x) for token, (_, x) in zip(ids, said, strict=True)]
    return said


def _of_object(one: Mapping[str, Any], token: int | None) -> tuple[int | None, float | None]:
    if token is None:
        return None, None
    value = one.get(str(token))
    return token, float(value["logprob"]) if isinstance(value, dict) else value


def _id(item: Mapping[str, Any]) -> int | None:
    if isinstance(item.get("id"), int):
        return int(item["id"])
    found = _ID.fullmatch(str(item.get("token")))
    return int(found[1]) if found else None


def _logprob(item: Mapping[str, Any]) -> float | None:
    if "prob" in item:
        return math.log(item["prob"]) if item["prob"] > 0 else -math.inf
    return item.get("logprob")


def _ids(path: Path, told: _Said, whole: bool, given: Sequence[int]) -> tuple[int, Sequence[int]]:
    """The index of the first token that is told of, and the ids of all."""
    known = [token for token, _ in told]
    if not given and whole and None not in known:
        return 0, [token for token in known if token is not None]
    if not given:
        what = "the prompt's" if None not in known else "its"
        raise InterchangeError(
            f"{path}: it does not hold {what} ids. Ask with `return_token_ids: true` (vLLM), or give --tokens with the "
            "ids of prompt and completion: texts do not tell ids."
        )
    first = 0 if whole else len(given) - len(known)
    wrong = first < 0 or len(given) - first != len(known)
    unequal = [i for i, token in enumerate(known) if token is not None and not wrong and token != given[first + i]]
    if wrong or unequal:
        where = f"token {first + unequal[0]} is {known[unequal[0]]} there" if unequal else f"{len(known)} are told of"
        raise InterchangeError(
            f"{path}: --tokens has {len(given)} ids, and {where}: they are shifted, or of another sequence. Give the "
            "ids of prompt and completion, of this answer."
        )
    return first, given
