"""Which ops must be recomputed for another: found by what each step recorded, names alone and no values."""

from collections.abc import Iterable, Iterator
from copy import copy

from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.trace.format import Rows
from tracediff.trace.reader import Trace

_Held = frozenset[tuple[str, Rows]]  # what a step recorded values of, and of which tokens
_Numbers = tuple[int, ...]
_Place = tuple[str, Rows, int]  # a value of these tokens, in steps of this pattern


class Patterns:
    """What the steps of a trace recorded. Those that recorded alike share a number: a thousand decode steps are one."""

    def __init__(self, trace: Trace) -> None:
        numbers: dict[_Held, int] = {}
        self.of: dict[int, int] = {}  # of each step
        self.before: dict[int, _Numbers] = {}  # of the step before each in its sequence, where there is one
        self.until: dict[int, _Numbers] = {}  # of the steps of its sequence until each, itself included
        last: dict[int, tuple[_Numbers, _Numbers]] = {}  # the two of the step before, by sequence
        for step, fed in trace.steps.items():
            held = frozenset((record.op, record.rows) for record in trace.step_ops(step) if record.has_data)
            self.of[step] = numbers.setdefault(held, len(numbers))
            here = (self.of[step],)
            self.before[step], until = last.get(fed.sequence, ((), ()))
            self.until[step] = until if {*here} <= {*until} else until + here
            last[fed.sequence] = here, self.until[step]
        self._rows = [dict(held) for held in numbers]

    def holds(self, pattern: int, name: str, rows: Rows) -> bool:
        """Whether its steps have the value, for all these tokens."""
        held = self._rows[pattern].get(name, ())  # none of them
        return name in SOURCES or held is None or (rows is not None and bool(held) and {*rows} <= {*held})


class Segments:
    """The segments of a graph in a trace."""

    def __init__(self, patterns: Patterns, graph: Graph) -> None:
        self._patterns = patterns
        self._graph = graph
        self._order = graph.places()
        self._found: dict[tuple[object, ...], tuple[str, ...]] = {}

    def changed(self, graph: Graph) -> "Segments":
        """Those of a graph with other ops, of the same names or new ones."""
        other = copy(self)
        other._graph, other._found = graph, {}
        if graph.ops.keys() != self._order.keys():
            other._order = graph.places()
        return other

    def of(self, step: int, op: Op, rows: Rows) -> tuple[str, ...]:
        """The ops that are recomputed for these tokens of the step, in execution order; the op itself is the last."""
        here = self._patterns.of[step], self._patterns.before[step], self._patterns.until[step]
        key = op.name, rows, here
        if key not in self._found:
            before = set(self._lacking(op, rows, *here)) - {op.name}
            self._found[key] = (*sorted(before, key=self._order.__getitem__), op.name)
        return self._found[key]

    def _lacking(self, op: Op, rows: Rows, here: int, before: _Numbers, so_far: _Numbers) -> Iterable[str]:
        """Names of what is not held, of all that the op is made of."""
        found: set[_Place] = set()
        stack = [*self._read(op, rows, here, before, so_far)]
        while stack:
            name, tokens, pattern = place = stack.pop()
            if place not in found and not self._patterns.holds(pattern, name, tokens):
                found.add(place)
                stack += self._read(self._graph[name], tokens, pattern, so_far if before else before, so_far)
        return (name for name, _, _ in found)

    def _read(self, op: Op, rows: Rows, here: int, before: _Numbers, so_far: _Numbers) -> Iterator[_Place]:
        """What the op reads: a state of the step before, others of this one or of all so far."""
        rows = self._graph.tokens_read(op, rows)
        for name, past in op.reads:
            if past or op.kind == "state":
                yield from ((name, None, pattern) for pattern in (before if op.kind == "state" else so_far))
            else:
                yield name, rows, here
