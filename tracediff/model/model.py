"""A model as a command has it: its file is opened once, and what is made of it is made once."""

from collections.abc import Iterable
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph
from tracediff.model.latent import expanded
from tracediff.model.tensors import FileTensors
from tracediff.model.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

    from tracediff.model.weights import Weights

_OF_SCORES = ("attn_scores", "attn_scores_scaled", ".scale")  # ends of the names of these and of scaled queries


class Model:
    """A GGUF file and all that is read of it; nothing is, before it is asked for.

    Raises ModelError when the file is missing, is not GGUF, or ends before what it announces.
    """

    def __init__(
        self, path: Path, shown: frozenset[str] = frozenset(), length: int = 0, is_expanded: bool = False
    ) -> None:
        self.path = path
        self.file = GGUFFile(path)
        self._shown, self._length, self._is_expanded = shown, length, is_expanded

    def __reduce__(self) -> "tuple[type[Model], tuple[Path, frozenset[str], int, bool]]":
        """In another process it is opened again."""
        return type(self), (self.path, self._shown, self._length, self._is_expanded)

    @classmethod
    def opened(cls, model: "str | Path | Model") -> "Model":
        """The model at a path, or the one that is open already."""
        return model if isinstance(model, Model) else cls(Path(model))

    @cached_property
    def graph(self) -> Graph:
        """Its ops; raises ModelError and EngineError as `build_graph` does."""
        return self._built.with_scores(self._shown).at_length(self._length)

    @cached_property
    def _built(self) -> Graph:
        graph = build_graph(self.file)
        return (expanded(graph) or graph) if self._is_expanded else graph

    def expanded(self) -> "Model | None":
        """The same with keys and values of each head; None where it has no latent attention, or has them."""
        if self._is_expanded or not (graph := expanded(self._built)):
            return None
        other = copy(self)
        other._is_expanded, other._built = True, graph
        other.show(())
        return other

    def show(self, ops: Iterable[str], length: int = 0) -> None:
        """Give the graph those of these ops that only some engines have: scores before and after they are scaled. And
        the rope of a context of so many positions.
        """
        self._shown |= {op for op in ops if op.endswith(_OF_SCORES)}
        self._length = max(self._length, length)
        self.graph = self._built.with_scores(self._shown).at_length(self._length)

    @cached_property
    def tensors(self) -> FileTensors:
        """The tensors as numpy arrays."""
        return FileTensors(self.file)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The texts of its tokens."""
        return Vocabulary(self.file)

    def weights(self, dtype: "torch.dtype | None" = None, device: str = "cpu", keep_bytes: int = 0) -> "Weights":
        """The tensors in one torch dtype, float64 unless another is given; `keep_bytes` of them stay dequantised."""
        import torch

        from tracediff.model.weights import Weights

        return Weights(self.file, dtype or torch.float64, device, keep_bytes)
