"""The page: whole in itself, the same bytes twice, safe whatever a trace holds; and what a real browser makes of it."""

import base64
import hashlib
import json
import random
import re
import sys
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

from tracediff.printable import printable
from tracediff.report import html
from tracediff.result import Finding, OpResult, Result, Said, worst_case

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
    ops = json.loads(zlib.decompress(base64.b64decode(page.text["script"].partition('"use strict"')[0])))["ops"]
    assert [*zip(ops["op"], ops["step"], ops["status"], strict=True)] == [
        (op.op, op.step, op.status) for op in result.ops
    ]


def test_of_several_cases_the_page_is_of_the_worst() -> None:
    """One that is undecided stands before one that diverged."""
    diverged = make.compare("rope-pairing")
    undecided, match = replace(diverged, verdict="undecided"), replace(diverged, verdict="match")
    assert diverged.verdict == "diverged"
    cases = {"a": match, "b": undecided, "c": diverged, "d": diverged}
    assert worst_case(cases) == ("c", diverged)
    assert worst_case({"a": match, "b": undecided}) == ("b", undecided)
    assert "<title>tracediff: diverged</title>" in html.render(cases)


def test_nothing_comes_from_elsewhere_and_nothing_else_runs() -> None:
    for result in (make.compare("three-faults"), hostile()):
        text = html.render({"case": result})
        page = Page(text)
        assert {tag for tag, _ in page.elements} <= {
            "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li", "br", "span", "div", "label",
            "select", "option", "input", "output", "table", "thead", "tbody", "tr", "th", "td", "button", "svg", "line",
            "text", "polyline", "code", "dl", "dt", "dd", "script", "section",
        }  # fmt: skip
        attributes = {name for _, of in page.elements for name in of}
        assert not {name for name in attributes if name.startswith("on")} & {*attributes}
        assert not attributes & {"src", "href", "style", "action"}
        assert [script.get("type") for script in page.of("script")] == ["application/octet-stream", None]
        policy = next(meta["content"] for meta in page.of("meta") if "http-equiv" in meta) or ""
        for kind, element in (("style", "style"), ("script", "script")):
            (inline,) = re.findall(rf"<{element}>(.*?)</{element}>", text, flags=re.S)
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none';")


def test_a_page_of_24_layers_and_8_decode_steps_is_small() -> None:
    """As of both sides, with figures that differ from record to record as real ones do."""
    result, rng = make.compare("three-faults"), random.Random(0)
    layer = [op for op in result.ops if op.op.startswith("blk.0.") and op.step == 0]

    def other(op: OpResult, layer: int, step: int) -> OpResult:
        def vary(of: object) -> object:
            numbers = {key: value * rng.uniform(0.5, 2) for key, value in figures_of(of).items()}
            return replace(of, **numbers)  # type: ignore[type-var]

        kept = {key: vary(getattr(op, key)) for key in ("reference", "candidate", "drift", "local") if getattr(op, key)}
        for error in ("drift", "local"):
            if error in kept:
                kept[error] = replace(kept[error], worst=vary(kept[error].worst))
        return replace(op, op=op.op.replace("blk.0.", f"blk.{layer}."), layer=layer, step=step, **kept)

    ops = tuple(other(op, n, step) for step in range(9) for n in range(24) for op in layer)
    page = html.render({"case": replace(result, ops=ops, findings=())})
    assert len(ops) == 24 * 17 * 9
    assert 200_000 < len(page.encode()) < 300_000


def figures_of(record: object) -> dict[str, float]:
    return {name: value for name in record.__slots__ if isinstance(value := getattr(record, name), float)}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open the page in")
def test_in_a_browser(tmp_path: Path) -> None:
    """A mouse opens an op, arrows and Enter the next; the slider changes the step; a hostile trace stays text."""
    result = make.compare("three-faults")
    attention = next(op for op in result.faulty if op.op == "blk.1.attn_probs")
    pages = {"page": result, "hostile": printable(hostile())}
    for name, of in pages.items():
        (tmp_path / f"{name}.html").write_text(html.render({"case": of}), encoding="utf-8")
    with Browser(tmp_path) as browser:
        browser.open(tmp_path / "page.html")
        assert browser.run("document.querySelector('[data-op=\"blk.0.attn_norm\"]').className") == "h1"
        browser.click('[data-op="blk.1.attn_probs"]')
        assert browser.text("#op h3") == "blk.1.attn_probs in step 0: faulty"
        opened = browser.text("#op")
        assert result.findings[2].text in opened
        assert "candidate\nmin " in opened
        strips = browser.run("[...document.querySelectorAll('.strip')].map((s) => s.childNodes.length)")
        assert attention.local
        assert strips == [len(strip.excess) for strip in attention.local.strips] == [4, 6, 6]
        assert browser.run("document.querySelectorAll('.strip')[1].firstChild.title") == "token 0: within its bound"
        assert attention.cause
        for place in attention.cause.places:
            assert f"{place.at}\t{place.inputs}\t{place.right:.7g}\t" in opened
        browser.press("ArrowLeft")
        browser.press("Enter")
        assert browser.text("#op h3") == "blk.1.attn_scores in step 0: inherited"
        browser.run("document.getElementById('step').focus()")
        browser.press("ArrowRight")
        assert browser.text("#op h3") == "blk.1.attn_scores in step 1: inherited"
        assert browser.run("[...document.querySelectorAll('section')].map((s) => s.hidden)") == [True, False]
        for width, dark in ((390, True), (800, False), (1400, True)):
            browser.open(tmp_path / "page.html", width, dark)
            browser.click('[data-op="blk.1.attn_probs"]')
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            paper = browser.run("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        browser.open(tmp_path / "hostile.html")
        assert browser.run("document.title") == "tracediff: diverged"
        assert browser.run("document.images.length") == 0
        browser.run("document.querySelector('.h5').click()")
        assert "<script>" in browser.text("#op h3")
        assert browser.complaints() == []
