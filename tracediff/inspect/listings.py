"""What `inspect` and `faults` list."""

from tracediff.compare.measure import record_statistics
from tracediff.model.graph import Graph
from tracediff.result import Listing
from tracediff.trace.reader import Trace


def of_model(graph: Graph) -> Listing:
    """The ops that an engine should write, in execution order, with shapes and the weights they multiply with."""
    h = graph.hparams
    return Listing(
        f"{h.arch}: {h.n_layer} layers, {h.n_head}/{h.n_head_kv} heads of {h.head_dim}. "
        "T: tokens, S: positions visible.",
        ("op", "shape", "kind", "weights"),
        tuple(
            (op.name, ", ".join(map(str, op.axes)), op.kind, ", ".join(weight.name for weight in op.weights))
            for op in graph.written()
        ),
    )


def of_trace(trace: Trace) -> Listing:
    """The records of a trace with their statistics."""
    rows = []
    for (step, name), record in trace.ops.items():
        s = record_statistics(record, trace)
        numbers = ["-" if value is None else f"{value:.4g}" for value in (s.min, s.max, s.mean, s.rms)]
        shape = ", ".join(map(str, record.shape))
        rows.append((str(step), name, record.dtype or "-", shape, *numbers, str(s.nan), str(s.inf)))
    state = f"cut off: {trace.cut}" if trace.cut else "whole"
    return Listing(
        f"{trace.header.engine}, {trace.header.model or 'model not named'}, {len(trace.tokens)} tokens, {state}",
        ("step", "op", "dtype", "shape", "min", "max", "mean", "rms", "nan", "inf"),
        tuple(rows),
    )


def of_faults() -> tuple[Listing, Listing, Listing]:
    """The bank of mistakes, what else is solved for, and mistakes that recorded weights alone show."""
    from tracediff.audit.causes import IN_MEMORY
    from tracediff.diagnose.mistakes import BANK
    from tracediff.diagnose.solve.grammar import EXAMPLES

    ops = Listing(
        f"{len(BANK)} mistakes that can be planted (--fault NAME or NAME@LAYER) and recognised",
        ("name", "mistake", "ops", "look at"),
        tuple((m.name, m.text, str(m.where), m.look) for m in BANK.values()),
    )
    grammar = Listing(
        "any other edit of one op is solved for, said in words, and planted by the same words (--fault 'OP: WORDS')",
        ("edit", "as in"),
        EXAMPLES,
    )
    weights = Listing(
        f"{len(IN_MEMORY)} more that show in recorded weights, or in a file beside its checkpoint",
        ("name", "mistake", "look at"),
        tuple((name, text, look) for name, (text, look) in IN_MEMORY.items()),
    )
    return ops, grammar, weights
