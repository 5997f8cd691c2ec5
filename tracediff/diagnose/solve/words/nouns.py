"""What names in loops stand for, in the reader's words."""

from collections.abc import Mapping

_STATE = {"t": "token", "h": "head", "d": "channel", "e": "channel of the key", "i": "value of the state"}
# What the loop variables of each kind count.
COUNTED: Mapping[str, Mapping[str, str]] = {
    "embedding": {"t": "token", "i": "channel"},
    "rms_norm": {"t": "row", "i": "channel"},
    "layer_norm": {"t": "row", "i": "channel"},
    "l2_norm": {"t": "row", "i": "channel"},
    "linear": {"t": "token", "o": "channel", "i": "input channel"},
    "linear_id": {"t": "token", "s": "slot", "o": "channel", "i": "input channel"},
    "rope": {"t": "token", "h": "head", "i": "pair", "j": "channel"},
    "scores": {"h": "query head", "t": "query", "s": "key", "d": "channel", "c": "cached key", "i": "channel"},
    "softmax": {"h": "head", "t": "query", "s": "key"},
    "soft_max": {"h": "head", "t": "query", "s": "key"},
    "lightning_indexer": {"t": "query", "h": "head", "s": "key", "d": "channel"},
    "compress": {"t": "token", "d": "channel", "j": "token of the block"},
    "weighted_values": {"t": "token", "h": "head", "d": "channel", "s": "key", "c": "cached value", "i": "channel"},
    "ssm_conv": {"t": "token", "c": "channel", "i": "tap"},
    "ssm_scan": {**_STATE, "n": "channel of the state"},
    "gated_delta_net": _STATE,
    "gated_linear_attn": _STATE,
    "rwkv_wkv6": _STATE,
    "rwkv_wkv7": _STATE,
}
EACH = {"i": "value"}  # of all other kinds
_NORM = {
    "x": (("row", "T"), ("channel", "n")), "y": (("row", "T"), ("channel", "n")),
    "w": (("channel", "n"),), "b": (("channel", "n"),),
}  # fmt: skip
_TOKENS = (("token", "T"), ("head", "H"), ("channel", "D"))
_GROUPED = (("token", "T"), ("group", "groups"), ("channel", "D"))
_RATES = (("token", "T"), ("head", "H"))
_SQUARE = (("head", "H"), ("channel", "D"), ("channel of the key", "D"))
# The axes of the arrays, with the names of the numbers that are their sizes.
AXES: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "embedding": {"y": (("token", "T"), ("channel", "n")), "table": (("row", ""), ("channel", "n"))},
    "rms_norm": _NORM,
    "layer_norm": _NORM,
    "l2_norm": _NORM,
    "linear": {
        "x": (("token", "T"), ("channel", "n_in")), "w": (("row", "n_out"), ("column", "n_in")),
        "y": (("token", "T"), ("channel", "n_out")), "b": (("channel", "n_out"),),
    },
    "linear_id": {
        "w": (("expert", ""), ("row", "n_out"), ("column", "n_in")), "ids": (("token", "T"), ("slot", "slots")),
        "y": (("token", "T"), ("slot", "slots"), ("channel", "n_out")),
    },
    "rope": {
        "x": (("token", "T"), ("head", "H"), ("channel", "D")), "y": (("token", "T"), ("head", "H"), ("channel", "D")),
    },
    "scores": {
        "q": (("token", "T"), ("query head", "H"), ("channel", "D")),
        "k": (("key", "P"), ("key head", "G"), ("channel", "D")),
        "cache": (("key", "P"), ("key head", "G"), ("channel", "D")),
        "y": (("head", "H"), ("query", "T"), ("key", "S")),
    },
    "softmax": {
        "x": (("head", "H"), ("query", "T"), ("key", "S")), "y": (("head", "H"), ("query", "T"), ("key", "S")),
    },
    "soft_max": {
        "x": (("head", "H"), ("query", "T"), ("key", "S")), "y": (("head", "H"), ("query", "T"), ("key", "S")),
        "mask": (("query", "T"), ("key", "S")),
    },
    "lightning_indexer": {
        "q": (("query", "T"), ("head", "H"), ("channel", "D")), "k": (("key", "S"), ("channel", "D")),
        "weights": (("query", "T"), ("head", "H")), "mask": (("query", "T"), ("key", "S")),
        "y": (("query", "T"), ("key", "S")),
    },
    "compress": {
        "values": (("token", ""), ("channel", "width")), "scores": (("token", ""), ("channel", "width")),
        "y": (("token", "T"), ("channel", "D")),
    },
    "weighted_values": {
        "p": (("head", "H"), ("query", "T"), ("key", "S")),
        "v": (("position", "P"), ("value head", "G"), ("channel", "D")),
        "cache": (("position", "P"), ("value head", "G"), ("channel", "D")),
        "y": (("token", "T"), ("head", "H"), ("channel", "D")),
    },
    "ssm_conv": {"x": (("channel", "n"), ("column", "columns")), "w": (("channel", "n"), ("tap", "taps"))},
    "ssm_scan": {
        "x": _TOKENS, "dt": _RATES,
        **dict.fromkeys(("B", "C"), (("token", "T"), ("group", "groups"), ("channel", "N"))),
        "state": (("head", "H"), ("channel", "D"), ("channel of the state", "N")),
    },
    "gated_delta_net": {
        "q": _GROUPED, "k": _GROUPED, "v": _TOKENS, "gate": _RATES, "beta": _RATES, "state": _SQUARE,
    },
    **{
        kind: {"state": _SQUARE, **dict.fromkeys(("k", "v", "q", "gate", "r", "decay", "a", "b"), _TOKENS)}
        for kind in ("gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7")
    },
}  # fmt: skip
NUMBERS = {
    "T": "the number of tokens", "n": "the number of channels", "n_in": "the number of input channels",
    "n_out": "the number of channels", "H": "the number of heads", "G": "the number of key/value heads",
    "D": "the number of channels of a head", "S": "the number of keys", "n_rot": "the number of rotated channels",
    "theta": "rope's base", "scale": "the scale", "eps": "eps", "freq_scale": "the frequency scale",
    "magnitude": "what cosines and sines are multiplied by", "low": "the first pair of YaRN's ramp",
    "high": "the last pair of YaRN's ramp",
    "heads": "the number of heads", "queries": "the number of queries", "keys": "the number of keys",
    "channels": "the number of channels of a head", "width": "the width of a cached row",
    "slots": "the number of chosen experts", "row": "the number of values of a row",
    "groups": "the number of groups", "N": "the number of channels of the state", "taps": "the number of taps",
    "columns": "the number of columns", "held": "the number of values of the state",
    "block": "the number of tokens of a block", "parts": "the number of blocks that a row is made of",
    "past[0]": "the number of positions cached before the step", "P": "the number of cached positions",
}  # fmt: skip
NAMED = {
    "squares": "the sum of squares", "largest": "the maximum", "total": "the sum", "visible": "the number of keys seen",
    "here": "where a row is read", "there": "where a row is stored", "first": "a pair's first channel",
    "second": "a pair's second channel", "angle": "the angle", "mean": "the mean", "scale": "the scale",
    "rate": "the rate", "found": "what the state holds there", "change": "the change of the state",
    "expert": "the expert", "part": "how much of a pair is interpolated", "oldest": "the first token",
    "weighted": "the weighted sum",
}  # fmt: skip
SUMS = {"sum": "the sum", "max": "the largest", "min": "the smallest", "first": "the first", "last": "the last"}
SUMMED = ("the sum of squares", "the sum", "the maximum")
OWN = {"scores": "the output's", "softmax": "the softmax's", "weighted_values": "the output's"}
OF_STEPS = ("past", "starts")
COUNTS_TOKENS = ("T", "S", "P", "queries", "keys")  # sizes that are others in each step
OF_TOKENS = ("token", "query", "key", "position", "cached key", "cached value")  # what these count
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
