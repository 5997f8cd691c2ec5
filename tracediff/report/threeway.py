"""Three engines' report: who agrees with whom, for a terminal and as JSON. Pure functions of the result."""

import itertools
from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from tracediff.report.parts import Rows, Trimmed, fitting, hanging, heading, headline, line, number
from tracediff.result import ThreeOp, ThreeWay

SCHEMA = "tracediff/three/1"
_STYLES = {
    "ok": "green", "outlier": "bold red", "scattered": "bold red", "inherited": "yellow", "unmatched": "magenta",
    "undecided": "cyan",
}  # fmt: skip
_AROUND = 6  # ops shown on either side of the first outlier
_LISTED = 8


def render(result: ThreeWay, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    sections = (
        _verdict(result), _sides(result), _wrong_weights(result), _faulty(result), _layers(result, width),
        _around(result, width), _unmatched(result), _notes(result),
    )  # fmt: skip
    return Trimmed(Group(*(part for section in sections for part in section)))


def render_json(result: ThreeWay) -> str:
    """One JSON object; what is not finite becomes null."""
    document = {"schema": SCHEMA, "summary": summary(result), **msgspec.to_builtins(result)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def summary(result: ThreeWay) -> str:
    """The one sentence: which sides agree, which is the outlier, and from where on."""
    firsts = {n: next((op for op in result.ops if n in op.outliers), None) for n in range(3)}
    alone = {n: op for n, op in firsts.items() if op}
    agreeing = [name for n, name in enumerate(result.names) if n not in alone]
    first = next((op for op in result.ops if op.status in ("outlier", "scattered")), None)
    if first and first.status == "scattered":
        later = ", ".join(f"{result.names[n]} is an outlier at {_at(op, result)}" for n, op in alone.items())
        return f"no two engines agree from {_at(first, result)} on{f'; {later}' if later else ''}."
    if len(alone) == 1:
        ((n, op),) = alone.items()
        return f"{' and '.join(agreeing)} agree; {result.names[n]} is the outlier from {_at(op, result)} on."
    if alone:
        parts = [f"{result.names[n]} (from {_at(op, result)} on)" for n, op in alone.items()]
        rest = f"; {agreeing[0]} is not" if agreeing else ""
        return f"{' and '.join(parts)} are outliers{rest}."
    if any(result.weights):
        return "all ops agree, but weights are wrong in memory."
    if result.verdict == "undecided":
        return f"{result.undecided[0]}."
    if result.verdict == "diverged":
        return "all agree where they can be compared, but not every op is on all three sides."
    there = sum(op.status != "unmatched" for op in result.ops)
    rest = f"; {len(result.ops) - there} others are not on all three sides" if there < len(result.ops) else ""
    return f"all three agree in {there} ops{rest}."


def _at(op: ThreeOp, result: ThreeWay) -> str:
    return op.op + (f" in step {op.step}" if len(result.steps) > 1 else "")


def _verdict(result: ThreeWay) -> Iterator[RenderableType]:
    yield headline(result.verdict, summary(result))
    yield from (line(f"{doubt}.") for doubt in result.undecided[1:])


def _sides(result: ThreeWay) -> Iterator[RenderableType]:
    for name, side in zip(result.names, result.sides, strict=True):
        cut = f", cut off: {side.cut}" if side.cut else ""
        yield line(f"{name}: {side.engine}, {side.n_ops} ops ({side.path}){cut}", style="dim")


def _wrong_weights(result: ThreeWay) -> Iterator[RenderableType]:
    if any(result.weights):
        yield heading("Weights that are wrong in memory")
    for name, weights in zip(result.names, result.weights, strict=False):
        yield from (line(f"{name}, {weight.weight}: {weight.note}") for weight in weights)


def _faulty(result: ThreeWay) -> Iterator[RenderableType]:
    """Each side's mistakes where replay named them, once for all layers and steps."""
    said: dict[tuple[int, str, str | None], list[ThreeOp]] = {}
    for op in result.ops:
        local_name = op.op.split(".", 2)[-1] if op.layer is not None else op.op
        for n in op.outliers:
            cause = op.cause[n]
            if op.local[n]:
                said.setdefault((n, local_name, cause.text if cause else None), []).append(op)
    if said:
        yield heading("Faulty ops (wrong by themselves, whatever came before)")
    for (n, local, text), ops in said.items():
        layers = sorted({op.layer for op in ops if op.layer is not None})
        where = (
            f"{local} in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers[:_LISTED]))}" if layers else local
        )
        why = text or "wrong, and no known mistake explains it"
        yield hanging("  -", Text(f"{result.names[n]}: {where}: {why}."))


# --- tables ------------------------------------------------------------------------------------------------------


def _table(result: ThreeWay, ops: list[ThreeOp], width: int) -> RenderableType:
    """The three pairs by number, and the local errors where they fit."""
    pairs = [f"{a + 1} - {b + 1}" for a, b in itertools.combinations(range(3), 2)]
    local = [f"local {n + 1}" for n in range(3)]
    replayed = any(x for op in result.ops for x in op.local)
    rows: Rows = [
        {
            "op": op.op,
            "outlier": Text(_who(op, result), style=_STYLES[op.status]),
            **dict(zip(pairs, map(number, op.nmse), strict=True)),
            **dict(zip(local, (number(x.nmse if x else None) for x in op.local), strict=True)),
        }
        for op in ops
    ]
    return fitting(
        ["op", "outlier", *pairs, *(local if replayed else [])], rows, width, [tuple(local), (pairs[2],)], left=2
    )


def _who(op: ThreeOp, result: ThreeWay) -> str:
    return ", ".join(result.names[n] for n in op.outliers) or op.status


def _layers(result: ThreeWay, width: int) -> Iterator[RenderableType]:
    step = result.steps[0] if result.steps else 0
    states = ("token_embd", "ffn_residual", "output_norm", "output")
    shown = [op for op in result.ops if op.step == step and op.op.rpartition(".")[2] in states]
    if shown:
        numbered = ", ".join(f"{n} {name}" for n, name in enumerate(result.names, start=1))
        yield heading(f"Hidden states, NMSE of each pair ({numbered})")
        yield _table(result, shown, width)


def _around(result: ThreeWay, width: int) -> Iterator[RenderableType]:
    first = next((op for op in result.ops if op.status in ("outlier", "scattered")), None)
    if first:
        ops = [op for op in result.ops if op.step == first.step]
        at = ops.index(first)
        yield heading("Around the first outlier" + (f" (step {first.step})" if len(result.steps) > 1 else ""))
        yield _table(result, ops[max(0, at - _AROUND) : at + _AROUND + 1], width)


def _unmatched(result: ThreeWay) -> Iterator[RenderableType]:
    unmatched = [op for op in result.ops if op.status == "unmatched"]
    if unmatched:
        yield heading(
            f"Not on all sides: {len(unmatched)} of {len(result.ops)} (--require PATTERN makes that a failure)"
        )
    yield from (line(f"{op.op} in step {op.step}: {op.note}") for op in unmatched[:_LISTED])
    if len(unmatched) > _LISTED:
        yield line(f"... and {len(unmatched) - _LISTED} more")


def _notes(result: ThreeWay) -> Iterator[RenderableType]:
    if result.notes:
        yield heading("Notes")
        yield from (line(note) for note in result.notes)
