"""An edit of an op's loops in the reader's words: which tokens, heads, keys and channels, and what belongs there.

What an edit reads or writes elsewhere is looked up by running both loops and comparing the places; what it computes
otherwise is shown as a formula of the op's inputs. So the words follow from what the loops do, not from how they were
made.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tracediff.diagnose.solve.edit import Edit
from tracediff.diagnose.solve.loops.accesses import Access, accesses
from tracediff.diagnose.solve.loops.arrays import CannotRunError
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.loops.program import carried_over, names_in
from tracediff.diagnose.solve.words.counts import evaluated, range_of
from tracediff.diagnose.solve.words.masks import LESS, seen_keys
from tracediff.diagnose.solve.words.names import CACHE, Names
from tracediff.diagnose.solve.words.nouns import AXES, COUNTS_TOKENS, NAMED, NUMBERS, OF_STEPS, ORDINALS, OWN, SUMMED
from tracediff.diagnose.solve.words.places import difference, taken
from tracediff.diagnose.solve.words.syntax import chain, head, inlined, quotable, statements
from tracediff.english import count, listed, plural

_WHOLE = ("the output", CACHE)  # what is stored to, where it has no parts of its own


@dataclass(frozen=True, slots=True)
class Speaker(Names):
    """Puts edits of one op's loops into words."""

    def of(self, edited: Bound) -> str:
        """What the edited loops do otherwise."""
        right, other = (statements(ast.parse(bound.source)) for bound in (self.right, edited))
        if len(right) != len(other):
            return "other loops"
        pairs = [(a, b) for a, b in zip(right, other, strict=True) if head(a) != head(b)]
        return "; ".join(dict.fromkeys(self._statement(a, b, edited) for a, b in pairs))

    def said(self, edit: Edit, edited: Bound, within: np.ndarray | None = None) -> str:
        """What an edit does otherwise; `edited` are the loops with it, bound to what they read. Of the output only what
        is `within` comes of them, a bool of its shape: all of it, as a rule.
        """
        memory = next((read.words(self.op) for name, read in edit.arrays if name == "before"), "")
        said = edit.words or (self.renamed(dict(edit.renamed), edited) if edit.renamed else self.of(edited))
        if edit.words or edit.touches == "values":
            return said.replace("what was there before", f"what was there before ({memory or '0'})")
        return said + self.rest(edited, memory, within)

    def renamed(self, names: Mapping[str, str], edited: Bound) -> str:
        """One size stands for another throughout, or two for one another, or two arrays."""
        (a, b), *rest = names.items()
        if rest:
            first, second = (NUMBERS.get(x, "") if x in self.right.numbers else self.called(x) for x in (a, b))
            return f"{first} and {second} are exchanged"
        if a == "P" and b.isdigit() and int(b) < self.right.numbers[a]:
            return f"of what is cached only positions before {b} count, as if those from there on were 0"
        if a in COUNTS_TOKENS:  # another number in each step
            return f"{NUMBERS[a]} is taken for {NUMBERS.get(b, b)}"
        return f"{NUMBERS.get(a, a)} is taken for {self._size(b, edited)}; it is {self._size(a, self.right)}"

    def _size(self, name: str, bound: Bound) -> str:
        if name in (*COUNTS_TOKENS, "past[0]"):
            return NUMBERS[name]
        return name if name.isdigit() else f"{bound.numbers.get(name, 0):g}"

    def rest(self, edited: Bound, memory: str, within: np.ndarray | None = None) -> str:
        """What is where nothing is stored; empty where all is."""
        stored = edited.stored_places()
        made = np.arange(np.prod(self.right.own.shape)) if within is None else np.flatnonzero(within)
        if np.isin(made, stored).all():
            return ""
        return f"; {'elsewhere ' if len(stored) else ''}the output is {memory or 'as it was: 0'}"

    def _statement(self, a: ast.stmt, b: ast.stmt, edited: Bound) -> str:
        match a, b:
            case ast.For(target=ast.Name(id=name), iter=ast.Call() as old), ast.For(iter=ast.Call() as new):
                stored = [one for one in a.body if isinstance(one, ast.Assign)]
                subject = self.subject(stored[0].targets[0], stored[0].value) if stored else ""
                of = f" of {subject}" if subject.startswith("the") and self.op.kind == "softmax" else ""
                verb = "cached" if re.search(r"^ *cache\[", ast.unparse(a), re.MULTILINE) else "computed"
                return self._loop(name, of, old, new, edited, verb)
            case ast.Assign(targets=[target]), ast.Pass():
                subject = self.subject(target, a.value)
                if ast.unparse(target) in ast.unparse(a.value):  # of what is computed in place a step is left out
                    return f"{self.printed(a.value)} is not computed: {subject} stays as it is before that"
                return f"{subject} is not stored"
            case ast.Assign(targets=[ast.Name(id=name)], value=old), ast.Assign(value=new):
                return self._defined(name, old, new, edited)
            case (
                ast.Assign(targets=[ast.Subscript() as to], value=old),
                ast.Assign(targets=[ast.Subscript() as to_other], value=new),
            ):
                if ast.unparse(to) != ast.unparse(to_other):
                    array = ast.unparse(to).partition("[")[0]
                    moved = self._by_access(array, edited, stores=True, subject=self.subject(to, old))
                    return (
                        moved
                        or f"{self.subject(to, old)} is stored at {self._placed(to_other.slice, to.slice, edited)}"
                    )
                return self._value(self.subject(to, old), old, new, edited)
        return f"{ast.unparse(b)} where {ast.unparse(a)} belongs"

    # --- loops

    def _loop(self, name: str, of: str, old: ast.Call, new: ast.Call, edited: Bound, verb: str) -> str:
        """Another range of a loop that stores."""
        noun = self.noun(name)
        said = self._taken(noun, old, new, edited)
        if said:
            terms, left, one = said
            return f"{terms}{of} {'is' if one else 'are'} {verb}{left}"
        bounds = self._bounds(new, edited), self._bounds(old, self.right)
        return f"{plural(noun)} {bounds[0]}{of} are {verb}, where {bounds[1]} belong{self.legend(*bounds)}"

    def _taken(self, noun: str, old: ast.Call, new: ast.Call, edited: Bound) -> tuple[str, str, bool] | None:
        follows = bool(names_in(*old.args) & names_in(*new.args))
        return taken(noun, range_of(old, self.right), range_of(new, edited), follows)

    def _bounds(self, call: ast.Call, bound: Bound) -> str:
        start, end = ([ast.Constant(0), *call.args] if len(call.args) == 1 else call.args)[:2]
        return f"{self._count(start, bound)} to before {self._count(end, bound)}"

    # --- values

    def _count(self, node: ast.expr, bound: Bound) -> str:
        """A size as a number, by its name where each step has another."""
        value = None if names_in(node) & {*COUNTS_TOKENS} else evaluated(node, bound)
        said = self.printed(node)
        return NUMBERS.get(said, said) if value is None else f"{value:g}"

    def _defined(self, name: str, old: ast.expr, new: ast.expr, edited: Bound) -> str:
        """A name that is something else."""
        if name == "visible":
            return self._mask(LESS, LESS, edited, f"{self.printed(new)} keys", f"{self.printed(old)}")
        if name in ("heads", "queries", "keys", "channels", "width", "n"):
            a, b = (self._count(node, bound) for node, bound in ((old, self.right), (new, edited)))
            number = NUMBERS[name].replace("the", OWN.get(self.op.kind, "the"), 1)
            right = "" if name in COUNTS_TOKENS else f"; it is {a}"
            return f"{number} is taken for {b}{right}{self.legend(b, right)}"
        if name in ("here", "there", "first", "second"):
            arrays = [array for array in edited.arrays if array not in OF_STEPS]
            said = [self._by_access(array, edited) for array in arrays]
            said.append(self._by_access("y", edited, stores=True))
            said = [one for one in said if one]
            return f"{NAMED[name]}: {'; '.join(said)}" if said else self._formula(NAMED[name], old, new)
        return self._value(NAMED.get(name, name), old, new, edited)

    def _value(self, subject: str, old: ast.expr, new: ast.expr, edited: Bound) -> str:
        """An expression that is another: a place that is read, a count of terms, or a formula."""
        if loops := carried_over(new):
            whole = subject if subject in SUMMED else "the sum"
            each = listed([*map(self.noun, loops)])
            return f"{whole} is not set to 0 again for each {each}: it goes on from the one before"
        outer: ast.AST
        for outer, (x, y) in chain(old, new):
            if isinstance(outer, ast.Subscript) and isinstance(outer.value, ast.Name) and x is outer.slice:
                assert isinstance(y, ast.expr)
                said = self._by_access(outer.value.id, edited, subject=subject)
                here = f" for {subject}" if outer.value.id == "y" else ""
                return said or f"{self.called(outer.value.id)} is read{here} at {self._placed(y, x, edited)}"
            if isinstance(outer, ast.comprehension) and isinstance(outer.target, ast.Name):
                assert isinstance(x, ast.Call)
                assert isinstance(y, ast.Call)
                return self._terms(subject, outer.target.id, x, y, edited)
            if isinstance(outer, ast.IfExp) and x is outer.test:
                assert isinstance(y, ast.expr)
                return self._mask(x, y, edited, f"those with {self.printed(y)}", f"those with {self.printed(x)}")
        whole = self.printed(old)
        shown = [pair for pair in quotable(old, new) if whole.count(self.printed(pair[0])) == 1]
        part = shown[-1] if shown else (old, new)
        if part[1] is new and isinstance(new, ast.Name | ast.Subscript | ast.Constant):  # no formula any more
            return f"{subject} is {self.printed(new)}, where {self.printed(old)} belongs"
        return self._formula(subject, *part)

    def _terms(self, subject: str, name: str, old: ast.Call, new: ast.Call, edited: Bound) -> str:
        """A sum over other terms."""
        noun = self.noun(name)
        whole = subject if subject in SUMMED else "the sum"
        said = self._taken(noun, old, new, edited)
        if said:
            return f"{whole} takes {said[0]}{said[1]}"
        bounds = f"{self._bounds(new, edited)}, where {self._bounds(old, self.right)} belong"
        return f"{whole} takes {plural(noun)} {bounds}{self.legend(bounds)}"

    def _mask(self, old: ast.expr, new: ast.expr, edited: Bound, said: str, belongs: str) -> str:
        seen = [seen_keys(node, bound) for node, bound in ((old, self.right), (new, edited))]
        if seen[0] is not None and seen[1] is not None:
            if seen[1].all():
                return "no mask: every query sees every key"
            if not seen[1].any():
                return "the mask hides every key from every query"
            if (seen[1] == ~seen[0]).all():
                return "the mask is inverted: a query sees the keys after its own position, and no other"
            counts = seen[0].sum(-1), seen[1].sum(-1)
            by = (counts[1] - counts[0]).ravel()
            k = int(by[np.argmax(np.abs(by))])
            prefix = all(row[: int(row.sum())].all() for row in seen[1].reshape(-1, seen[1].shape[-1]))
            if prefix and (counts[1] == np.clip(counts[0] + k, 0, seen[0].shape[-1])).all():
                return f"the mask: each query sees {count(abs(k), 'key')} too {'many' if k > 0 else 'few'}"
        return f"the mask: query t sees {said}, where {belongs} belong{self.legend(said, belongs)}"

    def _formula(self, subject: str, old: ast.expr, new: ast.expr) -> str:
        a, b = (self.printed(node) for node in (old, new))
        if a == b:  # the places differ, not the formula
            a, b = (self.printed(node, places=True) for node in (old, new))
        return f"{subject} is computed with {b}, where {a} belongs{self.legend(a, b)}"

    # --- places that are read

    def _by_access(self, array: str, edited: Bound, stores: bool = False, subject: str = "") -> str:
        """Where an array is read, or stored to, instead of the right places."""
        try:
            pairs = list(zip(*(accesses(bound, array, stores) for bound in (self.right, edited)), strict=True))
        except (CannotRunError, ValueError):
            return ""
        differ = [i for i, (a, b) in enumerate(pairs) if not a.same(b)]
        said = dict.fromkeys(self._access(array, a, b, edited, stores, subject) for a, b in (pairs[i] for i in differ))
        if not said or stores or len(pairs) == len(differ):
            return "; ".join(said)
        when = f"of {len(pairs)} readings the {' and the '.join(ORDINALS[i] for i in differ)}"
        return f"{'; '.join(said)} ({f'in {subject}, ' if subject and subject != 'the output' else ''}{when})"

    def _access(self, array: str, a: Access, b: Access, edited: Bound, stores: bool, subject: str) -> str:
        nouns = {name: self.noun(name) for name in a.loops}
        said = difference(a, b, self._axes(array), nouns, self._of_steps(a))
        what = subject or "the output" if stores else self.called(array)
        verb = "is stored" if stores else "is read"
        if said.axis:
            stored = "" if what in _WHOLE else f"{what} of "
            to = f"{stored}{said.of} is stored as" if stores else f"{said.of} reads"
            of = "" if stores and what != CACHE else f" of {what}"
            old = "that of its token" if array == "table" and "in turn" in said.old else said.old
            return f"{to} {said.axis} {said.new}{of}, where {old} belongs"
        if said.shift:
            return f"{what} {verb} {count(abs(said.shift), 'value')} {'later' if said.shift > 0 else 'earlier'}"
        if said.stride:
            noun, new, right = said.stride
            return f"from one {noun} to the next {what} {verb} {count(new, 'value')} further on, where {right} belong"
        return f"{what} {verb} at {self._placed(b.node, a.node, edited)}"

    def _of_steps(self, access: Access) -> dict[str, np.ndarray]:
        """Where what each step caches would lie if it were the first."""
        c, starts = access.loops.get("c"), self.right.arrays.get("starts")
        if c is None or starts is None or (c >= starts.size).any():  # it caches what no step has
            return {}
        return {"c - n (n: how many were cached before its step)": c - starts.take(c)}

    def _placed(self, new: ast.AST, old: ast.AST, edited: Bound) -> str:
        """Two formulas of a place, the first where the second belongs."""
        a, b = (self.printed(inlined(node, bound)) for node, bound in ((old, self.right), (new, edited)))
        return f"{b}, where {a} belongs{self.legend(a, b)}"

    def _axes(self, array: str) -> list[tuple[str, int]]:
        """Names and sizes of an array's axes."""
        known = AXES.get(self.op.kind, {}).get(array, (("value", ""),))
        return [(name, int(self.right.numbers.get(size, 1 << 40))) for name, size in known]
