"""The nodes of a description, and how they hang together: what a tensor is, and who reads it."""

import math
from collections import defaultdict

from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Axis, Weight
from tracediff.model.lift import layout
from tracediff_reference.description import POSITIONS, Description, Node, Read


class Nodes:
    """llama.cpp's graph of the model in `file`, looked up by the numbers of its nodes."""

    def __init__(self, description: Description, file: GGUFFile) -> None:
        self.all = description.nodes
        self._tensors = file.tensors
        self._users: dict[int, list[tuple[int, Read]]] = defaultdict(list)
        for i, node in enumerate(self.all):
            for read in operands(node):
                self._users[read.of].append((i, read))

    def __getitem__(self, i: int) -> Node:
        return self.all[i]

    # --- leaves --------------------------------------------------------------------------------------------------

    def is_leaf(self, i: int) -> bool:
        """Whether nothing computes it."""
        return self.all[i].op == "NONE"

    def is_weight(self, read: Read | None) -> bool:
        """Whether it is a tensor of the file."""
        return read is not None and self.is_leaf(read.of) and self.all[read.of].name in self._tensors

    def is_input(self, read: Read | None) -> bool:
        """Whether llama.cpp sets it at each step."""
        return read is not None and self.is_leaf(read.of) and self.all[read.of].is_input

    def is_cache(self, read: Read | None) -> bool:
        """Whether it is left there by the steps before."""
        return read is not None and self.is_leaf(read.of) and not self.is_input(read) and not self.is_weight(read)

    def weight(self, read: Read, matrix: bool = False) -> Weight:
        """A tensor of the file as it is read: rows of it, in the shape that the op sees."""
        shape = tuple(size for size in read.shape if isinstance(size, int))
        offset = read.offset if isinstance(read.offset, int) else 0
        first = offset // math.prod(shape[1:])
        return Weight(self.all[read.of].name, shape if len(shape) > 1 or not matrix else (1, *shape), first=first)

    # --- readers -------------------------------------------------------------------------------------------------

    def users(self, i: int) -> list[tuple[int, Read]]:
        """Who reads it, and how."""
        return self._users.get(i, [])

    def only_user(self, i: int) -> tuple[int, Node] | None:
        """Who reads it, where that is one alone."""
        users = self.users(i)
        return (users[0][0], self.all[users[0][0]]) if len(users) == 1 else None

    def followed_by(self, i: int, op: str) -> tuple[int, Read] | None:
        """The only reader of node `i` and a weight, where that reader is this op on the two."""
        user = self.only_user(i)
        if user is None or user[1].op != op or len(user[1].reads) < 2:
            return None
        first, second = user[1].reads[:2]
        if first is None or second is None or first.of != i or not self.is_weight(second):
            return None
        as_it_is = first.shape == self.all[i].shape and layout.is_whole(first, self.all[i])
        return (user[0], second) if as_it_is else None

    # --- axes that readers give a value --------------------------------------------------------------------------

    def row_of_cache(self, cache: int) -> tuple[Axis, ...] | None:
        """The shape of a token's row in a cache as attention reads it: [T, heads, head_dim]."""
        for user, read in self.users(cache):
            if self.all[user].op != "SET_ROWS" and layout.covers(read, self.all[cache]):
                rest = [size for size in read.shape if size != POSITIONS]
                return ("T", *layout.axes((*(1,) * (2 - len(rest)), *rest)))
        return None

    def heads(self, end: int) -> tuple[Axis, ...] | None:
        """The shape in which all readers see the value of a node; that in which attention does, where it is cached."""
        shapes = set()
        for user, read in self.users(end):
            attended = layout.rows(read, KEYS if self.all[user].op != "CONT" else VALUES)
            if attended and layout.is_whole(attended, self.all[end]):
                return layout.axes(attended.shape)
            if not layout.is_whole(read, self.all[end]):
                continue
            into = self.all[user].into
            if self.all[user].op == "SET_ROWS" and into and self.is_cache(into):
                return self.row_of_cache(into.of)
            shapes.add(layout.axes(read.shape))
        return shapes.pop() if len(shapes) == 1 else None


# How attention reads [T, heads, head_dim]: of each head its rows of channels, or its channels' rows of tokens.
KEYS, VALUES = (1, 0, 2), (1, 2, 0)


def operands(node: Node) -> list[Read]:
    """The sources that are there."""
    return [read for read in node.reads if read]
