"""vjp and checkpoint: derived pairs agree with written ones, and refuse what they cannot see."""

from typing import NamedTuple

import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.add import accumulate_, add_bwd, add_fwd
from surogate.kernels.arrays import FROZEN
from surogate.kernels.pair import Pair, checkpoint, vjp
from tests.oracle import same_bits

add = Pair(add_fwd, add_bwd)
calls: list[str] = []


def _mul_fwd(a, b):
    calls.append("mul")
    return a * b, (a, b)


def _mul_bwd(res, dy):
    return dy * res[1], dy * res[0]


mul = Pair(_mul_fwd, _mul_bwd)
halves = Pair(
    lambda x: ((x[:2], x[2:]), None),
    lambda res, a, b: np.concatenate([np.zeros(2) if g is None else g for g in (a, b)]),
)


class Params(NamedTuple):
    scale: np.ndarray
    unused: np.ndarray
    missing: np.ndarray | None


X, S, U = np.array([1.0, 2, 3, 4]), np.array([3.0, 5.0, 7.0, 9.0]), np.ones(4)


def square_plus(p: Params, x):
    y = mul(p.scale, x)
    return add(mul(y, y), x)  # y used twice, x twice


def test_gradients_of_values_used_more_than_once():
    fwd, bwd = vjp(square_plus).fwd, vjp(square_plus).bwd
    pair = vjp(square_plus)
    y, res = pair.fwd(Params(S, U, None), X)
    np.testing.assert_array_equal(y, (S * X) ** 2 + X)
    dp, dx = pair.bwd(res, np.ones(4))
    np.testing.assert_array_equal(dp.scale, 2 * S * X * X)
    np.testing.assert_array_equal(dx, 2 * S * S * X + 1)
    assert dp.unused is None and dp.missing is None
    assert callable(fwd) and callable(bwd)


def test_replay_gives_the_same_bits_without_running_the_function_again():
    runs = []

    def f(x, *, factor):
        runs.append(1)
        return mul(x, factor)

    pair = vjp(f)
    for value in (X, X + 1):
        y, res = pair.fwd(value, factor=S)
        same_bits(y, value * S)
        same_bits(pair.bwd(res, np.ones(4)), S)
    assert runs == [1]
    pair.fwd(X[:2], factor=S[:2])
    assert runs == [1, 1], "another shape is another program"


def test_outputs_that_nobody_uses_have_no_cotangent():
    pair = vjp(lambda x: halves(x)[0])
    y, res = pair.fwd(X)
    np.testing.assert_array_equal(y, X[:2])
    np.testing.assert_array_equal(pair.bwd(res, np.ones(2)), [1, 1, 0, 0])


def test_nested_vjp_and_call_without_trace():
    inner = vjp(lambda x: mul(x, x))
    outer = vjp(lambda x: add(inner(x), x))
    y, res = outer.fwd(X)
    np.testing.assert_array_equal(y, X * X + X)
    np.testing.assert_array_equal(outer.bwd(res, np.ones(4)), 2 * X + 1)
    np.testing.assert_array_equal(inner(X), X * X)


def test_checkpoint_keeps_inputs_only_and_runs_forward_again():
    pair = checkpoint(mul)
    calls.clear()
    y, res = pair.fwd(X, S)
    assert len(calls) == 1 and res == ((X, S), {})
    da, db = pair.bwd(res, np.ones(4))
    assert len(calls) == 2
    same_bits(da, S)
    same_bits(db, X)


def test_into_adds_drops_or_returns():
    pair = vjp(square_plus)
    _, res = pair.fwd(Params(S, U, None), X)
    buffer = np.full(4, 10.0)
    dp, dx = pair.bwd(res, np.ones(4), into=(Params(buffer, FROZEN, None), FROZEN))
    assert dp.scale is buffer and dx is None
    np.testing.assert_array_equal(buffer, 10 + 2 * S * X * X)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x: x + x,
        lambda x: np.exp(x),
        lambda x: np.sum(x),
        lambda x: x[0],
        lambda x: x.sum(),
        lambda x: x if x > 0 else x,
        lambda x: _mul_fwd(x, x)[0],
        lambda x: add(x, x.astype("float32")),
        lambda x: [float(x)],
    ],
)
def test_a_traced_value_that_reaches_anything_else_is_refused(misuse):
    with pytest.raises(TypeError, match="pair"):
        vjp(misuse).fwd(X)


def test_returning_what_no_pair_made_is_refused():
    with pytest.raises(TypeError, match="what pairs gave"):
        vjp(lambda x: np.ones(3)).fwd(X)


def test_wrong_number_of_cotangents():
    pair = vjp(lambda x: halves(x))
    _, res = pair.fwd(X)
    with pytest.raises(ValueError, match="expected 2 cotangents, got 1"):
        pair.bwd(res, np.ones(2))


def test_accumulate_into_float32():
    import ml_dtypes

    into = np.ones(3, np.float32)
    accumulate_(into, np.full(3, 2**-9, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(into, np.float32(1 + 2**-9))


def test_tree_keeps_structure():
    value = {"a": Params(S, U, None), "b": [X, (X,)]}
    flat, rebuild = tree.flatten(value)
    assert len(flat) == 4
    again = rebuild([leaf + 1 for leaf in flat])
    assert isinstance(again["a"], Params) and again["a"].missing is None
    np.testing.assert_array_equal(again["b"][1][0], X + 1)
    with pytest.raises(ValueError, match="expected 4 leaves, got 3"):
        rebuild(flat[:3])
