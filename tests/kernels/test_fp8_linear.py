"""kernels/fp8_linear.py: outputs and gradients against products of the very codes, in float64."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import FROZEN
from surogate.kernels.fp8 import E4M3, E5M2, Fp8State, fp8_cast
from surogate.kernels.fp8_linear import Fp8Weight, Slots
from surogate.kernels.linear import (
    LinearInto,
    LoRA,
    Products,
    gradient_cast,
    input_cast,
    linear_bwd,
    linear_fwd,
    needs_x,
)
from surogate.kernels.nvfp4_linear import Nvfp4Weight
from surogate.kernels.widened import Adapted, Refresh
from tests.oracle import close, normal, same_bits, to_device, to_host

TOKENS, INNER, OUTER, RANK = 48, 64, 96, 8
PARTS = ((0, 32), (64, 96))
SCALE = 0.5


def slots_of(device: str, scaling: Any) -> Slots:
    library: Any = np
    if device == "cuda":
        import cupy as library
    limits = np.array([448, 448, 57344], np.float32)
    state = Fp8State(limits, length=2, algorithm="max", scaling=scaling, library=library)
    return Slots(state.slot(0, E4M3), state.slot(1, E4M3), state.slot(2, E5M2))


def made(device: str, scaling: Any = "delayed", *, trained: bool = True) -> Any:
    x, w, b, r, dy = normal(
        "bfloat16", (TOKENS, INNER), (OUTER, INNER), (OUTER,), (TOKENS, OUTER), (TOKENS, OUTER)
    )
    x, w, b, r, dy = (to_device(a, device) for a in (x, w, b, r, dy))
    slots = slots_of(device, scaling)
    weight = Fp8Weight.of(w, slots, trained=trained)
    if scaling == "delayed":
        with slots.x.state.calibrating():
            y, res = linear_fwd(x, weight, b, None, r)
            linear_bwd(res, dy)
        slots.x.state.update_()
    return x, w, b, r, dy, weight


def exact(x: Any, slot: Any) -> np.ndarray:
    """x after its cast."""
    codes = fp8_cast(x, slot)
    inverse = to_host(codes.inverse).astype(np.float64)
    values = to_host(codes.rows).view(codes.form.dtype).astype(np.float64)
    return values * (inverse[:, None] if inverse.size > 1 else inverse)


def double(x: Any) -> np.ndarray:
    return to_host(x).astype(np.float64)


@pytest.mark.parametrize("scaling", ["delayed", "tensor"])
def test_products_of_casts(scaling: Any, device: str) -> None:
    x, w, b, r, dy, weight = made(device, scaling)
    y, res = linear_fwd(x, weight, b, None, r)
    dx, dw, db, dlora, dr = linear_bwd(res, dy)
    qx, qw = exact(x, weight.slots.x), exact(w, weight.slots.weight)
    qdy = exact(dy, weight.slots.dy)
    close(y, qx @ qw.T + double(b) + double(r), "bfloat16")
    close(dx, qdy @ qw, "bfloat16")
    close(dw, qdy.T @ qx, "bfloat16")
    close(db, double(dy).sum(axis=0), "bfloat16")
    assert dlora is None and dr is dy
    assert res.x is None and res.codes is not None and res.codes.rows is None


def test_casts_cost_what_eight_bits_cost(device: str) -> None:
    x, w, _, _, dy, weight = made(device)
    y, res = linear_fwd(x, weight)
    dx, dw, *_ = linear_bwd(res, dy)
    for got, want, bits in (
        (y, double(x) @ double(w).T, 2.0**-4),
        (dx, double(dy) @ double(w), 2.0**-3),
        (dw, double(dy).T @ double(x), 2.0**-3),
    ):
        error = np.sqrt(np.mean((double(got) - want) ** 2) / np.mean(want**2))
        assert 0.1 * bits < error < bits


def test_row_scaling(device: str) -> None:
    x, w, b, r, dy, weight = made(device, "row")
    y, res = linear_fwd(x, weight, b, None, r)
    dx, dw, *_ = linear_bwd(res, dy)
    qx, qdy = exact(x, weight.slots.x), exact(dy, weight.slots.dy)
    forward = exact(w, weight.slots.weight)
    turned = exact(to_device(np.ascontiguousarray(to_host(w).T), device), weight.slots.weight)
    close(y, qx @ forward.T + double(b) + double(r), "bfloat16")
    close(dx, qdy @ turned.T, "bfloat16")
    close(dw, double(dy).T @ double(x), "bfloat16")


def test_gradients_add_up_in_their_buffers(device: str) -> None:
    x, _, b, _, dy, weight = made(device)
    _, res = linear_fwd(x, weight, b)
    _, once, *_ = linear_bwd(res, dy)
    into = to_device(np.zeros((OUTER, INNER), np.float32), device)
    for _ in range(2):
        _, res = linear_fwd(x, weight, b)
        _, dw, db, *_ = linear_bwd(res, dy, into=LinearInto(into, FROZEN))
        assert db is None
    close(dw, 2 * double(once), "bfloat16")
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


@pytest.mark.parametrize("blocks", [False, True])
def test_adapter(blocks: bool, device: str) -> None:
    x, w, b, r, dy, _ = made(device)
    slots = slots_of(device, "tensor")
    a, up = normal("bfloat16", (2 * RANK, INNER), (64, RANK), seed=5)
    lora = LoRA(to_device(a, device), to_device(up, device))
    weight = Fp8Weight.of(w, slots, trained=False, ranks=2 * RANK if blocks else 0)
    assert weight.weight is None
    if blocks:
        assert weight.blocks is not None
        Refresh([Adapted(weight.blocks, *lora, PARTS)], SCALE).launch_()
    y, res = linear_fwd(x, weight, b, lora, r, parts=PARTS, scale=SCALE)
    into = LinearInto(FROZEN, FROZEN)
    dx, dw, db, dlora, dr = linear_bwd(res, dy, into=into)
    assert dw is None and db is None and dlora is not None
    spread = np.zeros((OUTER, 2 * RANK))
    for part, (start, stop) in enumerate(PARTS):
        rows = double(up)[part * 32 : part * 32 + 32]
        spread[start:stop, part * RANK : (part + 1) * RANK] = SCALE * rows
    t = double(x) @ double(a).T
    dt = double(dy) @ spread
    qx, qw, qdy = (exact(*p) for p in zip((x, w, dy), slots, strict=True))
    close(y, qx @ qw.T + double(b) + double(r) + t @ spread.T, "bfloat16")
    close(dx, qdy @ qw + dt @ double(a), "bfloat16")
    close(dlora.a, dt.T @ double(x), "bfloat16")
    of_b = SCALE * double(dy).T @ t
    want = [of_b[start:stop, p * RANK : (p + 1) * RANK] for p, (start, stop) in enumerate(PARTS)]
    close(dlora.b, np.concatenate(want), "bfloat16")


def test_a_changed_weight_is_cast_in_place(device: str) -> None:
    x, w, _, _, _, weight = made(device)
    before = weight.forward.rows
    w[...] = w * 2
    weight.recast_()
    assert weight.forward.rows is before
    want = double(exact(x, weight.slots.x)) @ exact(w, weight.slots.weight).T
    close(linear_fwd(x, weight)[0], want, "bfloat16")


@pytest.mark.parametrize("scaling", ["delayed", "row"])  # where rows know nothing of each other
@pytest.mark.parametrize("rows", [1, 17])
def test_any_number_of_rows_goes_forward(scaling: Any, rows: int, device: str) -> None:
    """As generation has them."""
    x, _, b, r, _, weight = made(device, scaling, trained=False)
    assert input_cast(weight, x[:rows]) is None
    with weight.slots.x.state.unrecorded():
        want = linear_fwd(x, weight, b, None, r)[0][:rows]
        found = linear_fwd(x[:rows], weight, b, None, r[:rows])[0]
    close(found, double(want), "bfloat16")


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        Fp8Weight.of(normal("bfloat16", (24, 20)), slots_of("host", "tensor"), trained=True)


@pytest.mark.parametrize("name", ["forward", "dgrad", "wgrad"])
def test_a_product_left_in_bfloat16(name: str, device: str) -> None:
    x, w, _, _, dy, whole = made(device)
    products = Products(**{name: False})
    weight = Fp8Weight.of(w, whole.slots, trained=True, products=products)
    y, res = linear_fwd(x, weight)
    dx, dw, *_ = linear_bwd(res, dy)
    plain = linear_fwd(x, w)
    plain_dx, plain_dw, *_ = linear_bwd(plain[1], dy)
    codes = linear_fwd(x, whole)
    codes_dx, codes_dw, *_ = linear_bwd(codes[1], dy)
    for part, got, exactly, coded in (
        ("forward", y, plain[0], codes[0]),
        ("dgrad", dx, plain_dx, codes_dx),
        ("wgrad", dw, plain_dw, codes_dw),
    ):
        same_bits(got, exactly if part == name else coded)


@pytest.mark.parametrize("products", [Products(), Products(forward=False), Products(dgrad=False)])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("scaling", ["delayed", "tensor", "row"])
def test_what_its_maker_casts(scaling: Any, trained: bool, products: Products) -> None:
    x, w, _, _, dy, _ = made("host", "tensor")
    slots = slots_of("host", scaling)
    weight = Fp8Weight.of(w, slots, trained=trained, products=products)
    known = scaling == "delayed"

    def found() -> list[bool]:
        casts = [input_cast(weight, x), input_cast(weight, x, keep_x=False)]
        return [cast is not None for cast in (*casts, gradient_cast(weight, dy))]

    forward, dgrad = known and products.forward, known and products.dgrad
    assert found() == [forward and not trained, forward, dgrad and not trained]
    with slots.x.state.calibrating():
        assert found() == [False] * 3


def test_other_weights_cast_nothing_beforehand() -> None:
    x, w, *_ = made("host", "tensor")
    for weight in (w, Nvfp4Weight.of(w, np.zeros(2, np.uint32), trained=False)):
        assert input_cast(weight, x, keep_x=False) is None and gradient_cast(weight, x) is None


def test_a_cast_made_beforehand_changes_no_bit(device: str) -> None:
    x, w, b, r, dy, calibrated = made(device)
    weight = Fp8Weight.of(w, calibrated.slots, trained=False)
    y, res = linear_fwd(x, weight, b, None, r)
    dx = linear_bwd(res, dy)[0]
    cast, cast_dy = input_cast(weight, x), gradient_cast(weight, dy)
    assert cast is not None and cast_dy is not None
    fp8_cast(x, cast.slot, out=cast.codes)
    fp8_cast(dy, cast_dy.slot, out=cast_dy.codes)
    same_bits(linear_fwd(x * 0, weight, b, None, r, cast=cast)[0], y)
    same_bits(linear_bwd(res, dy * 0, cast=cast_dy)[0], dx)
