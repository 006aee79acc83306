"""Weights that lie with their adapter: products with and without room, and their refresh."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.linear import LinearInto, LoRA, linear, linear_bwd, linear_fwd
from surogate.kernels.matmul import record
from surogate.kernels.pair import vjp
from surogate.kernels.widened import (
    Adapted,
    Refresh,
    Widened,
    extra_of,
    plain,
    room,
    take_diagonal,
    with_room,
)
from tests.kernels.test_linear import INNER, NAMES, OUTER, PARTS, SCALE, compare, inputs, reference
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host

each_parts = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def widen(weight, a, b, parts):
    """The weight with its adapter, as a step has it."""
    made = Widened.of(weight, len(a))
    Refresh([Adapted(made, a, b, parts)], SCALE).launch_()
    return made


def roomy(x, weight):
    """A copy of x whose rows have room for the weight."""
    out = with_room(x, x.shape[1], weight)
    out[...] = x
    return out


def run(arrays, dy, parts, *, with_x=True, with_dy=True, keep_x=True, **options):
    x, weight, bias, a, b, residual = arrays
    weight = widen(weight, a, b, parts)
    x = roomy(x, weight) if with_x else x
    dy = roomy(dy, weight) if with_dy else dy
    y, res = linear_fwd(
        x, weight, bias, LoRA(a, b), residual, parts=parts, scale=SCALE, keep_x=keep_x
    )
    if not keep_x:
        options["x"] = x
    dx, dweight, dbias, dlora, dresidual = linear_bwd(res, dy, **options)
    da, db = (None, None) if dlora is None else dlora
    return y, dict(zip(NAMES, (dx, dweight, dbias, da, db, dresidual), strict=True))


@each_dtype
@each_parts
@pytest.mark.parametrize("with_x,with_dy", [(True, True), (False, False), (True, False)])
def test_products_match_reference(with_x, with_dy, parts, dtype, device):
    arrays = inputs(dtype, device, parts=parts)
    dy = normal(dtype, (9, OUTER), seed=1, device=device)
    want = oracle(partial(reference, parts=parts), arrays, dy)
    compare(arrays, run(arrays, dy, parts, with_x=with_x, with_dy=with_dy), want, dtype)


def test_a_models_sizes(device):
    """Ranks that fill their block, rows of whole 16-byte accesses."""
    parts, rank, tokens = ((0, 64), (64, 96), (96, 128), (128, 192)), 16, 40
    shapes = [(tokens, 64), (192, 64), (192,), (64, 64), (192, rank), (tokens, 192)]
    arrays = [to_device((x / 8).astype(BF16), device) for x in normal("float32", *shapes)]
    dy = normal("bfloat16", (tokens, 192), seed=1, device=device)
    want = oracle(partial(reference, parts=parts), arrays, dy)
    y, grads = run(arrays, dy, parts)
    close(y, want[0], "bfloat16", roundings=8)
    for name, grad in zip(NAMES, want[1:], strict=True):
        close(grads[name], grad, "bfloat16", terms=4)


def test_one_product_where_there_is_room():
    parts = PARTS["q, k and v"]
    arrays = inputs("float32", "host", parts=parts)
    dy = normal("float32", (9, OUTER), seed=1)
    frozen = LinearInto(FROZEN, FROZEN, None)
    with record([]) as roomy_products:
        run(arrays, dy, parts, into=frozen)
    with record([]) as others:
        run(arrays, dy, parts, with_x=False, with_dy=False, into=frozen)
    assert len(roomy_products) == 6, "t, y; u, dx, dA, dB of all parts"
    assert len(others) == 8


def test_room_holds_t_and_zeros_and_nothing_else_is_written(device):
    parts = PARTS["q and v"]
    x, weight, _, a, b, _ = inputs("bfloat16", device, parts=parts)
    made = widen(weight, a, b, parts)
    rows = roomy(x, made)
    linear_fwd(rows, made, None, LoRA(a, b), parts=parts, scale=SCALE)
    wide = room(rows, made.extra)
    same_bits(wide[:, :INNER], x)
    want = to_host(x).astype(np.float64) @ to_host(a).astype(np.float64).T
    close(wide[:, INNER : INNER + len(a)], want, "bfloat16")
    assert not to_host(wide)[:, INNER + len(a) :].any()
    data = normal("bfloat16", (9, INNER + 65), device=device)  # columns of a matrix, and no room
    before = to_host(data).copy()
    linear_fwd(data[:, :INNER], made, None, LoRA(a, b), parts=parts, scale=SCALE)
    same_bits(data, before)


def test_room_is_found_for_its_own_weight_only():
    made = Widened.blank((8, 20), 3, np.float32, like=np.zeros(1))
    x = normal("float32", (4, 20))
    rows = with_room(x, 20, made)
    assert room(rows, 64) is rows.base
    assert room(rows, 128) is None and room(x, 64) is None and room(rows[:3], 64) is None
    assert room(rows.base[:, 64:], 64) is None, "the last columns"
    assert with_room(x, 20, x) is None


@pytest.mark.parametrize("with_x", [True, False])
def test_x_brought_back_gives_the_same_bits(with_x, device):
    parts = PARTS["q, k and v"]
    arrays = inputs("bfloat16", device, parts=parts)
    dy = normal("bfloat16", (9, OUTER), seed=1, device=device)
    y, grads = run(arrays, dy, parts, with_x=with_x)
    light, again = run(arrays, dy, parts, with_x=with_x, keep_x=False)
    same_bits(light, y)
    for name in NAMES:
        same_bits(again[name], grads[name])
    x, weight, _, a, b, _ = arrays
    res = linear_fwd(x, widen(weight, a, b, parts), None, LoRA(a, b), parts=parts, keep_x=False)[1]
    assert res.x is None and res.t is None
    with pytest.raises(ValueError, match="pass x"):
        linear_bwd(res, dy)


@pytest.mark.parametrize("parts", [PARTS["q and v"], PARTS["whole"]], ids=["parts", "whole"])
@pytest.mark.parametrize("buffer", ["bfloat16", "float32"])
def test_gradients_are_added_to_buffers_and_frozen_ones_left_out(buffer, parts, device):
    arrays = inputs("bfloat16", device, parts=parts)
    dy = normal("bfloat16", (9, OUTER), seed=1, device=device)
    held = normal(buffer, arrays[3].shape, arrays[4].shape, seed=2, device=device)
    before = [to_host(x).astype(np.float64) for x in held]
    want = oracle(partial(reference, parts=parts), arrays, dy)[4:6]
    y, grads = run(arrays, dy, parts, into=LinearInto(FROZEN, FROZEN, LoRA(*held)))
    assert grads["weight"] is None and grads["bias"] is None
    for name, buffer_array, had, grad in zip("ab", held, before, want, strict=True):
        assert grads[name] is buffer_array
        close(buffer_array, had + grad, "bfloat16", terms=4)
    _, fresh = run(arrays, dy, parts)
    for frozen, other in (("a", "b"), ("b", "a")):
        lora = LoRA(**{frozen: FROZEN, other: None})
        _, grads = run(arrays, dy, parts, into=LinearInto(FROZEN, FROZEN, lora))
        assert grads[frozen] is None
        same_bits(grads[other], fresh[other])
    for lora in (FROZEN, LoRA(FROZEN, None)):
        into = LinearInto(FROZEN, FROZEN, lora)
        with record([]) as products:
            run(arrays, dy, parts, into=into, need_dx=False)
        assert len(products) == (2 if lora is FROZEN else 3)


def test_without_its_adapter_a_widened_weight_is_the_plain_one(device):
    x, weight, bias, a, b, residual = inputs("bfloat16", device)
    made = widen(weight, a, b, ())
    want, _ = linear_fwd(x, weight, bias, None, residual)
    got, res = linear_fwd(x, made, bias, None, residual)
    same_bits(got, want)
    assert not isinstance(res.weight, Widened)


def test_derived_backward_is_the_written_one(device):
    parts = PARTS["q and v"]
    arrays = inputs("float32", device, parts=parts)
    dy = normal("float32", (9, OUTER), seed=1, device=device)
    x, weight, bias, a, b, residual = arrays
    made = widen(weight, a, b, parts)
    pair = vjp(lambda *args: linear(*args, parts=parts, scale=SCALE))
    y, res = pair.fwd(x, made, bias, LoRA(a, b), residual)
    dx, dweight, dbias, dlora, dresidual = pair.bwd(res, dy)
    want_y, want = run(arrays, dy, parts, with_x=False, with_dy=False)
    same_bits(y, want_y)
    for name, grad in zip(NAMES, (dx, dweight, dbias, *dlora, dresidual), strict=True):
        same_bits(grad, want[name])


@each_dtype
@pytest.mark.parametrize(
    "inner,rank,scale",
    [
        (64, 16, 2.0),  # whole 16-byte accesses, an exact scale
        (72, 8, 0.3),  # a scale that rounds
        (20, 3, 0.5),  # single elements
        (3000, 8, 1.0),  # rows over several chunks of a table
    ],
)
def test_refresh_writes_every_block(inner, rank, scale, dtype, device):
    several = []
    for parts in PARTS.values():
        weight, a, b = normal(
            dtype,
            (OUTER, inner),
            (len(parts) * rank, inner),
            (sum(stop - start for start, stop in parts), rank),
            device=device,
        )
        several.append(Adapted(Widened.of(weight, len(a)), a, b, parts))
    refresh = Refresh(several, scale)
    refresh.launch_()
    for _, a, b, _ in several:
        a[...], b[...] = a[::-1].copy(), -b
    refresh.launch_()
    for made, a, b, parts in several:
        want = np.zeros(made.rows.shape, to_host(a).dtype)
        want[:OUTER, :inner] = to_host(made.weight)
        want[OUTER : OUTER + len(a), :inner] = to_host(a)
        row = 0
        scaled = (to_host(b).astype(np.float32) * np.float32(scale)).astype(want.dtype)
        for part, (start, stop) in enumerate(parts):
            columns = slice(inner + part * rank, inner + (part + 1) * rank)
            want[start:stop, columns] = scaled[row : row + stop - start]
            row += stop - start
        same_bits(made.rows, want)


def test_refresh_refuses_what_does_not_fit():
    made = Widened.blank((8, 20), 4, np.float32, like=np.zeros(1))
    a, b = normal("float32", (4, 20), (8, 4))
    with pytest.raises(ValueError, match=r"fit its weight, got \(4, 19\) for \(4, 20\)"):
        Refresh([Adapted(made, a[:, :19].copy(), b, ())], 1.0)
    with pytest.raises(ValueError, match="must be contiguous"):
        Refresh([Adapted(made, a, normal("float32", (4, 8)).T, ())], 1.0)
    with pytest.raises(ValueError, match=r"one dtype, got \['bfloat16', 'float32'\]"):
        Refresh([Adapted(made, a.astype(BF16), b, ())], 1.0)
    with pytest.raises(ValueError, match="at least one"):
        Refresh([], 1.0)


def test_a_weight_with_room_is_taken_over_without_a_copy():
    weight = normal("float32", (OUTER, INNER))
    first = Widened.of(weight, 5)
    same_bits(first.weight, weight)
    assert first.extra == 64 and first.shape == (OUTER, INNER) and first.ndim == 2
    assert Widened.of(first.weight, 64).rows is first.rows
    assert Widened.of(first.weight, 65).rows is not first.rows, "more ranks than it has room for"
    assert plain(first).base is first.rows and plain(weight) is weight
    assert [extra_of(n) for n in (1, 16, 64, 65, 128)] == [64, 64, 64, 128, 128]


@each_parts
@pytest.mark.parametrize("buffer", [None, "float32", "bfloat16"])
def test_take_diagonal(buffer, parts, device):
    rank, rows = 3, sum(stop - start for start, stop in parts)
    product = normal("float32", (OUTER, 64), device=device)
    host = to_host(product)
    blocks = [host[a:b, p * rank : (p + 1) * rank] for p, (a, b) in enumerate(parts)]
    want, into = np.concatenate(blocks), None
    if buffer is not None:
        into = normal(buffer, (rows, rank), seed=1, device=device)
        want = want + to_host(into).astype(np.float32)
    got = take_diagonal(product, parts=parts, rank=rank, into=into, dtype=BF16)
    assert into is None or got is into
    same_bits(got, want.astype(BF16 if buffer != "float32" else np.float32))
