"""What the linears of weights in narrow formats share (fp8_linear.py, nvfp4_linear.py): the parts
that stay in bfloat16, with the names of linear.py. An adapter's product comes first, and the
product of casts adds to it.
"""

from typing import Any

from surogate.kernels.arrays import FROZEN, Array
from surogate.kernels.linear import (
    LinearInto,
    LoRA,
    RecipeWeight,
    b_gradient,
    column_sum,
    spread_b,
    weight_gradient,
)
from surogate.kernels.matmul import matmul
from surogate.kernels.widened import Parts


def plain_weight(weight: Any) -> Array:
    """W itself, for a product that a recipe leaves as it is."""
    assert weight.weight is not None, "kept for products that are left as they are"
    found: Array = weight.weight
    return found


def adapter_down(x: Any, weight: RecipeWeight, lora: LoRA) -> Any:
    """t = x A^T, in as many columns as the weight's blocks have."""
    down = lora.a if weight.blocks is None else weight.blocks.down
    return matmul(x, down, transpose_b=True)


def adapter_fwd(
    x: Any, weight: RecipeWeight, lora: LoRA, residual: Any, parts: Parts, scale: float
) -> tuple[Any, Any]:
    """(t, residual + s t D^T)"""
    t = adapter_down(x, weight, lora)
    if weight.blocks is not None:
        return t, matmul(t, weight.blocks.up, transpose_b=True, c=residual)
    spread = spread_b(lora.b, parts, weight.shape[0])
    return t, matmul(t, spread, transpose_b=True, c=residual, alpha=scale)


def adapter_dx(res: Any, dy: Any, need_dx: bool) -> tuple[Any, Any]:
    """(dt, dt A) of dt = s dy D."""
    lora, blocks = res.lora, res.weight.blocks
    assert lora is not None
    if blocks is not None:
        u = matmul(dy, blocks.up)
        return u[:, : lora.a.shape[0]], matmul(u, blocks.down) if need_dx else None
    dt = matmul(dy, spread_b(lora.b, res.parts, dy.shape[1]), alpha=res.scale)
    return dt, matmul(dt, lora.a) if need_dx else None


def bias_and_adapter(
    res: Any, dy: Any, dt: Any, x: Any, into: LinearInto
) -> tuple[Any, LoRA | None]:
    """(dbias, dlora), None for what is absent or frozen; ``dt`` is that of ``adapter_dx``."""
    lora, dbias, dlora = res.lora, None, None
    if res.bias is not None and into.bias is not FROZEN:
        dbias = column_sum(dy, into=into.bias, dtype=res.bias.dtype)
    if lora is not None and into.lora is not FROZEN:
        da_into, db_into = (None, None) if into.lora is None else into.lora
        da = weight_gradient(dt, x, da_into, lora.a)
        db = b_gradient(
            dy, res.t, lora.b, parts=res.parts, scale=res.scale, into=db_into,
            at_once=res.weight.blocks is not None,
        )  # fmt: skip
        dlora = LoRA(da, db)  # type: ignore[arg-type]  # None where frozen
    return dbias, dlora
