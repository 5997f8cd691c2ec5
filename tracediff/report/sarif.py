"""SARIF 2.1.0 for code scanning: a rule for each mistake, a result for each finding, in the file that it is made in."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote

from tracediff.names import matches
from tracediff.result import Finding, Result

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_UNKNOWN = "unknown"
_Object = dict[str, object]


def render(cases: Mapping[str, Result], sources: Mapping[str, str], version: str) -> str:
    """One run. `sources` maps patterns of ops to FILE or FILE:LINE; an op that none fits is put in its trace."""
    raw = [(name, one) for name, result in cases.items() for one in _raw(result, sources)]
    rules = {one.rule: one for _, one in reversed(raw)}
    driver = {"name": "tracediff", "semanticVersion": version, "rules": [_rule(one) for one in rules.values()]}
    results = [_result(case, one, [*rules].index(one.rule)) for case, one in raw]
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=1) + "\n"


class _Raw(NamedTuple):
    rule: str
    level: str  # "none" is of what could not be decided
    text: str
    places: list[_Object]
    look: str | None = None


def _raw(result: Result, sources: Mapping[str, str]) -> Iterator[_Raw]:
    trace = [_physical(result.candidate.path, ())]
    for one in result.findings:
        yield _Raw(one.mistake or _UNKNOWN, "error", one.text, _locations(one, result, sources), one.look)
    if result.verdict == "diverged" and not result.findings:
        yield _Raw("drift", "error", result.summary, trace)
    yield from (_Raw("undecided", "none", f"{doubt}.", trace) for doubt in result.undecided)
    yield from (_Raw("alarm", "warning", one.text, trace) for one in result.said if one.level == "alarm")


def _rule(one: _Raw) -> _Object:
    rule: _Object = {"id": one.rule, "shortDescription": {"text": one.rule.replace("_", " ")}}
    return {**rule, "help": {"text": f"Look at {one.look}."}} if one.look else rule


def _result(case: str, one: _Raw, index: int) -> _Object:
    """Its mark stays the same while the mistake is in the same places."""
    mark = hashlib.sha256(json.dumps([case, one.rule, one.places]).encode()).hexdigest()[:32]
    kind = {"kind": "open"} if one.level == "none" else {}
    return {
        "ruleId": one.rule, "ruleIndex": index, "level": one.level, **kind, "message": {"text": one.text},
        "locations": one.places, "partialFingerprints": {"tracediff/v1": mark},
    }  # fmt: skip


def _locations(one: Finding, result: Result, sources: Mapping[str, str]) -> list[_Object]:
    """Each source file once with its ops, else the trace."""
    files: dict[str, list[str]] = {}
    for op in one.ops or one.weights:
        files.setdefault(source_of(op, sources) or result.candidate.path, []).append(op)
    return [_physical(place, ops) for place, ops in files.items()]


def source_of(op: str, sources: Mapping[str, str]) -> str | None:
    """FILE or FILE:LINE of the last pattern that the op or weight matches."""
    op = op.removesuffix(".weight").removesuffix(".bias")
    return next((place for pattern, place in reversed([*sources.items()]) if matches(op, pattern)), None)


def line_of(place: str) -> tuple[str, int | None]:
    """ "src/rope.c:120" -> its file and line."""
    path, colon, line = place.rpartition(":")
    return (path, int(line)) if colon and line.isdecimal() and int(line) > 0 else (place, None)


def _physical(place: str, ops: list[str] | tuple[str, ...]) -> _Object:
    path, line = line_of(place)
    region = {"region": {"startLine": line or 1}}
    location: _Object = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}, **region}}
    return {**location, "logicalLocations": [{"fullyQualifiedName": op} for op in ops]} if ops else location


def _uri(path: str) -> str:
    return quote(path.replace(os.sep, "/"), errors="surrogateescape")
