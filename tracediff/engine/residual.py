"""The residual stream of a torch model: sums have no modules, so they are taken where they are made and read."""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tracediff.model.graph import Graph
from tracediff.names import layer_of

Terms = tuple[str, ...]  # the ops that are added up, those of the layer alone being split into theirs


class _Known(NamedTuple):
    values: Tensor  # kept: an id is of what lives
    terms: Terms
    name: str = ""  # the op, where the graph has one


class Residual:
    """Sums of what modules put out, and the embedding: each recorded as it was when a norm read it.

    Who reads something that is known besides, as the layer's input, reads the wrong value: the sum is recorded as it
    was made, and so is one that no module reads. What is known of nothing was made of the sum, as by a factor: then
    that is recorded. Terms may be added in any order; a sum of others is no op, and left to who reads it.
    """

    def __init__(self, graph: Graph, record: Callable[[str, Tensor], None]) -> None:
        self._graph, self._record = graph, record
        self._sums = {self._terms(op.name): op.name for op in graph if op.kind == "add"}
        self._not_normed = {tuple(sorted(map(self._before_norm, terms))): name for terms, name in self._sums.items()}
        self._known: dict[int, _Known] = {}  # by identity
        self._waiting: dict[str, tuple[Tensor, Tensor]] = {}  # what is read, and a copy: more may be added in its place
        self._nearly: dict[str, Tensor] = {}  # copies of sums of what the norms of such terms read

    def put_out(self, name: str, values: Tensor) -> None:
        """What the op's module puts out."""
        self._known[id(values)] = _Known(values, self._terms(name), name)

    def wait(self, name: str, values: Tensor) -> None:
        """What the op comes to, to be recorded when it is read."""
        self.put_out(name, values)
        self._waiting[name] = values, values.detach().clone()

    def added(self, x: Tensor, y: Tensor, result: Tensor) -> None:
        """A sum, be it one that took the place of `x`."""
        one, other = self._known.get(id(x)), self._known.get(id(y))
        if result is x:
            self.changed(x)
        if one is None or other is None or x.shape != y.shape:
            return
        terms = tuple(sorted(one.terms + other.terms))
        if terms in self._sums:
            self.wait(self._sums[terms], result)
        else:
            nearly = self._not_normed.get(terms, "")
            self._known[id(result)] = _Known(result, terms, nearly)
            self._nearly |= {nearly: result.detach().clone()} if nearly else {}

    def changed(self, values: Tensor) -> None:
        """Something was done to values in their place: they are no longer what they were."""
        self._known.pop(id(values), None)

    def read(self, name: str, values: Tensor) -> bool:
        """A module reads the op's output; False where it reads what follows from that instead."""
        known = self._known.get(id(values))
        if name in self._waiting:
            waiting, made = self._waiting.pop(name)
            elsewhere = known is not None and values is not waiting
            as_made = elsewhere or values.numel() != made.numel() or _same(values, made)
            self._record(name, made if as_made else values)
        if known is None:
            self.put_out(name, values)
        if known and known.name not in ("", name) and known.name in self._graph.after([name]):
            return False
        self._nearly.pop(name, None)
        return True

    def next_layer(self, read: Tensor | None = None) -> None:
        """Of a layer that ends what was read by no module is recorded as it was made; the next one begins with what it
        `read`.
        """
        made = {name: values for name, (_, values) in self._waiting.items()}
        for name, values in (*made.items(), *self._nearly.items()):
            self._record(name, values)
        self._waiting.clear()
        self._nearly.clear()
        name = self._known[id(read)].name if read is not None and id(read) in self._known else ""
        self._known = {} if read is None or not name else {id(read): _Known(read, (name,), name)}

    def _terms(self, name: str) -> Terms:
        op = self._graph.ops.get(name)
        if op is None or op.kind != "add":
            return (name,)
        of_layer = ((x,) if layer_of(x) != layer_of(name) else self._terms(x) for x in op.inputs)
        return tuple(sorted(chain.from_iterable(of_layer)))

    def _before_norm(self, name: str) -> str:
        op = self._graph.ops.get(name)
        return op.inputs[0] if op and op.kind == "rms_norm" else name


def _same(read: Tensor, made: Tensor) -> bool:
    """Whether nothing but a cast is between them."""
    read = read.reshape(made.shape).to(made.device)  # the layers of a model may be on several
    return torch.equal(read.to(made.dtype), made) or torch.equal(made.to(read.dtype), read)
