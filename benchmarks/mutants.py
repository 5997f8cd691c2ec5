"""Mutation analysis of the example engine in C: mistakes that nobody listed, made by general operators.

    python benchmarks/mutants.py [--n 500] [--capture all,layers] [--seed 0] [--jsonl kept] [--out docs/mutants.md]

Each mutant of emitters/c/example_decoder.c differs in one place: another operator, a constant off by one, another
variable of the same type, another bound, index, argument or function, a statement left out. It is compiled, run on a
model of one of three families in F32 or Q4_K_M (dequantised by the engine's loader), and its trace is checked. No list
says where the mistake is: the first record that differs from the unmutated engine's is the place. Lines that write the
trace are left alone. Two processes share the work. What `--jsonl` names keeps each outcome as it comes: a run goes on
where another with the same seed ended, and `--n 0` writes the page of all that several files hold.
"""

import argparse
import json
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clean_runs import table
from second_opinion import Opinion

from tracediff.diagnose.explain import Explainer
from tracediff.diagnose.hypothesis import Hypothesis
from tracediff.errors import TracediffError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import Shape, write_model
from tracediff.model.weights import Weights, values_of
from tracediff.pipeline import check_trace
from tracediff.result import OpResult
from tracediff.trace.reader import Trace

SOURCE = Path(__file__).parent.parent / "emitters/c/example_decoder.c"
_COMMON: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_head": 8, "n_head_kv": 2, "n_ff": 512, "n_vocab": 320}
SHAPES = {
    "llama": Shape("llama", **_COMMON, theta=10_000.0, eps=1e-5),
    "qwen2": Shape("qwen2", **_COMMON, tied=True),
    "qwen3": Shape("qwen3", **{**_COMMON, "n_head": 6}, head_dim=48),
}
MODELS = tuple((family, weights) for weights in ("F32", "Q4_K_M") for family in SHAPES)
PROMPT = (256, 72, 101, 108, 108, 111, 3, 17, 250)
HIDDEN_STATES = ("token_embd", "ffn_residual", "output_norm", "output")
_SHOWS = 1e-10  # NMSE between a mutant's record and the unmutated engine's: less is another order of the sums
_SECONDS = 5  # that a mutant may run: what runs longer never ends


# --- mutation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change to the source: `operator` made `new` of `old` in this line of this function."""

    operator: str
    function: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.function}:{self.line} {self.operator}: {self.old!r} -> {self.new!r}"

    def applied(self, source: str) -> str:
        """The source with the change."""
        return source[: self.start] + self.new + source[self.end :]


_TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|^\#[^\n]*|\d+\.?\d*(?:e-?\d+)?|[A-Za-z_]\w*"
    r"|->|\+\+|--|<=|>=|==|!=|\+=|-=|\*=|/=|&&|\|\||[^\s\w]",
    re.DOTALL | re.MULTILINE,
)
_TRACING = re.compile(r"record|tracediff|trace\b|snprintf|\bdie\(|fopen|fclose|FILE|argc|argv|static|struct|typedef")
_ARITHMETIC, _RELATION, _ASSIGNMENT = "+-*/", ("<", "<=", ">", ">=", "==", "!="), ("=", "+=", "-=", "*=")
_FUNCTIONS = {
    "cos": ("sin", ""), "sin": ("cos", ""), "fmaxf": ("fminf",), "sqrtf": ("", "fabsf"), "expf": ("", "fabsf"),
    "silu": ("", "expf", "fabsf"),
}  # fmt: skip
_DECLARED = re.compile(r"\b(int32_t|int|float|double|size_t)\s+(\**\s*\w+(?:\s*=[^,;()]*)?(?:,\s*\**\s*\w+[^,;()]*)*)")
_NO_VARIABLES = {
    "int",
    "int32_t",
    "size_t",
    "float",
    "double",
    "char",
    "const",
    "sizes",
    "tracediff",
    "trace",
    "forward",
}
_MOST = 3  # mutants of one operator at one place: a pointer has twenty others of its type
_SHARED = ("int", "int32_t", "size_t"), ("float", "double"), ("float *",)


@dataclass(frozen=True)
class Token:
    """A token of the source."""

    text: str
    start: int
    end: int


def tokens(source: str) -> list[Token]:
    """Of a C source, without comments and preprocessor lines."""
    found = (Token(m[0], m.start(), m.end()) for m in _TOKEN.finditer(source))
    return [t for t in found if not t.text.startswith(("//", "/*", "#"))]


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Each function's name, and where it begins and ends."""
    for m in re.finditer(r"^(?:static )?[\w ]+?\*?(\w+)\([^;{]*?\)\n\{.*?^\}", source, re.DOTALL | re.MULTILINE):
        yield m[1], m.start(), m.end()


def variables(text: str) -> dict[str, int]:
    """Names declared in a function and the group of types that each is of; members of structs as `n.n_head`."""
    groups: dict[str, int] = {}
    for m in _DECLARED.finditer(text):
        for one in re.split(r",\s*", m[2]):
            name = re.match(r"(\**)\s*(?:const\s+)?(\w+)", one)
            if name:
                full = m[1] + (" *" if name[1] else "")
                groups.update({name[2]: i for i, types in enumerate(_SHARED) if full in types})  # noqa: B035
    for m in re.finditer(r"\b(float|double|int32_t|int)\s+\*(?:const )?(\w+)", text):
        groups[m[2]] = 2 if m[1] == "float" else 3
    for m in re.finditer(r"\bint (\w+)", text):
        groups[m[1]] = 0
    return {name: group for name, group in groups.items() if name not in _NO_VARIABLES}


def mutants(source: str, seed: int = 0) -> list[Mutant]:
    """Of a source, in its order; at one place at most a few of each operator."""
    found, rng = [], random.Random(seed)
    members = {
        "n": [*re.findall(r"\bn\.(n_\w+|head_dim)", source)],
        "s": [*re.findall(r"\bs->(\w+)", source)],
        "m": [*re.findall(r"\bm->(\w+)", source)],
    }
    names = {key: sorted(set(value)) for key, value in members.items()}
    for function, start, end in functions(source):
        if function in ("main", "die", "open_in") or function.startswith("record"):
            continue
        body = source[start:end]
        groups, of_function = variables(body), [t for t in tokens(source) if start <= t.start < end]
        open_brace = next(i for i, t in enumerate(of_function) if t.text == "{")
        for i in range(open_brace + 1, len(of_function) - 1):
            here: dict[str, list[Mutant]] = {}
            for operator, first, last, new in _at(of_function, i, groups, names, source):
                line = source[: first.start].count("\n") + 1
                if not _TRACING.search(source.splitlines()[line - 1]):
                    old = source[first.start : last.end]
                    here.setdefault(operator, []).append(
                        Mutant(operator, function, line, first.start, last.end, old, new)
                    )
            for alike in here.values():
                found += rng.sample(alike, min(_MOST, len(alike)))
    return list(dict.fromkeys(found))


Change = tuple[str, Token, Token, str]  # operator, first and last token that it replaces, what with


def _at(
    ts: list[Token], i: int, groups: dict[str, int], members: dict[str, list[str]], source: str
) -> Iterator[Change]:
    t, before, after = ts[i], ts[i - 1].text, ts[i + 1].text
    operand_before = re.match(r"[\w)\]]", before[-1]) is not None and before not in ("return", "const")
    match t.text:
        case "+" | "-" | "*" | "/" if operand_before and before not in ("float", "int", "double", "char", "values"):
            yield from (("operator", t, t, other) for other in _ARITHMETIC if other != t.text)
        case "-" if not operand_before:
            yield "sign", t, t, ""
        case text if text in _RELATION:
            yield from (("relation", t, t, other) for other in _RELATION if other != text)
        case text if text in _ASSIGNMENT and before not in _ASSIGNMENT:
            yield from (("assignment", t, t, other) for other in _ASSIGNMENT if other != text)
        case "++":
            yield "step", t, t, " += 2"
        case "?":
            yield "condition", t, t, "? 0 * "
        case text if re.fullmatch(r"\d+", text):
            yield from (("constant", t, t, str(c)) for c in {int(text) + 1, max(0, int(text) - 1), 0} - {int(text)})
        case text if re.fullmatch(r"\d+\.\d+(e-?\d+)?", text):
            yield from (("constant", t, t, f"{c:.1f}") for c in (float(text) + 1, float(text) - 1, float(text) / 2))
        case text if text in _FUNCTIONS and after == "(":
            yield from (("function", t, t, other) for other in _FUNCTIONS[text])
        case "(" if re.match(r"[A-Za-z_]\w*$", before) and before not in ("if", "for", "while", "sizeof", "return"):
            yield from _arguments(ts, i)
        case "(" if before == "if":
            yield "condition", t, t, "(!"
        case "[":
            close = _closing(ts, i)
            inner = source[t.end : ts[close].start]
            yield from (("index", t, ts[close], f"[{inner} {more}]") for more in ("+ 1", "- 1"))
        case ";" | "{" | "}" | ")":
            yield from _deletion(ts, i)
        case text if re.match(r"[A-Za-z_]", text) and before in (".", "->") and ts[i - 2].text in members:
            mine = members[ts[i - 2].text]
            yield from (("member", t, t, other) for other in mine if other != text) if text in mine else ()
        case text if text in groups and after != "(" and before not in (".", "->"):
            alike = (name for name, group in groups.items() if group == groups[text] and name != text)
            yield from (("variable", t, t, other) for other in alike)
            if groups[text] == 0 and ts[i - 1].text in ("<", "<=") and after == ";":
                yield from (("bound", t, t, f"{text} {more}") for more in ("- 1", "/ 2", "+ 1"))


def _closing(ts: list[Token], i: int) -> int:
    pairs, depth = {"(": ")", "[": "]", "{": "}"}, 0
    for j in range(i, len(ts)):
        depth += (ts[j].text == ts[i].text) - (ts[j].text == pairs[ts[i].text])
        if not depth:
            return j
    raise ValueError("brackets do not match")


def _arguments(ts: list[Token], i: int) -> Iterator[Change]:
    """Two neighbouring arguments of a call exchanged."""
    close, depth, starts, ends = _closing(ts, i), 0, [i + 1], []
    for j in range(i + 1, close):
        depth += (ts[j].text in "([") - (ts[j].text in ")]")
        if ts[j].text == "," and not depth:
            ends.append(j - 1)
            starts.append(j + 1)
    ends.append(close - 1)
    parts = ["".join(_spaced(ts[a : b + 1])) for a, b in zip(starts, ends, strict=True)]
    for k in range(len(parts) - 1):
        if parts[k] != parts[k + 1]:
            yield "arguments", ts[starts[k]], ts[ends[k + 1]], f"{parts[k + 1]}, {parts[k]}"


def _spaced(ts: list[Token]) -> Iterator[str]:
    for a, b in zip(ts, [*ts[1:], None], strict=True):
        yield a.text + (" " * (b.start - a.end) if b else "")


def _deletion(ts: list[Token], i: int) -> Iterator[Change]:
    """The statement that follows this token left out: an expression, or a call; declarations must stay."""
    depth = 0
    for j in range(i + 1, len(ts)):
        depth += (ts[j].text in "([") - (ts[j].text in ")]")
        if depth < 0 or ts[j].text in "{}":
            return
        if ts[j].text == ";" and not depth:
            first = ts[i + 1].text
            if j > i + 1 and first not in ("const", "int", "float", "double", "return", "if", "for", "char", "size_t"):
                yield "deletion", ts[i + 1], ts[j], ";"
            return


# --- running ---------------------------------------------------------------------------------------------------------


def write_raw(folder: Path, shape: Shape, weights: str) -> Path:
    """A model as GGUF and, dequantised, as the raw files that the example engine reads; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = GGUFFile(write_model(folder / "model.gguf", shape, weights))
    for name, info in file.tensors.items():
        (folder / f"{name}.f32").write_bytes(values_of(file, info).float().numpy().tobytes())
    keys = ("n_layer", "n_vocab", "n_embd", "n_head", "n_head_kv", "n_ff")
    sizes = {key: getattr(shape, key) for key in keys} | {"head_dim": shape.d, "rope_theta": shape.theta}
    sizes |= {"rms_eps": shape.eps, "rope_halves": int(shape.arch != "llama")}
    (folder / "model.txt").write_text("".join(f"{key} {value}\n" for key, value in sizes.items()))
    return folder


def compiled(source: Path, out: Path) -> bool:
    """Whether it compiles; warnings do not count."""
    command = ["gcc", "-std=c99", "-O1", "-w", f"-I{SOURCE.parent}", str(source), "-o", str(out), "-lm"]
    return not subprocess.run(command, capture_output=True).returncode


def ran(decoder: Path, model: Path, trace: Path) -> bool:
    """Whether the engine came to its end."""
    try:
        command = [str(decoder), str(model), str(trace), *map(str, PROMPT)]
        return not subprocess.run(command, capture_output=True, timeout=_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return False


def first_difference(clean: Trace, other: Trace, capture: str = "all") -> tuple[int, str] | None:
    """The first record of the clean trace that the other has otherwise, up to the first step with other tokens; of
    hidden states alone, where these are recorded.
    """
    for key, record in clean.ops.items():
        if capture == "layers" and key[1].split(".")[-1] not in HIDDEN_STATES:
            continue
        if key[0] not in other.steps or clean.steps[key[0]].tokens != other.steps[key[0]].tokens:
            return None
        if key not in other.ops or other.ops[key].shape != record.shape:
            return key
        x, y = (t.values(t.ops[key]).astype(np.float64) for t in (clean, other))
        finite = np.isfinite(x)
        if (finite != np.isfinite(y)).any():
            return key
        x, y = x[finite], y[finite]
        if np.square(y - x).sum() > _SHOWS * np.square(x).sum():
            return key
    return None


# --- judging ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one mutant: `what` is one word, `said` what the report says at the first faulty record."""

    mutant: Mutant
    model: tuple[str, str]
    capture: str
    what: str
    place: str = ""
    said: str = ""
    cause: str = ""
    seconds: float = 0.0
    others: list[str] = field(default_factory=list)  # faulty records that nothing explains
    tested: int = 0  # claims about its records by a second implementation
    false: list[str] = field(default_factory=list)  # those that it does not confirm

    @property
    def shows(self) -> bool:
        """Whether the mutation changes what the engine computes, and the engine comes to its end."""
        return self.what not in ("stillborn", "killed", "refused", "restated", "silent")


def hidden_states_of(trace: Path) -> Path:
    """The trace with hidden states alone, as a coarser engine would have recorded it."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    lines = [line for line in lines if "op" not in line or line["op"].split(".")[-1] in HIDDEN_STATES]
    lines[-1]["records"] = len(lines) - 1
    out = trace.with_name("layers.trace")
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


class Bench:
    """Models, the unmutated engine and its traces, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = SOURCE.read_text()
        self.folder.mkdir(exist_ok=True)
        assert compiled(SOURCE, folder / "clean")
        self._clean: dict[tuple[str, str], Trace] = {}

    def clean(self, model: tuple[str, str]) -> Trace:
        """The unmutated engine's trace."""
        if model not in self._clean:
            raw = write_raw(self.folder / "-".join(model), SHAPES[model[0]], model[1])
            assert ran(self.folder / "clean", raw, raw / "clean.trace")
            self._clean[model] = Trace(raw / "clean.trace")
        return self._clean[model]

    def run(self, mutant: Mutant, model: tuple[str, str], captures: tuple[str, ...]) -> list[Outcome]:
        """Compile it, run it, and check its trace."""
        clean = self.clean(model)
        source, decoder, trace = self.folder / "mutant.c", self.folder / "mutant", self.folder / "mutant.trace"
        source.write_text(mutant.applied(self.source))
        if not compiled(source, decoder):
            return [Outcome(mutant, model, captures[0], "stillborn")]
        trace.unlink(missing_ok=True)
        if not ran(decoder, self.folder / "-".join(model), trace):
            return [Outcome(mutant, model, captures[0], "killed")]
        try:
            made = Trace(trace)
        except TracediffError as error:  # positions below 0, say: nothing can be judged of it
            return [Outcome(mutant, model, captures[0], "refused", said=str(error))]
        place = first_difference(clean, made)
        if place is None:
            return [Outcome(mutant, model, captures[0], "silent")]
        return [
            self._checked(mutant, model, capture, trace, place)
            if first_difference(clean, made, capture)
            else Outcome(mutant, model, capture, "silent")  # as what a softmax takes away again, in hidden states
            for capture in captures
        ]

    def _checked(
        self, mutant: Mutant, model: tuple[str, str], capture: str, trace: Path, place: tuple[int, str]
    ) -> Outcome:
        outcome = Outcome(mutant, model, capture, "", f"{place[0]} {place[1]}")
        began = time.process_time()
        try:
            path = trace if capture == "all" else hidden_states_of(trace)
            claims: dict[tuple[int, str], Hypothesis] = {}
            with witnessed(claims):
                result = check_trace(path, self.folder / "-".join(model) / "model.gguf")
        except TracediffError as error:
            outcome.what, outcome.said = "undecided", str(error)
            return outcome
        except Exception as error:  # what the benchmark counts
            outcome.what, outcome.said = "crashed", f"{type(error).__name__}: {error}"
            return outcome
        outcome.seconds = time.process_time() - began
        try:
            outcome.tested, outcome.false = self._tested(path, model, claims)
        except (NotImplementedError, subprocess.CalledProcessError) as error:  # the second implementation's own
            outcome.false = [f"could not be tested: {error}"]
        faulty = sorted(result.faulty, key=lambda op: op.step)
        if not faulty:
            outcome.what = "missed"
            return outcome
        first = faulty[0]
        outcome.said = first.cause.text if first.cause else first.shape or first.note or ""
        outcome.cause = first.cause.name if first.cause else ""
        outcome.others = [f"{op.step} {op.op}: {op.shape}" for op in faulty[1:] if not op.cause]
        segment = first.local.segment if first.local else (first.op,)
        right = first.step == place[0] and place[1] in segment
        if not right and self._says_so(Trace(path), model, first.step):
            outcome.what = "restated"
            return outcome
        outcome.what = ("explained" if first.cause else "located") if right else f"misplaced at {first.step} {first.op}"
        return outcome

    def _says_so(self, made: Trace, model: tuple[str, str], until: int) -> bool:
        """Whether a step names other positions than the unmutated engine's: it is judged by what it says of itself."""
        clean = self.clean(model)
        return any(made.steps[n].positions != clean.steps[n].positions for n in clean.steps if n <= until)

    def _tested(
        self, path: Path, model: tuple[str, str], claims: dict[tuple[int, str], Hypothesis]
    ) -> tuple[int, list[str]]:
        """How many claims a second implementation has tested, and those that it finds false."""
        file = GGUFFile(self.folder / "-".join(model) / "model.gguf")
        trace = Trace(path)
        opinion = Opinion(trace, build_graph(file), Weights(file), self.folder / "claims")
        said = {key: opinion.of(claim, trace.ops[key]) for key, claim in claims.items()}
        false = [f"{key[0]} {key[1]}: {claims[key].parts[-1].text}" for key, true in said.items() if true is False]
        return sum(true is not None for true in said.values()), false


@contextmanager
def witnessed(claims: dict[tuple[int, str], Hypothesis]) -> Iterator[None]:
    """Notes what each record is explained by, which a result has in words only."""
    named = Explainer._named

    def noting(self: Explainer, result: OpResult, one: Any, best: Hypothesis, kin: Any) -> OpResult:
        claims[result.step, result.op] = best
        return named(self, result, one, best, kin)

    Explainer._named = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Explainer._named = named  # type: ignore[method-assign]


def work(job: tuple[str, tuple[Mutant, tuple[str, str]], tuple[str, ...]]) -> list[Outcome]:
    """One mutant, in a folder of this process."""
    torch.set_num_threads(1)
    folder, (mutant, model), captures = job
    if folder not in _BENCHES:
        _BENCHES[folder] = Bench(Path(folder) / multiprocessing.current_process().name.replace(":", "-"))
    return _BENCHES[folder].run(mutant, model, captures)


_BENCHES: dict[str, Bench] = {}


_HEAD = """# Mutants

Mistakes that nobody listed: the source of [example_decoder.c](../emitters/c/example_decoder.c) with one random change
in each mutant, compiled, run on a prompt and two decode steps of a small model, and its trace checked without a
reference. Written by

    {command}

of outcomes that runs with `--capture` and `--jsonl` kept. Of {n} mutants
{stillborn} did not compile, {killed} crashed or never ended, {refused} wrote what is no trace (a
position below 0) and were told so, {restated} wrote other positions into the header of a step and computed rightly with
these, and {silent} computed the same. *Located*:
the first faulty record is the first that differs from the unmutated engine's. *Explained*: what the report says of it
recomputes it to the floor; of {untold} of these some channels, at most a quarter of the wrong ones, are made of what no
tensor holds in one piece, or some values, at most half of those stored, of what lies beyond an array, and the report
says so.

{aim}

{tested} of the solver's claims, one for each record that it explains, were tested by a second implementation
([second_opinion.py](../benchmarks/second_opinion.py): its loops in C, run on the trace's values): {false} are false. A
check took {median:.1f} s of one core at the median, {most:.0f} s at most."""
_CAPTURES = {"all": "every op recorded", "layers": "hidden states alone recorded"}
_AIM = """The aim is 500 mutants that show. Here are {cut}:
where these are fewer, the runs were cut short by the clock."""
_WORDS = ("explained", "located", "misplaced", "missed", "undecided", "crashed")


def share(outcomes: list[Outcome]) -> list[object]:
    """How many mutants show, how many came to each end, and the shares."""
    count = Counter(o.what.partition(" ")[0] for o in outcomes)
    found = count["explained"] + count["located"]
    of = [f"{n / max(1, len(outcomes)):.1%}" for n in (found, count["explained"])]
    return [len(outcomes), *(count[word] for word in _WORDS), *of]


def sort_of(mutant: Mutant) -> str:
    """Whether it is an edit of an expression, as the solver makes them, or of loops, indices, buffers or loading."""
    if mutant.function.startswith(("read_", "allocate")):
        return "loading and buffers"
    if mutant.function in ("attention", "feed_forward", "forward"):
        return "what is called with which buffer"
    if mutant.operator in ("index", "bound", "relation", "step", "deletion", "assignment"):
        return "loops and indices"
    return "expressions: the solver's own sort"


def report(outcomes: list[Outcome], command: str) -> str:
    """The document."""
    ends = Counter(o.what for o in outcomes)
    shown = [o for o in outcomes if o.shows]
    head = ("mutants", "explained", "only located", *_WORDS[2:], "located, share", "explained, share")
    n = len({str(o.mutant) for o in outcomes})
    seconds_of = sorted(o.seconds for o in shown) or [0.0]
    claims: dict[str, object] = {
        "tested": sum(o.tested for o in outcomes),
        "false": sum(len(o.false) for o in outcomes),
    }
    counts = Counter(o.capture for o in shown)
    cut = ", ".join(f"{count} with {_CAPTURES[capture]}" for capture, count in sorted(counts.items()))
    claims |= {"untold": sum("cannot be told" in o.said for o in shown), "aim": _AIM.format(cut=cut)}
    claims |= {"median": seconds_of[len(seconds_of) // 2], "most": seconds_of[-1]}
    text = [_HEAD.format(**claims, command=command, n=n, **{
        word: ends[word] for word in ("stillborn", "killed", "refused", "restated", "silent")
    })]  # fmt: skip
    for title, key in (
        ("By what is recorded", lambda o: o.capture),
        ("By model", lambda o: (o.capture, *o.model)),
        ("By sort of mutation", lambda o: (o.capture, sort_of(o.mutant))),
        ("By function of the engine", lambda o: (o.capture, o.mutant.function)),
        ("By operator", lambda o: (o.capture, o.mutant.operator)),
    ):
        groups: dict[object, list[Outcome]] = {}
        for o in sorted(shown, key=lambda o: (o.capture, str(key(o)))):
            groups.setdefault(key(o), []).append(o)
        rows = ((", ".join(k) if isinstance(k, tuple) else k, *share(v)) for k, v in groups.items())
        text.append(f"## {title}\n\n" + table(("", *head), rows))
    false = [f"- {o.mutant}, {'-'.join(o.model)}: {said}" for o in outcomes for said in o.false]
    if false:
        text.append("## False claims\n\n" + "\n".join(false))
    rest = [o for o in shown if o.what != "explained"]
    rows = ((o.capture, "-".join(o.model), f"`{o.mutant}`".replace("|", "\\|"), o.what, o.place, o.said) for o in rest)
    text.append(
        "## All that were not explained\n\n"
        + table(("recorded", "model", "mutant", "came to", "place", "what is said"), rows)
    )
    return "\n\n".join(text) + "\n"


def main() -> None:
    """Run the benchmark and write its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=500, help="mutants that show")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", default="all,layers")
    parser.add_argument("--function", default="", help="only mutants of this function")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--jsonl", type=Path, nargs="+", default=[], help="outcomes so far; more go to the first file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are begun")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    outcomes = [one for path in args.jsonl if path.exists() for one in kept(path)]
    for one in run(args, outcomes) if args.n else ():
        outcomes.append(one)
        if args.jsonl:
            with args.jsonl[0].open("a") as out:
                out.write(json.dumps(asdict(one)) + "\n")
        if one.shows:
            said = f"{one.what}: {one.mutant} {one.model} {one.capture}: {one.said}"
            print(said[:400], file=sys.stderr, flush=True)
    page = report(outcomes, " ".join(["python", "benchmarks/mutants.py", *sys.argv[1:]]))
    args.out.write_text(page) if args.out else print(page)


def run(args: argparse.Namespace, outcomes: list[Outcome]) -> Iterator[Outcome]:
    """Outcomes of mutants that have none yet, as they come."""
    began, captures = time.monotonic(), tuple(args.capture.split(","))
    known = {(str(one.mutant), one.capture) for one in outcomes}
    shown = len({str(one.mutant) for one in outcomes if one.shows and one.capture in captures})
    every = [m for m in mutants(SOURCE.read_text()) if args.function in ("", m.function)]
    random.Random(args.seed).shuffle(every)
    paired = [(m, MODELS[i % len(MODELS)]) for i, m in enumerate(every) if (str(m), captures[0]) not in known]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool,
    ):
        for at in range(0, len(paired), 4 * args.processes):
            if shown >= args.n or time.monotonic() - began > args.seconds:
                return
            for done in pool.map(work, [(folder, one, captures) for one in paired[at : at + 4 * args.processes]]):
                shown += any(one.shows for one in done)
                yield from done


def kept(path: Path) -> list[Outcome]:
    """Outcomes that a run has kept."""
    found = []
    for line in path.read_text().splitlines():
        values = json.loads(line)
        values["mutant"], values["model"] = Mutant(**values["mutant"]), tuple(values["model"])
        found.append(Outcome(**{f.name: values[f.name] for f in fields(Outcome)}))
    return found


if __name__ == "__main__":
    main()
