"""Attention on Hopper (sm_90a): the kernels that attention.py may launch there.

What they compute stands in attention.py; how, at the head of each .cu file. Both directions cost
what the lengths of the documents cost: work is cut by tokens, and a tile reads from the first key
of its first query (or to the last query of its last key), so nothing depends on how many documents
there are, and one CUDA graph serves every batch. Sums have a fixed order: the same inputs give the
same bits.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from surogate.kernels.arrays import BF16, Array, Backend, empty, require, zeros
from surogate.kernels.attention_mma import as_float32, clamped_window
from surogate.kernels.batch import Docs
from surogate.kernels.card import multiprocessors
from surogate.kernels.nvrtc import Source, architecture

HOPPER = ("90a",)
TILE, THREADS = 128, 384  # rows of a work item and threads of a block, as in attention_hopper.cuh
CACHE = 40 << 20  # bytes that the heads at work may read over and over: the L2 cache has 50 MiB
SMALL = 2048  # bytes of shared memory beside tiles, at most


@dataclass(frozen=True)
class Tiles:
    """Tiles of a head size: rows at a time, and how many tiles of them are on their way."""

    head_dim: int
    keys: int  # forward and dq walk over keys
    forward_stages: int
    dq_stages: tuple[int, int]  # of keys, of values
    rows: int  # dkdv walks over rows of queries
    dkdv_stages: int
    turns: bool = True  # of forward's two warpgroups to issue products

    @property
    def forward(self) -> tuple[str, ...]:
        return _types(self.head_dim, self.keys, self.forward_stages, str(self.turns).lower())

    @property
    def forward_shared(self) -> int:
        return (TILE + 2 * self.forward_stages * self.keys) * self.head_dim * 2 + SMALL

    @property
    def dq(self) -> tuple[str, ...]:
        return _types(self.head_dim, self.keys, *self.dq_stages)

    @property
    def dq_shared(self) -> int:
        return (2 * TILE + sum(self.dq_stages) * self.keys) * self.head_dim * 2 + SMALL

    @property
    def dkdv(self) -> tuple[str, ...]:
        return _types(self.head_dim, self.rows, self.dkdv_stages)

    @property
    def dkdv_shared(self) -> int:
        tiles = (2 * TILE + 2 * self.dkdv_stages * self.rows) * self.head_dim * 2
        return tiles + self.dkdv_stages * self.rows * 8 + SMALL


def _types(*values: int | str) -> tuple[str, ...]:
    return tuple(map(str, values))


TILES = {
    64: Tiles(head_dim=64, keys=128, forward_stages=3, dq_stages=(4, 3), rows=64, dkdv_stages=6),
    128: Tiles(head_dim=128, keys=128, forward_stages=2, dq_stages=(3, 2), rows=64, dkdv_stages=4),
}

FORWARD = Source(
    "attention_hopper_fwd",
    {"attention_hopper_fwd": [tiles.forward for tiles in TILES.values()]},
    architectures=HOPPER,
)
BACKWARD = Source(
    "attention_hopper_bwd",
    {
        "attention_hopper_bwd_dq": [tiles.dq for tiles in TILES.values()],
        "attention_hopper_bwd_dkdv": [tiles.dkdv for tiles in TILES.values()],
    },
    architectures=HOPPER,
)


def supported(q: Array) -> bool:
    """Whether these kernels take arrays like ``q`` on the current card."""
    return q.dtype == BF16 and takes(q.shape[2])


def takes(head_dim: int) -> bool:
    """Whether these kernels take heads of a size on the current card."""
    return head_dim in TILES and architecture() in HOPPER


def forward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    """Returns o [tokens, heads, head_dim] and lse [heads, tokens], as attention_fwd keeps them.

    Raises ValueError unless tokens and heads lie at multiples of 16 bytes.
    """
    tokens, heads, head_dim = q.shape
    tiles, kv_heads = TILES[head_dim], k.shape[1]
    o = empty(q.shape, q.dtype, like=q)
    lse = empty((heads, tokens), np.float32, like=q)
    if tokens == 0:
        return o, lse
    group, section = heads // kv_heads, _section(tokens, head_dim, kv_heads, heads_read=1)
    keys = [tensor_map(name, x, tiles.keys) for name, x in (("k", k), ("v", v))]
    FORWARD.launch(
        "attention_hopper_fwd",
        tiles.forward,
        _blocks(tokens, heads),
        THREADS,
        [o, lse, zeros(1, np.int32, like=q), tensor_map("q", q, TILE), *keys]
        + [as_float32(sinks), docs.start, tokens, heads, group, section * group]
        + [clamped_window(window, tokens), float(scale)],
        shared=tiles.forward_shared,
    )
    return o, lse


def backward(res: Any, do: Array, dq: Array, dk: Array, dv: Array) -> Array:
    """Writes dq, dk and dv for the AttentionResiduals ``res``.

    Returns float32 [heads, padded, 2], padded to whole tiles: lse / ln 2 and delta of each query,
    as attention_bwd_sinks reads them.

    Raises ValueError unless tokens and heads lie at multiples of 16 bytes.
    """
    tokens, heads, _ = do.shape
    stats = empty((heads, -(-tokens // TILE) * TILE, 2), np.float32, like=do)
    if tokens:
        counters = zeros(2, np.int32, like=do)
        launch_dq(res, do, dq, stats, counters[:1])
        launch_dkdv(res, do, dk, dv, stats, counters[1:])
    return stats


def launch_dq(res: Any, do: Array, dq: Array, stats: Array, counter: Array) -> None:
    """Writes dq, and what ``backward`` returns to ``stats``. ``counter`` holds an int32 of 0."""
    tokens, heads, head_dim = do.shape
    tiles, kv_heads = TILES[head_dim], res.k.shape[1]
    group = heads // kv_heads
    section = _section(tokens, head_dim, kv_heads, heads_read=1) * group
    keys = [tensor_map(name, x, tiles.keys) for name, x in (("k", res.k), ("v", res.v))]
    BACKWARD.launch(
        "attention_hopper_bwd_dq",
        tiles.dq,
        _blocks(tokens, heads),
        THREADS,
        [dq, stats, counter, tensor_map("q", res.q, TILE), *keys, tensor_map("do", do, TILE)]
        + [res.o, do, res.lse, res.docs.start, tokens, heads, group, section]
        + [_token_stride("dq", dq), _token_stride("do", do)]
        + [clamped_window(res.window, tokens), float(res.scale)],
        shared=tiles.dq_shared,
    )


def launch_dkdv(res: Any, do: Array, dk: Array, dv: Array, stats: Array, counter: Array) -> None:
    """Writes dk and dv, which lie alike, from the ``stats`` of launch_dq."""
    tokens, heads, head_dim = do.shape
    tiles, kv_heads = TILES[head_dim], dk.shape[1]
    group = heads // kv_heads
    section = _section(tokens, head_dim, kv_heads, heads_read=group)
    require(dv.strides == dk.strides, f"attention: dk and dv must lie alike, got {dv.strides}")
    named = (("q", res.q, tiles.rows), ("k", res.k, TILE), ("v", res.v, TILE))
    BACKWARD.launch(
        "attention_hopper_bwd_dkdv",
        tiles.dkdv,
        _blocks(tokens, kv_heads),
        THREADS,
        [dk, dv, counter, *(tensor_map(*x) for x in named), tensor_map("do", do, tiles.rows)]
        + [stats, res.docs.end, tokens, kv_heads, group, section]
        + [_token_stride("dk", dk), clamped_window(res.window, tokens), float(res.scale)],
        shared=tiles.dkdv_shared,
    )


def _section(tokens: int, head_dim: int, kv_heads: int, heads_read: int) -> int:
    """The kv heads whose items come first: as many as fit the cache, a divisor of kv_heads.

    An item of each reads two arrays of ``heads_read`` heads.
    """
    fit = CACHE // (tokens * head_dim * 2 * 2 * heads_read)
    return max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= max(1, fit))


def _token_stride(name: str, x: Array) -> np.int64:
    """Elements from a token to the next. The heads of a token must lie together."""
    size = x.dtype.itemsize
    require(
        x.strides[2] == size and (x.shape[1] == 1 or x.strides[1] == x.shape[2] * size),
        f"attention: the heads of a token of {name} must lie together; got strides of {x.strides} "
        f"bytes for shape {x.shape}: pass a contiguous array",
    )
    return np.int64(x.strides[0] // size)


def _blocks(tokens: int, heads: int) -> int:
    """Blocks of a kernel that takes items until none is left: one a multiprocessor."""
    return min(-(-tokens // TILE) * heads, multiprocessors())


# Tensor maps: what the tensor memory accelerator must know of an array.

EMULATED_MAP = np.dtype(
    [
        ("address", np.uint64),
        ("sizes", np.uint64, 3),
        ("strides", np.uint64, 2),
        ("box", np.uint64, 3),
        ("item_size", np.uint64),
        ("unused", np.uint64, 6),
    ]
)


def tensor_map(name: str, x: Array, rows: int) -> Any:
    """x [tokens, heads, head_dim] in boxes of ``rows`` tokens of one head and 128 bytes of columns.

    Raises ValueError unless tokens and heads lie at multiples of 16 bytes and columns together.
    """
    address = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    fits = x.strides[2] == x.itemsize and not any(n % 16 for n in (address, *x.strides[:2]))
    require(
        fits,
        f"attention: columns of {name} must lie together, heads and tokens at multiples of 16 "
        f"bytes; got strides of {x.strides} bytes for shape {x.shape}: pass a contiguous array",
    )
    sizes, strides = x.shape[::-1], (x.strides[1], x.strides[0])
    box = (128 // x.itemsize, 1, rows)
    if Backend.launch is not None:
        return np.array([(address, sizes, strides, box, x.itemsize, 0)], EMULATED_MAP)[0]
    return _encode(address, sizes, strides, box)


@functools.lru_cache(maxsize=1024)
def _encode(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> np.ndarray:
    """A CUtensorMap of bf16 with the 128-byte swizzle and zeros outside, by the driver.

    An array of one element is what CuPy passes by value.
    """
    bf16, no_interleave, swizzle_128, promote_256, zeros_outside = 9, 0, 3, 3, 0
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(buffer) // 64) * 64
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        bf16,
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        no_interleave,
        swizzle_128,
        promote_256,
        zeros_outside,
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: error {status} for {sizes}, strides {strides}, box {box}"
        )
    return np.frombuffer(ctypes.string_at(aligned, 128), "V128")
