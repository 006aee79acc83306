"""linear (see linear.py) with a weight that is stored in a narrow format (QLoRA, arXiv 2305.14314).

Before a product the weight is decoded to the compute type, into memory that weights of one shape
share; the products are those of linear, with the adapter where the weight has one. Backward
decodes again, unless the memory still holds the weight: nothing of it is kept. ``Shared.forget``
must be called before the passes of a micro-batch, since a recorded step cannot look at what another
left there.

A weight is made of pieces, rows that were quantised by themselves: a stacked matrix (q, k, v; gate,
up) has one for each tensor of its checkpoint.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from surogate.kernels.arrays import BF16, Array, empty, require
from surogate.kernels.linear import (
    LinearInto,
    RecipeWeight,
    linear_bwd,
    linear_fwd,
    linear_residuals,
)
from surogate.kernels.pair import Pair
from surogate.kernels.quant.quantized import Quantized, dequantize
from surogate.kernels.widened import Blocks, Widened, extra_of


class Shared:
    """Memory that one weight at a time is decoded to: a matrix, widened where it has an adapter.

    It is there for the weights that hold it. Without one, it comes when something is decoded, and
    goes when it is forgotten.
    """

    def __init__(self, shape: tuple[int, int], ranks: int, dtype: Any, *, like: Any) -> None:
        self.shape, self.dtype, self.ranks = shape, dtype, ranks
        self.holder: Any = None  # whose weight the matrix is
        self.widened = False  # with its adapter
        self.cast: Any = None  # whose cast lies in the memory that casts of this shape share
        self._like, self._users = empty(0, dtype, like=like), 0
        self._matrix: Any = None

    @property
    def matrix(self) -> Any:
        """[outer, inner], or a Widened."""
        if self._matrix is None:
            shape, ranks, dtype, like = self.shape, self.ranks, self.dtype, self._like
            self._matrix = (
                Widened.blank(shape, ranks, dtype, like=like)
                if ranks
                else empty(shape, dtype, like=like)
            )
        return self._matrix

    @property
    def nbytes(self) -> int:
        """Of the matrix; 0 while it is not there."""
        matrix = self._matrix.rows if isinstance(self._matrix, Widened) else self._matrix
        return 0 if matrix is None else int(matrix.nbytes)

    def hold(self) -> None:
        """A weight needs the memory as long as it lives, or until ``release``."""
        self._users += 1
        _ = self.matrix

    def release(self) -> None:
        """A weight that held it does not need it: its products take codes."""
        self._users -= 1
        self.forget()

    def forget(self) -> None:
        """Whatever comes next decodes its weight."""
        self.holder = self.cast = None
        if not self._users:
            self._matrix = None


class Piece(NamedTuple):
    """Rows from ``start`` on."""

    start: int
    quantized: Quantized


@dataclass(frozen=True, eq=False)
class QuantizedWeight(RecipeWeight):
    """A frozen weight in a narrow format. ``blocks`` hold an adapter for ``shared``'s."""

    shape: tuple[int, int]
    pieces: tuple[Piece, ...]
    shared: Shared
    blocks: Blocks | None

    @classmethod
    def of(cls, pieces: tuple[Quantized, ...], shared: Shared) -> "QuantizedWeight":
        """Stacks pieces, and holds ``shared``. Raises ValueError when they are not of its width."""
        shape = (sum(q.shape[0] for q in pieces), pieces[0].shape[1])
        require(
            shape == shared.shape and all(q.shape[1] == shape[1] for q in pieces),
            f"QuantizedWeight: pieces of {[q.shape for q in pieces]} do not stack to "
            f"{shared.shape}",
        )
        blocks, codes = None, pieces[0].codes
        if shared.ranks:
            blocks = Blocks.blank(shape, shared.ranks, shared.dtype, like=codes)
        shared.hold()
        return cls(shape, stacked(pieces), shared, blocks)

    @property
    def extra(self) -> int:
        """Columns that an input needs behind it, for an adapter."""
        return extra_of(self.shared.ranks)

    @property
    def stored(self) -> Array:
        return self.pieces[0].quantized.codes

    @property
    def nbytes(self) -> int:
        """As it is stored."""
        return sum(piece.quantized.nbytes for piece in self.pieces)

    def decoded(self) -> Any:
        """What linear multiplies with, in the shared memory."""
        shared, matrix = self.shared, self.shared.matrix
        self.alone()
        if self.blocks is not None and not shared.widened:
            matrix.down[...], matrix.up[...] = self.blocks.down, self.blocks.up
            shared.widened = True
        return matrix

    def alone(self) -> Array:
        """The weight without its adapter, in the shared memory: between two calls of
        ``Shared.forget`` it is decoded once, until another weight takes its place.
        """
        shared, matrix = self.shared, self.shared.matrix
        out: Array = matrix.weight if isinstance(matrix, Widened) else matrix
        if shared.holder is not self:
            shared.holder = None  # should decoding fail
            decode_(self.pieces, out)
            shared.holder, shared.widened = self, False
        return out

    def plain(self) -> Array:
        """The same, decoded anew, for whoever does not know what else used the memory."""
        self.shared.forget()
        return self.alone()


def stacked(pieces: tuple[Quantized, ...]) -> tuple[Piece, ...]:
    """Matrices, one below the other."""
    starts = (sum(q.shape[0] for q in pieces[:i]) for i in range(len(pieces)))
    return tuple(Piece(*each) for each in zip(starts, pieces, strict=True))


def decode_(pieces: tuple[Piece, ...], out: Array) -> None:
    """Writes a weight to ``out`` [outer, inner], whose rows may lie apart."""
    for start, quantized in pieces:
        rows = out[start : start + quantized.shape[0]]
        if out.dtype == BF16:
            dequantize(quantized, out=rows)
        else:
            rows[...] = dequantize(quantized)


def _fwd(x: Array, weight: QuantizedWeight, *arrays: Any, **settings: Any) -> tuple[Any, Any]:
    y, res = linear_fwd(x, weight.decoded(), *arrays, **settings)
    return y, res._replace(weight=weight)


def _bwd(res: Any, dy: Array, *, into: LinearInto, **options: Any) -> Any:
    return linear_bwd(res._replace(weight=res.weight.decoded()), dy, into=into, **options)


def _residuals(x: Array, weight: QuantizedWeight, *arrays: Any, **settings: Any) -> Any:
    return linear_residuals(x, weight.decoded(), *arrays, **settings)._replace(weight=weight)


QuantizedWeight.linear = Pair(_fwd, _bwd)
QuantizedWeight.residuals = staticmethod(_residuals)
