"""Node data for Google's Model Explorer: each op coloured by its error.

Format: src/server/package/src/model_explorer/node_data_builder.py of google-ai-edge/model-explorer: by graph, then by
node, a number, and thresholds up to which a number has a colour. `tracediff inspect MODEL --graph` writes the graph.
"""

import json
import math
from collections.abc import Mapping

from tracediff.result import OpResult, Result, worst_case

GRAPH = "model"
_COLOURS = ((0.5, "#2f9e44"), (1.0, "#74b816"), (1e3, "#f76707"), (1e300, "#c92a2a"))
_BEYOND = 1e300  # JSON has no infinity


def render(cases: Mapping[str, Result]) -> str:
    """One JSON object: of each op the largest error over its bound in any step, or the drift over its tolerance."""
    name, result = worst_case(cases)
    errors: dict[str, float] = {}
    for op in result.ops:
        error = _error(op)
        if error is not None:
            errors[op.op] = max(error, errors.get(op.op, 0.0))
    data = {
        "name": f"tracediff: {name}",
        "results": {op: {"value": error} for op, error in errors.items()},
        "thresholds": [{"value": value, "bgColor": colour} for value, colour in _COLOURS],
    }
    return json.dumps({GRAPH: data}, indent=1) + "\n"


def _error(op: OpResult) -> float | None:
    if op.local:
        excess = op.local.excess
        if op.status == "faulty":  # also where a factor explains it that leaves each value within its bound
            excess = max(excess, math.nextafter(1.0, 2.0))
    elif op.drift and op.tolerance:
        excess = op.drift.nmse / op.tolerance
    else:
        return None
    return min(excess, _BEYOND) if not math.isnan(excess) else _BEYOND
