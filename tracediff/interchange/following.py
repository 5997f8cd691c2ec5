"""What a model makes of the foreign values that are named: the first step run op by op, each named value in place of
what was computed, so that what an engine did right after a mistake is known as well as what it did before.

An op that is wrong equals nothing. Each op that it may be is supposed: it is the one with which what comes after
follows, where that is so with one alone.
"""

from collections import ChainMap
from collections.abc import MutableMapping

import numpy as np
import torch
from torch import Tensor

from tracediff.interchange.layouts import Layout, distance
from tracediff.interchange.matching import Candidate, Found, Match, in_order, neighbours_of
from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.model.weights import Weights
from tracediff.names import layer_of
from tracediff.numerics.evaluate import evaluate, is_covered
from tracediff.numerics.kinds.attention import causal
from tracediff.numerics.views import seen, state
from tracediff.trace.format import Step


class Following:
    """Names the values of a model's first step, as far as they follow from one another."""

    def __init__(self, found: Found, graph: Graph, weights: Weights, fed: Step) -> None:
        self._found = found
        self._weights = weights
        self._ops = [*graph]
        self._order = {op.name: number for number, op in enumerate(self._ops)}
        self._after = graph.after
        self._n = len(fed.tokens)
        sources = zip(SOURCES, (fed.tokens, fed.positions, (0,) * self._n), strict=True)
        self._values: MutableMapping[str, Tensor] = {name: torch.tensor(ids) for name, ids in sources}
        self._hidden = causal(self._values["positions"], self._values["positions"])
        self._follows: set[str] = set()  # ops whose named value equals what was computed
        self._tried: set[str] = set()

    @torch.inference_mode()
    def run(self) -> None:
        """Name all that can be proved."""
        at = 0
        while at < len(self._ops):
            at = self._walk(at)
            supposed = self._suppose() if in_order(self._found, self._order) else None
            if supposed is not None:
                at = supposed

    def _walk(self, at: int) -> int:
        """Compute op by op from `at`, until a layer ends in which nothing has a name: where to go on."""
        named, layer = True, None
        for number, op in enumerate(self._ops[at:], start=at):
            if layer_of(op.name) != layer:
                if not named and layer is not None:
                    return number
                named, layer = False, layer_of(op.name)
            self._values.pop(op.name, None)
            y = self._made(op, self._values)
            if y is None:
                continue
            match = self._found.matches.get(op.name) or self._that_is(op, y)
            if match and match.op not in self._found.matches:
                self._found.add(match)
            self._values[op.name] = y if match is None else self._of(match, y)
            named |= match is not None
            if match and self._equals(match, y):
                self._follows.add(op.name)
        return len(self._ops)

    def _that_is(self, op: Op, y: Tensor) -> Match | None:
        """The value that equals what was computed of an op; of several that do the nearest, for they are one value."""
        if not self._found.is_free(op.name):
            return None
        near = [(error, c.name, layout) for c, error, layout in self._found.near(y.numpy()) if error <= c.equal]
        if not near:
            return None
        error, name, layout = min(near, key=lambda each: each[0])
        return Match(name, op.name, "follows", error, layout)

    def _suppose(self) -> int | None:
        """Find an op that is wrong where the values stop to follow: the number of the op after it, None for none."""
        last = max((self._order[op] for op in self._found.matches if op in self._order), default=0)
        layer = layer_of(self._ops[last].name)
        near = [n for n, op in enumerate(self._ops) if _is_near(layer_of(op.name), layer)]
        for candidate in self._found.unnamed():
            before, _ = neighbours_of(self._found, candidate.name)
            if candidate.name in self._tried or (before and not _is_near(layer_of(before), layer)):
                continue
            self._tried.add(candidate.name)
            proved = [
                (error, number, guess)
                for number in near
                for guess in self._guesses(candidate, self._ops[number])
                if (error := self._continues(number, near[-1], guess)) is not None
            ]
            if len({number for _, number, _ in proved}) == 1:
                error, number, guess = min(proved, key=lambda each: each[0])
                self._found.add(Match(guess.name, guess.op, "continues", error, guess.layout))
                return number
        return None

    def _guesses(self, candidate: Candidate, op: Op) -> list[Match]:
        """The value as this op's, in the layouts that values of the file were found in."""
        y = self._values.get(op.name)
        if y is None or y.numel() != candidate.values.size or not self._found.is_free(op.name):
            return []
        known = {match.layout for match in self._found.matches.values()} | {Layout(tuple(range(candidate.values.ndim)))}
        heads = y.shape[-1] if y.ndim == 3 else None
        fitting = [
            layout for layout in known if len(layout.axes) == candidate.values.ndim and layout.head_dim in (None, heads)
        ]
        return [Match(candidate.name, op.name, "continues", 0.0, layout) for layout in fitting]

    def _continues(self, number: int, last: int, guess: Match) -> float | None:
        """How well a value equals what is computed if the guess is right, which nothing equals else; None for none.

        A value that follows as things are must follow still.
        """
        before = self._values[guess.op]
        overlay = ChainMap({guess.op: self._of(guess, before)}, self._values)
        reached = self._after([guess.op])
        for op in self._ops[number + 1 : last + 1]:
            y = self._made(op, overlay) if op.name in reached else None
            if y is None:
                continue
            match = self._found.matches.get(op.name)
            if match is None:
                match = self._that_is(op, y)
                if match and match.name != guess.name:
                    return match.error
                overlay[op.name] = y
            elif op.name in self._follows:
                if not self._equals(match, y):
                    return None
                overlay[op.name] = self._of(match, y)
            else:
                if self._equals(match, y):
                    return match.error
                overlay[op.name] = self._of(match, y)
        return None

    def _equals(self, match: Match, y: Tensor) -> bool:
        candidate = self._found.candidates[match.name]
        return distance(self._found.ours(match, tuple(y.shape)), y.numpy()) <= candidate.equal

    def _of(self, match: Match, y: Tensor) -> Tensor:
        """The engine's own value, where the model's is finite: what a mask hides holds anything."""
        values = torch.from_numpy(np.ascontiguousarray(self._found.ours(match, tuple(y.shape))))
        return torch.where(y.isfinite(), values, y)

    def _made(self, op: Op, values: MutableMapping[str, Tensor]) -> Tensor | None:
        """What the op makes of the values; None where one is not there, or nobody knows how."""
        if not is_covered(op):
            return None
        if op.kind == "state":
            return state(op, (), self._weights.device, self._weights.dtype)
        if any(name not in values for name in op.inputs):
            return None
        whole = [values[name] for name in op.inputs]
        inputs = [seen(view, self._n, self._n, x) if view else x for x, view in zip(whole, op.seen, strict=True)]
        y = evaluate(op, inputs, self._weights)
        return y.masked_fill(self._hidden, -torch.inf) if op.kind == "scores" else y


def _is_near(layer: int | None, other: int | None) -> bool:
    """Whether a layer is the other or the one after it; what belongs to none is near to all."""
    return layer is None or other is None or layer in (other, other + 1)
