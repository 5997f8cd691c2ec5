"""The directions of imports, held by the syntax tree; and what must load without torch and llama_cpp."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tracediff
import tracediff_reference

ROOTS = {"tracediff": Path(tracediff.__file__).parent, "tracediff_reference": Path(tracediff_reference.__file__).parent}

# Module or package -> what it may import of this project. A package may always import itself.
EVERYTHING = {
    "audit", "bundle", "ci", "cli", "compare", "demo", "diagnose", "engine", "english", "errors", "files", "findings",
    "inputs", "inspect", "interchange", "itself", "judge", "mismatch", "model", "names", "numerics", "pipeline",
    "printable", "process", "reference", "replay", "report", "reproduce", "result", "threeway", "trace", "versions",
}  # fmt: skip
MAY = {
    "tracediff.__init__": {"engine"},  # on first use
    "tracediff.__main__": {"cli", "process"},
    "tracediff.process": set(),
    "tracediff.errors": {"printable"},
    "tracediff.printable": set(),
    "tracediff.english": set(),
    "tracediff.files": {"errors"},
    "tracediff.inputs": {"errors"},
    "tracediff.names": {"errors"},
    "tracediff.result": {"errors", "trace"},
    "tracediff.trace": {"english", "errors", "files", "inputs", "names"},
    "tracediff.model": {"errors", "files", "inputs", "names", "reference"},
    "tracediff.numerics": {"errors", "names", "model"},
    "tracediff.engine": {"errors", "names", "model", "numerics", "trace", "diagnose", "reference"},
    "tracediff.compare": {"errors", "names", "model", "trace", "result"},
    "tracediff.replay": {"errors", "names", "model", "numerics", "process", "trace", "result"},
    "tracediff.judge": {"errors", "names", "result"},
    "tracediff.diagnose": {"english", "errors", "names", "model", "numerics", "trace", "result", "replay"},
    "tracediff.audit": {
        "compare", "diagnose", "english", "errors", "findings", "model", "names", "numerics", "result", "trace",
    },
    "tracediff.inspect": {
        "audit", "compare", "diagnose", "english", "errors", "findings", "model", "names", "result", "trace",
    },
    "tracediff.interchange": {"english", "errors", "files", "inputs", "names", "trace", "model", "numerics"},
    "tracediff.ci": {"english", "errors", "files", "findings", "inputs", "judge", "names", "result"},
    "tracediff.report": {"english", "findings", "names", "result"},
    "tracediff.findings": {"english", "judge", "names", "result", "trace"},
    "tracediff.pipeline": {
        "audit", "compare", "diagnose", "errors", "findings", "judge", "model", "names", "replay", "result", "trace",
    },
    "tracediff.itself": {"engine", "errors", "files", "findings", "judge", "model", "pipeline", "result", "trace"},
    "tracediff.threeway": {"errors", "names", "judge", "model", "pipeline", "result", "trace"},
    "tracediff.reproduce": {"audit", "diagnose", "errors", "files", "model", "numerics", "pipeline", "replay", "trace"},
    "tracediff.bundle": {
        "english", "compare", "errors", "files", "findings", "model", "names", "printable", "report", "result", "trace",
        "versions",
    },
    "tracediff.versions": set(),
    "tracediff.pytest_plugin": set(),
    "tracediff.testing": {"judge", "pipeline", "result"},
    "tracediff.mismatch": {
        "audit", "compare", "english", "errors", "files", "findings", "judge", "model", "names", "numerics", "pipeline",
        "replay", "result", "trace",
    },
    "tracediff.demo": {"files", "model", "result", "diagnose"},
    "tracediff.cli": EVERYTHING,
    "tracediff_reference": {"errors", "names", "trace"},
}  # fmt: skip


# Packages of modules of one sort, whose names say what each is for; the pages of all others name each of theirs.
ONE_SORT = {
    "audit", "ci", "cli", "diagnose.mistakes", "findings", "inspect", "interchange", "itself", "numerics.kinds",
    "report", "report.sections", "result",
}  # fmt: skip


def modules() -> list[tuple[str, Path]]:
    found = []
    for root, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (root, *path.relative_to(folder).with_suffix("").parts)
            name = ".".join(parts)
            found.append((name if name == "tracediff.__init__" else name.removesuffix(".__init__"), path))
    return found


def imported(source: str) -> set[str]:
    """What a file imports of this project: the part after `tracediff.`, or `reference`; "" for the root itself."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.split(".")[0] in ROOTS}
    parts = {"reference" if name.startswith("tracediff_reference") else [*name.split("."), ""][1] for name in ours}
    return {part for part in parts if part in EVERYTHING}


def rule_of(module: str) -> str:
    """The rule that a module falls under: its own, or that of the package it is in."""
    parts = module.split(".")
    return next(key for key in (module, ".".join(parts[:2]), parts[0]) if key in MAY)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="tests that run one by one may have all cores")
def test_each_of_several_test_runners_has_a_thread() -> None:
    """Two on two cores that had two each did not finish in 90 minutes what they do in 15."""
    import torch

    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])


def test_every_package_is_installed() -> None:
    """Tests run beside the sources, where a package that setuptools was not told of is found all the same."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    packages = {name.removesuffix(".__init__") for name, path in modules() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


@pytest.mark.parametrize("page", sorted(ROOTS["tracediff"].rglob("__init__.py")), ids=lambda page: page.parent.name)
def test_the_page_of_a_package_names_its_modules(page: Path) -> None:
    folder = page.parent
    named = set(re.findall(r"`(\w+)/?`", ast.get_docstring(ast.parse(page.read_text())) or ""))
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    of_one_sort = ".".join(folder.relative_to(ROOTS["tracediff"]).parts) in ONE_SORT
    assert of_one_sort or there - {"__init__", "__main__"} <= named
    assert {name for name in named - there - EVERYTHING if name.islower()} == set()


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    rule = rule_of(module)
    own = {rule.split(".")[-1].replace("tracediff_", "")}
    assert imported(path.read_text()) - own <= MAY[rule], f"{module} imports against the flow"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import tracediff.judge", {"judge"}),
        ("from tracediff import judge", {"judge"}),
        ("from tracediff import __version__", set()),
        ("from tracediff.report.json_report import render", {"report"}),
        ("def f():\n    from tracediff_reference.protocol import Options", {"reference"}),
    ],
)
def test_every_way_to_import_is_seen(source: str, found: set[str]) -> None:
    assert imported(source) == found


@pytest.mark.parametrize(
    ("module", "without"),
    [
        *((name, ("torch", "llama_cpp", "gguf")) for name in (
            "tracediff.compare.measure", "tracediff.compare.align", "tracediff.judge", "tracediff.pipeline",
            "tracediff.inspect.validate", "tracediff.threeway", "tracediff.report.threeway",
            "tracediff.report.terminal", "tracediff.report.json_report", "tracediff.cli",
        )),
        ("tracediff.diagnose.judged", ("tracediff.diagnose.explain", "tracediff.diagnose.solve", "llama_cpp")),
    ],
)  # fmt: skip
def test_loads_without(module: str, without: tuple[str, ...]) -> None:
    """What a command loads that finds nothing, or needs no model: half of a small model's check is imports."""
    code = f"import sys, {module}; print([m for m in {without} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
