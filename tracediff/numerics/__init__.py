"""What each kind of op computes, how engines round it, and how far honest arithmetic can be from exact.

`evaluate` computes one op of a graph by its entry in `kinds/`, with the roundings that an `arithmetic` names
(`roundings`: to shorter `floats`, ggml's `blocks`, or `groups` of integers; `schemes` are those that engines have;
`recognise` tells one by what it made), and says its noise: by a formula of its kind (`floors`), or by `running` error
analysis of its mathematics (`error_rules`). `views` are how it sees its inputs, `growing` rows and `buffers` where they
lie, `exponentials` how engines approximate them; `nmse` is how far two tensors are apart, and `sizes` are
those of groups.
"""
