"""What is made a part of its tokens at a time: scores and probabilities of a long prompt, which the sum of values alone
reads. Whole, with their noise, they took 28 times their own size: 3.8 GB for 4 heads and 2,048 tokens.
"""

from collections.abc import Callable, Iterator
from math import ceil, prod

from tracediff.model.graph import Op
from tracediff.trace.format import Rows

_AT_ONCE = 1 << 20  # values: 8 MB, which processors' caches hold


def inside(op: Op, n_tokens: int, n_keys: int, made: Callable[[str], Op | None]) -> dict[str, int]:
    """How many values each has of what is made for the op of so many tokens, is too large to be there for all of them
    at once, and larger than what comes of it. `made` gives an op by name; None of what is there already.
    """
    if n_tokens == 1 or op.weights:
        return {}
    most, found, stack = max(_AT_ONCE, prod(op.shape(n_tokens, n_keys - n_tokens))), dict[str, int](), [op]
    while stack:
        for name, past in stack.pop().reads:
            read = None if past or name in found else made(name)
            if read and not read.weights and (size := prod(read.shape(n_tokens, n_keys - n_tokens))) > most:
                found[name] = size
                stack.append(read)
    return found


def parts(rows: Rows, n_tokens: int, largest: int) -> Iterator[tuple[int, ...]]:
    """The tokens of a step, or these of them, so many at a time that the largest value, of so many numbers for all of
    them, is there in part.
    """
    tokens = range(n_tokens) if rows is None else rows
    n = min(len(tokens), ceil(largest / _AT_ONCE))
    yield from (tuple(tokens[len(tokens) * i // n : len(tokens) * (i + 1) // n]) for i in range(n))


def there_at_once(n_values: int) -> int:
    """How many numbers of a value are there that is made by parts."""
    return min(n_values, _AT_ONCE)
