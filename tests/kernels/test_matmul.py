"""Products of every transposition, type, addend and stride against float64; how plans are found."""

import json

import numpy as np
import pytest

from surogate.kernels import cublaslt
from surogate.kernels.arrays import BF16, empty
from surogate.kernels.matmul import Product, matmul, matmul_ref, record
from tests.oracle import close, normal, same_bits, to_device, to_host

# Emulated arrays take the host's path: products are the library's, not kernels of ours.
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]
TYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
# one of each size, no multiple of a vector, tiles of the tensor cores, one row
SHAPES = [(1, 1, 1), (5, 7, 3), (64, 128, 256), (1, 48, 33)]


def operands(dtype, rows, columns, inner, transpose_a, transpose_b, device):
    shape_a = (inner, rows) if transpose_a else (rows, inner)
    shape_b = (columns, inner) if transpose_b else (inner, columns)
    return normal(dtype, shape_a, shape_b, device=device)


def exact(a, b, transpose_a=False, transpose_b=False):
    a, b = to_host(a).astype(np.float64), to_host(b).astype(np.float64)
    return matmul_ref(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,out_dtype", TYPES)
@pytest.mark.parametrize("transpose_a,transpose_b", TRANSPOSES)
@pytest.mark.parametrize("rows,columns,inner", SHAPES)
def test_product(rows, columns, inner, transpose_a, transpose_b, dtype, out_dtype, device):
    a, b = operands(dtype, rows, columns, inner, transpose_a, transpose_b, device)
    got = matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, dtype=out_dtype)
    assert got.dtype == out_dtype
    # Products of bf16 are exact in float32: only sums and the output round.
    terms = inner if out_dtype == "float32" else 1
    want = exact(a, b, transpose_a, transpose_b)
    close(got, want, out_dtype, scale=np.sqrt(inner), terms=terms)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,out_dtype", TYPES)
@pytest.mark.parametrize("addend", ["c", "accumulate", "bias", "bias and c"])
def test_what_is_added(addend, dtype, out_dtype, device):
    rows, columns, inner = 24, 40, 16
    a, b = normal(dtype, (rows, inner), (inner, columns), device=device)
    c, bias = normal(out_dtype, (rows, columns), (columns,), seed=1, device=device)
    want = 0.5 * exact(a, b)
    if addend == "accumulate":
        out = c.copy()
        got = matmul(a, b, out=out, accumulate=True, alpha=0.5)
        assert got is out
        want = want + to_host(c).astype(np.float64)
    else:
        terms = {
            "c": c if "c" in addend.split() else None,
            "bias": bias if "bias" in addend else None,
        }
        before = {name: None if x is None else x.copy() for name, x in terms.items()}
        got = matmul(a, b, alpha=0.5, dtype=out_dtype, **terms)
        for name, x in terms.items():
            if x is not None:
                want = want + to_host(x).astype(np.float64)
                same_bits(x, before[name])
    close(got, want, out_dtype, scale=np.sqrt(inner))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inner", [16, 0])
def test_beta_scales_what_is_added(inner, device):
    a, b = normal("bfloat16", (24, inner), (inner, 40), device=device)
    c = normal("bfloat16", (24, 40), seed=1, device=device)
    want = 0.5 * exact(a, b) - 2.25 * to_host(c).astype(np.float64)
    close(matmul(a, b, c=c, alpha=0.5, beta=-2.25), want, "bfloat16", scale=4.0)
    matmul(a, b, out=c, accumulate=True, alpha=0.5, beta=-2.25)
    close(c, want, "bfloat16", scale=4.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1, 8])  # columns: aligned, not even by 4 bytes, by 16
def test_slices_of_columns(offset, device):
    rows, columns, inner = 16, 24, 32
    wide_a, wide_b, wide_out = normal(
        "bfloat16", (rows, inner + 16), (columns, inner + 16), (rows, columns + 16), device=device
    )
    a, b = wide_a[:, offset : offset + inner], wide_b[:, offset : offset + inner]
    before = to_host(wide_out).copy()
    out = wide_out[:, offset : offset + columns]
    want = exact(a, b, False, True) + to_host(out).astype(np.float64)
    matmul(a, b, transpose_b=True, out=out, accumulate=True)
    close(out, want, "bfloat16", scale=np.sqrt(inner))
    after = to_host(wide_out)
    same_bits(after[:, :offset], before[:, :offset])
    same_bits(after[:, offset + columns :], before[:, offset + columns :])


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_sum_and_nothing_to_write(device):
    a, b = normal("float32", (3, 0), (0, 4), device=device)
    np.testing.assert_array_equal(to_host(matmul(a, b)), np.zeros((3, 4), np.float32))
    held = to_device(np.ones((3, 4), np.float32), device)
    np.testing.assert_array_equal(to_host(matmul(a, b, out=held, accumulate=True)), 1)
    np.testing.assert_array_equal(to_host(matmul(a, b, c=held)), 1)
    assert matmul(b, a, transpose_a=True, transpose_b=True).shape == (4, 3)
    assert matmul(a, normal("float32", (0, 0), device=device)).shape == (3, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_every_time(device):
    a, b = normal("bfloat16", (256, 512), (384, 512), device=device)
    first = matmul(a, b, transpose_b=True)
    for _ in range(5):
        same_bits(matmul(a, b, transpose_b=True), first)


def test_refusals():
    a, b = normal("float32", (3, 4), (4, 5))
    with pytest.raises(ValueError, match=r"inner sizes must agree, got \(3, 4\) and \(5, 4\)"):
        matmul(a, b, transpose_b=True)
    with pytest.raises(
        ValueError, match="both be bfloat16 or both float32, got float32 and bfloat16"
    ):
        matmul(a, b.astype(BF16))
    with pytest.raises(ValueError, match="of float32, got .* of bfloat16"):
        matmul(a, b, dtype=BF16)
    with pytest.raises(ValueError, match="pass out"):
        matmul(a, b, accumulate=True)
    out = np.zeros((3, 5), np.float32)
    with pytest.raises(ValueError, match="exclude"):
        matmul(a, b, c=out, out=out, accumulate=True)
    with pytest.raises(ValueError, match="bias must be"):
        matmul(a, b, bias=out[0].astype(BF16))
    with pytest.raises(ValueError, match="c must be"):
        matmul(a, b, c=out.astype(np.float64))


def test_record_counts_products():
    a, b = normal("bfloat16", (3, 4), (5, 4))
    outer: list[Product] = []
    with record(outer):
        matmul(a, b, transpose_b=True)
        with record([]) as inner:
            matmul(b, a, transpose_b=True)
    matmul(a, b, transpose_b=True)
    assert outer == [Product(3, 5, 4, "bfloat16"), Product(5, 3, 4, "bfloat16")]
    assert inner == outer[1:] and outer[0].flops == 2 * 3 * 5 * 4


def test_matrices_of_views():
    x = np.zeros((4, 12), np.float32)
    assert cublaslt.Matrix.of("a", x[:, 2:7]) == ("float32", 4, 5, 12)
    assert cublaslt.Matrix.of("a", x[:1, 2:7]) == ("float32", 1, 5, 5)
    assert cublaslt.Matrix.of("a", x[::2]) == ("float32", 2, 12, 24)
    for view in (x.T, x[:, ::2]):
        with pytest.raises(ValueError, match="transposed view"):
            cublaslt.Matrix.of("a", view)


@pytest.mark.gpu
def test_the_algorithm_is_kept_on_disk_and_used_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(cublaslt, "plans", {})
    a, b = normal("bfloat16", (96, 160), (224, 160), device="cuda")
    first = matmul(a, b, transpose_b=True)
    [path] = tmp_path.glob("matmul/*/*.json")
    kept = json.loads(path.read_text())
    assert len(bytes.fromhex(kept["algorithm"])) == 64 and kept["microseconds"] > 0
    cublaslt.plans.clear()
    monkeypatch.setattr(cublaslt, "_tune", lambda *_: pytest.fail("tuned again"))
    same_bits(matmul(a, b, transpose_b=True), first)
    [plan] = cublaslt.plans.values()
    assert plan.algorithm.tobytes().hex() == kept["algorithm"]


@pytest.mark.gpu
def test_tuning_leaves_an_accumulator_as_it_was():
    a, b = normal("bfloat16", (72, 40), (72, 56), device="cuda")
    for dtype in ("float32", "bfloat16"):
        for view in (slice(None), slice(0, 56)):  # contiguous, and a slice of columns
            wide = normal(dtype, (40, 56 if view == slice(None) else 64), seed=2, device="cuda")
            want = exact(a, b, True, False) + to_host(wide[:, view]).astype(np.float64)
            matmul(a, b, transpose_a=True, out=wide[:, view], accumulate=True)
            close(wide[:, view], want, dtype, scale=np.sqrt(72))


@pytest.mark.gpu
def test_a_first_product_during_capture_is_refused_and_a_known_one_recorded():
    import cupy

    a, b = normal("bfloat16", (64, 64), (64, 64), device="cuda")
    out = empty((64, 64), BF16, like=a)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        first = matmul(a, b, out=out).copy()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="before capturing it"):
            matmul(a, b, out=out, alpha=1.0, transpose_a=True)
        matmul(a, b, out=out)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
        same_bits(out, first)
