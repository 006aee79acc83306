"""NVFP4 products: emulated ones against the explicit sum over blocks, and the native call."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surogate.kernels import cublaslt
from surogate.kernels.arrays import BF16
from surogate.kernels.matmul import matmul, record
from surogate.kernels.nvfp4 import SIGNS, nvfp4_amax, nvfp4_cast, nvfp4_cast_tokens, untile_scales
from surogate.kernels.nvfp4_matmul import emulated, nvfp4_alpha, nvfp4_matmul
from surogate.kernels.quant.codes import E2M1, E4M3, unpack, values_of
from tests.kernels.test_nvfp4 import host
from tests.oracle import close, normal, same_bits, to_device, to_host


def casts(rows: int, columns: int, inner: int, device: str, *, emulate: bool = True) -> Any:
    a, b = normal("bfloat16", (rows, inner), (columns, inner), device=device)
    return tuple(
        nvfp4_cast(x, nvfp4_amax(x), emulated=emulate, four_over_six=x is a) for x in (a, b)
    )


def block_loop(a: Any, b: Any) -> np.ndarray:
    """The sum over blocks in their order, each exact, in float32: what the formats define."""
    a, b = host(a), host(b)
    total = np.zeros((a.rows, b.rows), np.float32)
    scales = [values_of(untile_scales(x.scales, x.rows, x.inner // 16), E4M3) for x in (a, b)]
    numbers = [values_of(unpack(x.codes, E2M1), E2M1) for x in (a, b)]
    for block in range(a.inner // 16):
        at = slice(16 * block, 16 * block + 16)
        dots = numbers[0][:, at] @ numbers[1][:, at].T  # multiples of 1/4 up to 576: exact
        total += dots * scales[0][:, block, None] * scales[1][None, :, block]
    return total * to_host(nvfp4_alpha(a, b))


@pytest.mark.parametrize("inner", [16, 64, 1024])
def test_emulation_is_the_sum_over_blocks(inner: int, device: str) -> None:
    a, b = casts(24, 40, inner, device)
    got = nvfp4_matmul(a, b, dtype=np.float32 if device == "cuda" else BF16)
    want = block_loop(*casts(24, 40, inner, device, emulate=False))
    if inner == 16:
        same_bits(to_host(got).astype(BF16), want.astype(BF16))
    else:
        close(got, want, str(got.dtype))
    # In float32, before any other rounding.
    exact = [host(x).values.astype(np.float32) for x in (a, b)]
    product = exact[0] @ exact[1].T * to_host(nvfp4_alpha(a, b))
    if inner == 16:
        same_bits(product, want)
    else:
        close(product, want, "float32", terms=inner // 16)


def test_codes_on_the_host_give_the_same_product() -> None:
    wanted = nvfp4_matmul(*casts(24, 40, 64, "host"))
    got = nvfp4_matmul(*casts(24, 40, 64, "host", emulate=False))
    close(got, wanted, "bfloat16")


def test_products_of_casts_along_tokens(device: str) -> None:
    dy, x = normal("bfloat16", (50, 48), (50, 32), device=device)
    amax = [nvfp4_amax(v, signs=SIGNS)[1:] for v in (dy, x)]
    values = [nvfp4_cast_tokens(v, m, emulated=True) for v, m in zip((dy, x), amax, strict=True)]
    codes = [nvfp4_cast_tokens(v, m, emulated=False) for v, m in zip((dy, x), amax, strict=True)]
    got = nvfp4_matmul(*values)
    assert got.shape == (48, 32)
    close(got, block_loop(*codes), "bfloat16")
    error = to_host(got).astype(np.float64) - to_host(dy).astype(np.float64).T @ to_host(x)
    assert np.sqrt(np.mean(error**2)) < 0.2 * np.sqrt(50)


def test_addends(device: str) -> None:
    a, b = casts(16, 24, 32, device)
    c, bias = normal("bfloat16", (16, 24), (24,), device=device)
    plain = to_host(nvfp4_matmul(a, b)).astype(np.float64)
    got = nvfp4_matmul(a, b, c=c, bias=bias)
    close(got, plain + to_host(c).astype(np.float64) + to_host(bias).astype(np.float64), "bfloat16")
    out = to_device(np.ones((16, 24), np.float32), device)
    assert nvfp4_matmul(a, b, out=out, accumulate=True) is out
    close(out, plain + 1, "bfloat16")


def test_alpha_follows_what_is_in_memory(device: str) -> None:
    """A recorded launch reads it again; a matrix that is not finite has a product that is not."""
    a, b = casts(8, 8, 16, device)
    first = to_host(nvfp4_matmul(a, b)).astype(np.float64)
    a.amax[...] = 2 * a.amax
    np.testing.assert_array_equal(to_host(nvfp4_matmul(a, b)).astype(np.float64), 2 * first)
    for bad in (np.nan, np.inf):
        a.amax[...] = bad
        assert not np.isfinite(to_host(nvfp4_matmul(a, b)).astype(np.float64)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_value_that_is_not_finite_reaches_every_output(bad: float, device: str) -> None:
    a, b = normal("bfloat16", (8, 16), (8, 16))
    a[3, 5] = bad
    a, b = to_device(a, device), to_device(b, device)
    with np.errstate(invalid="ignore"):
        one, other = (nvfp4_cast(x, nvfp4_amax(x), emulated=True) for x in (a, b))
        got = to_host(nvfp4_matmul(one, other)).astype(np.float64)
    assert not np.isfinite(got).any()


def test_alpha_of_plain_products(device: str) -> None:
    a, b = normal("bfloat16", (8, 16), (24, 16), device=device)
    alpha = to_device(np.array([0.25], np.float32), device)
    same_bits(
        matmul(a, b, transpose_b=True, alpha=alpha), matmul(a, b, transpose_b=True, alpha=0.25)
    )


class FakeArray(SimpleNamespace):
    """What cublaslt.Call looks at, of an array on a card."""

    def __init__(self, shape: tuple[int, int], dtype: str) -> None:
        itemsize = np.dtype(dtype).itemsize
        super().__init__(
            shape=shape, dtype=np.dtype(dtype), itemsize=itemsize,
            strides=(shape[1] * itemsize, itemsize), data=SimpleNamespace(ptr=1 << 20, device_id=0),
        )  # fmt: skip


def test_the_native_problem_counts_codes_and_not_bytes() -> None:
    a, b, out = (FakeArray(s, d) for s, d in (((8, 32), "u1"), ((24, 32), "u1"), ((8, 24), "f4")))
    scales = np.zeros(512, np.uint8)
    kind = cublaslt.FOUR_BITS
    scaling = cublaslt.Scaling(kind, kind, scales, scales, False)
    call = cublaslt.Call(a, b, None, None, out, False, True, scaling, True)
    problem = cublaslt.Problem.of(call)
    assert problem.a == (kind, 8, 64, 64) and problem.b == (kind, 24, 64, 64)
    assert call.key() != call._replace(device_alpha=False).key()


class Described:
    """In place of cuBLASLt's bindings: writes down what a descriptor is told, by name."""

    def __init__(self) -> None:
        self.told: dict[str, int] = {}
        self.layouts: list[tuple[int, ...]] = []
        self._names: list[str] = []
        names = SimpleNamespace
        self.MatmulMatrixScale = names(VEC16_UE4M3=1, OUTER_VEC_32F=3)
        self.PointerMode = names(DEVICE=1)
        self.MatmulDescAttribute = self

    def __getattr__(self, name: str) -> int:
        self._names.append(name)
        return len(self._names) - 1

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return 1

    def matmul_desc_set_attribute(self, target: int, which: int, value: int, size: int) -> None:
        self.told[self._names[which]] = int.from_bytes(ctypes.string_at(value, size), "little")

    def matrix_layout_create(self, *layout: int) -> int:
        self.layouts.append(layout)
        return len(self.layouts)


def test_the_native_operation_as_cublaslt_is_told() -> None:
    """4-bit types, both along the sum, E4M3 scales per 16, alpha on the card; our b is its A."""
    a, b, out = (FakeArray(s, d) for s, d in (((8, 32), "u1"), ((24, 32), "u1"), ((8, 24), "f4")))
    a_scales, b_scales = FakeArray((512, 1), "u1"), FakeArray((512, 1), "u1")
    a_scales.size = b_scales.size = 512
    b_scales.data.ptr = 1 << 21
    kind = cublaslt.FOUR_BITS
    scaling = cublaslt.Scaling(kind, kind, a_scales, b_scales, False)
    call = cublaslt.Call(a, b, None, None, out, False, True, scaling, True)
    lt, problem = Described(), cublaslt.Problem.of(call)
    cublaslt._operation(lt, problem, call)
    cublaslt._layouts(lt, problem)
    assert lt.told == {
        "TRANSA": 1, "TRANSB": 0, "FAST_ACCUM": 0, "POINTER_MODE": 1,
        "A_SCALE_MODE": 1, "B_SCALE_MODE": 1,
        "A_SCALE_POINTER": 1 << 21, "B_SCALE_POINTER": 1 << 20,
    }  # fmt: skip
    four_bits, float32 = 33, 0  # of cudaDataType_t
    assert lt.layouts == [(float32, 24, 8, 24), (four_bits, 64, 24, 64), (four_bits, 64, 8, 64)]


def test_what_ran_can_be_asked(device: str) -> None:
    assert emulated(None)
    with record([]) as products:
        nvfp4_matmul(*casts(16, 24, 32, device))
    assert [p.dtype for p in products] == ["bfloat16"]
    with record([]) as products:
        nvfp4_matmul(*casts(16, 24, 32, "host", emulate=False))
    assert [tuple(p) for p in products] == [(16, 24, 32, "float4_e2m1fn")]


def test_refusals() -> None:
    a, b = casts(16, 24, 32, "host")
    codes, _ = casts(16, 24, 32, "host", emulate=False)
    with pytest.raises(ValueError, match=r"got codes of \[16, 32\] and values of \[24, 32\]"):
        nvfp4_matmul(codes, b)
    other, _ = casts(16, 24, 48, "host")
    with pytest.raises(ValueError, match="two casts of one inner size"):
        nvfp4_matmul(a, other)
    odd = casts(16, 24, 48, "host", emulate=False)
    with pytest.raises(ValueError, match="multiples of 32 and out .* got 48"):
        nvfp4_matmul(*odd)
