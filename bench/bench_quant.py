"""Weights of Qwen3-8B to narrow formats and back.

Bytes are one read and one write of the codes, the scales and the bfloat16 matrix, which NVFP4 reads
twice: the scale of a block depends on the largest weight of all. To codes for products,
they are a read of the codes and scales, and a byte a weight.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import Case
from bench.inputs import cupy, random, rotated
from surogate.kernels.quant.quantized import Quantized, dequantize, quantize
from surogate.kernels.quant.recode import recode

WEIGHTS = {"qkv": (6144, 4096), "gate up": (24576, 4096), "down": (4096, 12288)}
FORMATS: dict[str, tuple[float, dict[str, Any]]] = {
    "fp8 128": (8 + 32 / 128**2, {"format": "fp8", "block": 128}),
    "nf4 64": (4 + 32 / 64, {"format": "nf4", "block": 64}),
    "nf4 64 double": (4 + 8 / 64 + 32 / 64 / 256, {"format": "nf4", "double_quant": True}),
    "nvfp4": (4.5, {"format": "nvfp4"}),
    "nvfp4 four over six": (4.5, {"format": "nvfp4", "four_over_six": True}),
}
MXFP4_BITS = 4.25


def cases() -> Iterator[Case]:
    """Every format at every matrix."""
    for name, (outer, inner) in WEIGHTS.items():
        for title, (bits, settings) in FORMATS.items():
            yield from format_cases(f"{title}, {name}", outer, inner, bits, settings)
        yield from mxfp4_cases(name, outer, inner)


def format_cases(
    name: str, outer: int, inner: int, bits: float, settings: dict[str, Any]
) -> Iterator[Case]:
    """Back to bfloat16, to codes for products of FP8, and there."""
    dense, moved = 2 * outer * inner, int(outer * inner * (2 + bits / 8))
    again = dense if settings["format"] == "nvfp4" else 0

    def back() -> Callable[[], object]:
        q = quantize(random(outer, inner), **settings)
        return lambda: dequantize(q)

    def there() -> Callable[[], object]:
        weight = random(outer, inner)
        return lambda: quantize(weight, **settings)

    yield Case(f"dequantize {name}", rotated(back, moved), bytes=moved)
    if "four over six" not in name:  # which is the same format
        stored = lambda: quantize(random(outer, inner), **settings)  # noqa: E731
        yield from recode_cases(name, stored, moved - outer * inner)
    if not settings.get("double_quant"):  # copies its table from the host, which no graph records
        yield Case(f"quantize {name}", rotated(there, dense), bytes=moved + again)


def mxfp4_cases(name: str, outer: int, inner: int) -> Iterator[Case]:
    """Random codes, with scales around 1."""
    fewest = int(outer * inner * (1 + MXFP4_BITS / 8))

    def stored() -> Quantized:
        codes = cupy.random.randint(0, 256, (outer, inner // 2), dtype=cupy.uint8)
        scales = cupy.random.randint(120, 134, (outer, inner // 32), dtype=cupy.uint8)
        return Quantized("mxfp4", (outer, inner), (1, 32), codes, scales)

    def back() -> Callable[[], object]:
        q = stored()
        return lambda: dequantize(q)

    moved = fewest + outer * inner
    yield Case(f"dequantize mxfp4, {name}", rotated(back, moved), bytes=moved)
    yield from recode_cases(f"mxfp4, {name}", stored, fewest)


def recode_cases(name: str, stored: Callable[[], Quantized], fewest: int) -> Iterator[Case]:
    """To codes for either product of FP8."""

    def make(turned: bool) -> Callable[[], object]:
        q, scale = stored(), cupy.ones(1, "f4")
        out = cupy.empty(q.shape[::-1] if turned else q.shape, "u1")
        return lambda: recode(q, scale, out=out, turned=turned)

    for how, turned in (("recode", False), ("recode turned", True)):
        build = rotated(functools.partial(make, turned), fewest)
        yield Case(f"{how} {name}", build, bytes=fewest)
