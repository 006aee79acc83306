"""linear (see linear.py) with products of 8-bit codes, at the scales of kernels/fp8.py.

    y = residual + cast(x) cast(W)^T + bias + s (x A^T) D^T
    dx = cast(dy) cast(W) + s (dy D) A        dW = cast(dy)^T cast(x)

x and W are cast to E4M3 and dy to E5M2. Gradients are those of the products, as if casts were the
identity (straight through). Sums are in float32; the products that ``fast`` names let tensor cores
keep fewer bits, about 14, which on an H200 makes them a tenth faster. An adapter's own products,
and its gradients, are bfloat16; its product comes first, and the product of codes adds to it. With
row scaling dW is a bfloat16 product, since the scales of tokens cannot be taken out of a sum over
tokens.

Backward needs x for an adapter, and its transposed codes for dW: half of what x itself would take.

Where the scale is known and no transposed codes are wanted, the op that makes x, or dy, can write
the codes in the same pass (``input_cast``, ``gradient_cast``), which saves a read of it and a
launch. With transposed codes it would save no read: the cast that makes both stays.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from surogate.kernels.arrays import F32, FROZEN, Array, destination, empty, require, zeros
from surogate.kernels.fp8 import MULTIPLE, Cast, Codes, Slot, fp8_cast, scale_by
from surogate.kernels.fp8_matmul import fp8_matmul
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
from surogate.kernels.pair import Pair
from surogate.kernels.recipe_linear import (
    adapter_down,
    adapter_dx,
    adapter_fwd,
    bias_and_adapter,
    plain_weight,
)
from surogate.kernels.widened import Blocks, Parts


class Slots(NamedTuple):
    """The tensors that a weight's products cast."""

    x: Slot
    weight: Slot
    dy: Slot


_ALL = Products()
FAST = Products(forward=True, dgrad=True, wgrad=False)  # whose sums may have fewer bits


@dataclass(frozen=True, eq=False)
class Fp8Weight(RecipeWeight):
    """A weight as codes, for the forward product and turned for the backward one.

    ``weight`` is W itself, which training changes (``recast_``), or None when it is frozen.
    ``blocks`` hold an adapter ready for its products; a ``Refresh`` keeps them up to date.
    """

    shape: tuple[int, int]
    weight: Float[Array, "outer inner"] | None
    slots: Slots
    forward: Codes
    backward: Codes
    blocks: Blocks | None = None
    trained: bool = True
    products: Products = _ALL
    fast: Products = FAST

    @classmethod
    def of(
        cls,
        weight: Float[Array, "outer inner"],
        slots: Slots,
        *,
        trained: bool,
        ranks: int = 0,
        products: Products = _ALL,
        fast: Products = FAST,
        turns: bool = False,
        out: "Fp8Weight | None" = None,
    ) -> "Fp8Weight":
        """Casts a weight. It is kept where it is ``trained`` or a product of codes is not wanted;
        ``ranks`` of an adapter get room for its blocks.

        ``turns``: there is room for the codes of one direction at a time, which ``restore_`` makes,
        or whoever knows the weight from its own codes; the scale is set. The room is that of
        ``out``, a weight of the same shape, where given.
        """
        outer, inner = weight.shape
        require(
            outer % MULTIPLE == 0 and inner % MULTIPLE == 0,
            f"fp8: a weight's sizes must be multiples of {MULTIPLE}, got {(outer, inner)}",
        )
        blocks = Blocks.blank(weight.shape, ranks, weight.dtype, like=weight) if ranks else None
        kept = weight if trained or not (products.forward and products.dgrad) else None
        make = _room_for if turns else _cast_weight
        codes = None if out is None else (out.forward, out.backward)
        forward, backward = make(weight, slots.weight, codes)
        return cls((outer, inner), kept, slots, forward, backward, blocks, trained, products, fast)

    @property
    def stored(self) -> Array:
        assert self.forward.rows is not None
        return self.forward.rows

    @property
    def nbytes(self) -> int:
        """Of the codes of both directions."""
        return 2 * self.shape[0] * self.shape[1]

    def input_cast(self, like: Any, *, keep_x: bool) -> Cast | None:
        """None where the cast also makes transposed codes, see the head of this file."""
        if not self.products.forward or (_turned(self) and keep_x) or len(like) % MULTIPLE:
            return None
        return Cast.begin(self.slots.x, (len(like), self.shape[1]), like=like)

    def gradient_cast(self, like: Any) -> Cast | None:
        """None where the cast also makes transposed codes, see the head of this file."""
        if not self.products.dgrad or _turned(self):
            return None
        return Cast.begin(self.slots.dy, (len(like), self.shape[0]), like=like)

    def recast_(self) -> None:
        """Brings the codes up to date with a weight that has changed."""
        assert self.weight is not None, "a frozen weight does not change"
        _cast_weight(self.weight, self.slots.weight, (self.forward, self.backward))

    def restore_(self, weight: Float[Array, "outer inner"], *, backward: bool) -> None:
        """Writes the codes of one direction again, of the weight that was cast."""
        out = self.backward if backward else self.forward
        scaling: Any = "row" if self.slots.weight.state.scaling == "row" else "known"
        fp8_cast(
            weight, self.slots.weight, rows=not backward, turned=backward, scaling=scaling, out=out
        )


def _cast_weight(weight: Any, slot: Slot, out: tuple[Codes, Codes] | None = None) -> Any:
    """Codes for both products, by the amax of the weight as it is."""
    if slot.state.scaling == "row":
        forward = fp8_cast(weight, slot, out=out and out[0])
        return forward, fp8_cast(weight, slot, rows=False, turned=True, out=out and out[1])
    both = fp8_cast(weight, slot, turned=True, scaling="tensor", out=out and out[0])
    return both, both


def _room_for(weight: Any, slot: Slot, out: tuple[Codes, Codes] | None) -> tuple[Codes, Codes]:
    """Room for the codes of one direction, named for both; the scale by the amax of the weight."""
    (outer, inner), row = weight.shape, slot.state.scaling == "row"
    if not row:
        scale_by(weight, slot)
    if out is not None:
        forward, backward = out
    else:
        room = empty((outer, inner), np.uint8, like=weight)
        scales = [empty(n, F32, like=weight) if row else slot.inverse for n in (outer, inner)]
        forward = Codes(slot.form, room, None, scales[0])
        backward = Codes(slot.form, None, room.reshape(inner, outer), scales[1])
    if row:
        return forward, backward
    return forward._replace(inverse=slot.inverse), backward._replace(inverse=slot.inverse)


class Fp8LinearResiduals(NamedTuple):
    """``codes`` are those of x, turned, where dW is to be made of them; ``t`` is x A^T."""

    x: Float[Array, "tokens inner"] | None
    codes: Codes | None
    weight: Fp8Weight
    bias: Float[Array, " outer"] | None
    lora: LoRA | None
    t: Float[Array, "tokens ranks"] | None
    parts: Parts
    scale: float
    has_residual: bool


def fp8_linear_fwd(
    x: Float[Array, "tokens inner"],
    weight: Fp8Weight,
    bias: Float[Array, " outer"] | None = None,
    lora: LoRA | None = None,
    residual: Float[Array, "tokens outer"] | None = None,
    *,
    parts: Parts = (),
    scale: float = 1.0,
    keep_x: bool = True,
    cast: Cast | None = None,
) -> tuple[Float[Array, "tokens outer"], Fp8LinearResiduals]:
    """linear_fwd of a weight in codes. Rows of x whose number is no multiple of 16, as in
    generation, are filled up with zeros; there is no backward of those.
    """
    if len(x) % MULTIPLE:
        settings: dict[str, Any] = {"parts": parts, "scale": scale, "keep_x": keep_x}
        below = None if residual is None else _filled(residual)
        filled, res = fp8_linear_fwd(_filled(x), weight, bias, lora, below, **settings)
        return filled[: len(x)], res
    if lora is not None:
        parts = checked_parts(lora, parts, *weight.shape)
    turned = _turned(weight) and keep_x
    forward = weight.products.forward
    codes = None if cast is None else cast.codes
    if codes is None and (forward or turned):
        codes = fp8_cast(x, weight.slots.x, rows=forward, turned=turned)
    t = y = None
    if lora is not None:
        t, y = adapter_fwd(x, weight, lora, residual, parts, scale)
    added = y is not None
    c = None if added else residual
    if forward:
        assert codes is not None
        y = fp8_matmul(
            codes,
            weight.forward,
            bias=bias,
            c=c,
            out=y,
            accumulate=added,
            fast=weight.fast.forward,
            dtype=x.dtype,
        )
    else:
        y = matmul(
            x, plain_weight(weight), transpose_b=True, bias=bias, c=c, out=y, accumulate=added
        )
    left = x if keep_x and not turned else None
    codes = codes._replace(rows=None) if turned and codes is not None else None
    has_residual = residual is not None
    res = Fp8LinearResiduals(left, codes, weight, bias, lora, t, parts, scale, has_residual)
    return y, res


def _filled(x: Any) -> Any:
    """Rows of zeros below x up to a multiple of MULTIPLE."""
    rows = -(-len(x) // MULTIPLE) * MULTIPLE
    filled = zeros((rows, x.shape[1]), x.dtype, like=x)
    filled[: len(x)] = x
    return filled


def _turned(weight: Fp8Weight) -> bool:
    """Whether dW is a product of codes."""
    row = weight.slots.x.state.scaling == "row"
    return weight.trained and weight.products.wgrad and not row


def fp8_linear_bwd(
    res: Fp8LinearResiduals,
    dy: Float[Array, "tokens outer"],
    *,
    into: LinearInto,
    need_dx: bool = True,
    x: Float[Array, "tokens inner"] | None = None,
    cast: Cast | None = None,
) -> tuple[Any, Any, Any, LoRA | None, Any]:
    """linear_bwd of a weight in codes."""
    weight, lora = res.weight, res.lora
    x = res.x if x is None else x
    need_dweight = weight.trained and into.weight is not FROZEN
    turned = need_dweight and _turned(weight)
    dgrad = need_dx and weight.products.dgrad
    codes = None if cast is None else cast.codes
    if codes is None and (dgrad or turned):
        codes = fp8_cast(dy, weight.slots.dy, rows=dgrad, turned=turned)
    dt = dx = None
    if lora is not None and (need_dx or not is_frozen(into.lora, "a")):
        dt, dx = adapter_dx(res, dy, need_dx)
    added = dx is not None
    if dgrad:
        assert codes is not None
        dx = fp8_matmul(
            codes,
            weight.backward,
            turned_b=True,
            out=dx,
            accumulate=added,
            fast=weight.fast.dgrad,
            dtype=dy.dtype,
        )
    elif need_dx:
        dx = matmul(dy, plain_weight(weight), out=dx, accumulate=added)
    dweight = None
    if need_dweight:
        dweight = _dweight(res, dy, codes, x, into.weight)
    dbias, dlora = bias_and_adapter(res, dy, dt, x, into)
    return dx, dweight, dbias, dlora, dy if res.has_residual else None


def _dweight(res: Fp8LinearResiduals, dy: Any, codes: Codes | None, x: Any, into: Any) -> Any:
    weight = res.weight.weight
    assert weight is not None
    if not _turned(res.weight):
        return weight_gradient(dy, x, into, weight)
    x_codes = res.codes
    if x_codes is None:
        require(x is not None, NEEDS_X)
        x_codes = fp8_cast(x, res.weight.slots.x, rows=False, turned=True)
    assert codes is not None
    out, accumulate = destination(into, weight.shape, weight.dtype, like=dy)
    fast = res.weight.fast.wgrad
    return fp8_matmul(
        codes, x_codes, turned_a=True, turned_b=True, out=out, accumulate=accumulate, fast=fast
    )


def fp8_linear_residuals(
    x: Float[Array, "tokens inner"],
    weight: Fp8Weight,
    bias: Float[Array, " outer"] | None,
    lora: LoRA | None,
    *,
    parts: Parts,
    scale: float,
    has_residual: bool,
) -> Fp8LinearResiduals:
    """linear_residuals of a weight in codes."""
    t = None
    if lora is not None:
        parts, t = checked_parts(lora, parts, *weight.shape), adapter_down(x, weight, lora)
    turned = _turned(weight)
    codes = fp8_cast(x, weight.slots.x, rows=False, turned=True) if turned else None
    left = None if turned else x
    return Fp8LinearResiduals(left, codes, weight, bias, lora, t, parts, scale, has_residual)


fp8_linear = Pair(fp8_linear_fwd, fp8_linear_bwd)
Fp8Weight.linear = fp8_linear
Fp8Weight.residuals = staticmethod(fp8_linear_residuals)
