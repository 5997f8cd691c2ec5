"""Broken traces: each must be refused with a TracediffError, or read; no other exception, no hang, no memory.

    python benchmarks/fuzz.py [--mutants 20000] [--first 0] [--seed 0] [--only 1234]

Mutants of the golden traces, and of one with every sort of record, differ in bytes, numbers, keys, lines or length,
of the text file and of the data. Each is opened, every value is read, it is validated, compared with the reference,
and every 20th is replayed too. A mutant is known by its number: `--only` runs one again.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracediff.errors import TracediffError
from tracediff.inspect.validate import validate
from tracediff.pipeline import check_trace, compare_traces
from tracediff.trace.format import Statistics
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

GOLDEN = Path(__file__).parent.parent / "traces"
SECONDS = 10  # of CPU time for one mutant; a whole trace takes some hundredths
CONSTANT = 16 << 20  # bytes beyond the size of both files; compare's scratch space is 1 MiB
REPLAY_EVERY = 20
NUMBERS = (
    b"0 -0 -1 1 2 7 1e308 -5e-324 4294967296 9223372036854775807 9223372036854775808 1e400 null [] {} true".split()
)
KEYS = (
    b'"rows" "strides" "shape" "dtype" "offset" "nan" "step" "op" "tokens" "type" "data" "weight" "f16" "f64"'.split()
)


@dataclass(frozen=True)
class Seed:
    """A valid trace, what to compare it with, and its model."""

    trace: Path
    reference: Path
    model: Path | None = None


class Hang(BaseException):
    """A mutant that takes too long: no `except Exception` may swallow it."""


def seeds(folder: Path) -> list[Seed]:
    """The golden traces, and one that is written to `folder`."""
    golden = [
        Seed(path, path.with_name("reference.trace"), path.with_name("model.gguf"))
        for path in sorted(GOLDEN.glob("*/candidate.trace"))
    ]
    every = every_sort(folder / "every.trace")
    batch = of_several(folder / "batch.trace")
    return [*golden, Seed(every, every), Seed(batch, batch)]


def every_sort(path: Path) -> Path:
    """A trace with every sort of record, key and dtype."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 2)).astype(np.float32)
    with TraceWriter(path, "e", "qwen2", "m.gguf", "F16") as writer:
        writer.weight("output_norm.weight", x[0, 0])
        for step, positions in enumerate(((0, 1, 2), (3,), (4,))):
            writer.step(step, [7 + p for p in positions], positions)
            n = len(positions)
            writer.op(step, "token_embd", x[:n].astype(np.float16), "f16")
            writer.op(step, "blk.0.attn_q", x[:n].view(np.uint32)[..., :1].astype(np.uint16), "bf16")
            writer.op(step, "blk.0.attn_k", x[n - 1 : n].astype(np.float64), "f64", rows=(n - 1,))
            writer.write_at(at := writer.reserve(x.nbytes), x)
            writer.op_at(step, "blk.0.attn_v", (n, 2, 4), "f32", at, strides=(8, 1, 2))
            writer.op_at(step, "blk.0.attn_scores", (2, 1, positions[-1] + 1), "f32", at, (n - 1,), (5, 0, 1))
            writer.op_statistics(step, "output", (1, 4), Statistics(-1.5, 2.5, 0.0, 1.5, 1, 2), rows=(n - 1,))
    return path


def of_several(path: Path) -> Path:
    """A trace of three sequences: batched, one decoding beside another's prompt, and one alone."""
    x = np.random.default_rng(0).standard_normal((5, 4, 2)).astype(np.float32)
    with TraceWriter(path, "e", "qwen2", "m.gguf", "F16") as writer:
        for step, (positions, sequences) in enumerate(
            (((0, 1, 0, 1, 2), (0, 0, 4, 4, 4)), ((2, 3), (0, 4)), ((0,), (9,)))
        ):
            writer.step(step, [7 + p for p in positions], positions, sequences)
            n = len(positions)
            writer.op(step, "token_embd", x[:n].astype(np.float16), "f16")
            writer.op(step, "blk.0.attn_q", x[:1], "f32", rows=(n - 1,))
            for sequence in dict.fromkeys(sequences):
                own = [p for p, of in zip(positions, sequences, strict=True) if of == sequence]
                scores = x.reshape(-1)[: len(own) * (own[-1] + 1)].reshape(1, len(own), own[-1] + 1)
                writer.op(step, "blk.0.attn_scores", scores, "f32", sequence=sequence)
                statistics = Statistics(-1.5, 2.5, 0.0, 1.5, 1, 2)
                writer.op_statistics(step, "output", (len(own), 4), statistics, sequence=sequence)
    return path


def mutate(rng: random.Random, text: bytes, data: bytes, other: bytes) -> tuple[bytes, bytes]:
    """One to four changes of the text, or sometimes of the data."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        if rng.random() < 0.2:
            data = _mutate_data(rng, data)
        else:
            text = rng.choice((_bytes, _bytes, _slices, _lines, _tokens, _tokens, _tokens, _cut))(rng, text, other)
    return text, data


def _bytes(rng: random.Random, text: bytes, other: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice((rng.randrange(256), *b'0123456789-",:[]{}\n\\'))
    return bytes(changed)


def _slices(rng: random.Random, text: bytes, other: bytes) -> bytes:
    """A piece taken out, doubled, or taken from another trace."""
    a, b = sorted(rng.randint(0, len(text)) for _ in "ab")
    i = rng.randint(0, len(other))
    return text[:a] + rng.choice((b"", text[a:b] * 2, other[i : i + rng.randint(1, 200)], b"[" * 5000)) + text[b:]


def _lines(rng: random.Random, text: bytes, other: bytes) -> bytes:
    lines = text.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            lines[i], lines[j] = lines[j], lines[i]
        case 1:
            lines.insert(j, lines[i])
        case 2:
            del lines[i]
        case _:
            lines.insert(j, rng.choice(other.split(b"\n")))
    return b"\n".join(lines)


def _tokens(rng: random.Random, text: bytes, other: bytes) -> bytes:
    """A number becomes another, a name another name; the JSON stays JSON."""
    lines = text.split(b"\n")
    i = rng.randrange(len(lines))
    parts = lines[i]
    for mark in (b",", b":", b"[", b"]", b"}"):
        parts = parts.replace(mark, b"\n" + mark + b"\n")
    tokens = parts.split(b"\n")
    at = rng.randrange(len(tokens))
    size = rng.choice(NUMBERS + [str(rng.randint(0, 40)).encode()] * len(NUMBERS))
    tokens[at] = rng.choice(KEYS) if tokens[at].startswith(b'"') else size
    lines[i] = b"".join(tokens)
    return b"\n".join(lines)


def _cut(rng: random.Random, text: bytes, other: bytes) -> bytes:
    return text[: rng.randint(0, len(text))]


def _mutate_data(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return rng.choice((b"", data[:at], data[at:], data + data[:at], data[:at] + rng.randbytes(4) + data[at + 4 :]))


def exercise(path: Path, seed: Seed, replay: bool) -> str:
    """Do with a trace what the commands do. Returns how it ended; raises what is neither."""
    validate(path, seed.model)
    try:
        trace = Trace(path)
        for record in (*trace.weights.values(), *trace.ops.values()):
            if record.has_data:
                values = trace.values(record)
                assert values.shape == record.shape
                np.array_equal(values, values)
    except TracediffError:
        return "refused"
    try:
        verdict = compare_traces(seed.reference, path).verdict
        if replay and seed.model:
            check_trace(path, seed.model)
    except TracediffError:
        return "read, and refused by compare or check"
    return f"read, {verdict}"


@contextmanager
def limits(size: int) -> Iterator[None]:
    """Raises Hang after SECONDS, MemoryError where more was allocated than `size` and CONSTANT."""

    def ring(*_: object) -> None:
        raise Hang(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    peak = tracemalloc.get_traced_memory()[1] - before
    if peak > size + CONSTANT:
        raise MemoryError(f"{peak:,} bytes for files of {size:,}")


def run(number: int, seed: int, all_seeds: list[Seed], folder: Path) -> str:
    """Make one mutant and exercise it: how it ended. Raises whatever must not happen."""
    rng = random.Random(f"{seed} {number}")
    chosen, other = rng.choice(all_seeds), rng.choice(all_seeds)
    data_name = f"{chosen.trace.stem}.bin"  # as the first line names it
    text, data = chosen.trace.read_bytes(), chosen.trace.with_suffix(".bin").read_bytes()
    text, data = mutate(rng, text, data, other.trace.read_bytes())
    path = folder / "mutant.trace"
    path.write_bytes(text)
    (folder / data_name).write_bytes(data)
    with limits(len(text) + len(data)):
        return exercise(path, chosen, replay=number % REPLAY_EVERY == 0)


def fuzz(numbers: range, seed: int) -> tuple[Counter[str], list[str]]:
    """How the mutants ended, and what must not have happened: the number of the mutant and the exception."""
    ended: Counter[str] = Counter()
    wrong = []
    warnings.simplefilter("error", RuntimeWarning)
    tracemalloc.start()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as mutants:
        all_seeds = seeds(Path(name))
        for golden in all_seeds:  # imports and caches are no mutant's
            exercise(golden.trace, golden, replay=True)
        for number in numbers:
            try:
                ended[run(number, seed, all_seeds, Path(mutants))] += 1
            except (Exception, Hang) as error:
                wrong.append(f"mutant {number}: {type(error).__name__}: {str(error)[:200]}")
                if len(numbers) == 1:
                    raise
            if sys.stderr.isatty():
                print(f"\r{number + 1:,}, {len(wrong)} wrong", end="", file=sys.stderr)
    tracemalloc.stop()
    return ended, wrong


def main() -> None:
    """Run the mutants and print how they ended; exit code 1 where one ended as none may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.mutants)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    start = time.perf_counter()
    ended, wrong = fuzz(numbers, arguments.seed)
    seconds = time.perf_counter() - start
    print(f"{len(numbers):,} mutants in {seconds:,.0f} s: {len(wrong)} ended as none may")
    for how, count in ended.most_common():
        print(f"  {count:,} {how}")
    print(*wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
