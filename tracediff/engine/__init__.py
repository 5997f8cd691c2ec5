"""Engines: each runs a model and hands every output to a `recorder`, which writes the trace.

`torch_engine` runs a graph (`torch_run`: from a file and tokens), `llama_cpp` and `transformers_run` have others run
it. Any torch model is a `record` in two lines: it is seen by `watching` it, of which `taps` say what is which op,
`matrices` what its modules multiply by, `attention` which matmuls are a layer's, and `lanes` which row is which token.
Between modules it is shown the torch `functions` that are called: sums make the `residual` stream, keys are `stored`.
What has no modules goes `stepwise`.
"""
