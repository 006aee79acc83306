"""Attention on a card of sm_80 or newer: mma.sync kernels over flat tiles of the token row.

A tile of queries reads the keys from the start of its first row's document to its last row, so what
a row costs follows from the lengths of its documents, and no table of documents is needed. Blocks
with the most keys start first. Formulas stand in attention.py.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from surogate.kernels.arrays import (
    BF16,
    FROZEN,
    Array,
    destination,
    empty,
    require,
    rows_aligned,
)
from surogate.kernels.batch import Docs
from surogate.kernels.card import shared_limit
from surogate.kernels.nvrtc import THREADS, Source, ctype

PADDING = 128  # rows of statistics are a multiple of this: every tile of queries divides it


@dataclass(frozen=True)
class Tile:
    """What a launch takes: tokens that a block answers for, threads, bytes of shared memory."""

    types: tuple[str, ...]  # template arguments
    rows: int
    threads: int
    shared: int


def _forward_tile(head_dim: int, *, row_tiles: int, warps: int, keys: int) -> Tile:
    """attention_fwd: ``warps`` warps of 16 ``row_tiles`` queries, ``keys`` keys at a time."""
    rows = 16 * row_tiles * warps
    shared = (rows + 2 * keys) * head_dim * 2
    return Tile(_types(head_dim, row_tiles, warps, keys), rows, warps * 32, shared)


def _dkdv_tile(
    head_dim: int, *, columns: int = 0, key_tiles: int = 1, warps: int, rows: int, stages: int
) -> Tile:
    """attention_bwd_dkdv: ``warps`` warps of 16 ``key_tiles`` keys, ``rows`` queries at a time.

    ``stages`` tiles of queries are on their way; a block answers for ``columns`` columns (0: all).
    """
    keys = 16 * key_tiles * warps
    shared = 4 * keys * head_dim + stages * rows * (4 * head_dim + 8)
    types = _types(head_dim, columns or head_dim, key_tiles, warps, rows, stages)
    return Tile(types, keys, warps * 32, shared)


def _dq_tile(head_dim: int, *, row_tiles: int, warps: int, keys: int, stages: int) -> Tile:
    """attention_bwd_dq: as forward, with ``stages`` tiles of keys and values on their way."""
    rows = 16 * row_tiles * warps
    shared = (rows + stages * keys) * head_dim * 4
    return Tile(_types(head_dim, row_tiles, warps, keys, stages), rows, warps * 32, shared)


def _types(*sizes: int) -> tuple[str, ...]:
    return tuple(map(str, sizes))


@dataclass(frozen=True)
class Tiles:
    """The tiles of a head size. Of ``dkdv`` a card uses the first that its shared memory holds."""

    forward: Tile
    dkdv: tuple[Tile, ...]
    dq: Tile
    lanes: int  # that share a row in attention_bwd_stats


# A warp's accumulators fill its registers, so that each operand it reads from shared memory feeds
# as many products as can be. All but the first dkdv tile of 128 fit the smallest cards' 99 KiB.
TILES = {
    64: Tiles(
        _forward_tile(64, row_tiles=2, warps=4, keys=64),
        (_dkdv_tile(64, warps=4, rows=64, stages=2),),
        _dq_tile(64, row_tiles=2, warps=4, keys=32, stages=2),
        lanes=8,
    ),
    96: Tiles(
        _forward_tile(96, row_tiles=2, warps=4, keys=64),
        (_dkdv_tile(96, warps=4, rows=64, stages=2),),
        _dq_tile(96, row_tiles=2, warps=4, keys=32, stages=2),
        lanes=16,
    ),
    128: Tiles(
        _forward_tile(128, row_tiles=2, warps=4, keys=64),
        (
            _dkdv_tile(128, warps=8, rows=64, stages=2),
            _dkdv_tile(128, warps=4, rows=64, stages=2),
        ),
        _dq_tile(128, row_tiles=2, warps=4, keys=32, stages=2),
        lanes=16,
    ),
    256: Tiles(
        _forward_tile(256, row_tiles=1, warps=4, keys=64),
        (_dkdv_tile(256, columns=128, warps=4, rows=32, stages=1),),
        _dq_tile(256, row_tiles=1, warps=4, keys=32, stages=1),
        lanes=32,
    ),
}

FORWARD = Source("attention_fwd", {"attention_fwd": [t.forward.types for t in TILES.values()]})
BACKWARD = Source(
    "attention_bwd",
    {
        "attention_bwd_stats": [_types(d, t.lanes) for d, t in TILES.items()],
        "attention_bwd_dkdv": [tile.types for t in TILES.values() for tile in t.dkdv],
        "attention_bwd_dq": [t.dq.types for t in TILES.values()],
        "attention_bwd_sinks": [("float",), ("bf16",)],
    },
)


def forward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    """Returns o and lse [heads, tokens]."""
    tokens, heads, head_dim = q.shape
    tile = _tiles(q, head_dim).forward
    o = empty(q.shape, q.dtype, like=q)
    lse = empty((heads, tokens), np.float32, like=q)
    if tokens == 0:
        return o, lse
    strides = [_stride("attention_fwd", n, x) for n, x in (("q", q), ("k", k), ("v", v))]
    FORWARD.launch(
        "attention_fwd",
        tile.types,
        -(-tokens // tile.rows) * heads,
        tile.threads,
        [o, lse, q, k, v, as_float32(sinks), docs.start, tokens, heads, k.shape[1]]
        + [*strides, clamped_window(window, tokens), float(scale)],
        shared=tile.shared,
    )
    return o, lse


def backward(res: Any, do: Array, dq: Array, dk: Array, dv: Array) -> Array:
    """Writes dq, dk and dv for AttentionResiduals.

    Returns each query's lse / ln 2 and delta, float32 [heads, padded, 2].
    """
    tokens, heads, head_dim = do.shape
    kv_heads, tiles = res.k.shape[1], _tiles(do, head_dim)
    require(
        dq.strides == dk.strides == dv.strides,
        f"attention: dq, dk and dv must lie in one buffer, got strides {dq.strides}, {dk.strides} "
        f"and {dv.strides}",
    )
    padded = -(-tokens // PADDING) * PADDING
    stats = empty((heads, padded, 2), np.float32, like=do)
    if tokens == 0:
        return stats
    named = (("dq", dq), ("q", res.q), ("k", res.k), ("v", res.v), ("do", do))
    strides = [_stride("attention_bwd", name, x) for name, x in named]
    BACKWARD.launch(
        "attention_bwd_stats",
        (str(head_dim), str(tiles.lanes)),
        -(-padded * heads * tiles.lanes // THREADS),
        THREADS,
        [stats, res.o, do, res.lse, tokens, padded, heads, strides[-1]],
    )
    inputs = [res.q, res.k, res.v, do, stats]
    settings = [tokens, padded, heads, kv_heads, *strides]
    settings += [clamped_window(res.window, tokens), float(res.scale)]
    tile = next(t for t in tiles.dkdv if t.shared <= shared_limit())
    BACKWARD.launch(
        "attention_bwd_dkdv",
        tile.types,
        (-(-tokens // tile.rows) * kv_heads, head_dim // int(tile.types[1])),
        tile.threads,
        [dk, dv, *inputs, res.docs.end, *settings],
        shared=tile.shared,
    )
    BACKWARD.launch(
        "attention_bwd_dq",
        tiles.dq.types,
        -(-tokens // tiles.dq.rows) * heads,
        tiles.dq.threads,
        [dq, *inputs, res.docs.start, *settings],
        shared=tiles.dq.shared,
    )
    return stats


def sinks_gradient(res: Any, stats: Array, into: Any) -> Array | None:
    """The gradient of the sinks, from what a backward returned."""
    if res.sinks is None or into is FROZEN:
        return None
    heads, padded, _ = stats.shape
    d_sinks, accumulate = destination(into, (heads,), res.sinks.dtype, like=stats)
    BACKWARD.launch(
        "attention_bwd_sinks",
        (ctype(d_sinks.dtype),),
        heads,
        THREADS,
        [d_sinks, as_float32(res.sinks), stats, len(res.q), padded, accumulate],
    )
    return d_sinks


def _tiles(x: Array, head_dim: int) -> Tiles:
    require(x.dtype == BF16, f"attention: the kernels take bfloat16, got {x.dtype}")
    sizes = ", ".join(map(str, TILES))
    require(head_dim in TILES, f"attention: the kernels take head_dim {sizes}, got {head_dim}")
    return TILES[head_dim]


def _stride(op: str, name: str, x: Array) -> np.int64:
    """Elements from a token to the next. Its heads must lie together, each token on 16 bytes."""
    size = x.dtype.itemsize
    together = x.strides[2] == size and (x.shape[1] == 1 or x.strides[1] == x.shape[2] * size)
    require(
        together and rows_aligned(x),
        f"{op}: the heads of a token of {name} must lie together, tokens at multiples of 16 bytes; "
        f"got strides of {x.strides} bytes for shape {x.shape}: pass a contiguous array",
    )
    return np.int64(x.strides[0] // size)


def as_float32(x: Array | None) -> Array | None:
    """Sinks as the kernels read them."""
    return None if x is None else x.astype(np.float32, copy=False)


def clamped_window(window: int | None, tokens: int) -> int:
    """A window that fits an int32 with room to add a token index; without one, all tokens."""
    return tokens if window is None else min(window, tokens)
