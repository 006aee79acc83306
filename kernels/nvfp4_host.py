"""NVFP4 on the host, the layout of its scales, and what both versions share.

Everything is float32 in the order of the kernels (cuda/nvfp4.cu), which give the same bits; the
formulas are in nvfp4.py.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import BFloat16, Float, Float32, Int, UInt8, UInt16

from surogate.kernels.arrays import BF16, F32, Array
from surogate.kernels.quant.codes import E2M1, E4M3, codes_of, values_of

BLOCK = 16
_LARGEST = np.float32(3.402823466e38)


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
    """R x of the head of this file, on the host, for each 16 tokens; their number is a multiple."""
    flips = np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(BLOCK)], x.dtype)
    groups = x.reshape(-1, BLOCK, x.shape[1]) * flips[:, None]
    half = 1
    while half < BLOCK:
        pairs = groups.reshape(-1, BLOCK // (2 * half), 2, half, x.shape[1])
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        groups = np.stack([first + second, first - second], axis=2)
        half *= 2
    return groups.reshape(x.shape) * x.dtype.type(0.25)


def amax(x: BFloat16[Array, "tokens columns"], signs: int | None) -> Float32[Array, " one_or_two"]:
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
            most[1] = np.abs(rounded_to_bf16(hadamard(padded, signs))).max()
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

    Squared errors are added in the order of the kernels: those of a lane one after the other, then
    lanes in pairs. A block has one lane, two of 8 columns, or eight of 8 columns of 4 rows.
    """
    rows, inner = x.shape
    if not x.size:
        return x, x
    shape: tuple[int, ...] = (rows, inner // 16, 1, 16)
    order: tuple[int, ...] = (0, 1, 2, 3)
    if tall is not None:
        shape = (rows, inner // 16, 2, 8)
    if tall:  # row 4 * k + r and half h of a tile are of lane 2 * r + h
        shape, order = (rows // 16, 4, 4, inner // 16, 2, 8), (0, 3, 2, 4, 1, 5)
    split = x.reshape(shape).transpose(order)
    blocks = split.reshape(*split.shape[:2], -1, 32 if tall else shape[-1])
    noise = None if bits is None else bits.reshape(blocks.shape)
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
    usable = np.isfinite(value) and value > 0
    up = min(np.float32(scaling.range) / value, _LARGEST) if usable else one
    most = np.abs(x).max(axis=(-1, -2), keepdims=True)
    ideal = np.minimum(most * (up * np.float32(1.0 / scaling.target)), np.float32(448))
    scale = _e4m3(ideal)
    if noise is not None:
        scale += np.where((ideal < 2.0**-6) & (scale < ideal), np.float32(2.0**-9), np.float32(0))
    q = _round(x, scale, one / up, noise)
    if four_over_six:
        wide = _e4m3(np.minimum(np.float32(1.5) * ideal, np.float32(448)))
        on_four = _round(x, wide, one / up, noise)
        better = _squared_error(on_four, x, wide, up) < _squared_error(q, x, scale, up)
        q, scale = np.where(better, on_four, q), np.where(better, wide, scale)
    return q, scale


def _e4m3(x: Array) -> Array:
    return values_of(codes_of(x, E4M3), E4M3)


def _round(x: Array, scale: Array, down: np.float32, noise: Array | None) -> Array:
    """x over its scale on the grid of E2M1."""
    product = np.where(scale > 0, scale * down, np.float32(1))
    scaled = x * np.where(scale > 0, np.minimum(np.float32(1) / product, _LARGEST), np.float32(0))
    if noise is None:
        return values_of(codes_of(scaled, E2M1), E2M1)
    scaled = np.clip(scaled, np.float32(-6), np.float32(6))
    power = np.maximum(np.exp2(np.frexp(scaled)[1] - 1).astype(F32), np.float32(1))
    step = power * np.float32(0.5)
    centred = (noise.astype(F32) + np.float32(0.5)) / np.float32(65536) - np.float32(0.5)
    return np.copysign(np.rint((scaled + centred * step) / step) * step, scaled)


def _squared_error(q: Array, x: Array, scale: Array, up: np.float32) -> Array:
    squares = np.square(q * scale - x * up)
    lanes = np.zeros(squares.shape[:-1], F32)
    for j in range(squares.shape[-1]):
        lanes = lanes + squares[..., j]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    return lanes[..., None]


def rounded_to_bf16(x: Array) -> Array:
    return x.astype(BF16).astype(F32)
