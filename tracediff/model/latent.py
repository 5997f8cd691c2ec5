"""Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1), as attention of many heads.

llama.cpp multiplies queries with the matrix that makes keys of the cached latent, so that one row of it is the key and
the value of every head (src/models/deepseek2.cpp). Many engines make keys and values of each head and cache these. Both
compute the same; what they round, and what they can record, differs.
"""

from collections.abc import Iterator
from dataclasses import replace

from tracediff.model.graph import Extent, Graph, Op, View


def expanded(graph: Graph) -> Graph | None:
    """The graph with keys and values of each head; None where it has no latent attention."""
    ops = [new for op in graph if op.kind == "mul_mat" and op.weights for new in _of_heads(graph, op)]
    return graph.changed(*ops) if ops else None


def _of_heads(graph: Graph, unlatent: Op) -> Iterator[Op]:
    """Of a layer, given the op that makes values of each head of the weighted latents: every op that is another."""
    weighted = graph.ops.get(unlatent.inputs[0])
    if weighted is None or weighted.kind != "weighted_values" or len(unlatent.weights[0].shape) != 3:
        return
    keys = graph[weighted.inputs[1]]
    scores = next((op for op, _ in graph.readers(keys.name) if op.kind == "scores"), None)
    if keys.kind != "concat" or scores is None:
        return
    queries, between = graph.ops.get(scores.inputs[0]), list[Op]()  # what is done to queries when they are whole
    while queries and queries.kind != "concat":
        between.append(queries)
        queries = graph.ops.get(queries.inputs[0])
    absorbed = graph.ops.get(queries.inputs[0]) if queries else None
    if queries is None or absorbed is None or absorbed.kind != "mul_mat" or not absorbed.weights:
        return
    n_heads, n_values, _ = unlatent.weights[0].shape
    _, _, n_plain = absorbed.weights[0].shape
    latent, rotated = keys.inputs
    n_rotated = graph.axes_read(keys, 1)[-1]
    assert isinstance(n_rotated, int)
    layer = unlatent.name.rpartition(".")[0]
    width = n_plain + n_rotated
    heads = View(("T", n_heads, n_plain), (n_plain, Extent(t=n_plain), 1))
    yield replace(absorbed, kind="copy", axes=(n_heads, "T", n_plain), weights=())
    yield replace(queries, axes=("T", n_heads, width), views=(heads, queries.seen[1]))
    yield from (replace(op, axes=("T", n_heads, width)) for op in between)
    plain = Op(
        f"{layer}.attn_k_nope", "of_latent", (latent,), ("T", n_heads, n_plain), absorbed.weights, {"transposed": True}
    )
    values = Op(f"{layer}.attn_v", "of_latent", (latent,), ("T", n_heads, n_values), unlatent.weights)
    yield from (plain, values)
    one = keys.seen[1]
    begin, stride = (one.offset, one.strides[0]) if one else (0, n_rotated)
    repeated = View(("T", n_heads, n_rotated), (stride, 0, 1), begin)
    yield replace(keys, inputs=(plain.name, rotated), axes=("T", n_heads, width), views=(None, repeated))
    yield replace(weighted, inputs=(weighted.inputs[0], values.name), axes=("T", n_heads * n_values), views=())
    rows = View((n_heads, "T", n_values), (n_values, n_heads * n_values, 1))
    yield replace(unlatent, kind="copy", weights=(), views=(rows,))
