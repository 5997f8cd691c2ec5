"""The llama.cpp engine. It runs in a child process: `python -m tracediff_reference`, a request on stdin.

`child` starts it, in the words of the `protocol`. There `engine` runs the model; its `observer` is called with each
node of ggml's graph, asks which op that is (`recognise`), and writes the values, put together of `pieces`.
`capture` runs nothing: it makes the `description` that graphs are lifted from.
"""
