"""One faulty op as a folder that anybody can run: its recorded inputs, what is right, and a script of numpy alone."""

import inspect
import io
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracediff.audit.held import compare_weights, rounded_weights
from tracediff.diagnose.beforehand import is_mistaken
from tracediff.errors import OutputError, TracediffError
from tracediff.files import refuse_foreign, replacing, write_text
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.numerics.kinds import KINDS
from tracediff.pipeline import opened
from tracediff.replay.judging import Subject, judge_ops, replays_of
from tracediff.replay.misshapen import suited
from tracediff.trace.runs import Paths, open_trace

_MOST = 990_000  # bytes of data.npz: with the script less than 1 MB
_DENSEST = 10  # times that values may be compressed: those of 4-bit weights were 5 to 6 times
# Attention's axes of the step's tokens.
_QUERIES = {
    "scores": {"recorded": 1, "input0": 0},
    "softmax": {"recorded": 1, "input0": 1, "input1": 0},
    "weighted_values": {"recorded": 0, "input0": 1},
}
_OUT = ("recorded", "right", "bound")
_MARK = b'"""A reproducer by tracediff'
Arrays = dict[str, np.ndarray]


def reproduce(paths: Paths, model: Model, name: str, step: int, folder: Path, arithmetic: str | None = None) -> str:
    """Write reproduce.py and data.npz of one record of a trace, or of those of all ranks of a run, whose parts are put
    together; -> what is in them, in words. It is judged as `check` does, under the `arithmetic` if given.

    Raises TracediffError where the op was not recorded, its inputs were not, it is sound, or it cannot be made small;
    OutputError, before any work, where the folder holds other files of these names.
    """
    script_at, data_at = folder / "reproduce.py", folder / "data.npz"
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file. Name a folder, or one that is not there yet.")
    refuse_foreign(script_at, _is_ours)
    is_again = script_at.is_file()
    refuse_foreign(data_at, lambda head: is_again)
    trace = open_trace(paths)
    path = trace.path
    if (step, name) not in trace.ops:
        raise TracediffError(f"{path}: it has no record {name} in step {step}. `tracediff inspect {path}` lists all.")
    model = suited(opened(model, trace), trace)
    if name not in model.graph:
        raise TracediffError(
            f"{name} is no op of this model: there is nothing to replay it by. "
            f"`tracediff inspect {model.path}` lists those that are."
        )
    held_by = [rounded_weights(compare_weights(None, one, model), one, model) for one in trace.sides]
    subjects = [Subject(one, held, arithmetic) for one, held in zip(trace.sides, held_by, strict=True)]
    replays = replays_of(model, subjects, is_mistaken=is_mistaken)
    judged = [one for one in judge_ops(replays, [name]) if one.record.step == step]
    if not judged:
        raise TracediffError(f"{name} in step {step} cannot be replayed. `tracediff check {path}` says why.")
    side, record, local = max(judged, key=lambda one: one.local.faulty)
    replay = replays[side]
    op = replay.graph[name]
    if not local.faulty:
        raise TracediffError(f"{name} in step {step} is as it should be: there is nothing to reproduce.")
    # A state computes nothing: it is what the step before handed on.
    unrecorded = [other for other in local.segment[:-1] if replay.graph[other].kind != "state"]
    if unrecorded:
        raise TracediffError(
            f"{name} in step {step} was judged as one with {unrecorded[0]} and what follows: record what it reads, "
            "then there is one op to reproduce."
        )
    known = replay.known(record)
    whole: Arrays = {"recorded": known.recorded.numpy(), "right": known.exact.numpy(), "bound": known.bound.numpy()}
    whole |= {f"input{n}": values.numpy().astype(np.float32) for n, values in enumerate(known.inputs)}
    table = np.unique(whole["input0"], return_inverse=True) if op.kind == "embedding" else None
    if table:  # of a table the rows that are read, under numbers of their own
        whole["input0"] = table[1].reshape(whole["input0"].shape).astype(np.float32)
    of = replay.weights
    weights = [of.gather(w, torch.from_numpy(table[0]).long()) if table else of.load(w) for w in op.weights]
    whole |= {f"weight{n}": values.float().numpy() for n, values in enumerate(weights)}
    data = _small(whole, op, replay.graph.is_by_rows(op))
    script = _script(op, record.step, trace.header.engine, data, whole)
    folder.mkdir(parents=True, exist_ok=True)
    packed = _packed(data)
    with replacing(data_at, lambda head: is_again) as at:
        at.write_bytes(packed)
    write_text(script_at, script, _is_ours)
    return f"{folder}: {len(packed):,} bytes; {', '.join(f'{key} {list(of.shape)}' for key, of in data.items())}"


def _is_ours(head: bytes) -> bool:
    return head.startswith(_MARK)


def _packed(data: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **data)  # type: ignore[arg-type]
    return file.getvalue()


def _is_small(data: Arrays) -> bool:
    """As it will be written; what is far too large is not compressed to see it."""
    return sum(values.nbytes for values in data.values()) < _DENSEST * _MOST and len(_packed(data)) <= _MOST


def _small(data: Arrays, op: Op, by_rows: bool) -> Arrays:
    """All of it where that is small; else the worst head, and of tokens, where these are its rows or attention's, and
    of a matmul's outputs, the worst.
    """
    if not _is_small(data) and op.kind in _QUERIES and not op.attrs.get("max_bias"):
        data = _one_head(data, op.kind)
    axes = _QUERIES.get(op.kind, {} if by_rows else None)
    while not _is_small(data):
        off = _off(data)
        n_tokens, n_out = off.shape[axes.get("recorded", 0)] if axes is not None else 1, off[0].size
        if op.kind == "linear" and n_out > 4 * n_tokens:
            data = _fewer_outputs(data, off, n_out // 2)
        elif axes is not None and n_tokens > 1:
            data = _fewer_tokens(data, off, axes, n_tokens // 2)
        else:
            raise TracediffError(f"{op.name} of this trace cannot be cut to {_MOST:,} bytes: trace fewer tokens.")
    return data


def _off(data: Arrays) -> np.ndarray:
    """By how many of its bounds each value is off."""
    return np.nan_to_num(np.abs(data["recorded"] - data["right"]) / data["bound"], nan=np.inf)


def _worst(off: np.ndarray, axis: int, n: int) -> np.ndarray:
    """The places along an axis that are off most, in order."""
    along = np.moveaxis(off, axis, 0).reshape(off.shape[axis], -1).max(1)
    return np.sort(np.argsort(-along, kind="stable")[:n])


def _one_head(data: Arrays, kind: str) -> Arrays:
    """Attention's worst head, with the keys or values that it reads."""
    if kind == "weighted_values":  # heads lie side by side
        n_head = len(data["input0"])
        data |= {key: data[key].reshape(len(data[key]), n_head, -1).swapaxes(0, 1) for key in _OUT}
    head = _worst(_off(data), 0, 1)
    cut = {key: values[head] for key, values in data.items() if key in _OUT or key.startswith("weight")}
    queries = 1 if kind == "scores" else 0
    cut["input0"] = data["input0"].take(head, queries)
    if kind != "softmax":
        group = head * data["input1"].shape[1] // data["input0"].shape[queries]
        cut["input1"] = data["input1"][:, group]
    if kind == "weighted_values":
        cut |= {key: cut[key][0] for key in _OUT}
    return data | cut


def _fewer_tokens(data: Arrays, off: np.ndarray, axes: Mapping[str, int], n: int) -> Arrays:
    """Those that are off most; `axes` are those of tokens, else the first of all that have as many rows."""
    token = axes.get("recorded", 0)
    kept, cut = _worst(off, token, n), {}
    for key, values in data.items():
        axis = token if key in _OUT else axes.get(key) if axes else 0
        if not key.startswith("weight") and axis is not None and values.shape[axis] == off.shape[token]:
            cut[key] = values.take(kept, axis)
    return data | cut


def _fewer_outputs(data: Arrays, off: np.ndarray, n: int) -> Arrays:
    rows = _worst(off.reshape(len(off), -1), 1, n)
    cut = {key: data[key].reshape(len(off), -1)[:, rows] for key in _OUT}
    return data | cut | {key: values[rows] for key, values in data.items() if key.startswith("weight")}


def _script(op: Op, step: int, engine: str, data: Arrays, whole: Arrays) -> str:
    names = [key for key in data if key.startswith(("input", "weight"))]
    what = inspect.getdoc(KINDS[op.kind].function) or op.kind
    attributes = _stated(op.attrs)
    inputs = [f"input{n}: {name}" for n, name in enumerate(op.inputs)]
    weights = [f"weight{n}: {weight.name}" for n, weight in enumerate(op.weights)]
    facts = [f"{op.name} in step {step} of {engine}", f"{op.kind}: {what}", *inputs, *weights]
    facts += [f"{key} = {value!r}" for key, value in attributes.items()]
    kept, of = ([*arrays["recorded"].shape] for arrays in (data, whole))
    facts += [f"cut to what is off most: {kept} of {of}"] if kept != of else []
    lines = (line for fact in facts for line in fact.encode("ascii", "replace").decode().splitlines())
    comments = "\n".join(f"# {line}" for line in lines)
    return _TEMPLATE.format(comments=comments, arguments=", ".join(names), names=names)


def _stated(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a reader can type; of what has fields, such as a rope, these."""
    fields = (asdict(value) for value in attributes.values() if is_dataclass(value) and not isinstance(value, type))
    plain = (int, float, str, bool)
    return {key: v for of in (attributes, *fields) for key, v in of.items() if isinstance(v, plain)}


_TEMPLATE = '''"""A reproducer by tracediff, of numpy alone: exits 1 while the function below is wrong, else 0."""

import sys
from pathlib import Path

import numpy as np

{comments}


def yours({arguments}):
    # The engine's code goes here. Until then it is what the engine made of these inputs.
    return data["recorded"]


data = np.load(Path(__file__).with_name("data.npz"))
right, bound = data["right"], data["bound"]
made = np.asarray(yours(*(data[name] for name in {names})), np.float64).reshape(right.shape)
wrong = ~(np.abs(made - right) <= bound)
with np.errstate(all="ignore"):
    nmse = np.square(made - right).sum() / np.square(right).sum()
print(f"{{wrong.sum()}} of {{wrong.size}} values are wrong, NMSE {{nmse:.3g}}")
for at in np.argwhere(wrong)[:10]:
    at = tuple(at)
    print(f"  {{[int(i) for i in at]}}: {{made[at]:.9g}}, right is {{right[at]:.9g}} to within {{bound[at]:.1g}}")
sys.exit(1 if wrong.any() else 0)
'''
