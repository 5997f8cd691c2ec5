"""The result as JSON, schema tracediff/1. Not json.py: that name is the standard library's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from tracediff.names import StepOf
from tracediff.result import OpResult, Result

SCHEMA = "tracediff/1"


def render(result: Result) -> str:
    """One JSON object. Of several sequences a "step" has its "sequence" beside it."""
    return written(document(result))


def render_all(results: Mapping[str, Result]) -> str:
    """Several results under their names."""
    return written({"schema": SCHEMA, "ways": {name: document(result) for name, result in results.items()}})


def fields_of(schema: str, result: Any) -> dict[str, Any]:
    """What is written of a result whose fields are those of the JSON."""
    return {"schema": schema, **{field.name: getattr(result, field.name) for field in dataclasses.fields(result)}}


def written(whole: Any) -> str:
    """As it stands in a file: what is not finite becomes null, and of several sequences each step says whose it is."""
    several = False

    def parts(step: StepOf) -> dict[str, int]:
        nonlocal several
        several = True
        return {"step": step.step, "sequence": step.sequence}

    encoded = msgspec.json.encode(whole, enc_hook=parts)
    if several:
        encoded = msgspec.json.encode(_flat(msgspec.json.decode(encoded)))
    return msgspec.json.format(encoded, indent=1).decode() + "\n"


def document(result: Result) -> dict[str, object]:
    """The object that is written."""
    first = result.first_divergence
    return {
        "schema": SCHEMA,
        "verdict": result.verdict,
        "summary": result.summary,
        "details": result.details,
        "findings": result.findings,
        "said": result.said,
        "next": result.next,
        "first_divergence": first,
        "undecided": result.undecided,
        "resolving": _resolving(result.weakest),
        "faulty": [_faulty(op) for op in result.faulty],
        "ops": [_op(op) for op in result.ops],
        "weights": result.weights,
        "logits": {str(logits.step): logits for logits in result.logits},
        "normal": result.normal,
        "storage": result.storage,
        "coverage": result.coverage,
        "reference": result.reference,
        "candidate": result.candidate,
        "tokens": result.tokens,
        "notes": result.notes,
    }


def _flat(value: Any) -> Any:
    """Steps as numbers again, and whose they are under a key of its own."""
    if isinstance(value, list):
        return [_flat(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _flat(item) for key, item in value.items()}
    if isinstance(step := found.get("step"), dict):
        found |= step
    if isinstance(steps := found.get("steps"), list) and all(isinstance(step, dict) for step in steps):
        found |= {"steps": [step["step"] for step in steps], "sequences": [step["sequence"] for step in steps]}
    return found


def _resolving(op: OpResult | None) -> dict[str, object] | None:
    return {"nmse": op.resolving, "op": op.op, "step": op.step} if op else None


def _faulty(op: OpResult) -> dict[str, object]:
    local = op.local
    return {
        "op": op.op,
        "step": op.step,
        "local_nmse": local.nmse if local else None,
        "floor": op.floor,
        "segment": local.segment if local else (),
        "strips": local.strips if local else (),
        "cause": op.cause,
        "shape": op.shape,
        "sought": op.sought,
    }


def _op(op: OpResult) -> dict[str, object]:
    drift, local = op.drift, op.local
    return {
        "op": op.op,
        "step": op.step,
        "status": op.status,
        "reference": op.reference,
        "candidate": op.candidate,
        "nmse": drift.nmse if drift else None,
        "cosine": drift.cosine if drift else None,
        "max_abs": drift.max_abs if drift else None,
        "worst": drift.worst if drift else None,
        "first_token_nmse": drift.first_token_nmse if drift else None,
        "other_tokens_nmse": drift.other_tokens_nmse if drift else None,
        "tolerance": op.tolerance,
        "local_nmse": local.nmse if local else None,
        "reference_local_nmse": op.reference_local.nmse if op.reference_local else None,
        "floor": op.floor,
        "resolving": op.resolving if op.told else None,
        "excess": local.excess if local else None,
        "arithmetic": op.arithmetic,
        "segment": local.segment if local else None,
        "note": op.note,
    }
