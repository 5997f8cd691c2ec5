"""Sizes of groups that share a scale."""

_LEAST = 8  # values that share one


def group_sizes(n_in: int) -> list[int]:
    """How many values of a row of n_in may share a scale, the most first."""
    return [size for size in range(n_in, _LEAST - 1, -1) if n_in % size == 0]
