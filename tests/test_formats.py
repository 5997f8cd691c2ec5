"""JUnit XML, SARIF, Markdown and GitHub's annotations: valid, the same sentences, and safe whatever a trace holds."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from tracediff.printable import printable
from tracediff.report import junit, markdown, node_data, sarif
from tracediff.result import Finding, Result, Said

TRACES = Path(__file__).parent.parent / "traces"
sys.path.insert(0, str(TRACES))

import make  # noqa: E402

HOSTILE = '</failure>]]>"><script>alert(1)</script> | `x` ::error::\x1b[2J\x00\ud800 &amp; %0A\n::warning::y'
# What the Jenkins xUnit plugin's schema (junit-10.xsd) asks for: of each element the children and attributes that it
# may have, those that it must have in capitals.
JUNIT: dict[str, tuple[set[str], set[str]]] = {
    "testsuites": ({"testsuite"}, {"name", "time", "tests", "failures", "errors"}),
    "testsuite": (
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
        {"NAME", "TESTS", "FAILURES", "ERRORS", "group", "time", "skipped", "timestamp", "hostname", "id", "package"},
    ),
    "testcase": (
        {"skipped", "error", "failure", "system-out", "system-err"}, {"NAME", "time", "classname", "group"},
    ),
    "failure": (set(), {"type", "message"}),
    "error": (set(), {"type", "message"}),
    "skipped": (set(), {"type", "message"}),
}  # fmt: skip
# Of SARIF 2.1.0 the objects that are used: the properties that each must have (in capitals) or may, by the section of
# the specification that defines it.
SARIF: dict[str, tuple[str, dict[str, Any]]] = {
    "log": ("3.13", {"$schema": str, "VERSION": {"2.1.0"}, "RUNS": ["run"]}),
    "run": ("3.14", {"TOOL": "tool", "results": ["result"]}),
    "tool": ("3.18", {"DRIVER": "component"}),
    "component": ("3.19", {"NAME": str, "semanticVersion": str, "rules": ["rule"]}),
    "rule": ("3.49", {"ID": str, "shortDescription": "message", "help": "message"}),
    "message": ("3.11", {"TEXT": str}),
    "result": (
        "3.27",
        {
            "MESSAGE": "message", "ruleId": str, "ruleIndex": int, "level": {"none", "note", "warning", "error"},
            "kind": {"open", "fail"}, "locations": ["location"], "partialFingerprints": dict,
        },
    ),
    "location": ("3.28", {"physicalLocation": "physical", "logicalLocations": ["logical"]}),
    "physical": ("3.29", {"ARTIFACTLOCATION": "artifact", "region": "region"}),
    "artifact": ("3.4", {"URI": str}),
    "region": ("3.30", {"startLine": int}),
    "logical": ("3.33", {"fullyQualifiedName": str}),
}  # fmt: skip


def results() -> dict[str, Result]:
    return {case: make.compare(case) for case in make.CASES}


def hostile() -> dict[str, Result]:
    result = make.compare("rope-pairing")
    finding = Finding(HOSTILE, HOSTILE, ops=(HOSTILE, "blk.0.attn_q"), look=HOSTILE, nmse=1.0)
    said = (Said("means", HOSTILE, "alarm"),)
    op = replace(result.ops[0], op=HOSTILE)
    return {HOSTILE: replace(result, findings=(finding,), summary=HOSTILE, said=said, ops=(op, *result.ops))}


def undecided() -> dict[str, Result]:
    result = make.compare("clean")
    return {"x": replace(result, verdict="undecided", undecided=("why", "and why"), summary="why.")}


EVERY: tuple[Callable[[], dict[str, Result]], ...] = (results, hostile, undecided)


def check_element(element: ElementTree.Element) -> None:
    children, attributes = JUNIT[element.tag]
    assert {child.tag for child in element} <= children, element.tag
    required = {name.lower() for name in attributes if name.isupper()}
    assert required <= {*element.attrib} <= {name.lower() for name in attributes}, element.tag
    for child in element:
        check_element(child)


@pytest.mark.parametrize("made", EVERY)
def test_junit_is_valid_and_its_counts_add_up(made: Callable[[], dict[str, Result]]) -> None:
    root = ElementTree.fromstring(junit.render(made()).encode("utf-8", "surrogatepass"))
    check_element(root)
    for suite in root:
        for attribute, tag in {"failures": "failure", "errors": "error", "skipped": "skipped"}.items():
            assert int(suite.attrib[attribute]) == sum(case.find(tag) is not None for case in suite)
        assert int(suite.attrib["tests"]) == len(suite)


def test_junit_fails_in_the_layers_of_each_finding() -> None:
    result = make.compare("three-faults")
    (suite,) = ElementTree.fromstring(junit.render({"case": result}))
    found = {case.attrib["name"]: [one.attrib["message"] for one in case.iter("failure")] for case in suite}
    texts = [one.text for one in result.findings]
    assert found == {
        "token_embd": [], "layer 0": texts[:2], "layer 1": texts[1:], "output_norm": [], "output": [],
    }  # fmt: skip
    assert "look at which activation the model has there" in (suite[1][1].text or "")
    (suite,) = ElementTree.fromstring(junit.render(undecided()))
    assert [case.attrib["name"] for case in suite if case.find("error") is not None] == ["verdict"]


def test_junit_says_what_drifts_and_what_was_not_judged() -> None:
    result = make.compare("statistics")
    drifting = replace(result, findings=())
    (suite,) = ElementTree.fromstring(junit.render({"case": drifting}))
    failing = {
        case.attrib["name"]: case.find("failure").get("message") for case in suite if case.find("failure") is not None
    }
    assert failing == {"output_norm": result.summary}
    unmatched = tuple(replace(op, status="unmatched", drift=None, local=None) for op in result.ops)
    (suite,) = ElementTree.fromstring(junit.render({"case": replace(drifting, ops=unmatched)}))
    assert int(suite.attrib["skipped"]) == len(suite) - 1


def check_object(kind: str, value: Any) -> None:
    section, allowed = SARIF[kind]
    names = {name.lower(): (name, of) for name, of in allowed.items()}
    assert {key.lower() for key in value} <= {*names}, f"{kind}: {section}"
    assert all(name in {key.lower() for key in value} for name, (given, _) in names.items() if given.isupper()), kind
    for key, inner in value.items():
        of = names[key.lower()][1]
        if isinstance(of, list):
            assert isinstance(inner, list)
            for one in inner:
                check_object(of[0], one)
        elif isinstance(of, str):
            check_object(of, inner)
        elif isinstance(of, set):
            assert inner in of
        else:
            assert type(inner) is of


@pytest.mark.parametrize("made", EVERY)
def test_sarif_is_valid(made: Callable[[], dict[str, Result]]) -> None:
    log = json.loads(sarif.render(printable(made()), {"attn_*_rope": "src/my rope.c:120"}, "0.1.0"))
    check_object("log", log)
    (run,) = log["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len({*rules}) == len(rules)
    for one in run["results"]:
        assert rules[one["ruleIndex"]] == one["ruleId"]
        assert (one["level"] == "none") == (one.get("kind") == "open")  # 3.27.9: what is open has no level
        for place in one["locations"]:
            assert re.fullmatch(r"[\w.~%/-]+", place["physicalLocation"]["artifactLocation"]["uri"])


def test_sarif_points_at_the_source_of_an_op() -> None:
    result = make.compare("rope-pairing")
    sources = {"*": "src/other.c", "attn_*_rope": "src/my rope.c:120", "blk.1.attn_k_rope": "src/k.c"}
    (one,) = json.loads(sarif.render({"a": result}, sources, "0.1.0"))["runs"][0]["results"]
    assert (one["ruleId"], one["message"]["text"]) == ("rope_pairing", result.findings[0].text)
    places = {
        place["physicalLocation"]["artifactLocation"]["uri"]: (
            place["physicalLocation"]["region"]["startLine"],
            {op["fullyQualifiedName"] for op in place["logicalLocations"]},
        )
        for place in one["locations"]
    }
    assert places == {
        "src/my%20rope.c": (120, {"blk.0.attn_q_rope", "blk.0.attn_k_rope", "blk.1.attn_q_rope"}),
        "src/k.c": (1, {"blk.1.attn_k_rope"}),
    }
    (one,) = json.loads(sarif.render({"a": result}, {}, "0.1.0"))["runs"][0]["results"]
    assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "candidate.trace"
    assert sarif.line_of("C:x") == ("C:x", None)


def test_sarif_names_the_file_whatever_its_letters(cli: Callable[..., tuple], tmp_path: Path) -> None:
    case, trace = TRACES / "rope-pairing", tmp_path / "a\\b ä%\x1b\n\u202e.trace"
    shutil.copy(case / "candidate.bin", tmp_path)
    shutil.copy(case / "candidate.trace", trace)
    out = tmp_path / "a.sarif"
    assert cli("check", trace, "--model", case / "model.gguf", "--sarif", out)[0] == 1
    (run,) = json.loads(out.read_text())["runs"]
    uris = {
        place["physicalLocation"]["artifactLocation"]["uri"] for one in run["results"] for place in one["locations"]
    }
    assert [*map(unquote, uris)] == [str(trace)]


def test_markdown_holds_the_findings_and_no_markup_of_others() -> None:
    result = make.compare("three-faults")
    text = markdown.render({"case": result})
    assert text.startswith("### tracediff case: diverged\n")
    for one in result.findings:
        assert one.text.replace("_", r"\_").replace("*", r"\*") in text
    shown = markdown.render(printable(hostile()))
    assert "<" not in shown.replace(r"\<", "")
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [4, 4, 4]


def test_annotations_are_one_line_each() -> None:
    result = make.compare("rope-pairing")
    (line,) = markdown.annotations({"a,b": result}, {"attn_*_rope": "src/rope.c:7"})
    assert line == f"::error file=src/rope.c,line=7,title=tracediff a%2Cb%3A rope_pairing::{result.findings[0].text}"
    for line in markdown.annotations(hostile(), {}):
        assert line.startswith("::error title=tracediff ")
        assert "\n" not in line
        assert len(line.split("::")) >= 3
    (line,) = markdown.annotations(undecided(), {})
    assert line == "::warning title=tracediff x::why."


def test_node_data_find_their_nodes_and_colour_what_is_wrong(cli: Callable[..., tuple]) -> None:
    result = make.compare("three-faults")
    ((graph, data),) = json.loads(node_data.render({"case": result})).items()
    code, written, _ = cli("inspect", TRACES / "three-faults" / "model.gguf", "--graph")
    assert code == 0
    (shown,) = json.loads(written)["graphs"]
    assert shown["id"] == graph
    nodes = {node["id"]: node for node in shown["nodes"]}
    assert {edge["sourceNodeId"] for node in nodes.values() for edge in node["incomingEdges"]} <= {*nodes}
    assert nodes["blk.0.attn_q"]["namespace"] == "blk/0"
    assert {*data["results"]} == {op.op for op in result.ops if op.local} <= {*nodes}
    limits = [one["value"] for one in data["thresholds"]]
    assert limits == sorted(limits)
    wrong = {name for name, one in data["results"].items() if one["value"] > 1}
    assert wrong == {op.op for op in result.faulty}
    assert max(one["value"] for one in data["results"].values()) <= limits[-1]


def test_the_command_writes_them(tmp_path: Path, cli: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    case = TRACES / "rope-pairing"
    monkeypatch.chdir(tmp_path)
    Path("tracediff.toml").write_text('[sources]\n"attn_*_rope" = "src/rope.c:7"\n')
    names = {"--junit": "a.xml", "--sarif": "a.sarif", "--markdown": "a.md"}
    options = [part for pair in names.items() for part in pair]
    command = ("check", case / "candidate.trace", "--model", case / "model.gguf", *options, "--annotations")
    code, said, _ = cli(*command)
    assert code == 1
    assert said.splitlines()[-1].startswith("::error file=src/rope.c,line=7,title=tracediff candidate")
    assert ElementTree.parse("a.xml").getroot().tag == "testsuites"
    assert json.loads(Path("a.sarif").read_text())["version"] == "2.1.0"
    before = {name: Path(name).read_bytes() for name in names.values()}
    assert cli(*command)[0] == 1  # over its own files
    assert {name: Path(name).read_bytes() for name in names.values()} == before
    for name in names.values():
        Path(name).write_text("somebody's own")
    code, _, error = cli(*command)
    assert code == 2
    assert "exists, and is not what tracediff writes there" in error
