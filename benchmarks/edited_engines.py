"""Wrong lines in engines that others wrote: transformers' models of 31 architectures, each with one edit, recorded.

    python benchmarks/edited_engines.py [--only mamba] [--kept FILE] [--out docs/edited-engines.md]

An edit replaces a piece of a model's source as it is installed (transformers of constraints.txt), and the edited model
runs a prompt and two decode steps of a tiny model (tiny_models.py). Its trace is checked by itself, once with all that
was recorded and once with its hidden states alone. Nobody chose the edits from a list of what is known; what the report
must say of each is written here, and another word is a false one. What --kept has is not made again.

These edits were written before any of them was run, in architectures and of sorts that the list before them had not:
what they came to on the code of that day, read one by one, is an estimate of what tracediff says of the next mistake.
Nobody knew what it would say of them, so a pattern of the report's words was put right where other words were true;
four edits did something else than was meant, and were written and run again on the same code. Five of the other words
were of three models that were recorded wrongly (norms behind rope, a norm with a gate, a router's scores): these were
called faulty without an edit, too. What the edits come to now is no estimate, for it was learnt from them.

Fourteen of these edits were not named, or by other words, when they were first made.
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
from edits import EDITS, FIRST, SECOND
from tiny_metadata import TRANSFORMERS

from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import trace_model, trace_transformers
from tracediff.model.model import Model
from tracediff.names import Capture
from tracediff.pipeline import Effort, check_trace

SECONDS = 120.0  # of a search for causes
CAPTURES = {"all": "every op", "layers": "hidden states"}
OUTCOMES = ("named", "located", "other words", "missed")
SIGHT = {"n": "named", "l": "located", "w": "other words"}
HEAD = ("architecture", "edit", "what the report says of every op")
MODULES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "minimax-m2": "minimax_m2"}
# Of mixtures the decorator picks another implementation than the one that is edited.
DROPPED = r"@use_experts_implementation(\(.*\))?\n"
# Of gemma3 both sorts of layers would rotate alike.
OTHERS = {"gemma3": {"rope.freq_base": 1000000.0}}


def edited(n: int, capture: str, folder: Path) -> "Found":
    """The number of an edit, the capture, what came of it, and what the report says. In a process of its own."""
    edit = EDITS[n]
    known = tiny_checkpoints.CLASSES.get(edit.arch)
    model = folder / f"{n}-{capture}.gguf"
    if known:
        known.write(edit.arch, model)
    else:
        others, without = TRANSFORMERS[edit.arch]
        others = {**others, **OTHERS.get(edit.arch, {})}
        tiny_models.write(edit.arch, model, others=others, without=without)
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
    about = (__doc__ or "").split("\n\n")
    first, second = ([one for one in found if (one[0] < len(FIRST)) == is_first] for is_first in (True, False))
    return "\n\n".join((
        "# Wrong lines in engines that others wrote",
        about[0].partition(": ")[2].capitalize() + " Written by",
        "    python benchmarks/edited_engines.py --out docs/edited-engines.md",
        about[2].strip().replace(" What --kept has is not made again.", ""),
        "*Named*: every finding says what was done. *Located*: some say only where, and what can be seen there. *Other "
        "words*: a finding names another cause.",
        "## At first sight",
        about[3].strip(),
        table(("recorded", "", *OUTCOMES), [*at_first_sight(), *totals(second, "now")]),
        table((*HEAD[:2], "every op: at first sight", "now", "hidden states: at first sight", "now", HEAD[2]),
              rows(second)),
        "## Learnt from",
        about[4].strip(),
        table(("recorded", "", *OUTCOMES), totals(first, "now")),
        table((*HEAD[:2], *CAPTURES.values(), HEAD[2]), rows(first)),
    )) + "\n"  # fmt: skip


def at_first_sight() -> list[tuple[object, ...]]:
    """How many of SECOND came to what when they were first run."""
    columns = [Counter(edit.sight[i] for edit in SECOND) for i in range(len(CAPTURES))]
    return [
        (words, "at first sight", *(counts[outcome[0]] for outcome in ("named", "located", "words", "missed")))
        for words, counts in zip(CAPTURES.values(), columns, strict=True)
    ]


def totals(found: list[Found], when: str) -> list[tuple[object, ...]]:
    """How many came to what."""
    counts = Counter((capture, outcome) for _, capture, outcome, _ in found)
    return [(words, when, *(counts[capture, outcome] for outcome in OUTCOMES)) for capture, words in CAPTURES.items()]


def rows(found: list[Found]) -> list[tuple[str, ...]]:
    """A row of each edit, with what it came to at first sight where that is known."""
    by_edit = {(n, capture): (outcome, said) for n, capture, outcome, said in found}
    made = []
    for n in dict.fromkeys(n for n, *_ in found):
        outcomes = [by_edit[n, capture][0] for capture in CAPTURES]
        sights = [SIGHT[letter] for letter in EDITS[n].sight]
        cells = [cell for pair in zip(sights, outcomes, strict=True) for cell in pair] if sights else outcomes
        said = by_edit[n, "all"][1]
        texts = "; ".join(dict.fromkeys(re.sub(r" \(seen in [^)]*\)|\(blk.*", "", text) for text in said))
        made.append((EDITS[n].arch, EDITS[n].wrong, *cells, texts))
    return made


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
