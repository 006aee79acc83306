"""Codes of stored weights for products: the bits of decoding and of a cast at a known scale."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import BF16, namespace
from surogate.kernels.fp8 import E4M3, Fp8State, fp8_cast
from surogate.kernels.quant.quantized import Quantized, dequantize, quantize
from surogate.kernels.quant.recode import recodable, recode
from tests.kernels.quant.expected import weight
from tests.oracle import same_bits, to_device, to_host, unaligned

FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"format": "fp8", "block": 64},
    "nf4": {"format": "nf4"},
    "nf4 double": {"format": "nf4", "block": 128, "double_quant": True},
    "nf4 32": {"format": "nf4", "block": 32},
    "nvfp4": {"format": "nvfp4", "square": False, "four_over_six": True},
}
SHAPES = [(16, 16), (144, 192), (272, 400)]  # least; 64 columns in a block of NF4; ragged


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


def expected(q: Quantized, scale: Any) -> np.ndarray:
    """Decoded, then cast."""
    library = namespace(scale)
    limits = np.array([448], np.float32)
    state = Fp8State(limits, length=1, algorithm="max", scaling="tensor", library=library)
    slot = state.slot(0, E4M3)
    slot.scale[...] = scale
    found = fp8_cast(dequantize(q), slot, scaling="known").rows
    assert found is not None
    return to_host(found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_bits_of_decoding_and_casting(name: str, shape: tuple[int, int], device: str) -> None:
    if name == "mxfp4":
        shape = (shape[0], shape[1] // 32 * 32 or 32)
    q, factor = stored(name, shape, device), to_device(np.array([37.3], np.float32), device)
    want = expected(q, factor)
    assert len(np.unique(want)) > 10
    rows = to_device(np.zeros(shape, np.uint8), device)
    recode(q, factor, out=rows)
    same_bits(rows, want)
    wider = to_device(np.full((shape[1], shape[0] + 48), 77, np.uint8), device)
    recode(q, factor, out=wider[:, 32 : 32 + shape[0]], turned=True)
    left, middle, right = np.split(to_host(wider), [32, 32 + shape[0]], axis=1)
    same_bits(np.ascontiguousarray(middle), np.ascontiguousarray(want.T))
    assert (left == 77).all() and (right == 77).all()


VALUES = [np.inf, -np.inf, np.nan, 3.4e38, 1e38, -3e36, 1e-40, -0.0, 0.0, 1.0]


def every_code(name: str) -> Quantized:
    """Codes at scales of all kinds, not finite ones and such as no cast makes among them."""
    rng = np.random.default_rng(0)
    bytes_of = lambda *shape: rng.integers(0, 256, shape, dtype=np.uint8)  # noqa: E731
    shape, floats = (32, 256), rng.choice(np.array(VALUES, np.float32), 32 * 32)
    if name == "fp8":
        return Quantized("fp8", shape, (1, 8), bytes_of(*shape), floats.reshape(32, 32))
    if name == "nf4":
        return Quantized("nf4", shape, (1, 64), bytes_of(32 * 128), floats[:128])
    width = 16 if name == "nvfp4" else 32
    codes, scales = bytes_of(32, 128), bytes_of(32, 256 // width)
    if name == "mxfp4":
        return Quantized("mxfp4", shape, (1, 32), codes, scales)
    return Quantized("nvfp4", shape, (1, 16), codes, scales, floats[:1])


@pytest.mark.parametrize(
    "name,tensor_scale",
    [
        ("fp8", 1.0),
        ("nf4", 1.0),
        ("mxfp4", 1.0),
        ("nvfp4", 1.0),
        ("nvfp4", np.inf),
        ("nvfp4", 1e36),
    ],
)
def test_bits_of_what_is_not_finite_and_of_every_code(
    name: str, tensor_scale: float, device: str
) -> None:
    q = every_code(name)
    if q.tensor_scale is not None:
        q.tensor_scale[...] = tensor_scale
    q = q.map(lambda x: to_device(x, device))
    scale = to_device(np.array([1 / tensor_scale or 1], np.float32), device)
    want = expected(q, scale)
    assert 0x7F in want and len(np.unique(want)) > 1
    for turned in (False, True):
        out = to_device(np.zeros(q.shape[::-1] if turned else q.shape, np.uint8), device)
        recode(q, scale, out=out, turned=turned)
        same_bits(np.ascontiguousarray(to_host(out).T) if turned else out, want)


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
