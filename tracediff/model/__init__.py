"""The model: what the GGUF file says, the op graph that follows from it, and its weights.

`gguf_file` reads the header, `hparams` what its metadata say. `families` has the `graph`s of the usual architectures,
made with a `builder`; any other is `lift`ed from llama.cpp's own, and has two forms where its attention is `latent`.
`tensors` gives the file's values as numpy arrays, `weights` as those of torch, both by `dequantise`; what bytes of a
block mean, for who reads them otherwise, is in `block_fields`. A `model` is all of that, opened once, with its
`vocabulary`. A `checkpoint` is what a file was made from, by a `conversion` after which heads may have another
`pairing`; `synthetic` ones are made here.
"""
