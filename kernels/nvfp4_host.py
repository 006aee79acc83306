"""NVFP4 on the host, the layout of its scales, and what both versions share.

Everything is float32 in the order of the kernels (cuda/nvfp4.cu), which give the same bits; the
formulas are in nvfp4.py.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8, UInt16

from surogate.kernels.arrays import BF16, F32, Array
from surogate.kernels.quant.codes import E2M1, E4M3, codes_of, sum_of_squares, values_of

BLOCK = 16
LEAST_AMAX = 2.0**-104  # of a matrix that is not cast to zeros


class Scaling(NamedTuple):
    """What the largest value of a block, and the largest scale, become."""

    target: float
    limit: float

    @property
    def range(self) -> float:
        """What amax becomes in units of the scaled values."""
        return self.target * self.limit


NEAREST = Scaling(6.0, 448.0)
FOUR_OVER_SIX = Scaling(6.0, 256.0)
STOCHASTIC = Scaling(6.0 * 16 / 17, 448.0)


def scale_bytes(rows: int, blocks: int) -> int:
    """Bytes of the tiled scales of [rows, blocks]."""
    return -(-rows // 128) * 128 * -(-blocks // 4) * 4


def scale_offset(
    row: Int[np.ndarray, "*shape"], block: Int[np.ndarray, "*shape"], blocks: int
) -> Int[np.ndarray, "*shape"]:
    """Where cuBLASLt and CUTLASS look for the scale of (row, block): in tiles of 128 rows by 4
    blocks, those of one row of tiles one after the other. A tile is 512 bytes: 32 groups of four
    rows that lie 32 apart (cuBLAS manual, "1D block scaling factors layout").
    """
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def tile_scales(scales: UInt8[np.ndarray, "rows blocks"]) -> UInt8[np.ndarray, " tiled"]:
    """Scales in tiles; the slots that no scale has are zero."""
    rows, blocks = scales.shape
    out = np.zeros(scale_bytes(rows, blocks), np.uint8)
    row, block = (np.asarray(index) for index in np.indices(scales.shape))
    out[scale_offset(row, block, blocks)] = scales
    return out


def untile_scales(
    tiled: UInt8[np.ndarray, " tiled"], rows: int, blocks: int
) -> UInt8[np.ndarray, "rows blocks"]:
    """The other way."""
    row, block = np.indices((rows, blocks))
    return tiled[scale_offset(row, block, blocks)]


def hadamard(x: Float[Array, "tokens columns"], signs: int) -> Float[Array, "tokens columns"]:
    """R x of nvfp4.py, on the host, for each 16 tokens; their number is a multiple."""
    return _sums(x, signs) * x.dtype.type(0.25)


def transformed(
    x: Float32[Array, "tokens columns"], signs: int
) -> Float32[Array, "tokens columns"]:
    """4 R x rounded to bf16. Kernels leave the factor to the scale, where it costs nothing."""
    return _sums(x, signs).astype(BF16).astype(F32)


def _sums(x: Float[Array, "tokens columns"], signs: int) -> Float[Array, "tokens columns"]:
    flips = np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(BLOCK)], x.dtype)
    groups = x.reshape(-1, BLOCK, x.shape[1]) * flips[:, None]
    half = 1
    while half < BLOCK:
        pairs = groups.reshape(-1, BLOCK // (2 * half), 2, half, x.shape[1])
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        groups = np.stack([first + second, first - second], axis=2)
        half *= 2
    return groups.reshape(x.shape)


def amax(x: Float[Array, "tokens columns"], signs: int | None) -> Float32[Array, " one_or_two"]:
    """[max |x|], or with ``signs`` also that of x after the transform; NaN and infinity win."""
    most = np.zeros(1 if signs is None else 2, F32)
    wide = x.astype(F32)
    if not x.size:
        return most
    most[0] = np.abs(wide).max()  # NaN wins
    if signs is not None:
        padded = np.zeros((-(-len(x) // BLOCK) * BLOCK, x.shape[1]), F32)
        padded[: len(x)] = wide
        with np.errstate(invalid="ignore", over="ignore"):
            most[1] = np.abs(transformed(padded, signs)).max() * np.float32(0.25)
        if not np.isfinite(most[0]):
            most[1] = np.nan
    return most


def quantise(
    x: Float32[Array, "rows inner"],
    bits: UInt16[Array, "..."] | None,
    amax: Float32[Array, "1"],
    scaling: Scaling,
    *,
    tall: bool | None,
    four_over_six: bool,
) -> tuple[Float32[Array, "rows inner"], Float32[Array, "rows inner"]]:
    """(q, scale of each value) of [rows, inner]. ``tall`` is None for a cast along tokens.

    Squared errors are added in the order of the kernels. Along tokens: one after the other. Along
    columns a block is of several lanes, that have 8 columns (of every fourth row of a tall one):
    even and odd ones are added apart, then those sums and the lanes in pairs.
    """
    rows, inner = x.shape
    if not x.size:
        return x, x
    shape: tuple[int, ...] = (rows, inner // 16, 1, 16)
    order: tuple[int, ...] = (0, 1, 2, 3)
    if tall is not None:
        shape, order = (rows, inner // 16, 2, 4, 2), (0, 1, 2, 4, 3)
    if tall:  # row 4 * k + r and half h of a tile are of lane 2 * r + h
        shape, order = (rows // 16, 4, 4, inner // 16, 2, 4, 2), (0, 3, 2, 4, 6, 1, 5)
    split = x.reshape(shape).transpose(order)
    blocks = split.reshape(*split.shape[:2], -1, 4 if tall is False else 16)
    noise = None if bits is None else bits.reshape(shape).transpose(order).reshape(blocks.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # where amax is not finite
        q, scale = _quantise_blocks(blocks, noise, amax, scaling, four_over_six)
    back = np.argsort(order)

    def restored(blocked: Array) -> Array:
        return blocked.reshape(split.shape).transpose(back).reshape(rows, inner)

    return restored(q), restored(np.broadcast_to(scale, q.shape))


def _quantise_blocks(
    x: Array, noise: Array | None, amax: Array, scaling: Scaling, four_over_six: bool
) -> tuple[Array, Array]:
    """(q, scale) of [.., lanes, values]."""
    one, value = np.float32(1), np.float32(amax[0])
    usable = np.isfinite(value) and value > LEAST_AMAX
    up = np.float32(scaling.range) / value if usable else one
    most = np.abs(x).max(axis=(-1, -2), keepdims=True)
    ideal = np.minimum(most * (up * np.float32(1.0 / scaling.target)), np.float32(448))
    scale = _e4m3(ideal)
    if noise is not None:
        scale += np.where((ideal < 2.0**-6) & (scale < ideal), np.float32(2.0**-9), np.float32(0))
    scaled = x * _inverse(scale, one / up)
    q = _round(scaled, noise)
    if four_over_six:
        wide = _e4m3(np.minimum(np.float32(1.5) * ideal, np.float32(448)))
        scaled_to_four = x * _inverse(wide, one / up)
        on_four = _round(scaled_to_four, noise)
        better = _squared_error(on_four, scaled_to_four, wide) < _squared_error(q, scaled, scale)
        better |= scale == 0  # which loses the block
        q, scale = np.where(better, on_four, q), np.where(better, wide, scale)
    return q, scale


def _e4m3(x: Array) -> Array:
    return values_of(codes_of(x, E4M3), E4M3)


def _inverse(scale: Array, down: np.float32) -> Array:
    """What turns x into units of the scale."""
    product = np.where(scale > 0, scale * down, np.float32(1))
    return np.where(scale > 0, np.float32(1) / product, np.float32(0))


def _round(scaled: Array, noise: Array | None) -> Array:
    """On the grid of E2M1. Stochastically: where 2^-16 of a step times the random bits, added to
    the magnitude, which is rounded to such units, reach the next value.
    """
    if noise is None:
        return values_of(codes_of(scaled, E2M1), E2M1)
    size = np.minimum(np.abs(scaled), np.float32(6)).astype(np.float64)
    step = np.maximum(np.exp2(np.frexp(size)[1] - 1.0), 1.0) * 0.5
    moved = np.rint(size / step * 65536 + noise)
    return np.copysign(np.floor(moved / 65536) * step, scaled).astype(F32)


def _squared_error(q: Array, scaled: Array, scale: Array) -> Array:
    """Of blocks, in the order of the kernels."""
    lanes = sum_of_squares(np.abs(q) - np.abs(scaled))
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return scale * scale * lanes[..., None]
