"""What `tracediff demo` shows: a small model as loud as a real one, with a mistake planted in one engine."""

from pathlib import Path

from tracediff.model.synthetic import DEMO, write_model

PROMPT = "The quick brown fox jumps over the lazy dog, and the engine answers the same word again."
FAULT = "rope_pairing"


def make_model(folder: Path) -> Path:
    """A qwen2 model of 8 layers: final-norm weights from -0.011 to 16.75, a massive activation, large K biases."""
    return write_model(folder / "demo.gguf", DEMO, "F16")
