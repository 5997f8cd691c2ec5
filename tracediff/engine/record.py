"""Any torch model's forward passes as a trace, in two lines.

with tracediff.record(model, "mine.trace", gguf="model.gguf", tokens=ids):
    model(ids)
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracediff.engine.functions import Functions
from tracediff.engine.matrices import multiplied_by, norm_as_held
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.taps import Tap, find_taps
from tracediff.engine.watching import Watch
from tracediff.errors import EngineError
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.names import NORMS, Capture, local_name
from tracediff.trace.staging import staged
from tracediff.trace.writer import TraceWriter


@contextmanager
def record(
    model: nn.Module,
    out: str | Path,
    *,
    gguf: str | Path,
    tokens: Sequence[int] | Tensor | None = None,
    capture: Capture = "all",
    context: int | None = None,
    weights: bool = False,
) -> Iterator[None]:
    """Write a trace of what `model` computes in this block: each call of it is a step.

    `gguf` is the file of the same model; `tokens` are the ids of all passes in order, where the calls do not show them
    (their first integer tensor, [T] or [1, T]). With `tokens`, passes over others are left out: an engine's warm-up.
    `capture` is "all", "layers" for hidden states alone, "stats" or "sketch".
    `context` is for how many positions the model was set up, where that is more than it is fed: rope of some models has
    other factors then.
    `weights`: the matrices too, as modules multiply by them. A model in any quantisation is judged by these then; they
    are as large as the model in the type that it computes in.
    What the model shows nowhere, and modules that hold other weights than the file, are said as warnings.

    Each row of a batch is a sequence of its own, and so is what begins at position 0 in a packed row; padding, which an
    `attention_mask` of two dimensions hides, is left out.

    Raises EngineError where nothing of the model is recognised, for a compiled one or a pass that does not go on where
    the last ended; TraceError and ModelError for the files.
    """
    file = Model(Path(gguf))
    expected = None if tokens is None else [int(token) for token in torch.as_tensor(tokens).flatten()]
    engine = f"torch {torch.__version__} {type(model).__name__}"
    with (
        staged(Path(out), [file.path]) as path,
        recorded(model, path, file, engine, capture, expected, context=context, weights=weights) as notes,
    ):
        yield
    for note in notes:
        warnings.warn(note, stacklevel=3)


@contextmanager
def recorded(
    model: nn.Module,
    out: Path,
    gguf: Model,
    engine: str,
    capture: Capture,
    expected: list[int] | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    context: int | None = None,
    weights: bool = False,
) -> Iterator[list[str]]:
    """`record` into the very file `out`; what a reader must know is in the list when the block has ended."""
    _refuse_compiled(model)
    graph, of_file, notes = gguf.graph, gguf.weights(torch.float32), list[str]()
    found = find_taps(model, graph, of_file)
    taps, others = found.taps, found.notes
    if not taps:
        raise EngineError(
            f"{type(model).__name__}: no module of it holds a weight of {gguf.path}. Give the file of this very model, "
            "and the module that holds its layers."
        )
    modules = dict(model.named_modules())
    with TraceWriter(out, engine, graph.hparams.arch, gguf.path.name, graph.matmul_type, context) as writer:
        recorder = TensorWriter(writer, capture)
        for tap in taps:
            if tap.op.kind in NORMS:
                recorder.weight(tap.op.weights[0].name, norm_as_held(modules[tap.path], tap.op, of_file))
        unseen = _record_matrices(taps, modules, recorder) if weights else []
        watch = Watch(graph, found, recorder, progress)
        calls = _Calls(watch, expected)
        with calls.of(model), watch.hooked(modules), Functions(watch):
            yield notes
        if not watch.seen:
            raise EngineError(f"nothing was recorded: {calls.why_none()}")
        notes += [*others, *unseen, *calls.notes(), *_of_first_calls(watch), *_of_another_end(watch)]
        notes += _left_out(graph, watch) if capture != "layers" else ()


def _record_matrices(taps: Sequence[Tap], modules: Mapping[str, nn.Module], recorder: TensorWriter) -> list[str]:
    """Those of linear modules, rows in the file's order; returns what a reader must know: which cannot be seen."""
    linear, unseen = [tap for tap in taps if tap.op.kind == "linear"], []
    for path in dict.fromkeys(tap.path for tap in linear):
        matrix = multiplied_by(modules[path])
        for weight, rows in ((tap.op.weights[0], tap.rows) for tap in linear if tap.path == path):
            if matrix is None:
                unseen.append(local_name(weight.name))
            else:
                lying = matrix[: weight.shape[0]] if rows is None else matrix.index_select(0, rows.to(matrix.device))
                recorder.weight(weight.name, lying)
    names = ", ".join(dict.fromkeys(unseen))
    return [f"weights left out, for their modules multiply rows by no one matrix: {names}"] * bool(names)


def _of_first_calls(watch: Watch) -> list[str]:
    names = ", ".join(dict.fromkeys(local_name(name) for name in sorted(watch.again)))
    return [f"modules that ran more than once in a pass, of which the first call is recorded: {names}"] * bool(names)


def _of_another_end(watch: Watch) -> list[str]:
    return [f"the model returns other logits than {watch.otherwise} puts out: those returned are recorded"] * bool(
        watch.otherwise
    )


def _left_out(graph: Graph, watch: Watch) -> list[str]:
    missing = dict.fromkeys(local_name(op.name) for op in graph if op.name not in watch.seen and op.kind != "state")
    return [f"left out, for the model shows it nowhere: {', '.join(missing)}"] if missing else []


def _n_rows(given: Sequence[Any]) -> int | None:
    """How many tokens a model is called with in the place of ids, by values [sequences, tokens, channels] or
    [tokens, channels]; None where it shows neither.
    """
    shapes = [x.shape for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    return next((shape[-2] for n in (3, 2) for shape in shapes if len(shape) == n), None)


class _Calls:
    """What begins a step: a call of the model."""

    def __init__(self, watch: Watch, expected: list[int] | None) -> None:
        self._watch = watch
        self._expected = expected
        self._other = 0
        self._so_far: list[int] = []

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Told of every call of the model."""
        with (
            model.register_forward_pre_hook(self._entered, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._left, always_call=True),
        ):
            yield

    def _entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tokens and positions from the call, or from those that are expected next."""
        given = [*args, *kwargs.values()]
        ids = next((x for x in given if isinstance(x, Tensor) and not x.is_floating_point() and x.ndim in (1, 2)), None)
        ids = kwargs.get("input_ids", ids)
        if ids is not None:
            rows = ids.detach().cpu().reshape(-1, ids.shape[-1])
        elif self._expected:  # as many of those that are left as the pass has rows
            rows = torch.tensor([self._expected[: _n_rows(given)]])
        else:
            raise EngineError("the call shows no token ids. Give them: record(..., tokens=ids).")
        kept = _not_padding(kwargs.get("attention_mask"), rows)
        tokens = [int(token) for token in rows[kept]]
        if self._expected is not None:
            if tokens != self._expected[: len(tokens)]:
                self._other += 1
                self._watch.end()
                return
            self._expected = self._expected[len(tokens) :]
        n = len(self._so_far)
        if n > 1 and len(tokens) > n and tokens[:n] == self._so_far:
            raise EngineError(
                f"a call begins with all {n} tokens of the calls before: without a cache each call is a sequence of "
                "its own. Record one call, or use the cache."
            )
        self._so_far += tokens
        positions = kwargs.get("position_ids", kwargs.get("positions"))
        self._watch.begin(
            rows, kept, None if positions is None else positions.detach().cpu().reshape(-1, rows.shape[1])
        )

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._watch.result(output)
        self._watch.end()

    def notes(self) -> list[str]:
        """Passes that were left out."""
        return [f"passes over other tokens than those given, left out: {self._other}"] * (self._other > 0)

    def why_none(self) -> str:
        """Why no pass was recorded, and what to do."""
        if self._other:
            return f"calls of this module were over other tokens than those of tokens= ({self._other})."
        return (
            "no call of this module was seen. Call it as model(ids), not by .forward(), and the module that was given "
            "to record()."
        )


def _not_padding(mask: Any, rows: Tensor) -> Tensor:
    """Which tokens [rows, columns] an attention mask [rows, keys], as transformers has it, does not hide."""
    if not isinstance(mask, Tensor) or mask.shape[:1] != rows.shape[:1] or mask.ndim != 2:
        return torch.ones_like(rows, dtype=torch.bool)
    return mask[:, -rows.shape[1] :].detach().cpu() != 0


def _refuse_compiled(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise EngineError(
                f"{path or type(model).__name__} is compiled: its ops are fused where no hook sees them. Record the "
                "model before torch.compile, or what it wraps (`model._orig_mod`)."
            )
