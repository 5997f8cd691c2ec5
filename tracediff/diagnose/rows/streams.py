"""What a layer reads recorded as what it makes, number for number: it was not run, or its output recorded before."""

import torch

from tracediff.diagnose.rows.told import FEW, Told
from tracediff.names import layer_of, local_name
from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_LOOK = (
    "whether the layer is run, and where its output is recorded: transformers' `hidden_states` begin with the "
    "embedding, and have each layer's output one place later"
)


def told(replay: Replay, record: OpRecord, _: Scheme) -> Told | None:
    """Which value that a record's segment begins with it holds; None where it holds none, one op makes it, or it is no
    sum: a factor or a function that is left out is a mistake of another sort.
    """
    segment = replay.segment(record)
    if len(segment) == 1 or record.rows is not None or record.size < FEW or replay.graph[record.op].kind != "add":
        return None
    recorded = replay.held(record.step, record.op, False)
    if recorded is None or not bool(recorded.isfinite().all()) or not bool(recorded.any()):
        return None
    graph = replay.graph
    read = dict.fromkeys(name for part in segment for name in graph[part].inputs if name in graph)
    for name in read:
        held = None if name in segment else replay.held(record.step, name, False)
        if held is not None and torch.equal(held, recorded):
            before = local_name(name) if layer_of(name) is None else "the layer's input"
            text = f"it holds {before}, number for number: nothing of these {len(segment)} ops was added to it"
            return Told(text, 0.0, "it holds the layer's input, number for number", _LOOK, is_same=True)
    return None
