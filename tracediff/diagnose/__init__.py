"""Causes: known mistakes as small changes to a graph, which plant faults and explain them alike.

`judged` has the records of traces judged by replay, and those that are faulty explained; `beforehand` it is asked
whether a known mistake explains what no usual arithmetic does, so that no other is sought. Where weights are wrong in
memory `held` judges what was made with these once more; values that are `cut_off` are named as that; `misnamed` asks
whether values stand under each other's names, `undone` whether what follows mistaken ops is right without them, and
what read an `overwritten` record is not judged. Then `explain` takes records of one `kin` together: `search` looks
for what explains one of them, within a `budget`, among `trials` of known `mistakes/` and what `solve/` finds, and
each such `hypothesis` is asked of the others, `carrying` it over to their ops. `evidence` shows an explanation by
numbers, `error_shape` and `low_rank` describe an error that has none. Other `rows` that an op read are told by what
came of them. Of several `ranks` it is first asked what went wrong `between` them. `planting` makes the mistakes in an
engine of ours; `rearranged` are ops that are right, of other inputs or elsewhere.
"""
