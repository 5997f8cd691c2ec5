"""llama.cpp's graph of a model, described without running the model.

Of a model that is loaded without its weights `llama_graph_reserve` builds the graph of so many tokens, whose tensors
have sizes but no memory. Five graphs tell how each size follows the tokens and the cells; a sixth says whether it does.
A llama.cpp that does not export that function is fed the tokens, and each node is made to compute nothing before its
turn comes.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from tracediff.errors import EngineError
from tracediff_reference import ggml
from tracediff_reference.description import Description, Node, Read, Size, encode
from tracediff_reference.engine import context_params, decoded, is_encoder, loaded, start_library
from tracediff_reference.protocol import DescribeRequest, Options
from tracediff_reference.recognise import VIEWS

_GRID = ((5, 256), (7, 256), (11, 256), (5, 512), (7, 512))  # tokens, cells: what sizes are fitted to
_CHECK = (13, 768)  # and what they must predict
_UBATCH = 64
_CELLS = 256  # a cache is a multiple of so many
_LONGEST = 256  # bytes of a value of the metadata
_IS_INPUT = 1  # GGML_TENSOR_FLAG_INPUT
# llama_graph_reserve(llama_context *, uint32_t, uint32_t, uint32_t) is exported, though no part of the public header
# (src/llama-ext.h): as C++ compilers of Linux and macOS name it, and that of Windows.
_RESERVE = (
    "_Z19llama_graph_reserveP13llama_contextjjj",
    "?llama_graph_reserve@@YAPEAUggml_cgraph@@PEAUllama_context@@III@Z",
)


@dataclass(frozen=True, slots=True)
class Table:
    """The tensors of a graph, each after those that it reads: ggml's structs copied, what each computes, and the rows
    of its sources and, last, of what it is a view of: [n, MAX_SRC + 1], -1 for none.
    """

    rows: np.ndarray
    ops: tuple[str, ...]
    sources: np.ndarray

    def base(self, row: int) -> int:
        """What a chain of views begins with."""
        while self.ops[row] in VIEWS:
            row = int(self.sources[row, 0])
        return row


def write_description(request: DescribeRequest) -> None:
    """Describe the model of `request` into the file that it names."""
    start_library()
    Path(request.out).write_bytes(encode(describe(Path(request.model), request.options)))


def describe(path: Path, options: Options) -> Description:
    """The graph of the GGUF file at `path`; raises EngineError where this llama.cpp gives none."""
    model = _load(path, is_dry=_reserving() is None)
    causal = _is_causal(model, options)
    tables = [_reserve(model, options, *at) for at in (*_GRID, _CHECK)]
    window = _window(model)
    windowed = _windowed(model, options, window) if window else np.zeros(len(tables[0].ops), bool)
    llama.llama_model_free(model)
    for table in tables[1:]:
        if table.ops != tables[0].ops or not np.array_equal(table.sources, tables[0].sources):
            raise EngineError("llama.cpp builds another graph of this model for other numbers of tokens.")
    return Description(tuple(_nodes(tables, windowed)), window, causal, f"llama-cpp-python {ggml.llama_version()}")


def _load(path: Path, is_dry: bool) -> Any:
    params = llama.llama_model_default_params()
    if not is_dry:
        params.no_alloc = True
        params.load_mode = llama.LLAMA_LOAD_MODE_NONE  # to map the file and allocate nothing aborts
    params.use_extra_bufts = False
    params.n_gpu_layers = 0
    return loaded(str(path), params)


def _window(model: Any) -> int:
    """Tokens of a sliding window. Of deepseek4 llama_model_n_swa says 0, for it tells whether a cache may be rolled
    back: the metadata have it.
    """
    said = max(llama.llama_model_n_swa(model), 0)
    return said or int(_metadata(model, f"{_metadata(model, 'general.architecture')}.attention.sliding_window") or 0)


def _metadata(model: Any, key: str) -> str:
    """As text; empty where there is none."""
    value = ctypes.create_string_buffer(_LONGEST)
    n = llama.llama_model_meta_val_str(model, key.encode(), value, len(value))
    return value.value.decode() if n >= 0 else ""


def _windowed(model: Any, options: Options, window: int) -> np.ndarray:
    """Which rows are as wide as the cache of a window, where other caches are longer."""
    width = -(-(window + _UBATCH) // _CELLS) * _CELLS
    return _reserve(model, options, _GRID[0][0], width + _CELLS, whole=False).rows["ne"][:, 0] == width


def _reserve(model: Any, options: Options, n_tokens: int, n_cells: int, whole: bool = True) -> Table:
    """A graph; unless `whole`, a cache holds no more than its window."""
    function = _reserving()
    if function is None:
        return _dry(model, options, n_tokens, n_cells, whole)
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_uint32] * 3]
    context = _context(model, options, n_cells, whole)
    graph = function(context, n_tokens, 1, n_tokens)
    if not graph:
        raise EngineError("llama.cpp builds no graph of this model with these options, for the reason below.")
    lib, walk = ggml.library(), _Walk()
    for k in range(lib.ggml_graph_n_nodes(graph)):
        walk.add(lib.ggml_graph_node(graph, k))
    llama.llama_free(context)
    return walk.table()


def _reserving() -> Any:
    """llama_graph_reserve; None where this llama.cpp does not export it."""
    return next((llama._lib[name] for name in _RESERVE if hasattr(llama._lib, name)), None)


def _dry(model: Any, options: Options, n_tokens: int, n_cells: int, whole: bool) -> Table:
    """The graph of a step of so many tokens that sees so many cells, none of whose nodes computes anything."""
    os.environ["LLAMA_GRAPH_REUSE_DISABLE"] = "1"  # a graph that was used has no ops left
    walk: _Walk | None = None

    @llama.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
    def skip(address: int, ask: bool, _: object) -> bool:
        if walk is not None:
            walk.add(address)
        ggml.at(address).op = 0  # GGML_OP_NONE
        return False

    context = _context(model, options, n_cells, whole, skip)
    # What is visible is padded: all cells but the last of them are filled before.
    before = n_cells - _CELLS if llama.llama_get_memory(context) else 0
    for first in range(0, before, _UBATCH):
        _feed(context, first, _UBATCH)
    walk = _Walk()
    _feed(context, before, n_tokens)
    llama.llama_free(context)
    return walk.table()


def _feed(context: Any, first: int, n: int) -> None:
    if result := decoded(context, (0,) * n, range(first, first + n), (0,) * n):
        raise EngineError(f"llama.cpp does not take {n} tokens of this model: llama_decode answered {result}.")


def _context(model: Any, options: Options, n_cells: int, whole: bool = True, callback: Any = None) -> Any:
    params = context_params(options)
    if callback:
        params.cb_eval = callback
    params.n_ctx, params.n_batch, params.n_ubatch, params.swa_full = n_cells, _UBATCH, _UBATCH, whole
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise EngineError("llama.cpp cannot make a context for this model with these options, for the reason below.")
    return context


def _is_causal(model: Any, options: Options) -> bool:
    """Whether tokens see none after them: as the model says, and never where it only encodes, or has no memory
    (llama_context::encode).
    """
    if is_encoder(model):
        return False
    context = _context(model, options, _CELLS)
    function = llama._lib.llama_get_causal_attn
    function.restype, function.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    found = bool(function(context)) and bool(llama.llama_get_memory(context))
    llama.llama_free(context)
    return found


class _Walk:
    """The tensors of a graph, copied as its nodes come by."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._copies: list[bytes] = []
        self._ops: list[str] = []

    def add(self, node: int) -> None:
        """A node, and before it all that it reads."""
        lib, stack = ggml.library(), [node]
        while stack:
            address = stack.pop()
            if address in self._row_of:
                continue
            tensor = ggml.at(address)
            # A cast lists itself as a source.
            before = [s for s in (tensor.view_src, *tensor.src) if s and s != address and s not in self._row_of]
            if before:
                stack += [address, *reversed(before)]
            else:
                self._row_of[address] = len(self._row_of)
                self._copies.append(ctypes.string_at(address, ctypes.sizeof(ggml.Tensor)))
                self._ops.append(lib.ggml_op_desc(address).decode())

    def table(self) -> Table:
        """All of them."""
        rows = np.frombuffer(b"".join(self._copies), np.dtype(ggml.Tensor))
        addresses = np.concatenate((rows["src"], rows["view_src"][:, None]), 1)
        sources = [[self._row_of.get(address, -1) for address in of] for of in addresses.tolist()]
        return Table(rows, tuple(self._ops), np.array(sources))


def _nodes(tables: list[Table], windowed: np.ndarray) -> Iterator[Node]:
    """All tensors that are no views, with what they read resolved to where it lies."""
    first, sizes = tables[0], _sizes(tables)
    number = {row: i for i, row in enumerate(row for row, op in enumerate(first.ops) if op not in VIEWS)}

    def read(row: int, base: int) -> Read:
        offset = _minus(sizes[row].offset, sizes[base].offset)
        return Read(number[base], sizes[row].shape, sizes[row].strides, offset)

    for row in number:
        tensor, present = first.rows[row], first.sources[row, :-1].tolist()
        while present and present[-1] == -1:
            present.pop()
        root = int(first.sources[row, -1])
        yield Node(
            op=first.ops[row],
            name=tensor["name"].tobytes().partition(b"\0")[0].decode(errors="replace"),
            type=ggml.type_name(int(tensor["type"])),
            shape=sizes[row].shape,
            reads=tuple(read(s, first.base(s)) if s not in (-1, row) else None for s in present),
            params=_params([table.rows[row]["op_params"] for table in tables]),
            is_input=bool(tensor["flags"] & _IS_INPUT),
            is_windowed=bool(windowed[row]),
            into=read(row, root) if root != -1 else None,
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor lies in memory, in elements, outermost axis first; leading axes of size 1 are left out."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size


def _sizes(tables: list[Table]) -> list[_Layout]:
    """The layout of each row, as it follows tokens and cells."""
    figures = np.stack([_figures(table.rows) for table in tables])
    terms = np.array([[1, t, s, t * s, t * t] for t, s in (*_GRID, _CHECK)])
    fitted = np.linalg.solve(terms[:-1], figures[:-1].reshape(len(_GRID), -1).astype(np.float64))
    whole = np.rint(fitted).astype(np.int64)
    holds = (terms @ whole == figures.reshape(len(tables), -1)).all(0).reshape(figures.shape[1:])
    return [
        _layout([_size(c) if right else None for c, right in zip(of.tolist(), ok, strict=True)])
        for of, ok in zip(np.moveaxis(whole.reshape(-1, *figures.shape[1:]), 0, -1), holds.tolist(), strict=True)
    ]


def _figures(rows: np.ndarray) -> np.ndarray:
    """Sizes and strides, innermost first, and offset: int64 [n, 9], in elements."""
    block, size = ggml.blocks(rows["type"])
    strides, offset = rows["nb"].astype(np.int64), rows["view_offs"].astype(np.int64)
    return np.concatenate(
        (rows["ne"], strides * block[:, None] // size[:, None], (offset * block // size)[:, None]), 1
    )  # fmt: skip


def _size(terms: list[int]) -> Size:
    return tuple(terms) if any(terms[1:]) else terms[0]  # type: ignore[return-value]


def _layout(figures: list[Size]) -> _Layout:
    shape, strides, offset = figures[3::-1], figures[7:3:-1], figures[8]
    first = next((i for i, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1)
    return _Layout(tuple(shape[first:]), tuple(strides[first:]), offset)


def _minus(a: Size, b: Size) -> Size:
    if not b or a is None:
        return a if b is not None else None
    x, y = ((size, 0, 0, 0, 0) if isinstance(size, int) else size for size in (a, b))
    return _size([i - j for i, j in zip(x, y, strict=True)])


def _params(of: list[np.ndarray]) -> tuple[int | float | None, ...]:
    """An op's parameters up to the last that is not 0: bits; a float that is so much for each token; else None."""
    bits = np.stack(of)
    tokens = np.array([t for t, _ in (*_GRID, _CHECK)])[:, None]
    each = bits.view(np.float32).astype(np.float64) / tokens
    found = [
        int(same[0]) if (same == same[0]).all() else float(per[0]) if (per == per[0]).all() else None
        for same, per in zip(bits.T, each.T, strict=True)
    ]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)
