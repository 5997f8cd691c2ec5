"""The model: what the GGUF file says, the op graph that follows from it, and the mathematics of each op."""
