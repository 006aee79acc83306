"""NVFP4 casts: published blocks, the formulas, host against kernel to the bit, invariants."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate.kernels.arrays import BF16
from surogate.kernels.nvfp4 import (
    SIGNS,
    Draw,
    Nvfp4,
    nvfp4_amax,
    nvfp4_cast,
    nvfp4_cast_tokens,
    nvfp4_decode,
    nvfp4_ref,
    nvfp4_transpose,
)
from surogate.kernels.nvfp4_host import (
    FOUR_OVER_SIX,
    NEAREST,
    STOCHASTIC,
    hadamard,
    scale_bytes,
    scale_offset,
    tile_scales,
    untile_scales,
)
from surogate.kernels.quant.codes import E2M1, unpack
from tests.emulator.launch import emulated
from tests.oracle import normal, same_bits, to_device, to_host

WORKED = [0.11, -0.42, 0.9, 2.5, -3.1, 0.05, 0, -0.0, 1.2, -1.6, 0.7, -0.3, 4.4, 0.25, -2.2, 0.6]
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3_VALUES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
KEY = np.array([11, 3], np.uint32)


def bf16(values) -> np.ndarray:
    return np.asarray(values, np.float32).astype(BF16)


def host(cast: Nvfp4) -> Nvfp4:
    """A cast on any device as one on the host."""
    arrays = (None if x is None else to_host(x) for x in (cast.values, cast.codes, cast.scales))
    return Nvfp4(cast.rows, cast.inner, cast.range, to_host(cast.amax), *arrays, cast.transposed)


def same_cast(one: Nvfp4, other: Nvfp4) -> None:
    for name in ("values", "codes", "scales"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        if a is not None:
            same_bits(a, b)


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The value of an ascending grid that is nearest to each x >= 0, of two the one of even index:
    by looking at all distances in float64.
    """
    distance = np.abs(np.asarray(x, np.float64)[..., None] - grid)
    best = distance.min(axis=-1, keepdims=True)
    odd = np.arange(len(grid)) % 2
    return grid[np.argmin(np.where(distance == best, odd, 2), axis=-1)]


def oracle_cast(x: np.ndarray, amax: float, target: float, limit: float) -> np.ndarray:
    """Rows of blocks, cast with the block's largest value on ``target``, decoded.

    Scales and quotients in float32 and in the published order, roundings by looking for the nearest
    value of the grid.
    """
    one, up = np.float32(1), np.float32(target * limit) / np.float32(amax)
    most = np.abs(x.astype(np.float32)).max(axis=-1, keepdims=True)
    scale = nearest(most * (up * np.float32(1 / target)), E4M3_VALUES).astype(np.float32)
    product = np.where(scale > 0, scale * (one / up), one)
    size = np.abs(x.astype(np.float32)) * np.where(scale > 0, one / product, np.float32(0))
    return np.sign(x) * nearest(size, GRID) * scale / up.astype(np.float64)


@pytest.mark.parametrize("tensor_amax,scale", [(4.4, 0x7E), (35.2, 0x66)])
def test_the_published_block(tensor_amax, scale, device):
    # The block in float32, as published, is not exact in bf16: its codes are nevertheless these.
    x = to_device(bf16([WORKED]), device)
    amax = to_device(np.array([tensor_amax], np.float32), device)
    cast = host(nvfp4_cast(x, amax, emulated=False))
    assert cast.codes.tobytes().hex(" ").upper() == "90 52 0E 80 C3 92 17 2D"
    assert cast.scales.reshape(-1)[0] == scale and not cast.scales[1:].any()


def test_four_over_six_of_the_paper(device):
    """30 of (10, 20, 30, 40) falls in the gap between 4 and 6 when 40 is on 6."""
    x = to_device(bf16([[10, 20, 30, 40] * 4]), device)
    amax = nvfp4_amax(x)
    on_six = nvfp4_decode(host(nvfp4_cast(x, amax, emulated=True)))
    np.testing.assert_allclose(on_six[0, :4], [10, 20, 80 / 3, 40], rtol=1e-6)
    chosen = host(nvfp4_cast(x, amax, emulated=False, four_over_six=True))
    np.testing.assert_allclose(nvfp4_decode(chosen)[0, :4], [10, 20, 30, 40], rtol=1e-6)
    assert chosen.scales[0] == 0x7C  # 384


def test_four_over_six_of_normal_numbers():
    """Shares and errors that numerics publishes for N(0, 1)."""
    x = normal("bfloat16", (1 << 12, 256))
    amax, wide = nvfp4_amax(x), x.astype(np.float64)
    errors = {}
    for four in (False, True):
        cast = nvfp4_cast(x, amax, emulated=False, four_over_six=four)
        errors[four] = np.mean((nvfp4_decode(cast) - wide) ** 2)
    assert abs(errors[False] - 0.00904) < 0.0001 and abs(errors[True] - 0.00756) < 0.0001
    largest = unpack(cast.codes, E2M1).reshape(-1, 16) & 7
    share = np.mean(largest.max(axis=1) < 7)  # blocks whose largest value is on 4
    assert abs(share - 0.453) < 0.01


FINITE = st.floats(-(2.0**40), 2.0**40, width=32).map(lambda v: float(np.float32(v)))


@settings(max_examples=150, deadline=None)
@given(st.lists(FINITE, min_size=32, max_size=32), st.sampled_from([1.0, 2.0**-6, 2.0**-12]))
def test_four_over_six_is_never_worse(values, shrink):
    """Than the same tensor scale without the choice, whatever the size of the block."""
    x = bf16(values).reshape(2, 16)
    x[1] *= BF16.type(shrink)
    amax = nvfp4_amax(x)
    if not 1e-30 < amax[0]:
        return
    got = nvfp4_decode(nvfp4_cast(x, amax, emulated=False, four_over_six=True))
    wide = x.astype(np.float64)
    on_six = oracle_cast(wide, float(amax[0]), *FOUR_OVER_SIX)
    error, other = (((y - wide) ** 2).sum(axis=1) for y in (got, on_six))
    assert (error <= other * (1 + 1e-4) + 1e-12 * float(amax[0]) ** 2).all()


def test_four_over_six_keeps_blocks_that_the_scale_of_six_loses(device):
    """The scale of 6 is rounded to zero, 1.5 times that is not."""
    x = np.zeros((1, 32), BF16)
    x[0, 0], x[0, 16:] = 1, 6 * 2.0**-10.3 / FOUR_OVER_SIX.range
    x = to_device(x, device)
    cast = host(nvfp4_cast(x, nvfp4_amax(x), emulated=False, four_over_six=True))
    assert nvfp4_decode(cast)[0, 16:].all()


def test_a_tie_takes_six():
    """All values alike: on 6 and on 4 they are equally exact."""
    x = bf16(np.full((1, 16), 3.0))
    cast = nvfp4_cast(x, nvfp4_amax(x), emulated=False, four_over_six=True)
    assert cast.scales[0] == 0x78 and (cast.codes == 0x77).all()  # 256, and 6 twice


@pytest.mark.parametrize("seed", [0, 1])
def test_matches_the_formula(seed):
    """Against the oracle above, from large blocks to those whose scale is zero."""
    x = normal("bfloat16", (64, 64), seed=seed) * BF16.type(2.0 ** (20 * seed))
    x[:8] *= BF16.type(1e-6)
    amax = nvfp4_amax(x)
    want = oracle_cast(x.reshape(64, 4, 16), float(amax[0]), *NEAREST).reshape(64, 64)
    for got in (
        nvfp4_decode(nvfp4_cast(x, amax, emulated=True)),
        nvfp4_ref(x.astype(np.float32), amax=float(amax[0])),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6)


# Least, a panel, ragged, more panels than the emulated card has warps, two tiles.
SIZES = [(1, 16), (16, 64), (21, 80), (388, 144), (130, 32)]


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("how", ["nearest", "four over six", "stochastic", "tall", "tall four"])
@pytest.mark.parametrize("rows,columns", SIZES)
def test_kernel_gives_the_bits_of_the_host(rows, columns, how, emulate):
    tall = "tall" in how
    rows = -(-rows // 16) * 16 if tall else rows
    x = normal("bfloat16", (rows, columns), seed=1)
    x[:, :16] *= BF16.type(1e-6)  # zero and subnormal scales
    x[rows // 2 :, 16:32] *= BF16.type(1e-5)
    amax = nvfp4_amax(x)
    draw = Draw(KEY, tensor=5, first=32) if how == "stochastic" else None
    options = {"emulated": emulate, "tall": tall, "four_over_six": "four" in how, "draw": draw}
    want = nvfp4_cast(x, amax, **options)
    with emulated():
        same_bits(nvfp4_amax(x), amax)
        same_cast(nvfp4_cast(x, amax, **options), want)


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("how", ["nearest", "four over six", "stochastic"])
@pytest.mark.parametrize("signs", [None, SIGNS])
@pytest.mark.parametrize("tokens,columns", [(1, 16), (32, 64), (150, 80), (388, 144)])
def test_kernel_along_tokens_gives_the_bits_of_the_host(tokens, columns, signs, how, emulate):
    x = normal("bfloat16", (tokens, columns), seed=2)
    x[:16] *= BF16.type(1e-6)
    amax = nvfp4_amax(x, signs=SIGNS)
    draw = Draw(KEY, tensor=5, first=48) if how == "stochastic" else None
    options = {"signs": signs, "emulated": emulate, "four_over_six": "four" in how, "draw": draw}
    chosen = amax[:1] if signs is None else amax[1:]
    want = nvfp4_cast_tokens(x, chosen, **options)
    with emulated():
        same_bits(nvfp4_amax(x, signs=SIGNS), amax)
        same_cast(nvfp4_cast_tokens(x, chosen, **options), want)


def test_codes_and_values_are_one_cast(device):
    x = normal("bfloat16", (40, 48), device=device)
    amax = nvfp4_amax(x, signs=SIGNS)
    for cast in (
        lambda emulate: nvfp4_cast(x, amax[:1], emulated=emulate, four_over_six=True),
        lambda emulate: nvfp4_cast_tokens(x, amax[1:], emulated=emulate),
    ):
        same_bits(nvfp4_decode(host(cast(True))), nvfp4_decode(host(cast(False))))


def test_along_tokens_without_transform_is_the_cast_of_the_transpose(device):
    x = normal("bfloat16", (64, 48))
    amax = to_device(nvfp4_amax(x), device)
    turned = to_device(np.ascontiguousarray(x.T), device)
    want = nvfp4_cast(turned, amax, emulated=False)
    same_cast(nvfp4_cast_tokens(to_device(x, device), amax, emulated=False, signs=None), want)


@pytest.mark.parametrize("four", [False, True])
@pytest.mark.parametrize("rows,columns", [(32, 32), (80, 144)])
def test_square_blocks_transpose_exactly(rows, columns, four, device):
    x = normal("bfloat16", (rows, columns))
    x[:16, :16] *= BF16.type(1e-6)
    turned = to_device(np.ascontiguousarray(x.T), device)
    x = to_device(x, device)
    amax = nvfp4_amax(x)
    options = {"tall": True, "four_over_six": four}
    native = nvfp4_cast(x, amax, emulated=False, **options)
    same_cast(nvfp4_transpose(native), nvfp4_cast(turned, amax, emulated=False, **options))
    again = nvfp4_transpose(nvfp4_transpose(native), out=nvfp4_cast(x, amax, emulated=False))
    same_cast(again, native)
    emulation = nvfp4_transpose(nvfp4_cast(x, amax, emulated=True, **options))
    got = nvfp4_decode(host(emulation))
    same_bits(got, nvfp4_decode(host(nvfp4_cast(turned, amax, emulated=True, **options))))
    # Blocks of 1x16 do not have this property.
    flat = (nvfp4_decode(host(nvfp4_cast(y, amax, emulated=True))) for y in (x, turned))
    assert (next(flat).T != next(flat)).any()


def test_zero_blocks_and_tiny_blocks(device):
    x = np.zeros((3, 32), BF16)
    x[1, 0] = 1
    x[2, 16:] = 1e-6  # of the tensor's largest value: below the least scale
    x = to_device(x, device)
    cast = host(nvfp4_cast(x, nvfp4_amax(x), emulated=False))
    assert not cast.codes[0].any() and not cast.codes[1, 1:].any() and not cast.codes[2].any()
    scales = untile_scales(cast.scales, 3, 2)
    assert scales.tolist() == [[0, 0], [0x7E, 0], [0, 0]]
    nothing = x * x.dtype.type(0)
    cast = host(nvfp4_cast(nothing, nvfp4_amax(nothing), emulated=False))
    assert cast.amax[0] == 0 and not cast.codes.any() and not cast.scales.any()


def test_a_matrix_of_next_to_nothing_becomes_zeros(device):
    """Below 2^-104, where reciprocals would leave the range of floats; above, nothing is lost."""
    x = normal("bfloat16", (16, 32))
    for factor, kept in ((2.0**-110, False), (2.0**-100, True), (2.0**100, True)):
        small = to_device((x.astype(np.float32) * np.float32(factor)).astype(BF16), device)
        got = nvfp4_decode(host(nvfp4_cast(small, nvfp4_amax(small), emulated=True)))
        want = nvfp4_decode(nvfp4_cast(x, nvfp4_amax(x), emulated=True)) if kept else 0 * got
        np.testing.assert_array_equal(got / np.float32(factor), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(bad, device):
    for token, column in ((0, 0), (20, 33), (5, 47)):
        x = normal("bfloat16", (21, 48))
        x[token, column] = bad
        most = to_host(nvfp4_amax(to_device(x, device), signs=SIGNS))
        assert not np.isfinite(most).any()
    x = to_device(normal("bfloat16", (21, 48)), device)
    assert np.isfinite(to_host(nvfp4_amax(x, signs=SIGNS))).all()


def test_amax_of_nothing(device):
    x = to_device(np.zeros((0, 32), BF16), device)
    assert to_host(nvfp4_amax(x, signs=SIGNS)).tolist() == [0, 0]
    assert nvfp4_cast(x, nvfp4_amax(x), emulated=True).values.shape == (0, 32)
    assert nvfp4_cast_tokens(x, nvfp4_amax(x), emulated=False).codes.shape == (32, 0)


def test_rows_may_lie_apart(device):
    x = normal("bfloat16", (21, 80), device=device)[:, 16:64]
    amax = nvfp4_amax(x, signs=SIGNS)
    whole = to_device(np.ascontiguousarray(to_host(x)), device)
    same_bits(amax, nvfp4_amax(whole, signs=SIGNS))
    for cast in (nvfp4_cast, nvfp4_cast_tokens):
        same_cast(cast(x, amax[:1], emulated=False), cast(whole, amax[:1], emulated=False))


def test_the_transform_is_orthogonal_and_has_the_published_signs():
    matrix = hadamard(np.eye(16), SIGNS)
    np.testing.assert_array_equal(matrix.T @ matrix, np.eye(16))
    assert set(np.unique(matrix)) == {-0.25, 0.25}
    # Row 0 of Sylvester's matrix is all ones: what is left are the signs.
    signs = "".join("+" if v > 0 else "-" for v in matrix[0])
    assert signs == "+++-+------+-+--"
    outlier = np.zeros((16, 1))
    outlier[3] = 8
    np.testing.assert_array_equal(np.abs(hadamard(outlier, SIGNS)), 2)
    pair = np.array([[1.0, 1], [1, -1]])
    sylvester = np.kron(np.kron(pair, pair), np.kron(pair, pair))
    np.testing.assert_array_equal(hadamard(np.eye(16), 0), sylvester / 4)


def test_the_transform_cancels_in_a_weight_gradient():
    dy, x = (v.astype(np.float64) for v in normal("float64", (48, 8), (48, 24)))
    for signs in (0, SIGNS, 0x1234):
        got = hadamard(dy, signs).T @ hadamard(x, signs)
        np.testing.assert_allclose(got, dy.T @ x, rtol=1e-12, atol=1e-12)


def test_amax_of_the_transform(device):
    x = normal("bfloat16", (37, 48))
    padded = np.zeros((48, 48), np.float32)
    padded[:37] = x
    want = np.abs(hadamard(padded, 0xBEEF).astype(BF16).astype(np.float32)).max()
    assert to_host(nvfp4_amax(to_device(x, device), signs=0xBEEF))[1] == want


@pytest.mark.parametrize("along", ["columns", "tokens"])
def test_stochastic_rounding_is_unbiased(along):
    """A million draws of one block: the mean of each value within 3 sigma, neighbours alone."""
    block = normal("bfloat16", (16,), seed=3)
    repeats = 1 << 16
    x = np.tile(block, (repeats, 1))
    x = x if along == "columns" else np.ascontiguousarray(x.reshape(-1, 16, 16).swapaxes(1, 2))
    cast = nvfp4_cast if along == "columns" else nvfp4_cast_tokens
    options = {} if along == "columns" else {"signs": None}
    x = x.reshape(-1, 16)
    amax = nvfp4_amax(x)
    got = nvfp4_decode(cast(x, amax, emulated=True, draw=Draw(KEY), **options)).astype(np.float64)
    got = got.reshape(-1, 16)
    wide = block.astype(np.float64)
    for column in range(16):
        values = np.unique(got[:, column])
        assert len(values) <= 2
        gap = values[-1] - values[0]
        share = (wide[column] - values[0]) / gap if gap else 0
        sigma = abs(gap) * np.sqrt(max(share * (1 - share), 0) / repeats)
        assert abs(got[:, column].mean() - wide[column]) <= 3 * sigma + 1e-5 * abs(wide[column])
    assert got.size == 1 << 20


def test_nothing_clips_in_stochastic_rounding():
    """With 6 as target 3.5 % of half-normal values clip, and block maxima lose 1.06 %."""
    x = np.abs(normal("bfloat16", (20000, 16)))
    amax, wide = nvfp4_amax(x), x.astype(np.float64)
    where = np.arange(20000), wide.argmax(axis=1)
    bias = []
    for step in range(8):
        draw = Draw(np.array([1, step], np.uint32))
        got = nvfp4_decode(nvfp4_cast(x, amax, emulated=True, draw=draw))
        bias.append(got[where].mean() / wide[where].mean() - 1)
    assert abs(np.mean(bias)) < 0.0015
    # What the target is for: with the scale of the cast, no value is past 6.
    up = STOCHASTIC.range / float(amax[0])
    scale = nearest(wide.max(axis=1) * up / STOCHASTIC.target, E4M3_VALUES)
    assert (wide * up / scale[:, None]).max() <= 6
    scale = nearest(wide.max(axis=1) * NEAREST.range / float(amax[0]) / 6, E4M3_VALUES)
    clipped = wide * NEAREST.range / float(amax[0]) / scale[:, None] > 6
    assert 0.03 < clipped.mean() < 0.04


def test_small_blocks_are_unbiased_too():
    """Subnormal scales are rounded up: a block of 2^-20 of the largest value is not lost."""
    x = np.full((1 << 12, 32), 1.5 * 2.0**-20, BF16)
    x[:, 0] = 1
    got = nvfp4_decode(nvfp4_cast(x, nvfp4_amax(x), emulated=True, draw=Draw(KEY)))[:, 16:]
    sigma = got.std() / np.sqrt(got.size)
    assert abs(got.mean() - 1.5 * 2.0**-20) < 3 * sigma


def test_draws_depend_on_key_tensor_and_place_alone():
    x = normal("bfloat16", (64, 32))
    amax = nvfp4_amax(x)

    def values(rows=slice(None), cast=nvfp4_cast, **draw):
        options = {} if cast is nvfp4_cast else {"signs": None}
        out = cast(x[rows], amax, emulated=True, draw=Draw(**{"key": KEY, **draw}), **options)
        return out.values

    whole = values()
    same_bits(values(), whole)
    same_bits(values(slice(32, None), first=32), whole[32:])
    along = values(cast=nvfp4_cast_tokens)
    same_bits(values(slice(32, None), cast=nvfp4_cast_tokens, first=32), along[32:])
    for change in ({"key": KEY + np.uint32(1)}, {"tensor": 1}, {"first": 16}):
        assert (values(**change) != whole).any()
        assert (values(cast=nvfp4_cast_tokens, **change) != along).any()


@pytest.mark.parametrize("rows,blocks", [(1, 1), (128, 4), (256, 8), (100, 66), (130, 5)])
def test_tiles_of_scales_are_those_of_a_reshape(rows, blocks):
    scales = np.random.default_rng(0).integers(1, 127, (rows, blocks), dtype=np.uint8)
    tall, wide = -(-rows // 128) * 128, -(-blocks // 4) * 4
    padded = np.zeros((tall, wide), np.uint8)
    padded[:rows, :blocks] = scales
    want = padded.reshape(tall // 128, 4, 32, wide // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)
    got = tile_scales(scales)
    same_bits(got, want)
    same_bits(untile_scales(got, rows, blocks), scales)
    assert len(got) == scale_bytes(rows, blocks)


def test_published_places_of_scales():
    got = scale_offset(np.array([33, 130]), np.array([5, 2]), 8)
    assert got.tolist() == [533, 1058]
    assert scale_bytes(100, 1056 // 16) == 128 * 68


def test_refusals():
    x = normal("bfloat16", (20, 32))
    amax = nvfp4_amax(x)
    with pytest.raises(ValueError, match="columns in multiples of 16"):
        nvfp4_amax(x[:, :24])
    with pytest.raises(ValueError, match="begin at multiples of 16 bytes"):
        nvfp4_cast(normal("bfloat16", (20, 36))[:, :32], amax, emulated=True)
    with pytest.raises(ValueError, match="rows in multiples of 16 and no draw, got 20 rows"):
        nvfp4_cast(x, amax, emulated=True, tall=True)
    with pytest.raises(ValueError, match="rounds to nearest and takes no draw"):
        nvfp4_cast(x, amax, emulated=True, four_over_six=True, draw=Draw(KEY))
    with pytest.raises(ValueError, match="first must be a multiple of 16"):
        nvfp4_cast(x, amax, emulated=True, draw=Draw(KEY, first=8))
    with pytest.raises(ValueError, match="must be multiples of 16, got 20 and 32"):
        nvfp4_transpose(nvfp4_cast(x, amax, emulated=True))
