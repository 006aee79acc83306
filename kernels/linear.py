"""Every matrix product of a model: y = residual + x W^T + bias + scale * B (A x).

The last term is a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) of some row ranges of W, its
parts. The weight of q, k, v or of gate, up is one matrix whose adapters are parts, so that they
share one product with all A's, t = x A^T, and one with the B's on the diagonal of a matrix D:

    y += scale * t D^T    D[rows of part p, ranks of part p] = B_p, zero elsewhere

A product per part would read and write the same y in more launches, and tensor cores take 64 terms
of a sum at a time, of which the rank of one part fills a few: the zeros cost nothing. Backward:

    dt = scale * dy D           dx = dy W + dt A       dW = dy^T x     dbias = sum over tokens of dy
    dA = dt^T x                 dB_p = scale * dy_p^T t_p              dresidual = dy

In bfloat16, y is rounded after x W^T and again after the adapter; t and dt are rounded once.

A ``Widened`` weight holds A and scale * D beside W. Where x, or dy, comes with room behind its rows
(widened.py), t or u = scale * dy D goes there, and y or dx is one product, rounded once. Without
room the two products are as above. dB is then one product for all parts, dy^T t, of which the
parts' blocks are taken.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from surogate.kernels.arrays import (
    FROZEN,
    Array,
    address,
    compute_dtype,
    destination,
    empty,
    namespace,
    on_device,
    require,
    store,
    upcast,
    zeros,
)
from surogate.kernels.fp8 import Cast
from surogate.kernels.matmul import matmul
from surogate.kernels.nvrtc import THREADS, Source, ctype, vector_width
from surogate.kernels.pair import Pair
from surogate.kernels.widened import MAX_PARTS, Blocks, Parts, Widened, plain, room, take_diagonal

NEEDS_X = "linear_bwd: x was not kept (keep_x=False): pass x"
ROWS_PER_SLICE = 256  # of a column sum: enough blocks for a card from 2048 tokens on

SOURCE = Source(
    "linear",
    {
        "column_sum_partial": [("float", "4"), ("float", "1"), ("bf16", "8"), ("bf16", "1")],
        "column_sum": [("float",), ("bf16",)],
        "block_diagonal": [("float",), ("bf16",)],
    },
)


class LoRA(NamedTuple):
    """A low-rank adapter of some parts of a weight's rows.

    Part p takes rows p * rank to (p + 1) * rank of ``a``, and the next rows of ``b``, as many as it
    has itself. The gradient and the optimizer's moments are of this type too.
    """

    a: Float[Array, "parts_rank inner"]
    b: Float[Array, "adapted rank"]


class LinearInto(NamedTuple):
    """Destinations of the gradients: None (fresh), an array to add to, or FROZEN.

    ``lora`` is None, FROZEN, or a LoRA of destinations.
    """

    weight: Any = None
    bias: Any = None
    lora: Any = None


class Products(NamedTuple):
    """Which of a weight's products a recipe computes; the others take the arrays as they are."""

    forward: bool = True
    dgrad: bool = True
    wgrad: bool = True


class RecipeWeight(ABC):
    """Base of weights whose products are not plain ones: ``linear`` is their linear_fwd and
    linear_bwd, ``residuals`` their linear_residuals.
    """

    linear: ClassVar[Pair]
    residuals: ClassVar[Callable[..., Any]]
    shape: tuple[int, int]
    blocks: Blocks | None  # of an adapter, kept up to date by a Refresh

    @property
    @abstractmethod
    def stored(self) -> Array:
        """An array that tells this weight from another: its codes, or some of them."""

    def input_cast(self, like: Any, *, keep_x: bool) -> Cast | None:
        """The weight's answer to ``input_cast`` below."""
        return None

    def gradient_cast(self, like: Any) -> Cast | None:
        """The weight's answer to ``gradient_cast`` below."""
        return None


def input_cast(weight: Any, like: Float[Array, "tokens _"], *, keep_x: bool = True) -> Cast | None:
    """What the op that makes x, of as many rows as ``like``, casts for linear_fwd with this weight
    and ``keep_x``; None where linear_fwd casts x itself, or does not.
    """
    return weight.input_cast(like, keep_x=keep_x) if isinstance(weight, RecipeWeight) else None


def gradient_cast(weight: Any, like: Float[Array, "tokens _"]) -> Cast | None:
    """What the op that makes dy casts for linear_bwd; None where linear_bwd does, or nobody."""
    return weight.gradient_cast(like) if isinstance(weight, RecipeWeight) else None


class LinearResiduals(NamedTuple):
    """``x`` is None when the caller will bring it back; ``t`` is x A^T.

    With a widened weight, t may lie behind x and goes with it: None means to compute it again.
    """

    x: Float[Array, "tokens inner"] | None
    weight: Float[Array, "outer inner"] | Widened
    bias: Float[Array, " outer"] | None
    lora: LoRA | None
    t: Float[Array, "tokens ranks"] | None
    parts: Parts
    scale: float
    has_residual: bool


def linear_fwd(
    x: Float[Array, "tokens inner"],
    weight: Float[Array, "outer inner"] | Widened | RecipeWeight,
    bias: Float[Array, " outer"] | None = None,
    lora: LoRA | None = None,
    residual: Float[Array, "tokens outer"] | None = None,
    *,
    parts: Parts = (),
    scale: float = 1.0,
    keep_x: bool = True,
    cast: Cast | None = None,
) -> tuple[Float[Array, "tokens outer"], Any]:
    """Returns y, and what linear_bwd needs.

    ``parts`` are the row ranges [start, stop) of weight that ``lora`` adapts, ascending; none
    stands for all rows. With ``keep_x`` off the residuals leave x out: pass it to linear_bwd.
    Raises ValueError when the adapter does not fit its parts, or a type is not that of x.

    A widened weight must hold ``lora`` and ``scale`` already (``Refresh``), whose values are not
    read here; without ``lora`` it is W alone. Room behind x is overwritten.

    ``cast`` is what ``input_cast`` gave, done by the op that made x.
    """
    if isinstance(weight, RecipeWeight):
        settings: dict[str, Any] = {"parts": parts, "scale": scale, "keep_x": keep_x}
        return weight.linear.fwd(x, weight, bias, lora, residual, **settings, **_given(cast))
    if lora is not None:
        parts = checked_parts(lora, parts, *weight.shape)
    if lora is not None and isinstance(weight, Widened):
        y, t = _widened_fwd(x, weight, bias, residual)
        t = t if keep_x else None
    else:
        weight = plain(weight)
        y, t = _fwd(x, weight, bias, lora, residual, parts, scale)
    assert not isinstance(weight, RecipeWeight)
    kept = x if keep_x else None
    return y, LinearResiduals(kept, weight, bias, lora, t, parts, scale, residual is not None)


def _given(cast: Cast | None) -> dict[str, Cast]:
    """The setting of a pair whose weight asked for a cast; others have none of this name."""
    return {} if cast is None else {"cast": cast}


def linear_residuals(
    x: Float[Array, "tokens inner"],
    weight: Float[Array, "outer inner"] | Widened | RecipeWeight,
    bias: Float[Array, " outer"] | None = None,
    lora: LoRA | None = None,
    *,
    parts: Parts = (),
    scale: float = 1.0,
    has_residual: bool = False,
) -> Any:
    """The residuals of linear_fwd alone, for who has y or needs none: without the large product."""
    if isinstance(weight, RecipeWeight):
        settings: dict[str, Any] = {"parts": parts, "scale": scale, "has_residual": has_residual}
        return weight.residuals(x, weight, bias, lora, **settings)
    if lora is None:
        return LinearResiduals(x, plain(weight), bias, None, None, parts, scale, has_residual)
    parts = checked_parts(lora, parts, *weight.shape)
    if isinstance(weight, Widened):
        t, _ = _beside(x, weight.extra, weight.down, transpose_b=True)
    else:
        t = matmul(x, lora.a, transpose_b=True)
    return LinearResiduals(x, weight, bias, lora, t, parts, scale, has_residual)


def linear_bwd(
    res: Any,
    dy: Float[Array, "tokens outer"],
    *,
    into: LinearInto | None = None,
    need_dx: bool = True,
    x: Float[Array, "tokens inner"] | None = None,
    cast: Cast | None = None,
) -> tuple[
    Float[Array, "tokens inner"] | None,
    Float[Array, "outer inner"] | None,
    Float[Array, " outer"] | None,
    LoRA | None,
    Float[Array, "tokens outer"] | None,
]:
    """Returns (dx, dweight, dbias, dlora, dresidual): None for what is absent, frozen or unneeded.

    ``x`` is the input, for residuals that left it out. Fresh gradients have their parameter's type.
    ``cast`` is what ``gradient_cast`` gave, done by the op that made dy.
    """
    into = LinearInto() if into is None else into
    if isinstance(res.weight, RecipeWeight):
        found: tuple[Any, Any, Any, Any, Any] = res.weight.linear.bwd(
            res, dy, into=into, need_dx=need_dx, x=x, **_given(cast)
        )
        return found
    x = res.x if x is None else x
    need_dt = res.lora is not None and (need_dx or not is_frozen(into.lora, "a"))
    through = _widened_dx if isinstance(res.weight, Widened) else _dx
    dt, dx = through(res, dy, need_dx, need_dt)
    dweight = weight_gradient(dy, x, into.weight, res.weight)
    dbias = None
    if res.bias is not None and into.bias is not FROZEN:
        dbias = column_sum(dy, into=into.bias, dtype=res.bias.dtype)
    dlora = None
    if res.lora is not None and into.lora is not FROZEN:
        da_into, db_into = (None, None) if into.lora is None else into.lora
        da = weight_gradient(dt, x, da_into, res.lora.a)
        dlora = LoRA(da, _b_gradient(res, res.lora.b, dy, x, db_into))
    return dx, dweight, dbias, dlora, dy if res.has_residual else None


def needs_x(res: Any) -> bool:
    """Whether the residuals of a linear_fwd must be brought x for its backward."""
    return res.x is None and getattr(res, "codes", None) is None


def _fwd(
    x: Any, weight: Any, bias: Any, lora: LoRA | None, residual: Any, parts: Parts, scale: float
) -> tuple[Any, Any]:
    """(y, t) of a plain weight."""
    y = matmul(x, weight, transpose_b=True, bias=bias, c=residual)
    if lora is None:
        return y, None
    t = matmul(x, lora.a, transpose_b=True)
    spread = spread_b(lora.b, parts, len(weight))
    return matmul(t, spread, transpose_b=True, out=y, accumulate=True, alpha=scale), t


def _dx(res: LinearResiduals, dy: Any, need_dx: bool, need_dt: bool) -> tuple[Any, Any]:
    """(dt, dx) of a plain weight."""
    dt = dx = None
    if res.lora is not None and need_dt:
        dt = matmul(dy, spread_b(res.lora.b, res.parts, dy.shape[1]), alpha=res.scale)
    if need_dx:
        dx = matmul(dy, plain(res.weight))
        if res.lora is not None and dt is not None:
            matmul(dt, res.lora.a, out=dx, accumulate=True)
    return dt, dx


def _widened_fwd(x: Any, weight: Widened, bias: Any, residual: Any) -> tuple[Any, Any]:
    """(y, t)"""
    t, wide = _beside(x, weight.extra, weight.down, transpose_b=True)
    if wide is not None:
        return matmul(wide, weight.forward, transpose_b=True, bias=bias, c=residual), t
    y = matmul(x, weight.weight, transpose_b=True, bias=bias, c=residual)
    return matmul(t, weight.up, transpose_b=True, out=y, accumulate=True), t


def _widened_dx(res: LinearResiduals, dy: Any, need_dx: bool, need_dt: bool) -> tuple[Any, Any]:
    """(dt, dx); dt is u without the columns that no rank fills."""
    weight, lora = res.weight, res.lora
    assert isinstance(weight, Widened) and lora is not None
    if not need_dt:
        return None, None
    u, wide = _beside(dy, weight.extra, weight.up)
    dt = u[:, : lora.a.shape[0]]
    if not need_dx:
        return dt, None
    if wide is not None:
        return dt, matmul(wide, weight.backward)
    dx = matmul(dy, weight.weight)
    return dt, matmul(u, weight.down, out=dx, accumulate=True)


def _beside(x: Any, extra: int, block: Any, *, transpose_b: bool = False) -> tuple[Any, Any]:
    """x times a block of a widened weight, in the room behind x if there is any; and x with it."""
    wide = room(x, extra)
    out = None if wide is None else wide[:, x.shape[1] :]
    return matmul(x, block, transpose_b=transpose_b, out=out), wide


def is_frozen(into: Any, field: str) -> bool:
    return into is FROZEN or (into is not None and getattr(into, field) is FROZEN)


def weight_gradient(dy: Any, x: Any, into: Any, weight: Any) -> Any:
    """dy^T x, added to ``into`` inside the product."""
    if into is FROZEN:
        return None
    require(x is not None, NEEDS_X)
    out, accumulate = destination(into, weight.shape, weight.dtype, like=dy)
    return matmul(dy, x, transpose_a=True, out=out, accumulate=accumulate)


def _b_gradient(res: LinearResiduals, b: Any, dy: Any, x: Any, into: Any) -> Any:
    """dB of a plain or widened weight; t is computed again where x brought it."""
    weight, t = res.weight, res.t
    if isinstance(weight, Widened) and t is None and into is not FROZEN:
        require(x is not None, NEEDS_X)
        t, _ = _beside(x, weight.extra, weight.down, transpose_b=True)
    at_once = isinstance(weight, Widened)
    return b_gradient(dy, t, b, parts=res.parts, scale=res.scale, into=into, at_once=at_once)


def b_gradient(
    dy: Float[Array, "tokens outer"],
    t: Float[Array, "tokens ranks"] | None,
    b: Float[Array, "adapted rank"],
    *,
    parts: Parts,
    scale: float,
    into: Any,
    at_once: bool,
) -> Float[Array, "adapted rank"] | None:
    """dB_p = scale * dy_p^T t_p, or None if ``into`` is FROZEN.

    ``at_once``: parts share one product with every t, of which theirs are taken.
    """
    if into is FROZEN:
        return None
    assert t is not None, "an adapter keeps t"
    rank = b.shape[1]
    if at_once and len(parts) > 1:
        product = matmul(dy, t, transpose_a=True, alpha=scale, dtype=compute_dtype(dy))
        return take_diagonal(product, parts=parts, rank=rank, into=into, dtype=b.dtype)
    db, accumulate = destination(into, b.shape, b.dtype, like=dy)
    row = 0
    for part, (start, stop) in enumerate(parts):
        matmul(
            dy[:, start:stop],
            t[:, part * rank : (part + 1) * rank],
            transpose_a=True,
            out=db[row : row + stop - start],
            accumulate=accumulate,
            alpha=scale,
        )
        row += stop - start
    return db


def checked_parts(lora: LoRA, parts: Parts, outer: int, inner: int) -> Parts:
    """The parts, given or implied, after a look at the adapter's shapes."""
    parts = parts or ((0, outer),)
    require(len(parts) <= MAX_PARTS, f"linear_fwd: at most {MAX_PARTS} parts, got {len(parts)}")
    edges = [edge for part in parts for edge in part]
    require(
        edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= outer,
        f"linear_fwd: parts must be ascending row ranges of {outer} rows, got {parts}",
    )
    adapted, rank = sum(stop - start for start, stop in parts), lora.b.shape[1]
    require(
        lora.a.shape == (len(parts) * rank, inner) and lora.b.shape == (adapted, rank),
        f"linear_fwd: {len(parts)} parts of rank {rank} take a ({len(parts) * rank}, {inner}) and "
        f"b ({adapted}, {rank}), got {lora.a.shape} and {lora.b.shape}",
    )
    return parts


def spread_b(b: Any, parts: Parts, outer: int) -> Any:
    """D of the head of this file: b itself when its one part is all rows."""
    if parts == ((0, outer),):
        return b
    rank = b.shape[1]
    if not on_device(b):
        out, row = zeros((outer, len(parts) * rank), b.dtype, like=b), 0
        for part, (start, stop) in enumerate(parts):
            out[start:stop, part * rank : (part + 1) * rank] = b[row : row + stop - start]
            row += stop - start
        return out
    require(b.flags.c_contiguous, "linear_fwd: lora.b must be contiguous")
    out = empty((outer, len(parts) * rank), b.dtype, like=b)
    edges = [edge for part in (*parts, *((0, 0),) * (MAX_PARTS - len(parts))) for edge in part]
    SOURCE.launch(
        "block_diagonal",
        (ctype(b.dtype),),
        -(-out.size // THREADS),
        THREADS,
        [out, b, outer, rank, len(parts), *edges],
    )
    return out


def column_sum(
    x: Float[Array, "rows columns"], *, into: Float[Array, " columns"] | None = None, dtype: Any
) -> Float[Array, " columns"]:
    """Sums each column in float32, in an order that the shape alone decides.

    The sum is added to ``into`` (of ``dtype`` or float32), or returned as a fresh ``dtype`` array.
    """
    rows, columns = x.shape
    if not on_device(x):
        return store(upcast(x).sum(axis=0), into, dtype)
    out, accumulate = destination(into, (columns,), dtype, like=x)
    leading = columns if rows == 1 else x.strides[0] // x.itemsize
    require(
        columns == 1 or x.strides[1] == x.itemsize,
        f"column_sum: rows of x must hold neighbouring elements, got strides {x.strides}",
    )
    slices = -(-rows // ROWS_PER_SLICE)
    partial = empty((slices, columns), "float32", like=x)
    width = vector_width(x.dtype)
    if columns % width or leading % width or address(x) % 16:
        width = 1
    if slices:
        SOURCE.launch(
            "column_sum_partial",
            (ctype(x.dtype), str(width)),
            (-(-columns // (32 * width)), slices),
            (32, 8),
            [partial, x, np.int64(leading), rows, columns, ROWS_PER_SLICE],
        )
    SOURCE.launch(
        "column_sum",
        (ctype(out.dtype),),
        -(-columns // THREADS),
        THREADS,
        [out, partial, slices, columns, accumulate],
    )
    return out


def linear_ref(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    lora: LoRA | None = None,
    residual: Array | None = None,
    *,
    parts: Parts = (),
    scale: float = 1.0,
) -> Array:
    """Reference of linear_fwd: with the whole weight that the adapter stands for."""
    if lora is not None:
        pieces, end, taken, rank = [], 0, 0, lora.b.shape[1]
        for part, (start, stop) in enumerate(parts or ((0, weight.shape[0]),)):
            b = lora.b[taken : taken + stop - start]
            a = lora.a[part * rank : (part + 1) * rank]
            pieces += [weight[end:start], weight[start:stop] + scale * (b @ a)]
            end, taken = stop, taken + stop - start
        weight = namespace(x).concatenate([*pieces, weight[end:]])
    y = x @ weight.T
    for term in (bias, residual):
        if term is not None:
            y = y + term
    return y


linear = Pair(linear_fwd, linear_bwd)
