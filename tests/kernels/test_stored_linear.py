"""The bits of a recipe on the decoded weight, of weights that share casts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from surogate.kernels import nvfp4, nvfp4_linear
from surogate.kernels.arrays import BF16, namespace
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

    def make(weight: Any, index: int, **turns: Any) -> Any:
        slots = Slots(*(state.slot(3 * index + i, f) for i, f in enumerate((E4M3, E4M3, E5M2))))
        return Fp8Weight.of(weight, slots, trained=False, products=products, **turns)

    return make


def nvfp4_of(options: Nvfp4Options, products: Products, device: str) -> Any:
    key = library_of(device).asarray(np.array([3, 1], np.uint32))

    def make(weight: Any, index: int, **turns: Any) -> Any:
        settings: Any = {"options": options, "products": products}
        return Nvfp4Weight.of(weight, key, trained=False, tensor=index, **settings, **turns)

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


def stored_weight(source: QuantizedWeight, below: Any, index: int, taken: Any = None) -> StoredCast:
    """As recipes make it, in turns with ``taken``."""
    stored = StoredCast.of(source, below(source.plain(), index, turns=True, out=taken))
    if not stored.decodes:
        source.shared.release()
    return stored


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
        # Pieces of a stacked matrix: their codes lie apart where they are turned.
        pieces = tuple(quantize(part, form, **STORED[form]) for part in (weight[:48], weight[48:]))
        source = QuantizedWeight.of(pieces, shared)
        stored.append(stored_weight(source, below, index, taken))
        taken = stored[-1].cast
        codes = namespace(x).concatenate([bits(dequantize(piece)) for piece in pieces])
        decoded = whole(codes.view(BF16), index)
        if source.blocks is not None:
            decoded = replace(decoded, blocks=source.blocks)
            Refresh([Adapted(source.blocks, a, b, PARTS)], 0.5).launch_()
        want.append(results(decoded, x, dy, lora))
    straight = name in ("fp8", "fp8 by tensor") and products == Products()
    assert [weight.decodes for weight in stored] == [not straight] * 2
    for _ in range(2):
        for weight, expected in zip(stored, want, strict=True):
            for got, each in zip(results(weight, x, dy, lora), expected, strict=True):
                same_bits(got, each)
    assert bool(shared.nbytes) == (not straight)  # no decoded matrix where no product reads it


def bits(x: Any) -> Any:
    return x.view(np.uint16)  # CuPy does not join bfloat16


@pytest.mark.parametrize("square", [True, False])
def test_a_product_casts_for_its_direction_by_the_amax_that_was_kept(
    square: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, dy = normal("bfloat16", (OUTER, INNER), (TOKENS, INNER), (TOKENS, OUTER))
    shared = Shared((OUTER, INNER), 0, BF16, like=weight)
    source = QuantizedWeight.of((quantize(weight, "nf4"),), shared)
    below = nvfp4_of(Nvfp4Options(square=square), Products(), "host")
    stored, called = stored_weight(source, below, 0), list[str]()
    for name in ("nvfp4_amax", "nvfp4_cast", "nvfp4_cast_tokens"):

        def noted(x: Any, *args: Any, name: str = name, **settings: Any) -> Any:
            if len(x) == OUTER:
                called.append(name)
            return getattr(nvfp4, name)(x, *args, **settings)

        monkeypatch.setattr(nvfp4_linear, name, noted)
    y, res = linear_fwd(x, stored)
    assert called == ["nvfp4_cast"]
    linear_bwd(res, dy, need_dx=False)
    assert called == ["nvfp4_cast"]
    linear_bwd(res, dy)  # values of squares serve both directions
    assert called == ["nvfp4_cast", *([] if square else ["nvfp4_cast_tokens"])]
    shared.forget()
    linear_bwd(res, dy)
    assert called[1:] == ["nvfp4_cast"] if square else 2 * ["nvfp4_cast_tokens"]


def test_memory_is_there_as_long_as_a_weight_holds_it(device: str) -> None:
    weight = to_device(normal("bfloat16", (OUTER, INNER)), device)
    shared = Shared((OUTER, INNER), 0, BF16, like=weight)
    source = QuantizedWeight.of((quantize(weight, "nf4"),), shared)
    held, want = shared.matrix, source.plain()
    assert source.decoded() is held and shared.nbytes == weight.nbytes
    want = want.copy()
    held.fill(0)  # as a graph's replay may have left it
    same_bits(source.plain(), want)
    assert source.decoded() is held is shared.matrix
    shared.release()
    assert shared.nbytes == 0
    same_bits(source.plain(), want)
    assert shared.nbytes == weight.nbytes
    shared.forget()
    assert shared.nbytes == 0


def test_source_of_a_weight(device: str) -> None:
    weight = to_device(normal("bfloat16", (OUTER, INNER)), device)
    source = QuantizedWeight.of(
        (quantize(weight, "nf4"),), Shared((OUTER, INNER), 0, BF16, like=weight)
    )
    cast = stored_weight(source, fp8_of("delayed", Products(), device), 0)
    assert source_of(cast) is source_of(source) is source
    assert source_of(weight) is None
    assert cast.nbytes == source.nbytes and cast.stored is source.stored
    made = gradient_cast(cast, weight)
    assert made is not None and made.slot is cast.cast.slots.dy
