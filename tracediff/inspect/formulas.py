"""What an op is made of, in the words of one who writes it: "silu(ffn_gate) * ffn_up"."""

from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.names import NAMES, layer_of, local_name, split

_BETWEEN = {"add": " + ", "sub": " - ", "mul": " * ", "div": " / ", "concat": ", then "}
_GATED = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_erf": "gelu_erf", "geglu_quick": "gelu_quick", "reglu": "relu"}
# Kinds whose ops have words of their own in the table of names, which hold in every model.
_BY_NAME = ("embedding", "linear", "rope", "scores", "softmax", "weighted_values")


def formula(op: Op, graph: Graph) -> str:
    """The op's value, of what it reads."""
    x, *rest = [term(op, i, graph) for i, name in enumerate(op.inputs) if name not in SOURCES] or ["nothing"]
    if op.kind in _BETWEEN:
        made = _BETWEEN[op.kind].join((x, *rest, *(local_name(weight.name) for weight in op.weights)))
        return f"{made}: the layer's output" if local_name(op.name) == "ffn_residual" else made
    if op.kind in _GATED:
        return f"{_GATED[op.kind]}({x}) * {rest[0]}"
    return _named(op, graph) or _other(op, x, rest)


def term(op: Op, position: int, graph: Graph) -> str:
    """An input of the op: what is of another layer is the stream, and of a value that is read in parts, which part."""
    name = op.inputs[position]
    if name not in graph:
        return name
    layer, local = split(name)
    stream = layer_of(op.name) not in (None, layer) and graph[name].kind in ("add", "embedding", "scale")
    return "the layer's input" if stream else op.part_read(position) + local


def _named(op: Op, graph: Graph) -> str:
    """The words of the table of names, where they are of this kind."""
    name = NAMES.get(local_name(op.name))
    if name is None or name.kind != op.kind or op.kind not in _BY_NAME:
        return ""
    words = name.value if len(op.weights) > 1 else name.value.removesuffix(", with its bias")
    both = op.kind == "linear" and any(
        len({*reader.inputs}) < len(reader.inputs) for reader, _ in graph.readers(op.name)
    )
    return words.replace("up projection", "gate and up projections, side by side") if both else words


def _other(op: Op, x: str, rest: list[str]) -> str:
    match op.kind:
        case "rms_norm" | "layer_norm" | "l2_norm":
            norm = {"rms_norm": "RMS norm", "layer_norm": "LayerNorm", "l2_norm": "L2 norm"}[op.kind]
            heads = len(op.axes) == 3 and op.axes[1] != 1
            after = ", times weight" if op.weights else ""
            return f"{norm} of {x}{', each head by itself' if heads else ''}{after}"
        case "scale":
            bias = f" + {op.attrs['bias']:.6g}" if op.attrs.get("bias") else ""
            return f"{x} * {op.attrs['scale']:.6g}{bias}"
        case "linear" | "mul_mat" | "of_latent" if op.weights:
            return f"projection of {x}" if op.kind == "linear" else f"projection of {x}, each head's by itself"
        case "linear_id":
            return f"projection of {x} by each chosen expert"
        case "rope":
            return f"{x} after rotary embedding"
        case "top_k":
            return f"places of the {op.attrs['k']} largest of {x}, largest first"
        case "get_rows" if rest:
            return f"{x} at {rest[-1]}"
        case "copy":
            return x
    return f"{op.kind}({', '.join((x, *rest))})"
