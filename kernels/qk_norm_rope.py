"""Queries and keys on their way to attention: RMSNorm of each head, then rotary positions.

    q = rotate(rmsnorm(q', q_weight))    k = rotate(rmsnorm(k', k_weight))    v = v'

of the packed projection [tokens, heads + 2 * kv_heads, head_dim] = (q', k', v'), in one pass with
one rounding. Without weights there is no norm (Llama, Qwen2), and nothing but the angles is kept.
See rmsnorm.py and rope.py for the formulas; the backward goes through the rotation, then the norm.

transformers rounds to the storage dtype after the norm, its product, cos, sin and the rotation. The
float32 between those is dropped here, so that in bfloat16 results agree to a few roundings.

The backward reads q' and k' once more and computes rstd of each head again: the values are in
registers for the gradient anyway, and two sums over the lanes of a head cost less than four bytes a
head in memory. For bfloat16 heads the kernels take rstd from the card's approximate reciprocal
root, whose relative error is below 2^-22 where a rounding to bfloat16 is up to 2^-9.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from surogate.kernels.arrays import (
    BF16,
    F32,
    Array,
    Frozen,
    aligned,
    describe,
    empty,
    on_device,
    require,
    rows_aligned,
    store,
    upcast,
    zeros,
)
from surogate.kernels.nvrtc import THREADS, Source, ctype
from surogate.kernels.pair import Pair
from surogate.kernels.rmsnorm import MULTIPROCESSORS, rmsnorm_ref, sum_partials_pair
from surogate.kernels.rope import (
    RopeTable,
    check_table,
    rope_ref,
    rotate_host,
    token_stride,
)

MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class Tile:
    """How a kernel takes heads all of whose columns are rotary."""

    pack: int  # values of an access
    heads: int  # of one token that a team of lanes has in flight
    resident: int  # blocks that a multiprocessor holds at once: bounds the registers of a thread


# By bytes of a value, then by size of a head. On an H200 the backward of 16384 x 16/8 x 128 takes
# 82 us with packs of eight and 85 with four.
WHOLE = (64, 128, 256)
FORWARD = {2: dict.fromkeys(WHOLE, Tile(4, 4, 3)), 4: dict.fromkeys(WHOLE, Tile(4, 2, 3))}
BACKWARD = {
    2: {64: Tile(4, 2, 4), 128: Tile(8, 2, 2), 256: Tile(8, 2, 2)},
    4: dict.fromkeys(WHOLE, Tile(4, 1, 3)),
}
Tiles = dict[int, dict[int, Tile]]


class _Layout(NamedTuple):
    """How heads lie on threads: template arguments of the kernels, after the type."""

    pack: int
    slots: int  # of two packs, of a lane
    lanes: int  # of a head
    head_dim: int  # 0: any
    heads: int
    resident: int

    def types(self, dtype: np.dtype) -> tuple[str, ...]:
        return (ctype(dtype), *map(str, self))

    def split(self, tokens: int, *heads: int, even: bool = False) -> list[int]:
        """Blocks for each segment of heads, together as many as a card holds at once, or fewer:
        if ``even``, as few as take as many turns.
        """
        items = [tokens * -(-count // self.heads) for count in heads]
        require(sum(items) < 1 << 31, f"qk_norm_rope: takes less than 2^31 items, got {sum(items)}")
        full = [-(-count * self.lanes // THREADS) for count in items]
        most = MULTIPROCESSORS * self.resident
        fair = [min(count, most * count // max(1, sum(full))) for count in full]
        if even:
            pairs = zip(full, fair, strict=True)
            turns = max(1, *(-(-count // max(1, blocks)) for count, blocks in pairs))
            fair = [-(-count // turns) for count in full]
        return [max(min(1, count), blocks) for count, blocks in zip(heads, fair, strict=True)]


# Heads of other sizes; then halves that do not divide into packs, and arrays that do not lie at
# multiples of 16 bytes.
_DIVIDING, _ANY = _Layout(4, 2, 32, 0, 1, 2), _Layout(1, 8, 32, 0, 1, 2)


def _whole(tile: Tile, head_dim: int) -> _Layout:
    lanes = head_dim // (2 * tile.pack)
    return _Layout(tile.pack, 1, lanes, head_dim, tile.heads, tile.resident)


def _layout(tiles: Tiles, dtype: np.dtype, head_dim: int, rotary: int, in_packs: bool) -> _Layout:
    if in_packs and head_dim in WHOLE and rotary == head_dim:
        return _whole(tiles[dtype.itemsize][head_dim], head_dim)
    divides = rotary % (2 * _DIVIDING.pack) == head_dim % (2 * _DIVIDING.pack) == 0
    return _DIVIDING if in_packs and divides else _ANY


def backward_blocks(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rotary: int, dtype: np.dtype
) -> int:
    """Blocks of the backward on a card; each holds a float32 share of a weight's gradient."""
    layout = _layout(BACKWARD, dtype, head_dim, rotary, True)
    return sum(layout.split(tokens, heads, kv_heads, even=True))


def _instances(tiles: Tiles) -> list[tuple[str, ...]]:
    return [
        layout.types(dtype)
        for dtype in (F32, BF16)
        for layout in (
            *(_whole(tile, head_dim) for head_dim, tile in tiles[dtype.itemsize].items()),
            _DIVIDING,
            _ANY,
        )
    ]


SOURCE = Source(
    "qk_norm_rope",
    {
        "qk_norm_rope_fwd": _instances(FORWARD),
        "qk_norm_rope_bwd": [
            (*types, frozen) for types in _instances(BACKWARD) for frozen in ("true", "false")
        ],
    },
)

Heads = Float[Array, "tokens heads head_dim"]
KVHeads = Float[Array, "tokens kv_heads head_dim"]
Packed = Float[Array, "tokens packed head_dim"]
Weight = Float[Array, " head_dim"]


class QKNormRopeResiduals(NamedTuple):
    qkv: Packed | None  # before the norm; None without one
    q_weight: Weight | None
    k_weight: Weight | None
    table: RopeTable
    positions: Int32[Array, " tokens"]
    heads: int
    kv_heads: int
    eps: float
    unit_offset: bool


def qk_norm_rope_fwd(
    qkv: Packed,
    q_weight: Weight | None,
    k_weight: Weight | None,
    *,
    table: RopeTable,
    positions: Int32[Array, " tokens"],
    heads: int,
    kv_heads: int,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> tuple[tuple[Heads, KVHeads, KVHeads], QKNormRopeResiduals]:
    """Returns ((q, k, v), residuals) of qkv [tokens, heads + 2 * kv_heads, head_dim].

    q and k are views of one fresh [tokens, heads + kv_heads, head_dim] array, v is a view of qkv.
    Both weights are given or none; ``unit_offset`` takes 1 + weight. Positions must be below the
    table's.
    """
    res = _residuals(qkv, q_weight, k_weight, table, positions, heads, kv_heads, eps, unit_offset)
    tokens, _, head_dim = qkv.shape
    qk = empty((tokens, heads + kv_heads, head_dim), qkv.dtype, like=qkv)
    _forward(res, qkv, qk)
    return (qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]), res


def qk_norm_rope_fwd_(
    qkv: Packed,
    *,
    table: RopeTable,
    positions: Int32[Array, " tokens"],
    heads: int,
    kv_heads: int,
) -> tuple[tuple[Heads, KVHeads, KVHeads], QKNormRopeResiduals]:
    """qk_norm_rope_fwd without a norm that rotates q and k in qkv: all three are views of it."""
    res = _residuals(qkv, None, None, table, positions, heads, kv_heads, 0.0, False)
    end = heads + kv_heads
    _forward(res, qkv, qkv)
    return (qkv[:, :heads], qkv[:, heads:end], qkv[:, end:]), res


def qk_norm_rope_bwd(
    res: QKNormRopeResiduals,
    dq: Heads | None,
    dk: KVHeads | None,
    dv: KVHeads | None,
    *,
    into: tuple[Weight | Frozen | None, Weight | Frozen | None] | Frozen | None = None,
) -> tuple[Packed, Weight | None, Weight | None]:
    """Returns (dqkv, dq_weight, dk_weight). ``into`` holds one for each weight, or is FROZEN.

    A cotangent may be None when that output was not used; the gradients of no weights are None.
    """
    given = next((grad for grad in (dq, dk, dv) if grad is not None), None)
    require(given is not None, "qk_norm_rope_bwd: needs a cotangent of q, k or v")
    assert given is not None
    tokens, _, head_dim = given.shape
    end = res.heads + res.kv_heads
    dqkv = empty((tokens, end + res.kv_heads, head_dim), given.dtype, like=given)
    dqkv[:, end:] = 0 if dv is None else dv
    if dq is None:
        dq = zeros((tokens, res.heads, head_dim), given.dtype, like=given)
    if dk is None:
        dk = zeros((tokens, res.kv_heads, head_dim), given.dtype, like=given)
    return dqkv, *_backward(res, dq, dk, dqkv, into)


def qk_norm_rope_bwd_(
    res: QKNormRopeResiduals,
    dqkv: Packed,
    *,
    into: tuple[Weight | Frozen | None, Weight | Frozen | None] | Frozen | None = None,
) -> tuple[Packed, Weight | None, Weight | None]:
    """qk_norm_rope_bwd of dqkv = (dq, dk, dv) in one array, in place."""
    return dqkv, *_backward(res, None, None, dqkv, into)


def _residuals(
    qkv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
    table: RopeTable,
    positions: Array,
    heads: int,
    kv_heads: int,
    eps: float,
    unit_offset: bool,
) -> QKNormRopeResiduals:
    tokens, packed, head_dim = qkv.shape
    require(
        packed == heads + 2 * kv_heads,
        f"qk_norm_rope_fwd: qkv must have {heads} + 2 * {kv_heads} heads, got {packed}",
    )
    require(
        positions.shape == (tokens,),
        f"qk_norm_rope_fwd: positions must be ({tokens},), got {positions.shape}",
    )
    require(
        (q_weight is None) == (k_weight is None),
        "qk_norm_rope_fwd: give both q_weight and k_weight, or neither",
    )
    for weight in (q_weight, k_weight):
        require(
            weight is None or (weight.shape == (head_dim,) and weight.dtype == qkv.dtype),
            f"qk_norm_rope_fwd: weights must be {qkv.dtype}({head_dim},), got {describe(weight)}",
        )
    check_table("qk_norm_rope_fwd", table, head_dim)
    kept = None if q_weight is None else qkv
    return QKNormRopeResiduals(
        kept, q_weight, k_weight, table, positions, heads, kv_heads, eps, unit_offset
    )


def _forward(res: QKNormRopeResiduals, qkv: Array, qk: Array) -> None:
    """Writes q and k to the first heads of ``qk``, which may be qkv itself if there is no norm."""
    if on_device(qkv):
        _forward_kernel(res, qkv, qk)
        return
    cos, sin = res.table.cos[res.positions], res.table.sin[res.positions]
    for heads, weight in _segments(res):
        x = upcast(qkv[:, heads])
        if weight is not None:
            rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(res.eps))
            x = x * rstd * (upcast(weight) + x.dtype.type(res.unit_offset))
        qk[:, heads] = rotate_host(x, cos, sin, 1.0).astype(qk.dtype, copy=False)


def _backward(
    res: QKNormRopeResiduals,
    dq: Array | None,
    dk: Array | None,
    dqkv: Array,
    into: tuple[Array | Frozen | None, Array | Frozen | None] | Frozen | None,
) -> tuple[Array | None, Array | None]:
    """Writes the first heads of dqkv from dq and dk (None: they are there); returns dweights."""
    targets = into if isinstance(into, tuple) else (into, into)
    if on_device(dqkv):
        return _backward_kernel(res, dq, dk, dqkv, targets)
    cos, sin = res.table.cos[res.positions], res.table.sin[res.positions]
    dweights = []
    for (heads, weight), grad, target in zip(_segments(res), (dq, dk), targets, strict=True):
        grad = upcast(dqkv[:, heads] if grad is None else grad)
        dx = rotate_host(grad, cos, sin, -1.0)
        dweight = None
        if weight is not None:
            assert res.qkv is not None
            x = upcast(res.qkv[:, heads])
            rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(res.eps))
            n = x * rstd
            if not isinstance(target, Frozen):
                dweight = store(np.sum(dx * n, axis=(0, 1)), target, weight.dtype)
            g = dx * (upcast(weight) + x.dtype.type(res.unit_offset))
            dx = rstd * (g - n * np.mean(g * n, axis=-1, keepdims=True))
        dqkv[:, heads] = dx.astype(dqkv.dtype, copy=False)
        dweights.append(dweight)
    return dweights[0], dweights[1]


def _segments(res: QKNormRopeResiduals) -> list[tuple[slice, Array | None]]:
    """Heads and weight of the queries, and of the keys."""
    end = res.heads + res.kv_heads
    return [(slice(0, res.heads), res.q_weight), (slice(res.heads, end), res.k_weight)]


def _chosen(res: QKNormRopeResiduals, tiles: Tiles, *arrays: Array | None) -> _Layout:
    """``arrays`` are those by token, besides those that ``res`` holds."""
    x = arrays[0]
    assert x is not None
    head_dim, rotary = x.shape[2], 2 * res.table.cos.shape[1]
    weights = [weight for weight in (res.q_weight, res.k_weight) if weight is not None]
    require(
        all(weight.flags.c_contiguous for weight in weights),
        "qk_norm_rope: weights must be C-contiguous",
    )
    require(
        head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM,
        f"qk_norm_rope: head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}",
    )
    in_packs = rows_aligned(res.qkv, *arrays) and aligned(*weights, *res.table)
    return _layout(tiles, x.dtype, head_dim, rotary, in_packs)


def _sizes(res: QKNormRopeResiduals, x: Array, heads: int, kv_heads: int) -> list[int | float]:
    """The last parameters of both kernels."""
    tokens, _, head_dim = x.shape
    half, options = res.table.cos.shape[1], [float(res.eps), float(res.unit_offset)]
    return [tokens, heads, kv_heads, head_dim, half, *options]


def _forward_kernel(
    res: QKNormRopeResiduals, qkv: Array, qk: Array, *, direction: float = 1.0
) -> None:
    """``direction``: 1, or -1 for a rotation back."""
    layout = _chosen(res, FORWARD, qkv, qk)
    strides = [np.int64(token_stride("qk_norm_rope_fwd", a)) for a in (qk, qkv)]
    heads, kv_heads = res.heads, res.kv_heads
    if res.q_weight is None:  # keys are no others than queries then, and lie behind them
        heads, kv_heads = heads + kv_heads, 0
    blocks = layout.split(len(qkv), heads, kv_heads)
    arrays = [qk, None if qk is qkv else qkv, res.q_weight, res.k_weight, *res.table, res.positions]
    sizes = _sizes(res, qkv, heads, kv_heads)
    if len(qkv):
        SOURCE.launch(
            "qk_norm_rope_fwd",
            layout.types(qkv.dtype),
            sum(blocks),
            THREADS,
            [*arrays, *strides, blocks[0], *sizes, direction],
        )


def _backward_kernel(
    res: QKNormRopeResiduals,
    dq: Array | None,
    dk: Array | None,
    dqkv: Array,
    targets: tuple[Array | Frozen | None, Array | Frozen | None],
) -> tuple[Array | None, Array | None]:
    if res.q_weight is None:
        if dq is not None:
            dqkv[:, : res.heads], dqkv[:, res.heads : res.heads + res.kv_heads] = dq, dk
        _forward_kernel(res, dqkv, dqkv, direction=-1.0)
        return None, None
    layout = _chosen(res, BACKWARD, dqkv, dq, dk)
    tokens, _, head_dim = dqkv.shape
    blocks = layout.split(tokens, res.heads, res.kv_heads, even=True)
    partial = None
    if not all(isinstance(t, Frozen) for t in targets):
        partial = empty((sum(blocks), head_dim), F32, like=dqkv)
    strides = [
        np.int64(0 if a is None else token_stride("qk_norm_rope_bwd", a))
        for a in (dqkv, dq, dk, res.qkv)
    ]
    arrays = [dqkv, partial, dq, dk, res.qkv, res.q_weight, res.k_weight, *res.table]
    SOURCE.launch(
        "qk_norm_rope_bwd",
        (*layout.types(dqkv.dtype), str(partial is None).lower()),
        sum(blocks),
        THREADS,
        [*arrays, res.positions, *strides, blocks[0]] + _sizes(res, dqkv, res.heads, res.kv_heads),
        shared=0 if partial is None else 4 * (THREADS // 32) * head_dim,
    )
    if partial is None:
        return None, None
    return sum_partials_pair(partial, blocks[0], dqkv.dtype, targets)


def qk_norm_rope_ref(
    qkv: Array,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    *,
    table: RopeTable,
    positions: Array,
    heads: int,
    kv_heads: int,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> tuple[Array, Array, Array]:
    """Reference of qk_norm_rope_fwd."""
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    if q_weight is not None and k_weight is not None:
        q = rmsnorm_ref(q, q_weight, eps=eps, unit_offset=unit_offset)
        k = rmsnorm_ref(k, k_weight, eps=eps, unit_offset=unit_offset)
    q, k = (rope_ref(x, table=table, positions=positions) for x in (q, k))
    return q, k, qkv[:, heads + kv_heads :]


qk_norm_rope = Pair(qk_norm_rope_fwd, qk_norm_rope_bwd)
