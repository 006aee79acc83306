"""Products of matrices in 8 bits: out = a_inverse * b_inverse * (a b^T) + bias, plus c or what out
held.

Both operands lie along the sum, as tensor cores take them. Sums are in float32 and the result is
rounded once. Cards from compute capability 8.9 on multiply the codes; older ones, and the host, the
values of the codes, which bfloat16 holds exactly, and so do the products: the same recipe, slower.
"""

import functools
from typing import Any

import numpy as np
from jaxtyping import Float

from surogate.kernels import cublaslt
from surogate.kernels.arrays import BF16, F32, Array, describe, empty, require, upcast
from surogate.kernels.fp8 import MULTIPLE, Codes, Form, decode
from surogate.kernels.matmul import matmul, note_product

HARDWARE = 89  # compute capability, times ten


@functools.cache
def emulated(device: int | None) -> bool:
    """Whether products of codes on a card (None: the host) are made of bfloat16 ones."""
    if device is None:
        return True
    import cupy

    return int(cupy.cuda.Device(device).compute_capability) < HARDWARE


def fp8_matmul(
    a: Codes,
    b: Codes,
    *,
    turned_a: bool = False,
    turned_b: bool = False,
    c: Float[Array, "rows columns"] | None = None,
    bias: Float[Array, " columns"] | None = None,
    out: Float[Array, "rows columns"] | None = None,
    accumulate: bool = False,
    fast: bool = False,
    dtype: Any = BF16,
) -> Float[Array, "rows columns"]:
    """Returns out [rows, columns] of a [rows, inner] and b [columns, inner].

    ``turned_a`` and ``turned_b`` take an operand's transposed codes. ``fast`` lets tensor cores sum
    in fewer bits than float32 has. c, bias and out are bfloat16, out also float32 without them.

    Raises ValueError when sizes disagree or are no multiples of 16, or both operands are E5M2.
    """
    left, right = (x.turned if t else x.rows for x, t in ((a, turned_a), (b, turned_b)))
    require(left is not None and right is not None, "fp8_matmul: the codes asked for were not made")
    assert left is not None and right is not None
    (rows, inner), (columns, inner_b) = left.shape, right.shape
    require(
        inner == inner_b and not any(size % MULTIPLE for size in (rows, inner, columns)),
        f"fp8_matmul: takes [rows, inner] and [columns, inner], multiples of {MULTIPLE}, got "
        f"{describe(left)} and {describe(right)}",
    )
    require(
        "e4m3" in a.form.name or "e4m3" in b.form.name,
        "fp8_matmul: one operand must be E4M3, got two of E5M2",
    )
    if out is None:
        require(not accumulate, "fp8_matmul: accumulate adds to out: pass out")
        out = empty((rows, columns), dtype, like=left)
    require(
        out.shape == (rows, columns) and out.dtype in (BF16, F32),
        f"fp8_matmul: out must be bfloat16 or float32 {(rows, columns)}, got {describe(out)}",
    )
    require(c is None or not accumulate, "fp8_matmul: c and accumulate exclude each other")
    if isinstance(left, np.ndarray):
        note_product(rows, columns, inner, a.form.name)
        _host(left, right, a, b, c, bias, out, accumulate)
    elif emulated(left.data.device_id):
        _emulate(left, right, a, b, c, bias, out, accumulate)
    else:
        note_product(rows, columns, inner, a.form.name)
        scaling = cublaslt.Scaling(a.form.name, b.form.name, a.inverse, b.inverse, fast)
        added = out if accumulate else c
        call = cublaslt.Call(left, right, added, bias, out, False, True, scaling)
        key = call.key()
        plan = cublaslt.plans.get(key) or cublaslt.add_plan(key, call, 1.0)
        plan.run(call, 1.0)
    return out


def _host(
    left: Any, right: Any, a: Codes, b: Codes, c: Any, bias: Any, out: Any, accumulate: bool
) -> None:
    total = decode_host(left, a.form) @ decode_host(right, b.form).T
    total *= a.inverse[:, None] if a.inverse.size > 1 else a.inverse
    total *= b.inverse
    for term in (bias, c, out if accumulate else None):
        if term is not None:
            total += upcast(term)
    out[...] = total.astype(out.dtype, copy=False)


def decode_host(codes: Any, form: Form) -> Any:
    """The values of codes as float32."""
    return codes.view(form.dtype).astype(np.float32)


def _emulate(
    left: Any, right: Any, a: Codes, b: Codes, c: Any, bias: Any, out: Any, accumulate: bool
) -> None:
    require(
        a.inverse.size == 1 and b.inverse.size == 1,
        "fp8_matmul: row scaling needs a card of compute capability 8.9 or newer; "
        "use delayed or tensor scaling",
    )
    matmul(
        decode(left, a.form),
        decode(right, b.form),
        transpose_b=True,
        c=c,
        bias=bias,
        out=out,
        accumulate=accumulate,
        alpha=a.inverse * b.inverse,
    )
