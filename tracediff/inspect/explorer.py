"""A model's ops as a graph for Google's Model Explorer, in which node data find them by name.

Format: GraphCollection of src/ui/src/components/visualizer/common/input_graph.ts in google-ai-edge/model-explorer.
"""

from collections.abc import Iterator

from tracediff.model.graph import Graph, Op
from tracediff.names import local_name

GRAPH = "model"  # as node data call it


def collection(graph: Graph, label: str) -> dict[str, object]:
    """The graph with what it reads: tokens, positions and weights are nodes as well."""
    return {"label": label, "graphs": [{"id": GRAPH, "nodes": [*_nodes(graph)]}]}


def _nodes(graph: Graph) -> Iterator[dict[str, object]]:
    for source in dict.fromkeys(name for op in graph for name in op.inputs if name not in graph):
        yield {"id": source, "label": source, "namespace": "", "incomingEdges": []}
    for op in graph:
        yield {
            "id": op.name,
            "label": local_name(op.name),
            "namespace": op.name.removesuffix(local_name(op.name)).strip(".").replace(".", "/"),
            "incomingEdges": [
                {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(n)}
                for n, name in enumerate(op.inputs)
            ],
            "attrs": [{"key": key, "value": value} for key, value in _attributes(op)],
        }


def _attributes(op: Op) -> Iterator[tuple[str, str]]:
    yield "kind", op.kind
    yield "shape", f"[{', '.join(map(str, op.axes))}]"
    for weight in op.weights:
        yield "weight", weight.name
    for key, value in op.attrs.items():
        yield key, str(value)
