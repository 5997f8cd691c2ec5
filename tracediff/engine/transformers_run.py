"""One trace by Hugging Face transformers: from a GGUF file, or a model folder of its own, and tokens to a trace."""

import inspect
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tracediff.engine.record import recorded
from tracediff.engine.recorder import DTYPES
from tracediff.engine.torch_engine import StepInput
from tracediff.engine.torch_run import TorchOptions, check_length, greedy, length_of, passes
from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.model.weights import check_device
from tracediff.trace.format import Step

_INSTALL = 'Install it with: pip install "tracediff[transformers]".'
_OWN_FOLDER = " Give its own folder with --hf."


def trace_transformers(
    model: Path | Model,
    out: Path,
    options: TorchOptions,
    tokens: Sequence[int],
    n_decode: int = 0,
    hf: Path | None = None,
    steps: Sequence[Step] = (),
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[str]:
    """Write a trace of the prompt, or of `steps`, and `n_decode` greedy steps; returns what a reader must know.

    The weights are those of `model` as transformers' own GGUF loader reads them, or of the model folder `hf`.
    Raises EngineError where transformers is missing, cannot load the model, or another model is in the folder.
    """
    if options.faults or options.arithmetic:
        raise EngineError("--fault and --arithmetic are for the torch engine: transformers computes as it does.")
    check_device(options.device)
    model = Model.opened(model)
    loaded, ignored = load(model.path, hf, DTYPES[options.dtype], options.device)
    notes = [f"transformers ignores {_some(ignored)} of {hf or model.path}"] if ignored else []
    return notes + trace_model(loaded, model, out, options, tokens, n_decode, progress, steps=steps)


def trace_model(
    loaded: Any,
    model: Path | Model,
    out: Path,
    options: TorchOptions,
    tokens: Sequence[int],
    n_decode: int = 0,
    progress: Callable[[float], None] = lambda fraction: None,
    attention: str = "eager",
    steps: Sequence[Step] = (),
    weights: bool = False,
) -> list[str]:
    """The same for a transformers model that is loaded already, of the GGUF file `model`, in any of its attentions; its
    matrices are recorded too, where `weights` are wanted.
    """
    model = Model.opened(model)
    check_length(length_of([*steps] or passes([tokens]), n_decode), n_decode, model.graph.hparams.n_ctx)
    name = f"transformers {_transformers().__version__} {type(loaded).__name__} ({options.dtype}, {options.device})"
    loaded.set_attn_implementation(attention)
    decoder = Decoder(loaded)
    with (
        recorded(loaded, out, model, name, options.capture, progress=progress, weights=weights) as notes,
        _double(loaded) if options.dtype == "f64" else nullcontext(),
    ):
        for _, given in greedy(decoder, tokens, n_decode, steps):
            decoder.run(given)
    return notes


class Decoder:
    """Forward passes of one sequence, or of several as a batch padded on the left; the cache is transformers' own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        known = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in known else "cache_params"  # of state space models
        self._mask = torch.empty(0, 0, dtype=torch.int64)  # of a batch: which columns of each row are no padding
        self.logits = torch.empty(0)

    @torch.inference_mode()
    def run(self, given: StepInput) -> None:
        """One pass: its logits are kept."""
        batch = {} if given.sequences is None else self._masked(given)
        rows = batch.pop("input_ids", torch.tensor([given.tokens]))
        batch = {name: values.to(self._model.device) for name, values in batch.items()}
        cache = {self._cache_name: self._cache}
        result = self._model(rows.to(self._model.device), use_cache=True, **cache, **batch)
        self._cache, ends = getattr(result, self._cache_name), {0: len(given.tokens)}
        if given.sequences is not None:
            ends = {sequence: at.stop - at.start for sequence, at in given.parts().items()}
        self.logits = torch.cat([result.logits[row, -n:] for row, n in ends.items()])

    def _masked(self, given: StepInput) -> dict[str, torch.Tensor]:
        """What the model is called with; a sequence that has no token in this pass has padding."""
        parts = given.parts()
        n_rows, n = len(self._mask) or len(parts), max(at.stop - at.start for at in parts.values())
        ids, kept, positions = (torch.zeros(n_rows, n, dtype=torch.int64) for _ in range(3))
        for row, at in parts.items():
            own = slice(n - (at.stop - at.start), n)
            ids[row, own], positions[row, own] = torch.tensor(given.tokens[at]), torch.tensor(given.positions[at])
            kept[row, own] = 1
        self._mask = torch.cat((self._mask if len(self._mask) else kept[:, :0], kept), 1)
        return {"input_ids": ids, "position_ids": positions, "attention_mask": self._mask}


def load(model: Path, hf: Path | None, dtype: torch.dtype, device: str) -> tuple[Any, list[str]]:
    """A causal language model by transformers' AutoModel, and the tensors that it has no place for.

    Raises EngineError when it cannot be loaded, or some of its weights were in no file.
    """
    transformers = _transformers()
    if hf and not hf.is_dir():
        raise EngineError(f"--hf {hf}: not a folder. Give the folder that holds config.json and the safetensors files.")
    source = {"pretrained_model_name_or_path": str(hf)} if hf else {
        # Of the name alone it takes a file of that name in the working directory first.
        "pretrained_model_name_or_path": str(model.resolve().parent), "gguf_file": str(model.resolve())
    }  # fmt: skip
    try:
        with _quiet(transformers):
            loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
                **source, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are refused below, by their names
            )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, NotImplementedError, AssertionError) as error:
        hint = f" {_INSTALL}" if "accelerate" in str(error) else _OWN_FOLDER
        raise EngineError(
            f"transformers cannot load {hf or model}: {_one_line(error)}.{hint if not hf else ''}"
        ) from None
    if info["mismatched_keys"]:
        name, file, wanted = min(info["mismatched_keys"])
        raise EngineError(
            f"{hf or model}: in {type(loaded).__name__} {name} is {_shape(wanted)}, in the file {_shape(file)}: "
            f"transformers took a size from elsewhere than the file.{'' if hf else _OWN_FOLDER}"
        )
    if info["missing_keys"]:
        raise EngineError(
            f"{hf or model}: {type(loaded).__name__} finds no tensor for {_some(info['missing_keys'])}: transformers "
            f"would run on random numbers there.{_OWN_FOLDER}"
        )
    return loaded.to(device).eval(), sorted(map(str, info["unexpected_keys"]))


def _shape(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise EngineError(f"the transformers engine needs transformers, which is not installed. {_INSTALL}") from None
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' warnings and progress bars, one of which asks nobody; the loading info says it all."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


@contextmanager
def _double(loaded: Any) -> Iterator[None]:
    """transformers' code in float64 throughout; rope's frequencies, where it has any, are computed again by its own
    modules.
    """
    places = [(of, name, one) for of in loaded.modules() for name, one in of.named_children() if _is_rotary(one)]
    with _WideMode():
        for of, name, rotary in places:
            setattr(of, name, type(rotary)(loaded.config).to(loaded.device))
        try:
            yield
        finally:
            for of, name, rotary in places:
                setattr(of, name, rotary)


def _is_rotary(module: Any) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


class _WideMode(TorchFunctionMode):
    """Float64 wherever transformers asks for float32: its norms, softmax and rope do, whatever the model's dtype.

    Without, `--dtype f64` would record values that look like float64 and are good to 1e-7.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
