"""linear (see linear.py) with products in NVFP4, at the scales of kernels/nvfp4.py.

    y = residual + q(x) q(W)^T + bias + s (x A^T) D^T
    dx = q(dy) q(W) + s (dy D) A        dW = q(R dy)^T q(R x)

    product  operand  blocks                  rounding                  amax of
    forward  x        1x16 along inner        nearest                   x
             W        16x16                   nearest                   W
    dgrad    dy       1x16 along outer        stochastic                dy
             W^T      16x16, the same codes   nearest                   W
                      (not ``square``: 1x16 along inner, and along outer for W^T)
    wgrad    dy^T     1x16 along tokens       stochastic                R dy
             x^T      1x16 along tokens       nearest                   R x

(NVIDIA 2025, arXiv 2509.25149, table of section 4). R is the 16-point random Hadamard transform
along tokens, which cancels in dW. What is rounded to nearest may take four over six. Gradients are
those of the products, as if casts were the identity (straight through). Sums are in float32. An
adapter's own products, and its gradients, are bfloat16; its product comes first, and the product of
casts adds to it.

Backward casts x again, by its transformed values: it needs x itself, and keeps nothing else of it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxtyping import Float, Float32, UInt32

from surogate.kernels.arrays import FROZEN, Array, destination, require
from surogate.kernels.linear import (
    NEEDS_X,
    LinearInto,
    LoRA,
    Products,
    RecipeWeight,
    checked_parts,
    is_frozen,
    weight_gradient,
)
from surogate.kernels.matmul import matmul
from surogate.kernels.nvfp4 import (
    BLOCK,
    SIGNS,
    TOKENS,
    Draw,
    Nvfp4,
    nvfp4_amax,
    nvfp4_cast,
    nvfp4_cast_tokens,
    nvfp4_transpose,
)
from surogate.kernels.nvfp4_matmul import emulated_for, nvfp4_matmul
from surogate.kernels.pair import Pair
from surogate.kernels.recipe_linear import (
    adapter_down,
    adapter_dx,
    adapter_fwd,
    bias_and_adapter,
    plain_weight,
)
from surogate.kernels.widened import Blocks, Parts


class Nvfp4Options(NamedTuple):
    """Of the casts. ``signs`` are those of the Hadamard transform, a bit for each token of 16; None
    leaves it out. ``square``: weights have one scale for 16x16 values, so that both directions
    multiply with the same numbers; else one for 16 along the sum of each product, which is nearer
    to the weight, but the gradient is then not of quite the weight that the forward product had.
    """

    four_over_six: bool = True
    stochastic: bool = True
    signs: int | None = SIGNS
    square: bool = True


_ALL, _DEFAULT = Products(), Nvfp4Options()


@dataclass(frozen=True, eq=False)
class Nvfp4Weight(RecipeWeight):
    """A weight's casts, for the forward product and transposed for the backward one.

    ``weight`` is W itself, which training changes (``recast_``), or None when it is frozen.
    ``draw`` are the random bits of its gradients' casts. ``blocks`` hold an adapter ready for its
    products; a ``Refresh`` keeps them up to date.
    """

    shape: tuple[int, int]
    weight: Float[Array, "outer inner"] | None
    forward: Nvfp4
    backward: Nvfp4
    draw: Draw
    options: Nvfp4Options = _DEFAULT
    blocks: Blocks | None = None
    trained: bool = True
    products: Products = _ALL

    @classmethod
    def of(
        cls,
        weight: Float[Array, "outer inner"],
        key: UInt32[Array, "2"],
        *,
        trained: bool,
        tensor: int = 0,
        ranks: int = 0,
        options: Nvfp4Options = _DEFAULT,
        products: Products = _ALL,
        turns: bool = False,
        out: "Nvfp4Weight | None" = None,
    ) -> "Nvfp4Weight":
        """Casts a weight. It is kept where it is ``trained`` or a product of casts is not wanted;
        ``ranks`` of an adapter get room for its blocks.

        ``turns``: the casts may go when another weight needs their memory, and ``restore_`` makes
        them again, by the amax that is kept. They lie in that of ``out``, a weight of the same
        shape, where given.

        ``key`` is (seed, step) of random bits, beside the weight, which the caller changes from one
        backward to the next; ``tensor`` tells the weights of a model apart.
        """
        outer, inner = weight.shape
        require(
            outer % BLOCK == 0 and inner % BLOCK == 0,
            f"nvfp4: a weight's sizes must be multiples of {BLOCK}, got {(outer, inner)}",
        )
        require(
            options.square or outer % TOKENS == 0,
            f"nvfp4: without square blocks, rows must be a multiple of {TOKENS}, got {outer}",
        )
        blocks = Blocks.blank(weight.shape, ranks, weight.dtype, like=weight) if ranks else None
        kept = weight if trained or not (products.forward and products.dgrad) else None
        if turns:
            forward, backward = _in_turns(weight, options, out)
        else:
            forward, backward = _cast_weight(weight, options, nvfp4_amax(weight))
        draw = Draw(key, tensor)
        return cls(
            (outer, inner), kept, forward, backward, draw, options, blocks, trained, products
        )

    @property
    def stored(self) -> Array:
        found = self.forward.codes if self.forward.values is None else self.forward.values
        assert found is not None
        return found

    @property
    def nbytes(self) -> int:
        """Of the casts."""
        casts = (self.forward, self.backward)
        arrays = [x for cast in casts for x in (cast.values, cast.codes, cast.scales)]
        return sum({id(x): x.nbytes for x in arrays if x is not None}.values())

    def recast_(self) -> None:
        """Brings the casts up to date with a weight that has changed."""
        assert self.weight is not None, "a frozen weight does not change"
        self.forward.amax[...] = nvfp4_amax(self.weight)
        casts = (self.forward, self.backward)
        _cast_weight(self.weight, self.options, self.forward.amax, out=casts)

    @property
    def both_ways(self) -> bool:
        """Whether one cast serves both directions."""
        return self.options.square and self.forward.codes is None

    def restore_(self, weight: Float[Array, "outer inner"], *, backward: bool) -> None:
        """Writes the cast for one direction again, of the weight that was cast."""
        square = self.options.square
        if square or not backward:
            _cast_forward(weight, self.options, self.forward.amax, self.forward)
        if backward:
            _cast_backward(weight, self.options, self.forward, self.backward)


def _cast_weight(
    weight: Any,
    options: Nvfp4Options,
    amax: Float32[Array, "1"],
    *,
    out: tuple[Nvfp4 | None, Nvfp4 | None] = (None, None),
) -> tuple[Nvfp4, Nvfp4]:
    """The casts of W and of W^T, which share an amax."""
    forward = _cast_forward(weight, options, amax, out[0])
    return forward, _cast_backward(weight, options, forward, out[1])


def _cast_forward(weight: Any, options: Nvfp4Options, amax: Any, out: Nvfp4 | None) -> Nvfp4:
    return nvfp4_cast(weight, amax, tall=options.square, out=out, **_settings(weight, options))


def _cast_backward(weight: Any, options: Nvfp4Options, forward: Nvfp4, out: Nvfp4 | None) -> Nvfp4:
    """``forward`` holds the cast of W where it is ``square``."""
    if options.square:
        return nvfp4_transpose(forward, out=out)
    settings = _settings(weight, options)
    return nvfp4_cast_tokens(weight, forward.amax, signs=None, out=out, **settings)


def _settings(weight: Any, options: Nvfp4Options) -> dict[str, Any]:
    return {"emulated": emulated_for(weight), "four_over_six": options.four_over_six}


def _in_turns(weight: Any, options: Nvfp4Options, out: Nvfp4Weight | None) -> tuple[Nvfp4, Nvfp4]:
    """Casts with an amax of their own, in memory that others have too. Values of both directions
    are as many and lie alike, so that they take turns; codes do not.
    """
    amax = nvfp4_amax(weight)
    if out is not None:
        return replace(out.forward, amax=amax), replace(out.backward, amax=amax)
    if not emulated_for(weight):
        return _cast_weight(weight, options, amax)
    forward = _cast_forward(weight, options, amax, None)
    return forward, nvfp4_transpose(forward)


class Nvfp4LinearResiduals(NamedTuple):
    """``x`` is None when the caller will bring it back; ``t`` is x A^T."""

    x: Float[Array, "tokens inner"] | None
    weight: Nvfp4Weight
    bias: Float[Array, " outer"] | None
    lora: LoRA | None
    t: Float[Array, "tokens ranks"] | None
    parts: Parts
    scale: float
    has_residual: bool


def nvfp4_linear_fwd(
    x: Float[Array, "tokens inner"],
    weight: Nvfp4Weight,
    bias: Float[Array, " outer"] | None = None,
    lora: LoRA | None = None,
    residual: Float[Array, "tokens outer"] | None = None,
    *,
    parts: Parts = (),
    scale: float = 1.0,
    keep_x: bool = True,
) -> tuple[Float[Array, "tokens outer"], Nvfp4LinearResiduals]:
    """linear_fwd of a weight in NVFP4."""
    t = y = None
    if lora is not None:
        parts = checked_parts(lora, parts, *weight.shape)
        t, y = adapter_fwd(x, weight, lora, residual, parts, scale)
    added = y is not None
    c = None if added else residual
    if weight.products.forward:
        cast = nvfp4_cast(
            x,
            nvfp4_amax(x),
            emulated=emulated_for(x),
            four_over_six=weight.options.four_over_six,
        )
        y = nvfp4_matmul(
            cast, weight.forward, bias=bias, c=c, out=y, accumulate=added, dtype=x.dtype
        )
    else:
        y = matmul(
            x, plain_weight(weight), transpose_b=True, bias=bias, c=c, out=y, accumulate=added
        )
    left = x if keep_x else None
    return y, Nvfp4LinearResiduals(left, weight, bias, lora, t, parts, scale, residual is not None)


def nvfp4_linear_bwd(
    res: Nvfp4LinearResiduals,
    dy: Float[Array, "tokens outer"],
    *,
    into: LinearInto,
    need_dx: bool = True,
    x: Float[Array, "tokens inner"] | None = None,
) -> tuple[Any, Any, Any, LoRA | None, Any]:
    """linear_bwd of a weight in NVFP4."""
    weight, lora = res.weight, res.lora
    x = res.x if x is None else x
    need_dweight = weight.trained and into.weight is not FROZEN
    dgrad, wgrad = need_dx and weight.products.dgrad, need_dweight and weight.products.wgrad
    amax = None
    if dgrad or wgrad:
        amax = nvfp4_amax(dy, signs=weight.options.signs if wgrad else None)
    dt = dx = None
    if lora is not None and (need_dx or not is_frozen(into.lora, "a")):
        dt, dx = adapter_dx(res, dy, need_dx)
    added = dx is not None
    if dgrad:
        assert amax is not None
        cast = nvfp4_cast(dy, amax[:1], emulated=emulated_for(dy), draw=_draw(weight))
        dx = nvfp4_matmul(cast, weight.backward, out=dx, accumulate=added, dtype=dy.dtype)
        del cast
    elif need_dx:
        dx = matmul(dy, plain_weight(weight), out=dx, accumulate=added)
    dweight = None
    if wgrad:
        dweight = _dweight(weight, dy, amax, x, into.weight)
    elif need_dweight:
        dweight = weight_gradient(dy, x, into.weight, weight.weight)
    dbias, dlora = bias_and_adapter(res, dy, dt, x, into)
    return dx, dweight, dbias, dlora, dy if res.has_residual else None


def _draw(weight: Nvfp4Weight) -> Draw | None:
    return weight.draw if weight.options.stochastic else None


def _dweight(
    weight: Nvfp4Weight, dy: Any, dy_amax: Float32[Array, " _"] | None, x: Any, into: Any
) -> Any:
    """The product of both casts along tokens."""
    require(x is not None, NEEDS_X)
    assert weight.weight is not None and dy_amax is not None
    signs, emulated = weight.options.signs, emulated_for(dy)
    x_cast = nvfp4_cast_tokens(
        x,
        nvfp4_amax(x, signs=signs)[-1:],
        emulated=emulated,
        signs=signs,
        four_over_six=weight.options.four_over_six,
    )
    dy_cast = nvfp4_cast_tokens(
        dy, dy_amax[-1:], emulated=emulated, signs=signs, draw=_draw(weight)
    )
    out, accumulate = destination(into, weight.shape, weight.weight.dtype, like=dy)
    return nvfp4_matmul(dy_cast, x_cast, out=out, accumulate=accumulate)


def nvfp4_linear_residuals(
    x: Float[Array, "tokens inner"],
    weight: Nvfp4Weight,
    bias: Float[Array, " outer"] | None,
    lora: LoRA | None,
    *,
    parts: Parts,
    scale: float,
    has_residual: bool,
) -> Nvfp4LinearResiduals:
    """linear_residuals of a weight in NVFP4."""
    t = None
    if lora is not None:
        parts, t = checked_parts(lora, parts, *weight.shape), adapter_down(x, weight, lora)
    return Nvfp4LinearResiduals(x, weight, bias, lora, t, parts, scale, has_residual)


nvfp4_linear = Pair(nvfp4_linear_fwd, nvfp4_linear_bwd)
Nvfp4Weight.linear = nvfp4_linear
Nvfp4Weight.residuals = staticmethod(nvfp4_linear_residuals)
