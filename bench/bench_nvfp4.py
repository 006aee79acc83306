"""NVFP4 casts. Bytes are one read of x and one write of what the products of this card take: values
of 16 bits where they are emulated, else codes and scales.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.harness import Case
from bench.inputs import cupy, random, rotated
from surogate.kernels.nvfp4 import (
    SIGNS,
    Draw,
    nvfp4_amax,
    nvfp4_cast,
    nvfp4_cast_tokens,
    nvfp4_transpose,
)
from surogate.kernels.nvfp4_matmul import emulated_for, nvfp4_matmul

TOKENS = (4096, 32768)
COLUMNS = (4096, 12288)  # hidden and ffn of Qwen3-8B
CODED = 0.5 + 1 / 16  # bytes of a value as code and share of a scale
FORMS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "four over six": {"four_over_six": True},
    "stochastic": {"draw": True},
}


def cases() -> Iterator[Case]:
    """What the three products of a linear take, at a small and a large micro-batch."""
    for columns in COLUMNS:
        for tokens in TOKENS:
            yield from cast_cases(tokens, columns)
        yield from weight_cases(4096, columns)
    yield from product_cases(4096, 4096, 12288)


def written(values: int) -> int:
    """Bytes of a cast of so many values on this card."""
    return 2 * values if emulated_for(cupy.empty(0)) else int(CODED * values)


def cast_cases(tokens: int, columns: int) -> Iterator[Case]:
    """Largest magnitudes, and casts along either axis with each rounding."""
    name, values = f"{tokens} x {columns}", tokens * columns

    def largest(signs: int | None) -> Callable[[], object]:
        x = random(tokens, columns)
        return lambda: nvfp4_amax(x, signs=signs)

    def cast(along: Callable[..., object], options: dict[str, Any]) -> Callable[[], object]:
        x = random(tokens, columns)
        amax, emulated = nvfp4_amax(x, signs=SIGNS), emulated_for(x)
        if "draw" in options:
            options = {"draw": Draw(cupy.zeros(2, np.uint32))}
        chosen = amax[:1] if along is nvfp4_cast else amax[1:]
        return lambda: along(x, chosen, emulated=emulated, **options)

    for title, signs in (("nvfp4_amax", None), ("nvfp4_amax with transform", SIGNS)):
        build = rotated(lambda signs=signs: largest(signs), 2 * values)
        yield Case(f"{title} {name}", build, bytes=2 * values)
    for along in (nvfp4_cast, nvfp4_cast_tokens):
        for form, options in FORMS.items():
            build = rotated(lambda a=along, o=options: cast(a, o), 4 * values)
            title = f"{along.__name__} {form} {name}"
            yield Case(title, build, bytes=lambda: 2 * values + written(values))


def weight_cases(outer: int, inner: int) -> Iterator[Case]:
    """A weight in 16x16 blocks, with its transpose where that is a pass of its own."""
    values = outer * inner

    def moved() -> int:
        passes = 1 if emulated_for(cupy.empty(0)) else 3
        return 2 * values + passes * written(values)

    def cast(four: bool) -> Callable[[], object]:
        weight = random(outer, inner)
        amax, emulated = nvfp4_amax(weight), emulated_for(weight)
        return lambda: nvfp4_transpose(
            nvfp4_cast(weight, amax, emulated=emulated, tall=True, four_over_six=four)
        )

    for form, four in (("nearest", False), ("four over six", True)):
        build = rotated(lambda four=four: cast(four), 4 * values)
        yield Case(f"weight {form} {outer} x {inner}", build, bytes=moved)


def product_cases(tokens: int, inner: int, outer: int) -> Iterator[Case]:
    """The forward product, of casts that exist."""

    def product() -> Callable[[], object]:
        a, b = (
            nvfp4_cast(x, nvfp4_amax(x), emulated=emulated_for(x))
            for x in (random(tokens, inner), random(outer, inner))
        )
        return lambda: nvfp4_matmul(a, b)

    size = 2 * (tokens * inner + outer * inner + tokens * outer)
    name = f"nvfp4_matmul {tokens} x {outer} x {inner}"
    yield Case(name, rotated(product, size), flops=2 * tokens * inner * outer)
