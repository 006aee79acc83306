"""Elementwise addition and accumulation: exact, at every size around a vector access and a
block.
"""

import inspect
from typing import Any

import numpy as np
import pytest

from surogate.kernels.add import accumulate_, add_bwd, add_fwd, add_ref
from surogate.kernels.arrays import BF16
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

# Empty, less than a vector, ragged, one block of float32 and one element more, several blocks.
SHAPES = [(0,), (1,), (7, 3), (1024,), (1025,), (3, 5, 1000)]
DTYPES = ["float32", "bfloat16"]


def sum_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float32, rounded once to the dtype of ``a``."""
    return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_matches_reference(shape: tuple[int, ...], dtype: str, device: str) -> None:
    a, b, dy = normal(dtype, shape, shape, shape)
    y, da, db = oracle(add_ref, (a, b), dy)
    got_y, res = add_fwd(to_device(a, device), to_device(b, device))
    got_da, got_db = add_bwd(res, to_device(dy, device))
    close(got_y, y, dtype)
    same_bits(got_y, sum_of(a, b))
    for got, want in ((got_da, da), (got_db, db)):
        np.testing.assert_array_equal(to_host(got).astype(np.float64), want)


@pytest.mark.parametrize("into,dtype", [("float32", "float32"), ("float32", BF16), (BF16, BF16)])
@pytest.mark.parametrize("shape", SHAPES)
def test_accumulate_adds_in_place(
    shape: tuple[int, ...], into: Any, dtype: Any, device: str
) -> None:
    total, x = normal("float32", shape, shape)
    total, x = total.astype(into), x.astype(dtype)
    buffer = to_device(total.copy(), device)
    assert accumulate_(buffer, to_device(x, device)) is buffer
    same_bits(buffer, sum_of(total, x))


def test_inputs_stay_and_may_be_views(device: str) -> None:
    a, b = normal("float32", (64, 9), (9, 64))
    moved_a, moved_b = to_device(a, device), to_device(b, device)
    got, _ = add_fwd(moved_a[::2, 1:], moved_b.T[::2, 1:])
    same_bits(got, a[::2, 1:] + b.T[::2, 1:])
    same_bits(moved_a, a)
    same_bits(moved_b, b)


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_that_begin_off_16_bytes(dtype: str, which: str, device: str) -> None:
    a, b = normal(dtype, (1025,), (1025,))
    moved = {"a": to_device(a, device), "b": to_device(b, device)}
    moved[which] = unaligned(moved[which], device)
    same_bits(add_fwd(**moved)[0], sum_of(a, b))
    into, x = unaligned(a, device), unaligned(b, device)
    same_bits(accumulate_(into, x), sum_of(a, b))


def test_float64_runs_on_the_host() -> None:
    a, b = normal("float64", (5,), (5,))
    same_bits(add_fwd(a, b)[0], a + b)


def test_refusals(device: str) -> None:
    a, b = (to_device(x, device) for x in normal("float32", (4,), (5,)))
    with pytest.raises(
        ValueError, match=r"a and b must agree, got float32\(4,\) and bfloat16\(4,\)"
    ):
        add_fwd(a, a.astype(BF16))
    if device != "host":
        with pytest.raises(ValueError, match=r"into must be C-contiguous"):
            accumulate_(to_device(np.zeros((4, 4), np.float32), device)[:, 0], a)
    # Without jaxtyping, as in production.
    with pytest.raises(ValueError, match=r"accumulate_: shapes must agree, got \(4,\) and \(5,\)"):
        inspect.unwrap(accumulate_)(a, b)
