"""The model: what the GGUF file says, the op graph that follows from it, and its weights."""
