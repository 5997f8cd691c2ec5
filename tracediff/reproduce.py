"""One faulty op as a folder that anybody can run: its recorded inputs, what is right, and a script of numpy alone."""

import inspect
import io
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracediff.errors import TracediffError
from tracediff.files import write_text
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.numerics.kinds import KINDS
from tracediff.replay.judging import Subject, judge_all, replays_of
from tracediff.trace.reader import Trace

_MOST = 1_000_000  # bytes of data.npz
# Kinds each of whose rows, the first axis of all that they read and make, follows from the same row of its inputs.
_BY_ROWS = (
    "linear", "rms_norm", "layer_norm", "l2_norm", "add", "mul", "swiglu", "geglu", "silu", "gelu", "relu", "sigmoid",
)  # fmt: skip
_MARK = b'"""A reproducer by tracediff'
Arrays = dict[str, np.ndarray]


def reproduce(path: Path, model: Model, name: str, step: int, folder: Path) -> str:
    """Write reproduce.py and data.npz of one record; -> what is in them, in words.

    Raises TracediffError where the op was not recorded, its inputs were not, it is sound, or it cannot be made small.
    """
    trace = Trace(path)
    if (step, name) not in trace.ops:
        raise TracediffError(f"{path}: it has no record {name} in step {step}. `tracediff inspect {path}` lists all.")
    (replay,) = replays_of(model, [Subject(trace, {})])
    op, record = replay.graph[name], trace.ops[step, name]
    judged = {(record.step, record.op): local for _, record, local in judge_all([replay])}
    local = judged[step, name]
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
    whole |= {f"weight{n}": model.tensors.get(w.name).astype(np.float32) for n, w in enumerate(op.weights)}
    data = _small(whole, op)
    script = _script(op, step, trace.header.engine, data)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "reproduce.py", script, lambda head: head.startswith(_MARK))
    (folder / "data.npz").write_bytes(_packed(data))
    return f"{folder}: {len(_packed(data)):,} bytes; {', '.join(f'{key} {list(of.shape)}' for key, of in data.items())}"


def _packed(data: Arrays) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **data)  # type: ignore[arg-type]
    return file.getvalue()


def _small(whole: Arrays, op: Op) -> Arrays:
    """All of it where that is small; else of ops by rows fewer tokens, of a matmul fewer outputs: the worst."""
    data, off = whole, np.nan_to_num(np.abs(whole["recorded"] - whole["right"]) / whole["bound"], nan=np.inf)
    n_tokens, n_out = len(off), off[0].size
    while len(_packed(data)) > _MOST:
        if op.kind not in _BY_ROWS or n_tokens == n_out == 1:
            raise TracediffError(
                f"{op.name} of this trace is {len(_packed(data)):,} bytes, and cannot be cut: trace fewer tokens."
            )
        if op.kind == "linear" and n_out > 4 * n_tokens:
            n_out = max(1, n_out // 2)
        else:
            n_tokens = max(1, n_tokens // 2)
        data = _cut(whole, off, n_tokens, n_out if op.kind == "linear" else None)
    return data


def _cut(whole: Arrays, off: np.ndarray, n_tokens: int, n_out: int | None) -> Arrays:
    flat = off.reshape(len(off), -1)
    tokens = np.sort(np.argsort(-flat.max(1), kind="stable")[:n_tokens])
    data = dict(whole)
    for key, values in whole.items():
        if "weight" not in key and len(values) == len(off):
            data[key] = values[tokens]
    if n_out is not None:
        rows = np.sort(np.argsort(-flat[tokens].max(0), kind="stable")[:n_out])
        for key in ("recorded", "right", "bound"):
            data[key] = data[key].reshape(len(tokens), -1)[:, rows]
        data |= {key: values[rows] for key, values in whole.items() if "weight" in key}
    return data


def _script(op: Op, step: int, engine: str, data: Mapping[str, np.ndarray]) -> str:
    names = [key for key in data if key.startswith(("input", "weight"))]
    what = inspect.getdoc(KINDS[op.kind].function) or op.kind
    attributes = _stated(op.attrs)
    inputs = [f"input{n}: {name}" for n, name in enumerate(op.inputs)]
    weights = [f"weight{n}: {weight.name}" for n, weight in enumerate(op.weights)]
    facts = [f"{op.name} in step {step} of {engine}", f"{op.kind}: {what}", *inputs, *weights]
    facts += [f"{key} = {value!r}" for key, value in attributes.items()]
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
