"""What somebody without the model needs to look at a finding, in one archive: the page, the JSON, a reduced trace."""

import io
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tracediff import versions
from tracediff.compare.measure import record_statistics
from tracediff.english import count, few, listed
from tracediff.files import replacing, temporary_folder
from tracediff.model.model import Model
from tracediff.names import local_name
from tracediff.printable import escape_json, printable
from tracediff.report import html, json_report
from tracediff.result import Finding, OpResult, Result
from tracediff.trace.reader import Trace
from tracediff.trace.reduce import reduce
from tracediff.trace.runs import Paths, open_trace

_MOST = 8_000_000  # bytes of values: trackers take attachments of 10 to 25 MB
_FOLDER, _WHEN = "tracediff", (1980, 1, 1, 0, 0, 0)  # the earliest that zip can say
_SHOWN = 20  # tokens
_FIRST = f"{_FOLDER}/README.txt"
_FILES = """\
page.html      what was found: open it in a browser
result.json    the same for machines, as docs/result.schema.json says
reduced.trace  every record by its statistics; the values of those listed below are in reduced.bin.
               Of an engine of several ranks there is one of each, by its number.
               tracediff inspect reduced*.trace lists it, and whoever has the model runs
               tracediff check reduced*.trace --model MODEL
versions.txt   of what it was made with
"""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The archive, and what can be read from it, a line each."""

    archive: bytes
    contents: tuple[str, ...]

    def write(self, out: Path) -> None:
        """Raises OutputError, and then what was there is as it was."""
        with replacing(out, is_bundle) as path:
            path.write_bytes(self.archive)


def is_bundle(head: bytes) -> bool:
    """Whether a file that begins so is one."""
    return head.startswith(b"PK") and _FIRST.encode() in head[:100]


def bundle(result: Result, paths: Paths, model: Model) -> Bundle:
    """Pack the result of judging this trace, or those of all ranks of a run; the same bytes for the same result."""
    trace = open_trace(paths)
    kept, left = _kept(result, trace, model)
    files = {
        "page.html": html.render({trace.path.stem: printable(result)}).encode(),
        "result.json": escape_json(json_report.render(result)).encode(),
        **_reduced(trace, kept),
        "versions.txt": "".join(f"{line}\n" for line in versions.lines()).encode(),
    }
    contents = (*(f"{name}: {len(data):,} bytes" for name, data in files.items()), *_told(result, trace, kept, left))
    readme = f"{result.verdict.upper()}: {result.summary}\n\n{_FILES}\n" + "".join(f"{line}\n" for line in contents)
    return Bundle(_packed({"README.txt": _lines(readme).encode(), **files}), contents)


def _lines(text: str) -> str:
    """Printable line by line: the breaks between them are ours."""
    return "\n".join(map(printable, text.split("\n")))


def _kept(result: Result, trace: Trace, model: Model) -> tuple[dict[tuple[int, str], None], list[str]]:
    """The records whose values are needed, and the ops that were too large.

    Of each finding one record of each sort of op, and what the ops that it was replayed from read; keys, values and
    states of earlier steps too.
    """
    kept: dict[tuple[int, str], None] = {}
    left, size = [], 0
    for op in chain.from_iterable(_firsts(finding, result.faulty) for finding in result.findings):
        needed = [(op.step, op.op), *_read(op, trace, model)]
        more = [key for key in needed if key not in kept and key in trace.ops and trace.ops[key].has_data]
        nbytes = sum(trace.ops[key].nbytes for key in more)
        if size + nbytes > _MOST:
            left.append(op.op)
            continue
        size += nbytes
        kept |= dict.fromkeys(more)
    return kept, left


def _firsts(finding: Finding, faulty: Sequence[OpResult]) -> Iterable[OpResult]:
    """Of the ops of one name in several layers the first that was replayed."""
    firsts: dict[str, OpResult] = {}
    for op in faulty:
        if op.op in finding.ops and op.local:
            firsts.setdefault(local_name(op.op), op)
    return firsts.values()


def _read(op: OpResult, trace: Trace, model: Model) -> Iterator[tuple[int, str]]:
    """What the ops that it was replayed from read of others, in this step and, of caches and states, before it."""
    segment = op.local.segment if op.local else ()
    mine = trace.steps[op.step].sequence
    before = [number for number, step in trace.steps.items() if number <= op.step and step.sequence == mine]
    for name in segment:
        for source, past in model.graph[name].reads:
            if source in model.graph and model.graph[source].kind == "state":
                yield from ((step, held) for step in before for held in model.graph[source].inputs)
            elif source not in segment:
                yield from ((step, source) for step in (before if past else [op.step]))


def _reduced(trace: Trace, kept: Container[tuple[int, str]]) -> dict[str, bytes]:
    with temporary_folder() as folder:
        for one in trace.written:
            out = folder / f"reduced{'' if one.header.rank is None else one.header.rank}.trace"
            reduce(one, out, kept, record_statistics)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _told(result: Result, trace: Trace, kept: Mapping[tuple[int, str], None], left: Sequence[str]) -> Iterator[str]:
    """What whoever opens it learns of the prompt and the model."""
    yield f"{count(len(trace.tokens), 'token')}: {few(trace.tokens, _SHOWN)}"
    if result.logits:
        yield "texts of the tokens that come next, by their logits"
    if result.weights:
        names = listed([weight.weight for weight in result.weights], len(result.weights))
        yield f"{count(len(result.weights), 'weight')} by name and statistics, none by value: {names}"
    yield f"{count(len({op for _, op in trace.ops}), 'op')} of the model by name, shape, statistics and worst value"
    yield f"values of {listed([f'{op} in step {step}' for step, op in kept], len(kept))}" if kept else "values of no op"
    if left:
        yield f"too large, so by their statistics alone: {listed(left, len(left))}; tracediff reproduce cuts them"
    side = result.candidate
    given = [result.reference.path if result.reference else "", side.path, result.model or "", side.engine]
    yield f"names and paths as they were given: {', '.join(filter(None, given))}"


def _packed(files: Mapping[str, bytes]) -> bytes:
    """A zip archive of one folder, which holds no time and no user."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            info = zipfile.ZipInfo(f"{_FOLDER}/{name}", _WHEN)
            info.create_system, info.external_attr, info.compress_type = 3, 0o644 << 16, zipfile.ZIP_DEFLATED
            packed.writestr(info, data)
    return archive.getvalue()
