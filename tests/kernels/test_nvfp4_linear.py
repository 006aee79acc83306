"""linear in NVFP4: outputs and gradients against products of explicit casts, in float64."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import FROZEN
from surogate.kernels.linear import LinearInto, LoRA, Products, linear_bwd, linear_fwd, needs_x
from surogate.kernels.nvfp4 import (
    NEAREST,
    SIGNS,
    Draw,
    nvfp4_amax,
    nvfp4_cast,
    nvfp4_cast_tokens,
    nvfp4_decode,
)
from surogate.kernels.nvfp4_linear import Nvfp4Options, Nvfp4Weight
from surogate.kernels.widened import Adapted, Refresh
from tests.kernels.test_nvfp4 import host, oracle_cast
from tests.oracle import close, normal, same_bits, to_device, to_host

TOKENS, INNER, OUTER, RANK = 40, 64, 96, 8
PARTS = ((0, 32), (64, 96))
SCALE = 0.5
KEY = np.array([7, 1], np.uint32)
PLAIN = Nvfp4Options(four_over_six=False, stochastic=False, signs=None)


def made(device: str, **settings: Any) -> Any:
    x, w, b, r, dy = normal(
        "bfloat16", (TOKENS, INNER), (OUTER, INNER), (OUTER,), (TOKENS, OUTER), (TOKENS, OUTER)
    )
    x, w, b, r, dy = (to_device(a, device) for a in (x, w, b, r, dy))
    weight = Nvfp4Weight.of(
        w, to_device(KEY.copy(), device), **{"trained": True, "tensor": 3, **settings}
    )
    return x, w, b, r, dy, weight


def double(x: Any) -> np.ndarray:
    return to_host(x).astype(np.float64)


def decoded(cast: Any) -> np.ndarray:
    return nvfp4_decode(host(cast)).astype(np.float64)


def along(x: Any, draw: Draw | None = None, **options: Any) -> np.ndarray:
    return decoded(nvfp4_cast(x, nvfp4_amax(x), emulated=True, draw=draw, **options))


def along_tokens(x: Any, signs: int | None, draw: Draw | None = None, **options: Any) -> np.ndarray:
    amax = nvfp4_amax(x, signs=signs)[-1:]
    return decoded(nvfp4_cast_tokens(x, amax, emulated=True, signs=signs, draw=draw, **options))


def blocks(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """x with each block of a shape as one row."""
    (rows, columns), (tall, wide) = x.shape, shape
    split = x.reshape(rows // tall, tall, columns // wide, wide).swapaxes(1, 2)
    return split.reshape(-1, tall * wide)


def fake(x: np.ndarray, shape: tuple[int, int] = (1, 16)) -> np.ndarray:
    """Fake quantisation, without a line of what is tested."""
    split = oracle_cast(blocks(x, shape), np.abs(x).max(), *NEAREST)
    (rows, columns), (tall, wide) = x.shape, shape
    split = split.reshape(rows // tall, columns // wide, tall, wide).swapaxes(1, 2)
    return split.reshape(rows, columns)


def test_against_fake_quantisation_in_float64(device: str) -> None:
    x, w, b, r, dy, weight = made(device, options=PLAIN)
    y, res = linear_fwd(x, weight, b, None, r)
    dx, dw, db, dlora, dr = linear_bwd(res, dy)
    qw = fake(double(w), (16, 16))
    padded = [np.concatenate([double(v), np.zeros((24, v.shape[1]))]) for v in (dy, x)]
    qdy_tokens, qx_tokens = (fake(np.ascontiguousarray(v.T)) for v in padded)
    close(y, fake(double(x)) @ qw.T + double(b) + double(r), "bfloat16")
    close(dx, fake(double(dy)) @ qw, "bfloat16")
    close(dw, qdy_tokens @ qx_tokens.T, "bfloat16")
    close(db, double(dy).sum(axis=0), "bfloat16")
    assert dlora is None and dr is dy


@pytest.mark.parametrize(
    "signs,square", [(SIGNS, True), (0x35C9, True), (None, True), (SIGNS, False)]
)
def test_products_of_casts(signs: int | None, square: bool, device: str) -> None:
    """The recipe's table: which operand has which blocks, rounding, transform and random bits."""
    x, w, _, _, dy, weight = made(device, options=Nvfp4Options(signs=signs, square=square))
    draw = Draw(to_device(KEY, device), tensor=3)
    y, res = linear_fwd(x, weight)
    dx, dw, *_ = linear_bwd(res, dy)
    qw = along(w, tall=square, four_over_six=True)
    qw_back = qw if square else along_tokens(w, None, four_over_six=True).T
    close(y, along(x, four_over_six=True) @ qw.T, "bfloat16")
    close(dx, along(dy, draw) @ qw_back, "bfloat16")
    qx = along_tokens(x, signs, four_over_six=True)
    close(dw, along_tokens(dy, signs, draw) @ qx.T, "bfloat16")


def test_the_transform_cancels(device: str) -> None:
    """dW is an estimate of dy^T x, with the transform or without."""
    x, _, _, _, dy, _ = made(device)
    want = double(dy).T @ double(x)
    for signs in (None, SIGNS):
        *_, weight = made(device, options=Nvfp4Options(signs=signs))
        _, dw, *_ = linear_bwd(linear_fwd(x, weight)[1], dy)
        error = np.sqrt(np.mean((double(dw) - want) ** 2) / np.mean(want**2))
        assert 0.05 < error < 0.25


def test_gradients_are_unbiased() -> None:
    """The mean of dx over keys tends to dy q(W): by 1 / sqrt(draws), which a bias would end."""
    x, w, _, _, dy, weight = made("host")
    _, res = linear_fwd(x, weight)
    want = double(dy) @ along(w, tall=True, four_over_six=True)
    total, draws = np.zeros_like(want), 64
    one = None
    for step in range(draws):
        weight.draw.key[1] = step
        dx = double(linear_bwd(res, dy, into=LinearInto(FROZEN))[0])
        total += dx
        one = dx if one is None else one
    single = np.sqrt(np.mean((one - want) ** 2))
    mean = np.sqrt(np.mean((total / draws - want) ** 2))
    assert mean < 1.3 * single / np.sqrt(draws)


def test_errors_are_what_four_bits_cost(device: str) -> None:
    x, w, _, _, dy, weight = made(device)
    y, res = linear_fwd(x, weight)
    dx, dw, *_ = linear_bwd(res, dy)
    for got, want in (
        (y, double(x) @ double(w).T),
        (dx, double(dy) @ double(w)),
        (dw, double(dy).T @ double(x)),
    ):
        error = np.sqrt(np.mean((double(got) - want) ** 2) / np.mean(want**2))
        assert 0.05 < error < 0.25


def test_gradients_add_up_in_their_buffers(device: str) -> None:
    x, _, b, _, dy, weight = made(device)
    _, res = linear_fwd(x, weight, b)
    _, once, *_ = linear_bwd(res, dy)
    into = to_device(np.zeros((OUTER, INNER), np.float32), device)
    for _ in range(2):
        _, res = linear_fwd(x, weight, b)
        _, dw, db, *_ = linear_bwd(res, dy, into=LinearInto(into, FROZEN))
        assert db is None and dw is into
    close(into, 2 * double(once), "bfloat16")
    _, res = linear_fwd(x, weight)
    dx, dw, *_ = linear_bwd(res, dy, into=LinearInto(FROZEN), need_dx=False)
    assert dx is None and dw is None


def test_x_left_out_comes_back(device: str) -> None:
    x, _, _, _, dy, weight = made(device)
    _, kept = linear_fwd(x, weight)
    _, left = linear_fwd(x, weight, keep_x=False)
    assert not needs_x(kept) and needs_x(left)
    for a, b in zip(linear_bwd(kept, dy)[:2], linear_bwd(left, dy, x=x)[:2], strict=True):
        same_bits(a, b)
    with pytest.raises(ValueError, match="pass x"):
        linear_bwd(left, dy)


def adapter(device: str) -> LoRA:
    a, b = normal("bfloat16", (2 * RANK, INNER), (64, RANK), seed=1)
    return LoRA(to_device(a, device), to_device(b, device))


@pytest.mark.parametrize("ready", [False, True])
def test_adapter_of_a_frozen_weight(ready: bool, device: str) -> None:
    ranks = 2 * RANK if ready else 0
    x, w, _, r, dy, weight = made(device, trained=False, ranks=ranks)
    lora = adapter(device)
    if ready:
        Refresh([Adapted(weight.blocks, *lora, PARTS)], SCALE).launch_()
    y, res = linear_fwd(x, weight, None, lora, r, parts=PARTS, scale=SCALE)
    dx, dw, db, dlora, dr = linear_bwd(res, dy)
    assert dw is None and db is None and weight.weight is None
    spread = np.zeros((OUTER, 2 * RANK))
    spread[:32, :RANK], spread[64:, RANK:] = double(lora.b)[:32], double(lora.b)[32:]
    t, qw = double(x) @ double(lora.a).T, along(w, tall=True, four_over_six=True)
    adapted = SCALE * t @ spread.T
    close(y, along(x, four_over_six=True) @ qw.T + adapted + double(r), "bfloat16", roundings=8)
    dt = SCALE * double(dy) @ spread
    qdy = along(dy, Draw(to_device(KEY, device), tensor=3))
    close(dx, qdy @ qw + dt @ double(lora.a), "bfloat16", roundings=8)
    close(dlora.a, dt.T @ double(x), "bfloat16", roundings=8)
    want = SCALE * np.concatenate(
        [double(dy)[:, :32].T @ t[:, :RANK], double(dy)[:, 64:].T @ t[:, RANK:]]
    )
    close(dlora.b, want, "bfloat16", roundings=8)
    assert dr is dy


@pytest.mark.parametrize("name", Products._fields)
def test_a_product_may_stay_plain(name: str, device: str) -> None:
    products = Products(**{field: field != name for field in Products._fields})
    x, w, _, _, dy, weight = made(device, products=products)
    y, res = linear_fwd(x, weight)
    dx, dw, *_ = linear_bwd(res, dy)
    plain = {
        "forward": (y, double(x) @ double(w).T),
        "dgrad": (dx, double(dy) @ double(w)),
        "wgrad": (dw, double(dy).T @ double(x)),
    }
    for field, (got, want) in plain.items():
        error = np.sqrt(np.mean((double(got) - want) ** 2) / np.mean(want**2))
        assert (error < 2.0**-7) == (field == name)


@pytest.mark.parametrize("square", [True, False])
def test_recast_follows_the_weight_in_place(square: bool, device: str) -> None:
    options = Nvfp4Options(square=square)
    x, w, _, _, dy, weight = made(device, options=options)
    forward, amax = weight.forward.values, weight.forward.amax
    w[...] = w * w.dtype.type(2)
    w[0, 0] = 9
    weight.recast_()
    assert weight.forward.values is forward and weight.forward.amax is amax
    fresh = Nvfp4Weight.of(w, weight.draw.key, trained=True, tensor=3, options=options)
    for one, other in ((weight, fresh),):
        y, res = linear_fwd(x, one)
        want_y, want_res = linear_fwd(x, other)
        same_bits(y, want_y)
        for got, want in zip(linear_bwd(res, dy)[:2], linear_bwd(want_res, dy)[:2], strict=True):
            same_bits(got, want)
    assert weight.nbytes == (2 if square else 4) * OUTER * INNER


def test_random_bits_follow_the_key_in_memory(device: str) -> None:
    x, _, _, _, dy, weight = made(device)
    _, res = linear_fwd(x, weight)
    first = [to_host(g).copy() for g in linear_bwd(res, dy)[:2]]
    for got, want in zip(linear_bwd(res, dy)[:2], first, strict=True):
        same_bits(got, want)
    weight.draw.key[1] = 2
    for got, want in zip(linear_bwd(res, dy)[:2], first, strict=True):
        assert (to_host(got) != want).any()


@pytest.mark.parametrize("where", ["x", "dy"])
def test_what_is_not_finite_shows_in_every_gradient(where: str, device: str) -> None:
    x, _, _, _, dy, weight = made(device)
    bad = x if where == "x" else dy
    bad[3, 4] = np.nan
    with np.errstate(invalid="ignore"):
        y, res = linear_fwd(x, weight)
        dx, dw, *_ = linear_bwd(res, dy)
    assert not np.isfinite(double(dw)).any()
    assert not np.isfinite(double(y if where == "x" else dx)).any()


def test_refuses_sizes_without_blocks() -> None:
    (w,) = (normal("bfloat16", (24, 40)),)
    with pytest.raises(ValueError, match=r"multiples of 16, got \(24, 40\)"):
        Nvfp4Weight.of(w, KEY, trained=True)
