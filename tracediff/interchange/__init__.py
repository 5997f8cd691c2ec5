"""Traces from and to the files of others: one module per format, and a common part that names and writes.

A format's module yields each `entry` of a file. `importer` has them named (`naming`; by their values with a reference,
`recognised` by `matching` and by `following` the model), dealt out to `steps`, brought into our layouts at the
`border`, and written (`writing`). `export` is the way back.
"""

from typing import Literal

Format = Literal[
    "npy", "npz", "safetensors", "llama-text", "table", "sglang", "logprobs", "vllm-hidden-states", "routed-experts",
    "debug-tree", "llama-logits",
]  # fmt: skip
