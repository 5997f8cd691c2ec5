"""JUnit XML for the test pages of CI systems: a test case for each layer, and for each op outside of them.

Elements and attributes are those of the Jenkins xUnit plugin (junit-10.xsd), which GitLab and others read too.
"""

import re
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from tracediff.findings.words import number
from tracediff.names import layer_of
from tracediff.result import Finding, Result

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, 2.2


def render(cases: Mapping[str, Result]) -> str:
    """One document; a suite for each case."""
    root = Element("testsuites", name="tracediff")
    for name, result in cases.items():
        _suite(root, name, result)
    indent(root)
    return f"<?xml version='1.0' encoding='UTF-8'?>\n{tostring(root, encoding='unicode')}\n"


def _suite(root: Element, name: str, result: Result) -> None:
    suite = SubElement(root, "testsuite", name=_xml(f"tracediff {name}"), tests="", failures="", errors="", skipped="")
    failures = {place: [*_failures(place, result)] for place in _places(result)}
    for place, found in failures.items():
        case = SubElement(suite, "testcase", name=_xml(place), classname=_xml(f"tracediff.{name}"))
        for text, kind, more in found:
            failure = SubElement(case, "failure", message=_xml(text), type=_xml(kind))
            failure.text = _xml(f"{text}\n{more}")
        if not found and not any(op.told for op in result.ops if _place(op.op) == place):
            SubElement(case, "skipped", message="not judged")
    if result.verdict == "undecided":
        case = SubElement(suite, "testcase", name="verdict", classname=_xml(f"tracediff.{name}"))
        SubElement(case, "error", message=_xml(result.summary), type="undecided")
    counts = {"tests": "testcase", "failures": "testcase/failure/..", "errors": "testcase/error/.."}
    for attribute, path in {**counts, "skipped": "testcase/skipped/.."}.items():
        suite.set(attribute, str(len(suite.findall(path))))


def _place(op: str) -> str:
    layer = layer_of(op)
    return op.removesuffix(".weight").removesuffix(".bias") if layer is None else f"layer {layer}"


def _places(result: Result) -> dict[str, None]:
    """In the order of execution; "the whole" for what is wrong nowhere else."""
    places = dict.fromkeys(_place(op.op) for op in result.ops)
    found = {_place(name): None for one in result.findings for name in one.ops or one.weights}
    whole = {"the whole": None} if result.verdict == "diverged" and not found and not result.first_divergence else {}
    return {**places, **found, **whole}


def _failures(place: str, result: Result) -> Iterator[tuple[str, str, str]]:
    """What is said, the mistake's name, and the figures."""
    for one in result.findings:
        if any(_place(name) == place for name in one.ops or one.weights):
            yield one.text, one.mistake or "unknown", _more(one)
    first = result.first_divergence
    whole = _place(first.op) if first else "the whole"
    if result.verdict == "diverged" and not result.findings and place == whole:
        yield result.summary, first.reason if first else "diverged", "\n".join(result.details)


def _more(one: Finding) -> str:
    figures = [f"NMSE up to {number(one.nmse)}"] if one.nmse is not None else []
    return "\n".join([*figures, *([f"look at {one.look}"] if one.look else [])])


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
