"""The tensors of a file against what an engine holds of them, or against the checkpoint they were made from."""
