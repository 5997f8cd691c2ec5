"""What arrays, loop variables and sizes are called in an op's loops, and formulas printed with these names."""

import ast
import re
from dataclasses import dataclass

from tracediff.diagnose.solve.edit import Read, input_words
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.words.nouns import COUNTED, COUNTS_TOKENS, EACH, NAMED, NUMBERS, OF_STEPS, SUMS
from tracediff.english import plural
from tracediff.model.graph import Op

CACHE = "the cache"


@dataclass(frozen=True, slots=True)
class Names:
    """The names in one op's loops; `right` are these, bound to what they read."""

    op: Op
    right: Bound

    def called(self, array: str) -> str:
        """An array by the name of the value or the weight that it is."""
        loops = self.right.own
        if array in loops.inputs:
            return input_words(self.op, loops.inputs.index(array))
        if array in loops.weights:
            return Read(self.op.weights[loops.weights.index(array)].name).words(self.op)
        if array == "cache":
            return Read(self.op.inputs[1]).words(self.op)
        return {"y": "the output", "before": "what was there before"}.get(array, array)

    def noun(self, variable: str) -> str:
        """What a loop variable counts."""
        return COUNTED.get(self.op.kind, EACH).get(variable, variable)

    def subject(self, target: ast.expr, value: ast.expr) -> str:
        """What a statement assigns to."""
        match target:
            case ast.Name(id=name):
                return NAMED.get(name, NUMBERS.get(name, name))
            case ast.Subscript(value=ast.Name(id="y"), slice=at) if self.op.kind == "rope":
                of_pairs = (f"the {which} of each pair" for which in ("first", "second") if which in ast.unparse(at))
                return next(of_pairs, "the output")
            case ast.Subscript(value=ast.Name(id="y")) if self.op.kind == "softmax":
                stages = {ast.IfExp: "the masked score", ast.Call: "the exponential"}
                return stages.get(type(value), "the output")
            case ast.Subscript(value=ast.Name(id="cache")):
                return CACHE
            case ast.Subscript(value=ast.Name(id="state")):
                return "the state"
        return "the output"

    def legend(self, *formulas: str) -> str:
        """What the variables in formulas count."""
        used = {name for formula in formulas for name in re.findall(r"\b[A-Za-z]\b", formula)}
        called = {**COUNTED.get(self.op.kind, EACH), **{name: NUMBERS[name] for name in COUNTS_TOKENS}}
        said = [f"{v}: {noun}" for v, noun in called.items() if v in used]
        return f" ({', '.join(said)})" if said else ""

    def printed(self, node: ast.AST, places: bool = False) -> str:
        """An expression of values by their names, and of counts."""
        return ast.unparse(_Named(self, places).visit(ast.parse(ast.unparse(node), mode="eval").body))


class _Named(ast.NodeTransformer):
    """Array elements as the names of the values, sums in words, sizes as numbers."""

    def __init__(self, names: Names, places: bool) -> None:
        self._names = names
        self._places = places

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        assert isinstance(node.value, ast.Name)
        called = self._names.called(node.value.id)
        if called in ("tokens", "positions"):
            at = ast.unparse(node.slice)
            called = "token id" if called == "tokens" else "position"
            return ast.Name(called if at == "t" else f"{called}[{at}]")
        if called in OF_STEPS:
            return ast.Name(f"{called}[{ast.unparse(node.slice)}]")
        if self._places:
            return ast.Name(f"{called}[{self._names.printed(node.slice)}]")
        text = ast.unparse(node.slice)
        which = next((w for w in ("first", "second") if w in text), "")
        return ast.Name(f"{called}'s {which}" if which else called)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.args and isinstance(node.args[0], ast.GeneratorExp):
            generator = node.args[0]
            loop = generator.generators[0]
            assert isinstance(loop.target, ast.Name)
            term = self._names.printed(generator.elt, self._places)
            noun = plural(self._names.noun(loop.target.id))
            return ast.Name(f"{SUMS[node.func.id]} of {term} over the {noun}")
        self.generic_visit(node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.BinOp(left=ast.Constant(value=int(a)), op=op, right=ast.Constant(value=int(b))) if b > 0:
                known = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.FloorDiv: a // b, ast.Mod: a % b}
                return ast.Constant(known[type(op)]) if type(op) in known else node
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        numbers = self._names.right.numbers
        if node.id in COUNTS_TOKENS or not isinstance(numbers.get(node.id), int):  # of tokens each step has others
            return node
        return ast.Constant(numbers[node.id])
