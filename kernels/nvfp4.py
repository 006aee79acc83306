"""NVFP4 (NVIDIA 2025, arXiv 2509.25149): 4-bit numbers with two levels of scales.

A matrix is cut along the axis that a product sums over, into blocks of 16 values. With amax the
largest magnitude of the matrix, and most that of a block:

    up    = target * limit / amax                 float32, one a matrix
    scale = E4M3(most * up / target)              one a block
    q     = E2M1(x * up / scale)                  x is about  q * scale * amax / (target * limit)

target is what a block's largest value becomes, limit the largest scale:

    to nearest        6, 448       the ends of E2M1 and of E4M3
    four over six     6, 256       (arXiv 2512.02010) a block takes one of two scales: one puts its
                                   largest value on 6, the other, of 1.5 times that, on 4. The one
                                   with the smaller sum of squared errors after all roundings, and
                                   the first if they are equal
    stochastic        96/17, 448   a scale that is rounded down, by 1/17 at most, then leaves
                                   nothing above 6 to be clipped: q is unbiased. Subnormal scales
                                   are rounded up for the same end. 16 random bits an element:
                                   x is first rounded to 2^-16 of a step

up is 1 if amax is inf, NaN or at most 2^-104: what is so small becomes zeros. A scale of zero (most
is below 2.2e-6 of amax) has codes of zero; four over six then takes the other scale. Blocks are
1x16, or 16x16 for weights: then the cast of the transpose is the transpose of the cast, bit for
bit.

Both operands of a weight gradient are cast along tokens after x -> R x in groups of 16 tokens, with
R = H16 diag(signs) / 4, H16 Sylvester's Hadamard matrix: as R^T R = 1 it cancels in the product,
and spreads an outlier over its block. 4 R x is rounded to bf16; amax is that of R x.

Emulation. q * scale is exact in bf16 and a product of two such numbers in float32, so a bf16
product of ``values`` times alpha = amax_a amax_b / (range_a range_b), range = target * limit, is
the product of the recipe on any card, up to the order of its sums.

Not a number. E2M1 has no NaN and a maximum skips it, so that a step which diverged would look well.
Here the maximum is of the bits: amax is inf or NaN if x holds one, alpha and the product are not
finite, and so is the gradient norm, by which the optimizer leaves the step out.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import BFloat16, Float, Float32, UInt8, UInt32

from surogate.kernels.arrays import (
    BF16,
    F32,
    Array,
    describe,
    empty,
    on_device,
    require,
    row_stride,
    rows_aligned,
    zeros,
)
from surogate.kernels.card import multiprocessors
from surogate.kernels.nvfp4_host import (
    BLOCK,
    FOUR_OVER_SIX,
    NEAREST,
    STOCHASTIC,
    Scaling,
    quantise,
    scale_bytes,
    tile_scales,
    transformed,
    untile_scales,
)
from surogate.kernels.nvfp4_host import amax as host_amax
from surogate.kernels.nvrtc import THREADS, Source
from surogate.kernels.quant.codes import E2M1, E4M3, codes_of, pack, unpack, values_of
from surogate.kernels.rounding import random_bits

TOKENS = 32  # a cast along tokens is padded with zeros to a multiple: 16 bytes of codes
PANEL_ROWS, PANEL_COLUMNS = 16, 64  # as nvfp4.cu has them, and the next two lines
TOKEN_COLUMNS, SPAN = 64, 256
# Thread blocks of a multiprocessor: along rows, where little or much is kept; along tokens, of
# four over six, of stochastic rounding, and else.
RESIDENT, TOKEN_RESIDENT = {False: 4, True: 3}, (2, 3, 4)
# A warp walks over three panels at least, where there are so many. Casts that wait for memory are
# best so: longer walks leave the rows that are read at a time far apart.
WALK = 2.9
PHILOX_ROUNDS = 7  # of the random bits: the least that pass the tests of randomness
SIGNS = 0xD7E8  # of the Hadamard transform: bit i set changes the sign of token i of each 16
ALONG_COLUMNS, ALONG_TOKENS = 3, 4  # roles of random bits, beside those of rounding.py
_BOTH = (False, True)
_FORMS = ((False, False), (True, False), (False, True))  # four over six, stochastic


def _types(*flags: bool) -> tuple[str, ...]:
    """Template arguments."""
    return tuple("true" if flag else "false" for flag in flags)


SOURCE = Source(
    "nvfp4",
    {
        "nvfp4_rows": [
            _types(tall, four, stochastic, values)
            for tall in _BOTH
            for four, stochastic in _FORMS
            for values in _BOTH
            if not (tall and stochastic)
        ],
        **{
            kernel: [
                _types(transform, four, stochastic)
                for transform in _BOTH
                for four, stochastic in _FORMS
            ]
            for kernel in ("nvfp4_tokens", "nvfp4_token_codes")
        },
        "nvfp4_amax": [_types(transform) for transform in _BOTH],
        "nvfp4_alpha": [()],
        "nvfp4_transpose": [()],
    },
)


class Draw(NamedTuple):
    """Random bits of a cast: a function of these and of an element's place in the matrix.

    ``key`` is (seed, step), beside the matrix, so that a captured graph draws anew when they are
    written; a step that casts a tensor twice, as micro-batches do, needs two of them. ``first`` is
    the number of the first token among those of all ranks, a multiple of 16.
    """

    key: UInt32[Array, "2"]
    tensor: int = 0
    first: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Nvfp4:
    """A cast matrix [rows, inner] with blocks along inner.

    Emulated, it has ``values`` = q * scale, [inner, rows] if ``transposed``, else [rows, inner].
    Native, it has ``codes`` (the first of two in the low half of a byte) and ``scales``
    (``tile_scales``).
    """

    rows: int
    inner: int
    range: float
    amax: Float32[Array, "1"]
    values: BFloat16[Array, "outer columns"] | None = None
    codes: UInt8[Array, "rows bytes"] | None = None
    scales: UInt8[Array, " tiled"] | None = None
    transposed: bool = False


def nvfp4_amax(
    x: Float[Array, "tokens columns"], *, signs: int | None = None
) -> Float32[Array, " one_or_two"]:
    """Returns [max |x|], or with ``signs`` also that of x after the transform along tokens.

    What is not finite makes them inf or NaN. One pass over x; the order of blocks has no effect.
    """
    tokens, columns = _check("nvfp4_amax", x)
    if not on_device(x):
        return host_amax(x, signs)
    most = zeros((1 if signs is None else 2,), F32, like=x)
    wide = PANEL_COLUMNS if signs is None else TOKEN_COLUMNS
    panels = -(-tokens // PANEL_ROWS) * -(-columns // wide)
    grid = min(8 * multiprocessors(), -(-panels // (THREADS // 32)))
    if grid:
        args = [most, x, row_stride("x", x), tokens, columns, np.uint32(signs or 0)]
        SOURCE.launch("nvfp4_amax", _types(signs is not None), grid, THREADS, args)
    return most


def nvfp4_cast(
    x: Float[Array, "tokens columns"],
    amax: Float32[Array, "1"],
    *,
    emulated: bool,
    tall: bool = False,
    four_over_six: bool = False,
    draw: Draw | None = None,
    out: Nvfp4 | None = None,
) -> Nvfp4:
    """Returns the cast of x with blocks along its columns, of which there must be a multiple of 16.

    Args:
        amax: of x: ``nvfp4_amax(x)[:1]``. What is larger is clipped.
        emulated: write values, else codes and scales.
        tall: blocks are 16x16, and the rows a multiple of 16; else 1x16.
        draw: round stochastically with these random bits.
        out: a cast of the same shape and kind, whose arrays are written.
    """
    rows, columns = _check("nvfp4_cast", x)
    scaling = _scaling("nvfp4_cast", four_over_six, draw)
    require(
        not tall or (rows % BLOCK == 0 and draw is None),
        f"nvfp4_cast: 16x16 blocks take rows in multiples of 16 and no draw, got {rows} rows",
    )
    cast = out or _blank(x, rows, columns, amax, scaling, emulated, transposed=False)
    if not on_device(x):
        noise = None
        if draw is not None:
            noise = _bits(draw, rows * columns, draw.first * columns, ALONG_COLUMNS)
        q, scale = quantise(
            x.astype(F32), noise, amax, scaling, tall=tall, four_over_six=four_over_six
        )
        return _host_store(cast, q, scale)
    types = _types(tall, four_over_six, draw is not None, cast.codes is None)
    if x.size:
        args = [
            cast.values, cast.codes, cast.scales, x, row_stride("x", x), amax,
            *_draw_arguments(draw, ALONG_COLUMNS), rows, columns, *_scaling_arguments(scaling),
        ]  # fmt: skip
        grid = _grid(rows, columns, RESIDENT[tall and four_over_six], short=True)
        SOURCE.launch("nvfp4_rows", types, grid, THREADS, args)
    return cast


def nvfp4_cast_tokens(
    x: Float[Array, "tokens columns"],
    amax: Float32[Array, "1"],
    *,
    emulated: bool,
    signs: int | None = SIGNS,
    four_over_six: bool = False,
    draw: Draw | None = None,
    out: Nvfp4 | None = None,
) -> Nvfp4:
    """Returns the cast of x^T: [columns, tokens], with 1x16 blocks along the tokens; in ``out``
    where given.

    Tokens of zero are added up to a multiple of 32. ``amax`` is that of the transformed x,
    ``nvfp4_amax(x, signs=signs)[1:]``; without ``signs`` there is no transform. The rest is as
    ``nvfp4_cast`` has it.
    """
    tokens, columns = _check("nvfp4_cast_tokens", x)
    scaling = _scaling("nvfp4_cast_tokens", four_over_six, draw)
    padded = -(-tokens // TOKENS) * TOKENS
    cast = out or _blank(x, columns, padded, amax, scaling, emulated, transposed=True)
    if not on_device(x):
        wide = np.zeros((padded, columns), F32)
        wide[:tokens] = x
        noise = None
        if draw is not None:
            bits = _bits(draw, padded * columns, draw.first * columns, ALONG_TOKENS)
            noise = bits.reshape(padded // 8, columns, 8).transpose(1, 0, 2)
        if signs is not None:  # four times the transform
            wide, amax = transformed(wide, signs), amax * np.float32(4)
        found = quantise(wide.T, noise, amax, scaling, tall=None, four_over_six=four_over_six)
        return _host_store(cast, *found)
    types = _types(signs is not None, four_over_six, draw is not None)
    if padded and columns:
        args = [
            x, row_stride("x", x), amax, *_draw_arguments(draw, ALONG_TOKENS),
            np.uint32(signs or 0), tokens, padded, columns, *_scaling_arguments(scaling),
        ]  # fmt: skip
        if cast.codes is None:
            form = 0 if four_over_six else 1 if draw is not None else 2
            grid = _grid(padded, columns, TOKEN_RESIDENT[form], short=form == 2)
            SOURCE.launch("nvfp4_tokens", types, grid, THREADS, [cast.values, *args])
        else:
            spans = (-(-columns // TOKEN_COLUMNS), -(-padded // SPAN))
            results = [cast.codes, cast.scales]
            SOURCE.launch("nvfp4_token_codes", types, spans, THREADS, [*results, *args])
    return cast


def nvfp4_transpose(cast: Nvfp4, *, out: Nvfp4 | None = None) -> Nvfp4:
    """Returns the cast of the transpose, of a matrix that was cast in 16x16 blocks.

    Values are shared, codes are turned (into those of ``out``). Raises ValueError unless rows and
    inner are multiples of 16.
    """
    rows, inner = cast.rows, cast.inner
    require(
        rows % BLOCK == 0 and inner % BLOCK == 0,
        f"nvfp4_transpose: rows and inner must be multiples of 16, got {rows} and {inner}",
    )
    if cast.codes is None:
        return Nvfp4(
            inner, rows, cast.range, cast.amax, cast.values, transposed=not cast.transposed
        )
    if out is None:
        codes, scales = _code_arrays(inner, rows, like=cast.codes)
        out = Nvfp4(inner, rows, cast.range, cast.amax, None, codes, scales)
    assert cast.scales is not None and out.codes is not None and out.scales is not None
    if on_device(cast.codes):
        args = [out.codes, out.scales, cast.codes, cast.scales, rows, inner]
        grid = (-(-inner // 64), -(-rows // 64))
        SOURCE.launch("nvfp4_transpose", (), grid, THREADS, args)
        return out
    out.codes[...] = pack(np.ascontiguousarray(unpack(cast.codes, E2M1).T), E2M1)
    scales = untile_scales(cast.scales, rows, inner // BLOCK)[::BLOCK]
    out.scales[...] = tile_scales(np.repeat(scales.T, BLOCK, axis=0))
    return out


def nvfp4_decode(cast: Nvfp4) -> Float32[Array, "rows inner"]:
    """The values that a cast on the host stands for, in float32 (rounded once)."""
    if cast.codes is None:
        assert cast.values is not None
        values = (cast.values.T if cast.transposed else cast.values).astype(F32)
    else:
        assert cast.scales is not None
        scales = untile_scales(cast.scales, cast.rows, cast.inner // BLOCK)
        values = values_of(unpack(cast.codes, E2M1), E2M1)
        values = values * np.repeat(values_of(scales, E4M3), BLOCK, axis=1)
    return values * (cast.amax / F32.type(cast.range))


def nvfp4_ref(
    x: Float32[Array, "rows columns"], *, amax: float, scaling: Scaling = NEAREST
) -> Float32[Array, "rows columns"]:
    """Reference of nvfp4_cast to nearest with 1x16 blocks on 6: what x becomes."""
    up = np.float32(scaling.range) / np.float32(amax)
    blocks = x.reshape(-1, BLOCK)
    most = np.abs(blocks).max(axis=1, keepdims=True)
    ideal = most * (up * np.float32(1 / scaling.target))
    scale = ideal.astype(E4M3.dtype).astype(F32)
    down = scale * (np.float32(1) / up)
    ratio = np.divide(np.float32(1), down, out=np.zeros_like(scale), where=scale > 0)
    q = np.clip(blocks * ratio, -6, 6).astype(E2M1.dtype).astype(F32)
    return (q * scale / up).reshape(x.shape)


def _check(name: str, x: Array) -> tuple[int, int]:
    """The host takes float32 too."""
    require(x.dtype == BF16 or not on_device(x), f"{name}: x must be bfloat16, got {describe(x)}")
    require(
        x.shape[1] % BLOCK == 0 and rows_aligned(x),
        f"{name}: x must have columns in multiples of 16, and rows that begin at multiples of 16 "
        f"bytes, got {describe(x)} with strides {x.strides}",
    )
    return x.shape


def _scaling(name: str, four_over_six: bool, draw: Draw | None) -> Scaling:
    require(
        not (four_over_six and draw is not None),
        f"{name}: four_over_six rounds to nearest and takes no draw",
    )
    require(draw is None or draw.first % BLOCK == 0, f"{name}: draw.first must be a multiple of 16")
    return STOCHASTIC if draw is not None else FOUR_OVER_SIX if four_over_six else NEAREST


def _draw_arguments(draw: Draw | None, role: int) -> list[object]:
    if draw is None:
        return [None, np.uint32(0), np.uint32(role), np.int64(0)]
    return [draw.key, np.uint32(draw.tensor), np.uint32(role), np.int64(draw.first)]


def _grid(rows: int, columns: int, resident: int, *, short: bool) -> int:
    """Thread blocks whose warps walk over the panels of a matrix: as many as there is room for at
    once, or that twice, four times and so on, while walks are not too ``short``.
    """
    panels = -(-rows // PANEL_ROWS) * -(-columns // PANEL_COLUMNS)
    most, blocks = -(-panels // (THREADS // 32)), resident * multiprocessors()
    while short and most >= 2 * WALK * blocks:
        blocks *= 2
    return min(blocks, most)


def _scaling_arguments(scaling: Scaling) -> list[float]:
    return [scaling.range, 1.0 / scaling.target]


def _code_arrays(rows: int, inner: int, *, like: Array) -> tuple[Array, Array]:
    size = scale_bytes(rows, inner // BLOCK)
    return empty((rows, inner // 2), np.uint8, like=like), zeros((size,), np.uint8, like=like)


def _blank(
    x: Array, rows: int, inner: int, amax: Array, scaling: Scaling, emulated: bool, transposed: bool
) -> Nvfp4:
    if emulated:
        values = empty((inner, rows) if transposed else (rows, inner), BF16, like=x)
        return Nvfp4(rows, inner, scaling.range, amax, values, transposed=transposed)
    return Nvfp4(rows, inner, scaling.range, amax, None, *_code_arrays(rows, inner, like=x))


def _bits(draw: Draw, size: int, first: int, role: int) -> Array:
    seed, step = (int(word) for word in draw.key)
    return random_bits(
        size,
        seed=seed,
        step=step,
        tensor=draw.tensor,
        role=role,
        first=first,
        rounds=PHILOX_ROUNDS,
    )


def _host_store(cast: Nvfp4, q: Array, scale: Array) -> Nvfp4:
    """Writes a result of quantise."""
    if cast.values is not None:
        values = (q * scale).astype(BF16)
        cast.values[...] = values.T if cast.transposed else values
    else:
        assert cast.codes is not None and cast.scales is not None
        cast.codes[...] = pack(codes_of(q, E2M1), E2M1)
        cast.scales[...] = tile_scales(codes_of(np.ascontiguousarray(scale[:, ::BLOCK]), E4M3))
    return cast
