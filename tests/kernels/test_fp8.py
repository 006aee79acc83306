"""kernels/fp8.py and fp8_matmul.py: casts against ml_dtypes, scales against the published rule."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from surogate.kernels.arrays import BF16, aligned
from surogate.kernels.fp8 import E4M3, E5M2, Cast, Codes, Form, Fp8State, Slot, fp8_cast, limit_of
from surogate.kernels.fp8_matmul import fp8_matmul
from tests.oracle import close, normal, same_bits, to_device, to_host

SHAPES = [(16, 16), (48, 80), (144, 208)]  # least, ragged tiles, several tiles


def state_of(*forms: Form, device: str = "host", scaling: Any = "delayed", **more: Any) -> Fp8State:
    settings = {"length": 4, "algorithm": "max"} | more
    library: Any = np
    if device == "cuda":
        import cupy as library
    limits = np.array([f.largest for f in forms], np.float32)
    return Fp8State(limits, scaling=scaling, library=library, **settings)


def slot_of(form: Form, device: str, amax: float, **more: Any) -> Slot:
    """A slot whose scale is limit / amax."""
    slot = state_of(form, device=device, **more).slot(0, form)
    slot.amax[...] = amax
    slot.state.update_()
    return slot


def codes_of(x: np.ndarray, scale: np.float32, form: Form) -> np.ndarray:
    """By ml_dtypes, whose cast does not saturate."""
    scaled = (x.astype(np.float32) * scale).clip(-form.largest, form.largest)
    return scaled.astype(form.dtype).view(np.uint8)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cast_is_that_of_ml_dtypes(form: Form, shape: tuple[int, int], device: str) -> None:
    x = normal("bfloat16", shape)
    x[0, :4] = [0.0, -0.0, 1e-38, -300.0]
    slot = slot_of(form, device, 2.0)  # below max |x|: some values saturate
    scale = np.float32(form.largest) / np.float32(2)
    want = codes_of(x, scale, form)
    got = fp8_cast(to_device(x, device), slot, turned=True)
    same_bits(got.rows, want)
    same_bits(got.turned, want.T)
    assert float(to_host(got.inverse)[0]) == np.float32(1) / scale
    same_bits(fp8_cast(to_device(x, device), slot).rows, want)
    same_bits(fp8_cast(to_device(x, device), slot, rows=False, turned=True).turned, want.T)
    assert float(to_host(slot.amax)[0]) == 300.0


def test_every_bfloat16(device: str) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(256, 256)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(x.astype(np.float32))
    for form in (E4M3, E5M2):
        slot = slot_of(form, device, form.largest)  # scale 1
        codes = to_host(fp8_cast(to_device(x, device), slot).rows)
        want = codes_of(np.where(finite, x, np.zeros_like(x)), np.float32(1), form)
        assert (codes == want)[finite].all()
        assert np.isnan(codes.view(form.dtype).astype(np.float32))[~finite].all()


def test_rows_may_lie_apart(device: str) -> None:
    wide = normal("bfloat16", (32, 96))
    x = to_device(wide, device)[:, :48]
    slot = slot_of(E4M3, device, 4.0)
    whole = fp8_cast(to_device(np.ascontiguousarray(wide[:, :48]), device), slot, turned=True)
    apart = fp8_cast(x, slot, turned=True)
    same_bits(apart.rows, whole.rows)
    same_bits(apart.turned, whole.turned)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_scales_of_the_moment(scaling: Any, device: str) -> None:
    x = normal("bfloat16", (48, 80)) * np.linspace(0.1, 9, 48)[:, None].astype(BF16)
    x = x.astype(BF16)
    x[5] = 0
    slot = state_of(E4M3, device=device, scaling=scaling).slot(0, E4M3)
    got = fp8_cast(to_device(x, device), slot)
    amax = np.abs(x.astype(np.float32)).max(axis=1 if scaling == "row" else None)
    amax = np.atleast_1d(amax)
    scale = np.where(amax > 0, np.float32(448) / np.where(amax > 0, amax, 1), 1).astype(np.float32)
    same_bits(got.inverse, np.float32(1) / scale)
    same_bits(got.rows, codes_of(x, scale[:, None] if scaling == "row" else scale[0], E4M3))
    again = fp8_cast(to_device((x / 2).astype(BF16), device), slot)
    same_bits(again.inverse, np.where(amax > 0, got_half(scale), np.float32(1)))


@pytest.mark.parametrize("scaling", ["delayed", "tensor", "row"])
def test_scales_of_any_tensor_lie_where_products_take_them(scaling: Any, device: str) -> None:
    """At a multiple of 16 bytes: one scale, or one a row."""
    state = state_of(E4M3, E5M2, E4M3, device=device, scaling=scaling)
    x = to_device(normal("bfloat16", (48, 80)), device)
    for index, form in enumerate((E4M3, E5M2, E4M3)):
        got = fp8_cast(x, state.slot(index, form))
        assert aligned(got.inverse) and got.inverse.shape == (48 if scaling == "row" else 1,)
        assert aligned(got.rows) and got.rows.shape == (48, 80)


def got_half(scale: np.ndarray) -> np.ndarray:
    return np.float32(1) / (scale * 2)


def test_delayed_scales_follow_the_history(device: str) -> None:
    """The published trace, but that an infinite amax never enters the window."""
    state = state_of(E4M3, device=device)
    found = []
    for amax in (8, 2, 1, 0.5, 0.25, np.inf, 0.25, 0.0, np.nan):
        state.slot(0, E4M3).amax[...] = amax
        state.update_()
        found.append(float(to_host(state.slot(0, E4M3).scale)[0]))
    assert found == [56, 56, 56, 56, 224, 224, 448, 448, 448]


def test_most_recent(device: str) -> None:
    state = state_of(E4M3, device=device, algorithm="most_recent")
    found = []
    for amax in (8, 2, 0.0, 4):
        state.slot(0, E4M3).amax[...] = amax
        state.update_()
        found.append(float(to_host(state.slot(0, E4M3).scale)[0]))
    assert found == [56, 224, 224, 112]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_loaded_state_goes_on_alike(algorithm: Any, device: str) -> None:
    rng = np.random.default_rng(0)
    forms = (E4M3, E5M2, E4M3)
    first = state_of(*forms, device=device, algorithm=algorithm)

    def turn(state: Fp8State, values: np.ndarray) -> None:
        for i, value in enumerate(values):
            state.slot(i, forms[i]).amax[...] = value
        state.update_()

    for values in rng.exponential(size=(6, 3)):
        turn(first, values)
    second = state_of(*forms, device=device, algorithm=algorithm)
    second.load_(first.history, first.position)
    for values in [None, *rng.exponential(size=(6, 3))]:
        if values is not None:
            turn(first, values)
            turn(second, values)
        for i, form in enumerate(forms):
            same_bits(first.slot(i, form).scale, second.slot(i, form).scale)
        same_bits(first.history, second.history)
        same_bits(first.position, second.position)


def test_calibration_scales_and_remembers(device: str) -> None:
    x = to_device(normal("bfloat16", (32, 32)), device)
    state = state_of(E4M3, device=device)
    slot = state.slot(0, E4M3)
    assert not state.calibrated
    with state.calibrating():
        codes = fp8_cast(x, slot)
    amax = np.abs(to_host(x).astype(np.float32)).max()
    same_bits(codes.rows, codes_of(to_host(x), np.float32(448) / amax, E4M3))
    state.update_()
    assert state.calibrated
    same_bits(fp8_cast(x, slot).rows, codes.rows)


def test_an_evaluation_leaves_no_trace(device: str) -> None:
    slot = slot_of(E4M3, device, 1.0)
    x = to_device(normal("bfloat16", (32, 32)), device)
    with slot.state.unrecorded():
        fp8_cast(x, slot)
    assert float(to_host(slot.amax)[0]) == 0
    fp8_cast(x, slot)
    assert float(to_host(slot.amax)[0]) > 0


@pytest.mark.parametrize("scaling", ["delayed", "tensor", "row"])
def test_a_cast_begins_where_the_scale_is_known(scaling: Any) -> None:
    slot, x = state_of(E4M3, scaling=scaling).slot(0, E4M3), normal("bfloat16", (16, 32))
    assert (Cast.begin(slot, x.shape, like=x) is not None) == (scaling == "delayed")
    with slot.state.calibrating():
        assert Cast.begin(slot, x.shape, like=x) is None


def test_margin() -> None:
    assert limit_of(E4M3, 0) == 448 and limit_of(E5M2, 2) == 57344 / 4


def operand(form: Form, shape: tuple[int, int], device: str, seed: int, scaling: Any) -> Codes:
    x = to_device(normal("bfloat16", shape, seed=seed), device)
    slot = state_of(form, device=device, scaling=scaling).slot(0, form)
    return fp8_cast(x, slot)


def value_of(codes: Codes) -> np.ndarray:
    values = to_host(codes.rows).view(codes.form.dtype).astype(np.float64)
    inverse = to_host(codes.inverse).astype(np.float64)
    return values * (inverse[:, None] if inverse.size > 1 else inverse)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_product(form: Form, fast: bool, scaling: Any, device: str) -> None:
    a = operand(form, (48, 128), device, 0, scaling)
    b = operand(E4M3, (80, 128), device, 1, scaling)
    bias, c = (to_device(x, device) for x in normal("bfloat16", (80,), (48, 80), seed=2))
    want = value_of(a) @ value_of(b).T
    # Tensor cores align the terms of a sum to the largest and keep 14 bits of each.
    dtype = "bfloat16"
    close(fp8_matmul(a, b, fast=fast), want, dtype)
    extra = to_host(bias).astype(np.float64) + to_host(c).astype(np.float64)
    close(fp8_matmul(a, b, bias=bias, c=c, fast=fast), want + extra, dtype)
    out = c.copy()
    fp8_matmul(a, b, out=out, accumulate=True, fast=fast)
    close(out, want + to_host(c).astype(np.float64), dtype)
    out = to_device(np.zeros((48, 80), np.float32), device)
    fp8_matmul(a, b, out=out, accumulate=True, fast=fast)
    close(out, want, dtype)


def test_refusals() -> None:
    a, b = (operand(E5M2, (16, 16), "host", i, "tensor") for i in range(2))
    with pytest.raises(ValueError, match="one operand must be E4M3"):
        fp8_matmul(a, b)
    with pytest.raises(ValueError, match="multiples of 16"):
        operand(E4M3, (16, 24), "host", 0, "tensor")
    with pytest.raises(ValueError, match="Cast.begin: both sizes must be multiples of 16"):
        Cast.begin(slot_of(E4M3, "host", 1.0), (24, 16), like=np.zeros(1))
    with pytest.raises(ValueError, match="were not made"):
        fp8_matmul(a, b, turned_a=True)
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max == E4M3.largest
    assert ml_dtypes.finfo(ml_dtypes.float8_e5m2).max == E5M2.largest
