"""The bits of a recipe on the decoded weight, of weights that share casts."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import BF16
from surogate.kernels.fp8 import E4M3, E5M2, Fp8State
from surogate.kernels.fp8_linear import Fp8Weight, Slots
from surogate.kernels.linear import LoRA, Products, gradient_cast, linear_bwd, linear_fwd
from surogate.kernels.nvfp4_linear import Nvfp4Options, Nvfp4Weight
from surogate.kernels.quant.quantized import dequantize, quantize
from surogate.kernels.quantized_linear import QuantizedWeight, Shared
from surogate.kernels.stored_linear import StoredCast, source_of
from surogate.kernels.widened import Adapted, Refresh
from tests.oracle import normal, same_bits, to_device

TOKENS, INNER, OUTER, RANK = 48, 64, 96, 8
PARTS = ((0, 32), (64, 96))
STORED: dict[str, dict[str, Any]] = {
    "fp8": {"block": 64},
    "nf4": {},
    "nvfp4": {"square": False, "four_over_six": True},
}
PRODUCTS = [Products(), Products(forward=False), Products(dgrad=False)]


def library_of(device: str) -> Any:
    if device == "cuda":
        import cupy

        return cupy
    return np


def fp8_of(scaling: Any, products: Products, device: str) -> Any:
    """Makes the cast of one of two weights."""
    limits = np.array([448, 448, 57344] * 2, np.float32)
    state = Fp8State(limits, length=2, algorithm="max", scaling=scaling, library=library_of(device))

    def make(weight: Any, index: int, out: Any = None) -> Any:
        slots = Slots(*(state.slot(3 * index + i, f) for i, f in enumerate((E4M3, E4M3, E5M2))))
        return Fp8Weight.of(weight, slots, trained=False, products=products, out=out)

    return make


def nvfp4_of(options: Nvfp4Options, products: Products, device: str) -> Any:
    key = library_of(device).asarray(np.array([3, 1], np.uint32))

    def make(weight: Any, index: int, out: Any = None) -> Any:
        return Nvfp4Weight.of(
            weight, key, trained=False, tensor=index, options=options, products=products, out=out
        )

    return make


RECIPES: dict[str, Any] = {
    "fp8": lambda p, d: fp8_of("delayed", p, d),
    "fp8 by tensor": lambda p, d: fp8_of("tensor", p, d),
    "fp8 by row": lambda p, d: fp8_of("row", p, d),
    "nvfp4": lambda p, d: nvfp4_of(Nvfp4Options(), p, d),
    "nvfp4 1x16": lambda p, d: nvfp4_of(Nvfp4Options(square=False), p, d),
}


def results(weight: Any, x: Any, dy: Any, lora: LoRA) -> list[Any]:
    y, res = linear_fwd(x, weight, None, lora, parts=PARTS, scale=0.5)
    dx, dw, _, dlora, _ = linear_bwd(res, dy)
    assert dw is None
    return [y, dx, dlora.a, dlora.b]


@pytest.mark.parametrize("products", PRODUCTS, ids=["all", "not forward", "not dgrad"])
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_the_decoded_weight(name: str, products: Products, device: str) -> None:
    form = list(STORED)[list(RECIPES).index(name) % len(STORED)]
    x, dy, *weights = normal(
        "bfloat16", (TOKENS, INNER), (TOKENS, OUTER), (OUTER, INNER), (OUTER, INNER)
    )
    a, b = normal("bfloat16", (len(PARTS) * RANK, INNER), (64, RANK), seed=1)
    x, dy, a, b, *weights = (to_device(each, device) for each in (x, dy, a, b, *weights))
    lora, whole, taken = LoRA(a, b), RECIPES[name](products, device), None
    ranks = 0 if device == "host" else len(PARTS) * RANK
    shared, stored, want = Shared((OUTER, INNER), ranks, BF16, like=x), [], []
    below = RECIPES[name](products, device)
    for index, weight in enumerate(weights):
        codes = quantize(weight, form, **STORED[form])
        source = QuantizedWeight.of((codes,), shared)
        taken = below(source.plain(), index, taken)
        stored.append(StoredCast.of(source, taken))
        decoded = whole(dequantize(codes), index)
        if source.blocks is not None:
            decoded = StoredCast.of(source, decoded).cast  # the same adapter's blocks
            Refresh([Adapted(source.blocks, a, b, PARTS)], 0.5).launch_()
        want.append(results(decoded, x, dy, lora))
    for _ in range(2):
        for weight, expected in zip(stored, want, strict=True):
            for got, each in zip(results(weight, x, dy, lora), expected, strict=True):
                same_bits(got, each)


def test_source_of_a_weight(device: str) -> None:
    weight = to_device(normal("bfloat16", (OUTER, INNER)), device)
    source = QuantizedWeight.of(
        (quantize(weight, "nf4"),), Shared((OUTER, INNER), 0, BF16, like=weight)
    )
    cast = StoredCast.of(source, fp8_of("delayed", Products(), device)(source.plain(), 0))
    assert source_of(cast) is source_of(source) is source
    assert source_of(weight) is None
    assert cast.nbytes == source.nbytes and cast.stored is source.stored
    made = gradient_cast(cast, weight)
    assert made is not None and made.slot is cast.cast.slots.dy
