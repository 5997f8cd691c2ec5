"""Which op of our graph a ggml node computes. Called with each node before it is computed, in that order."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from tracediff_reference import ggml
from tracediff_reference.protocol import First, Shown, Sought

# Ops that show the same values under another shape.
VIEWS = {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}


class _Names:
    """What ggml calls the op of a node. Unary and gated ops are told apart by their first parameter."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], str] = {}

    def of(self, address: int, tensor: ggml.Tensor) -> str:
        key = (tensor.op, tensor.op_params[0])
        if key not in self._known:
            self._known[key] = ggml.library().ggml_op_desc(address).decode()
        return self._known[key]


class BySources:
    """A node is identified by its op and what its sources are, for a name does not identify it: `Qcur-0` occurs
    after the matmul, the bias and the rope, and the output projection is only `node_N`.
    """

    def __init__(self, nodes: Iterable[Sought]) -> None:
        self.n_tokens = 0  # not known
        self._nodes = {(node.op, frozenset(node.sources)): node for node in nodes}
        self._leaves = {source for node in self._nodes.values() for source in node.sources}
        self._roles: dict[int, str] = {}
        self._by_name: dict[str, str] = {}  # roles, for the copies of values that another back end reads
        self._ops = _Names()

    def look(self, address: int) -> tuple[str, ...]:
        """The ops whose values the node will hold; of some ops it is a part."""
        tensor = ggml.at(address)
        op = self._ops.of(address, tensor)
        if op in VIEWS:
            return ()
        sources = frozenset(role for source in tensor.src if source and (role := self._role(source)) is not None)
        node = self._nodes.get((op, sources))
        if op == "GET_ROWS" and node:
            self._roles.clear()  # the first node of a graph: addresses mean new nodes from here on
        if node is None:
            self._roles.pop(address, None)
            if op == "GET_ROWS" and len(sources) == 1 and tensor.ne[1] == ggml.at(tensor.src[0]).ne[1]:
                # The last layer is narrowed to the rows whose logits were asked for: here, all of them.
                (self._roles[address],) = sources
            return ()
        self._roles[address] = self._by_name[ggml.name_of(tensor)] = node.role
        return (node.role,) if node.axes is not None else ()

    def _role(self, address: int) -> str | None:
        """What a source is: an earlier node's role, a weight's name, or nothing we know."""
        while True:
            role = self._roles.get(address)
            if role is not None:
                return role
            tensor = ggml.at(address)
            if tensor.op == 0:  # GGML_OP_NONE: a leaf
                name = ggml.name_of(tensor)
                return name if name in self._leaves else self._by_name.get(name)
            if self._ops.of(address, tensor) not in VIEWS:
                return None
            address = tensor.src[0]


class ByName:
    """A node is identified by its op, its name, and how many of these came before it in the same graph.

    A graph begins anew with every micro-batch, and `n_tokens` are in it.
    """

    def __init__(self, shown: Iterable[Shown], first: First) -> None:
        self._shown: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        for one in shown:
            self._shown[one.op, one.name, one.nth].append(one.role)
        self._first = first
        self._seen: Counter[tuple[str, str]] = Counter()
        self._ops = _Names()
        self.n_tokens = 0

    def look(self, address: int) -> tuple[str, ...]:
        """The ops whose values the node will hold; of some ops it is a part."""
        tensor = ggml.at(address)
        op = self._ops.of(address, tensor)
        if op in VIEWS:
            return ()
        key = (op, tensor.name.decode(errors="replace"))
        if key == (self._first.op, self._first.name):
            self._seen.clear()
            self.n_tokens = tensor.ne[self._first.axis]
        roles = self._shown.get((*key, self._seen[key]), [])
        self._seen[key] += 1
        return tuple(roles)
