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

The last two add the stream's gradient to dx in the pass that computes it. A ``cast`` of y (fp8.py)
is done in the pass that makes y.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels.arrays import (
    F32,
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
from surogate.kernels.fp8 import Cast, kernel_cast
from surogate.kernels.nvrtc import Source, ctype, vector_width
from surogate.kernels.pair import Pair

MAX_HIDDEN = 16384


@dataclass(frozen=True)
class Tile:
    """How rows lie on threads."""

    packs: int  # 16-byte packs of a row that a thread holds
    registers: int  # of a thread, at most
    block: int  # threads of a block, unless one row takes more
    most: int  # threads that one row may take

    def threads(self, hidden: int, dtype: np.dtype) -> int:
        """Of a row."""
        return 32 * -(-hidden // (32 * vector_width(dtype) * self.packs))

    def rows(self, hidden: int, dtype: np.dtype) -> int:
        """Of a block."""
        return max(1, self.block // self.threads(hidden, dtype))


FORWARD = Tile(4, 64, 128, 1024)
FROZEN_BACKWARD = Tile(4, 96, 128, 1024)  # dx alone
# The first that has room for a row. On an H200, 16384 x 1024 takes 37.6 us with two packs, 39.1
# with four and 39.9 with one; with rows on their way to shared memory ahead of time, 39.5 to 42.
BACKWARD = Tile(2, 64, 256, 512), Tile(4, 128, 256, 1024)
# Those of an H200, on every card: blocks of the backward hold shares of dweight, and their number
# decides the order of its sum.
MULTIPROCESSORS, REGISTERS = 132, 65536

_TYPES = [("float", "float"), ("bf16", "bf16"), ("bf16", "float")]


def _instances(*tiles: Tile) -> list[tuple[str, ...]]:
    return [
        (*types, aligned, str(tile.packs), str(tile.registers))
        for types in _TYPES
        for aligned in ("true", "false")
        for tile in tiles
    ]


_PLAIN = _instances(FORWARD)
_CASTING = [types for types in _PLAIN if (types[0], types[2]) == ("bf16", "true")]
SOURCE = Source(
    "rmsnorm",
    {
        "rmsnorm_fwd": [(*types, "void") for types in _PLAIN]
        + [(*types, "E4M3") for types in _CASTING],
        "rmsnorm_dx": _instances(FROZEN_BACKWARD),
        "rmsnorm_bwd": _instances(*BACKWARD),
        "sum_partials": [(type, str(slab)) for type in ("float", "bf16") for slab in (8, 16, 32)],
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
    cast: Cast | None = None,
) -> tuple[Float[Array, "tokens hidden"], RMSNormResiduals]:
    """Returns y and what rmsnorm_bwd needs. ``weight`` is of the dtype of x, or float32.

    y is written to ``out`` where given, whose rows may be farther apart than they are long, and its
    E4M3 codes to ``cast``.
    """
    _check("rmsnorm_fwd", x, weight, product)
    _check_out("rmsnorm_fwd", out, x)
    y, _, rstd = _forward(x, None, weight, eps, unit_offset, product, out, cast)
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
    cast: Cast | None = None,
) -> tuple[tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]], RMSNormResiduals]:
    """Returns ((y, x), residuals): the stream x goes on, for an addition inside a later product."""
    y, res = rmsnorm_fwd(x, weight, eps=eps, unit_offset=unit_offset, product=product, cast=cast)
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
    cast: Cast | None = None,
) -> tuple[tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]], RMSNormResiduals]:
    """Returns ((y, h), residuals) with h = x + residual rounded to their dtype, y = norm(h)."""
    _check("add_rmsnorm_fwd", x, weight, product)
    require(
        residual.shape == x.shape and residual.dtype == x.dtype,
        f"add_rmsnorm_fwd: residual must be {x.dtype}{x.shape}, "
        f"got {residual.dtype}{residual.shape}",
    )
    y, h, rstd = _forward(x, residual, weight, eps, unit_offset, product, None, cast)
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
    return _sum_partials(partial, dtype, [(len(partial), into)])[0]


def sum_partials_pair(
    partial: Float32[Array, "blocks columns"],
    first: int,
    dtype: np.dtype,
    into: tuple[Float[Array, " columns"] | Frozen | None, Float[Array, " columns"] | Frozen | None],
) -> tuple[Float[Array, " columns"] | None, Float[Array, " columns"] | None]:
    """sum_partials of the ``first`` rows and of the others, in one launch if of one dtype."""
    wanted = [target for target in into if not isinstance(target, Frozen)]
    if len(wanted) == 2 and len({dtype if t is None else t.dtype for t in wanted}) == 1:
        rows = (first, len(partial) - first)
        both = _sum_partials(partial, dtype, list(zip(rows, wanted, strict=True)))
        return both[0], both[1]
    found = [
        None if isinstance(target, Frozen) else sum_partials(share, dtype, target)
        for share, target in zip((partial[:first], partial[first:]), into, strict=True)
    ]
    return found[0], found[1]


def _sum_partials(
    partial: Array, dtype: np.dtype, sums: Sequence[tuple[int, Array | None]]
) -> list[Array]:
    """``sums``: rows and destination of each, one or two of one dtype."""
    columns = partial.shape[1]
    found = [destination(into, (columns,), dtype, like=partial) for _, into in sums]
    contiguous = all(out.flags.c_contiguous for out, _ in found)
    require(contiguous, "sum_partials: into must be C-contiguous")
    outs, adds = ([*both, None][:2] for both in zip(*found, strict=True))
    rows = [*(count for count, _ in sums), 0][:2]
    # Columns of a block, so few that all multiprocessors have one.
    slab = 8 if columns <= 2048 else 16 if columns <= 4096 else 32
    SOURCE.launch(
        "sum_partials",
        (ctype(outs[0].dtype), str(slab)),
        (-(-columns // slab), len(sums)),
        1024,
        [*outs, partial, *rows, columns, *map(bool, adds)],
    )
    return [out for out, _ in found]


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
    out: Array | None,
    cast: Cast | None,
) -> tuple[Array, Array, Array]:
    """Returns (y, h, rstd); h is x itself when there is no residual."""
    if on_device(x):
        return _forward_kernel(x, residual, weight, eps, unit_offset, product, out, cast)
    h = x if residual is None else (upcast(x) + upcast(residual)).astype(x.dtype, copy=False)
    wide = upcast(h)
    rstd = 1 / np.sqrt(np.mean(wide * wide, axis=1) + wide.dtype.type(eps))
    n = wide * rstd[:, None]
    if product == "storage":
        n = upcast(n.astype(x.dtype, copy=False))
    y = placed((n * _effective(weight, unit_offset, n.dtype)).astype(x.dtype, copy=False), out)
    if cast is not None:
        cast.on_host(y)
    return y, h, rstd.astype(compute_dtype(x), copy=False)


class _Launch(NamedTuple):
    dtypes: tuple[str, str]
    tile: Tile
    threads: int  # of a row
    rows: int  # of a block
    aligned: bool  # every row begins and ends with a pack

    @property
    def types(self) -> tuple[str, ...]:
        """The kernel's template arguments."""
        tile, aligned = self.tile, str(self.aligned).lower()
        return *self.dtypes, aligned, str(tile.packs), str(tile.registers)


def backward_tile(hidden: int, dtype: np.dtype) -> Tile:
    """How the backward holds rows of this width."""
    return next(tile for tile in BACKWARD if tile.threads(hidden, dtype) <= tile.most)


def backward_blocks(tokens: int, hidden: int, dtype: np.dtype) -> int:
    """Blocks of the backward, all resident at once; each holds a float32 share of dweight."""
    tile = backward_tile(hidden, dtype)
    rows = tile.rows(hidden, dtype)
    resident = max(1, REGISTERS // (tile.registers * rows * tile.threads(hidden, dtype)))
    return max(1, min(MULTIPROCESSORS * resident, -(-tokens // rows)))


def _plan(
    x: Array, weight: Array, tile: Tile, *others: Array | None, apart: tuple[Array | None, ...]
) -> _Launch:
    """``others`` are contiguous, as x is; the rows of those in ``apart`` may lie apart."""
    hidden, width = x.shape[1], vector_width(x.dtype)
    require(hidden <= MAX_HIDDEN, f"rmsnorm: hidden must be at most {MAX_HIDDEN}, got {hidden}")
    for array in (x, *others):
        require(array is None or array.flags.c_contiguous, "rmsnorm: arrays must be C-contiguous")
    require(weight.flags.c_contiguous, "rmsnorm: weight must be C-contiguous")
    fits = hidden % width == 0 and aligned(weight) and rows_aligned(x, *others, *apart)
    dtypes = (ctype(x.dtype), ctype(weight.dtype))
    threads, rows = tile.threads(hidden, x.dtype), tile.rows(hidden, x.dtype)
    return _Launch(dtypes, tile, threads, rows, fits)


def _forward_kernel(
    x: Array,
    residual: Array | None,
    weight: Array,
    eps: float,
    unit_offset: bool,
    product: str,
    out: Array | None,
    cast: Cast | None,
) -> tuple[Array, Array, Array]:
    tokens, hidden = x.shape
    y = empty_like(x) if out is None else out
    stride = row_stride("rmsnorm_fwd: out", y)
    plan = _plan(x, weight, FORWARD, residual, apart=(y,))
    h = None if residual is None else empty_like(x)
    rstd = empty((tokens,), F32, like=x)
    form, codes, amax, scale = kernel_cast(cast, "rmsnorm_fwd", y, fits=plan.aligned)
    arrays = [y, h, rstd, codes, amax, x, residual, weight, scale]
    sizes = [stride, tokens, hidden, plan.threads]
    options = [float(eps), float(unit_offset), product == "storage"]
    if tokens:
        types = (*plan.types, form)
        grid = -(-tokens // plan.rows)
        threads = plan.rows * plan.threads
        SOURCE.launch("rmsnorm_fwd", types, grid, threads, arrays + sizes + options)
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
    arrays = [dy, dresidual, res.x, res.weight, res.rstd]
    sizes = [*strides, tokens, hidden]
    if isinstance(into, Frozen):
        plan = _plan(res.x, res.weight, FROZEN_BACKWARD, apart=(dx, dy, dresidual))
        if tokens:
            SOURCE.launch(
                "rmsnorm_dx",
                plan.types,
                -(-tokens // plan.rows),
                plan.rows * plan.threads,
                [dx, *arrays, *sizes, plan.threads, float(res.unit_offset)],
            )
        return dx, None
    tile = backward_tile(hidden, dy.dtype)
    plan = _plan(res.x, res.weight, tile, apart=(dx, dy, dresidual))
    slots = tile.packs * plan.rows * plan.threads  # of packs, whose shares a block adds
    blocks = backward_blocks(tokens, hidden, dy.dtype)
    partial = empty((blocks, hidden), F32, like=dy)
    SOURCE.launch(
        "rmsnorm_bwd",
        plan.types,
        blocks,
        plan.rows * plan.threads,
        [dx, partial, *arrays, *sizes, plan.threads, float(res.unit_offset)],
        shared=4 * slots * vector_width(dy.dtype) if plan.rows > 1 else 0,
    )
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
