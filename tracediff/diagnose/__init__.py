"""Causes: known mistakes as small changes to a graph, which plant faults and explain them alike.

`judged` has the records of traces judged by replay, and those that are faulty explained. `misnamed` asks first whether
values stand under each other's names; then `explain` takes records of one kind together, and `kin` searches among
`trials` of every `hypothesis`: of `mistakes/`, or of what `solve/` finds. `evidence` shows an explanation by numbers,
`error_shape` describes an error that has none. Of several `ranks` it is first asked what went wrong `between` them.
`planting` makes the mistakes in an engine of ours.
"""
