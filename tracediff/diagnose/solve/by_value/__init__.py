"""What is found by value: right values, or numbers of the file, in other places or through another function.

Of the output (`outputs`), of an input (`operands`, `channels`, `caches` that overlap) or of a weight (`misread`; its
quantised `blocks`, by their `block_layout`, which `block_words` say, or by an edit of `block_kernels`; what their
`minima` are multiplied by), by `maps` of slices along an axis, or by `groups` of query heads; `functions` of right
values, what a norm `squares`, and the rates of rope's `rotations`. `readings` of a weight, `parts` of an op and their
`regions` are how what was found is made an op again.
"""
