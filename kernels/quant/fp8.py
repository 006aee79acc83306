"""Weights in E4M3 with a float32 scale for each block of rows and columns.

    scale = amax / 448    code = E4M3(w * (448 / amax))    w' = code * scale

A block of zeros has scale 1; the last blocks are ragged. With blocks of 128 x 128 this is the
fine-grained FP8 of DeepSeek-V3 (arXiv 2412.19437) and of Qwen's and MiniMax' FP8 checkpoints, whose
``weight_scale_inv`` is the scale: it multiplies, for all that its name says.

codes [outer, inner], scales [blocks down, blocks across]. What is not finite makes its whole block
NaN.
"""

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels.arrays import F32, Array, empty, on_device, require, rows_aligned
from surogate.kernels.nvrtc import THREADS, Source, ctype
from surogate.kernels.quant.codes import E4M3, codes_of, values_of
from surogate.kernels.quant.storage import Quantized, blocks_of, check_power

HELD = 8  # groups of eight elements of a block of 128 x 128, that a thread of quant_fp8.cu keeps
_INSTANCES = [(dtype, whole, "0") for dtype in ("float", "bf16") for whole in ("true", "false")]
SOURCE = Source("quant_fp8", {"fp8_quantize": [*_INSTANCES, ("bf16", "true", str(HELD))]})


def quantize_fp8(weight: Float[Array, "outer inner"], *, block: tuple[int, int]) -> Quantized:
    """Codes and scales of a float32 or bfloat16 matrix."""
    check_power("quantize: rows of an fp8 block", block[0], 1, 1 << 20)
    check_power("quantize: columns of an fp8 block", block[1], 8, 2048)
    (outer, inner), (rows, columns) = weight.shape, block
    grid = blocks_of(outer, rows), blocks_of(inner, columns)
    if not on_device(weight):
        codes, scales = _quantize_host(weight, block)
        return Quantized("fp8", (outer, inner), block, codes, scales)
    require(weight.flags.c_contiguous, "quantize: weight must be C-contiguous")
    codes = empty(weight.shape, np.uint8, like=weight)
    scales = empty(grid, F32, like=weight)
    if weight.size:
        whole = "true" if inner % 8 == 0 and rows_aligned(weight) else "false"
        arguments = [codes, scales, weight, rows, columns, outer, inner]
        types = (ctype(weight.dtype), whole, "0")
        if types[:2] == ("bf16", "true") and rows * columns == 8 * HELD * THREADS:
            types = ("bf16", "true", str(HELD))
        SOURCE.launch("fp8_quantize", types, grid[0] * grid[1], THREADS, arguments)
    return Quantized("fp8", (outer, inner), block, codes, scales)


def _quantize_host(weight: Array, block: tuple[int, int]) -> tuple[Array, Array]:
    x = weight.astype(F32)
    with np.errstate(all="ignore"):  # what is not finite ends up as NaN, and is not reported
        amax = _over_blocks(np.abs(x), block)
        scales = np.where(amax == 0, np.float32(1), amax / np.float32(448))
        factor = np.minimum(np.float32(448) / amax, np.finfo(np.float32).max)
        factor = np.where(amax == 0, np.float32(1), factor)
        return codes_of(x * spread(factor, block, x.shape), E4M3), scales


def _over_blocks(
    x: Float32[Array, "outer inner"], block: tuple[int, int]
) -> Float32[Array, "down across"]:
    """The largest of each block."""
    for axis in (0, 1):
        starts = np.arange(0, x.shape[axis], block[axis])
        x = np.maximum.reduceat(x, starts, axis=axis) if x.size else x[:0, :0]
    return x


def spread(
    scales: Float32[Array, "down across"], block: tuple[int, int], shape: tuple[int, int]
) -> Float32[Array, "outer inner"]:
    """Each block's scale at its elements."""
    rows, columns = (np.arange(length) // side for length, side in zip(shape, block, strict=True))
    return scales[rows[:, None], columns]


def values_fp8(q: Quantized) -> Float32[Array, "outer inner"]:
    """The host's values before they are rounded."""
    return values_of(q.codes, E4M3) * spread(q.scales, q.block, q.shape)
