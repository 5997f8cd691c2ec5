"""Traces from and to the files of others: one module per format, and a common part that names and writes."""

from typing import Literal

Format = Literal[
    "npy", "npz", "safetensors", "llama-text", "table", "sglang", "logprobs", "vllm-hidden-states", "routed-experts",
    "debug-tree", "llama-logits",
]  # fmt: skip
