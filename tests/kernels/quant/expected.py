"""What quantised weights must be: loops over blocks in plain NumPy, apart from the package."""

import hashlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from surogate.kernels.arrays import BF16
from surogate.kernels.quant.nf4 import DYNAMIC_MAP
from tests.oracle import normal, to_host

F32 = np.float32
NF4_TABLE = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    F32,
)


def weight(shape: tuple[int, int], dtype: str = "bfloat16") -> np.ndarray:
    """Of a model's size, with a block of zeros at the start."""
    out = (normal("float32", shape) * F32(0.02)).astype(BF16 if dtype == "bfloat16" else F32)
    out[: min(shape[0], 64), : min(shape[1] // 2, 64)] = 0
    return out


def ramp(outer: int, inner: int) -> np.ndarray:
    """Weights that any library makes alike: integers, shaped."""
    i = np.arange(outer * inner, dtype=np.int64)
    x = ((i * 40503) % 65536 - 32768) / 32768.0
    return (x**3 * 0.05).astype(F32).reshape(outer, inner).astype(BF16)


def sha(x: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(to_host(x)).tobytes()).hexdigest()[:16]


def tiles(shape: tuple[int, int], block: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    for row in range(0, shape[0], block[0]):
        for column in range(0, shape[1], block[1]):
            yield slice(row, row + block[0]), slice(column, column + block[1])


def expected_fp8(w: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, values; a loop over blocks."""
    codes, values = np.zeros(w.shape, np.uint8), np.zeros(w.shape, BF16)
    grid = -(-w.shape[0] // side), -(-w.shape[1] // side)
    scales = []
    for tile in tiles(w.shape, (side, side)):
        x = w[tile].astype(F32)
        amax = np.abs(x).max()
        scale, factor = (amax / F32(448), F32(448) / amax) if amax else (F32(1), F32(1))
        q = np.clip(x * factor, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        codes[tile], values[tile] = q.view(np.uint8), (q.astype(F32) * scale).astype(BF16)
        scales.append(scale)
    return codes, np.array(scales, F32).reshape(grid), values


def expected_nf4(w: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    flat, codes, absmax, values = w.reshape(-1).astype(F32), [], [], []
    for start in range(0, flat.size, block):
        x = flat[start : start + block]
        size = np.abs(x).max()
        scaled = x * (F32(1) / size) if size else np.zeros_like(x)
        distance = np.abs(scaled[:, None].astype(np.float64) - NF4_TABLE.astype(np.float64))
        codes.append(distance.argmin(axis=1))  # of two as near, the lower
        values.append(NF4_TABLE[codes[-1]] * size)
        absmax.append(size)
    code = np.concatenate([*codes, [7] * (flat.size % 2)]).astype(np.uint8)
    packed = code[0::2] << 4 | code[1::2]
    return packed, np.array(absmax, F32), np.concatenate(values).reshape(w.shape).astype(BF16)


def expected_nested(absmax: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """8-bit codes, nested scales, offset, and the absmax that they stand for."""
    offset = F32(absmax.astype(np.float64).mean())
    codes, scales, values = [], [], []
    for start in range(0, absmax.size, 256):
        x = absmax[start : start + 256] - offset
        size = np.abs(x).max()
        scaled = x * (F32(1) / size) if size else np.zeros_like(x)
        code = np.abs(scaled[:, None].astype(np.float64) - DYNAMIC_MAP).argmin(axis=1)
        codes.append(code)
        scales.append(size)
        values.append(DYNAMIC_MAP[code] * size + offset)
    return (
        np.concatenate(codes).astype(np.uint8),
        np.array(scales, F32),
        np.array([offset], F32),
        np.concatenate(values),
    )


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def expected_nvfp4(
    w: np.ndarray, rows: int, *, limit: float = 448, target: float = 6
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes (one a byte), block scales, tensor scale, values. ``limit`` is the largest scale of a
    block whose largest value is on 6; the scales are those that put it on ``target``.
    """
    codes, values = np.zeros(w.shape, np.uint8), np.zeros(w.shape, BF16)
    scales = np.zeros((w.shape[0], w.shape[1] // 16), np.uint8)
    amax = np.abs(w.astype(F32)).max()
    encoding = F32(6 * limit) / amax if amax else F32(1)
    decoding = F32(1) / encoding
    for tile in tiles(w.shape, (rows, 16)):
        x = w[tile].astype(F32)
        wanted = np.abs(x).max() * (encoding * (F32(1) / F32(6))) * F32(6 / target)
        scale = min(wanted, F32(448)).astype(ml_dtypes.float8_e4m3fn)
        used = F32(scale) * decoding
        factor = min(F32(1) / used, np.finfo(F32).max) if used else np.finfo(F32).max
        size = np.minimum(np.abs(x * factor), 6).astype(np.float64)
        gap = np.abs(size[..., None] - E2M1_VALUES)
        near = gap == gap.min(axis=-1, keepdims=True)
        even = near & (np.arange(8) % 2 == 0)
        code = np.where(even.any(axis=-1), even.argmax(axis=-1), near.argmax(axis=-1))
        signed = np.where(np.signbit(x), code | 8, code)
        decoded = np.where(np.signbit(x), -1, 1) * E2M1_VALUES[code]
        codes[tile], values[tile] = signed, (decoded.astype(F32) * used).astype(BF16)
        scales[tile[0], tile[1].start // 16] = scale.view(np.uint8)
    return codes, scales, np.array([decoding], F32), values


def expected_four_over_six(
    w: np.ndarray, rows: int
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Codes, scales and squared errors with the largest value of each block on 6 and on 4, and the
    tensor scale. Errors in float64, at each scale.
    """
    casts = [expected_nvfp4(w, rows, limit=256, target=target) for target in (6, 4)]
    errors = []
    for codes, scales, tensor_scale, _ in casts:
        value = np.where(codes & 8, -1, 1) * E2M1_VALUES[codes & 7]
        wide = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, axis=1)
        error = np.square(value * wide * float(tensor_scale[0]) - w.astype(np.float64))
        error = error.reshape(w.shape[0], -1, 16).sum(axis=2)
        for row in range(0, w.shape[0], rows):
            error[row : row + rows] = error[row : row + rows].sum(axis=0)
        errors.append(error)
    return [c[0] for c in casts], [c[1] for c in casts], casts[0][2], errors
