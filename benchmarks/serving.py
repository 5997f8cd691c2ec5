"""Mistakes of serving engines: of slots, blocks, tables and lengths, and of rows that belong to other sequences.

    python benchmarks/serving.py [--only slot] [--out docs/serving-mistakes.md]

A serving engine (paged_engine.py) runs three sequences through a small Qwen3: prompts come in chunks, beside decodes of
others, and keys and values lie in blocks of a paged cache whose memory is not zero. Its attention is one kernel: no
scores are recorded. It is run right, and with each of these mistakes in what a pass is fed; the trace is checked by
itself, and must say what was done.
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from architectures import table
from paged_engine import N_SLOTS, Batch, Change, Engine, Part, Request

from tracediff import Recorder
from tracediff.model.synthetic import Shape, write_model
from tracediff.pipeline import Effort, check_trace

SHAPE = Shape("qwen3", n_layer=3, n_embd=96, n_head=6, n_head_kv=2, head_dim=32, n_ff=160)
OUTCOMES = ("named", "named in part", "located", "other words", "missed")
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong, how it is made, and a pattern of what must be said of it."""

    wrong: str
    says: str
    change: Change = lambda batch: None
    layer: Callable[[int, Part], int] = lambda layer, part: layer


def _each(change: Callable[[Part], None], decodes: bool | None = None) -> Change:
    """The change made in each part of a pass: in those that decode, in the others, or in all."""

    def of_all(batch: Batch) -> None:
        for part in batch:
            if decodes is None or part.decodes == decodes:
                change(part)

    return of_all


def _late(part: Part) -> None:
    part.slots = [(slot + 1) % N_SLOTS for slot in part.slots]


def _written_by_8(part: Part) -> None:
    part.slots = [(part.table[p // 8] * 8 + p % 8) % N_SLOTS for p in part.positions]


def _read_by_8(part: Part) -> None:
    part.read_by = 8


def _last_dropped(part: Part) -> None:
    if part.length < part.request.n_prompt:
        part.slots[-1] = -1


def _longer(by: int) -> Callable[[Part], None]:
    def change(part: Part) -> None:
        part.length += by

    return change


def _without_first(part: Part) -> None:
    part.first = 1


def _new_alone(part: Part) -> None:
    part.first = part.length - part.n


def _restarted(part: Part) -> None:
    part.positions = [*range(part.n)]


def _one_later(part: Part) -> None:
    part.positions = [position + 1 for position in part.positions]


def _row_before(part: Part) -> None:
    part.row = max(part.row - 1, 0)


def _tables_of_next(batch: Batch) -> None:
    tables = [part.table for part in batch]
    for part, other in zip(batch, tables[1:] + tables[:1], strict=True):
        if part.decodes and len(other) >= len(part.table):
            part.table = other


def _first_block_of_all(batch: Batch) -> None:
    for part in batch:
        part.table = [batch[0].table[0], *part.table[1:]]


def _logits_of_next(batch: Batch) -> None:
    rows = [part.row for part in batch]
    for part, row in zip(batch, rows[1:] + rows[:1], strict=True):
        part.row = row


def _tokens_of_next(batch: Batch) -> None:
    decoding = [part for part in batch if part.decodes]
    tokens = [part.tokens for part in decoding]
    for part, other in zip(decoding, tokens[1:] + tokens[:1], strict=True):
        part.tokens = other


def _padding_written(batch: Batch) -> None:
    """To slot 0: what lies there is the first position's of sequence 0."""
    if len(batch) > 1:
        batch[-1].slots[-1] = 0


READS, OF_ROW = r"attention reads other rows|attends to", "is that of position"
MISTAKES = {
    "slot_late": Mistake("each token is written one slot late", READS, _each(_late)),
    "slot_late_in_decode": Mistake("so are decoded tokens alone", READS, _each(_late, decodes=True)),
    "written_by_8": Mistake("slots are computed with blocks of 8 positions", READS, _each(_written_by_8)),
    "read_by_8": Mistake("what is read is computed with blocks of 8 positions", READS, _each(_read_by_8)),
    "last_dropped": Mistake("the last token of a chunk is not written", READS, _each(_last_dropped)),
    "table_of_next": Mistake("decodes read by the next sequence's table", READS, _tables_of_next),
    "first_block_of_all": Mistake("all sequences read the first one's first block", READS, _first_block_of_all),
    "length_minus_one": Mistake("decodes read one key too few", f"{READS}|its own token", _each(_longer(-1), True)),
    "length_plus_one": Mistake("decodes read one key too many", READS, _each(_longer(1), True)),
    "without_first": Mistake("decodes do not read the first key", READS, _each(_without_first, True)),
    "new_alone": Mistake("a chunk sees its own tokens alone", f"{READS}|its own tokens", _each(_new_alone, False)),
    "padding_written": Mistake("the last sequence's last token is written to slot 0", READS, _padding_written),
    "positions_restart": Mistake("positions begin at 0 in each chunk", "restart at 0", _each(_restarted, False)),
    "positions_late": Mistake("positions of decoded tokens are one too high", r"\+1", _each(_one_later, True)),
    "logits_row_before": Mistake("logits are made of the row before the last", OF_ROW, _each(_row_before)),
    "logits_of_next": Mistake("logits are those of the next sequence", OF_ROW, _logits_of_next),
    "tokens_of_next": Mistake("a decode is fed the next sequence's token", OF_ROW, _tokens_of_next),
    "layer_before": Mistake(
        "decodes read the cache of the layer before", "layer before", layer=lambda n, part: n - (part.decodes and n > 0)
    ),
}  # fmt: skip


def run(model: Path, out: Path, mistake: Mistake) -> Path:
    """The trace of the engine, with this mistake."""
    numbers = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 250, (n,), generator=numbers).tolist() for n in (13, 17, 10)]
    requests = [Request(i, prompt, n_new) for i, (prompt, n_new) in enumerate(zip(prompts, (6, 4, 5), strict=True))]
    with Recorder(out, gguf=model, engine="a paged engine") as record:
        Engine(model, record, mistake.change, mistake.layer).run(requests)
    return out


def outcome(mistake: Mistake, verdict: str, findings: list[tuple[str, str | None]]) -> str:
    """What came of it, as the findings say: each its text, and the mistake that it names."""
    if verdict != "diverged":
        return "missed"
    if any(name and not re.search(mistake.says, text) for text, name in findings):
        return "other words"
    named = [bool(re.search(mistake.says, text)) for text, _ in findings]
    return "named" if all(named) else "named in part" if any(named) else "located"


def page(only: str, folder: Path) -> tuple[str, bool]:
    """The document, and whether the right engine matches."""
    model = write_model(folder / "model.gguf", SHAPE, "F16")
    right = check_trace(run(model, folder / "right.trace", Mistake("", "")), model).verdict
    rows, counts = list[tuple[object, ...]](), Counter[str]()
    for name, mistake in MISTAKES.items():
        if only in name:
            path, began = run(model, folder / f"{name}.trace", mistake), time.process_time()
            result = check_trace(path, model, effort=Effort(seconds=SECONDS))
            seconds = time.process_time() - began
            came_to = outcome(mistake, result.verdict, [(one.text, one.mistake) for one in result.findings])
            counts[came_to] += 1
            said = "; ".join(one.text for one in result.findings)
            rows.append((mistake.wrong, came_to, f"{seconds:.0f}", said))
            print(f"{name}: {came_to}, {seconds:.0f} s: {said}", file=sys.stderr)
    about = (__doc__ or "").split("\n\n")
    parts = (
        "# Mistakes of serving engines",
        about[0].partition(": ")[2].capitalize() + " Written by",
        "    python benchmarks/serving.py --out docs/serving-mistakes.md",
        about[2].strip(),
        f"The right engine: **{right}**.",
        "*Named*: every finding says what was done, as a pattern tells that was written with the mistake; *in part*: "
        "some steps' do, but not where a decoded token reads several slots that nothing was written to. *Located*: "
        "they say only where. *Other words*: a finding names another cause. In seconds of the processor.",
        table(OUTCOMES, [[counts[name] for name in OUTCOMES]]),
        table(("mistake", "came to", "s", "what the report says"), rows),
    )
    return "\n\n".join(parts) + "\n", right == "match"


def main() -> int:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        text, matches = page(options.only, Path(name))
    if options.out:
        options.out.write_text(text)
    print(text)
    return int(not matches)


if __name__ == "__main__":
    sys.exit(main())
