"""What is wrong, each cause once: the same mistake in other ops, layers, steps and weights is one finding."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tracediff.english import listed
from tracediff.findings.places import MATMULS, WHOLE, cut, matmuls_of, of_layers, of_names, of_ops, of_weights, runs
from tracediff.findings.words import by_name
from tracediff.names import layer_of, local_name
from tracediff.result import Finding, OpResult, WeightResult

_UNKNOWN = "wrong, and no known mistake explains it"
_UNSOUGHT = "wrong; not all was tried that may explain it"
_SHARED = {
    "matmuls": "what they share: their kernel, and how it reads what their weights are held in",
    "norms": "what they share: their kernel, its sum and its inverse root",
}
_OF_TYPE = "what they share, and ops that are right do not: how blocks of {} are read and multiplied"
_FIGURE = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)(?![\w.]*\w)")
_FITTED = re.compile(r"[.e]")  # in a figure that is no count
_FIRST = re.compile(r"^[\w.]+\.(weight|bias) ")  # an op's own; that of a tied head is the embedding's
_LAST = re.compile(r" \([\w.]+\.weight\)$")
# What the first layer reads, and each of the others.
_STREAM = {True: r"(?<![\w.])(token_embd(_scaled)?|inpL)(?![\w.])", False: r"\bffn_residual of the layer before\b"}
_BESIDE = {"before": -1, "after": 1}
_BESIDE_IT = re.compile(rf"\bof the layer ({'|'.join(_BESIDE)})\b")
_IN_LAYER = re.compile(r"\bblk\.(\d+)\.([\w.]*\w)")


@dataclass(slots=True)
class _Group:
    """One cause: what it is called, what is said of each place, and the places."""

    mistake: str | None
    look: str | None
    texts: list[str] = field(default_factory=list)
    ops: list[OpResult] = field(default_factory=list)
    weights: list[WeightResult] = field(default_factory=list)


def findings(ops: Sequence[OpResult], weights: Sequence[WeightResult]) -> tuple[Finding, ...]:
    """The most telling first: what is explained before what is not, then in the order of execution, then the widest."""
    groups = _merged(_of_kinds(_of_ops(ops), ops), _of_weights(weights), ops)
    order = {(op.step, op.op): at for at, op in enumerate(ops)}
    sound = {op.op for op in ops if op.local and not op.local.faulty}

    def place(group: _Group) -> tuple[bool, float, int]:
        first = min((order[op.step, op.op] for op in group.ops), default=-1.0)
        if not group.ops and any(_op_of(weight) in sound for weight in group.weights):
            first = math.inf
        return group.mistake is None and not group.weights, first, -len(group.ops)

    return tuple(_finding(group, ops, weights, sound) for group in sorted(groups, key=place))


def _of_ops(ops: Iterable[OpResult]) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    wrong = [op for op in ops if op.status == "faulty"]
    for op in wrong:
        if not op.cause:
            group = groups.setdefault((local_name(op.op), ""), _Group(None, None))
            group.ops.append(op)
            group.texts.append(op.shape or "")
    causes = [(op, op.cause, said) for op in wrong if op.cause for said in op.cause.each.items()]
    told = [(op, cause.look.get(said[0]), [*_forms(op, *said)]) for op, cause, said in causes]
    suits = Counter(key for _, key in {(op.op, key) for op, _, forms in told for _, key in forms})
    for op, look, forms in told:
        text, key = max(forms, key=lambda form: suits[form[1]])
        group = groups.setdefault(key, _Group(key[0], look))
        group.ops.append(op)
        group.texts.append(text)
    return [*groups.values()]


def _forms(op: OpResult, mistake: str, text: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """What is said of an op, and by what it is the same as what is said of others: as it is, and with numbers of
    layers. Where all of them read layer 0's, that is the layer before to one.
    """

    def number(found: re.Match[str]) -> str:
        return f"of layer {(op.layer or 0) + _BESIDE[found[1]]}"

    for form in dict.fromkeys((text, _BESIDE_IT.sub(number, text))):
        yield form, (mistake, pattern(_in_any_op(op, mistake, form)))


def _of_kinds(groups: list[_Group], ops: Sequence[OpResult]) -> list[_Group]:
    """Where nothing explains any op of a kind, or any that reads weights of a type, they are one: what is wrong is what
    they share.
    """
    sorts = [({op.op for op in ops if op.kind in kinds}, _SHARED[what]) for kinds, what in WHOLE]
    types = dict.fromkeys(op.local.weight_type for op in ops if op.kind in MATMULS and op.local)
    sorts += [({op.op for op in matmuls_of(type_, ops)}, _OF_TYPE.format(type_)) for type_ in types if type_]
    for names, look in sorts:
        alike = [group for group in groups if group.mistake is None and all(op.op in names for op in group.ops)]
        if len(alike) > 1 and {op.op for group in alike for op in group.ops} == names:
            first, *others = alike
            for other in others:
                first.ops += other.ops
                first.texts += other.texts
                groups = [group for group in groups if group is not other]
            first.look = look
    return groups


def _of_weights(weights: Iterable[WeightResult]) -> list[_Group]:
    groups: dict[tuple[str | None, str], _Group] = {}
    for weight in weights:
        if weight.status == "wrong":
            alike = pattern(unnamed(weight.note or "", weight.weight))
            group = groups.setdefault((weight.cause, alike), _Group(weight.cause, weight.look))
            group.weights.append(weight)
            group.texts.append(weight.note or "")
    return [*groups.values()]


def _merged(of_ops: list[_Group], of_weights: list[_Group], ops: Sequence[OpResult]) -> list[_Group]:
    """Ops that are wrong because a weight is: one with it."""
    left = [*of_ops]
    for group in of_weights:
        wrong = {weight.weight for weight in group.weights}
        group.ops += [op for op in ops if wrong.intersection(op.held)]
        for other in [*left]:
            by_these = all(_weights_of(op) & wrong for op in other.ops)
            if by_these and other.mistake and other.mistake == group.mistake:
                group.ops += [op for op in other.ops if not wrong.intersection(op.held)]  # those are there already
                group.look = group.look or other.look
                left.remove(other)
    return [*of_weights, *left]


def _weights_of(op: OpResult) -> set[str]:
    names = op.local.segment if op.local and len(op.local.segment) > 1 else (op.op,)
    return {f"{name}.{what}" for name in names for what in ("weight", "bias")}


def _finding(group: _Group, ops: Sequence[OpResult], weights: Sequence[WeightResult], sound: set[str]) -> Finding:
    segment = group.ops[0].local.segment if group.ops and group.ops[0].local else ()
    errors = [op.local.nmse for op in group.ops if op.local and not math.isnan(op.local.nmse)]
    text = _of_memory(group, ops, weights, sound) if group.weights else _of_computing(group, ops)
    return Finding(
        text=text + _undone(group.ops),
        mistake=group.mistake,
        ops=tuple(dict.fromkeys(op.op for op in group.ops)),
        weights=tuple(weight.weight for weight in group.weights),
        steps=tuple(sorted({op.step for op in group.ops})),
        nmse=max(errors, default=None),
        segment=segment if len(segment) > 1 else (),
        look=group.look,
    )


def _undone(ops: Sequence[OpResult]) -> str:
    """That what follows is right without the records of these and others, where that is so of each."""
    each = [op.undone for op in ops if op.undone]
    if not each or len(each) < len(ops):
        return ""
    left_out = list(dict.fromkeys(local_name(name) for one in each for name in one.ops))
    follows = list(dict.fromkeys(local_name(name) for one in each for name in one.follows))
    follows = [name for name in follows if name not in left_out] or follows
    verb, records = "is" if len(follows) == 1 else "are", "record" + "s" * (len(left_out) > 1)
    made = f"{listed(left_out, len(left_out))} {'is' if len(left_out) == 1 else 'are'} computed as should be"
    return (
        f" Yet {listed(follows)} {verb} right if {made}, and not read from the {records}: undone there, or wrong in "
        f"the {records} alone."
    )


def _of_computing(group: _Group, ops: Sequence[OpResult]) -> str:
    first, names = group.ops[0], {op.op for op in group.ops}
    where = _where(group.ops, ops)
    if group.mistake is None:
        shapes = {*group.texts}
        step = f" in step {first.step}" * (len({op.step for op in group.ops}) > 1)
        of = f"{first.op}{step}: " if len(shapes) > 1 else ""
        shape = f" ({of}{group.texts[0]})" if group.texts[0] else ""
        return f"{where}: {_UNKNOWN if all(op.sought for op in group.ops) else _UNSOUGHT}{shape}."
    texts, each = group.texts, [*zip(group.texts, group.ops, strict=True)]
    if len(names) > 1:
        texts = [unnamed(text, op.op) for text, op in each]
        if len({*map(pattern, texts)}) > 1:
            texts = [_of_stream(text, op) for text, (_, op) in zip(texts, each, strict=True)]
    if len({*map(pattern, texts)}) > 1:
        texts = [_in_any_op(op, group.mistake, text) for text, op in each]
    of_op: dict[str, set[str]] = {}
    for text, op in each:
        of_op.setdefault(op.op, set()).add(pattern(text))
    if len({*texts}) == 1 and max(map(len, of_op.values())) > 1:  # what is said of one op depends on the step
        return f"{where}: {texts[0]} ({first.op} in step {first.step}: {group.texts[0]})."
    return f"{where}: {in_common(texts)}."


def _of_memory(group: _Group, ops: Sequence[OpResult], weights: Sequence[WeightResult], sound: set[str]) -> str:
    text = f"{of_weights(_types(group.weights), _types(weights), recorded=True)}: wrong in memory: {_note(group)}"
    if group.ops and group.ops[0].local and len(group.ops[0].local.segment) > 1:
        return f"{text} (seen in {listed(by_name(op.op for op in group.ops))})."
    if group.ops:
        return f"{text}; so {_where(group.ops, ops)} {_is(group.ops)} wrong."
    right = [name for name in dict.fromkeys(map(_op_of, group.weights)) if name in sound]
    if not right:
        return f"{text}."
    verb = "is" if len(right) == 1 else "are"
    return (
        f"{text}; yet {of_names(right, [op.op for op in ops])} {verb} computed as it should be: is the weight "
        "recorded in another form than the one that is used?"
    )


def _note(group: _Group) -> str:
    if len(group.weights) == 1:
        return group.texts[0]
    return in_common([unnamed(t, w.weight) for t, w in zip(group.texts, group.weights, strict=True)])


def _is(ops: Sequence[OpResult]) -> str:
    return "is" if len({op.op for op in ops}) == 1 else "are"


def _types(weights: Iterable[WeightResult]) -> dict[str, str | None]:
    return {weight.weight: weight.type for weight in weights}


def _op_of(weight: WeightResult) -> str:
    """The op that multiplies with it."""
    return weight.weight.rpartition(".")[0]


# --- places ----------------------------------------------------------------------------------------------------------


def _where(group: Sequence[OpResult], ops: Sequence[OpResult]) -> str:
    """Ops and layers; the steps where these are not all that they were judged in. Those in the same steps together,
    where other steps would show it: what they merely do not show may be there.
    """
    one_by_one, names = any(not op.cause or op.in_some_steps for op in group), {op.op for op in group}
    judged: dict[str, set[int]] = {}
    wrong: dict[str, set[int]] = {}
    for op in ops:
        if op.op in names and (op.local or op.status == "faulty"):
            judged.setdefault(op.op * one_by_one, set()).add(op.step)
    for op in group:
        wrong.setdefault(op.op * one_by_one, set()).add(op.step)
    alike: dict[frozenset[int], list[OpResult]] = {}
    for op in group:
        of = op.op * one_by_one
        alike.setdefault(frozenset() if wrong[of] >= judged[of] else frozenset(wrong[of]), []).append(op)
    return cut([f"{_in_layers(some, ops)}{_in_steps(steps, len(alike) > 1)}" for steps, some in alike.items()], "; ")


def _in_steps(steps: frozenset[int], others: bool) -> str:
    """In these steps; in all where there are none: that is said where it is not so for `others`."""
    if not steps:
        return ", in every step" * others
    return f", in step{'s' * (len(steps) > 1)} {runs(steps)}"


def _in_layers(group: Sequence[OpResult], ops: Sequence[OpResult]) -> str:
    first = group[0].local
    return _seen(group, ops) if first is not None and len(first.segment) > 1 else of_ops(group, ops)


def _seen(group: Sequence[OpResult], ops: Sequence[OpResult]) -> str:
    """Where a mistake is that shows in what a segment ends in: in these layers, and in these ops or before them."""
    outside = list(dict.fromkeys(op.op for op in group if op.layer is None))
    there = f"{listed(outside)}, or before {'it' if len(outside) == 1 else 'them'}" if outside else ""
    layers = {op.layer for op in group if op.layer is not None}
    if not layers:
        return there
    ends = dict.fromkeys(local_name(op.op) for op in group if op.layer is not None)
    every = {op.layer for op in ops if op.layer is not None}
    known = {op.layer for op in ops if op.layer is not None and local_name(op.op) in ends}
    return f"{of_layers(layers, known, every)} (seen in {listed([*ends])}){there and ', and '}{there}"


# --- words that are true of several ----------------------------------------------------------------------------------


def unnamed(text: str, name: str) -> str:
    """A text about an op or a weight in words that suit the same mistake elsewhere."""
    layer = layer_of(name)
    op = name.removesuffix(".weight").removesuffix(".bias")
    text = _LAST.sub("", text)
    text = _FIRST.sub(r"the \1 ", text.replace(f"{op}.weight", "the weight").replace(f"{op}.bias", "the bias"))

    def relative(found: re.Match[str]) -> str:
        if layer is None:
            return found[0]
        words = {0: "{}", -1: "{} of the layer before", 1: "{} of the layer after"}.get(int(found[1]) - layer, found[0])
        return words.format(found[2])

    return _IN_LAYER.sub(relative, text)


def _of_stream(text: str, op: OpResult) -> str:
    """What an op's layer reads in words that suit every layer."""
    return text if op.layer is None else re.sub(_STREAM[op.layer == 0], "the layer's input", text)


def _in_any_op(op: OpResult, mistake: str, text: str) -> str:
    """The same in words that suit ops with other inputs: the rope of queries and that of keys, each norm
    with its weight.
    """
    if op.common.get(mistake):
        return op.common[mistake]
    text = unnamed(text, op.op)
    if op.reads:
        text = re.sub(rf"(?<![\w.]){re.escape(op.reads)}(?![\w.])(?! of (?:the|layer))", "its input", text)
    text = _of_stream(text, op)
    return re.sub(rf"(?<![\w.]){re.escape(local_name(op.op))}\.(?=(weight|bias)\b)", "the ", text)


def pattern(text: str) -> str:
    """The text without its fitted figures."""
    return _FIGURE.sub(lambda found: "#" if _FITTED.search(found[1]) else found[0], text)


def in_common(texts: Sequence[str]) -> str:
    """Texts that differ in figures alone as one, with the range of each figure."""
    parts = [_FIGURE.split(text) for text in texts]
    return "".join(_range(column) for column in zip(*parts, strict=False))


def _range(alike: Iterable[str]) -> str:
    each = {*alike}
    if len(each) == 1:
        return each.pop()
    least, most = (pick(each, key=float) for pick in (min, max))
    return f"{least} to {most}"
