"""linear: bias, residual and adapters of parts against the reference; gradients into buffers."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.linear import (
    LinearInto,
    LoRA,
    column_sum,
    linear,
    linear_bwd,
    linear_fwd,
    linear_ref,
)
from surogate.kernels.matmul import record
from surogate.kernels.pair import vjp
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host

OUTER, INNER, SCALE = 24, 20, 0.5
NAMES = ("x", "weight", "bias", "a", "b", "residual")
PARTS = {
    "whole": ((0, OUTER),),
    "q, k and v": ((0, 12), (12, 18), (18, 24)),
    "q and v": ((0, 12), (18, 24)),
    "k alone": ((12, 18),),
    "single rows": ((0, 1), (5, 6), (6, 7), (8, 9), (10, 11), (13, 14), (17, 18), (23, 24)),
}


def inputs(dtype, device, tokens=9, rank=4, parts=PARTS["whole"]):
    adapted = sum(stop - start for start, stop in parts)
    shapes = [(tokens, INNER), (OUTER, INNER), (OUTER,), (len(parts) * rank, INNER),
              (adapted, rank), (tokens, OUTER)]  # fmt: skip
    # Every summand of y, and of a gradient, is of the size of 1.
    sizes = [1, INNER**-0.5, 1, INNER**-0.5, rank**-0.5, 1]
    arrays = normal("float32", *shapes)
    kind = BF16 if dtype == "bfloat16" else np.float32
    return [to_device((x * s).astype(kind), device) for x, s in zip(arrays, sizes, strict=True)]


def reference(x, weight, bias, a, b, residual, parts=()):
    lora = None if a is None else LoRA(a, b)
    return linear_ref(x, weight, bias, lora, residual, parts=parts, scale=SCALE)


def run(arrays, dy, parts, **options):
    x, weight, bias, a, b, residual = arrays
    lora = None if a is None else LoRA(a, b)
    y, res = linear_fwd(x, weight, bias, lora, residual, parts=parts, scale=SCALE)
    dx, dweight, dbias, dlora, dresidual = linear_bwd(res, dy, **options)
    da, db = (None, None) if dlora is None else dlora
    return y, dict(zip(NAMES, (dx, dweight, dbias, da, db, dresidual), strict=True))


def compare(arrays, got, want, dtype):
    """Gradients against the reference's; a sum over rows of bf16 products rounds its inputs too."""
    y, grads = got
    want_y, *want_grads = want
    close(y, want_y, dtype, roundings=8)  # two of y, one of t, times the adapter's share
    for name, array, grad in zip(NAMES, arrays, want_grads, strict=True):
        if array is None:
            assert grads[name] is None, name
        else:
            terms = 4 if name in ("x", "a", "b") else 1  # through dt or t, which are rounded
            close(grads[name], grad, dtype, terms=terms * (9 if dtype == "float32" else 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_adapters_of_parts(parts, dtype, device):
    arrays = inputs(dtype, device, parts=parts)
    dy = normal(dtype, (9, OUTER), seed=1, device=device)
    want = oracle(partial(reference, parts=parts), arrays, dy)
    compare(arrays, run(arrays, dy, parts), want, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "present", ["", "bias", "residual", "bias residual", "a b", "a b bias", "a b residual"]
)
def test_what_may_be_absent(present, dtype, device):
    arrays = inputs(dtype, device)
    arrays = [
        x if name in ("x", "weight") or name in present.split() else None
        for name, x in zip(NAMES, arrays, strict=True)
    ]
    dy = normal(dtype, (9, OUTER), seed=1, device=device)
    compare(arrays, run(arrays, dy, ()), oracle(reference, arrays, dy), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens,rank", [(1, 1), (300, 8)])  # least; more than one slice of rows
def test_sizes(tokens, rank, dtype, device):
    parts = PARTS["q and v"]
    arrays = inputs(dtype, device, tokens, rank, parts)
    dy = normal(dtype, (tokens, OUTER), seed=1, device=device)
    want_y, *want = oracle(partial(reference, parts=parts), arrays, dy)
    y, grads = run(arrays, dy, parts)
    close(y, want_y, dtype, roundings=8)
    for name, grad in zip(NAMES, want, strict=True):
        close(grads[name], grad, dtype, terms=4 * (OUTER if dtype == "float32" else 1))


@pytest.mark.parametrize("buffer", ["bfloat16", "float32"])
def test_gradients_are_added_to_buffers(buffer, device):
    parts = PARTS["q and v"]
    arrays = inputs("bfloat16", device, parts=parts)
    dy = normal("bfloat16", (9, OUTER), seed=1, device=device)
    held = normal(buffer, *(x.shape for x in arrays[1:5]), seed=2, device=device)
    before = [to_host(x).astype(np.float64) for x in held]
    into = LinearInto(held[0], held[1], LoRA(held[2], held[3]))
    want = oracle(partial(reference, parts=parts), arrays, dy)[2:6]
    _, grads = run(arrays, dy, parts, into=into)
    for name, buffer_array, had, grad in zip(NAMES[1:5], held, before, want, strict=True):
        assert grads[name] is buffer_array, name
        # What goes through t or dt has rounded in bf16 whatever the buffer.
        through = name in "ab"
        kind = "bfloat16" if through else buffer
        terms = 4 if through or kind == "bfloat16" else 9
        close(grads[name], had + grad, kind, terms=terms)


def test_frozen_weights_take_no_product(device):
    arrays = inputs("bfloat16", device)
    dy = normal("bfloat16", (9, OUTER), seed=1, device=device)
    _, all_grads = run(arrays, dy, ())
    y, grads = run(arrays, dy, (), into=LinearInto(FROZEN, FROZEN, None))
    assert grads["weight"] is None and grads["bias"] is None
    for name in ("x", "a", "b"):
        same_bits(grads[name], all_grads[name])
    with record([]) as products:
        _, grads = run(arrays, dy, (), into=LinearInto(FROZEN, FROZEN, FROZEN), need_dx=False)
    assert all(grads[name] is None for name in NAMES[:-1])
    assert len(products) == 3, "x W^T, x A^T and t B^T: backward has none"
    _, grads = run(arrays, dy, (), into=LinearInto(FROZEN, None, LoRA(FROZEN, None)))
    assert grads["a"] is None
    same_bits(grads["b"], all_grads["b"])
    _, grads = run(arrays, dy, (), into=LinearInto(FROZEN, None, LoRA(None, FROZEN)))
    assert grads["b"] is None
    same_bits(grads["a"], all_grads["a"])


def test_x_may_be_brought_back(device):
    x, weight, bias, a, b, residual = inputs("bfloat16", device)
    dy = normal("bfloat16", (9, OUTER), seed=1, device=device)
    _, kept = linear_fwd(x, weight, bias, LoRA(a, b), residual, scale=SCALE)
    _, light = linear_fwd(x, weight, bias, LoRA(a, b), residual, scale=SCALE, keep_x=False)
    assert light.x is None
    for one, other in zip(linear_bwd(kept, dy), linear_bwd(light, dy, x=x), strict=True):
        for got, want in zip(
            one if isinstance(one, LoRA) else [one],
            other if isinstance(other, LoRA) else [other],
            strict=True,
        ):
            same_bits(got, want)
    with pytest.raises(ValueError, match="pass x"):
        linear_bwd(light, dy)


def test_derived_backward_is_the_written_one(device):
    parts = PARTS["q and v"]
    arrays = inputs("float32", device, parts=parts)
    dy = normal("float32", (9, OUTER), seed=1, device=device)
    x, weight, bias, a, b, residual = arrays
    pair = vjp(lambda *args: linear(*args, parts=parts, scale=SCALE))
    y, res = pair.fwd(x, weight, bias, LoRA(a, b), residual)
    dx, dweight, dbias, dlora, dresidual = pair.bwd(res, dy)
    want_y, want = run(arrays, dy, parts)
    same_bits(y, want_y)
    for name, grad in zip(NAMES, (dx, dweight, dbias, *dlora, dresidual), strict=True):
        same_bits(grad, want[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# one of each; odd columns; one slice and a vector's columns; many slices and blocks
@pytest.mark.parametrize("rows,columns", [(1, 1), (7, 33), (256, 8), (600, 264)])
def test_column_sum(rows, columns, dtype, device):
    x = normal(dtype, (rows, columns), device=device)
    want = to_host(x).astype(np.float64).sum(axis=0)
    scale = np.sqrt(rows)
    fresh = column_sum(x, dtype=x.dtype)
    terms = rows if dtype == "float32" else 1
    close(fresh, want, dtype, scale=scale, terms=terms)
    same_bits(column_sum(x, dtype=x.dtype), fresh)
    into = to_device(np.ones(columns, np.float32), device)
    assert column_sum(x, into=into, dtype=x.dtype) is into
    close(into, want + 1, "float32", scale=scale, terms=rows)
    wide = normal(dtype, (rows, columns + 3), device=device)
    view = wide[:, 1 : 1 + columns]
    want = to_host(view).astype(np.float64).sum(axis=0)
    close(column_sum(view, dtype=x.dtype), want, dtype, scale=scale, terms=terms)


def test_refusals():
    x, weight, _, a, b, _ = inputs("float32", "host")
    with pytest.raises(ValueError, match=r"take a \(8, 20\) and b \(18, 4\), got \(4, 20\)"):
        linear_fwd(x, weight, None, LoRA(a, b), parts=PARTS["q and v"])
    for parts in (((12, 18), (0, 12)), ((0, 25),), ((0, 12), (6, 18))):
        with pytest.raises(ValueError, match="ascending row ranges of 24 rows"):
            linear_fwd(x, weight, None, LoRA(a, b), parts=parts)
    with pytest.raises(ValueError, match="at most 8 parts, got 9"):
        linear_fwd(x, weight, None, LoRA(a, b), parts=((0, 1),) * 9)
    with pytest.raises(ValueError, match="accumulates in bfloat16 or float32, got float64"):
        res = linear_fwd(x.astype(BF16), weight.astype(BF16))[1]
        linear_bwd(res, normal("bfloat16", (9, OUTER)), into=LinearInto(weight.astype(np.float64)))
