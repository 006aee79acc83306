"""Philox known answers, and rounding that is unbiased and between two neighbours."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import BF16
from surogate.kernels.rounding import philox, random_bits, stochastic_round


@pytest.mark.parametrize(
    "counter,key,ten,seven",
    [  # from the generator's publication
        (
            (0, 0, 0, 0),
            (0, 0),
            "6627E8D5 E169C58D BC57AC4C 9B00DBD8",
            "5F6FB709 0D893F64 4F121F81 4F730A48",
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            "408F276D 41C83B0E A20BC7C6 6D5451FD",
            "5207DDC2 45165E59 4D8EE751 8C52F662",
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "D16CFE09 94FDCCEB 5001E420 24126EA1",
            "4DFCCABA 190A87F0 C47362BA B6B5242A",
        ),
    ],
)
def test_philox_known_answers(counter, key, ten, seven):
    for rounds, want in ((10, ten), (7, seven)):
        got = philox(np.array(counter, np.uint32)[:, None], key, rounds=rounds)
        assert " ".join(f"{word:08X}" for word in got[:, 0]) == want


KEY: dict[str, Any] = dict(seed=5, step=3, tensor=2, role=1)


def test_bits_depend_on_every_part_of_the_key_and_on_nothing_else():
    whole = random_bits(1003, **KEY)
    np.testing.assert_array_equal(whole, random_bits(1003, **KEY))
    np.testing.assert_array_equal(whole[:7], random_bits(7, **KEY))
    np.testing.assert_array_equal(whole[64:], random_bits(1003 - 64, first=64, **KEY))
    for name in KEY:
        other = random_bits(1003, **{**KEY, name: KEY[name] + 1})
        assert np.count_nonzero(other == whole) < 5  # 1003 / 65536 are expected
    far = random_bits(8, first=8 << 32, **KEY)  # the counter's second word
    assert (far != whole[:8]).any()


def test_bits_are_uniform():
    bits = random_bits(1 << 18, **KEY).astype(np.float64)
    spread = 65536 / np.sqrt(12)
    assert abs(bits.mean() - 65535 / 2) < 3 * spread / np.sqrt(bits.size)
    for lane in range(8):  # each half of each word
        part = bits[lane::8]
        assert abs(part.mean() - 65535 / 2) < 3.5 * spread / np.sqrt(part.size)


@pytest.mark.parametrize("value", [1 + 2.0**-10, -1.003, 3e-39, 1e30, 1 + 127 / 16384])
def test_unbiased_and_between_neighbours(value):
    draws = 1 << 18
    x = np.full(draws, value, np.float32)
    got = stochastic_round(x, random_bits(draws, **KEY)).astype(np.float64)
    down = (x[:1].view(np.uint32) & 0xFFFF0000).view(np.float32)[0].astype(np.float64)
    up = ((x[:1].view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)[0].astype(np.float64)
    assert set(np.unique(got)) == {down, up}
    share = (np.float64(x[0]) - down) / (up - down)
    sigma = abs(up - down) * np.sqrt(share * (1 - share) / draws)
    assert abs(got.mean() - np.float64(x[0])) < 3 * sigma


def test_probability_is_exact_over_all_bits():
    x = np.full(65536, 1.0, np.float32)
    x.view(np.uint32)[:] |= 0x1234
    got = stochastic_round(x, np.arange(65536, dtype=np.uint16))
    assert np.count_nonzero(got.astype(np.float32) > 1) == 0x1234


def test_values_on_the_grid_and_special_values_stay():
    grid = np.arange(65536, dtype=np.uint16).view(BF16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide, finite = grid.astype(np.float32), ~np.isnan(grid)
    got = stochastic_round(wide, np.full(65536, 0xFFFF, np.uint16))
    np.testing.assert_array_equal(~np.isnan(got), finite)
    np.testing.assert_array_equal(got.view(np.uint16)[finite], grid.view(np.uint16)[finite])


def test_finite_stays_finite_and_hidden_nan_stays_nan():
    words = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0x7FFFFFFF], np.uint32)
    got = stochastic_round(words.view(np.float32), np.full(4, 0xFFFF, np.uint16))
    assert got[:2].view(np.uint16).tolist() == [0x7F7F, 0xFF7F]
    assert np.isnan(got[2:]).all()


def test_refuses_a_shard_that_splits_a_group():
    with pytest.raises(ValueError, match="first must be a multiple of 8"):
        random_bits(8, first=4, **KEY)
