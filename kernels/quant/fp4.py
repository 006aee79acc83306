"""Weights in E2M1 with a scale for every 16 or 32 columns of a row: NVFP4 and MXFP4.

NVFP4 (NVIDIA, arXiv 2509.25149) has scales in E4M3 for 16 columns, and a float32 one for the whole
matrix that brings those into range. With amax of the whole matrix, and amax_b of a block,

    encoding = 6 * 448 / amax    tensor_scale = 1 / encoding
    scale = E4M3(amax_b * (encoding / 6))
    code = E2M1(w * (1 / (scale * tensor_scale)))    w' = code * (scale * tensor_scale)

in the order of TransformerEngine, so that the bits are the same. A block of zeros has scale 0, and
so has one whose amax is less than 2^-10 / 448 of the whole; a matrix of zeros has tensor_scale 1.
Four over six (arXiv 2512.02010) has 256 for 448 and a second scale for each block, of 1.5 times the
first before it is rounded, which puts amax_b on 4 instead of 6: where the squared error with it is
smaller, and where the first is zero, it takes its place.
16 x 16 blocks share their scale over 16 rows, each of which still stores it: they transpose without
another rounding. What is not finite makes the whole matrix NaN, as E2M1 alone would hide it.

MXFP4 (OCP Microscaling 1.0) has powers of two in E8M0 for 32 columns; it is read, not written.

codes [outer, inner / 2], the even column in the low half; scales uint8 [outer, inner / 16 or 32].
"""

import numpy as np
from jaxtyping import Float, Float32, UInt8

from surogate.kernels.arrays import F32, Array, aligned, empty, on_device, require
from surogate.kernels.card import multiprocessors
from surogate.kernels.nvrtc import Source, ctype
from surogate.kernels.quant.codes import (
    E2M1,
    E4M3,
    E8M0,
    codes_of,
    pack,
    sum_of_squares,
    unpack,
    values_of,
)
from surogate.kernels.quant.storage import Quantized, blocks_of

NVFP4_COLUMNS, MXFP4_COLUMNS = 16, 32
TILE, WARPS = (16, 512), 4  # rows and columns of a warp of quant_nvfp4.cu, warps side by side
AMAX_THREADS = 512  # of a block of largest_of_blocks
_FLAGS = ("true", "false")
_INSTANCES = [(dtype, whole) for dtype in ("float", "bf16") for whole in _FLAGS]
SOURCE = Source(
    "quant_nvfp4",
    {
        "largest_of_blocks": list(_INSTANCES),
        "nvfp4_quantize": [
            (*types, square, four) for types in _INSTANCES for square in _FLAGS for four in _FLAGS
        ],
    },
)


def quantize_nvfp4(
    weight: Float[Array, "outer inner"], *, block: tuple[int, int], four_over_six: bool
) -> Quantized:
    """Codes and scales of a float32 or bfloat16 matrix, in blocks of (1, 16) or (16, 16)."""
    require(
        block in ((1, 16), (16, 16)),
        f"quantize: an nvfp4 block must be (1, 16) or (16, 16), got {block}",
    )
    outer, inner = weight.shape
    require(
        inner % NVFP4_COLUMNS == 0,
        f"quantize: nvfp4 needs columns in multiples of {NVFP4_COLUMNS}, got {inner}",
    )
    require(weight.size > 0, f"quantize: weight must not be empty, got {weight.shape}")
    if not on_device(weight):
        return _quantize_host(weight, block, four_over_six)
    require(weight.flags.c_contiguous, "quantize: weight must be C-contiguous")
    codes = empty((outer, inner // 2), np.uint8, like=weight)
    scales = empty((outer, inner // NVFP4_COLUMNS), np.uint8, like=weight)
    tensor_scale = empty(1, F32, like=weight)
    types = (ctype(weight.dtype), "true" if aligned(weight) else "false")
    parts = min(blocks_of(weight.size, 8 * AMAX_THREADS), 4 * multiprocessors())
    most = empty(parts, np.uint32, like=weight)
    SOURCE.launch(
        "largest_of_blocks", types, parts, AMAX_THREADS, [most, weight, np.int64(weight.size)]
    )
    tiles = blocks_of(outer, TILE[0]) * blocks_of(inner, TILE[1] * WARPS)
    arguments = [codes, scales, tensor_scale, most, parts, weight, outer, inner]
    forms = tuple("true" if form else "false" for form in (block[0] > 1, four_over_six))
    SOURCE.launch("nvfp4_quantize", (*types, *forms), tiles, 32 * WARPS, arguments)
    return Quantized("nvfp4", (outer, inner), block, codes, scales, tensor_scale)


def _quantize_host(weight: Array, block: tuple[int, int], four_over_six: bool) -> Quantized:
    outer, inner = weight.shape
    x = weight.astype(F32).reshape(outer, -1, NVFP4_COLUMNS)
    most, one = np.finfo(np.float32).max, np.float32(1)
    with np.errstate(all="ignore"):  # what is not finite ends up as NaN, and is not reported
        amax_b = np.abs(x).max(axis=2)
        if block[0] > 1:
            rows = np.arange(0, outer, block[0])
            amax_b = np.maximum.reduceat(amax_b, rows, axis=0).repeat(block[0], axis=0)[:outer]
        amax, largest = amax_b.max(), np.float32(6 * (256 if four_over_six else 448))
        encoding = one if amax == 0 else np.minimum(largest / amax, most)
        tensor_scale = one / encoding
        wanted = amax_b * (encoding * (one / np.float32(6)))
        scales, factor = _chosen(wanted, tensor_scale)
        if four_over_six:
            wide, wide_factor = _chosen(wanted * np.float32(1.5), tensor_scale)
            better = _error(x, wide, wide_factor, block) < _error(x, scales, factor, block)
            better |= scales == 0
            scales, factor = np.where(better, wide, scales), np.where(better, wide_factor, factor)
        codes = codes_of(x * factor[:, :, None], E2M1).reshape(outer, inner)
    scale = np.array([tensor_scale], F32)
    return Quantized("nvfp4", (outer, inner), block, pack(codes, E2M1), scales, scale)


def _chosen(
    wanted: Float32[Array, "outer blocks"], tensor_scale: np.float32
) -> tuple[UInt8[Array, "outer blocks"], Float32[Array, "outer blocks"]]:
    """Codes of scales, and what weights are multiplied by."""
    scales, one = codes_of(wanted, E4M3), np.float32(1)
    factor = np.minimum(one / (values_of(scales, E4M3) * tensor_scale), np.finfo(np.float32).max)
    return scales, factor


def _error(
    x: Float32[Array, "outer blocks columns"],
    scales: UInt8[Array, "outer blocks"],
    factor: Float32[Array, "outer blocks"],
    block: tuple[int, int],
) -> Float32[Array, "outer blocks"]:
    """Squared errors of blocks, in the order of the kernel: of each row, then row after row."""
    size = np.abs(x * factor[:, :, None])
    scale = values_of(scales, E4M3)
    error = scale * scale * sum_of_squares(values_of(codes_of(size, E2M1), E2M1) - size)
    if block[0] == 1:
        return error
    outer, blocks = error.shape
    padded = np.zeros((blocks_of(outer, block[0]), block[0], blocks), F32)
    padded.reshape(-1, blocks)[:outer] = error
    total = np.zeros_like(padded[:, 0])
    for row in range(block[0]):
        total = total + padded[:, row]
    return total.repeat(block[0], axis=0)[:outer]


def values_fp4(q: Quantized) -> Float32[Array, "outer inner"]:
    """The host's values before they are rounded, of either format."""
    if q.format == "nvfp4":
        assert q.tensor_scale is not None
        columns, scales = NVFP4_COLUMNS, values_of(q.scales, E4M3) * q.tensor_scale
    else:
        columns, scales = MXFP4_COLUMNS, values_of(q.scales, E8M0)
    return values_of(unpack(q.codes, E2M1), E2M1) * scales.repeat(columns, axis=1)
