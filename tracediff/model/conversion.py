"""What llama.cpp's converter makes of a Hugging Face checkpoint: which tensors become one of the file's, and how.

Names are gguf-py's table's. What is done to values is in `conversion/` of llama.cpp, a class for each architecture;
here it is by architecture and name. Of a tensor that none of this makes nobody can say whether it is right.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from tracediff.errors import ModelError
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.pairing import neighbours
from tracediff.names import local_name

Array = np.ndarray
Way = Callable[[Array], Array]

# LlamaModel.permute, which the others inherit or call, lays out each head of Q and K for rope on neighbours;
# checkpoints pair halves. The whole head is permuted, whatever part of it is rotated.
PERMUTED_ARCHITECTURES = (
    "llama", "arcee", "arctic", "baichuan", "bailingmoe", "chameleon", "cogvlm", "deci", "deepseek", "granite",
    "granite_swa", "granitehybrid", "granitemoe", "internlm2", "llada", "llama-embed", "minicpm", "mistral3",
    "nanbeige", "nemotron_h", "nemotron_h_moe", "olmo", "smollm3", "xverse",
)  # fmt: skip
PERMUTED_OPS = ("attn_q", "attn_k", "attn_q_rope", "attn_k_rope")
_NONE = r"$^"
_NORM = ((r"norm\.weight$", 1.0),)
# What is added to weights: norms are held less 1 (Gemma's, LayerNorm1P).
_ADDED: Mapping[str, Sequence[tuple[str, float]]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma-embedding", "minimax-m3", "nemotron", "step35"), _NORM),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), ((r"(?<!ssm_)norm\.weight$", 1.0),)),
}
# Matrices that are held with their inputs first.
_TRANSPOSED: Mapping[str, str] = {
    **dict.fromkeys(("gpt2", "jais"), r"attn_(qkv|output)\.weight$|ffn_(up|down)\.weight$"),
    **dict.fromkeys(("gpt-oss", "llama4", "qwen3vlmoe"), r"ffn_(gate|up|down)_exps\.weight$"),
    **dict.fromkeys(("dbrx", "nomic-bert-moe"), r"ffn_down_exps\.weight$"),
}
# What is done otherwise, by numbers of config.json or by statistics of the tensor: it is left open.
_OTHERWISE: Mapping[str, str] = {
    "bailingmoe": r"^output\.weight$",
    "bailingmoe2": r"^output\.weight$|exp_probs_b",
    "bitnet": r"(attn|ffn)_(?!norm|sub_norm)\w+\.weight$",
    "chameleon": r"attn_[qk]_norm",
    "falcon-h1": r"(attn_(q|k|v|output)|ffn_(gate|down)|ssm_(in|out)|token_embd|output)\.weight$",
    "jais": r"token_embd|^output\.|ffn_gate",
    "plamo": r"attn_(q|output)\.weight$",
    **dict.fromkeys(("plamo2", "plamo3"), "norm"),
    **dict.fromkeys(("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"), "."),
}
_VOCABULARY = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")  # rows that the tokeniser has
_LINEAR = r"(?<!\.c)_proj\.weight$"  # beside others of GPT-2 that are Conv1D
_ALTERNATING = ("gpt-oss",)  # gate and up of each channel side by side, where others have all of gate first
# Q, K and V of each head of K, where others have all of Q first.
_OF_GROUPS = ("bloom", "falcon", "gptneox", "internlm2")
_TILED = ("qwen35", "qwen35moe")  # value heads by key head; in a file the first of all key heads first
# Tensors that become several of the file.
_SPLIT = (
    (r"experts\.gate_up_proj|block_sparse_moe\.input_linear", ("ffn_gate_exps", "ffn_up_exps")),
    (r"shared_mlp\.input_linear", ("ffn_gate_shexp", "ffn_up_shexp")),
    (r"shared_mlp\.input_linear|gate_up_proj|up_gate_proj", ("ffn_gate", "ffn_up")),
    (r"qkv_proj|query_key_value|wqkv|W_pack|att_proj", ("attn_q", "attn_k", "attn_v")),
    (r"kv_b_proj", ("attn_k_b", "attn_v_b")),
    (r"in_proj_qkvz", ("attn_qkv", "attn_gate")),
)
# Tensors of the file that are several, where the converter was asked to fuse them.
_FUSED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"), "attn_qkv": ("attn_q", "attn_k", "attn_v")}
_STACKED = re.compile(r"(experts|altup_projections|altup_unembed_projections)\.(\d+)\.")
# How keys are spelled where the table has them otherwise.
_PREFIXES = (
    (_NONE, ""), (r"language_model\.", ""), (r"^(transformer|model|bert|roberta|distilbert|thinker)\.", ""),
    (r"text_model\.", ""), (r"^", "model."),
)  # fmt: skip
# A head that predicts tokens after the next is a layer behind the last.
_PREDICTING = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"
}  # fmt: skip
_OF_A_PREDICTOR = r"eh_proj|enorm|hnorm|shared_head"
_LAYER = re.compile(r"(?:layers|layer|h|blocks|block)\.(\d+)\.")
# Parts of values that are packed, as GPTQ's, compressed-tensors' and MXFP4's: nothing that is compared by itself.
PACKED = re.compile(
    r"[._](packed|blocks|scales?|scale_2|scale_inv|shape|zero_point|zeros|qweight|qzeros|g_idx|input_scale)$"
)
_SPELLINGS = (
    (_NONE, ""),
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"\.dt_bias$", ".dt.bias"),
    (r"e_score_correction_bias$", "e_score_correction.bias"),
    (r"_proj_bias$", "_proj.bias"),
    (r"shared_mlp\.output_linear", "mlp.down_proj"),
    (r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"),
)


class Source(NamedTuple):
    """The tensors of a checkpoint, by key, that one of the file's is made of, and what is done to their values."""

    keys: tuple[str, ...]
    make: Callable[[Sequence[Array]], Array]
    keeps_first: bool = False  # the first row is that of the one tensor that it is made of

    def of(self, held: Sequence[Array]) -> Array:
        """What becomes of these values; of other sizes than belong together the first of them as they are."""
        try:
            return self.make(held)
        except ValueError:
            return held[0]


class Sources(NamedTuple):
    """What each tensor of a GGUF file, by its name, is made of; the keys that have no name in the architecture, and
    those of a layer that is one more than the file has; and names of tensors of which nobody knows how they are made.
    """

    known: dict[str, Source]
    unnamed: list[str]
    beyond: list[str]
    unknown: set[str]


def sources_of(file: GGUFFile, keys: Sequence[str]) -> Sources:
    """Of these keys of a checkpoint. Raises ModelError for an architecture that gguf-py has no table of names for."""
    return _Conversion(file).sources(keys)


class _Conversion:
    """Of the checkpoint that this file was made from."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.arch = file, architecture(file)
        self.n_layer = n_layer(file)
        self.names = tensor_names(self.arch, self.n_layer)
        if self.names is None:
            raise ModelError(f"{file.path}: gguf-py knows no tensor names of the architecture {self.arch!r}.")
        self.heads = head_counts(file) if self.arch in PERMUTED_ARCHITECTURES else {}

    def sources(self, keys: Sequence[str]) -> Sources:
        """As `sources_of` says."""
        whole: dict[str, list[str]] = {}
        found: dict[str, Source] = {}
        unnamed, beyond = [], dict[int, list[str]]()
        for key in keys:
            name = None if PACKED.search(key) else self._name(key)
            split = {} if name in self.file.tensors else self._split(key)
            found |= split
            if name and not split:
                whole.setdefault(name, []).append(key)
            elif not split and (layer := self._layer_beyond(key)) is not None:
                beyond.setdefault(layer, []).append(key)
            elif not split:
                unnamed.append(key)
        found |= {name: self._whole(name, of) for name, of in whole.items()}
        for name, parts in self._fused(found):
            made = [found.pop(part) for part in parts]
            found[name] = Source(tuple(key for one in made for key in one.keys), partial(_joined, made))
        unknown = {one for one in (*found, *self.file.tensors) if re.search(_OTHERWISE.get(self.arch, _NONE), one)}
        known = {name: source for name, source in found.items() if name not in unknown}
        predicting = {int(at[1]) for key in unnamed if (at := _LAYER.search(key)) and re.search(_OF_A_PREDICTOR, key)}
        unnamed += [key for layer in sorted(beyond.keys() & predicting) for key in beyond[layer]]
        return Sources(known, unnamed, [key for n in sorted(beyond.keys() - predicting) for key in beyond[n]], unknown)

    def _name(self, key: str) -> str | None:
        """What the table calls it, be it in another spelling."""
        plain = self._in_layers(_STACKED.sub(r"\1.", key))
        spelled = (re.sub(*by, re.sub(*before, plain)) for before in _PREFIXES for by in _SPELLINGS)
        found = (name for one in spelled if (name := self.names.get_name(one, try_suffixes=(".weight", ".bias"))))
        name = next(found, None)
        # A parameter may be a module's, rather than the weight of one; a classifier is called by what it tells.
        others = (name, f"{name}.weight", f"{name}.bias", (name or "").replace("cls.", "cls.output."))
        return next((one for one in others if one in self.file.tensors), name)

    def _in_layers(self, key: str) -> str:
        """A key of a head that predicts further tokens as one of the layers behind the last that generates."""
        first = self.n_layer - int(self.file.metadata.get(f"{self.arch}.nextn_predict_layers", 0))
        if layer := re.match(r"(?:model\.)?mtp\.layers\.(\d+)\.(.*)", key):
            return f"model.layers.{first + int(layer[1])}.{layer[2]}"
        part = re.match(r"(?:model\.)?mtp\.(\w+)(\..*)", key)
        return f"model.layers.{first}.{_PREDICTING[part[1]]}{part[2]}" if part and part[1] in _PREDICTING else key

    def _layer_beyond(self, key: str) -> int | None:
        """The number of a layer behind the file's last that has such a tensor; None of any other key."""
        found = _LAYER.search(key)
        if not found or int(found[1]) < self.n_layer or PACKED.search(key):
            return None
        return int(found[1]) if self._name(f"{key[: found.start(1)]}0{key[found.end(1) :]}") else None

    def _whole(self, name: str, keys: Sequence[str]) -> Source:
        """One tensor of the checkpoint, or that of each expert."""
        way = self._way(name, keys[0])
        if not _STACKED.search(keys[0]):
            return Source((keys[-1],), lambda held: way(held[0]), not self._changes(name, keys[-1]))
        each = sorted(keys, key=lambda key: int(_STACKED.findall(key)[-1][1]))
        return Source(tuple(each), lambda held: way(np.stack(held)))

    def _split(self, key: str) -> dict[str, Source]:
        """The tensors of the file that one of the checkpoint becomes; none where the file does not have them."""
        if PACKED.search(key):
            return {}
        block = next((f"blk.{number}" for number in re.findall(r"\.(\d+)\.", self._in_layers(key))), None)
        suffix = "bias" if key.endswith("bias") else "weight"
        for pattern, parts in _SPLIT:
            names = [f"{block}.{part}.{suffix}" for part in parts]
            if re.search(pattern, key) and all(name in self.file.tensors for name in names):
                return {
                    name: Source((key,), partial(self._part, names, i, self._way(name, key, split=True)))
                    for i, name in enumerate(names)
                }
        return {}

    def _part(self, names: Sequence[str], i: int, way: Way, held: Sequence[Array]) -> Array:
        """The i-th of the tensors that one of the checkpoint becomes, by their names."""
        x, shapes = held[0], [self.file.tensors[name].shape for name in names]
        if names[0].endswith("attn_k_b.weight"):  # of each head; K's part is multiplied by queries
            heads = x.reshape(shapes[0][0], -1, x.shape[-1])
            k, v = np.split(heads, [shapes[0][-1]], 1)
            return way(v if i else np.swapaxes(k, 1, 2))
        axis = -1 if names[0].endswith("bias") else -2
        if x.ndim > 1 and re.search(_TRANSPOSED.get(self.arch, _NONE), names[0]):
            x = np.swapaxes(x, -1, -2)
        if self.arch in _ALTERNATING:
            return way(np.take(x, range(i, x.shape[axis], len(names)), axis))
        sizes = [shape[axis] for shape in shapes]
        if names[1].endswith("attn_gate.weight"):
            n_k, d_k = self._number("ssm.group_count"), self._number("ssm.state_size")
            n_v = sizes[1]  # V is as wide as the gate
            q, k, v, z = _by_sort(x, n_k, (n_k * d_k, n_k * d_k, n_v, n_v))
            return way(z if i else np.concatenate((q, k, v)))
        if self.arch in _OF_GROUPS:
            return way(_by_sort(x, self._number("attention.head_count_kv"), sizes)[i])
        return way(_cut(x, sizes, axis)[i])

    def _fused(self, found: Mapping[str, Source]) -> Iterator[tuple[str, list[str]]]:
        """Tensors of the file that nothing makes, and those which would make it together."""
        for name in self.file.tensors:
            head, _, suffix = name.rpartition(".")
            block, _, local = head.rpartition(".")
            parts = [f"{block}.{part}.{suffix}" for part in _FUSED.get(local, ())]
            if parts and name not in found and all(part in found for part in parts):
                yield name, parts

    def _way(self, name: str, key: str, split: bool = False) -> Way:
        """What is done to the values of a tensor of this name, whose parts are together, or were `split`."""
        ways = self._changes(name, key, split)
        if name in self.heads:  # which moves no first row
            ways.append(lambda x: neighbours(x, x.shape[0] // self.heads[name], 0))
        if name in self.file.tensors:
            to = _cut_or_padded if name in _VOCABULARY else _shaped
            ways.append(partial(to, self.file.tensors[name].shape))
        return lambda x: reduce(lambda y, way: way(y), ways, x)

    def _changes(self, name: str, key: str, split: bool = False) -> list[Way]:
        """What makes other values of the first row, or another row the first."""
        ways: list[Way] = []
        if name.endswith("_exps.weight") and name in self.file.tensors:  # of all experts in one matrix (DBRX)
            n_expert = self.file.tensors[name].shape[0]
            ways.append(lambda x: x.reshape(n_expert, -1, x.shape[-1]) if x.ndim == 2 else x)
        if re.search(_TRANSPOSED.get(self.arch, _NONE), name) and not split and not re.search(_LINEAR, key):
            ways.append(lambda x: np.swapaxes(x, -1, -2))
        if key.endswith("A_log"):
            ways.append(lambda x: -np.exp(x))
        ways += [partial(_added, by) for pattern, by in _ADDED.get(self.arch, ()) if re.search(pattern, name)]
        ways += self._regrouped(local_name(name))
        if name == "position_embd.weight" and name in self.file.tensors:  # the first positions of RoBERTa are none
            n_positions = self.file.tensors[name].shape[0]
            ways.append(lambda x: x[-n_positions:])
        return ways

    def _regrouped(self, local: str) -> Iterator[Way]:
        """Heads that lie in another order."""
        op = local.rpartition(".")[0] or local
        if op == "attn_qkv" and self.arch in _OF_GROUPS:
            yield self._by_heads
        if op in ("attn_q", "attn_k") and self.arch == "glm4" and self._has("rope.dimension_sections"):
            yield partial(self._in_halves, "attention.head_count" + "_kv" * (op == "attn_k"))
        if op in _BY_VALUE_HEAD and self.arch in _TILED:
            yield partial(self._tiled, *_BY_VALUE_HEAD[op])

    def _by_heads(self, x: Array) -> Array:
        """Q, K and V of each head of K: all of Q, then K, then V."""
        n, n_kv = self._number("attention.head_count"), self._number("attention.head_count_kv")
        head_dim = x.shape[0] // (n + 2 * n_kv)
        return np.concatenate(_by_sort(x, n_kv, [n * head_dim, n_kv * head_dim, n_kv * head_dim]))

    def _in_halves(self, heads: str, x: Array) -> Array:
        """The rotated channels of each head, its first ones, from pairs of neighbours to halves."""
        n_rotated = self._number("rope.dimension_count")
        each = x.reshape(self._number(heads), -1, *x.shape[1:])
        turned = neighbours(each[:, :n_rotated], n_rotated, 1, inverse=True)
        return np.concatenate((turned, each[:, n_rotated:]), 1).reshape(x.shape)

    def _tiled(self, before: bool, channels: bool, axis: int, x: Array) -> Array:
        """Value heads that lie by key heads: the first of each, then the second."""
        n_k, n_v = self._number("ssm.group_count"), self._number("ssm.time_step_rank")
        rows = np.moveaxis(x, axis, 0)
        qk, v = np.split(rows, [2 * n_k * self._number("ssm.state_size") * before])
        width = self._number("ssm.inner_size") // n_v if channels else 1
        heads = v.reshape(n_k, n_v // n_k, width, *rows.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(np.concatenate((qk, heads.reshape(v.shape))), 0, axis)

    def _has(self, field: str) -> bool:
        return f"{self.arch}.{field}" in self.file.metadata

    def _number(self, field: str) -> int:
        """A number of the metadata; heads of K and V are as many as of Q where nothing else is said."""
        value = self.file.metadata.get(f"{self.arch}.{field}")
        if value is None and field == "attention.head_count_kv":
            return self._number("attention.head_count")
        if not isinstance(value, int):
            raise ValueError(f"{field} is no one number")
        return value


# What of a delta net lies by value heads: whether behind Q and K, whether channels of heads, and along which axis.
_BY_VALUE_HEAD = {
    "attn_qkv": (True, True, 0),
    "ssm_conv1d": (True, True, 0),
    "attn_gate": (False, True, 0),
    "ssm_out": (False, True, 1),
    "ssm_alpha": (False, False, 0),
    "ssm_beta": (False, False, 0),
    "ssm_a": (False, False, 0),
    "ssm_dt": (False, False, 0),
}


def _joined(made: Sequence[Source], held: Sequence[Array]) -> Array:
    """What several sources make, one after the other in their outputs."""
    parts = [
        one.make(held[end - len(one.keys) : end])
        for one, end in zip(made, accumulate(len(one.keys) for one in made), strict=True)
    ]
    return np.concatenate(parts, max(parts[0].ndim - 2, 0))


def _cut(x: Array, sizes: Sequence[int], axis: int) -> list[Array]:
    """Parts of these sizes; raises ValueError where they are not all of it."""
    if x.shape[axis] != sum(sizes):
        raise ValueError(f"{sum(sizes)} of {x.shape[axis]}")
    return np.split(x, [*accumulate(sizes)][:-1], axis)


def _by_sort(x: Array, n_groups: int, sizes: Sequence[int]) -> list[Array]:
    """Of rows that lie by groups, each with some of each sort, those of each sort, `sizes` in all."""
    groups = x.reshape(n_groups, -1, *x.shape[1:])
    return [part.reshape(-1, *x.shape[1:]) for part in _cut(groups, [size // n_groups for size in sizes], 1)]


def _added(by: float, x: Array) -> Array:
    return x + np.float32(by)


def _cut_or_padded(shape: Sequence[int], x: Array) -> Array:
    """The rows of the tokens that there are, and zeros for those that the checkpoint has no row of."""
    if len(x.shape) != 2 or x.shape[1] != shape[1]:
        return x
    return np.pad(x[: shape[0]], ((0, max(0, shape[0] - len(x))), (0, 0)))


def _shaped(shape: Sequence[int], x: Array) -> Array:
    """In the file's shape, where that is the same but for axes of 1, or rows of what is one row in the checkpoint."""
    ours, theirs = ([size for size in of if size != 1] for of in (shape, x.shape))
    return x.reshape(shape) if ours == theirs or (len(theirs) < 2 and x.size == np.prod(ours)) else x


def head_counts(file: GGUFFile) -> Mapping[str, int]:
    """Heads of each Q and K tensor; none where the metadata does not say."""
    arch = architecture(file)
    q = file.metadata.get(f"{arch}.attention.head_count")
    kv = file.metadata.get(f"{arch}.attention.head_count_kv", q)
    counts: dict[str, int] = {}
    for layer in range(n_layer(file)):
        for x, heads in (("q", q), ("k", kv)):
            each = heads if isinstance(heads, int) or heads is None else heads[layer]
            counts |= {f"blk.{layer}.attn_{x}.{kind}": each for kind in ("weight", "bias") if each}
    return counts


def architecture(file: GGUFFile) -> str:
    """As the file names it."""
    return str(file.metadata.get("general.architecture"))


def n_layer(file: GGUFFile) -> int:
    """How many layers the file has."""
    return int(file.metadata.get(f"{architecture(file)}.block_count", 0))


def tensor_names(arch: str, n_layer: int) -> Any:
    """gguf-py's table of what checkpoints call the tensors of an architecture; None of one that it does not know."""
    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if arch not in known:
        return None
    every = dict(TensorNameMap.block_mappings_cfg)
    try:
        return get_tensor_name_map(known[arch], n_layer)
    finally:  # an architecture's own names stay in the table of all (gguf 0.19): the next one would have them, too
        TensorNameMap.block_mappings_cfg = every
