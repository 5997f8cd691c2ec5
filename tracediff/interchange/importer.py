"""The common part of every import: planned on names, then written one array at a time.

    entries -> names -> steps and tokens -> TraceWriter

Nothing is dropped silently: a name that nobody knows is an error, or said with --skip-unknown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.english import count
from tracediff.errors import InterchangeError
from tracediff.interchange import (
    Format,
    debug_tree,
    hidden_states,
    llama_logits,
    llama_text,
    logprobs,
    npy,
    npz,
    routed,
    safetensors_file,
    sglang,
    table,
)
from tracediff.interchange.entry import ROWS, Entry, Say, some
from tracediff.interchange.naming import NameMap, execution_order, is_op, meaning
from tracediff.interchange.steps import Named, steps_of
from tracediff.interchange.writing import write
from tracediff.model.hparams import check_tokens
from tracediff.trace.runs import open_trace
from tracediff.trace.staging import check, staged
from tracediff.trace.writer import TraceWriter

if TYPE_CHECKING:
    from tracediff.model.graph import Graph

READERS: dict[Format, Callable[[Path, Say], Iterator[Entry]]] = {
    "npy": npy.entries,
    "npz": npz.entries,
    "safetensors": safetensors_file.entries,
    "llama-text": llama_text.entries,
    "table": table.entries,
    "sglang": sglang.entries,
    "logprobs": logprobs.entries,
    "vllm-hidden-states": hidden_states.entries,
    "routed-experts": routed.entries,
    "debug-tree": debug_tree.entries,
    "llama-logits": llama_logits.entries,
}
WEIGHTS = "weights/"  # in front of the name of a weight record
TOKENS, POSITIONS = ("tokens", "input_ids", "token_ids"), ("positions", "position_ids")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user says of a foreign file."""

    name_map: Path | None = None
    tokens: tuple[int, ...] = ()
    engine: str | None = None
    skip_unknown: bool = False
    match: Path | None = None  # a trace of another engine on the same tokens: unknown names are found by value


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The entries of a file by what they are."""

    ops: list[Named] = field(default_factory=list)
    weights: list[Entry] = field(default_factory=list)
    tokens: dict[int, Entry] = field(default_factory=dict)
    positions: dict[int, Entry] = field(default_factory=dict)
    rows: dict[tuple[int, str], Entry] = field(default_factory=dict)  # by step and name of the value
    no_ops: dict[str, list[str]] = field(default_factory=dict)  # what they are instead -> names
    unknown: list[Entry] = field(default_factory=list)


def import_trace(
    form: Format,
    path: Path,
    out: Path,
    options: Options,
    *,
    graph: "Graph | None" = None,
    model: Path | None = None,
    say: Say,
) -> None:
    """Read a foreign file or folder and write a trace. `say` is told all that is left out, and why.

    Raises InterchangeError for a broken file, unknown names, missing tokens or shapes, and what `staging.check` raises;
    then what was at `out` before is there still.
    """
    inputs = [file for file in (path, options.name_map, options.match, model) if file]
    check(out, inputs)
    found = _sorted([*_reader(form, options, graph)(path, say)], NameMap(options.name_map), path)
    tokens = options.tokens
    if options.match:
        from tracediff.interchange.recognised import recognise

        reference = open_trace(options.match)
        ops, found.unknown[:] = recognise(found.ops, found.unknown, reference, model, say)
        found.ops.extend(ops)
        if not tokens and not found.tokens:  # values that are equal were made of equal tokens
            fed = sorted({named.entry.step for named in found.ops} & reference.steps.keys())
            tokens = tuple(token for step in fed for token in reference.steps[step].tokens)
    _report(found, path, options.skip_unknown or options.match is not None, say)
    found.ops.sort(key=lambda named: (named.entry.step, execution_order(named.op)))
    steps = steps_of(found.ops, found.tokens, found.positions, tokens, path, say)
    if graph:
        check_tokens([token for tokens, _ in steps.values() for token in tokens], graph.hparams.n_vocab)
    arch, weights = (graph.hparams.arch, graph.matmul_type) if graph else (None, None)
    engine = options.engine or f"imported from {form} {path.name}"
    with (
        staged(out, inputs, keep_cut=False) as part,
        TraceWriter(part, engine, arch, model.name if model else None, weights) as writer,
    ):
        n = write(writer, found.weights, found.ops, steps, graph, say)
    say(f"imported {n} records in {count(len(steps), 'step')}")


def _reader(form: Format, options: Options, graph: "Graph | None") -> Callable[[Path, Say], Iterator[Entry]]:
    """The format's reader, told what its files leave open."""
    if form == "logprobs":
        return partial(logprobs.entries, given=options.tokens)
    return partial(routed.entries, graph=graph) if form == "routed-experts" else READERS[form]


def _sorted(entries: list[Entry], names: NameMap, path: Path) -> _Sorted:
    found = _Sorted()
    for entry in entries:
        _sort(entry, names(entry.name), found)
    found.ops[:] = [replace(o, rows=found.rows.pop((o.entry.step, o.entry.name), None)) for o in found.ops]
    found.unknown.extend(found.rows.values())
    if names.unused:
        raise InterchangeError(
            f"{names.path}: nothing in {path} is called {', '.join(sorted(names.unused))}. It holds "
            f"{some([entry.name for entry in entries])}. Correct the map."
        )
    return found


def _sort(entry: Entry, mapped: str | None, found: _Sorted) -> None:
    last = entry.name.rpartition("/")[2].rpartition(".")[2]
    if mapped:
        found.ops.append(Named(mapped, entry, None))
    elif entry.op:
        found.ops.append(Named(entry.op, entry, entry.whose))
    elif entry.no_op:
        found.no_ops.setdefault(entry.no_op, []).append(entry.name)
    elif entry.name.startswith(WEIGHTS):
        found.weights.append(entry)
    elif entry.name.endswith(ROWS):
        found.rows[entry.step, entry.name.removesuffix(ROWS)] = entry
    elif last in TOKENS:
        found.tokens.setdefault(entry.step, entry)
    elif last in POSITIONS:
        found.positions.setdefault(entry.step, entry)
    else:
        known = meaning(entry.name)
        if known.op:
            found.ops.append(Named(known.op, entry, known.whose))
        elif known.no_op:
            found.no_ops.setdefault(known.no_op, []).append(entry.name)
        else:
            found.unknown.append(entry)


def _report(found: _Sorted, path: Path, skip_unknown: bool, say: Say) -> None:
    """Says what is left out; raises InterchangeError for unknown names, unless they may be skipped, or no op at all."""
    unknown = [entry.name for entry in found.unknown]
    if unknown and not skip_unknown:
        raise InterchangeError(
            f"{path}: {len(unknown)} unknown names: {some(unknown)}. Say what they are with --map FILE "
            "(lines of FOREIGN=CANONICAL, {N} for a layer's number), have them found by their values with "
            "--match REFERENCE.trace, or leave them out with --skip-unknown."
        )
    left_out = [f"left out {len(names)}, {what}: {some(names)}" for what, names in found.no_ops.items()]
    if unknown:
        left_out.append(f"left out {len(unknown)} of unknown name: {some(unknown)}")
    if not found.ops:
        raise InterchangeError(
            f"{path}: no op's output is in it{''.join(f'; {line}' for line in left_out)}. `tracediff inspect MODEL` "
            "lists the names of a model's ops; --map FILE says what other names stand for."
        )
    for line in left_out:
        say(line)
    own = sorted({named.op for named in found.ops if not is_op(named.op)})
    if own:
        say(f"names that are no op of the table, kept as the map has them: {some(own)}")
