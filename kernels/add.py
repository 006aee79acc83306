"""Elementwise addition, as a pair and in place.

    y = a + b    da = dy    db = dy

In bfloat16 the sum is taken in float32 and rounded once.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from surogate.kernels.arrays import (
    Array,
    aligned,
    empty_like,
    namespace,
    on_device,
    require,
    upcast,
)
from surogate.kernels.nvrtc import THREADS, Source, ctype, vector_width

SOURCE = Source(
    "add",
    {
        "add_fwd": [("float", "4"), ("float", "1"), ("bf16", "8"), ("bf16", "1")],
        "accumulate": [("float", "float"), ("float", "bf16"), ("bf16", "bf16")],
    },
)


def add_fwd(
    a: Float[Array, "*shape"], b: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], None]:
    """Returns (a + b, None)."""
    require(
        a.shape == b.shape and a.dtype == b.dtype,
        f"add_fwd: a and b must agree, got {a.dtype}{a.shape} and {b.dtype}{b.shape}",
    )
    if not on_device(a):
        return (upcast(a) + upcast(b)).astype(a.dtype, copy=False), None
    a, b = namespace(a).ascontiguousarray(a), namespace(b).ascontiguousarray(b)
    y = empty_like(a)
    width = vector_width(a.dtype) if aligned(a, b) else 1
    _launch("add_fwd", (ctype(a.dtype), str(width)), width, [y, a, b])
    return y, None


def add_bwd(
    res: None, dy: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Returns (da, db)."""
    return dy, dy


def accumulate_(into: Float[Array, "*shape"], x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Adds ``x`` to ``into`` in place; ``into`` is of the dtype of ``x`` or float32. Returns
    ``into``.
    """
    require(
        into.shape == x.shape,
        f"accumulate_: shapes must agree, got {into.shape} and {x.shape}",
    )
    if not on_device(into):
        into[...] = (upcast(into) + upcast(x)).astype(into.dtype, copy=False)
        return into
    require(into.flags.c_contiguous, "accumulate_: into must be C-contiguous")
    x = namespace(x).ascontiguousarray(x)
    types = (ctype(into.dtype), ctype(x.dtype))
    _launch("accumulate", types, vector_width(x.dtype), [into, x])
    return into


def _launch(kernel: str, types: tuple[str, ...], width: int, arrays: list[Any]) -> None:
    """A thread for ``width`` elements."""
    size = arrays[0].size
    if size:
        grid = -(-size // (THREADS * width))
        SOURCE.launch(kernel, types, grid, THREADS, [*arrays, np.int64(size)])


def add_ref(a: Array, b: Array) -> Array:
    """Reference of add_fwd."""
    return a + b
