"""Queries and keys on their way to attention: RMSNorm of each head, then rotary positions.

    q = rotate(rmsnorm(q', q_weight))    k = rotate(rmsnorm(k', k_weight))    v = v'

of the packed projection [tokens, heads + 2 * kv_heads, head_dim] = (q', k', v'), in one pass with
one rounding. Without weights there is no norm (Llama, Qwen2), and nothing but the angles is kept.
See rmsnorm.py and rope.py for the formulas; the backward goes through the rotation, then the norm.

transformers rounds to the storage dtype after the norm, its product, cos, sin and the rotation. The
float32 between those is dropped here, so that in bfloat16 results agree to a few roundings.

The backward reads q' and k' once more and computes rstd of each head again: the values are in
registers for the gradient anyway, and two sums over the lanes of a head cost less than four bytes a
head in memory.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from surogate.kernels.arrays import (
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
from surogate.kernels.nvrtc import Source, ctype
from surogate.kernels.pair import Pair
from surogate.kernels.rmsnorm import rmsnorm_ref, sum_partials
from surogate.kernels.rope import (
    RopeTable,
    check_table,
    rope_ref,
    rotate_host,
    token_stride,
)

WARPS = 4  # of a block
# Shares of the weight gradients: a constant, so that sums have one order on all cards. Five blocks
# on each of the 132 multiprocessors of an H200.
BLOCKS = 660
MAX_HEAD_DIM = 512
PACK = 4  # values of an access: in bfloat16 8 bytes, so that a lane keeps few angles and shares

# Values of an access, and slots of a head that a lane has: where halves of a head divide by PACK
# and arrays lie at multiples of 16 bytes, up to 256 columns and up to 512; else.
_LAYOUTS = [(str(PACK), "1"), (str(PACK), "2"), ("1", "8")]
_INSTANCES: list[tuple[str, ...]] = [
    (dtype, *layout) for dtype in ("float", "bf16") for layout in _LAYOUTS
]
SOURCE = Source("qk_norm_rope", {"qk_norm_rope_fwd": _INSTANCES, "qk_norm_rope_bwd": _INSTANCES})

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


class _Launch(NamedTuple):
    types: tuple[str, ...]
    heads_of_item: int  # of a token, which a warp takes at once
    sizes: list[int | float]  # the last parameters of both kernels

    def blocks(self, tokens: int, heads: int) -> int:
        """Blocks that take an item a warp."""
        items = tokens * -(-heads // self.heads_of_item)
        require(items < 1 << 31, f"qk_norm_rope: takes less than 2^31 items, got {items}")
        return -(-items // WARPS)


def _plan(res: QKNormRopeResiduals, x: Array, *others: Array | None) -> _Launch:
    """``x`` and ``others`` are the arrays by token, besides those that ``res`` holds."""
    tokens, _, head_dim = x.shape
    weights = [weight for weight in (res.q_weight, res.k_weight) if weight is not None]
    require(
        all(weight.flags.c_contiguous for weight in weights),
        "qk_norm_rope: weights must be C-contiguous",
    )
    half = res.table.cos.shape[1]
    require(
        head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM,
        f"qk_norm_rope: head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}",
    )
    divides = half % PACK == 0 and head_dim % (2 * PACK) == 0
    if divides and rows_aligned(x, res.qkv, *others) and aligned(*weights, *res.table):
        slots = head_dim // (2 * PACK)
        lanes = min(32, 1 << (slots - 1).bit_length())
        layout = (str(PACK), "1" if slots <= 32 else "2")
    else:
        lanes, layout = 32, ("1", "8")
    in_flight = 8 // x.dtype.itemsize if layout[1] == "1" else 1  # heads, as in qk_norm_rope.cu
    sizes = [tokens, res.heads, res.kv_heads, head_dim, half, lanes]
    return _Launch(
        (ctype(x.dtype), *layout),
        in_flight * (32 // lanes),
        [*sizes, float(res.eps), float(res.unit_offset)],
    )


def _forward_kernel(res: QKNormRopeResiduals, qkv: Array, qk: Array) -> None:
    plan = _plan(res, qkv, qk)
    strides = [np.int64(token_stride("qk_norm_rope_fwd", a)) for a in (qk, qkv)]
    source = None if qk is qkv else qkv
    arrays = [qk, source, res.q_weight, res.k_weight, *res.table, res.positions]
    if len(qkv):
        grid = plan.blocks(len(qkv), res.heads + res.kv_heads)
        arguments = arrays + strides + plan.sizes
        SOURCE.launch("qk_norm_rope_fwd", plan.types, grid, 32 * WARPS, arguments)


def _backward_kernel(
    res: QKNormRopeResiduals,
    dq: Array | None,
    dk: Array | None,
    dqkv: Array,
    targets: tuple[Array | Frozen | None, Array | Frozen | None],
) -> tuple[Array | None, Array | None]:
    plan = _plan(res, dqkv, dq, dk)
    tokens, _, head_dim = dqkv.shape
    blocks = [max(1, plan.blocks(tokens, heads)) for heads in (res.heads, res.kv_heads)]
    partial = None
    if res.q_weight is not None and not all(isinstance(t, Frozen) for t in targets):
        total = sum(blocks)
        blocks = [max(1, min(n, BLOCKS * n // total)) for n in blocks]
        partial = empty((sum(blocks), head_dim), F32, like=dqkv)
    strides = [
        np.int64(0 if a is None else token_stride("qk_norm_rope_bwd", a))
        for a in (dqkv, dq, dk, res.qkv)
    ]
    arrays = [dqkv, partial, dq, dk, res.qkv, res.q_weight, res.k_weight, *res.table]
    SOURCE.launch(
        "qk_norm_rope_bwd",
        plan.types,
        sum(blocks),
        32 * WARPS,
        [*arrays, res.positions, *strides, blocks[0], *plan.sizes],
        shared=0 if partial is None else 4 * WARPS * head_dim,
    )
    if partial is None:
        return None, None
    shares = (partial[: blocks[0]], partial[blocks[0] :])
    dweights = [
        None if isinstance(target, Frozen) else sum_partials(share, dqkv.dtype, target)
        for share, target in zip(shares, targets, strict=True)
    ]
    return dweights[0], dweights[1]


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
