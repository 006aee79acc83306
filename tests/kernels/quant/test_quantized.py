"""Quantised weights: codes, scales and values bit for bit those of expected.py, and of others.

Codes of NF4 are also those that bitsandbytes 0.50.2 made of the same weights (its hashes).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.arrays import BF16, Backend
from surogate.kernels.quant.codes import E2M1, unpack
from surogate.kernels.quant.nf4 import DYNAMIC_MAP, _nest
from surogate.kernels.quant.quantized import Nested, Quantized, dequantize, quantize
from surogate.kernels.widened import Widened
from tests.kernels.quant.expected import (
    E2M1_VALUES,
    F32,
    NF4_TABLE,
    expected_four_over_six,
    expected_fp8,
    expected_nested,
    expected_nf4,
    expected_nvfp4,
    ramp,
    sha,
    tiles,
    weight,
)
from tests.oracle import normal, same_bits, to_device, to_host, unaligned

SHAPES = [
    (1, 16),  # least
    (7, 48),  # less than a block
    (33, 272),  # ragged against every block
    (65, 65),  # odd: rows begin within bytes and within vectors
    (130, 2064),  # more than one block of threads each way
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("side", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8(shape, side, dtype, device):
    w = weight(shape, dtype)
    codes, scales, values = expected_fp8(w, side)
    q = quantize(to_device(w, device), "fp8", block=side)
    same_bits(q.codes, codes)
    same_bits(q.scales, scales)
    same_bits(dequantize(q), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [32, 64, 512, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4(shape, block, dtype, device):
    w = weight(shape, dtype)
    codes, absmax, values = expected_nf4(w, block)
    q = quantize(to_device(w, device), "nf4", block=block)
    same_bits(q.codes, codes)
    same_bits(q.scales, absmax)
    same_bits(dequantize(q), values)


@pytest.mark.parametrize("shape,block", [((1, 16), 64), ((65, 65), 32), ((130, 2064), 64)])
def test_nf4_with_double_quantisation(shape, block, device):
    w = weight(shape)
    codes, absmax, _ = expected_nf4(w, block)
    codes8, scales, offset, restored = expected_nested(absmax)
    q = quantize(to_device(w, device), "nf4", block=block, double_quant=True)
    assert q.nested is not None and q.nested.block == 256
    same_bits(q.codes, codes)
    same_bits(q.scales, codes8)
    same_bits(q.nested.scales, scales)
    same_bits(q.nested.offset, offset)
    nibbles = np.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[: w.size]
    values = NF4_TABLE[nibbles] * np.repeat(restored, block)[: w.size]
    same_bits(dequantize(q), values.reshape(shape).astype(BF16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] % 16 == 0])
def test_nvfp4(shape, square, dtype, device):
    w = weight(shape, dtype)
    codes, scales, tensor_scale, values = expected_nvfp4(w, 16 if square else 1)
    q = quantize(to_device(w, device), "nvfp4", square=square)
    same_bits(q.codes, codes[:, 0::2] | codes[:, 1::2] << 4)
    same_bits(q.scales, scales)
    same_bits(q.tensor_scale, tensor_scale)
    same_bits(dequantize(q), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] % 16 == 0])
def test_nvfp4_four_over_six(shape, square, dtype, device):
    """Each block is one of two casts of it, and the one with the smaller error."""
    w = weight(shape, dtype)
    q = quantize(to_device(w, device), "nvfp4", square=square, four_over_six=True)
    codes, scales, tensor_scale, errors = expected_four_over_six(w, 16 if square else 1)
    same_bits(q.tensor_scale, tensor_scale)
    got_codes = unpack(to_host(q.codes), E2M1)
    four = np.zeros(scales[0].shape, bool)
    for rows, columns in tiles(w.shape, (16 if square else 1, 16)):
        at = rows, columns.start // 16
        four[at] = (to_host(q.scales)[at] != scales[0][at]).any()
        k = int(four[at].all())
        np.testing.assert_array_equal(to_host(q.scales)[at], scales[k][at])
        np.testing.assert_array_equal(got_codes[rows, columns], codes[k][rows, columns])
        assert (errors[k][at] <= errors[1 - k][at] * (1 + 1e-5)).all()
    assert w.size < 4096 or 0.01 < four.mean() < 0.6


def test_four_over_six_keeps_blocks_that_the_scale_of_six_loses(device):
    """A block of 2^-10.3 of the least scale: on 4 it is not lost."""
    w = np.zeros((1, 32), F32)
    w[0, 0], w[0, 16:] = 1, 6 * 2.0**-10.3 / 1536
    plain, four = (
        to_host(dequantize(quantize(to_device(w, device), "nvfp4", square=False, **settings)))
        for settings in ({}, {"four_over_six": True})
    )
    assert four[0, 16:].all()
    assert np.abs(four.astype(F32) - w)[0, 16:].max() < np.abs(w[0, 16:]).max()
    assert plain[0, 0] == four[0, 0] == 1


@pytest.mark.parametrize("shape", [(1, 32), (9, 96), (40, 2080)])
def test_mxfp4_is_exact(shape, device):
    """All codes, with scales that bfloat16 can hold."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    scales = rng.integers(100, 150, (shape[0], shape[1] // 32), dtype=np.uint8)
    q = Quantized("mxfp4", shape, (1, 32), to_device(codes, device), to_device(scales, device))
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape)
    signed = np.where(nibbles >= 8, -1.0, 1.0) * E2M1_VALUES[nibbles & 7]
    want = np.ldexp(signed, np.repeat(scales.astype(int), 32, axis=1) - 127)
    same_bits(dequantize(q), want.astype(BF16))
    np.testing.assert_array_equal(to_host(dequantize(q)).astype(np.float64), want)


def test_fp8_decodes_every_code(device):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scales = np.array([[0.25, 3e-3]], F32)
    q = Quantized("fp8", (2, 128), (64, 64), to_device(codes, device), to_device(scales, device))
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(F32) * np.repeat(scales, 64, axis=1)
    got, number = to_host(dequantize(q)), np.isfinite(values)
    assert number.sum() == 254
    same_bits(got[number], values[number].astype(BF16))
    assert np.isnan(got[~number]).all()


@pytest.mark.parametrize(
    "block,codes,absmax",
    [
        (64, "c96937c1e3d5cd92", "28ffba6fdd93062d"),
        (128, "fcb9632bb805d603", "29be7ef91ebfe110"),
        (512, "cb22dbe12ce3e14c", "245426f2e1bf149a"),
    ],
)
def test_nf4_bytes_are_those_of_bitsandbytes(block, codes, absmax, device):
    q = quantize(to_device(ramp(64, 512), device), "nf4", block=block)
    assert (sha(q.codes), sha(q.scales)) == (codes, absmax)


def test_dynamic_map_is_that_of_bitsandbytes():
    assert sha(DYNAMIC_MAP) == "e732639a65f497b4"
    assert DYNAMIC_MAP[127] == 0 and DYNAMIC_MAP[255] == 1
    np.testing.assert_allclose(DYNAMIC_MAP[[0, 126, 128]], [-0.99296874, -5.5e-7, 5.5e-7])


def test_scales_between_two_values_take_the_even_code(device):
    """As bitsandbytes' search leaves them: it keeps its last probe, whose index is even."""
    middles = (DYNAMIC_MAP[1:] + DYNAMIC_MAP[:-1]) * F32(0.5)
    k = np.arange(130, 250)
    x = np.concatenate([[1, -1], middles[k], -middles[k]]).astype(F32)  # of mean zero, largest 1
    codes, nested = _nest(to_device(x, device))
    assert to_host(nested.offset) == 0 and to_host(nested.scales) == 1
    np.testing.assert_array_equal(to_host(codes)[2 : 2 + len(k)], k + k % 2)


def test_nf4_worked_numbers(device):
    """A block of zeros among 512 takes a little from the offset, so its code must be that of 0."""
    w = (np.random.default_rng(0).standard_normal(64 * 512) * 0.02).astype(F32)
    w[64:128] = 0
    w = w.reshape(512, 64)
    q = quantize(to_device(w, device), "nf4", double_quant=True)
    assert q.nested is not None
    assert to_host(q.codes)[0] == 0x86 and (to_host(q.codes)[32:64] == 0x77).all()
    assert float(to_host(q.nested.offset)[0]) == pytest.approx(0.0521657, abs=5e-8)
    absmax = DYNAMIC_MAP[to_host(q.scales)[1]] * to_host(q.nested.scales)[0]
    assert absmax + to_host(q.nested.offset)[0] == pytest.approx(3.668e-4, abs=1e-7)
    assert not to_host(dequantize(q))[1].any()
    plain = quantize(to_device(w, device), "nf4")
    assert 8 * plain.nbytes / plain.size == 4.5
    table = 8 * (256 + 1) * 4 / q.size  # stored once a matrix
    assert 8 * q.nbytes / q.size - table == pytest.approx(4.127, abs=1e-3)


def test_nvfp4_worked_numbers(device):
    block = [0.11, -0.42, 0.9, 2.5, -3.1, 0.05, 0, -0.0]
    block += [1.2, -1.6, 0.7, -0.3, 4.4, 0.25, -2.2, 0.6]
    packed = "90520e80c392172d"
    one = quantize(to_device(np.array([block], F32), device), "nvfp4", square=False)
    assert 1 / float(to_host(one.tensor_scale)[0]) == pytest.approx(610.90906, rel=1e-6)
    assert to_host(one.scales).tolist() == [[0x7E]]
    assert to_host(one.codes).tobytes().hex() == packed
    larger = np.array([[*block, 35.2, *[0] * 15], [1e-6] * 16 + [0] * 16], F32)
    q = quantize(to_device(larger, device), "nvfp4", square=False)
    assert to_host(q.scales).tolist() == [[0x66, 0x7E], [0, 0]]  # lost: 1e-6 of 35.2, and zeros
    assert to_host(q.codes)[0, :8].tobytes().hex() == packed
    assert not to_host(dequantize(q))[1].any()


def test_fp8_error_of_normal_weights(device):
    """The grid of 128 x 128 blocks of a 200 x 300 matrix, and the error known for it."""
    w = (np.random.default_rng(3).standard_normal((200, 300)) * 0.02).astype(F32)
    q = quantize(to_device(w, device), "fp8", block=128)
    assert q.scales.shape == (2, 3)
    error = to_host(dequantize(q)).astype(F32) - w
    assert np.sqrt((error**2).mean() / (w**2).mean()) == pytest.approx(0.0267, abs=5e-4)


def test_mxfp4_worked_numbers(device):
    codes = np.array([[0x21, 0x43, 0x65, 0x87, *[0] * 12]], np.uint8)
    scales = np.array([[120]], np.uint8)
    q = Quantized("mxfp4", (1, 32), (1, 32), to_device(codes, device), to_device(scales, device))
    want = [0.00390625, 0.0078125, 0.01171875, 0.015625, 0.0234375, 0.03125, 0.046875, -0.0]
    assert to_host(dequantize(q))[0, :8].astype(F32).tolist() == want


def test_error_of_nf4_grows_with_the_block(device):
    w = normal("float32", (64, 512)) * F32(0.02)
    errors = []
    for block in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        q = quantize(to_device(w, device), "nf4", block=block, double_quant=True)
        errors.append(float(np.square(to_host(dequantize(q)).astype(F32) - w).mean()))
    ratios = np.array(errors[1:]) / np.array(errors[:-1])
    assert (ratios > 0.97).all() and (ratios < 1.3).all()


@pytest.mark.parametrize("square", [True, False])
def test_square_blocks_transpose(square):
    w = weight((64, 96))
    codes, turned = (
        to_host(dequantize(quantize(x, "nvfp4", square=square)))
        for x in (w, np.ascontiguousarray(w.T))
    )
    assert np.array_equal(codes, turned.T) == square


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("fp8", {"block": 64}),
    ("nf4", {}),
    ("nf4", {"double_quant": True}),
    ("nvfp4", {}),
    ("nvfp4", {"square": False}),
    ("nvfp4", {"four_over_six": True}),
]


@pytest.mark.parametrize("format,settings", VARIANTS)
def test_zeros_stay_zeros(format, settings, device):
    w = np.zeros((20, 144), BF16)
    q = quantize(to_device(w, device), format, **settings)
    assert not to_host(dequantize(q)).any()
    if format == "fp8":
        assert (to_host(q.scales) == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format,settings", VARIANTS)
def test_what_is_not_finite_is_not_hidden(format, settings, bad, device):
    w = weight((20, 144))
    w[3, 5] = bad
    got = to_host(dequantize(quantize(to_device(w, device), format, **settings)))
    assert not np.isfinite(got[3, 5].astype(F32))
    everywhere = format == "nvfp4" or bool(settings.get("double_quant"))
    assert np.isfinite(got[-1, -1].astype(F32)) != everywhere


@pytest.mark.parametrize("exponent", [-133, -126, -100, 0, 100, 120])
@pytest.mark.parametrize("format,settings", VARIANTS)
def test_all_of_the_range(format, settings, exponent, device):
    """Scales that overflow or are subnormal: near to the weights, and the same on host and card."""
    w = np.ldexp(normal("float32", (16, 64)), exponent).astype(F32)
    q = quantize(to_device(w, device), format, **settings)
    got = to_host(dequantize(q)).astype(F32)
    same_bits(got, dequantize(quantize_on_host(w, format, settings)).astype(F32))
    assert np.isfinite(got).all()
    if exponent > -126:
        assert np.abs(got - w).max() < 0.2 * np.abs(w).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format,settings", VARIANTS)
def test_scales_of_all_sizes_in_a_matrix(format, settings, dtype, device):
    """Subnormal and lost ones too: the arrays of the host, to the bit."""
    rng = np.random.default_rng(0)
    w = normal("float32", (35, 1104)) * np.exp2(rng.integers(-25, 3, (35, 69)).repeat(16, axis=1))
    w = w.astype(BF16 if dtype == "bfloat16" else F32)
    want = quantize_on_host(w, format, settings)
    for name, array in quantize(to_device(w, device), format, **settings).arrays().items():
        same_bits(array, want.arrays()[name])


def quantize_on_host(w: np.ndarray, format: str, settings: dict[str, Any]) -> Quantized:
    launch, Backend.launch = Backend.launch, None
    try:
        return quantize(w, format, **settings)
    finally:
        Backend.launch = launch


@pytest.mark.parametrize("format,settings", VARIANTS)
def test_writes_into_a_widened_weight_and_nowhere_else(format, settings, device):
    w = weight((33, 144))
    q = quantize(to_device(w, device), format, **settings)
    widened = Widened.blank(w.shape, 8, BF16, like=q.codes)
    out = widened.weight
    assert dequantize(q, out=out) is out
    same_bits(np.ascontiguousarray(to_host(widened.weight)), dequantize(q))
    assert not to_host(widened.up).any() and not to_host(widened.rows)[33:].any()


@pytest.mark.parametrize("format,settings", VARIANTS)
def test_unaligned_arrays(format, settings, device):
    w = weight((9, 48))
    plain = quantize(to_device(w, device), format, **settings)
    q = quantize(unaligned(w, device), format, **settings)
    for name, array in plain.arrays().items():
        same_bits(q.arrays()[name], array)
    shifted = replace(q, codes=unaligned(q.codes.view(BF16), device).view(np.uint8))
    out = unaligned(np.zeros(w.shape, BF16), device)
    same_bits(np.ascontiguousarray(to_host(dequantize(shifted, out=out))), dequantize(plain))


@pytest.mark.parametrize("format,settings", VARIANTS)
def test_is_a_leaf_of_a_tree(format, settings):
    q = quantize(weight((16, 64)), format, **settings)
    assert tree.leaves({"a": q, "b": None}) == [q]
    assert (q.shape, q.ndim, q.size, q.dtype) == ((16, 64), 2, 1024, BF16)
    copied = q.map(np.copy)
    assert q.arrays().keys() == copied.arrays().keys()
    for name, array in copied.arrays().items():
        assert array is not q.arrays()[name]
        same_bits(array, q.arrays()[name])
    assert q.nbytes == sum(array.nbytes for array in q.arrays().values())
    same_bits(dequantize(copied), dequantize(q))


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"format": "int8"}, "format must be fp8, nf4 or nvfp4, got int8"),
        ({"format": "mxfp4"}, "format must be fp8, nf4 or nvfp4, got mxfp4"),
        (
            {"format": "fp8", "block": 96},
            "rows of an fp8 block must be a power of two from .*, got 96",
        ),
        ({"format": "fp8", "double_quant": True}, "double_quant is of nf4, not of fp8"),
        ({"format": "nf4", "block": 16}, "power of two from 32 to 4096, got 16"),
        ({"format": "nvfp4", "block": 32}, "blocks of 16 columns, got 32"),
        ({"format": "nvfp4"}, "multiples of 16, got 24"),
        ({"format": "fp8", "four_over_six": True}, "four_over_six is of nvfp4, not of fp8"),
    ],
)
def test_quantize_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight((4, 24)), **settings)


@pytest.mark.parametrize("format,settings", VARIANTS)
def test_refuses_a_strided_weight(format, settings):
    from tests.emulator.launch import emulated

    with emulated(), pytest.raises(ValueError, match="C-contiguous"):
        quantize(weight((32, 64))[:, ::2], format, **settings)


def broken() -> Iterator[tuple[Quantized, str]]:
    fp8, nf4 = quantize(weight((16, 64)), "fp8"), quantize(weight((16, 64)), "nf4")
    nvfp4 = quantize(weight((16, 64)), "nvfp4")
    double = quantize(weight((16, 64)), "nf4", double_quant=True)
    assert double.nested is not None
    yield replace(fp8, format="int4"), "format must be one of"
    yield replace(fp8, codes=fp8.codes[:8]), r"codes must be a contiguous uint8\(16, 64\)"
    yield replace(fp8, scales=fp8.scales[:0]), r"scales must be a contiguous float32\(1, 1\)"
    yield replace(fp8, block=(100, 128)), "rows of an fp8 block must be a power of two"
    yield replace(nf4, scales=nf4.scales.astype(np.uint8)), r"scales must be .* float32\(16,\)"
    yield replace(nf4, codes=nf4.codes[:-1]), r"codes must be a contiguous uint8\(512,\)"
    yield replace(nf4, block=(1, 48)), "an nf4 block must be a power of two"
    yield replace(double, nested=None), r"scales must be a contiguous float32"
    wrong = Nested(double.nested.scales, DYNAMIC_MAP, double.nested.offset, 8)
    yield replace(double, nested=wrong), r"nested scales must be a contiguous float32\(2,\)"
    yield replace(nvfp4, tensor_scale=None), "nvfp4 needs a tensor_scale"
    yield replace(nvfp4, scales=nvfp4.scales[:, :2]), r"scales must be a contiguous uint8\(16, 4\)"
    yield replace(nvfp4, shape=(16, 60)), "nvfp4 needs columns in multiples of 16"


@pytest.mark.parametrize("q,message", list(broken()), ids=[message for _, message in broken()])
def test_dequantize_refuses(q, message):
    with pytest.raises(ValueError, match=message):
        dequantize(q)


def test_dequantize_refuses_an_out_that_does_not_fit():
    q = quantize(weight((16, 64)), "fp8")
    with pytest.raises(ValueError, match=r"out must be bfloat16\(16, 64\), got bfloat16\(16, 32\)"):
        dequantize(q, out=np.zeros((16, 32), BF16))
