"""The kinds of ops, one module for each family of them. `KINDS` is the one table: add a kind to its family's module.

They are those of tracediff's hand-written graphs and of ggml, under ggml's names in lower case. The operands of an op's
function are its inputs, then its weights.
"""

from types import MappingProxyType

from tracediff.numerics.kinds import (
    activation,
    attention,
    compressed,
    elementwise,
    embedding,
    experts,
    hyper_connections,
    layout,
    linear,
    norm,
    positional,
    recurrent,
    reduction,
    rope,
)

_FAMILIES = (
    embedding, norm, linear, rope, attention, elementwise, activation, reduction, layout, experts, recurrent,
    hyper_connections, positional, compressed,
)  # fmt: skip
KINDS = MappingProxyType({kind.name: kind for family in _FAMILIES for kind in family.KINDS})
