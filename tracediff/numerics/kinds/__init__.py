"""The kinds of ops, one module for each family of them. `KINDS` is the one table: add a kind to its family's module."""

from tracediff.numerics.kinds import attention, elementwise, embedding, linear, norm, rope

KINDS = {kind.name: kind for family in (embedding, norm, linear, rope, attention, elementwise) for kind in family.KINDS}
