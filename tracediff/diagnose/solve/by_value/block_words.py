"""Rules by which blocks are read, in words: expressions of an engine's code beside those that belong there."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from tracediff.diagnose.solve.by_value.block_layout import Layout, Part, Sums
from tracediff.english import ranges

_TOLD = 4  # places that are told one by one
_GROUPS = 4  # of parts that are wrong alike: more are counted
_Run = tuple[int, int, int, int]  # a byte, the first of its bits, how many, and the bit of the number that this becomes


def of_sums(what: str, made: Sums, right: Sums, layout: Layout) -> Iterator[str]:
    """As in "the scale of sub-blocks p = 4 to 7 is scales[p + 4] & 15 where ... belongs"."""
    groups: dict[tuple[str, str], list[int]] = {}
    for p, (ours, theirs) in enumerate(zip(made, right, strict=True)):
        if ours != theirs:
            groups.setdefault((_sum(ours, layout, p), _sum(theirs, layout, p)), []).append(p)
    for parts in list(groups.values())[:_GROUPS]:
        p, one = parts[0], len(parts) == 1
        is_, belongs = (_sum(of[p], layout, None if one else p) for of in (made, right))
        those = f"sub-block {p}" if one else f"sub-blocks p = {ranges(parts)}"
        yield f"the {what} of {those} is {is_} where {belongs} belongs"
    if (more := len(groups) - _GROUPS) > 0:
        yield f"and so on, in {more} more ways"


def _sum(part: Part, layout: Layout, p: int | None = None) -> str:
    """As in "(scales[p + 4] & 15) | ((scales[p - 4] >> 6) << 4)"; of one part with the bytes' own numbers."""
    runs, others, signed = list[_Run](), list[tuple[int, int]](), set[int]()
    for bit, by in part:
        byte, first, up = bit // 8, bit % 8, abs(by).bit_length() - 1
        last = runs[-1] if runs else None
        if by == -128 and last == (byte, 0, 7, 0):  # a byte that is read as int8
            runs[-1] = (byte, 0, 8, 0)
            signed.add(byte)
        elif bit < 0 or by != 1 << max(up, 0):
            others.append((bit, by))
        elif last and last[0] == byte and last[1] + last[2] == first and last[3] + last[2] == up:
            runs[-1] = (*last[:2], last[2] + 1, last[3])
        else:
            runs.append((byte, first, 1, up))
    runs.sort(key=lambda run: run[3])
    said = [_term(run, layout, p, is_signed=run[0] in signed and run[2] == 8) for run in runs]
    said += [f"{by} * ({_term((bit // 8, bit % 8, 1, 0), layout, p)})" if bit >= 0 else str(by) for bit, by in others]
    if len(said) < 2:
        return said[0] if said else "0"
    apart = not others and not signed and len({by for _, by in part}) == len(part)
    return (" | " if apart else " + ").join(f"({one})" if " >> " in one or " & " in one else one for one in said)


def _term(run: _Run, layout: Layout, p: int | None, is_signed: bool = False) -> str:
    """Bits of a byte, where they come to lie: "scales[3]", "scales[3] >> 6", "(scales[8] & 15) << 1"."""
    byte, first, n, up = run
    at = byte - layout.first - (p or 0)
    place = str(at) if p is None else f"p {'-' if at < 0 else '+'} {abs(at)}" if at else "p"
    text = f"{'(int8) ' * is_signed}{layout.name}[{place}]"
    text += f" >> {first}" * bool(first) + f" & {(1 << n) - 1}" * (first + n < 8)
    if not up:
        return text
    return f"({text}) << {up}" if first or first + n < 8 else f"{text} << {up}"


def of_order(taken: Sequence[int], first: Sequence[int], n_bits: int, name: str) -> str:
    """As in "value j is made of nibble j % 2 of qs[j / 2] where nibble j / 32 % 2 of qs[...] belongs"; `first` are the
    lowest bits of each value, of `n_bits`, in bytes that ggml calls so.
    """
    begin = min(first) // 8
    right = np.array(first) - 8 * begin
    ours, theirs = (_place(bits, n_bits, name) for bits in (right[list(taken)], right))
    what = {4: " (nibble 0 is the low one)", 2: " (pair 0 is the lowest)"}.get(n_bits, "")
    return f"value j is made of {ours} where {theirs} belongs{what}"


def _place(bits: np.ndarray, n_bits: int, name: str) -> str:
    byte = f"{name}[{expression(bits // 8)}]"
    noun = {1: "bit", 2: "pair of bits", 4: "nibble"}.get(n_bits)
    return f"{noun} {expression(bits % 8 // n_bits)} of {byte}" if noun else byte


def expression(numbers: np.ndarray) -> str:
    """Numbers of j = 0, 1, ... whose bits are bits of j, as an expression in j: "j / 64 * 32 + j % 32"."""
    j, terms, constant = np.arange(len(numbers)), list[list[int]](), 0
    width = (len(j) - 1).bit_length()
    for k in range(int(numbers.max()).bit_length()):
        bit = numbers >> k & 1
        if bit.all():
            constant += 1 << k
        if bit.all() or not bit.any():
            continue
        of_j = ((m, sign) for sign in (1, -1) for m in range(width) if ((j >> m & 1 ^ bit) == (sign < 0)).all())
        m, sign = next(of_j, (-1, 0))
        if not sign:
            return "?"
        last = terms[-1] if terms else None
        if last and last[3] == sign == 1 and (last[0] + last[1], last[2] + last[1]) == (m, k):
            last[1] += 1
        else:
            terms.append([m, 1, k, sign])
    said = [_of_run(width, *term) for term in reversed(terms)]
    return " + ".join([*said, *[str(constant)] * bool(constant)]) or "0"


def _of_run(width: int, m: int, n: int, k: int, sign: int) -> str:
    """Bits m to m + n - 1 of j, which has so many, at bit k of a number."""
    text = f"j / {1 << m}" if m else "j"
    if m + n < width:
        text = f"{text} % {1 << n}"
    if sign < 0:
        text = f"(1 - {text})"
    return f"{text} * {1 << k}" if k else text


def of_values(integer: str, times: Sequence[float], more: Sequence[float]) -> str:
    """As in "q - 8 of values 24 to 31 is 0"."""
    groups: dict[tuple[float, float], list[int]] = {}
    for j, of in enumerate(zip(times, more, strict=True)):
        if of != (1.0, 0.0):
            groups.setdefault(of, []).append(j)
    said = [_of_some(integer, *of, places) for of, places in list(groups.items())[:_GROUPS]]
    return "; ".join([*said, *[f"others in {len(groups) - _GROUPS} more ways"] * (len(groups) > _GROUPS)])


def _of_some(integer: str, times: float, more: float, places: list[int]) -> str:
    of = f"{integer} of value{'s' * (len(places) > 1)} {_listed(places)} is"
    if not times:
        return f"{of} {more:g}"
    said = [f"{times:g} times what belongs"] * (times != 1)
    said += [f"{'larger' if more > 0 else 'smaller'} by {abs(more):g}"] * bool(more)
    return f"{of} {' and '.join(said)}"


def _listed(places: list[int]) -> str:
    """As in "0 to 15", and "0, 4, ... and 252"."""
    steps = {b - a for a, b in pairwise(places)}
    if len(steps) == 1 and len(places) > _TOLD and steps != {1}:
        return f"{places[0]}, {places[1]}, ... and {places[-1]}"
    return ranges(places)
