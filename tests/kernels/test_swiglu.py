"""SwiGLU against float64 autodiff, in place, recomputed, at the ends of its range, and by split."""

import numpy as np
import pytest

from surogate.kernels.fp8 import E4M3, E5M2, Cast, fp8_cast
from surogate.kernels.swiglu import (
    SwiGLUResiduals,
    swiglu,
    swiglu_bwd,
    swiglu_bwd_,
    swiglu_fwd,
    swiglu_ref,
)
from tests.kernels.test_fp8 import slot_of
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

SIZES = [
    (1, 8),  # least that 16-byte accesses take
    (3, 1),  # one column
    (5, 1015),  # ragged: no 16-byte accesses, rows end inside a block
    (33, 1016),  # a block spans two rows
    (2, 12288),  # a model's: a row spans many blocks
]
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def problem(dtype: str, tokens: int, ffn: int, device: str) -> tuple:
    """gate_up with gates to both sides of the bend, and dy."""
    gate_up, dy = normal(dtype, (tokens, 2 * ffn), (tokens, ffn))
    gate_up[:, :ffn] *= gate_up.dtype.type(3)
    return to_device(gate_up, device), to_device(dy, device)


@pytest.mark.parametrize("tokens,ffn", SIZES)
@each_dtype
def test_matches_reference(tokens, ffn, dtype, device):
    gate_up, dy = problem(dtype, tokens, ffn, device)
    y, d_gate_up = oracle(swiglu_ref, (gate_up,), dy)
    got_y, res = swiglu_fwd(gate_up)
    close(got_y, y, dtype)
    close(swiglu_bwd(res, dy), d_gate_up, dtype, roundings=8)  # eight operations one after another


def test_float64_is_computed_in_float64():
    gate_up, dy = problem("float64", 4, 9, "host")
    y, d_gate_up = oracle(swiglu_ref, (gate_up,), dy)
    got_y, res = swiglu_fwd(gate_up)
    close(got_y, y, "float64")
    close(swiglu_bwd(res, dy), d_gate_up, "float64", roundings=8)


@pytest.mark.parametrize("ffn", [24, 7])  # with and without 16-byte accesses
@each_dtype
def test_recomputed_output_is_that_of_the_forward(ffn, dtype, device):
    gate_up, dy = problem(dtype, 5, ffn, device)
    y, res = swiglu_fwd(gate_up)
    d_gate_up, again = swiglu_bwd(res, dy, recompute=True)
    same_bits(again, y)
    same_bits(d_gate_up, swiglu_bwd(res, dy))


@pytest.mark.parametrize("recompute", [False, True])
@each_dtype
def test_in_place_gives_the_same_bits(recompute, dtype, device):
    gate_up, dy = problem(dtype, 5, 40, device)
    y, res = swiglu_fwd(gate_up)
    want = swiglu_bwd(res, dy)
    found = swiglu_bwd_(SwiGLUResiduals(gate_up), dy, recompute=recompute)
    got, again = found if recompute else (found, y)
    assert got is gate_up
    same_bits(got, want)
    same_bits(again, y)


@each_dtype
def test_far_gates_saturate(dtype, device):
    gates = np.array([-3e38, -1e4, -90.0, 90.0, 1e4])
    rows = np.concatenate([gates, np.ones(5)])[None].astype(normal(dtype, (1,)).dtype)
    gate_up = to_device(rows, device)
    y, res = swiglu_fwd(gate_up)
    ones = to_device(np.ones((1, 5), rows.dtype), device)
    d_gate_up = to_host(swiglu_bwd(res, ones)).astype(np.float64)
    got = to_host(y).astype(np.float64)
    close(got[0, 3:], to_host(gate_up)[0, 3:5], dtype)
    close(d_gate_up[0, :5], np.array([0.0, 0, 0, 1, 1]), dtype)
    assert (np.abs(got[0, :3]) < 1e-30).all()


def test_tokens_do_not_depend_on_the_split(device):
    gate_up, dy = problem("bfloat16", 10, 136, device)
    y, res = swiglu_fwd(gate_up)
    d_gate_up = swiglu_bwd(res, dy)
    for part in (slice(0, 5), slice(5, 10)):
        part_y, part_res = swiglu_fwd(gate_up[part])
        same_bits(part_y, y[part])
        same_bits(swiglu_bwd(part_res, dy[part]), d_gate_up[part])


def test_no_tokens(device):
    gate_up = normal("float32", (0, 16), device=device)
    y, res = swiglu_fwd(gate_up)
    assert y.shape == (0, 8)
    assert swiglu_bwd(res, y).shape == (0, 16)


def test_pair_holds_its_functions():
    assert swiglu.fwd is swiglu_fwd and swiglu.bwd is swiglu_bwd


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="even number of columns, got 7"):
        swiglu_fwd(normal("float32", (2, 7)))
    gate_up, dy = problem("float32", 2, 4, "host")
    with pytest.raises(ValueError, match=r"dy must be float32\(2, 4\), got float64\(2, 4\)"):
        swiglu_bwd(SwiGLUResiduals(gate_up), dy.astype(np.float64))


@pytest.mark.parametrize("ffn", [40, 7])
@pytest.mark.parametrize("columns", [64, 3])  # rows that do and do not begin at 16 bytes
@each_dtype
def test_rows_may_lie_apart(columns, ffn, dtype, device):
    gate_up, dy = problem(dtype, 5, ffn, device)
    y, res = swiglu_fwd(gate_up)
    d_gate_up = swiglu_bwd(res, dy)

    def rows_of(width: int):
        return to_device(np.full((5, width + columns), np.nan, to_host(dy).dtype), device)

    narrow, grad, wide = rows_of(ffn), rows_of(ffn), rows_of(2 * ffn)
    got, _ = swiglu_fwd(gate_up, out=narrow[:, :ffn])
    same_bits(got, y)
    grad[:, :ffn] = dy
    same_bits(swiglu_bwd(res, grad[:, :ffn], out=wide[:, : 2 * ffn]), d_gate_up)
    same_bits(wide[:, : 2 * ffn], d_gate_up)
    for rows, width in ((narrow, ffn), (wide, 2 * ffn)):
        assert np.isnan(to_host(rows)[:, width:].astype(np.float32)).all(), "written between"
    again = swiglu_bwd(res, grad[:, :ffn], recompute=True)[1]
    same_bits(again, y)


def test_refuses_an_out_that_does_not_fit():
    gate_up, dy = problem("float32", 2, 4, "host")
    with pytest.raises(ValueError, match=r"swiglu_fwd: out must be float32\(2, 4\)"):
        swiglu_fwd(gate_up, out=dy[:, :3])
    with pytest.raises(ValueError, match=r"swiglu_bwd: out must be float32\(2, 8\)"):
        swiglu_bwd(SwiGLUResiduals(gate_up), dy, out=gate_up[:, :6])


@each_dtype
def test_arrays_that_begin_off_16_bytes(dtype, device):
    gate_up, dy = problem(dtype, 5, 40, device)
    y, res = swiglu_fwd(gate_up)
    d_gate_up, again = swiglu_bwd(res, dy, recompute=True)
    off = unaligned(gate_up, device)
    got_y, off_res = swiglu_fwd(off)
    same_bits(got_y, y)
    got, got_again = swiglu_bwd(off_res, unaligned(dy, device), recompute=True)
    same_bits(got, d_gate_up)
    same_bits(got_again, again)
    same_bits(swiglu_bwd_(off_res, dy), d_gate_up)


def begun(slot, x) -> Cast:
    cast = Cast.begin(slot, x.shape, like=x)
    assert cast is not None
    return cast


@pytest.mark.parametrize("tokens,ffn", [(16, 16), (48, 1008), (16, 12288)])  # SIZES' regimes
@pytest.mark.parametrize("wide", [0, 64])  # columns between rows of what is cast
def test_casts_are_those_of_the_outputs(wide, tokens, ffn, device):
    gate_up, dy = problem("bfloat16", tokens, ffn, device)
    y, res = swiglu_fwd(gate_up)
    d_gate_up = swiglu_bwd(res, dy)

    def settings(form, like):
        slot = slot_of(form, device, 2.0)  # some values saturate
        out = np.full((tokens, like.shape[1] + wide), np.nan, to_host(like).dtype)
        return slot, {"out": to_device(out, device)[:, : like.shape[1]], "cast": begun(slot, like)}

    forward, given = settings(E4M3, y)
    same_bits(swiglu_fwd(gate_up, **given)[0], y)
    backward, given_back = settings(E5M2, d_gate_up)
    got, again = swiglu_bwd(res, dy, recompute=True, **given_back)
    same_bits(got, d_gate_up)
    same_bits(again, y)
    for cast, x, found in ((given, y, forward), (given_back, d_gate_up, backward)):
        slot = slot_of(found.form, device, 2.0)
        want = fp8_cast(x, slot)
        same_bits(cast["cast"].codes.rows, want.rows)
        same_bits(cast["cast"].codes.inverse, want.inverse)
        same_bits(found.amax, slot.amax)
        assert float(to_host(found.amax)[0]) > 2


def test_casts_see_what_is_not_finite(device):
    gate_up, dy = problem("bfloat16", 16, 32, device)
    gate_up[3, 5], dy[2, 30] = np.nan, np.inf
    slots = slot_of(E4M3, device, 4.0), slot_of(E5M2, device, 4.0)
    casts = begun(slots[0], dy), begun(slots[1], gate_up)
    with np.errstate(invalid="ignore"):
        y, res = swiglu_fwd(gate_up, cast=casts[0])
        d_gate_up = swiglu_bwd(res, dy, cast=casts[1])
        for slot, x, cast in zip(slots, (y, d_gate_up), casts, strict=True):
            assert not np.isfinite(to_host(slot.amax)).any()
            same_bits(cast.codes.rows, fp8_cast(x, slot).rows)


def test_casts_leave_no_trace_in_an_evaluation(device):
    gate_up, _ = problem("bfloat16", 16, 32, device)
    slot = slot_of(E4M3, device, 4.0)
    with slot.state.unrecorded():
        swiglu_fwd(gate_up, cast=begun(slot, gate_up[:, :32]))
    assert not to_host(slot.amax).any()


@pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_kernels_refuse_a_cast_beside_rows_off_16_bytes(device):
    gate_up, dy = problem("bfloat16", 16, 32, device)
    cast = begun(slot_of(E4M3, device, 4.0), dy)
    for rows in (unaligned(gate_up, device), gate_up.astype(np.float32)):
        with pytest.raises(ValueError, match=r"swiglu_fwd: takes a cast of bfloat16\(16, 32\)"):
            swiglu_fwd(rows, cast=cast)
    with pytest.raises(ValueError, match="swiglu_bwd: takes a cast"):
        swiglu_bwd(SwiGLUResiduals(gate_up), dy, cast=cast)
