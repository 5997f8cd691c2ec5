"""Wrong lines in engines that others wrote: transformers' models of ten architectures, each with one edit, recorded.

    python benchmarks/edited_engines.py [--only mamba] [--kept FILE] [--out docs/edited-engines.md]

An edit replaces a piece of a model's source as it is installed (transformers of constraints.txt), and the edited model
runs a prompt and two decode steps of a tiny model (tiny_models.py). Its trace is checked by itself, once with all that
was recorded and once with its hidden states alone. Nobody chose the edits from a list of what is known; what the report
must say of each is written here, and another word is a false one. What --kept has is not made again.

Fourteen of the edits were not named, or by other words, when they were first made. What they taught is in no case about
the one edit, but a page that has been learnt from is no estimate for the next.
"""

import argparse
import importlib
import json
import multiprocessing
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import cast

import tiny_checkpoints
import tiny_models
from architectures import N_DECODE, TOKENS, table
from edits import EDITS
from tiny_metadata import TRANSFORMERS

from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import trace_model, trace_transformers
from tracediff.model.model import Model
from tracediff.names import Capture
from tracediff.pipeline import Effort, check_trace

SECONDS = 120.0  # of a search for causes
CAPTURES = {"all": "every op", "layers": "hidden states"}
MODULES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
# Of mixtures the decorator picks another implementation than the one that is edited.
DROPPED = r"@use_experts_implementation(\(.*\))?\n"
# Of gemma3 both sorts of layers would rotate alike.
OTHERS = {"gemma3": {"rope.freq_base": 1000000.0}}


def edited(n: int, capture: str, folder: Path) -> "Found":
    """The number of an edit, the capture, what came of it, and what the report says. In a process of its own."""
    edit = EDITS[n]
    known = tiny_checkpoints.CLASSES.get(edit.arch)
    others, without = (known.others, known.without) if known else TRANSFORMERS[edit.arch]
    others = {**others, **OTHERS.get(edit.arch, {})}
    model = tiny_models.write(edit.arch, folder / f"{n}-{capture}.gguf", others=others, without=without)
    name = known.module if known else MODULES.get(edit.arch, edit.arch)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = Path(str(module.__file__)).read_text()
    source = re.sub(DROPPED, "", source)
    if edit.old not in source:
        raise LookupError(f"{module.__file__} has no {edit.old!r}: this is for the transformers of constraints.txt.")
    changed = folder / f"{n}-{capture}.py"
    changed.write_text(source.replace(edit.old, edit.new))
    exec(compile(changed.read_text(), str(changed), "exec"), module.__dict__)
    out = folder / f"{n}-{capture}.trace"
    options = TorchOptions(capture=cast(Capture, capture))
    if known:
        trace_model(tiny_checkpoints.load(edit.arch, model), Model(model), out, options, list(TOKENS), N_DECODE)
    else:
        trace_transformers(Model(model), out, options, list(TOKENS), N_DECODE)
    result = check_trace(out, model, effort=Effort(seconds=SECONDS))
    said = [finding.text for finding in result.findings]
    explained = [finding.text for finding in result.findings if finding.mistake]
    false = [text for text in explained if not any(re.search(pattern, text) for pattern in edit.says)]
    named = all(any(re.search(pattern, text) for text in explained) for pattern in edit.says)
    if false:
        return n, capture, "other words", said
    if not said:
        return n, capture, "missed", said
    return n, capture, "named" if named and len(explained) == len(said) else "located", said


Found = tuple[int, str, str, list[str]]


def results(only: str, kept: Path, folder: Path) -> Iterator[Found]:
    """Of all edits of the architectures `only`, every op recorded and hidden states alone."""
    context = multiprocessing.get_context("spawn")
    lines = map(json.loads, kept.read_text().splitlines()) if kept.exists() else ()
    before: dict[tuple[int, str], Found] = {(n, capture): (n, capture, *rest) for n, capture, *rest in lines}
    for n, edit in enumerate(EDITS):
        for capture in CAPTURES if only in edit.arch else ():
            if (n, capture) in before:
                yield before[n, capture]
                continue
            with ProcessPoolExecutor(1, context) as process:
                found = process.submit(edited, n, capture, folder).result()
            with kept.open("a") as file:
                file.write(f"{json.dumps(found)}\n")
            yield found


def page(found: list[Found]) -> str:
    """The document."""
    outcomes = ("named", "located", "other words", "missed")
    counts = Counter((capture, outcome) for _, capture, outcome, _ in found)
    by_edit = {(n, capture): (outcome, said) for n, capture, outcome, said in found}
    rows = []
    for n in dict.fromkeys(n for n, *_ in found):
        said = by_edit[n, "all"][1]
        texts = "; ".join(dict.fromkeys(re.sub(r" \(seen in [^)]*\)|\(blk.*", "", text) for text in said))
        rows.append((EDITS[n].arch, EDITS[n].wrong, *(by_edit[n, capture][0] for capture in CAPTURES), texts))
    about = (__doc__ or "").split("\n\n")
    totals = [(words, *(counts[capture, outcome] for outcome in outcomes)) for capture, words in CAPTURES.items()]
    return "\n\n".join((
        "# Wrong lines in engines that others wrote",
        about[0].partition(": ")[2].capitalize() + " Written by",
        "    python benchmarks/edited_engines.py --out docs/edited-engines.md",
        about[2].strip().replace(" What --kept has is not made again.", ""),
        about[3].strip(),
        "*Named*: every finding says what was done. *Located*: some say only where, and what can be seen there. *Other "
        "words*: a finding names another cause.",
        table(("recorded", *outcomes), totals),
        table(("architecture", "edit", *CAPTURES.values(), "what the report says of every op"), rows),
    )) + "\n"  # fmt: skip


def main() -> int:
    """1 where an edit is missed, or another cause is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures with this in their name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kept", type=Path, help="JSON lines of results, which are added to")
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for n, capture, outcome, said in results(arguments.only, arguments.kept or Path(name, "kept"), Path(name)):
            print(
                f"{EDITS[n].arch}, {EDITS[n].wrong}, {CAPTURES[capture]}: {outcome}: {'; '.join(said)[:300]}",
                flush=True,
            )
            found.append((n, capture, outcome, said))
    if arguments.out:
        arguments.out.write_text(page(found))
    return 0 if not any(outcome in ("other words", "missed") for _, _, outcome, _ in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
