"""One page of HTML that needs nothing else: findings, a heat map of layers and ops, drift by depth, next tokens.

What a trace holds is text wherever it appears: escaped in the markup, set as text by the script; the page's policy lets
no script run but its own, and load nothing.
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files

from tracediff.english import count
from tracediff.findings.words import number
from tracediff.names import layer_of, layers_of, local_name
from tracediff.report.chart import drift_by_depth
from tracediff.report.figures import packed, steps
from tracediff.result import Logits, Result, Said, Side, worst_case

_METRICS = {
    "excess": "error over floor", "nmse": "drift", "rms": "RMS", "mean": "mean", "min": "least", "max": "largest",
}  # fmt: skip
_KEY = ("not judged", "as it should be", "near its bound", "", "off", "wrong")
_OUTSIDE = "outside"


def render(cases: Mapping[str, Result]) -> str:
    """The page of the worst case; the others, where there are several, by their summaries."""
    name, result = worst_case(cases)
    css, js = (files("tracediff.report").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(js)}; base-uri 'none'; form-action 'none'"
    parts = (*_verdict(cases, name, result), *_map(result), *_depth(result), *_tokens(result), *_said(result))
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>tracediff: {escape(result.verdict)}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/octet-stream" id="data">{packed(result)}</script>\n<script>{js}</script>\n'
        "</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _verdict(cases: Mapping[str, Result], name: str, result: Result) -> Iterator[str]:
    yield f'<h1><span class="{result.verdict}">{result.verdict.upper()}</span>: {escape(result.summary)}</h1>'
    yield from (f"<p>{escape(detail)}</p>" for detail in result.details)
    if len(cases) > 1:
        others = "".join(f"<li>{escape(n)}: {escape(r.summary)}</li>" for n, r in cases.items() if n != name)
        yield f"<p>This page is of the case {escape(name)}; the others:</p><ul>{others}</ul>"
    sides = {"reference": result.reference, "candidate": result.candidate}
    yield from (_side(what, one) for what, one in sides.items() if one)
    yield f'<p class="dim">{count(len(result.tokens), "token")} in {count(len(result.steps), "step")}</p>'
    if result.findings:
        yield "<h2>What is wrong by itself, whatever came before</h2><ul>"
        for one in result.findings:
            figure = f' <span class="dim">(NMSE up to {number(one.nmse)})</span>' if one.nmse is not None else ""
            look = f'<br><span class="dim">look at {escape(one.look)}</span>' if one.look else ""
            yield f"<li>{escape(one.text)}{figure}{look}</li>"
        yield "</ul>"


def _side(what: str, side: Side) -> str:
    cut = f", cut off: {escape(side.cut)}" if side.cut else ""
    return f'<p class="dim">{what}: {escape(side.engine)}, {count(side.n_ops, "op")} ({escape(side.path)}){cut}</p>'


# --- the map --------------------------------------------------------------------------------------------------------


def _map(result: Result) -> Iterator[str]:
    """Layers down, ops across; what stands outside of the layers in a row of its own."""
    names = dict.fromkeys(op.op for op in result.ops)
    columns = [*dict.fromkeys(local_name(name) for name in names if layer_of(name) is not None)]
    columns += [name for name in names if layer_of(name) is None and name not in columns]
    layers = layers_of(names)
    yield "<h2>Layers and ops</h2>"
    yield from _controls(result)
    head = "".join(f'<th scope="col"><span>{escape(column)}</span></th>' for column in columns)
    yield f'<div class="wide"><table class="map"><thead><tr><th></th>{head}</tr></thead><tbody>'
    first = True
    for row, prefix in [*((f"layer {n}", f"blk.{n}.") for n in layers), (_OUTSIDE, "")]:
        cells = []
        for column in columns:
            name = prefix + column
            tab = 0 if first else -1
            button = f'<button data-op="{escape(name)}" tabindex="{tab}"></button>' if name in names else ""
            first = first and not button
            cells.append(f"<td>{button}</td>")
        yield f'<tr><th scope="row">{row}</th>{"".join(cells)}</tr>'
    yield "</tbody></table></div>"
    key = "".join(f'<span class="h{n}"></span>{what}' for n, what in enumerate(_KEY) if what and n)
    yield f'<p class="key dim">{key}; &#215; is wrong by itself, ~ drifts. Arrow keys move, Enter opens.</p>'
    yield '<div id="op" aria-live="polite"></div>'


def _controls(result: Result) -> Iterator[str]:
    replayed = any(op.local for op in result.ops)
    absent = {"excess": not replayed, "nmse": not result.reference}
    shown = {key: what for key, what in _METRICS.items() if not absent.get(key)}
    options = "".join(f'<option value="{key}">{what}</option>' for key, what in shown.items())
    slider, last = "", len(steps(result)) - 1
    if last > 0:
        control = f'<input id="step" type="range" min="0" max="{last}" value="0">'
        slider = f'<label>step {control} <output id="at"></output></label>'
    yield f'<div class="controls"><label>show <select id="metric">{options}</select></label>{slider}</div>'


# --- below it -------------------------------------------------------------------------------------------------------


def _depth(result: Result) -> Iterator[str]:
    chart = drift_by_depth(result)
    if chart:
        yield f"<h2>By depth</h2>{chart}"


def _tokens(result: Result) -> Iterator[str]:
    """Of each step; the script shows those of the step that is chosen."""
    for logits in result.logits:
        about = "next token", f"step {logits.step}"
        said = "".join(f"<p>{escape(said.text)}</p>" for said in result.said if (said.about, said.of) == about)
        hidden = "" if logits is result.logits[0] else " hidden"
        title = f"Next token after step {logits.step}"
        yield f'<section data-step="{logits.step}"{hidden}><h2>{title}</h2>{_table(logits)}{said}</section>'


def _table(logits: Logits) -> str:
    columns = ("rank", "reference", "logit", "p", "candidate", "logit", "p", "rank in ref.")
    head, rows = "".join(f"<th>{column}</th>" for column in columns), []
    for rank, (r, c) in enumerate(zip(logits.reference, logits.candidate, strict=True), start=1):
        cells = [str(rank)]
        for t in (r, c):
            cells += [escape(t.words), number(t.logit), f"{t.probability:.3f}"]
        cells.append(str(c.other_rank))
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _said(result: Result) -> Iterator[str]:
    titles = {
        "What is normal": ("growth", "means", "norm weights", "logits", "decode steps", "decode depth"),
        "Arithmetic that fits": ("arithmetic",),
        "Not judged, or not by itself, and what to record next": ("gaps", "unmatched"),
        "Accepted": ("accepted",),
    }
    for title, topics in titles.items():
        said = [one for topic in topics for one in result.said if one.about == topic]
        if said:
            yield f"<h2>{title}</h2><dl>{''.join(map(_entry, said))}</dl>"
    if result.next:
        yield f"<h2>Next</h2><p><code>{escape(result.next.command)}</code></p><p>{escape(result.next.why)}.</p>"
    if result.notes:
        yield f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in result.notes)}</ul>"


def _entry(one: Said) -> str:
    return f'<dt>{escape(one.of or one.about)}</dt><dd class="{one.level}">{escape(one.text)}</dd>'
