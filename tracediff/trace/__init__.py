"""The trace: the only thing that engines share. A text file of JSON lines and a binary file beside it.

`format` has the records. A `writer` appends them, `staging` keeps them apart until all are there; `reading` checks the
lines, and a `reader` has them by step and op, their values in `data`. `runs` open what belongs together: `ranks` that
hold `shards` of a value, `sequences` of a batch, and two `ways` over the same tokens. A trace may be cut into other
steps (`restep`) or to a few records (`reduce`); a value to `statistics` or a `sketch`. `shapes` that differ are said,
and values that were `misread`.
"""
