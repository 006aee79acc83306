"""RMSNorm, alone and with the residual stream: against float64 autodiff, by split and by mode."""

import sys
from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import FROZEN, namespace
from surogate.kernels.fp8 import E4M3, Cast, fp8_cast
from surogate.kernels.pair import vjp
from surogate.kernels.rmsnorm import (
    MAX_HIDDEN,
    RMSNormResiduals,
    add_rmsnorm,
    add_rmsnorm_bwd,
    add_rmsnorm_fwd,
    add_rmsnorm_ref,
    norm_residual,
    norm_residual_bwd,
    norm_residual_fwd,
    norm_residual_ref,
    rmsnorm,
    rmsnorm_bwd,
    rmsnorm_fwd,
    rmsnorm_ref,
    sum_partials,
    sum_partials_pair,
)
from tests.kernels.test_fp8 import slot_of
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

EPS = 1e-5
DX = 16  # roundings of dx: its summands g and n * mean cancel, and g may be ten times the usual dx
SIZES = [
    (1, 8),  # least
    (5, 7),  # odd: no 16-byte access fits
    (7, 1016),  # ragged: the last lanes of a warp have no column
    (2200, 24),  # more rows than all blocks hold at once: they walk
    (9, 2560),  # rows of several warps; two packs a thread backward in bfloat16
    (400, 4096),  # the same, and blocks walk
    (3, 8190),  # a large row without 16-byte accesses
    (140, 16384),  # the widest row, four packs; blocks walk
]
each_size = pytest.mark.parametrize("tokens,hidden", SIZES)
kernels_only = pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def problem(dtype: str, tokens: int, hidden: int, device: str) -> tuple:
    """x, residual, weight, dy, dh."""
    rows = (tokens, hidden)
    return normal(dtype, rows, rows, (hidden,), rows, rows, device=device)


@each_size
@each_dtype
def test_matches_reference(tokens, hidden, dtype, device):
    x, _, weight, dy, _ = problem(dtype, tokens, hidden, device)
    y, dx, dweight = oracle(partial(rmsnorm_ref, eps=EPS), (x, weight), dy)
    got_y, res = rmsnorm_fwd(x, weight, eps=EPS)
    got_dx, got_dweight = rmsnorm_bwd(res, dy)
    close(got_y, y, dtype)
    close(got_dx, dx, dtype, roundings=DX)
    close(got_dweight, dweight, dtype, terms=tokens)


@each_size
@each_dtype
def test_add_matches_reference(tokens, hidden, dtype, device):
    x, residual, weight, dy, dh = problem(dtype, tokens, hidden, device)
    y, h, dx, dresidual, dweight = oracle(
        partial(add_rmsnorm_ref, eps=EPS), (x, residual, weight), dy, dh
    )
    (got_y, got_h), res = add_rmsnorm_fwd(x, residual, weight, eps=EPS)
    got_dx, got_dresidual, got_dweight = add_rmsnorm_bwd(res, dy, dh)
    close(got_y, y, dtype, roundings=8)  # of h and n before the product
    close(got_h, h, dtype)
    close(got_dx, dx, dtype, roundings=DX)
    same_bits(got_dx, got_dresidual)
    close(got_dweight, dweight, dtype, terms=tokens)


@pytest.mark.parametrize("tokens,hidden", [(7, 1016), (5, 7)])
@each_dtype
def test_norm_residual_matches_reference(tokens, hidden, dtype, device):
    x, _, weight, dy, dstream = problem(dtype, tokens, hidden, device)
    y, _, dx, dweight = oracle(partial(norm_residual_ref, eps=EPS), (x, weight), dy, dstream)
    (got_y, stream), res = norm_residual_fwd(x, weight, eps=EPS)
    got_dx, got_dweight = norm_residual_bwd(res, dy, dstream)
    assert stream is x
    close(got_y, y, dtype)
    close(got_dx, dx, dtype, roundings=DX)
    close(got_dweight, dweight, dtype, terms=tokens)


def test_float64_is_computed_in_float64():
    x, residual, weight, dy, dh = problem("float64", 4, 33, "host")
    y, h, dx, _, dweight = oracle(partial(add_rmsnorm_ref, eps=EPS), (x, residual, weight), dy, dh)
    (got_y, got_h), res = add_rmsnorm_fwd(x, residual, weight, eps=EPS)
    got_dx, _, got_dweight = add_rmsnorm_bwd(res, dy, dh)
    for got, want in ((got_y, y), (got_h, h), (got_dx, dx), (got_dweight, dweight)):
        close(got, want, "float64", roundings=16)  # sums of 33 terms inside


@pytest.mark.parametrize("hidden", [40, 39])  # with and without 16-byte accesses
@each_dtype
def test_unit_offset(hidden, dtype, device):
    x, _, weight, dy, _ = problem(dtype, 6, hidden, device)
    y, dx, dweight = oracle(partial(rmsnorm_ref, eps=EPS, unit_offset=True), (x, weight), dy)
    got_y, res = rmsnorm_fwd(x, weight, eps=EPS, unit_offset=True, product="float")
    got_dx, got_dweight = rmsnorm_bwd(res, dy)
    close(got_y, y, dtype)
    close(got_dx, dx, dtype, roundings=DX)
    close(got_dweight, dweight, dtype, terms=6)


@pytest.mark.parametrize("product", ["storage", "float"])
def test_product_order_is_that_of_transformers(product, device, monkeypatch):
    # transformers looks for a package `kernels`, and would find this repository's folder
    monkeypatch.setitem(sys.modules, "kernels", None)
    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = normal("bfloat16", (64, 96), (96,))
    norm = {"storage": LlamaRMSNorm, "float": GptOssRMSNorm}[product](96, eps=EPS)
    norm.weight.data = torch.tensor(weight.astype(np.float32)).bfloat16()
    want = norm(torch.tensor(x.astype(np.float32)).bfloat16()).float().detach().numpy()
    other = "float" if product == "storage" else "storage"
    on = [to_device(a, device) for a in (x, weight)]
    differ = [
        np.count_nonzero(
            to_host(rmsnorm_fwd(*on, eps=EPS, product=p)[0]).astype(np.float32) != want
        )
        for p in (product, other)
    ]
    # rstd may differ in its last float32 bit, which moves a rounding to bf16 now and then.
    assert differ[0] <= 6 < 600 < differ[1], differ


@each_dtype
def test_float32_weight_beside_any_rows(dtype, device):
    x, dy = normal(dtype, (5, 264), (5, 264), device=device)
    weight = normal("float32", (264,), seed=1, device=device)
    y, dx, dweight = oracle(partial(rmsnorm_ref, eps=EPS), (x, weight), dy)
    got_y, res = rmsnorm_fwd(x, weight, eps=EPS, product="float")
    got_dx, got_dweight = rmsnorm_bwd(res, dy)
    assert got_y.dtype == x.dtype and got_dweight.dtype == np.float32
    close(got_y, y, dtype)
    close(got_dx, dx, dtype, roundings=DX)
    close(got_dweight, dweight, "float32", terms=5)


@pytest.mark.parametrize("buffer", ["bfloat16", "float32"])
def test_into_adds_to_a_buffer(buffer, device):
    x, _, weight, dy, _ = problem("bfloat16", 20, 72, device)
    _, res = rmsnorm_fwd(x, weight, eps=EPS)
    fresh_dx, _ = rmsnorm_bwd(res, dy)
    _, _, exact = oracle(partial(rmsnorm_ref, eps=EPS), (x, weight), dy)
    into = normal(buffer, (72,), seed=3, device=device)
    before = to_host(into).astype(np.float64)
    dx, dweight = rmsnorm_bwd(res, dy, into=into)
    assert dweight is into
    same_bits(dx, fresh_dx)
    close(into, before + exact, buffer, terms=20)


def test_frozen_weight_has_no_gradient(device):
    x, residual, weight, dy, dh = problem("bfloat16", 20, 72, device)
    _, res = add_rmsnorm_fwd(x, residual, weight, eps=EPS)
    dx, _, _ = add_rmsnorm_bwd(res, dy, dh)
    frozen_dx, _, dweight = add_rmsnorm_bwd(res, dy, dh, into=FROZEN)
    assert dweight is None
    same_bits(frozen_dx, dx)


def test_unused_outputs(device):
    x, residual, weight, dy, dh = problem("float32", 6, 40, device)
    _, res = add_rmsnorm_fwd(x, residual, weight, eps=EPS)
    dx, _, dweight = add_rmsnorm_bwd(res, None, dh)
    assert dx is dh and not to_host(dweight).any()
    into = normal("float32", (40,), device=device)
    before = to_host(into).copy()
    assert add_rmsnorm_bwd(res, None, dh, into=into)[2] is into
    same_bits(into, before)
    assert add_rmsnorm_bwd(res, None, dh, into=FROZEN)[2] is None
    same_bits(add_rmsnorm_bwd(res, dy, None)[0], rmsnorm_bwd(res, dy)[0])
    with pytest.raises(ValueError, match="needs the cotangent"):
        add_rmsnorm_bwd(res, None, None)


@pytest.mark.parametrize("hidden", [96, 2560])  # several rows in a block of one warp each, of five
def test_tokens_do_not_depend_on_the_split(hidden, device):
    x, residual, weight, dy, dh = problem("bfloat16", 10, hidden, device)
    (y, h), res = add_rmsnorm_fwd(x, residual, weight, eps=EPS)
    dx, _, _ = add_rmsnorm_bwd(res, dy, dh)
    for part in (slice(0, 5), slice(5, 10)):
        (part_y, part_h), part_res = add_rmsnorm_fwd(x[part], residual[part], weight, eps=EPS)
        part_dx, _, _ = add_rmsnorm_bwd(part_res, dy[part], dh[part])
        same_bits(part_y, y[part])
        same_bits(part_h, h[part])
        same_bits(part_dx, dx[part])


def test_twice_gives_the_same_bits(device):
    x, _, weight, dy, _ = problem("float32", 700, 40, device)
    _, res = rmsnorm_fwd(x, weight, eps=EPS)
    for first, second in zip(rmsnorm_bwd(res, dy), rmsnorm_bwd(res, dy), strict=True):
        same_bits(first, second)


def test_no_tokens(device):
    x, weight = normal("float32", (0, 16), (16,), device=device)
    y, res = rmsnorm_fwd(x, weight, eps=EPS)
    dx, dweight = rmsnorm_bwd(res, y)
    assert y.shape == dx.shape == (0, 16)
    assert not to_host(dweight).any()


def test_a_row_of_zeros_is_zero(device):
    x = to_device(np.zeros((2, 16), np.float32), device)
    weight, dy = normal("float32", (16,), (2, 16), device=device)
    y, res = rmsnorm_fwd(x, weight, eps=EPS)
    dx, dweight = rmsnorm_bwd(res, dy)
    assert not to_host(y).any() and not to_host(dweight).any()
    close(dx, to_host(dy) * to_host(weight) / np.sqrt(EPS), "float32")


@kernels_only
@pytest.mark.parametrize("columns", [1, 33, 64])  # least, one past a block's 32, whole blocks
@pytest.mark.parametrize("rows", [1, 32, 264])  # fewer than, as many as and more than 32 warps take
def test_sum_partials(rows, columns, device):
    partial_sums = normal("float32", (rows, columns), device=device)
    want = to_host(partial_sums).astype(np.float64).sum(axis=0)
    close(sum_partials(partial_sums, np.dtype(np.float32), None), want, "float32", terms=rows)


@kernels_only
@pytest.mark.parametrize(
    "into", [(None, None), ("bfloat16", None), ("float32", None), (None, FROZEN), (FROZEN, FROZEN)]
)
def test_two_sums_are_those_of_each(into, device):
    partial_sums = normal("float32", (7, 40), device=device)
    kind = np.dtype("bfloat16")

    def targets():
        return [normal(t, (40,), device=device) if isinstance(t, str) else t for t in into]

    halves = (partial_sums[:3], partial_sums[3:])
    got = sum_partials_pair(partial_sums, 3, kind, tuple(targets()))
    for half, target, both in zip(halves, targets(), got, strict=True):
        assert (both is None) == (target is FROZEN)
        if both is not None:
            same_bits(both, sum_partials(half, kind, target))


def test_derived_backward_fuses_the_stream(device):
    def two_norms(x, residual, weight):
        y, h = add_rmsnorm(x, residual, weight, eps=EPS)
        return norm_residual(h, weight, eps=EPS)[0], y

    def reference(x, residual, weight):
        y, h = add_rmsnorm_ref(x, residual, weight, eps=EPS)
        return rmsnorm_ref(h, weight, eps=EPS), y

    x, residual, weight, dy, dh = problem("float32", 6, 40, device)
    want = oracle(reference, (x, residual, weight), dy, dh)[2:]
    pair = vjp(two_norms)
    _, res = pair.fwd(x, residual, weight)
    for got, exact in zip(pair.bwd(res, dy, dh), want, strict=True):
        close(got, exact, "float32", roundings=DX)


def test_pairs_hold_their_functions():
    assert rmsnorm.fwd is rmsnorm_fwd and rmsnorm.bwd is rmsnorm_bwd
    assert norm_residual.bwd is norm_residual_bwd and add_rmsnorm.bwd is add_rmsnorm_bwd


def test_refuses_what_it_cannot_do():
    x, weight = normal("bfloat16", (2, 16), (16,))
    with pytest.raises(ValueError, match=r"weight must be \(16,\) of bfloat16 or float32"):
        rmsnorm_fwd(x, weight.astype(np.float64), eps=EPS)
    with pytest.raises(ValueError, match="product must be 'storage' or 'float', got 'bf16'"):
        rmsnorm_fwd(x, weight, eps=EPS, product="bf16")
    with pytest.raises(ValueError, match="residual must be bfloat16"):
        add_rmsnorm_fwd(x, x.astype(np.float32), weight, eps=EPS)
    res = RMSNormResiduals(x, weight, np.ones(2, np.float32), False)
    with pytest.raises(ValueError, match="dy must be bfloat16"):
        rmsnorm_bwd(res, x.astype(np.float32))


@kernels_only
def test_kernels_refuse_a_row_too_wide(device):
    wide, weight = normal("float32", (1, MAX_HIDDEN + 4), (MAX_HIDDEN + 4,), device=device)
    with pytest.raises(ValueError, match="hidden must be at most 16384, got 16388"):
        rmsnorm_fwd(wide, weight, eps=EPS)


def apart(x, columns: int):
    """A copy of x whose rows are ``columns`` elements farther apart, and NaN between them."""
    wide = namespace(x).full((len(x), x.shape[1] + columns), np.nan, x.dtype)
    view = wide[:, : x.shape[1]]
    view[...] = x
    return view


@pytest.mark.parametrize("hidden", [136, 39])
@pytest.mark.parametrize("columns", [64, 3])  # rows that do and do not begin at 16 bytes
@each_dtype
def test_rows_may_lie_apart(columns, hidden, dtype, device):
    x, residual, weight, dy, _ = problem(dtype, 6, hidden, device)
    y, res = rmsnorm_fwd(x, weight, eps=EPS)
    dx, dweight = rmsnorm_bwd(res, dy, dresidual=residual)
    out = apart(dy, columns)
    got, got_res = rmsnorm_fwd(x, weight, eps=EPS, out=out)
    assert got is out
    same_bits(got, y)
    same_bits(got_res.rstd, res.rstd)
    rows = [apart(a, columns) for a in (dy, residual, dy)]
    got_dx, got_dweight = rmsnorm_bwd(res, rows[0], dresidual=rows[1], out=rows[2])
    assert got_dx is rows[2]
    same_bits(got_dx, dx)
    same_bits(got_dweight, dweight)
    for view in (out, *rows):
        assert np.isnan(to_host(view.base)[:, hidden:].astype(np.float32)).all(), "written between"


def test_rows_that_begin_off_16_bytes(device):
    x, _, weight, dy, _ = problem("bfloat16", 6, 64, device)
    y, res = rmsnorm_fwd(x, weight, eps=EPS)
    out = apart(dy, 8).base[:, 1:65]
    same_bits(rmsnorm_fwd(x, weight, eps=EPS, out=out)[0], y)


def test_refuses_an_out_that_does_not_fit():
    x, _, weight, dy, _ = problem("float32", 4, 8, "host")
    res = rmsnorm_fwd(x, weight, eps=EPS)[1]
    with pytest.raises(ValueError, match=r"rmsnorm_fwd: out must be float32\(4, 8\)"):
        rmsnorm_fwd(x, weight, eps=EPS, out=x.astype(np.float64))
    with pytest.raises(ValueError, match=r"rmsnorm_bwd: out must be float32\(4, 8\)"):
        rmsnorm_bwd(res, dy, out=x.astype(np.float64))


@pytest.mark.parametrize("which", ["x", "residual", "weight", "dy", "dh"])
@each_dtype
def test_arrays_that_begin_off_16_bytes(which, dtype, device):
    names = ("x", "residual", "weight", "dy", "dh")
    plain = dict(zip(names, problem(dtype, 5, 136, device), strict=True))
    found = []
    for arrays in (plain, plain | {which: unaligned(plain[which], device)}):
        x, residual, weight, dy, dh = arrays.values()
        outputs, res = add_rmsnorm_fwd(x, residual, weight, eps=EPS)
        y, alone = rmsnorm_fwd(x, weight, eps=EPS)
        found.append([*outputs, y, *add_rmsnorm_bwd(res, dy, dh), *rmsnorm_bwd(alone, dy)])
    for got, want in zip(*found, strict=True):
        same_bits(got, want)


@kernels_only
def test_kernels_refuse_strided_weights_and_buffers(device):
    x, _, weight, dy, _ = problem("float32", 3, 8, device)
    wide = to_device(np.zeros((8, 2), np.float32), device)
    with pytest.raises(ValueError, match="weight must be C-contiguous"):
        rmsnorm_fwd(x, wide[:, 0], eps=EPS)
    _, res = rmsnorm_fwd(x, weight, eps=EPS)
    with pytest.raises(ValueError, match="into must be C-contiguous"):
        rmsnorm_bwd(res, dy, into=wide[:, 0])


def casting(run, arrays, slot, **settings):
    """Outputs and residuals of a forward with a cast of its y, and the codes."""
    cast = Cast.begin(slot, arrays[0].shape, like=arrays[0])
    assert cast is not None
    outputs, res = run(*arrays, eps=EPS, cast=cast, **settings)
    return outputs, res, cast.codes


# Least; several rows in a block, some lanes without a column; rows of three warps; the widest.
@pytest.mark.parametrize("tokens,hidden", [(16, 16), (48, 1008), (32, 2560), (16, 16384)])
@pytest.mark.parametrize("run", [rmsnorm_fwd, norm_residual_fwd, add_rmsnorm_fwd])
def test_a_cast_is_that_of_y(run, tokens, hidden, device):
    x, residual, weight, _, _ = problem("bfloat16", tokens, hidden, device)
    arrays = (x, residual, weight) if run is add_rmsnorm_fwd else (x, weight)
    found, slot = (slot_of(E4M3, device, 2.0) for _ in range(2))  # some values saturate
    outputs, res = run(*arrays, eps=EPS)
    y = outputs if run is rmsnorm_fwd else outputs[0]
    want = fp8_cast(y, slot)
    got_outputs, got_res, codes = casting(run, arrays, found)
    for got, exact in zip((*got_outputs, got_res.rstd), (*outputs, res.rstd), strict=True):
        same_bits(got, exact)
    same_bits(codes.rows, want.rows)
    same_bits(codes.inverse, want.inverse)
    same_bits(found.amax, slot.amax)
    assert float(to_host(found.amax)[0]) > 2


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
def test_a_cast_sees_what_is_not_finite(weight_dtype, device):
    x = to_host(problem("bfloat16", 16, 48, device)[0])
    x[3, 5], x[7, 40] = np.inf, np.nan
    x, weight = to_device(x, device), normal(weight_dtype, (48,), device=device)
    found, slot = (slot_of(E4M3, device, 4.0) for _ in range(2))
    with np.errstate(invalid="ignore"):
        want = fp8_cast(rmsnorm_fwd(x, weight, eps=EPS)[0], slot)
        codes = casting(rmsnorm_fwd, (x, weight), found)[2]
    same_bits(codes.rows, want.rows)
    assert not np.isfinite(to_host(found.amax)).any() and not np.isfinite(to_host(slot.amax)).any()


def test_a_cast_of_rows_that_lie_apart_leaves_no_trace_in_an_evaluation(device):
    x, _, weight, dy, _ = problem("bfloat16", 16, 48, device)
    slot = slot_of(E4M3, device, 4.0)
    with slot.state.unrecorded():
        y, _, codes = casting(rmsnorm_fwd, (x, weight), slot, out=apart(dy, 64))
    assert not to_host(slot.amax).any()
    same_bits(codes.rows, fp8_cast(y, slot).rows)
    assert to_host(slot.amax).all()


@kernels_only
def test_kernels_refuse_a_cast_beside_rows_off_16_bytes(device):
    x, _, weight, dy, _ = problem("bfloat16", 16, 48, device)
    slot = slot_of(E4M3, device, 4.0)
    for arrays, settings in (
        ((unaligned(x, device), weight), {}),
        ((x, weight), {"out": apart(dy, 3)}),
        ((x.astype(np.float32), weight.astype(np.float32)), {}),
    ):
        with pytest.raises(ValueError, match=r"rmsnorm_fwd: takes a cast of bfloat16\(16, 48\)"):
            casting(rmsnorm_fwd, arrays, slot, **settings)
