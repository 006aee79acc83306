"""Codes of stored weights for products: the bits of decoding and of a cast at a known scale."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import BF16
from surogate.kernels.fp8 import E4M3, encode
from surogate.kernels.quant.quantized import Quantized, dequantize, quantize
from surogate.kernels.quant.recode import recodable, recode
from tests.kernels.quant.expected import weight
from tests.oracle import same_bits, to_device, to_host, unaligned

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"format": "fp8", "block": 64},
    "nf4": {"format": "nf4"},
    "nf4 double": {"format": "nf4", "block": 128, "double_quant": True},
    "nvfp4": {"format": "nvfp4", "square": False, "four_over_six": True},
}
SHAPES = [(16, 16), (48, 144), (272, 400)]  # least; less than a tile; more, and ragged


def mxfp4(shape: tuple[int, int]) -> Quantized:
    rng = np.random.default_rng(0)
    rows, columns = shape
    codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scales = rng.integers(118, 130, (rows, columns // 32), dtype=np.uint8)
    return Quantized("mxfp4", shape, (1, 32), codes, scales)


def stored(name: str, shape: tuple[int, int], device: str) -> Quantized:
    if name == "mxfp4":
        return mxfp4(shape).map(lambda x: to_device(x, device))
    return quantize(to_device(weight(shape), device), **FORMATS[name])


def expected(q: Quantized, scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return encode(to_host(dequantize(q)).astype(np.float32) * scale, E4M3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_bits_of_decoding_and_casting(name: str, shape: tuple[int, int], device: str) -> None:
    if name == "mxfp4":
        shape = (shape[0], shape[1] // 32 * 32 or 32)
    q, scale = stored(name, shape, device), np.array([37.3], np.float32)
    want = expected(q, scale)
    assert len(np.unique(want)) > 10
    factor = to_device(scale, device)
    rows = to_device(np.zeros(shape, np.uint8), device)
    recode(q, factor, out=rows)
    same_bits(rows, want)
    wider = to_device(np.full((shape[1], shape[0] + 48), 77, np.uint8), device)
    recode(q, factor, out=wider[:, 32 : 32 + shape[0]], turned=True)
    left, middle, right = np.split(to_host(wider), [32, 32 + shape[0]], axis=1)
    same_bits(np.ascontiguousarray(middle), np.ascontiguousarray(want.T))
    assert (left == 77).all() and (right == 77).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, 1e-40])
def test_what_is_not_finite_is_nan_and_what_is_large_saturates(value: float, device: str) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.array([[value]], np.float32)
    q = Quantized("fp8", (16, 16), (64, 64), codes, scales).map(lambda x: to_device(x, device))
    for factor in (1.0, 0.25):
        scale = np.array([factor], np.float32)
        want = expected(q, scale)
        for turned in (False, True):
            out = to_device(np.zeros((16, 16), np.uint8), device)
            recode(q, to_device(scale, device), out=out, turned=turned)
            got = to_host(out).T if turned else to_host(out)
            nan = (want & 0x7F) == 0x7F
            same_bits((got & 0x7F) == 0x7F, nan)
            same_bits(np.where(nan, 0, got), np.where(nan, 0, want))


def test_what_does_not_fit_is_refused(device: str) -> None:
    odd = stored("nf4", (24, 16), device)
    assert not recodable(odd)
    scale = to_device(np.ones(1, np.float32), device)
    with pytest.raises(ValueError, match=r"recode: sizes must be multiples of 16, got \(24, 16\)"):
        recode(odd, scale, out=to_device(np.zeros((24, 16), np.uint8), device))
    q = stored("nf4", (32, 16), device)
    with pytest.raises(ValueError, match=r"recode: out must be uint8\(16, 32\) with its columns"):
        recode(q, scale, out=to_device(np.zeros((32, 16), np.uint8), device), turned=True)
    assert recodable(q) and q.dtype == BF16
    if device != "host":
        moved = q.map(lambda x: unaligned(to_host(x), device) if x.dtype == np.uint8 else x)
        assert not recodable(moved)
