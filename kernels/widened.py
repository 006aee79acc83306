"""A weight stored together with its adapter, so that both share one product.

    M = [ W    s D ]    (outer + extra, inner + extra)
        [ A     0  ]

W is [outer, inner], A stacks the A's of the adapter's parts, D has their B's on its diagonal (see
linear.py) and s is the adapter's scale. With t = x A^T written behind each row of x, and
u = dy (s D) behind each row of dy, the products of linear need no second pass over their results:

    y = [x, t] [W, s D]^T = [x, t] M[:outer]^T        dx = [dy, u] [W; A] = [dy, u] M[:, :inner]

``extra`` is the parts' ranks, all together, rounded up to 64. Tensor-core kernels sum 64 terms at
a time, so a narrower block would take as long; and rows of M, of [x, t] and of [dy, u] keep the
128-byte boundaries that they have at a multiple of 64 columns. What the ranks leave is zero in M,
and so t and u come out as zero there.

M holds copies: whoever changes A or B calls a ``Refresh``. Rows with room behind them come from
``with_room``, and ``room`` finds it again: the columns behind are scratch of the next product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from surogate.kernels.arrays import (
    Array,
    address,
    destination,
    empty,
    namespace,
    on_device,
    require,
    row_stride,
    store,
    upcast,
    zeros,
)
from surogate.kernels.multi_tensor import tensor_table
from surogate.kernels.nvrtc import THREADS, Source, ctype

MULTIPLE = 64
MAX_PARTS = 8
_TYPES: list[tuple[str, ...]] = [("float",), ("bf16",)]
SOURCE = Source("widened", {"copy_blocks": _TYPES, "take_diagonal": _TYPES})

Parts = tuple[tuple[int, int], ...]


def extra_of(ranks: int) -> int:
    """Columns and rows that an adapter of so many ranks in all parts adds."""
    return -(-ranks // MULTIPLE) * MULTIPLE


@dataclass(frozen=True, eq=False, slots=True)
class Widened:
    """A leaf of a tree of weights that stands for W. ``rows`` is M; its shape is that of W."""

    rows: Float[Array, "wide_outer wide_inner"]
    outer: int
    inner: int

    @classmethod
    def of(cls, weight: Float[Array, "outer inner"], ranks: int) -> "Widened":
        """Around a weight that ``blank`` made room for, or around a copy of any other.

        The blocks of the adapter are zero, or what they were: refresh them.
        """
        outer, inner = weight.shape
        extra = extra_of(ranks)
        base: Any = weight.base
        if _same_start(base, weight) and base.shape == (outer + extra, inner + extra):
            return cls(base, outer, inner)
        made = cls.blank(weight.shape, ranks, weight.dtype, like=weight)
        made.weight[...] = weight
        return made

    @classmethod
    def blank(cls, shape: tuple[int, ...], ranks: int, dtype: Any, *, like: Any) -> "Widened":
        """Zeros, beside ``like``."""
        (outer, inner), extra = shape, extra_of(ranks)
        return cls(zeros((outer + extra, inner + extra), dtype, like=like), outer, inner)

    @property
    def extra(self) -> int:
        """Columns behind W's, and rows below."""
        return self.rows.shape[1] - self.inner

    @property
    def weight(self) -> Float[Array, "outer inner"]:
        """W, a view."""
        return self.rows[: self.outer, : self.inner]

    @property
    def down(self) -> Float[Array, "extra inner"]:
        """A, a view, with rows of zeros below."""
        return self.rows[self.outer :, : self.inner]

    @property
    def up(self) -> Float[Array, "outer extra"]:
        """s D, a view, with columns of zeros behind."""
        return self.rows[: self.outer, self.inner :]

    @property
    def forward(self) -> Float[Array, "outer wide_inner"]:
        """[W, s D], a view."""
        return self.rows[: self.outer]

    @property
    def backward(self) -> Float[Array, "wide_outer inner"]:
        """[W; A], a view."""
        return self.rows[:, : self.inner]

    @property
    def shape(self) -> tuple[int, int]:
        """That of W."""
        return self.outer, self.inner

    @property
    def dtype(self) -> Any:
        """Of W and of the blocks."""
        return self.rows.dtype

    @property
    def ndim(self) -> int:
        """That of W."""
        return 2


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """A and s D alone, [extra, inner] and [outer, extra], for a weight that is no array of floats.

    The ranks are filled up with zeros to ``extra``, as in a Widened.
    """

    down: Float[Array, "extra inner"]
    up: Float[Array, "outer extra"]

    @classmethod
    def blank(cls, shape: tuple[int, ...], ranks: int, dtype: Any, *, like: Any) -> "Blocks":
        """Zeros, beside ``like``: refresh them."""
        (outer, inner), extra = shape, extra_of(ranks)
        down = zeros((extra, inner), dtype, like=like)
        return cls(down, zeros((outer, extra), dtype, like=like))

    @property
    def outer(self) -> int:
        """Rows of the weight."""
        return self.up.shape[0]


def plain(weight: Any) -> Any:
    """W itself of a Widened leaf; any other leaf as it is."""
    return weight.weight if isinstance(weight, Widened) else weight


def with_room(like: Float[Array, "tokens _"], columns: int, weight: Any) -> Any:
    """Fresh rows for ``out=``, beside ``like`` and as many: [tokens, columns], with room behind
    each for what a product with ``weight`` writes there. None for a weight that needs none.
    """
    extra = getattr(weight, "extra", 0)
    if not extra:
        return None
    return empty((len(like), columns + extra), like.dtype, like=like)[:, :columns]


def room(x: Float[Array, "tokens columns"], extra: int) -> Any:
    """[tokens, columns + extra], whose first columns x is: what ``with_room`` made; else None."""
    base: Any = x.base
    wide = (x.shape[0], x.shape[1] + extra)
    return base if _same_start(base, x) and base.shape == wide else None


def _same_start(base: Any, view: Any) -> bool:
    """Whether a view begins where the array that it is of does."""
    return (
        getattr(base, "ndim", 0) == 2
        and base.dtype == view.dtype
        and address(base) == address(view)
    )


class Adapted(NamedTuple):
    """A widened weight, and the pair that its blocks hold: A, B and the row ranges of its parts."""

    weight: Widened | Blocks
    a: Float[Array, "parts_rank inner"]
    b: Float[Array, "adapted rank"]
    parts: Parts

    def blocks(self) -> Iterator[tuple[Array, Array, bool]]:
        """(rows of A or B, where they belong, whether they are scaled)."""
        (weight, a, b, parts), rank, row = self, self.b.shape[1], 0
        yield a, weight.down[: len(a)], False
        for part, (start, stop) in enumerate(parts or ((0, weight.outer),)):
            to = weight.up[start:stop, part * rank : (part + 1) * rank]
            yield b[row : row + stop - start], to, True
            row += stop - start


class Refresh:
    """Writes the pairs of a model into its widened weights: one launch, ready to be captured.

    It holds addresses: pairs and weights must stay where they are, and it keeps them alive.
    """

    def __init__(self, adapted: Sequence[Adapted], scale: float) -> None:
        self._blocks = [block for weight in adapted for block in weight.blocks()]
        require(bool(self._blocks), "Refresh: needs at least one widened weight")
        self._scale = float(scale)
        dtypes = {str(x.dtype) for a, to, _ in self._blocks for x in (a, to)}
        require(len(dtypes) == 1, f"Refresh: all arrays must be of one dtype, got {sorted(dtypes)}")
        for source, to, _ in self._blocks:
            require(
                source.flags.c_contiguous and source.shape == to.shape,
                f"Refresh: a pair must be contiguous and fit its weight, got {source.shape} "
                f"for {to.shape}",
            )
        first = self._blocks[0][0]
        self._table = None
        if on_device(first):
            rows = [
                (source, address(to), to.shape[1], row_stride("Refresh", to), int(scaled))
                for source, to, scaled in self._blocks
            ]
            self._table = tensor_table(rows, like=first)

    def launch_(self) -> None:
        """Brings the blocks up to date."""
        if not on_device(self._blocks[0][0]):
            for source, to, scaled in self._blocks:
                to[...] = upcast(source) * np.float32(self._scale) if scaled else source
            return
        table = self._table
        assert table is not None, "made on a card, or under its emulator"
        types = (ctype(self._blocks[0][0].dtype),)
        arguments = [table.rows, table.chunk_tensor, table.chunk, self._scale]
        SOURCE.launch("copy_blocks", types, len(table.chunk_tensor), THREADS, arguments)


def take_diagonal(
    product: Float[Array, "outer columns"],
    *,
    parts: Parts,
    rank: int,
    into: Float[Array, "adapted rank"] | None,
    dtype: Any,
) -> Float[Array, "adapted rank"]:
    """Of part p's rows of ``product``, the columns from p * rank on; the parts' rows end to end.

    ``product`` is float32 (float64 on the host) and contiguous. Returned fresh in ``dtype``, or
    added to ``into``, which is then contiguous.
    """
    rows = sum(stop - start for start, stop in parts)
    if not on_device(product):
        blocks = [product[a:b, p * rank : (p + 1) * rank] for p, (a, b) in enumerate(parts)]
        return store(namespace(product).concatenate(blocks), into, dtype)
    out, accumulate = destination(into, (rows, rank), dtype, like=product)
    require(
        out.flags.c_contiguous and product.flags.c_contiguous,
        "take_diagonal: product and into must be contiguous",
    )
    edges = [edge for part in (*parts, *((0, 0),) * (MAX_PARTS - len(parts))) for edge in part]
    SOURCE.launch(
        "take_diagonal",
        (ctype(out.dtype),),
        -(-out.size // THREADS),
        THREADS,
        [out, product, product.shape[1], rows, rank, accumulate, *edges],
    )
    return out
