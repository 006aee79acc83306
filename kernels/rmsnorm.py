"""RMSNorm of each token (Zhang & Sennrich 2019, arXiv 1910.07467), alone or with a residual stream.

    rstd = 1 / sqrt(mean(x^2) + eps)    n = x * rstd    y = n * w

w is the weight, or 1 + weight (``unit_offset``). In a 16-bit dtype the product is taken as the
model's authors did: of n rounded to that dtype ("storage": Llama, Qwen), or of n in float32
("float": GPT-OSS, Nemotron-H). Backward, with g = dy * w:

    dx = rstd * (g - n * mean(g * n))    dweight = sum over tokens of dy * n

Three pairs share the kernels; they differ in what happens to the residual stream around the norm:

    rmsnorm        x                -> y
    norm_residual  x                -> y, x        the stream goes on beside the norm
    add_rmsnorm    x, residual      -> y, h        h = x + residual, y = norm(h)

The last two add the stream's gradient to dx in the pass that computes it.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels.arrays import (
    F32,
    FROZEN,
    Array,
    Frozen,
    aligned,
    compute_dtype,
    describe,
    destination,
    empty,
    empty_like,
    namespace,
    on_device,
    placed,
    require,
    row_stride,
    rows_aligned,
    store,
    upcast,
)
from surogate.kernels.nvrtc import Source, ctype, vector_width
from surogate.kernels.pair import Pair

PACKS = 4  # 16-byte packs of a row that a thread holds, as in rmsnorm.cu
FORWARD_THREADS, BACKWARD_THREADS = 128, 256  # of a block, unless one row takes more
# Shares of dweight: a constant, so that sums have one order on all cards. Two blocks on each of the
# 132 multiprocessors of an H200.
BLOCKS = 264
MAX_HIDDEN = 16384

_TYPES = [("float", "float"), ("bf16", "bf16"), ("bf16", "float")]
_INSTANCES: list[tuple[str, ...]] = [
    (*types, aligned) for types in _TYPES for aligned in ("true", "false")
]
SOURCE = Source(
    "rmsnorm",
    {
        "rmsnorm_fwd": _INSTANCES,
        "rmsnorm_bwd": _INSTANCES,
        "sum_partials": [("float",), ("bf16",)],
    },
)


class RMSNormResiduals(NamedTuple):
    x: Float[Array, "tokens hidden"]  # what was normalised: x, or x + residual
    weight: Float[Array, " hidden"]
    rstd: Float[Array, " tokens"]  # float32 (float64 for float64 rows)
    unit_offset: bool


def rmsnorm_fwd(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    unit_offset: bool = False,
    product: str = "storage",
    out: Float[Array, "tokens hidden"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], RMSNormResiduals]:
    """Returns y and what rmsnorm_bwd needs. ``weight`` is of the dtype of x, or float32.

    y is written to ``out`` where given, whose rows may be farther apart than they are long.
    """
    _check("rmsnorm_fwd", x, weight, product)
    _check_out("rmsnorm_fwd", out, x)
    y, _, rstd = _forward(x, None, weight, eps, unit_offset, product, out)
    return y, RMSNormResiduals(x, weight, rstd, unit_offset)


def rmsnorm_bwd(
    res: RMSNormResiduals,
    dy: Float[Array, "tokens hidden"],
    *,
    dresidual: Float[Array, "tokens hidden"] | None = None,
    into: Float[Array, " hidden"] | Frozen | None = None,
    out: Float[Array, "tokens hidden"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, " hidden"] | None]:
    """Returns (dx, dweight); ``dresidual`` is added to dx in the same pass.

    dx is written to ``out`` where given. The rows of ``out``, ``dy`` and ``dresidual`` may be
    farther apart than they are long.
    """
    _check_out("rmsnorm_bwd", out, res.x)
    for name, grad in (("dy", dy), ("dresidual", dresidual)):
        require(
            grad is None or (grad.shape == res.x.shape and grad.dtype == res.x.dtype),
            f"rmsnorm_bwd: {name} must be {res.x.dtype}{res.x.shape}, got {describe(grad)}",
        )
    if on_device(dy):
        return _backward_kernel(res, dy, dresidual, into, out)
    n = upcast(res.x) * res.rstd[:, None]
    g = upcast(dy) * _effective(res.weight, res.unit_offset, n.dtype)
    dx = res.rstd[:, None] * (g - n * np.mean(g * n, axis=1, keepdims=True))
    if dresidual is not None:
        dx += upcast(dresidual)
    dx = placed(dx.astype(dy.dtype, copy=False), out)
    if isinstance(into, Frozen):
        return dx, None
    return dx, store(np.sum(upcast(dy) * n, axis=0), into, res.weight.dtype)


def norm_residual_fwd(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    unit_offset: bool = False,
    product: str = "storage",
) -> tuple[tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]], RMSNormResiduals]:
    """Returns ((y, x), residuals): the stream x goes on, for an addition inside a later product."""
    y, res = rmsnorm_fwd(x, weight, eps=eps, unit_offset=unit_offset, product=product)
    return (y, x), res


def norm_residual_bwd(
    res: RMSNormResiduals,
    dy: Float[Array, "tokens hidden"] | None,
    dresidual: Float[Array, "tokens hidden"] | None = None,
    *,
    into: Float[Array, " hidden"] | Frozen | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, " hidden"] | None]:
    """Returns (dx, dweight). A cotangent is None when that output was not used, but not both."""
    if dy is not None:
        return rmsnorm_bwd(res, dy, dresidual=dresidual, into=into)
    require(dresidual is not None, "norm_residual_bwd: needs the cotangent of y or of the stream")
    assert dresidual is not None
    if into is not None:
        return dresidual, None if isinstance(into, Frozen) else into
    return dresidual, namespace(res.weight).zeros_like(res.weight)


def add_rmsnorm_fwd(
    x: Float[Array, "tokens hidden"],
    residual: Float[Array, "tokens hidden"],
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    unit_offset: bool = False,
    product: str = "storage",
) -> tuple[tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]], RMSNormResiduals]:
    """Returns ((y, h), residuals) with h = x + residual rounded to their dtype, y = norm(h)."""
    _check("add_rmsnorm_fwd", x, weight, product)
    require(
        residual.shape == x.shape and residual.dtype == x.dtype,
        f"add_rmsnorm_fwd: residual must be {x.dtype}{x.shape}, "
        f"got {residual.dtype}{residual.shape}",
    )
    y, h, rstd = _forward(x, residual, weight, eps, unit_offset, product)
    return (y, h), RMSNormResiduals(h, weight, rstd, unit_offset)


def add_rmsnorm_bwd(
    res: RMSNormResiduals,
    dy: Float[Array, "tokens hidden"] | None,
    dh: Float[Array, "tokens hidden"] | None = None,
    *,
    into: Float[Array, " hidden"] | Frozen | None = None,
) -> tuple[
    Float[Array, "tokens hidden"], Float[Array, "tokens hidden"], Float[Array, " hidden"] | None
]:
    """Returns (dx, dresidual, dweight); the first two are one array."""
    dx, dweight = norm_residual_bwd(res, dy, dh, into=into)
    return dx, dx, dweight


def sum_partials(
    partial: Float32[Array, "blocks columns"],
    dtype: np.dtype,
    into: Float[Array, " columns"] | None,
) -> Float[Array, " columns"]:
    """Column sums of the shares that a kernel's blocks hold of a weight gradient, in a fixed order.

    Returns them fresh in ``dtype``, or added to ``into``.
    """
    blocks, columns = partial.shape
    out, accumulate = destination(into, (columns,), dtype, like=partial)
    require(out.flags.c_contiguous, "sum_partials: into must be C-contiguous")
    SOURCE.launch(
        "sum_partials",
        (ctype(out.dtype),),
        -(-columns // 32),
        1024,
        [out, partial, blocks, columns, accumulate],
    )
    return out


def _check(name: str, x: Array, weight: Array, product: str) -> None:
    hidden = x.shape[1]
    require(
        weight.shape == (hidden,) and weight.dtype in (x.dtype, F32),
        f"{name}: weight must be ({hidden},) of {x.dtype} or float32, "
        f"got {weight.dtype}{weight.shape}",
    )
    require(
        product in ("storage", "float"),
        f"{name}: product must be 'storage' or 'float', got {product!r}",
    )


def _check_out(name: str, out: Array | None, x: Array) -> None:
    require(
        out is None or (out.shape == x.shape and out.dtype == x.dtype),
        f"{name}: out must be {x.dtype}{x.shape}, got {describe(out)}",
    )


def _effective(weight: Array, unit_offset: bool, dtype: np.dtype) -> Array:
    return weight.astype(dtype, copy=False) + dtype.type(unit_offset)


def _forward(
    x: Array,
    residual: Array | None,
    weight: Array,
    eps: float,
    unit_offset: bool,
    product: str,
    out: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Returns (y, h, rstd); h is x itself when there is no residual."""
    if on_device(x):
        return _forward_kernel(x, residual, weight, eps, unit_offset, product, out)
    h = x if residual is None else (upcast(x) + upcast(residual)).astype(x.dtype, copy=False)
    wide = upcast(h)
    rstd = 1 / np.sqrt(np.mean(wide * wide, axis=1) + wide.dtype.type(eps))
    n = wide * rstd[:, None]
    if product == "storage":
        n = upcast(n.astype(x.dtype, copy=False))
    y = (n * _effective(weight, unit_offset, n.dtype)).astype(x.dtype, copy=False)
    return placed(y, out), h, rstd.astype(compute_dtype(x), copy=False)


class _Launch(NamedTuple):
    """How rows of one width lie on threads."""

    types: tuple[str, ...]
    threads: int  # of a row
    rows: int  # of a block


def backward_blocks(tokens: int, hidden: int, dtype: np.dtype) -> int:
    """Blocks of the backward on a card; each holds a float32 share of dweight."""
    rows = max(1, BACKWARD_THREADS // _threads(hidden, dtype))
    return max(1, min(BLOCKS, -(-tokens // rows)))


def _threads(hidden: int, dtype: np.dtype) -> int:
    """Threads of a row."""
    return 32 * -(-hidden // (32 * vector_width(dtype) * PACKS))


def _plan(
    x: Array, weight: Array, block: int, *others: Array | None, apart: tuple[Array | None, ...]
) -> _Launch:
    """``others`` are contiguous, as x is; the rows of those in ``apart`` may lie apart."""
    hidden, width = x.shape[1], vector_width(x.dtype)
    require(hidden <= MAX_HIDDEN, f"rmsnorm: hidden must be at most {MAX_HIDDEN}, got {hidden}")
    for array in (x, *others):
        require(array is None or array.flags.c_contiguous, "rmsnorm: arrays must be C-contiguous")
    threads = _threads(hidden, x.dtype)
    require(weight.flags.c_contiguous, "rmsnorm: weight must be C-contiguous")
    fits = hidden % width == 0 and aligned(weight) and rows_aligned(x, *others, *apart)
    types = (ctype(x.dtype), ctype(weight.dtype), str(fits).lower())
    return _Launch(types, threads, max(1, block // threads))


def _forward_kernel(
    x: Array,
    residual: Array | None,
    weight: Array,
    eps: float,
    unit_offset: bool,
    product: str,
    out: Array | None,
) -> tuple[Array, Array, Array]:
    tokens, hidden = x.shape
    y = empty_like(x) if out is None else out
    stride = row_stride("rmsnorm_fwd: out", y)
    plan = _plan(x, weight, FORWARD_THREADS, residual, apart=(y,))
    h = None if residual is None else empty_like(x)
    rstd = empty((tokens,), F32, like=x)
    arrays = [y, h, rstd, x, residual, weight]
    sizes = [stride, tokens, hidden, plan.threads]
    options = [float(eps), float(unit_offset), product == "storage"]
    if tokens:
        grid = -(-tokens // plan.rows)
        threads = plan.rows * plan.threads
        SOURCE.launch("rmsnorm_fwd", plan.types, grid, threads, arrays + sizes + options)
    return y, x if h is None else h, rstd


def _backward_kernel(
    res: RMSNormResiduals,
    dy: Array,
    dresidual: Array | None,
    into: Float[Array, " hidden"] | Frozen | None,
    out: Array | None,
) -> tuple[Array, Array | None]:
    tokens, hidden = dy.shape
    dx = empty_like(dy) if out is None else out
    strides = (
        row_stride("rmsnorm_bwd: out", dx),
        row_stride("rmsnorm_bwd: dy", dy),
        hidden if dresidual is None else row_stride("rmsnorm_bwd: dresidual", dresidual),
    )
    plan = _plan(res.x, res.weight, BACKWARD_THREADS, apart=(dx, dy, dresidual))
    blocks = backward_blocks(tokens, hidden, dy.dtype)
    partial = None if into is FROZEN else empty((blocks, hidden), F32, like=dy)
    SOURCE.launch(
        "rmsnorm_bwd",
        plan.types,
        blocks,
        plan.rows * plan.threads,
        [dx, partial, dy, dresidual, res.x, res.weight, res.rstd]
        + [*strides, tokens, hidden, plan.threads, float(res.unit_offset)],
        shared=4 * hidden * plan.rows if plan.rows > 1 else 0,
    )
    if partial is None or isinstance(into, Frozen):
        return dx, None
    return dx, sum_partials(partial, res.weight.dtype, into)


def rmsnorm_ref(x: Array, weight: Array, *, eps: float, unit_offset: bool = False) -> Array:
    """Reference of rmsnorm_fwd."""
    xp = namespace(x)
    mean = xp.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
    return x / xp.sqrt(mean + eps) * (weight + unit_offset)


def norm_residual_ref(
    x: Array, weight: Array, *, eps: float, unit_offset: bool = False
) -> tuple[Array, Array]:
    """Reference of norm_residual_fwd."""
    return rmsnorm_ref(x, weight, eps=eps, unit_offset=unit_offset), x


def add_rmsnorm_ref(
    x: Array, residual: Array, weight: Array, *, eps: float, unit_offset: bool = False
) -> tuple[Array, Array]:
    """Reference of add_rmsnorm_fwd."""
    return norm_residual_ref(x + residual, weight, eps=eps, unit_offset=unit_offset)


rmsnorm = Pair(rmsnorm_fwd, rmsnorm_bwd)
norm_residual = Pair(norm_residual_fwd, norm_residual_bwd)
add_rmsnorm = Pair(add_rmsnorm_fwd, add_rmsnorm_bwd)
