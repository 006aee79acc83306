"""Casts to 8 bits, and products of codes at the shapes of Qwen3-8B.

Bytes are one read of x and one write of each matrix of codes. A tensor whose scale is not known
before is read twice.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.harness import Case
from bench.inputs import cupy, random, rotated
from surogate.kernels.fp8 import E4M3, E5M2, Form, Fp8State, fp8_cast
from surogate.kernels.fp8_matmul import fp8_matmul

TOKENS = 4096
WIDTHS = (1024, 4096, 12288)
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (24576, 4096), "down": (4096, 12288)}


def slot_of(form: Form, scaling: Any = "delayed") -> Any:
    limits = np.array([form.largest], np.float32)
    state = Fp8State(limits, length=16, algorithm="max", scaling=scaling, library=cupy)
    return state.slot(0, form)


def cases() -> Iterator[Case]:
    """Casts of activations, then the three products of each matrix."""
    for width in WIDTHS:
        yield from cast_cases(width)
    for name, shape in PRODUCTS.items():
        yield from product_cases(name, *shape)


def cast_cases(width: int) -> Iterator[Case]:
    """Rows, rows and transposed, and the scales that need a look first."""
    size = TOKENS * width

    def cast(scaling: Any, turned: bool = False) -> Callable[[], Any]:
        def build() -> Callable[[], object]:
            x, slot = random(TOKENS, width), slot_of(E4M3, scaling)
            return lambda: fp8_cast(x, slot, turned=turned)

        return rotated(build, 2 * size)

    name = f"{TOKENS} x {width}"
    yield Case(f"fp8_cast {name}", cast("delayed"), bytes=3 * size)
    yield Case(f"fp8_cast both {name}", cast("delayed", turned=True), bytes=4 * size)
    yield Case(f"fp8_cast tensor {name}", cast("tensor"), bytes=5 * size)
    yield Case(f"fp8_cast row {name}", cast("row"), bytes=3 * size)


def product_cases(name: str, outer: int, inner: int) -> Iterator[Case]:
    """y of E4M3, and dx and dW of E5M2 with E4M3, with both kinds of sums."""
    flops = 2 * TOKENS * outer * inner

    def product(
        form: Form, rows: int, columns: int, depth: int, fast: bool, add: bool, scaling: Any
    ) -> Callable[[], Callable[[], object]]:
        def build() -> Callable[[], object]:
            a = fp8_cast(random(rows, depth), slot_of(form, scaling))
            b = fp8_cast(random(columns, depth), slot_of(E4M3, scaling))
            out = random(rows, columns)
            return lambda: fp8_matmul(a, b, out=out, accumulate=add, fast=fast)

        return build

    for fast in (True, False):
        sums = "fast" if fast else "exact"
        y, dx = (TOKENS, outer, inner), (TOKENS, inner, outer)
        dweight = (outer, inner, TOKENS)
        for title, form, sizes, add, scaling in (
            ("y", E4M3, y, False, "tensor"),
            ("y added", E4M3, y, True, "tensor"),
            ("y row", E4M3, y, False, "row"),
            ("dx", E5M2, dx, False, "tensor"),
            ("dW added", E5M2, dweight, True, "tensor"),
        ):
            build = product(form, *sizes, fast, add, scaling)
            yield Case(f"fp8 {name} {title}, {sums} sums", build, flops=flops)
