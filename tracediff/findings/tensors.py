"""What is said of an audit of weights: each cause once, for all tensors that it is in."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tracediff.english import few
from tracediff.findings.mistakes import in_common, pattern, unnamed
from tracediff.findings.places import of_weights
from tracediff.findings.words import number
from tracediff.result import AuditResult, Finding, TensorResult

SILENT = ("not recorded", "not compared", "computed")  # statuses of what nothing is said about


def say(result: AuditResult, looks: Mapping[str | None, str | None]) -> AuditResult:
    """The audit with its findings and its summary; `looks` says where to look in one's code for each cause."""
    groups: dict[tuple[str, str | None, str], list[TensorResult]] = {}
    for tensor in result.tensors:
        if tensor.failing:
            alike = pattern(unnamed(tensor.note or "", tensor.tensor))
            groups.setdefault((tensor.status, tensor.cause, alike), []).append(tensor)
    types = {tensor.tensor: tensor.type for tensor in result.tensors if tensor.status not in SILENT}
    found = tuple(_finding(group, types, result, looks) for group in groups.values())
    return replace(result, findings=found, summary=_summary(result, found))


def _finding(
    group: list[TensorResult],
    types: Mapping[str, str | None],
    result: AuditResult,
    looks: Mapping[str | None, str | None],
) -> Finding:
    first = group[0]
    notes = [tensor.note or "" for tensor in group]
    if len(group) > 1:
        notes = [unnamed(note, tensor.tensor) for note, tensor in zip(notes, group, strict=True)]
    where = of_weights({tensor.tensor: tensor.type for tensor in group}, types)
    note = in_common(notes)
    text = f"{where}: {first.status}{f': {note}' * bool(note)}{_figures(group, result)}."
    names = tuple(tensor.tensor for tensor in group)
    return Finding(text, first.cause, weights=names, look=looks.get(first.cause), side=result.against)


def _figures(group: list[TensorResult], result: AuditResult) -> str:
    """Types and errors, in parentheses."""
    where = "held" if result.against == "trace" else "in the checkpoint"
    types = dict.fromkeys(tensor.type for tensor in group if tensor.type)
    others = dict.fromkeys(tensor.other for tensor in group if tensor.other)
    errors = [tensor.error for tensor in group if tensor.error is not None]
    bounds = [tensor.bound for tensor in group if tensor.bound is not None]
    figures = [f"{' and '.join(types)} in the file"] if types else []
    figures += [f"{' and '.join(others)} {where}"] if others else []
    figures += [f"error {'up to ' * (len(errors) > 1)}{number(max(errors))}"] if errors else []
    figures += [f"{number(min(bounds))} allowed"] if bounds else []
    return f" ({', '.join(figures)})" if figures else ""


def _summary(result: AuditResult, found: tuple[Finding, ...]) -> str:
    checked = [tensor for tensor in result.tensors if tensor.status not in SILENT]
    failing = sum(tensor.failing for tensor in result.tensors)
    rest = "".join(f" {said}" for said in _left_out(result))
    if not checked:
        return rest.strip() or f"{result.path} holds no weights. Record them, as the engine holds them after loading."
    if found:
        verb = "is" if failing == 1 else "are"
        return f"{failing} of {len(checked)} tensors {verb} not right; {found[0].text}{rest}"
    where = "as in the file" if result.against == "trace" else "what the checkpoint's become"
    return f"all {len(checked)} tensors {'recorded ' * (result.against == 'trace')}are {where}.{rest}"


def _left_out(result: AuditResult) -> Iterator[str]:
    """What was not compared, and why."""
    unrecorded = [tensor for tensor in result.tensors if tensor.status == "not recorded"]
    if result.against == "trace" and len(unrecorded) < len(result.tensors) and unrecorded:
        yield f"{len(unrecorded)} more were not recorded."
    computed = [tensor.tensor for tensor in result.tensors if tensor.status == "computed"]
    if computed:
        yield f"{few(computed)} follows from config.json, which is not read."
    silent = [tensor for tensor in result.tensors if tensor.status == "not compared"]
    for of, whose in ((True, "of the file's"), (False, "of the checkpoint's")):
        these = [tensor for tensor in silent if bool(tensor.type) == of]
        if these:
            names = few([tensor.tensor for tensor in these], 2)
            verb = "was" if len(these) == 1 else "were"
            yield f"{len(these)} {whose} {verb} not compared ({names}): {these[0].note}."
