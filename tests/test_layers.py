"""The directions of imports, held by the syntax tree; and what must load without torch and llama_cpp."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tracediff
import tracediff_reference

ROOTS = {"tracediff": Path(tracediff.__file__).parent, "tracediff_reference": Path(tracediff_reference.__file__).parent}

# Module or package -> what it may import of this project. A package may always import itself.
MAY = {
    "tracediff.errors": set(),
    "tracediff.names": {"errors"},
    "tracediff.result": {"errors"},
    "tracediff.trace": {"errors", "names"},
    "tracediff.model": {"errors", "names"},
    "tracediff.engine": {"errors", "names", "model", "trace", "diagnose", "reference"},
    "tracediff.align": {"errors", "trace", "names", "result", "tokens", "vocabulary"},
    "tracediff.tokens": {"vocabulary"},
    "tracediff.compare": {"result", "trace"},
    "tracediff.logits": {"result", "trace", "model", "vocabulary"},
    "tracediff.vocabulary": {"model"},
    "tracediff.normal": {"names", "result", "trace", "compare"},
    "tracediff.coverage": {"names", "result", "trace", "model"},
    "tracediff.skeleton": {"names", "trace", "model"},
    "tracediff.validate": {"names", "trace", "model", "result", "compare"},
    "tracediff.weight_causes": set(),
    "tracediff.weights": {"errors", "names", "result", "trace", "model", "compare", "weight_causes", "diagnose"},
    "tracediff.audit": {"errors", "result", "trace", "model", "weight_causes", "weights"},
    "tracediff.threeway": {"names", "judge", "pipeline", "result", "trace"},
    "tracediff.replay": {"errors", "names", "trace", "model", "result"},
    "tracediff.judge": {"errors", "names", "result"},
    "tracediff.diagnose": {"errors", "names", "trace", "model", "result", "replay"},
    "tracediff.report": {"result"},
    "tracediff.interchange": {"errors", "names", "trace", "model"},
    "tracediff_reference": {"errors", "names", "trace"},
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for root, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (root, *path.relative_to(folder).with_suffix("").parts)
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def imports(path: Path) -> set[str]:
    """What a file imports of this project: the part after `tracediff.`, or `reference`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    ours = {name for name in names if name.split(".")[0] in ROOTS}
    return {"reference" if name.startswith("tracediff_reference") else [*name.split("."), ""][1] for name in ours}


def test_every_package_is_installed() -> None:
    """Tests run beside the sources, where a package that setuptools was not told of is found all the same."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    packages = {name for name, path in modules() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    rule = next((key for key in MAY if module == key or module.startswith(key + ".")), None)
    if rule is None:  # the pipeline, the command line and what they share may import anything below them
        return
    own = {rule.split(".")[-1].replace("tracediff_", "")}
    assert imports(path) - own - {""} <= MAY[rule], f"{module} imports against the flow"


@pytest.mark.parametrize(
    "module", ["tracediff.compare", "tracediff.align", "tracediff.judge", "tracediff.pipeline",
               "tracediff.validate", "tracediff.threeway", "tracediff.report.threeway", "tracediff.report.terminal",
               "tracediff.report.json_report", "tracediff.cli"],
)  # fmt: skip
def test_loads_without_torch_and_llama_cpp(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'llama_cpp', 'gguf') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
