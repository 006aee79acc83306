"""Causal attention inside each document of a packed row, with grouped heads, windows and sinks.

    S = scale * Q K^T    P = softmax(S) over the keys a query reads    O = P V

Query i reads key j when start[i] <= j <= i and, with a window, j > i - window (so a window counts
the query itself). Query head h reads kv head h // (heads / kv_heads). A sink is one more logit a
head, in the softmax of every query, without a value.

Backward, with lse = log of the sum of exp(S) (sink included) and delta = sum(do * o) of each query:
    P = exp(S - lse)              dV = P^T dO           (sums over the query heads of a group)
    dS = P * (dO V^T - delta)     dQ = scale * dS K     dK = scale * dS^T Q
    d_sink = -sum over queries of exp(sink - lse) * delta

Forward and backward go over tiles and never hold S, after FlashAttention-2 (Dao 2023, arXiv
2307.08691). What a row costs follows from the lengths of its documents. The kernels take bfloat16
and a head_dim of 64, 96, 128 or 256.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from surogate.kernels.arrays import (
    BF16,
    FROZEN,
    Array,
    Backend,
    destination,
    empty,
    namespace,
    on_device,
    require,
)
from surogate.kernels.attention_host import backward_host, forward_host
from surogate.kernels.batch import Docs
from surogate.kernels.nvrtc import THREADS, Source, ctype
from surogate.kernels.pair import Pair

SCORES = 1 << 20  # of a block of the host version: 4 MiB in float32
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


class AttentionResiduals(NamedTuple):
    """What attention_bwd needs: arrays of attention_fwd, its output, and its settings."""

    q: Float[Array, "tokens heads head_dim"]
    k: Float[Array, "tokens kv_heads head_dim"]
    v: Float[Array, "tokens kv_heads head_dim"]
    sinks: Float[Array, " heads"] | None
    o: Float[Array, "tokens heads head_dim"]
    lse: Float[
        Array, "heads tokens"
    ]  # natural logarithm; float32 (float64 of a float64 host input)
    docs: Docs
    scale: float
    window: int | None


def attention_fwd(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    sinks: Float[Array, " heads"] | None = None,
    *,
    docs: Docs,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], AttentionResiduals]:
    """Returns o and what attention_bwd needs.

    q, k and v may be views of wider rows: the distance of two tokens is free. Under ``vjp`` give
    ``sinks`` also when it is None, as backward answers for four arrays.

    Raises ValueError for shapes that do not fit together, a scale that is not positive, a window
    below 1, and, on a card, for another dtype than bfloat16 or a head_dim that has no kernel.
    """
    _check(q, k, v, sinks, docs, scale, window)
    if on_device(q):
        o, lse = _forward_kernel(q, k, v, sinks, docs, scale, window)
    else:
        o, lse = forward_host(q, k, v, sinks, docs, scale, window)
    return o, AttentionResiduals(q, k, v, sinks, o, lse, docs, scale, window)


def attention_bwd(
    res: AttentionResiduals, do: Float[Array, "tokens heads head_dim"], *, into: Any = None
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, " heads"] | None,
]:
    """Returns (dq, dk, dv, d_sinks); d_sinks is None without sinks.

    dq, dk and dv are views of one fresh buffer [tokens, heads + 2 kv_heads, head_dim], in that
    order: the gradient of a fused QKV product. ``into`` is the destination of d_sinks.
    """
    packed, d_sinks = attention_bwd_packed(res, do, into=into)
    heads, kv_heads = res.q.shape[1], res.k.shape[1]
    end = heads + kv_heads
    return packed[:, :heads], packed[:, heads:end], packed[:, end:], d_sinks


def attention_bwd_packed(
    res: AttentionResiduals, do: Float[Array, "tokens heads head_dim"], *, into: Any = None
) -> tuple[Float[Array, "tokens packed head_dim"], Float[Array, " heads"] | None]:
    """attention_bwd that returns (dq, dk and dv in one array, d_sinks)."""
    require(
        do.shape == res.q.shape and do.dtype == res.q.dtype,
        f"attention_bwd: do must be {res.q.dtype}{res.q.shape}, got {do.dtype}{do.shape}",
    )
    heads, kv_heads = res.q.shape[1], res.k.shape[1]
    packed = empty((len(do), heads + 2 * kv_heads, do.shape[2]), do.dtype, like=do)
    grads = (packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :])
    backward = _backward_kernel if on_device(do) else backward_host
    return packed, backward(res, do, *grads, into)


def _check(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
) -> None:
    tokens, heads, head_dim = q.shape
    require(
        k.shape == v.shape and k.shape[::2] == (tokens, head_dim),
        f"attention_fwd: k and v must be ({tokens}, kv_heads, {head_dim}), "
        f"got {k.shape} and {v.shape}",
    )
    require(
        heads % k.shape[1] == 0,
        f"attention_fwd: heads must be a multiple of kv_heads, got {heads} and {k.shape[1]}",
    )
    require(
        q.dtype == k.dtype == v.dtype,
        f"attention_fwd: q, k and v must agree, got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    require(
        docs.start.shape == docs.end.shape == (tokens,),
        f"attention_fwd: docs must hold {tokens} tokens, "
        f"got {docs.start.shape} and {docs.end.shape}",
    )
    require(
        sinks is None or sinks.shape == (heads,),
        f"attention_fwd: sinks must be ({heads},), got {getattr(sinks, 'shape', None)}",
    )
    require(scale > 0, f"attention_fwd: scale must be positive, got {scale}")
    require(
        window is None or window >= 1,
        f"attention_fwd: window must be at least 1 (it counts the query) or None, got {window}",
    )


# The kernels.


def _forward_kernel(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
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
        [o, lse, q, k, v, _float32(sinks), docs.start, tokens, heads, k.shape[1]]
        + [*strides, _window(window, tokens), float(scale)],
        shared=tile.shared,
    )
    return o, lse


def _backward_kernel(
    res: AttentionResiduals, do: Array, dq: Array, dk: Array, dv: Array, into: Any
) -> Array | None:
    tokens, heads, head_dim = do.shape
    kv_heads, tiles = res.k.shape[1], _tiles(do, head_dim)
    padded = -(-tokens // PADDING) * PADDING
    stats = empty((heads, padded, 2), np.float32, like=do)
    if tokens == 0:
        return _sinks_kernel(res, stats, into)
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
    settings += [_window(res.window, tokens), float(res.scale)]
    tile = next(t for t in tiles.dkdv if t.shared <= _shared_limit())
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
    return _sinks_kernel(res, stats, into)


def _sinks_kernel(res: AttentionResiduals, stats: Array, into: Any) -> Array | None:
    if res.sinks is None or into is FROZEN:
        return None
    heads, padded, _ = stats.shape
    d_sinks, accumulate = destination(into, (heads,), res.sinks.dtype, like=stats)
    BACKWARD.launch(
        "attention_bwd_sinks",
        (ctype(d_sinks.dtype),),
        heads,
        THREADS,
        [d_sinks, _float32(res.sinks), stats, len(res.q), padded, accumulate],
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
        together and x.strides[0] % 16 == 0,
        f"{op}: the heads of a token of {name} must lie together, tokens at multiples of 16 bytes; "
        f"got strides of {x.strides} bytes for shape {x.shape}: pass a contiguous array",
    )
    return np.int64(x.strides[0] // size)


def _float32(x: Array | None) -> Array | None:
    return None if x is None else x.astype(np.float32, copy=False)


def _window(window: int | None, tokens: int) -> int:
    """A window that fits an int32 with room to add a token index; without one, all tokens."""
    return tokens if window is None else min(window, tokens)


@functools.cache
def _shared_limit_of(card: int) -> int:
    import cupy

    attributes = cupy.cuda.Device(card).attributes
    return int(attributes["MaxSharedMemoryPerBlockOptin"])


def _shared_limit() -> int:
    """Bytes of shared memory that a block may have on the current card."""
    if Backend.launch is not None:
        return 227 * 1024
    import cupy

    return _shared_limit_of(cupy.cuda.runtime.getDevice())


def attention_ref(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None = None,
    *,
    docs: Docs,
    scale: float,
    window: int | None = None,
) -> Array:
    """Reference of attention_fwd: all scores at once. docs are NumPy arrays."""
    xp = namespace(q)
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], head_dim)
    s = scale * xp.einsum("ikgd,jkd->kgij", grouped, k)
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    reads = (docs.start[:, None] <= j) & (j <= i) & (j > i - (tokens if window is None else window))
    s = xp.where(xp.asarray(reads), s, -np.inf)
    top = xp.amax(s, axis=-1, keepdims=True)
    weights = xp.exp(s - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks.reshape(k.shape[1], -1, 1, 1) - top)
    return xp.einsum("kgij,jkd->ikgd", weights / total, v).reshape(tokens, heads, head_dim)


attention = Pair(attention_fwd, attention_bwd)
