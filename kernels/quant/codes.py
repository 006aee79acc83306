"""The narrow number formats and their codes: E4M3, E5M2, E2M1, E8M0 and NF4.

    format  sign.exponent.mantissa  largest    smallest      beside numbers
    E4M3    1.4.3, bias 7           448        2^-9          NaN
    E5M2    1.5.2, bias 15          57344      2^-16         infinities, NaN
    E2M1    1.2.1, bias 1           6          0.5           nothing
    E8M0    0.8.0, bias 127         2^127      2^-127        NaN; no sign, no zero: a scale
    NF4     a table of 16 in [-1, 1]: quantiles of a normal distribution, of which 0 and 1 are two

Sources: E4M3 (its "fn" variant) and E5M2, Micikevicius et al. 2022 (arXiv 2209.05433); E2M1 and
E8M0, the OCP Microscaling specification 1.0; NF4, Dettmers et al. 2023 (arXiv 2305.14314).

To nearest, ties go to the even code. Values past the largest become the largest, infinities too: a
format's own infinity is only ever read. E8M0 goes up to the next power of two, so that what is
divided by the scale fits. NF4 takes the nearest value, the lower one of two.

NaN keeps its code in the 8-bit formats. E2M1 and NF4 have none: NaN becomes 6 and 0, so whoever
casts to them looks for NaN before.

Codes are uint8 on host and card, as CuPy has no dtype of these formats; on the host
``codes.view(format.dtype)`` is an array of ml-dtypes. Codes of 4 bits lie two in a byte along the
last axis: the first element in the low half, as all formats of E2M1 have it; for NF4 in the high
half, as bitsandbytes has it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, UInt8, UInt16, UInt32

from surogate.kernels.arrays import F32, Array, empty, on_device, require
from surogate.kernels.nvrtc import THREADS, Source, ctype
from surogate.kernels.rounding import GROUP, random_bits


@dataclass(frozen=True)
class Format:
    """A number format. ``mantissa`` is None where no value has a fraction to round."""

    name: str
    bits: int
    max: float
    dtype: np.dtype
    """What ml-dtypes calls it; NF4's codes have no dtype."""
    mantissa: int | None = None
    bias: int = 0


E4M3 = Format("E4M3", 8, 448.0, np.dtype(ml_dtypes.float8_e4m3fn), 3, 7)
E5M2 = Format("E5M2", 8, 57344.0, np.dtype(ml_dtypes.float8_e5m2), 2, 15)
E2M1 = Format("E2M1", 4, 6.0, np.dtype(ml_dtypes.float4_e2m1fn), 1, 1)
E8M0 = Format("E8M0", 8, 2.0**127, np.dtype(ml_dtypes.float8_e8m0fnu))
NF4 = Format("NF4", 4, 1.0, np.dtype(np.uint8))
FORMATS = (E4M3, E5M2, E2M1, E8M0, NF4)

_NF4_NEGATIVE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495),
)
_NF4_POSITIVE = (
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_VALUES = np.array([*_NF4_NEGATIVE, 0, *_NF4_POSITIVE], np.float32)
NF4_ZERO = 7

_ROUNDED = (E4M3, E5M2, E2M1)
SOURCE = Source(
    "quant_codes",
    {
        "encode_codes": [
            (format.name, dtype, draws)
            for format in FORMATS
            for dtype in ("float", "bf16")
            for draws in (("false", "true") if format in _ROUNDED else ("false",))
        ],
        "decode_codes": [(format.name,) for format in FORMATS],
    },
)


class Stochastic(NamedTuple):
    """Which random bits round: those of ``rounding.random_bits``, that explains the fields."""

    seed: int
    step: int
    tensor: int
    role: int
    first: int = 0


def encode(
    x: Float[Array, "*shape columns"], format: Format, *, stochastic: Stochastic | None = None
) -> UInt8[Array, "*shape bytes"]:
    """Codes of float32 or bfloat16 values: a byte each, or two of 4 bits in a byte.

    To nearest, or with ``stochastic`` up in magnitude with the probability of the distance to the
    lower neighbour, in steps of 2^-16; then E4M3, E5M2 and E2M1 alone. Raises ValueError for an odd
    number of columns of 4 bits.
    """
    require(
        format.bits == 8 or x.shape[-1] % 2 == 0,
        f"encode: {format.name} packs two codes a byte and needs an even number of columns, "
        f"got {x.shape[-1]}",
    )
    require(
        stochastic is None or format.mantissa is not None,
        f"encode: {format.name} has no stochastic rounding",
    )
    if not on_device(x):
        with np.errstate(invalid="ignore"):  # a signalling NaN is passed on, not reported
            wide = x.astype(F32)
        return pack(codes_of(wide, format, stochastic), format)
    require(x.flags.c_contiguous, "encode: x must be C-contiguous")
    shape = (*x.shape[:-1], x.shape[-1] * format.bits // 8)
    codes = empty(shape, np.uint8, like=x)
    draw = stochastic or Stochastic(0, 0, 0, 0)
    require(draw.first % GROUP == 0, f"encode: first must be a multiple of {GROUP}")
    words = [np.uint32(word & 0xFFFFFFFF) for word in draw[:4]]
    if x.size:
        types = (format.name, ctype(x.dtype), "false" if stochastic is None else "true")
        arguments = [codes, x, np.int64(x.size), *words, np.int64(draw.first)]
        SOURCE.launch("encode_codes", types, -(-x.size // (THREADS * GROUP)), THREADS, arguments)
    return codes


def decode(codes: UInt8[Array, "*shape bytes"], format: Format) -> Float32[Array, "*shape columns"]:
    """The values of codes, exactly."""
    if not on_device(codes):
        return values_of(unpack(codes, format), format)
    require(codes.flags.c_contiguous, "decode: codes must be C-contiguous")
    x = empty((*codes.shape[:-1], codes.shape[-1] * 8 // format.bits), F32, like=codes)
    if x.size:
        grid = -(-x.size // (THREADS * GROUP))
        SOURCE.launch("decode_codes", (format.name,), grid, THREADS, [x, codes, np.int64(x.size)])
    return x


def pack(codes: UInt8[Array, "*shape columns"], format: Format) -> UInt8[Array, "*shape bytes"]:
    """A code a byte to bytes of a format, on the host."""
    if format.bits == 8:
        return codes
    first, second = codes[..., 0::2], codes[..., 1::2]
    return first << 4 | second if format is NF4 else first | second << 4


def unpack(codes: UInt8[Array, "*shape bytes"], format: Format) -> UInt8[Array, "*shape columns"]:
    """The other way."""
    if format.bits == 8:
        return codes
    halves = (codes >> 4, codes & 15) if format is NF4 else (codes & 15, codes >> 4)
    return np.stack(halves, axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def codes_of(
    x: Float32[Array, "*shape"], format: Format, stochastic: Stochastic | None = None
) -> UInt8[Array, "*shape"]:
    """The host's ``encode`` before packing: a code a byte."""
    if format is E8M0:
        return _power_above(x)
    if format is NF4:
        middles = (NF4_VALUES[1:] + NF4_VALUES[:-1]) * np.float32(0.5)
        found = np.searchsorted(middles, x, side="left")
        return np.where(np.isnan(x), NF4_ZERO, found).astype(np.uint8)
    if stochastic is not None:
        bits = random_bits(x.size, **stochastic._asdict()).reshape(x.shape)
        return _neighbour(x, format, bits)
    number = np.where(np.isnan(x), np.float32(0), np.clip(x, -format.max, format.max))
    codes = number.astype(format.dtype).view(np.uint8)
    return np.where(np.isnan(x), _not_a_number(format), codes).astype(np.uint8)


def values_of(codes: UInt8[Array, "*shape"], format: Format) -> Float32[Array, "*shape"]:
    """The host's ``decode`` of one code a byte."""
    if format is NF4:
        return NF4_VALUES[codes]
    return codes.view(format.dtype).astype(np.float32)


def sum_of_squares(x: Float32[Array, "*shape values"]) -> Float32[Array, "*shape"]:
    """Of the last axis, one after the other with fused operations: the bits of the kernels.

    A fused operation rounds total + x^2 once. In float64 the square is exact, and the sum is
    rounded to an odd last bit where it is not (Boldo and Melquiond 2008), so that the rounding to
    float32 sees on which side of a tie it was.
    """
    total = np.zeros(x.shape[:-1], F32)
    for j in range(x.shape[-1]):
        square, wide = np.square(x[..., j].astype(np.float64)), total.astype(np.float64)
        near = square + wide
        back = near - square
        lost = (square - (near - back)) + (wide - back)
        inexact = (lost != 0) & ((near.view(np.int64) & 1) == 0)
        total = np.where(inexact, np.nextafter(near, lost * np.inf), near).astype(F32)
    return total


def _not_a_number(format: Format) -> int:
    return 0x7F if format.bits == 8 else 7


def _power_above(x: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    word = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    exponent, rest = word >> 23, word & np.uint32(0x7FFFFF)
    up = np.where(exponent > 0, rest > 0, rest > 0x400000)
    codes = np.minimum(exponent + up, 0xFE)
    codes = np.where(word > 0x7F800000, 0xFF, codes)
    return np.where(x == 0, 0, codes).astype(np.uint8)


def _neighbour(
    x: Float32[Array, "*shape"], format: Format, bits: UInt16[Array, "*shape"]
) -> UInt8[Array, "*shape"]:
    """The code below |x|, or the one above when bits / 2^16 is less than the way there.

    Codes of one sign are in the order of their values, so the next is one more. In float64, where
    every step is exact.
    """
    assert format.mantissa is not None
    size = np.where(np.isnan(x), 0, np.minimum(np.abs(x), format.max)).astype(np.float64)
    least = 1 - format.bias
    exponent = np.maximum(np.frexp(size)[1] - 1, least, where=size > 0, out=np.full(x.shape, least))
    units = np.ldexp(size, format.mantissa - exponent)
    up = bits / 65536.0 < units - np.floor(units)
    binades: UInt32[Array, "*shape"] = (exponent - least).astype(np.uint32) << format.mantissa
    codes = np.floor(units).astype(np.uint32) + up + binades
    signed = np.where(np.signbit(x), codes | (1 << (format.bits - 1)), codes)
    return np.where(np.isnan(x), _not_a_number(format), signed).astype(np.uint8)
