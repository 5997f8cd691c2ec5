"""The mathematics of ops as the loops that engines write, and what runs them all at once.

`loops` are one op's; `kernels` has those of each kind, `recurrences` those with a state; `bound` are some with what
they read. A `program` is what can be told of loops before they run; `interpret` runs it on `arrays`, by `elementary`
functions, with reads along `lines` at once and the `turns` that must be taken one by one. `accesses` are where loops
read and store, `nodes` the places in them that an edit may change.
"""
