"""Parsed loops, and what is known of them before they run: which axis each has, what they store to, what they need."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Program:
    """Parsed loops."""

    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes, in the order of the source."""
        found: list[ast.AST] = []
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            found.append(node)
            for name in reversed(node._fields):
                value = getattr(node, name, None)
                if isinstance(value, list):
                    stack += reversed(value)
                elif isinstance(value, ast.AST) and value._fields:
                    stack.append(value)
        return found

    @cached_property
    def axes(self) -> dict[str, int]:
        """The axis of each loop variable."""
        found: dict[str, int] = {}
        for node in self.nodes:
            if isinstance(node, ast.For | ast.comprehension):
                assert isinstance(node.target, ast.Name)
                found.setdefault(node.target.id, len(found))
        return found

    @cached_property
    def _stored_in(self) -> Mapping[ast.For, set[str]]:
        """The arrays that are stored to in each loop."""
        found: dict[ast.For, set[str]] = {}

        def within(body: Sequence[ast.stmt]) -> set[str]:
            names: set[str] = set()
            for node in body:
                if isinstance(node, ast.For):
                    found[node] = within(node.body)
                    names |= found[node]
                elif isinstance(node, ast.Assign):
                    names |= {stores_to(node)} - {""}
            return names

        within(self.tree.body)
        return found

    @cached_property
    def placing(self) -> set[str]:
        """Names that say which elements of the output are stored to, and in which order."""
        counts = [loop.iter for loop, names in self._stored_in.items() if "y" in names]
        stores = (node.targets[0] for node in self._assignments if stores_to(node) == "y")
        return self._defining([*counts, *stores])

    def stores_output(self, loop: ast.For) -> bool:
        """Whether something in a loop is stored to the output."""
        return "y" in self._stored_in[loop]

    @cached_property
    def valuing(self) -> set[str]:
        """Names that say what is stored."""
        own = [node for node in self._assignments if stores_to(node) not in ("", "y")]  # arrays of the loops' own
        return self._defining([*own, *(node.value for node in self._assignments if stores_to(node) == "y")])

    def _defining(self, nodes: Sequence[ast.AST]) -> set[str]:
        """The names in these nodes, and in what defines them."""
        defined = {ast.unparse(node.targets[0]): node.value for node in self._assignments if not stores_to(node)}
        found: set[str] = set()
        stack = list(nodes)
        while stack:
            new = names_in(stack.pop()) - found
            found |= new
            stack += [defined[name] for name in new & defined.keys()]
        return found

    @cached_property
    def _assignments(self) -> list[ast.Assign]:
        return [node for node in self.nodes if isinstance(node, ast.Assign)]

    @cached_property
    def reads_output(self) -> bool:
        """Whether what is stored to the output is read again: it is computed in place."""
        return "y" in self._read

    @cached_property
    def around_output(self) -> Sequence[ast.For]:
        """The loops, from the outermost, that hold everything that stores to the output or reads it."""
        loops: list[ast.For] = []
        body = self.tree.body
        while len(touching := [node for node in body if self._touches_output(node)]) == 1:
            (inner,) = touching
            if not isinstance(inner, ast.For):
                break
            loops.append(inner)
            body = inner.body
        return loops

    def _touches_output(self, node: ast.stmt) -> bool:
        return "y" in names_in(node)

    @cached_property
    def in_sequence(self) -> set[ast.For]:
        """Loops in which a statement reads other elements of the output than it stores to."""
        return {node for node in self.nodes if isinstance(node, ast.For) and _reads_others(node.body)}

    @cached_property
    def recurring(self) -> set[str]:
        """Loop variables of which each turn goes on with what those before left in an array of the loops' own: with a
        state.
        """
        found = set[str]()

        def within(body: Sequence[ast.stmt], around: set[str]) -> None:
            for node in body:
                if isinstance(node, ast.For):
                    assert isinstance(node.target, ast.Name)
                    within(node.body, {*around, node.target.id})
                elif isinstance(node, ast.Assign) and stores_to(node) in self._read - {"y"}:
                    found.update(around - self._defining([node.targets[0]]))

        within(self.tree.body, set())
        return found

    @cached_property
    def _read(self) -> set[str]:
        """The arrays that are read."""
        reads = (n.value for n in self.nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load))
        return {name.id for name in reads if isinstance(name, ast.Name)}

    @cached_property
    def preparing(self) -> Mapping[ast.stmt, tuple[str, set[str]]]:
        """Outermost loops that store to arrays of their own alone: as text, with the names in them."""
        loops = (node for node in self.tree.body if isinstance(node, ast.For) and not self.stores_output(node))
        return {loop: (ast.unparse(loop), names_in(loop)) for loop in loops}

    @cached_property
    def restrictable(self) -> set[str]:
        """Loop variables of which some values may be left out: no other of them reads what is stored at one, or those
        before each that is wanted are taken, too.
        """
        return {
            loop.target.id
            for loop, names in self._stored_in.items()
            if isinstance(loop.target, ast.Name)
            and (loop.target.id in self.recurring or (names == {"y"} and self._stands_alone(loop)))
        }

    @cached_property
    def carrying(self) -> set[str]:
        """Loop variables of which each turn goes on from the one before."""
        return set(carried_over(self.tree))

    def _stands_alone(self, loop: ast.For) -> bool:
        return not self.reads_output or any(isinstance(node, ast.For) for node in loop.body)


@lru_cache(4096)
def parse(source: str) -> Program:
    """Loops of a source. Nobody changes their tree: the next to ask gets the same."""
    return Program(ast.parse(source))


def carried_over(node: ast.AST) -> list[str]:
    """The loop variables through whose turns sums go on, from the outermost."""
    found = list[str]()
    for call in ast.walk(node):
        match call:
            case ast.Call(func=ast.Name(id="carried"), args=[_, *loops]):
                found += [loop.id for loop in loops if isinstance(loop, ast.Name)]
    return found


def names_in(*nodes: ast.AST) -> set[str]:
    """The names in expressions and loops, of variables and of arrays."""
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def stores_to(node: ast.Assign) -> str:
    """The array that an assignment stores to; empty for a name."""
    target = node.targets[0]
    return target.value.id if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) else ""


def _reads_others(body: list[ast.stmt]) -> bool:
    for node in body:
        if isinstance(node, ast.Assign) and stores_to(node) == "y" and isinstance(node.targets[0], ast.Subscript):
            own = ast.dump(node.targets[0].slice)
            reads = (n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name))
            if any(read.value.id == "y" and ast.dump(read.slice) != own for read in reads):  # type: ignore[attr-defined]
                return True
    return False
