"""Token ids that differ: where, and what tokenisers do to make them so."""

from collections.abc import Callable, Iterator

from tracediff.model.vocabulary import Vocabulary

_Ids = tuple[int, ...]
_SHOWN = 2, 4  # ids before and after the first that differs

# A wrong engine that decodes freely soon chooses another token; what it did until then needs no reference.
_CHOSEN = (
    "Did it choose them itself after step {}? Then something is wrong before: `tracediff check {} --model MODEL` "
    "judges all its steps without the reference."
)


def describe_difference(step: int, a: _Ids, b: _Ids, names: tuple[str, str], vocabulary: Vocabulary) -> Iterator[str]:
    """Lines on the ids `a` of the reference and `b` of the candidate in one step, and why they may differ."""
    at = _first(a, b)
    yield f"the token ids differ in step {step}, first at index {at}: all later values differ for that reason."
    for name, ids in zip(names, (a, b), strict=True):
        yield f"  {name}: {len(ids)} tokens, {_excerpt(ids, at, vocabulary)}"
    why = next((said for explain in EXPLANATIONS for said in explain(a, b, vocabulary)), None)
    yield f"{f'{why} ' if why else ''}Feed the candidate the reference's ids." + (
        f" {_CHOSEN.format(step - 1, names[1])}" if step else ""
    )


def _first(a: _Ids, b: _Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _excerpt(ids: _Ids, at: int, vocabulary: Vocabulary) -> str:
    first, end = max(0, at - _SHOWN[0]), at + _SHOWN[1]
    said = ", ".join(_named(token, vocabulary) for token in ids[first:end])
    return f"{'...' * (first > 0)}{said}{'...' * (end < len(ids))}"


def _named(token: int, vocabulary: Vocabulary) -> str:
    """The id, and its text where the vocabulary is known."""
    if not vocabulary:
        return str(token)
    return f"{token} {vocabulary.spelled(token) if vocabulary.is_special(token) else repr(vocabulary.decode([token]))}"


# --- what may have happened; each yields a sentence or nothing ----------------------------------------------------


def _each_side(a: _Ids, b: _Ids) -> Iterator[tuple[str, _Ids, _Ids]]:
    """Which side may be wrong, what the other was fed and what it was."""
    yield "candidate", a, b
    yield "reference", b, a


def _leading_space(a: _Ids, b: _Ids, vocabulary: Vocabulary) -> Iterator[str]:
    """Byte-level BPE marks a space by U+0120, SentencePiece by U+2581, and adds one in front of a text."""
    at = _first(a, b)
    for name, x, y in _each_side(a, b):
        pieces = [(vocabulary.decode(x[at : at + 1]), vocabulary.decode(y[at : at + 1]))]
        pieces += [(vocabulary.decode(x[at:]), vocabulary.decode(y[at:]))]
        if any(longer and shorter and longer == f" {shorter}" for shorter, longer in pieces):
            yield f"The {name} has a space in front that the other side has not: 'a' and ' a' are different tokens."


def _begin(a: _Ids, b: _Ids, vocabulary: Vocabulary) -> Iterator[str]:
    bos = vocabulary.special("bos")
    if a[1:] == b and bos in (None, a[0]):
        yield f"The candidate lacks the reference's first token {a[0]}: a BOS that was not added?"
    if b[1:] == a and bos in (None, b[0]):
        said = "a BOS added where none belongs, or doubled?"
        if bos is not None:
            said = "the BOS, doubled." if a[:1] == b[:1] else "a BOS added where none belongs."
        yield f"The candidate has one more token in front, {b[0]}: {said}"
    elif b[1:] == a and a[:1] == b[:1]:
        yield f"The candidate was fed its first token, {b[0]}, twice."


def _end(a: _Ids, b: _Ids, vocabulary: Vocabulary) -> Iterator[str]:
    eos = vocabulary.special("eos")
    for name, x, y in _each_side(a, b):
        if y[:-1] == x and y[-1] != vocabulary.special("padding") and eos in (None, y[-1]):
            sure = "the EOS" if eos is not None else "an EOS, or padding"
            yield f"The {name} has one more token at the end, {y[-1]}: {sure}? A prompt to be continued has none."


def _padding(a: _Ids, b: _Ids, vocabulary: Vocabulary) -> Iterator[str]:
    pad = vocabulary.special("padding")
    for name, x, y in _each_side(a, b):
        n = len(y) - len(x)
        for where, added, rest in (("left", y[:n], y[n:]), ("right", y[len(x) :], y[: len(x)])):
            if n > 0 and rest == x and len({*added}) == 1 and (n > 1 or added[0] == pad):
                yield (
                    f"The {name} is padded on the {where} with {n} times {added[0]}: record the prompt without, "
                    "for positions and the mask count every token."
                )


def _truncated(a: _Ids, b: _Ids, vocabulary: Vocabulary) -> Iterator[str]:
    for name, x, y in _each_side(a, b):
        n = len(x) - len(y)
        if n <= 0 or not y:
            continue
        last = x[:-n] == y
        if not last and not (x[n:] == y or (x[:1] == y[:1] and x[n + 1 :] == y[1:] and len(y) > 1)):
            continue
        where, side, small = ("the last", "right", "context or batch") if last else ("at the front", "left", "context")
        if name == "candidate":
            yield (
                f"The candidate lacks {n} of {len(x)} tokens, {where}: its prompt was truncated on the {side}. Is its "
                f"{small} too small?"
            )
        else:  # the candidate is what is asked about first
            yield (
                f"The candidate was fed {n} more than the reference's {len(y)} tokens, {where}. Or was the reference's "
                f"prompt truncated on the {side}: is its {small} too small?"
            )


def _split_special(a: _Ids, b: _Ids, vocabulary: Vocabulary) -> Iterator[str]:
    """<|im_start|> read as text: "<", "|", "im", ..."""
    at = _first(a, b)
    for name, x, y in _each_side(a, b):
        if at >= len(x) or not vocabulary or not vocabulary.is_special(x[at]):
            continue
        text = vocabulary.spelled(x[at]) or ""
        for end in range(at + 2, min(len(y), at + 1 + len(text.encode())) + 1):  # and a space in front
            if vocabulary.decode(y[at:end]).lstrip(" ") == text:
                yield (
                    f"The {name} reads the special token {text} ({x[at]}) as text, in {end - at} pieces: "
                    "tokenise with special tokens parsed."
                )
                return


# In this order: what a text proves comes before what numbers suggest.
EXPLANATIONS: tuple[Callable[[_Ids, _Ids, Vocabulary], Iterator[str]], ...] = (
    _split_special, _leading_space, _begin, _end, _padding, _truncated,
)  # fmt: skip
