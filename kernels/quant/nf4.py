"""Weights in NF4, as bitsandbytes stores them (QLoRA, arXiv 2305.14314): the same bytes.

The matrix is flattened by rows and cut into blocks, the last one ragged, that may cross rows:

    absmax = max |w| of the block    code = NF4(w * (1 / absmax))    w' = NF4_VALUES[code] * absmax

With double quantisation the absmax are stored in 8 bits. Less their mean, they are cut into blocks
of 256 and each scaled by its own absmax to [-1, 1], where ``DYNAMIC_MAP`` has the values of codes:

    offset = mean(absmax)    nested = max |absmax - offset|    code8 = nearest to
    (absmax - offset) * (1 / nested)    absmax' = DYNAMIC_MAP[code8] * nested + offset

A tie takes the even code. bitsandbytes gives a block of zeros the code of -1 (its 0 / 0); here it
has that of 0, since a double-quantised absmax of zero comes back as a little more than that.

codes [(outer * inner + 1) / 2], the even element in the high half; scales [blocks], float32 absmax
or uint8. What is not finite makes its whole block NaN (and with double quantisation all blocks).
"""

import numpy as np
from jaxtyping import Float, Float32, UInt8

from surogate.kernels.arrays import F32, Array, aligned, empty, namespace, on_device, require
from surogate.kernels.card import multiprocessors
from surogate.kernels.nvrtc import THREADS, Source, ctype
from surogate.kernels.quant.codes import NF4, codes_of, pack, unpack, values_of
from surogate.kernels.quant.storage import Nested, Quantized, blocks_of, check_power

NESTED_BLOCK = 256
EACH, WARPS, RESIDENT, MEAN_THREADS = 16, 8, 12, 1024  # of quant_nf4.cu
_INSTANCES = [(dtype, whole) for dtype in ("float", "bf16") for whole in ("true", "false")]
SOURCE = Source("quant_nf4", {"nf4_quantize": list(_INSTANCES), "nf4_mean": [()], "nf4_nest": [()]})


def dynamic_map() -> Float32[Array, "256"]:
    """The signed 8-bit map of Dettmers et al. 2021 (arXiv 2110.02861), ascending.

    Seven decades from 10^-6 to 1; decade i has 2^i values of either sign, which are the middles of
    equal parts of [0.1, 1]. And 0 and 1. Edges of parts are steps from the nearer end, each rounded
    once, as torch makes them: the bits are those in checkpoints.
    """
    low, high = np.float32(0.1), np.float32(1)
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade
        step, i = (high - low) / np.float32(parts), np.arange(parts + 1, dtype=np.float64)
        steps = np.where(2 * i < parts, low + step * i, high - step * (parts - i))
        edges = steps.astype(np.float32)
        size = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [*size, *-size]
    return np.sort(np.array(values, np.float32))


DYNAMIC_MAP = dynamic_map()


def quantize_nf4(
    weight: Float[Array, "outer inner"], *, block: int, double_quant: bool
) -> Quantized:
    """Codes and scales of a float32 or bfloat16 matrix, in blocks of 32 to 4096 elements."""
    check_power("quantize: an nf4 block", block, 32, 4096)
    require(weight.size > 0, f"quantize: weight must not be empty, got {weight.shape}")
    require(weight.flags.c_contiguous, "quantize: weight must be C-contiguous")
    codes, absmax = _quantize(weight, block)
    shape = (weight.shape[0], weight.shape[1])
    if not double_quant:
        return Quantized("nf4", shape, (1, block), codes, absmax)
    nested_codes, nested = _nest(absmax)
    return Quantized("nf4", shape, (1, block), codes, nested_codes, nested=nested)


def _quantize(weight: Array, block: int) -> tuple[Array, Array]:
    size = weight.size
    if not on_device(weight):
        blocks = np.zeros((blocks_of(size, block), block), F32)
        blocks.reshape(-1)[:size] = weight.reshape(-1)
        with np.errstate(
            all="ignore"
        ):  # a block of zeros divides by zero; NaN is not reported here
            absmax = np.abs(blocks).max(axis=1)
            factor = np.minimum(np.float32(1) / absmax, np.finfo(np.float32).max)
            codes = codes_of(blocks * factor[:, None], NF4)
        return pack(codes.reshape(-1)[: size + size % 2], NF4), absmax
    codes = empty(blocks_of(size, 2), np.uint8, like=weight)
    absmax = empty(blocks_of(size, block), F32, like=weight)
    types = (ctype(weight.dtype), "true" if size % EACH == 0 and aligned(weight) else "false")
    resident = RESIDENT // weight.dtype.itemsize * multiprocessors()
    grid = min(blocks_of(size, EACH * 32 * WARPS), resident)
    arguments = [codes, absmax, weight, block.bit_length() - 1, np.int64(size)]
    SOURCE.launch("nf4_quantize", types, grid, (32, WARPS), arguments)
    return codes, absmax


def _nest(absmax: Float32[Array, " blocks"]) -> tuple[Array, Nested]:
    count = len(absmax)
    table = namespace(absmax).asarray(DYNAMIC_MAP)
    if on_device(absmax):
        codes = empty(count, np.uint8, like=absmax)
        offset = empty(1, F32, like=absmax)
        scales = empty(blocks_of(count, NESTED_BLOCK), F32, like=absmax)
        SOURCE.launch("nf4_mean", (), 1, MEAN_THREADS, [offset, absmax, count])
        arguments = [codes, scales, absmax, offset, table, count]
        SOURCE.launch("nf4_nest", (), len(scales), THREADS, arguments)
        return codes, Nested(scales, table, offset, NESTED_BLOCK)
    offset = np.array([absmax.mean(dtype=np.float64)], F32)
    blocks = np.zeros((blocks_of(count, NESTED_BLOCK), NESTED_BLOCK), F32)
    with np.errstate(all="ignore"):
        blocks.reshape(-1)[:count] = absmax - offset
        scales = np.abs(blocks).max(axis=1)
        scaled = np.where(scales[:, None] == 0, 0, blocks * (np.float32(1) / scales)[:, None])
    codes = _nearest(scaled.reshape(-1)[:count])
    return codes, Nested(scales, table, offset, NESTED_BLOCK)


def _nearest(x: Float32[Array, " count"]) -> UInt8[Array, " count"]:
    """Index of the nearest value of DYNAMIC_MAP, in the middle between two the even one."""
    middles = (DYNAMIC_MAP[1:] + DYNAMIC_MAP[:-1]) * np.float32(0.5)
    low = np.searchsorted(middles, x, side="left")
    tie = np.append(middles, np.float32(np.inf))[low] == x
    return (low + (tie & (low % 2 == 1))).astype(np.uint8)


def values_nf4(q: Quantized) -> Float32[Array, "outer inner"]:
    """The host's values before they are rounded."""
    values = values_of(unpack(q.codes, NF4), NF4)[: q.size]
    absmax = q.scales
    if q.nested is not None:
        scales = np.repeat(q.nested.scales, q.nested.block)[: len(absmax)]
        absmax = q.nested.table[absmax] * scales + q.nested.offset
    return (values * np.repeat(absmax, q.block[1])[: q.size]).reshape(q.shape)
