"""Edits of an op's loops: hypotheses that are generated, each priced by what it takes to say it.

`formulas` are edits of the loops themselves, at `one_place` or at `several_places`; the others are of what the loops
have besides: other `inputs` or `tensors`, `numbers` fitted, `terms` and `lanes` of a sum, `overlaps` of buffers, and
`copies`, where nothing is computed.
"""
