"""linear (see linear.py) of a weight that is stored in one narrow format and multiplied in another:
QLoRA with the products of a recipe.

Before each product the weight becomes what the product takes in that direction, in memory that
weights of one shape share. For a product of 8-bit codes at one scale that is one pass from codes to
codes (quant/recode.py), where the sizes allow it. Else the weight is decoded to the compute type
(quantized_linear.py) and cast (fp8_linear.py, nvfp4_linear.py). The numbers are those of the recipe
on the decoded weight; as it is frozen, the amax of a tensor is taken once.
"""

from dataclasses import dataclass, replace
from typing import Any

from surogate.kernels.arrays import Array
from surogate.kernels.fp8 import Cast
from surogate.kernels.fp8_linear import Fp8Weight
from surogate.kernels.linear import LinearInto, RecipeWeight
from surogate.kernels.nvfp4_linear import Nvfp4Weight
from surogate.kernels.pair import Pair
from surogate.kernels.quant.recode import recodable, recode
from surogate.kernels.quantized_linear import QuantizedWeight
from surogate.kernels.widened import Blocks


@dataclass(frozen=True, eq=False)
class StoredCast(RecipeWeight):
    """A frozen weight in codes, ``source``, and the casts that it shares with others."""

    shape: tuple[int, int]
    source: QuantizedWeight
    cast: Fp8Weight | Nvfp4Weight
    blocks: Blocks | None

    @classmethod
    def of(cls, source: QuantizedWeight, cast: Fp8Weight | Nvfp4Weight) -> "StoredCast":
        """``cast`` is that of ``source.plain()``, in turns with others. The adapter is the
        source's.
        """
        return cls(source.shape, source, replace(cast, blocks=source.blocks), source.blocks)

    @property
    def stored(self) -> Array:
        return self.source.stored

    @property
    def nbytes(self) -> int:
        """As it is stored."""
        return self.source.nbytes

    def input_cast(self, like: Any, *, keep_x: bool) -> Cast | None:
        return self.cast.input_cast(like, keep_x=keep_x)

    def gradient_cast(self, like: Any) -> Cast | None:
        return self.cast.gradient_cast(like)

    @property
    def recodes(self) -> bool:
        """Whether a product of codes takes them without the decoded weight. Row scaling needs the
        amax of each row; its casts read what was decoded.
        """
        if not isinstance(self.cast, Fp8Weight) or self.cast.slots.weight.state.scaling == "row":
            return False
        return all(recodable(quantized) for _, quantized in self.source.pieces)

    @property
    def decodes(self) -> bool:
        """Whether any product needs the decoded weight."""
        products = self.cast.products
        return not (self.recodes and products.forward and products.dgrad)

    def ready(self, *, backward: bool) -> Fp8Weight | Nvfp4Weight:
        """What a direction's product multiplies with, until another weight needs the memory."""
        cast, shared, products = self.cast, self.source.shared, self.cast.products
        if not (products.dgrad if backward else products.forward):
            self.source.alone()  # in cast.weight
            return cast
        both_ways = isinstance(cast, Nvfp4Weight) and cast.both_ways
        made = (self, backward and not both_ways)
        if shared.cast == made:
            return cast
        shared.cast = None  # should casting fail
        if self.recodes:
            self._recode_(backward)
        else:
            cast.restore_(self.source.alone(), backward=backward)
        shared.cast = made
        return cast

    def _recode_(self, backward: bool) -> None:
        assert isinstance(self.cast, Fp8Weight)
        codes = self.cast.backward.turned if backward else self.cast.forward.rows
        assert codes is not None
        for start, quantized in self.source.pieces:
            rows = slice(start, start + quantized.shape[0])
            out = codes[:, rows] if backward else codes[rows]
            recode(quantized, self.cast.slots.weight.scale, out=out, turned=backward)


def source_of(weight: Any) -> QuantizedWeight | None:
    """The codes that a weight is stored in; None for others."""
    if isinstance(weight, StoredCast):
        return weight.source
    return weight if isinstance(weight, QuantizedWeight) else None


def _fwd(x: Array, weight: StoredCast, *arrays: Any, **settings: Any) -> tuple[Any, Any]:
    y, res = weight.cast.linear.fwd(x, weight.ready(backward=False), *arrays, **settings)
    return y, res._replace(weight=weight)


def _bwd(res: Any, dy: Array, *, into: LinearInto, need_dx: bool = True, **options: Any) -> Any:
    stored: StoredCast = res.weight
    weight = stored.ready(backward=True) if need_dx else stored.cast
    res = res._replace(weight=weight)
    return weight.linear.bwd(res, dy, into=into, need_dx=need_dx, **options)


def _residuals(x: Array, weight: StoredCast, *arrays: Any, **settings: Any) -> Any:
    return weight.cast.residuals(x, weight.cast, *arrays, **settings)._replace(weight=weight)


StoredCast.linear = Pair(_fwd, _bwd)
StoredCast.residuals = staticmethod(_residuals)
