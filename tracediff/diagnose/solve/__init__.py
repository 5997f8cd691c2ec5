"""Solves for a mistake: at a faulty op all is known but what the engine computed instead.

`solver` poses a record's `problem`, and `search` tries on it what may have been computed: `edits/` of the op's
`loops/`, each given a `look` before it is run in whole, and right values in other places or through another function,
which are found `by_value/`; `pairs` are two edits at once. `words/` say what was found. Of an op that was not recorded,
`segments` does the same at the end of a `segment`. An `edit` can be made an op of the graph; `grammar` finds one by a
report's words.
"""
