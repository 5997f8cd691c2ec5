"""The directions of imports, held by the syntax tree; and what must load without torch and llama_cpp."""

import ast
import subprocess
import sys
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
    "tracediff.align": {"errors", "trace", "names", "result"},
    "tracediff.compare": {"result"},
    "tracediff.logits": {"result", "trace", "model"},
    "tracediff.weights": {"result", "trace", "model", "compare"},
    "tracediff.floors": {"model"},
    "tracediff.replay": {"errors", "names", "trace", "model", "result", "floors"},
    "tracediff.judge": {"names", "result"},
    "tracediff.diagnose": {"errors", "names", "trace", "model", "result", "replay"},
    "tracediff.report": {"result"},
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


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_one_way(module: str, path: Path) -> None:
    rule = next((key for key in MAY if module == key or module.startswith(key + ".")), None)
    if rule is None:  # the pipeline, the command line and what they share may import anything below them
        return
    own = {rule.split(".")[-1].replace("tracediff_", "")}
    assert imports(path) - own - {""} <= MAY[rule], f"{module} imports against the flow"


@pytest.mark.parametrize(
    "module", ["tracediff.compare", "tracediff.align", "tracediff.judge", "tracediff.pipeline",
               "tracediff.report.terminal", "tracediff.report.json_report", "tracediff.cli"],
)  # fmt: skip
def test_loads_without_torch_and_llama_cpp(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'llama_cpp', 'gguf') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
