"""Local error: every op of a trace recomputed in float64 from that trace's own recorded inputs.

`recorded` is what a trace holds, `segments` what must be recomputed besides, and `recompute` does that, `making` each
op with its noise, in which roundings are `turning`, and what is too large `by_parts` of the tokens. A `look` is what
is left of a record under one arithmetic (`residual`), and `score` weighs looks against one another. `fitting` finds
the arithmetic of each sort of record, `composing` one that is not listed, of which `terms` of a sum refute most ways
to hold matrices, `calibrating` the scales of caches and activations, what matmuls multiplied being told by their
`operands`, and the `plan` holds them once `planning` has made it; `replay` judges a record by it, `judging` all of
them, `workers` in several processes or on a `cluster`, `starting` while files are opened, by `tasks`, within the
`memory` that is said. Hypotheses are looked at in a `few` tokens first. `past` values are those of a cache; `storage`
is what values were rounded to, `strips` are where an output is off, `choices` those of experts, `ties` those that
were not recorded, `misshapen` the records that are left out, `late` the sequences of which the trace lacks what was
cached before, and `coverage` says what could not be judged.
"""
