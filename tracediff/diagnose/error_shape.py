"""The shape of an error that no known mistake explains: facts with figures, never a guess."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tracediff.diagnose.solve.by_value.regions import around
from tracediff.english import count, few, nth, plural, runs, told_apart
from tracediff.numerics.nmse import nmse

# NMSE that a stated relation may leave, and how much of the error: of a small one any relation leaves little.
_CLOSE, _LEFT = 1e-6, 0.1
_APPROACHED = 1e-3  # of the error: what leaves more is near a multiple, and none: as what is divided by a sum + 0.01
_WRONG = 1e-4  # of the largest value: what is off by more is called wrong
_MOVED = 1e-2  # NMSE of values that stand elsewhere: sorted, what is off by little is off by far less in its place
_ALIKE = 100.0  # times the median share that a rounded value is off by
_ZEROS = 0.1  # of the values that should be 0, as by a mask: weights of few bits have some, which say nothing
_DEVIATIONS = 4.0  # of the number of values that are 0: what chance alone makes of it once in ten thousand times
_TOKENS_TELL = 3  # whose choices all lack one: of fewer that may be chance
_VECTOR = 1e-3  # NMSE: a vector of the file is another by far
# Values that may be quantised: rows that are looked at, sizes of groups, and levels of eight bits. By chance 32 values
# lie so near to levels once in 10^30 times; a group of few values may lack two neighbours, and with them its step.
_ROWS, _GROUPS, _MOST_LEVELS, _NEAR_LEVEL, _MOST_GROUPS = 16, (256, 128, 64, 32), 256, 0.05, 0.9
_APART = 1e-6  # of the largest: values that are no farther apart are one
# Values in order of what is read, and how much of their errors' variance is left from each to the next (von Neumann's
# ratio): by chance, of so many, 1 with a deviation of 1 / sqrt(128). Schraudolph's exp left 0.01 to 0.18.
_SORTED, _SMOOTH = 128, 0.2
_TOLD_APART = 0.03  # of the largest error: so many that vary by less may vary by roundings
_TINY_SHARE = 1e-4  # of the largest probability: of smaller ones float32 tells less
_MULTIPLES = 8  # values of a slice that can tell that it is one

Vectors = Callable[[int], Iterable[tuple[str, Tensor]]]


def describe(
    recorded: Tensor,
    exact: Tensor,
    axes: tuple[str, ...],
    vectors: Vectors = lambda n: (),
    inputs: Sequence[Tensor] = (),
) -> str:
    """What sets `recorded` apart from `exact`, whose axes are called so, in one line. `vectors` are those of the model
    that have so many numbers, `inputs` what is read of an op that makes each value of those at its place.
    """
    return "; ".join(_facts(recorded, exact, axes, vectors, inputs)) or "no simple relation to the right values"


def describe_scan(recorded: Tensor, exact: Tensor, shape: tuple[int, ...], n_states: int) -> str:
    """The same of all tokens' values, of a shape [T, H, D], and of the states after them, [n_states, H, D, ...], which
    lie in one row: of each in its own axes.
    """
    n, axes, said = math.prod(shape), ("token", "head", "channel"), list[str]()
    y, x = recorded.flatten(), exact.flatten()
    states = [whole[n:].reshape(n_states, *shape[1:], -1)[0] for whole in (y, x)]  # the latest
    parts = [("", [whole[:n].reshape(shape) for whole in (y, x)], axes), ("the state after them: ", states, axes[1:])]
    for of, (ours, right), names in parts:
        if bool(((ours - right).abs() > _WRONG * right.abs().amax()).any()):
            said.append(of + describe(ours, right, (*names, "column")[: right.ndim]))
    return "; ".join(said) or f"no value is off by more than {_WRONG:g} of the largest"


def describe_choice(chosen: Tensor, right: Tensor) -> str:
    """What sets places that were chosen, [..., k] of a token each, apart from those of the largest values."""
    ours, theirs = (places.flatten(0, -2).long() for places in (chosen, right))
    sorted_ours, sorted_theirs = (places.sort(-1).values for places in (ours, theirs))
    wrong = torch.nonzero((sorted_ours != sorted_theirs).any(-1)).flatten().tolist()
    if not wrong:
        return "the same choice in another order"
    taken, largest = (" and ".join(map(str, places[wrong[0]].tolist())) for places in (ours, theirs))
    twice = int((sorted_ours[:, 1:] == sorted_ours[:, :-1]).any(-1).sum())
    of = f" in {len(wrong)} of {len(ours)} tokens" if len(ours) > 1 else ""
    said = f"another choice{of}: token {wrong[0]} takes {taken}, where {largest} belong"
    never = sorted({*theirs.flatten().tolist()} - {*ours.flatten().tolist()})
    lacks = [row for row in wrong if not {*theirs[row].tolist()}.isdisjoint(never)]
    if never and len(lacks) == len(wrong) >= _TOKENS_TELL:
        said = f"{' and '.join(map(str, never))} {'is' if len(never) == 1 else 'are'} never chosen; {said}"
    return f"{said}; {count(twice, 'token')} took one twice" if twice else said


def _facts(y: Tensor, x: Tensor, axes: tuple[str, ...], vectors: Vectors, inputs: Sequence[Tensor]) -> Iterator[str]:
    inherited = ~torch.isfinite(x) & ~torch.isfinite(y)
    if bool(inherited.any()):  # its inputs' own are no mistake of this op
        x, y = x.masked_fill(inherited, 0.0), y.masked_fill(inherited, 0.0)
    finite = torch.isfinite(y)
    passed_on = torch.isinf(x) & finite
    if bool(passed_on.any()):
        yield f"{int(passed_on.sum())} of {int(x.isinf().sum())} values that should be infinite are numbers"
        return
    if not bool(finite.all()):
        yield f"{int((~finite).sum())} of {y.numel()} values are NaN or Inf{_in_region(~finite, axes)}"
        right = finite & ((y - x).abs() <= _CLOSE * x.abs().amax())
        if bool(finite.any()):
            yield "the others are right" if bool((right == finite).all()) else "some of the others are wrong"
        return
    if not bool(y.any()):
        yield "all values are zero"
        return
    leaked = (x == 0) & (y != 0) & (float((x == 0).double().mean()) >= _ZEROS)
    others = y.masked_fill(leaked, 0.0)
    ratio = float((others * x).sum() / x.square().sum().clamp(min=1e-300))
    off, scaled = nmse(others, x), nmse(others, ratio * x)
    if bool(leaked.any()):
        most = float(y[leaked].abs().max())
        yield f"{int(leaked.sum())} of the {int((x == 0).sum())} values that should be 0 are not: up to {most:.2g}"
    little = min(_CLOSE, _LEFT * off)
    multiples = [*_multiples(others, x, axes, little)]
    # The ratio explains none of it, nor one of each row, as an approximate inverse root leaves.
    if scaled >= 0.5 * off and off < _CLOSE and not multiples and _of_each_value(others, x):
        how = "as if it, or what it is made of, was rounded or approximated"
        rounded = f" up to {math.sqrt(off):.0e} of it, {how}" if off else ""
        yield f"{'each of the others is ' * bool(leaked.any())}right{rounded}"
        return
    if _APPROACHED * off < scaled < little:
        yield from [*_multiples(others, x, axes, _LEFT * scaled)] or [_nearly_a_multiple(others, x)]
        return
    if scaled < little:
        every = "every other value" if leaked.any() else "every value"
        yield f"{every} is {told_apart(ratio, 1.0)[0]} times what it should be{_name_ratio(ratio, x)}"
        return
    difference = y - x
    if y.ndim >= 2 and len(y) > 2 and nmse(difference, difference.mean(0, keepdim=True).expand_as(difference)) < 1e-4:
        yield f"the same vector is added for every token, as a bias would be{_named_vector(difference[0], vectors)}"
    if dropped := _dropped(y, x, little):
        yield dropped
        return
    yield from multiples
    yield from _of_an_input(difference, x, inputs)
    if axes[-1:] == ("key",):
        yield from _of_exponentials(y, x)
    yield from _levels(y, x)
    yield from _places(difference, x, axes)
    if y.ndim >= 2 and off > _MOVED and nmse(y.flatten().sort().values, x.flatten().sort().values) < little:
        yield from _permutation(y, x, axes, little)
    yield from _size(y, x)


def _nearly_a_multiple(y: Tensor, x: Tensor) -> str:
    """Between which multiples of what they should be most values are, of the larger half."""
    size = x.abs()
    large = (size >= size.median()) & (size > 0)
    ratios = (y[large] / x[large]).sort().values
    ends = (float(ratios[int(share * (len(ratios) - 1))]) for share in (0.1, 0.9))
    least, most = (told_apart(ratio, 1.0)[0] if f"{ratio:.4g}" == "1" else f"{ratio:.4g}" for ratio in ends)
    return f"most values are {least if least == most else f'{least} to {most}'} times what they should be"


def _named_vector(added: Tensor, vectors: Vectors) -> str:
    """Which of the model's it is, be it taken away or a multiple; empty where it is none."""
    added = added.flatten()
    for name, values in vectors(added.numel()):
        given = values.to(added)
        # Of norms' weights, which are all about 1, the mean says nothing.
        deviations = given - given.mean()
        varies = float(deviations.square().sum()) > _VECTOR * float(given.square().sum())
        times = float((added * given).sum() / given.square().sum().clamp(min=1e-300))
        if varies and max(nmse(added - added.mean(), times * deviations), nmse(added, times * given)) < _VECTOR:
            if abs(abs(times) - 1) < math.sqrt(_VECTOR):
                return f": {name} {'besides' if times > 0 else 'is taken away'}"
            return f": {times:.3g} times {name}"
    return ""


def _of_each_value(y: Tensor, x: Tensor) -> bool:
    """Whether each value is off by alike shares of itself: rounding is, a few wrong ones among many are not."""
    shares = ((y - x).abs() / x.abs().clamp(min=1e-300))[x != 0]
    return bool(shares.numel()) and float(shares.max()) <= _ALIKE * float(shares.median())


def _in_region(mask: Tensor, axes: tuple[str, ...]) -> str:
    """Where in the op's axes they all are; empty where that is everywhere."""
    if bool(mask.all()):
        return ""
    regions = around(mask.cpu().numpy())
    return f", all in {regions[0].words(axes)}" if regions and len(axes) == mask.ndim else ""


def _dropped(y: Tensor, x: Tensor, little: float) -> str:
    """Values that are 0 here and there, and the others so much larger that the mean stays; empty where they are not."""
    there = x != 0
    kept, zeros, n = there & (y != 0), there & (y == 0), int(there.sum())
    share = int(zeros.sum()) / max(1, n)
    ratio = float((y[kept] * x[kept]).sum() / x[kept].square().sum().clamp(min=1e-300))
    p = 1 - 1 / ratio if ratio > 1 else 0.0
    by_chance = _DEVIATIONS * math.sqrt(p * (1 - p) / max(1, n))
    if not 0 < share < 1 or abs(share - p) > by_chance or nmse(y[kept], ratio * x[kept]) > little:
        return ""
    if n * p * (1 - p) < _DEVIATIONS**2 or _is_whole(zeros, there):  # of few values any share is by chance
        return ""
    return (
        f"{share:.3g} of the values are 0 and all others {ratio:.4g} times what they should be, as dropout of {p:.3g} "
        "leaves them (a torch model that is not in its eval mode has that)"
    )


def _is_whole(mask: Tensor, there: Tensor) -> bool:
    """Whether these are all that are there in some places of each axis, as in some channels, or keys of some heads."""
    box = torch.ones_like(mask)
    for axis in range(mask.ndim):
        others = [other for other in range(mask.ndim) if other != axis]
        box &= mask.any(dim=others, keepdim=True) if others else mask
    return bool((box & there == mask).all())


def _multiples(y: Tensor, x: Tensor, axes: tuple[str, ...], little: float) -> Iterator[str]:
    """Slices along an axis that are each a multiple of what they should be, to within a `little` NMSE."""
    for axis, name in enumerate(axes):
        a, b = (v.movedim(axis, 0).reshape(v.shape[axis], -1) for v in (x, y))
        if a.shape[1] < _MULTIPLES:
            continue
        ratios = (a * b).sum(1) / a.square().sum(1).clamp(min=1e-300)
        if nmse(b, ratios[:, None] * a) < little:
            zero = (b == 0).all(1) & (a != 0).any(1)
            if bool(zero.any()) and nmse(b[~zero], a[~zero]) < little:
                yield f"each {name} that is wrong is 0"
                return
            least, most = float(ratios.min()), float(ratios.max())
            digits = 4 if f"{least:.4g}" != f"{most:.4g}" else 7  # of norms with another eps: 1 to 1
            yield f"each {name} is a multiple of what it should be, {least:.{digits}g} to {most:.{digits}g} times"
            return


def _of_an_input(error: Tensor, x: Tensor, inputs: Sequence[Tensor]) -> Iterator[str]:
    """That an op of each value, or such a gate of a second one, errs alike where it reads alike: it is another
    function, an approximation, say.
    """
    if not 1 <= len(inputs) <= 2 or any(of.shape != x.shape for of in inputs):
        return
    read, *gated = (of.flatten() for of in inputs)
    error = error.flatten()
    if gated:
        told = gated[0].abs() >= gated[0].abs().median()
        read, error = read[told], error[told] / gated[0][told]
    if not _follows(error, read):
        return
    most, per = int(error.abs().argmax()), " for each 1 that it gates" * bool(gated)
    at = f"at most {float(error[most]):.2g}{per}, where {float(read[most]):.4g} is read"
    yield f"it is off by what follows from its input alone, as another function is, {at}"


def _of_exponentials(y: Tensor, x: Tensor) -> Iterator[str]:
    """That each probability, beside the largest of its query, errs alike where its score is as far below the largest:
    the exponentials are other ones.
    """
    largest, at = x.max(-1, keepdim=True)
    told = (x > _TINY_SHARE * largest) & (x < largest)
    below = (x / largest).log()[told]
    error = (y / x * largest / y.gather(-1, at) - 1)[told]
    if not _follows(error, below):
        return
    least, most = (f"{100 * float(of):+.2g}%" for of in (error.min(), error.max()))
    said = "beside the largest of its query each is off by what follows from its score alone"
    yield f"{said}, {least} to {most}: exp is approximated"


def _follows(error: Tensor, given: Tensor) -> bool:
    """Whether neighbours, in the order of what is given, err nearly alike, all together and wherever errors vary; of
    few values that is not known. (Where each token has a cutoff of its own, most err by what they read, and those near
    the cutoffs do not.)
    """
    if len(error) < _SORTED:
        return False
    ordered = error[given.argsort()]
    pieces = ordered.unfold(0, _SORTED, _SORTED // 2)
    varies = pieces.std(1) > _TOLD_APART * ordered.abs().max()
    return bool(_is_smooth(ordered)) and not bool((varies & ~_is_smooth(pieces)).any())


def _is_smooth(errors: Tensor) -> Tensor:
    """Of rows of errors, in the order of what they follow."""
    return errors.diff().square().mean(-1) <= _SMOOTH * 2 * errors.var(-1)


def _levels(y: Tensor, x: Tensor) -> Iterator[str]:
    """That values lie on evenly spaced levels, of each group in a row its own, which the right ones do not: an engine
    may have quantised weights in a way that is not known.
    """
    n = y.shape[-1]
    ours, right = (values.reshape(-1, n)[:_ROWS] for values in (y, x))
    for size in dict.fromkeys((n, *_GROUPS)):
        if size < min(_GROUPS) or n % size:
            continue
        levels = _n_levels(ours.reshape(-1, size))
        if levels and not _n_levels(right.reshape(-1, size)):
            group = f"row of {n}" if size == n else f"group of {size}"
            yield f"each {group} values has {levels} evenly spaced levels at most, as if it was quantised"
            return


def _n_levels(groups: Tensor) -> int:
    """The most levels, evenly spaced, that the values of a group lie on, [groups, values]; 0 where they do not."""
    ordered = groups.sort(-1).values
    gaps = ordered.diff()
    told = gaps > _APART * groups.abs().amax(-1, keepdim=True)
    least = gaps.masked_fill(~told, math.inf).amin(-1, keepdim=True)
    single = told & (gaps < 1.5 * least)  # steps, which half precision may have rounded: their mean
    steps = gaps.where(single, 0.0).sum(-1) / single.sum(-1)
    reach = ordered[:, -1] - ordered[:, 0]
    n = (reach / steps).round() + 1
    places = (ordered - ordered[:, :1]) / (reach / (n - 1))[:, None]
    on_levels = ((places - places.round()).abs() <= _NEAR_LEVEL).all(-1)
    held = on_levels & (n > 1) & (n <= _MOST_LEVELS)
    return int(n[held].max()) if float(held.double().mean()) >= _MOST_GROUPS else 0


def _size(y: Tensor, x: Tensor) -> Iterator[str]:
    """How large what is wrong is, and how alike to what is right."""
    wrong = (y - x).abs() > _WRONG * x.abs().amax()
    a, b = x[wrong], y[wrong]
    sizes = [float(v.square().mean().sqrt()) for v in (a, b)]
    if wrong.any() and all(sizes):
        cosine = float((a * b).mean()) / (sizes[0] * sizes[1])
        wrong_size, right_size = (f"{size:.4g}" for size in sizes[::-1])
        size = "as it should be" if wrong_size == right_size else f"{wrong_size} where it should be {right_size}"
        yield f"there the rms is {size}, and the correlation is {cosine:.2f}"


def _name_ratio(ratio: float, x: Tensor) -> str:
    """The usual suspects among constant factors."""
    n = x.shape[-1]
    if n == 1:  # all of these are 1
        return ""
    for name, value in (("sqrt(n)", math.sqrt(n)), ("n", n), ("1/sqrt(n)", n**-0.5), ("1/n", 1 / n)):
        if math.isclose(abs(ratio), value, rel_tol=1e-3):
            return f" ({name} of its {n} channels)"
    return ""


def _places(difference: Tensor, x: Tensor, axes: tuple[str, ...]) -> Iterator[str]:
    """Along which axes the error is confined."""
    size = difference.abs()
    wrong = size > _WRONG * x.abs().amax().clamp(min=1e-300)
    for axis, name in enumerate(axes):
        bad = torch.nonzero(wrong.movedim(axis, 0).reshape(x.shape[axis], -1).any(1)).flatten()
        if 0 < len(bad) < x.shape[axis]:
            yield f"wrong in {len(bad)} of {x.shape[axis]} {plural(name)}: {_ranges(bad.tolist())}"
    share = float(wrong.double().mean())
    if 0 < share < 1:
        yield f"{share:.1%} of the values are off by more than 1e-4 of the largest"


def _ranges(indices: list[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"; long lists are cut, and an even stride is named."""
    if len(indices) > 2 and len({b - a for a, b in pairwise(indices)}) == 1:
        step = indices[1] - indices[0]
        if step > 1:
            return f"every {nth(step)} from {indices[0]} to {indices[-1]}"
    return few([str(a) if a == b else f"{a}-{b}" for a, b in runs(indices)], 6)


def _permutation(y: Tensor, x: Tensor, axes: tuple[str, ...], little: float) -> Iterator[str]:
    """The same values elsewhere, to within a `little` NMSE: which axis was permuted, and how."""
    for axis, name in enumerate(axes):
        a = x.movedim(axis, 0).flatten(1)
        b = y.movedim(axis, 0).flatten(1)
        if len(a) > 4096:
            continue
        source = torch.cdist(b, a).argmin(1)
        if nmse(b, a[source]) < little:
            order = source.tolist()
            n = len(order)
            how = "reversed" if order == list(range(n))[::-1] else f"in the order {', '.join(map(str, order[:8]))}..."
            yield f"the right values with {plural(name)} {how}"
            return
    yield "the right values in another order"
