"""Products of row-major matrices: out = alpha op(a) op(b) + bias, plus beta c or beta out.

op transposes or does not. Sums are in float32 (float64 for float64 input, on the host alone), and
the result is rounded once. Cards run cuBLASLt through kernels/cublaslt.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels import cublaslt
from surogate.kernels.arrays import BF16, F32, Array, empty, require, upcast

F64 = np.dtype(np.float64)
OUTPUTS = {BF16: (BF16, F32), F32: (F32,), F64: (F64,)}  # by the type of a and b


class Product(NamedTuple):
    """One executed product, as ``record`` writes it down."""

    rows: int
    columns: int
    inner: int
    dtype: str

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.columns * self.inner


_recorders: list[list[Product]] = []


@contextmanager
def record(products: list[Product]) -> Iterator[list[Product]]:
    """Appends each product called inside the block to ``products`` (graph replays call none)."""
    _recorders.append(products)
    try:
        yield products
    finally:
        _recorders.pop()


def note_product(rows: int, columns: int, inner: int, dtype: str) -> None:
    """Tells ``record`` of a product."""
    for products in _recorders:
        products.append(Product(rows, columns, inner, dtype))


def matmul(
    a: Float[Array, "a_rows a_columns"],
    b: Float[Array, "b_rows b_columns"],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    c: Float[Array, "rows columns"] | None = None,
    bias: Float[Array, " columns"] | None = None,
    out: Float[Array, "rows columns"] | None = None,
    accumulate: bool = False,
    alpha: float | Float32[Array, "1"] = 1.0,
    beta: float = 1.0,
    dtype: Any = None,
) -> Float[Array, "rows columns"]:
    """Returns out = alpha * op(a) op(b) + bias + beta * c, or with ``accumulate`` beta * what out
    held in place of c.

    Rows may be farther apart than they are long (slices of columns); the elements of a row must be
    neighbours. a and b are both bfloat16 (out: bfloat16 or float32), both float32, or on the host
    both float64; c and bias are of the type of out. A fresh out is of ``dtype``, or the type of a.
    ``alpha`` may be an array beside a and b, which is read when the product runs.

    Raises ValueError for what cannot be multiplied, and RuntimeError for a product that a card
    meets for the first time while its stream is being captured into a graph.
    """
    inner, rows = a.shape if transpose_a else a.shape[::-1]
    columns, inner_b = b.shape if transpose_b else b.shape[::-1]
    require(
        inner == inner_b,
        f"matmul: inner sizes must agree, got ({rows}, {inner}) and ({inner_b}, {columns})",
    )
    if out is None:
        require(not accumulate, "matmul: accumulate adds to out: pass out")
        out = empty((rows, columns), a.dtype if dtype is None else dtype, like=a)
    require(c is None or not accumulate, "matmul: c and accumulate exclude each other")
    note_product(rows, columns, inner, str(a.dtype))
    if isinstance(a, np.ndarray):
        _check(a, b, c, bias, out, (rows, columns))
        left, right = a.T if transpose_a else a, b.T if transpose_b else b
        _host(left, right, c, bias, out, accumulate, alpha, beta)
        return out
    call = cublaslt.Call(
        a, b, out if accumulate else c, bias, out, transpose_a, transpose_b,
        device_alpha=getattr(alpha, "ndim", 0) > 0,
    )  # fmt: skip
    key = call.key()
    plan = cublaslt.plans.get(key)
    if plan is None:
        _check(a, b, c, bias, out, (rows, columns))
        if out.size == 0 or inner == 0:
            _without_terms(call, beta)
            return out
        plan = cublaslt.add_plan(key, call, alpha)
    plan.run(call, alpha, beta)
    return out


def _check(a: Any, b: Any, c: Any, bias: Any, out: Any, shape: tuple[int, int]) -> None:
    require(
        a.dtype == b.dtype and a.dtype in OUTPUTS and (a.dtype != F64 or isinstance(a, np.ndarray)),
        f"matmul: a and b must both be bfloat16 or both float32, got {a.dtype} and {b.dtype}",
    )
    kinds = OUTPUTS[a.dtype]
    require(
        out.shape == shape and out.dtype in kinds,
        f"matmul: out must be {shape} of {' or '.join(str(kind) for kind in kinds)}, "
        f"got {out.shape} of {out.dtype}",
    )
    for name, value, expected in (("c", c, shape), ("bias", bias, shape[1:])):
        require(
            value is None or (value.shape == expected and value.dtype == out.dtype),
            f"matmul: {name} must be {expected} of {out.dtype}, as out is, "
            f"got {getattr(value, 'shape', None)} of {getattr(value, 'dtype', None)}",
        )


def _host(
    left: Any, right: Any, c: Any, bias: Any, out: Any, accumulate: bool, alpha: Any, beta: float
) -> None:
    total = upcast(left) @ upcast(right)
    alpha = alpha.item() if isinstance(alpha, np.ndarray) else alpha
    if alpha != 1.0:
        total *= total.dtype.type(alpha)
    for term, factor in ((c, beta), (bias, 1.0), (out if accumulate else None, beta)):
        if term is not None:
            total += upcast(term) if factor == 1.0 else upcast(term) * total.dtype.type(factor)
    out[...] = total.astype(out.dtype, copy=False)


def _without_terms(call: cublaslt.Call, beta: float) -> None:
    """A product on a card that has nothing to sum: zeros, or what is added."""
    require(call.bias is None or call.out.size == 0, "matmul: bias needs an inner size above 0")
    if call.added is None:
        call.out.fill(0)
    elif call.added is not call.out or beta != 1.0:
        call.out[...] = call.added * beta


def matmul_ref(
    a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False
) -> Array:
    """Reference of matmul without addends."""
    return (a.T if transpose_a else a) @ (b.T if transpose_b else b)
