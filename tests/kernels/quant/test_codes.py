"""Codes of the number formats: every code decoded, every class of float encoded.

The oracle is a table: the values of all codes from ml-dtypes (NF4: as published), and the nearest
of them found in float64. ml-dtypes' own casts and the numbers worked out in the formats' sources
are further witnesses.
"""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import BF16
from surogate.kernels.quant.codes import (
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    NF4,
    Format,
    Stochastic,
    decode,
    encode,
)
from tests.oracle import to_device, to_host

MINIFLOATS = (E4M3, E5M2, E2M1)
NAN_CODE = {E4M3: 0x7F, E5M2: 0x7F, E2M1: 7}
DRAW = Stochastic(seed=7, step=3, tensor=2, role=1)


def run(x: np.ndarray, form: Format, device: str, draw: Stochastic | None = None) -> np.ndarray:
    """One code a byte. A 4-bit format gets its elements in both halves of bytes."""
    codes = to_host(encode(to_device(x, device), form, stochastic=draw))
    if form.bits == 8:
        return codes
    low, high = codes & 15, codes >> 4
    halves = (high, low) if form is NF4 else (low, high)
    return np.stack(halves, axis=-1).reshape(x.shape)


def positive_values(form: Format) -> np.ndarray:
    """Of the codes 0, 1, ... up to the largest finite value, by ml-dtypes."""
    codes = np.arange(1 << (form.bits - 1), dtype=np.uint8)
    values = codes.view(form.dtype).astype(np.float64)
    return values[np.isfinite(values)]


def nearest(x: np.ndarray, form: Format) -> np.ndarray:
    """Nearest code, ties to the even one, saturating; by search in float64."""
    values = positive_values(form)
    size = np.where(np.isnan(x), 0, np.minimum(np.abs(x), form.max)).astype(np.float64)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = size - values[above - 1], values[above] - size
    code = np.where(low < high, above - 1, np.where(low > high, above, above - above % 2))
    code = code | np.where(np.signbit(x), 1 << (form.bits - 1), 0)
    return np.where(np.isnan(x), NAN_CODE[form], code).astype(np.uint8)


def floats() -> np.ndarray:
    """All bfloat16, and float32 of every exponent, among them ties and their neighbours."""
    every = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 1 << 32, 20000, dtype=np.uint32)
    narrow = (wide & 0x807FFFFF) | rng.integers(100, 150, 20000, dtype=np.uint32) << 23
    near = [np.array([], np.float32)]
    for form in MINIFLOATS:
        values = positive_values(form)
        ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
        for x in (values.astype(np.float32), ties):
            near += [x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))]
    edge = np.concatenate(near)
    out = np.concatenate([every, wide.view(np.float32), narrow.view(np.float32), edge, -edge])
    return out[: len(out) // 2 * 2]


@pytest.mark.parametrize("form", MINIFLOATS, ids=lambda form: form.name)
def test_nearest_for_every_class_of_floats(form, device):
    x = floats()
    np.testing.assert_array_equal(run(x, form, device), nearest(x, form))


@pytest.mark.parametrize("form", MINIFLOATS, ids=lambda form: form.name)
def test_agrees_with_the_casts_of_ml_dtypes(form, device):
    """Where those do not make infinity or NaN of a number that is too large."""
    x = floats()
    x = x[np.abs(x) <= form.max]
    x = x[: len(x) // 2 * 2]
    np.testing.assert_array_equal(run(x, form, device), x.astype(form.dtype).view(np.uint8))


@pytest.mark.parametrize("form", MINIFLOATS, ids=lambda form: form.name)
def test_bfloat16_is_read_as_it_is(form, device):
    x = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = x.astype(np.float32)
    np.testing.assert_array_equal(run(x, form, device), nearest(wide, form))


@pytest.mark.parametrize("form", [E4M3, E5M2, E8M0, E2M1], ids=lambda form: form.name)
def test_decodes_every_code(form, device):
    codes = np.arange(256, dtype=np.uint8)
    got = to_host(decode(to_device(codes, device), form))
    if form.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
    want = codes.view(form.dtype).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[want == 0], np.signbit(want)[want == 0])


@pytest.mark.parametrize("form", MINIFLOATS, ids=lambda form: form.name)
def test_numbers_come_back(form, device):
    codes = np.arange(1 << form.bits, dtype=np.uint8)
    values = codes.view(form.dtype).astype(np.float32)
    kept = np.isfinite(values)
    np.testing.assert_array_equal(run(values[kept], form, device), codes[kept])


@pytest.mark.parametrize(
    "form,pairs",
    [
        (
            E4M3,
            {
                **{0.3: 0x2A, 1.0625: 0x38, 1.1875: 0x3A, 17.0: 0x58, 464.0: 0x7E, 464.0001: 0x7E},
                **{2.0**-10: 0x00, 1.0001 * 2.0**-10: 0x01, 3 * 2.0**-10: 0x02, -0.0: 0x80},
                **{np.inf: 0x7E, -np.inf: 0xFE, 1e30: 0x7E, -1e-30: 0x80},
            },
        ),
        (
            E5M2,
            {
                **{61439.9: 0x7B, 61440.0: 0x7B, np.inf: 0x7B, -np.inf: 0xFB},
                **{2.0**-17: 0x00, 1.5 * 2.0**-16: 0x02, -0.0: 0x80},
            },
        ),
        (
            E2M1,
            {
                **{0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 5.01: 7},
                **{0.2501: 1, 1.74: 3, np.inf: 7, -np.inf: 15, -0.0: 8, -0.1: 8},
            },
        ),
        (
            E8M0,
            {
                **{-0.0: 0, 1.0: 127, 1.0001: 128, 448 / 448: 127, 450 / 448: 128},
                **{2.0**-127: 0, 2.0**-126: 1, np.inf: 254, 3e38: 254, -1.0: 255},
                **{1.5 * 2.0**-127: 1, 2.0**-149: 0},
            },
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Format) else "",
)
def test_worked_numbers(form, pairs, device):
    x = np.array(list(pairs), np.float32)
    padded = np.append(x, np.zeros(len(x) % 2, np.float32))
    got = run(padded, form, device)[: len(x)]
    assert [hex(code) for code in got] == [hex(code) for code in pairs.values()]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_not_a_number(form, device):
    x = np.array([np.nan, -np.nan, 1.0, np.nan], np.float32)
    want = {E4M3: 0x7F, E5M2: 0x7F, E2M1: 7, E8M0: 0xFF, NF4: 7}[form]
    got = run(x, form, device)
    assert got[[0, 1, 3]].tolist() == [want] * 3 and got[2] != want or form is E8M0


def test_scales_go_up_to_a_power_of_two(device):
    """Decoded, a scale is never less than what it stands for, and less than twice as much."""
    x = floats()
    x = x[(x >= 2.0**-127) & (x <= 2.0**127)]
    got = to_host(decode(encode(to_device(x, device), E8M0), E8M0)).astype(np.float64)
    assert (got >= x).all() and (got < 2 * x.astype(np.float64)).all()


def test_nf4_is_the_published_table(device):
    """The quantiles that Dettmers et al. construct, computed here from the normal distribution."""
    from statistics import NormalDist

    def quantiles(count: int) -> list[float]:
        offset = 0.9677083
        steps = [offset + (0.5 - offset) * i / count for i in range(count)]
        return [NormalDist().inv_cdf(p) for p in steps]

    table = np.array(sorted([*quantiles(8), 0.0, *(-q for q in quantiles(7))]))
    codes = np.array([[0x01, 0x23, 0x45, 0x67], [0x89, 0xAB, 0xCD, 0xEF]], np.uint8)
    got = to_host(decode(to_device(codes, device), NF4)).reshape(-1)
    np.testing.assert_allclose(got, table / table.max(), atol=1.2e-7, rtol=0)
    assert got[0] == -1 and got[7] == 0 and got[15] == 1
    np.testing.assert_array_equal(run(got, NF4, device), np.arange(16))


def test_nf4_takes_the_nearest_and_the_lower_of_two(device):
    values = to_host(decode(to_device(np.arange(16, dtype=np.uint8) * 17, device), NF4))[
        ::2
    ].astype(np.float64)
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    np.testing.assert_array_equal(
        run(np.append(middles, np.float32(1)), NF4, device)[:15], np.arange(15)
    )
    above = np.nextafter(middles, np.float32(2))
    np.testing.assert_array_equal(
        run(np.append(above, np.float32(1)), NF4, device)[:15], np.arange(1, 16)
    )
    x = np.random.default_rng(0).uniform(-1.1, 1.1, 4096).astype(np.float32)
    want = np.abs(x[:, None].astype(np.float64) - values).argmin(axis=1)
    np.testing.assert_array_equal(run(x, NF4, device), want)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (0, 4), (2, 3, 6), (1, 2056)])
def test_shapes(shape, form, device):
    x = np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)
    codes = encode(to_device(x, device), form)
    assert codes.shape == (*shape[:-1], shape[-1] * form.bits // 8) and codes.dtype == np.uint8
    back = decode(codes, form)
    assert back.shape == shape and back.dtype == np.float32
    flat = encode(to_device(x.reshape(1, -1), device), form)
    np.testing.assert_array_equal(to_host(codes).reshape(-1), to_host(flat).reshape(-1))


def test_nibble_order(device):
    x = np.array([[1.0, -6.0]], np.float32)
    assert to_host(encode(to_device(x, device), E2M1)).tolist() == [[0xF2]]
    x = np.array([[1.0, -1.0]], np.float32)
    assert to_host(encode(to_device(x, device), NF4)).tolist() == [[0xF0]]


CASES = [
    *((E4M3, x) for x in (1.03, 447.9, -0.0012, 2.0**-9 * 0.3, 2.0**-6 * 0.99)),
    *((E5M2, x) for x in (1.1, 1e-5, -57343.0)),
    *((E2M1, x) for x in (0.2, -1.8, 2.7, 5.1)),
]


@pytest.mark.parametrize("form,value", CASES, ids=lambda v: v.name if isinstance(v, Format) else v)
def test_stochastic_is_unbiased_and_between_neighbours(form, value, device):
    draws = 1 << 20 if device != "emulated" else 1 << 16
    x = np.full(draws, value, np.float32)
    codes = run(x, form, device, DRAW)
    got = codes.view(form.dtype).astype(np.float64)
    values = positive_values(form)
    size = abs(float(x[0]))
    above = np.searchsorted(values, size)
    down, up = values[above - 1], values[above]
    assert set(np.unique(np.abs(got))) == {down, up} and (np.sign(got) * np.sign(value) >= 0).all()
    share = (size - down) / (up - down)
    sigma = (up - down) * np.sqrt(share * (1 - share) / draws)
    assert abs(np.abs(got).mean() - size) < 3 * sigma + (up - down) * 2.0**-16


@pytest.mark.parametrize("form", MINIFLOATS, ids=lambda form: form.name)
def test_stochastic_is_the_same_on_host_and_kernel(form):
    from tests.emulator.launch import emulated

    x = np.ascontiguousarray(floats()[::3])
    x = x[: len(x) // 2 * 2]
    host = encode(x, form, stochastic=DRAW)
    with emulated():
        kernel = encode(x, form, stochastic=DRAW)
    np.testing.assert_array_equal(host, kernel)


@pytest.mark.parametrize("form", MINIFLOATS, ids=lambda form: form.name)
def test_stochastic_keeps_what_is_a_value_and_saturates(form, device):
    codes = np.arange(1 << form.bits, dtype=np.uint8)
    values = codes.view(form.dtype).astype(np.float32)
    kept = np.isfinite(values)
    x = np.concatenate([values[kept], [np.inf, -np.inf, np.nan, 1e30]]).astype(np.float32)
    got = run(x, form, device, DRAW)
    np.testing.assert_array_equal(got[: kept.sum()], codes[kept])
    np.testing.assert_array_equal(got[kept.sum() :], nearest(x[kept.sum() :], form))


def test_stochastic_depends_on_the_place_in_the_whole(device):
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    whole = run(x, E4M3, device, DRAW)
    part = run(x[64:], E4M3, device, DRAW._replace(first=64))
    np.testing.assert_array_equal(whole[64:], part)
    assert (run(x, E4M3, device, DRAW._replace(role=2)) != whole).any()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda x: encode(x[:, :3], E2M1), "even number of columns, got 3"),
        (lambda x: encode(x, NF4, stochastic=DRAW), "NF4 has no stochastic rounding"),
        (lambda x: encode(x, E8M0, stochastic=DRAW), "E8M0 has no stochastic rounding"),
        (lambda x: encode(x, E4M3, stochastic=DRAW._replace(first=3)), "multiple of 8"),
    ],
)
def test_refuses(call: Any, message, device):
    with pytest.raises(ValueError, match=message):
        call(to_device(np.zeros((2, 4), np.float32), device))
