"""Attention on Hopper (sm_90a): the kernels that attention.py launches there for a head_dim of 128.

What they compute stands in attention.py; how, at the head of each .cu file. Both directions cost what
the lengths of the documents cost: work is cut by tokens, and a tile reads from the first key of its
first query (or to the last query of its last key), so nothing depends on how many documents there are
and one CUDA graph serves every batch. Sums have a fixed order, so the same inputs give the same bits.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from surogate.kernels.arrays import BF16, Array, Backend, empty, require, zeros
from surogate.kernels.batch import Docs
from surogate.kernels.nvrtc import Source, architecture

HOPPER = ("90a",)
TILE, THREADS = 128, 384  # rows of a work item and threads of a block, as in attention_hopper.cuh
CACHE = 40 << 20  # bytes of keys and values that should stay in the L2 cache of 50 MiB
BARRIERS = 2048  # bytes of shared memory beside tiles, at most


@dataclass(frozen=True)
class Forward:
    """Tiles of attention_hopper_fwd: keys at a time, tiles of them on their way."""

    head_dim: int
    keys: int
    stages: int

    @property
    def types(self) -> tuple[str, ...]:
        return (str(self.head_dim), str(self.keys), str(self.stages), "true")

    @property
    def shared(self) -> int:
        return (TILE + 2 * self.stages * self.keys) * self.head_dim * 2 + BARRIERS


FORWARD = {128: Forward(head_dim=128, keys=128, stages=2)}

FORWARD_SOURCE = Source(
    "attention_hopper_fwd",
    {"attention_hopper_fwd": [tile.types for tile in FORWARD.values()]},
    architectures=HOPPER,
)


def supported(q: Array) -> bool:
    """Whether these kernels take arrays like ``q`` on the current card."""
    return q.dtype == BF16 and q.shape[2] in FORWARD and architecture() in HOPPER


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
    tile, group = FORWARD[head_dim], heads // k.shape[1]
    o = empty(q.shape, q.dtype, like=q)
    lse = empty((heads, tokens), np.float32, like=q)
    if tokens == 0:
        return o, lse
    maps = [tensor_map("q", q, TILE), tensor_map("k", k, tile.keys), tensor_map("v", v, tile.keys)]
    FORWARD_SOURCE.launch(
        "attention_hopper_fwd",
        tile.types,
        _blocks(-(-tokens // TILE) * heads),
        THREADS,
        [o, lse, zeros(1, np.int32, like=q), *maps, _float32(sinks), docs.start]
        + [tokens, heads, group, _section(k, group), _window(window, tokens), float(scale)],
        shared=tile.shared,
    )
    return o, lse


def _section(k: Array, group: int) -> int:
    """Query heads whose items come first: whole groups, whose keys and values fit the cache."""
    tokens, kv_heads, head_dim = k.shape
    fit = max(1, CACHE // (tokens * head_dim * 2 * k.itemsize))
    return group * max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fit)


def _float32(x: Array | None) -> Array | None:
    return None if x is None else x.astype(np.float32, copy=False)


def _window(window: int | None, tokens: int) -> int:
    """A window that fits an int32 with room to add a token index; without one, all tokens."""
    return tokens if window is None else min(window, tokens)


@functools.cache
def _multiprocessors_of(card: int) -> int:
    import cupy

    return int(cupy.cuda.Device(card).attributes["MultiProcessorCount"])


def _blocks(items: int) -> int:
    """Blocks of a kernel that takes items until none is left: one a multiprocessor."""
    if Backend.launch is not None:
        return min(items, 2)
    import cupy

    return min(items, _multiprocessors_of(cupy.cuda.runtime.getDevice()))


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
) -> np.void:
    """A CUtensorMap of bf16 with the 128-byte swizzle and zeros outside, by the driver."""
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
            f"cuTensorMapEncodeTiled: error {status} for sizes {sizes}, strides {strides}, box {box}"
        )
    return np.frombuffer(ctypes.string_at(aligned, 128), "V128")[0]
