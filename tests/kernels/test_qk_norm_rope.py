"""Norm and rotation of queries and keys: against float64 autodiff, packed, in place and by mode."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import FROZEN
from surogate.kernels.qk_norm_rope import (
    qk_norm_rope,
    qk_norm_rope_bwd,
    qk_norm_rope_bwd_,
    qk_norm_rope_fwd,
    qk_norm_rope_fwd_,
    qk_norm_rope_ref,
)
from surogate.kernels.rmsnorm import rmsnorm_fwd
from surogate.kernels.rope import RopeTable, rope_frequencies, rope_fwd, rope_table
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

EPS = 1e-6
Y = 6  # roundings of q and k: rstd, its product, the weight's, and three of the rotation
DX = 16  # roundings of dqkv: its summands cancel, and the largest is ten times the usual

SIZES = [  # tokens, heads, kv_heads, head_dim, rotary
    (1, 1, 1, 2, 2),  # least: one pair
    (5, 3, 1, 10, 10),  # no 16-byte accesses
    (9, 14, 2, 64, 64),  # Qwen2.5-0.5B: the last heads of a token are fewer than a team takes
    (6, 16, 8, 128, 128),  # Qwen3-0.6B
    (5, 4, 2, 96, 96),  # a head on twelve of 32 lanes
    (5, 4, 1, 256, 64),  # Qwen3.5: a quarter is rotary
    (3, 2, 1, 512, 512),  # the widest head: two slots a lane
    (2200, 2, 1, 16, 16),  # more heads than all blocks hold at once: they walk
    (2200, 2, 1, 256, 256),  # the same with a size of head of its own
]
each_size = pytest.mark.parametrize("tokens,heads,kv_heads,head_dim,rotary", SIZES)
kernels_only = pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def settings_of(tokens: int, heads: int, kv_heads: int, rotary: int, device: str) -> dict:
    """Keyword arguments of the forward: a table of 100 positions and positions out of order."""
    frequencies = rope_frequencies(rotary, base=10000.0)
    table = RopeTable(*[to_device(a, device) for a in rope_table(*frequencies, positions=100)])
    positions = np.random.default_rng(5).integers(0, 100, tokens).astype(np.int32)
    return {
        "table": table,
        "positions": to_device(positions, device),
        "heads": heads,
        "kv_heads": kv_heads,
    }


def problem(
    dtype: str, tokens: int, heads: int, kv_heads: int, head_dim: int, device: str
) -> tuple:
    """qkv, both weights, and a packed (dq, dk, dv)."""
    shape = (tokens, heads + 2 * kv_heads, head_dim)
    return normal(dtype, shape, (head_dim,), (head_dim,), shape, device=device)


def split(packed: np.ndarray, heads: int, kv_heads: int) -> tuple:
    """Views of the queries', keys' and values' heads."""
    return packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]


def in_torch(settings: dict) -> dict:
    import torch

    table = RopeTable(*[torch.tensor(to_host(a).astype(np.float64)) for a in settings["table"]])
    positions = torch.tensor(to_host(settings["positions"])).long()
    return {**settings, "table": table, "positions": positions}


@each_size
@each_dtype
def test_matches_reference(tokens, heads, kv_heads, head_dim, rotary, dtype, device):
    settings = settings_of(tokens, heads, kv_heads, rotary, device)
    qkv, q_weight, k_weight, grads = problem(dtype, tokens, heads, kv_heads, head_dim, device)
    cotangents = split(grads, heads, kv_heads)
    reference = partial(qk_norm_rope_ref, eps=EPS, **in_torch(settings))
    q, k, v, dqkv, dq_weight, dk_weight = oracle(reference, (qkv, q_weight, k_weight), *cotangents)
    (got_q, got_k, got_v), res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    got_dqkv, got_dq_weight, got_dk_weight = qk_norm_rope_bwd(res, *cotangents)
    close(got_q, q, dtype, roundings=Y)
    close(got_k, k, dtype, roundings=Y)
    same_bits(got_v, v.astype(qkv.dtype))
    close(got_dqkv, dqkv, dtype, roundings=DX)
    close(got_dq_weight, dq_weight, dtype, terms=tokens * heads)
    close(got_dk_weight, dk_weight, dtype, terms=tokens * kv_heads)


@each_size
@each_dtype
def test_rotation_alone_matches_reference(tokens, heads, kv_heads, head_dim, rotary, dtype, device):
    settings = settings_of(tokens, heads, kv_heads, rotary, device)
    qkv, _, _, grads = problem(dtype, tokens, heads, kv_heads, head_dim, device)
    cotangents = split(grads, heads, kv_heads)
    q, k, _, dqkv = oracle(partial(qk_norm_rope_ref, **in_torch(settings)), (qkv,), *cotangents)
    (got_q, got_k, _), res = qk_norm_rope_fwd(qkv, None, None, **settings)
    got_dqkv, dq_weight, dk_weight = qk_norm_rope_bwd(res, *cotangents)
    assert res.qkv is dq_weight is dk_weight is None
    close(got_q, q, dtype)
    close(got_k, k, dtype)
    close(got_dqkv, dqkv, dtype)
    turned, _ = rope_fwd(qkv[:, :heads], table=settings["table"], positions=settings["positions"])
    same_bits(got_q, turned)


def test_float64_is_computed_in_float64():
    settings = settings_of(4, 2, 1, 6, "host")
    qkv, q_weight, k_weight, grads = problem("float64", 4, 2, 1, 8, "host")
    cotangents = split(grads, 2, 1)
    reference = partial(qk_norm_rope_ref, eps=EPS, **in_torch(settings))
    want = oracle(reference, (qkv, q_weight, k_weight), *cotangents)
    outputs, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    got = (*outputs, *qk_norm_rope_bwd(res, *cotangents))
    for a, b in zip(got, want, strict=True):
        close(a, b, "float64", roundings=DX)


@pytest.mark.parametrize("head_dim", [32, 10])  # with and without 16-byte accesses
@each_dtype
def test_unit_offset(head_dim, dtype, device):
    settings = settings_of(5, 2, 1, head_dim, device) | {"unit_offset": True, "eps": EPS}
    qkv, q_weight, k_weight, grads = problem(dtype, 5, 2, 1, head_dim, device)
    cotangents = split(grads, 2, 1)
    reference = partial(qk_norm_rope_ref, **in_torch(settings))
    q, k, _, dqkv, dq_weight, _ = oracle(reference, (qkv, q_weight, k_weight), *cotangents)
    (got_q, got_k, _), res = qk_norm_rope_fwd(qkv, q_weight, k_weight, **settings)
    got_dqkv, got_dq_weight, _ = qk_norm_rope_bwd(res, *cotangents)
    close(got_q, q, dtype)
    close(got_k, k, dtype)
    close(got_dqkv, dqkv, dtype, roundings=DX)
    close(got_dq_weight, dq_weight, dtype, terms=10)


def test_agrees_with_its_two_ops(device):
    settings = settings_of(6, 3, 1, 16, device)
    qkv, q_weight, k_weight, _ = problem("float32", 6, 3, 1, 24, device)
    (q, _, _), _ = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    rows = qkv[:, :3].reshape(-1, 24)
    normed = rmsnorm_fwd(rows, q_weight, eps=EPS)[0].reshape(6, 3, 24)
    turned, _ = rope_fwd(normed, table=settings["table"], positions=settings["positions"])
    close(q, to_host(turned), "float32")


@pytest.mark.parametrize("head_dim", [64, 10])
@pytest.mark.parametrize("norm", [True, False])
@each_dtype
def test_backward_in_place_gives_the_same_bits(norm, head_dim, dtype, device):
    settings = settings_of(7, 3, 2, head_dim, device)
    qkv, q_weight, k_weight, packed = problem(dtype, 7, 3, 2, head_dim, device)
    weights = (q_weight, k_weight) if norm else (None, None)
    _, res = qk_norm_rope_fwd(qkv, *weights, eps=EPS, **settings)
    want = qk_norm_rope_bwd(res, *(part.copy() for part in split(packed, 3, 2)))
    got = qk_norm_rope_bwd_(res, packed)
    assert got[0] is packed
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None) == (b is not want[0] and not norm)
        if b is not None:
            same_bits(a, b)


@pytest.mark.parametrize("head_dim", [64, 10])
def test_forward_in_place_gives_the_same_bits(head_dim, device):
    settings = settings_of(7, 3, 2, head_dim, device)
    qkv = problem("bfloat16", 7, 3, 2, head_dim, device)[0]
    want, _ = qk_norm_rope_fwd(qkv.copy(), None, None, **settings)
    got, res = qk_norm_rope_fwd_(qkv, **settings)
    assert res.qkv is None
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)
        assert np.shares_memory(a, qkv) if device != "cuda" else a.base is not None


def test_tokens_may_lie_apart(device):
    settings = settings_of(6, 2, 1, 16, device)
    qkv, q_weight, k_weight, grads = problem("bfloat16", 6, 2, 1, 16, device)
    wide = normal("bfloat16", (6, 7, 16), (6, 7, 16), seed=9, device=device)
    wide[0][:, 2:6], wide[1][:, 1:5] = qkv, grads
    outputs, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    want = (*outputs, *qk_norm_rope_bwd(res, *split(grads, 2, 1)))
    outputs, res = qk_norm_rope_fwd(wide[0][:, 2:6], q_weight, k_weight, eps=EPS, **settings)
    got = (*outputs, *qk_norm_rope_bwd(res, *split(wide[1][:, 1:5], 2, 1)))
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("which", ["qkv", "q_weight", "k_weight", "cos", "sin", "grads"])
@each_dtype
def test_arrays_that_begin_off_16_bytes(which, dtype, device):
    """Other lanes hold a head's values then, so its sums are rounded in another order."""
    settings = settings_of(5, 4, 2, 32, device)
    names = ("qkv", "q_weight", "k_weight", "grads")
    plain = dict(zip(names, problem(dtype, 5, 4, 2, 32, device), strict=True))
    table = settings["table"]
    found = []
    for off in (False, True):
        arrays, angles = plain, table
        if off and which in names:
            arrays = plain | {which: unaligned(plain[which], device)}
        elif off:
            angles = table._replace(**{which: unaligned(getattr(table, which), device)})
        qkv, q_weight, k_weight, grads = arrays.values()
        common = settings | {"table": angles}
        outputs, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **common)
        apart = qk_norm_rope_bwd(res, *split(grads, 4, 2))
        packed = unaligned(grads, device) if off and which == "grads" else grads.copy()
        found.append([*outputs, *apart, *qk_norm_rope_bwd_(res, packed)])
    for got, want in zip(*found, strict=True):
        close(got, to_host(want), dtype)


@kernels_only
def test_kernels_refuse_strided_weights(device):
    qkv, weight, _, _ = problem("float32", 5, 4, 2, 32, device)
    strided = to_device(np.zeros((32, 2), np.float32), device)[:, 0]
    with pytest.raises(ValueError, match="weights must be C-contiguous"):
        qk_norm_rope_fwd(qkv, weight, strided, **settings_of(5, 4, 2, 32, device))


@pytest.mark.parametrize("buffer", ["bfloat16", "float32"])
def test_into_adds_to_buffers(buffer, device):
    settings = settings_of(6, 2, 1, 32, device)
    qkv, q_weight, k_weight, grads = problem("bfloat16", 6, 2, 1, 32, device)
    cotangents = split(grads, 2, 1)
    reference = partial(qk_norm_rope_ref, eps=EPS, **in_torch(settings))
    exact = oracle(reference, (qkv, q_weight, k_weight), *cotangents)[4:]
    _, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    into = normal(buffer, (32,), (32,), seed=3, device=device)
    before = [to_host(a).astype(np.float64) for a in into]
    _, *dweights = qk_norm_rope_bwd(res, *cotangents, into=into)
    for got, target, start, part in zip(dweights, into, before, exact, strict=True):
        assert got is target
        close(got, start + part, buffer, terms=12)


def test_frozen_weights_have_no_gradient(device):
    settings = settings_of(6, 2, 1, 32, device)
    qkv, q_weight, k_weight, grads = problem("bfloat16", 6, 2, 1, 32, device)
    _, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    dqkv, dq_weight, dk_weight = qk_norm_rope_bwd(res, *split(grads, 2, 1))
    got, *none = qk_norm_rope_bwd(res, *split(grads, 2, 1), into=FROZEN)
    same_bits(got, dqkv)
    assert none == [None, None]
    got, none_q, got_k = qk_norm_rope_bwd(res, *split(grads, 2, 1), into=(FROZEN, None))
    same_bits(got, dqkv)
    same_bits(got_k, dk_weight)
    assert none_q is None and dq_weight is not None


def test_unused_outputs(device):
    settings = settings_of(4, 2, 1, 16, device)
    qkv, q_weight, k_weight, grads = problem("float32", 4, 2, 1, 16, device)
    _, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    dq, dk, dv = split(grads, 2, 1)
    full, full_q, full_k = qk_norm_rope_bwd(res, dq, dk, dv)
    only_q, got_q, zero = qk_norm_rope_bwd(res, dq, None, None)
    same_bits(only_q[:, :2], full[:, :2])
    same_bits(got_q, full_q)
    assert not to_host(only_q[:, 2:]).any() and not to_host(zero).any()
    without_q, zero, got_k = qk_norm_rope_bwd(res, None, dk, dv)
    same_bits(without_q[:, 2:], full[:, 2:])
    same_bits(got_k, full_k)
    assert not to_host(zero).any()
    with pytest.raises(ValueError, match="needs a cotangent"):
        qk_norm_rope_bwd(res, None, None, None)


def test_tokens_do_not_depend_on_the_split(device):
    settings = settings_of(10, 3, 1, 32, device)
    qkv, q_weight, k_weight, grads = problem("bfloat16", 10, 3, 1, 32, device)
    (q, k, _), res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    dqkv, _, _ = qk_norm_rope_bwd(res, *split(grads, 3, 1))
    for part in (slice(0, 5), slice(5, 10)):
        half = settings | {"positions": settings["positions"][part]}
        (part_q, part_k, _), part_res = qk_norm_rope_fwd(
            qkv[part], q_weight, k_weight, eps=EPS, **half
        )
        same_bits(part_q, q[part])
        same_bits(part_k, k[part])
        same_bits(qk_norm_rope_bwd(part_res, *split(grads[part], 3, 1))[0], dqkv[part])


def test_twice_gives_the_same_bits(device):
    settings = settings_of(50, 3, 1, 32, device)
    qkv, q_weight, k_weight, grads = problem("float32", 50, 3, 1, 32, device)
    _, res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    first, second = (qk_norm_rope_bwd(res, *split(grads, 3, 1)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        same_bits(a, b)


def test_no_tokens(device):
    settings = settings_of(0, 2, 1, 16, device)
    qkv, q_weight, k_weight, grads = problem("float32", 0, 2, 1, 16, device)
    (q, _, _), res = qk_norm_rope_fwd(qkv, q_weight, k_weight, eps=EPS, **settings)
    dqkv, dq_weight, _ = qk_norm_rope_bwd(res, *split(grads, 2, 1))
    assert q.shape == (0, 2, 16) and dqkv.shape == (0, 4, 16)
    assert not to_host(dq_weight).any()


def test_pair_holds_its_functions():
    assert qk_norm_rope.fwd is qk_norm_rope_fwd and qk_norm_rope.bwd is qk_norm_rope_bwd


def test_refuses_what_it_cannot_do():
    settings = settings_of(2, 2, 1, 16, "host")
    qkv, q_weight, k_weight, _ = problem("float32", 2, 2, 1, 16, "host")
    with pytest.raises(ValueError, match=r"must have 2 \+ 2 \* 1 heads, got 3"):
        qk_norm_rope_fwd(qkv[:, :3], q_weight, k_weight, **settings)
    with pytest.raises(ValueError, match="both q_weight and k_weight, or neither"):
        qk_norm_rope_fwd(qkv, q_weight, None, **settings)
    with pytest.raises(ValueError, match=r"weights must be float32\(16,\)"):
        qk_norm_rope_fwd(qkv, q_weight.astype(np.float64), k_weight, **settings)
    with pytest.raises(ValueError, match="at most 4"):
        qk_norm_rope_fwd(qkv[..., :8], None, None, **settings)


@kernels_only
def test_kernels_refuse_a_head_too_wide(device):
    settings = settings_of(1, 1, 1, 16, device)
    qkv = normal("float32", (1, 3, 514), device=device)
    with pytest.raises(ValueError, match="even and at most 512, got 514"):
        qk_norm_rope_fwd(qkv, None, None, **settings)
