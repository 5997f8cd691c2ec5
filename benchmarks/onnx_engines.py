"""Models as ONNX, every op's value an output, for engines that read it: ONNX Runtime and OpenVINO."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapters import STEPS, Trace, taps, values_of

from tracediff.model.model import Model

_OPSET = 21
Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


class Exported:
    """The ONNX graph of a GGUF file as exporters of PyTorch write it: [T, ...] without a batch, caches as inputs.

    Rope turns halves, so Q and K lie in the order of checkpoints.
    """

    def __init__(self, model: Model) -> None:
        from onnx import TensorProto

        self._h, self._types = model.graph.hparams, TensorProto
        self._weights = {name: values_of(model, name, halves=True) for name in model.file.tensors}
        self._nodes: list[Any] = []
        self._held: list[Any] = []
        self._outputs: list[str] = []

    def proto(self) -> Any:
        """The ModelProto."""
        from onnx import helper

        of = helper.make_tensor_value_info
        h, floats = self._h, self._types.FLOAT
        inputs = [of("ids", self._types.INT64, ["T"]), of("mask", floats, ["T", "S"])]
        inputs += [of(name, floats, ["T", 1, h.head_dim]) for name in ("cos", "sin")]
        caches = [f"{kind}.{n}" for n in range(h.n_layer) for kind in "kv"]
        inputs += [of(f"past.{name}", floats, ["P", h.n_head_kv, h.head_dim]) for name in caches]
        self._logits(self._layers())
        outputs = [of(name, floats, None) for name in (*self._outputs, *(f"present.{name}" for name in caches))]
        graph = helper.make_graph(self._nodes, "model", inputs, outputs, self._held)
        opset = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=10)

    def _add(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        from onnx import helper

        made = to or f"{kind}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [made], made, **attributes))
        self._outputs += [to] * (to.partition(".")[0] in ("token_embd", "blk", "output_norm", "output"))
        return made

    def _hold(self, values: Any, name: str = "") -> str:
        from onnx import numpy_helper

        name = name or f"held.{len(self._held)}"
        self._held.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def _layers(self) -> str:
        x = self._add("Gather", self._hold(self._weights["token_embd.weight"], "embeddings"), "ids", to="token_embd")
        for n in range(self._h.n_layer):
            x = self._layer(n, x)
        return x

    def _layer(self, n: int, x: str) -> str:
        blk = f"blk.{n}"
        attended = self._linear(self._attention(n, self._norm(x, f"{blk}.attn_norm")), f"{blk}.attn_output")
        x = self._add("Add", attended, x, to=f"{blk}.attn_residual")
        given = self._norm(x, f"{blk}.ffn_norm")
        gate, up = (self._linear(given, f"{blk}.ffn_{name}") for name in ("gate", "up"))
        silu = self._add("Mul", gate, self._add("Sigmoid", gate))
        down = self._linear(self._add("Mul", silu, up, to=f"{blk}.ffn_act"), f"{blk}.ffn_down")
        return self._add("Add", down, x, to=f"{blk}.ffn_residual")

    def _logits(self, x: str) -> None:
        self._linear(self._norm(x, "output_norm"), "output")

    def _norm(self, x: str, name: str) -> str:
        square = self._add("Pow", x, self._hold(np.float32(2)))
        mean = self._add("ReduceMean", square, self._hold([-1]), keepdims=1)
        root = self._add("Sqrt", self._add("Add", mean, self._hold(np.float32(self._h.eps))))
        weight = self._hold(self._weights[f"{name}.weight"])
        return self._add("Mul", self._add("Div", x, root), weight, to=name)

    def _linear(self, x: str, name: str) -> str:
        tied = name == "output" and "output.weight" not in self._weights
        weight = self._hold(self._weights["token_embd.weight" if tied else f"{name}.weight"].T.copy())
        bias = self._weights.get(f"{name}.bias")
        if bias is None:
            return self._add("MatMul", x, weight, to=name)
        return self._add("Add", self._add("MatMul", x, weight), self._hold(bias), to=name)

    def _attention(self, n: int, x: str) -> str:
        blk, h = f"blk.{n}", self._h
        q, k, v = (self._heads(x, blk, name) for name in "qkv")
        q, k = (self._rope(y, f"{blk}.attn_{name}_rope") for y, name in ((q, "q"), (k, "k")))
        k, v = (
            self._repeated(self._add("Concat", f"past.{kind}.{n}", y, to=f"present.{kind}.{n}", axis=0))
            for y, kind in ((k, "k"), (v, "v"))
        )
        by_head = self._add("Transpose", q, perm=[1, 0, 2])
        scores = self._add("MatMul", by_head, self._add("Transpose", k, perm=[1, 2, 0]), to=f"{blk}.attn_scores")
        scaled = self._add("Mul", scores, self._hold(np.float32(h.head_dim**-0.5)))
        probs = self._add("Softmax", self._add("Add", scaled, "mask"), to=f"{blk}.attn_probs", axis=-1)
        summed = self._add("MatMul", probs, self._add("Transpose", v, perm=[1, 0, 2]))
        by_token = self._add("Transpose", summed, perm=[1, 0, 2])
        return self._add("Reshape", by_token, self._hold([-1, h.n_head * h.head_dim]), to=f"{blk}.attn_kqv")

    def _heads(self, x: str, blk: str, name: str) -> str:
        y = self._linear(x, f"{blk}.attn_{name}")
        y = self._add("Reshape", y, self._hold([0, -1, self._h.head_dim]))
        norm = f"{blk}.attn_{name}_norm"
        return self._norm(y, norm) if f"{norm}.weight" in self._weights else y

    def _rope(self, x: str, name: str) -> str:
        half = self._h.head_dim // 2
        first, second = (
            self._add("Slice", x, self._hold([at]), self._hold([at + half]), self._hold([2])) for at in (0, half)
        )
        other = self._add("Concat", self._add("Neg", second), first, axis=-1)
        return self._add("Add", self._add("Mul", x, "cos"), self._add("Mul", other, "sin"), to=name)

    def _repeated(self, x: str) -> str:
        h = self._h
        each = self._add("Unsqueeze", x, self._hold([2]))
        groups = self._add("Expand", each, self._hold([1, 1, h.n_head // h.n_head_kv, 1]))
        return self._add("Reshape", groups, self._hold([0, h.n_head, h.head_dim]))


def onnx_runtime(bits: int = 0, level: int = 0, **options: Any) -> Trace:
    """Its CPU provider, with all of its rewriting; its own quantisation of the matrices to so many `bits`, whose
    activations are 8 bits at accuracy level 4.
    """

    def load(proto: Any) -> Run:
        import onnxruntime

        session = onnxruntime.InferenceSession(
            _quantised(proto, bits, level, options), providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))

    return _traced("ONNX Runtime", load)


def openvino(dtype: str, bits: int = 0, **options: Any) -> Trace:
    """Its CPU plugin at this precision, of matrices as ONNX Runtime quantises them where `bits` are given."""

    def load(proto: Any) -> Run:
        import openvino as ov

        core = ov.Core()
        read = core.read_model(_quantised(proto, bits, 0, options), b"")
        compiled = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": dtype})
        return lambda feeds: {
            output.get_any_name(): values for output, values in compiled(dict(feeds)).items() if output.get_names()
        }

    return _traced("OpenVINO", load)


def _quantised(proto: Any, bits: int, level: int, options: Mapping[str, Any]) -> bytes:
    if bits:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantiser = MatMulNBitsQuantizer(proto, bits=bits, accuracy_level=level, **options)
        quantiser.process()
        proto = quantiser.model.model
    return proto.SerializeToString()


def _traced(engine: str, load: Callable[[Any], Run]) -> Trace:
    def trace(model: Path, out: Path) -> None:
        opened = Model(model)
        h = opened.graph.hparams
        run = load(Exported(opened).proto())
        empty = np.empty((0, h.n_head_kv, h.head_dim), np.float32)
        past = {f"past.{kind}.{n}": empty for n in range(h.n_layer) for kind in "kv"}
        turns = np.float32(h.rope.theta) ** (-np.arange(0, h.head_dim, 2, dtype=np.float32) / h.head_dim)
        with taps(model, out, engine) as tap:
            for step, given in enumerate(STEPS):
                positions = np.array(given.positions, np.float32)
                angles = np.tile(positions[:, None] * turns, 2)[:, None]
                keys = np.arange(int(positions[-1]) + 1)
                mask = np.where(keys > positions[:, None], np.float32(-1e30), np.float32(0))
                feeds = {"ids": np.array(given.tokens), "cos": np.cos(angles), "sin": np.sin(angles), "mask": mask}
                made = run({**feeds, **past})
                past = {name: np.array(made[name.replace("past", "present")]) for name in past}
                tap.begin(step, given)
                for name in (op.name for op in tap.graph if op.name in made):
                    tap.op(name, torch.from_numpy(np.array(made[name], np.float32)))

    return trace
