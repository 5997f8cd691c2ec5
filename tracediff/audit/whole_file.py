"""Every tensor of a GGUF file, one by one, against what an engine holds or the checkpoint it was made from."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tracediff.audit.causes import CLOSE, Reading, explain, rounded_to
from tracediff.audit.held import compare_weight, judge_values, look_at, readings, written_otherwise
from tracediff.audit.quantisation import expected_error, relative_errors
from tracediff.compare.sides import picked
from tracediff.errors import MismatchError
from tracediff.findings.tensors import SILENT, say
from tracediff.model.checkpoint import Checkpoint
from tracediff.model.model import Model
from tracediff.model.tensors import FileTensors
from tracediff.names import layer_of
from tracediff.result import AuditResult, TensorResult
from tracediff.trace.reader import Trace
from tracediff.trace.runs import open_trace

_TIED = {"output.weight": "token_embd.weight"}
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNNAMED = "gguf-py has no name for it in this architecture"
_BEYOND = "the file has fewer layers"
_OTHERWISE = "conversion computes it, by numbers that are not read here"
_UNKNOWN = "what tensors without a name it is made of, and how, is not known"
_FACTOR = 0.01  # by which a tensor may be larger: what is nearest has, squared, what the error has of its size
_PLAIN = ("F32", "F16", "BF16", "F64")
Progress = Callable[[float], None]


def audit_trace(model: Path, path: Path, progress: Progress = lambda fraction: None) -> AuditResult:
    """The weight records of a trace against the file; raises MismatchError for a trace without any."""
    tensors, sides = Model(model).tensors, open_trace(path).sides
    if not sides[0].weights:
        raise MismatchError(f"{path}: no weights are recorded. Write a weight record for each tensor after loading it.")
    names = list(dict.fromkeys((*tensors.names(), *sides[0].weights)))
    results = []
    for name in _counted(names, progress):
        each = [_recorded(name, tensors, side) for side in sides]
        results.append(picked(sides, each, lambda one: (not one.failing,), ("wrong",))[1])
    return _result(model, "trace", path, results)


def audit_checkpoint(model: Path, folder: Path, progress: Progress = lambda fraction: None) -> AuditResult:
    """The file against the safetensors that it was made from; raises ModelError for a folder without any."""
    tensors = Model(model).tensors
    checkpoint = Checkpoint(folder, tensors.file)
    names = list(dict.fromkeys((*tensors.names(), *checkpoint.names())))
    results = [_converted(name, tensors, checkpoint) for name in _counted(names, progress)]
    results += [TensorResult(key, "missing", note=_BEYOND) for key in checkpoint.beyond]
    results += [TensorResult(key, "not compared", note=_UNNAMED) for key in checkpoint.unnamed]
    return _result(model, "checkpoint", folder, results)


def _counted(names: list[str], progress: Progress) -> Iterator[str]:
    for done, name in enumerate(names, start=1):
        yield name
        progress(done / len(names))


def _result(model: Path, against: str, path: Path, results: list[TensorResult]) -> AuditResult:
    failing = any(result.failing for result in results)
    told = any(result.status not in SILENT for result in results)
    open_ = any(result.status == "not compared" and result.type for result in results)  # of the file's
    outcome = "diverged" if failing else "match" if told and not open_ else "undecided"
    audit = AuditResult(outcome, str(model), against, str(path), tuple(results))  # type: ignore[arg-type]
    causes = {tensor.cause for tensor in results} if against == "trace" else set()  # of a file no engine is to blame
    looks = {cause: look_at(cause) for cause in causes}
    return say(audit, looks)


def _recorded(name: str, tensors: FileTensors, trace: Trace) -> TensorResult:
    """A tensor as the engine holds it; a tied head that it holds under its own name is the embedding."""
    source = name if name in tensors else _TIED.get(name, name)
    storage = tensors.storage(source) if source in tensors else None
    if name not in trace.weights:
        return TensorResult(name, "not recorded", storage)
    record = trace.weights[name]
    held = (record.dtype or "").upper() or None
    if storage is None:
        return TensorResult(name, "extra", None, held, note="the file has no such tensor")
    expected = tensors.get(source)
    if record.size != expected.size:
        note = f"it holds the shape {list(record.shape)}, the file {list(expected.shape)}"
        return TensorResult(name, "wrong", storage, held, note=note)
    found = compare_weight(name, expected, trace, readings(tensors, source, tensors.file))
    if found.status == "unmatched":
        return TensorResult(name, "not recorded", storage, held, note="recorded without data")
    error = relative_errors(_rows(expected), trace.values(record).reshape(_rows(expected).shape))[0]
    return TensorResult(name, found.status, storage, held, error, None, found.cause, found.note)


def _converted(name: str, tensors: FileTensors, checkpoint: Checkpoint) -> TensorResult:
    """A tensor of the file against the checkpoint's; what one side ties is its embedding."""
    if name in checkpoint.unknown:
        return TensorResult(name, "not compared", tensors.storage(name), note=_OTHERWISE)
    original = name if name in checkpoint else _TIED.get(name, name)
    if original not in checkpoint:
        kind = tensors.storage(name)
        if name in _COMPUTED:
            return TensorResult(name, "computed", kind, note="converters make it from config.json")
        if _may_be_made(name, tensors, checkpoint):
            return TensorResult(name, "not compared", kind, note=_UNKNOWN)
        return TensorResult(name, "extra", kind, note="the checkpoint has no such tensor")
    stored = checkpoint.storage(original)
    source = name if name in tensors else _TIED.get(name, name)
    if source not in tensors:
        return TensorResult(name, "missing", None, stored, note="the file has no such tensor")
    kind, ours, expected = tensors.storage(source), tensors.file.tensors[source].shape, checkpoint.get(original)
    if tuple(ours) != expected.shape:
        note = f"the file holds the shape {list(ours)}, the checkpoint {list(expected.shape)}"
        return TensorResult(name, "wrong", kind, stored, note=note)
    held = tensors.get(source)
    others = readings(checkpoint, original, tensors.file, in_memory=False)
    if kind in _PLAIN:
        error = relative_errors(_rows(expected), held.reshape(_rows(expected).shape))[0]
        coarser = rounded_to(held.reshape(-1), expected.reshape(-1)) if error else None
        if coarser:
            return TensorResult(name, "rounded", kind, stored, error, note=f"the checkpoint holds them in {coarser}")
        status, cause, why = judge_values(name, expected, held, others)
        return TensorResult(name, status, kind, stored, error, None, cause, why)
    whole, row = expected_error(expected, tensors.file.tensors[source].type)
    error, each = relative_errors(_rows(expected), held.reshape(_rows(expected).shape))
    if error <= whole and each.max() <= row:
        factor = float((expected * held).sum(dtype=np.float64) / np.square(expected).sum(dtype=np.float64))
        if abs(factor - 1) <= _FACTOR + 2 * error**2:
            return TensorResult(name, "quantised", kind, stored, error, whole)
        scaled = f"every value was multiplied by {factor:.4g}"
        return TensorResult(name, "wrong", kind, stored, error, whole, "weight_scaled", scaled)

    def written(held: np.ndarray) -> Iterator[Reading]:
        yield from others(held)
        yield from written_otherwise(expected, held, name, tensors.file)

    cause, note = explain(name, expected, held, written, max(CLOSE, whole))
    return TensorResult(name, "wrong", kind, stored, error, whole, cause, note)


def _may_be_made(name: str, tensors: FileTensors, checkpoint: Checkpoint) -> bool:
    """Whether tensors of the same layer that have no name are as many values: it may be made of them."""
    layer = layer_of(name)
    of_layer = [
        key for key in checkpoint.unnamed if layer is None or str(layer) in key.split(".") or key.startswith("mtp.")
    ]
    if any(map(checkpoint.is_packed, of_layer)):
        return True
    return sum(map(checkpoint.n_values, of_layer)) >= math.prod(tensors.file.tensors[name].shape)


def _rows(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1])
