"""The page: whole in itself, the same bytes twice, safe whatever a trace holds; and what a real browser makes of it."""

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, dom

from tracediff.printable import printable
from tracediff.report import html
from tracediff.result import Finding, Result, Said

TRACES = Path(__file__).parent.parent / "traces"
sys.path.insert(0, str(TRACES))

import make  # noqa: E402

HOSTILE = (
    """"><script>document.title='taken'</script></script><img src=x onerror="document.title='taken'">'&<!--\u2028"""
)
_VOID = {"meta", "br", "input", "line", "polyline"}


class Page(HTMLParser):
    """Its elements with their attributes, its text by element; every element that opens closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self._open[-1:]:
            self.text[tag] = self.text.get(tag, "") + data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def hostile() -> Result:
    result = make.compare("three-faults")
    ops = tuple(replace(op, op=op.op + HOSTILE, note=HOSTILE) for op in result.ops)
    finding = Finding(HOSTILE, HOSTILE, ops=(ops[0].op,), look=HOSTILE)
    token = replace(result.logits[0].candidate[0], text=HOSTILE)
    logits = replace(result.logits[0], candidate=(token, *result.logits[0].candidate[1:]))
    return replace(
        result, ops=ops, findings=(finding,), summary=HOSTILE, notes=(HOSTILE,), details=(HOSTILE,), logits=(logits,),
        said=(Said(HOSTILE, HOSTILE), Said("growth", HOSTILE)), candidate=replace(result.candidate, engine=HOSTILE),
    )  # fmt: skip


@pytest.mark.parametrize("case", make.CASES)
def test_the_page_is_whole_and_says_what_the_terminal_says(case: str) -> None:
    result = make.compare(case)
    text = html.render({case: result})
    assert text == html.render({case: make.compare(case)})
    page = Page(text)
    buttons = [attributes["data-op"] for attributes in page.of("button")]
    assert sorted(buttons) == sorted({op.op for op in result.ops})
    assert [attributes["tabindex"] for attributes in page.of("button")].count("0") == 1
    said = " ".join(" ".join(page.text.values()).split())
    for sentence in (*(one.text for one in result.findings), *(one.text for one in result.said), *result.details):
        assert " ".join(sentence.split()) in said
    data = json.loads(page.text["script"].partition('"use strict"')[0])
    assert [(op["op"], op["step"], op["status"]) for op in data["ops"]] == [
        (op.op, op.step, op.status) for op in result.ops
    ]


def test_nothing_comes_from_elsewhere_and_nothing_else_runs() -> None:
    for result in (make.compare("three-faults"), hostile()):
        text = html.render({"case": result})
        page = Page(text)
        assert {tag for tag, _ in page.elements} <= {
            "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li", "br", "span", "div", "label",
            "select", "option", "input", "output", "table", "thead", "tbody", "tr", "th", "td", "button", "svg", "line",
            "text", "polyline", "code", "dl", "dt", "dd", "script",
        }  # fmt: skip
        attributes = {name for _, of in page.elements for name in of}
        assert not {name for name in attributes if name.startswith("on")} & {*attributes}
        assert not attributes & {"src", "href", "style", "action"}
        assert [script.get("type") for script in page.of("script")] == ["application/json", None]
        policy = next(meta["content"] for meta in page.of("meta") if "http-equiv" in meta) or ""
        for kind, element in (("style", "style"), ("script", "script")):
            (inline,) = re.findall(rf"<{element}>(.*?)</{element}>", text, flags=re.S)
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none';")


def test_a_page_of_24_layers_is_small() -> None:
    result = make.compare("three-faults")
    layer = [op for op in result.ops if op.op.startswith("blk.0.") and op.step == 0]
    ops = [replace(op, op=op.op.replace("blk.0.", f"blk.{n}."), layer=n) for n in range(24) for op in layer]
    page = html.render({"case": replace(result, ops=tuple(ops), findings=())})
    assert len(page.encode()) < 300_000


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page in")
def test_in_a_browser(tmp_path: Path) -> None:
    """The script paints and opens an op; a hostile trace stays text."""
    result = make.compare("three-faults")
    page = html.render({"case": result})
    shown = dom(page, tmp_path)
    assert 'class="h5" title="blk.0.attn_v: faulty, ' in shown
    assert 'class="h1" title="blk.0.attn_norm: ok, ' in shown
    # A test's own click needs a policy that lets it run.
    click = "<script>document.querySelector('[data-op=\"blk.0.attn_v\"]').click()</script></body>"
    open_page = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", page).replace("</body>", click)
    opened = dom(open_page, tmp_path)
    assert "<h3>blk.0.attn_v in step 0: faulty</h3>" in opened
    assert f"<dt>what is wrong</dt><dd>{result.findings[0].text}</dd>" in opened
    assert "<dt>reference</dt><dd>min " in opened
    attacked = dom(html.render({"case": printable(hostile())}), tmp_path)
    assert "<title>tracediff: diverged</title>" in attacked
    assert "<img" not in attacked
    assert 'class="h5"' in attacked  # its own script has run
