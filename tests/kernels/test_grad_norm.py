"""Global gradient norm: against torch, the same bits every time, and what cannot be used."""

import math

import numpy as np
import pytest
import torch

from surogate.kernels.arrays import BF16, on_device
from surogate.kernels.grad_norm import (
    grad_norm,
    grad_norm_ref,
    grad_sum_squares,
    grad_table,
    norm_of_sums,
)
from tests.oracle import close, normal, same_bits, to_device, to_host

SIZES = [(1,), (7,), (1003,), (4099,), (0,), (64, 33)]  # least, ragged, a tail, empty, a matrix


def one(value: float, dtype: str, device: str):
    return to_device(np.array([value], dtype), device)


def test_count_on_host(device):
    """The number of tokens may be of either type, and of no axes."""
    grads = grad_table([normal("float32", (64,), device=device)])
    whole = grad_norm(grads, to_device(np.array(5, np.int32), device), max_norm=0.5)
    real = grad_norm(grads, one(5, "float32", device), max_norm=0.5)
    same_bits(whole, real)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, math.inf])  # far below, near, no clipping
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clips_like_torch(dtype, max_norm, device):
    grads = normal(dtype, *SIZES, device=device)
    tokens = 64
    got = to_host(grad_norm(grad_table(grads), one(tokens, "int32", device), max_norm=max_norm))

    means = [torch.tensor(to_host(g).astype(np.float64)) / tokens for g in grads]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in means]
    for param, mean in zip(params, means, strict=True):
        param.grad = mean.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    close(got[:1], norm.numpy()[None], "float32")
    assert got[2] == 1
    for grad, param in zip(grads, params, strict=True):
        close(to_host(grad).astype(np.float64) * got[1], param.grad.numpy(), "float32")


def test_matches_reference(device):
    grads = normal("float32", *SIZES, device=device)
    norm, scale = grad_norm_ref([to_host(g).astype(np.float64) for g in grads], 64.0, max_norm=0.7)
    got = to_host(grad_norm(grad_table(grads), one(64, "int32", device), max_norm=0.7))
    close(got[:2], np.stack([norm, scale]), "float32")


def test_mixed_dtypes_and_chunks(device):
    """Gradients of two dtypes are one norm, and a chunk that ends inside a tensor loses nothing."""
    wide = normal("float32", (4099,), (7,), device=device)
    narrow = normal("bfloat16", (1003,), (2056,), seed=1, device=device)
    grads = [wide[0], narrow[0], wide[1], narrow[1]]
    want = math.sqrt(sum((to_host(g).astype(np.float64) ** 2).sum() for g in grads))
    for chunk in (8, 1024, 32768):
        got = to_host(grad_norm(grad_table(grads, chunk=chunk), one(1, "int32", device)))
        close(got[:1], np.array([want]), "float32")


def test_unaligned_gradient(device):
    """A view that starts inside a 16-byte word is read element by element."""
    for dtype in ("float32", "bfloat16"):
        base = normal(dtype, (4099,), device=device)
        for begin in (1, 3):
            want = math.sqrt((to_host(base)[begin:].astype(np.float64) ** 2).sum())
            got = to_host(grad_norm(grad_table([base[begin:]]), one(1, "int32", device)))
            close(got[:1], np.array([want]), "float32")


def test_same_bits_every_time(device):
    grads = normal("bfloat16", *SIZES, device=device)
    table, count = grad_table(grads), one(3, "int32", device)
    first = grad_norm(table, count, max_norm=1.0)
    same_bits(first, grad_norm(table, count, max_norm=1.0))
    same_bits(first, grad_norm(grad_table(grads), count, max_norm=1.0))


def test_split_invariance_of_the_count(device):
    """Twice the gradient over twice the tokens is the same mean gradient, to the bit."""
    grad = normal("float32", (1003,), device=device)
    once = to_host(grad_norm(grad_table([grad]), one(37, "int32", device), max_norm=0.5))
    twice = to_host(
        grad_norm(grad_table([grad * np.float32(2)]), one(74, "int32", device), max_norm=0.5)
    )
    same_bits(once, twice * np.array([1, 2, 1], np.float32))


def test_shards_give_the_norm_of_the_whole(device):
    grad = normal("float32", (4096,), device=device)
    count = one(5, "float32", device)
    whole = grad_norm(grad_table([grad]), count, max_norm=0.5)
    parts = [
        to_host(grad_sum_squares(grad_table([grad[i : i + 1024]]))) for i in range(0, 4096, 1024)
    ]
    sums = to_device(np.concatenate(parts), device)
    close(norm_of_sums(sums, count, max_norm=0.5), to_host(whole), "float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])  # 1e30: the square overflows
@pytest.mark.parametrize("where", [0, 1002])
def test_not_finite_is_flagged(bad, where, device):
    grad = normal("float32", (1003,))
    grad[where] = bad
    grads = [normal("float32", (64,), device=device), to_device(grad, device)]
    got = to_host(grad_norm(grad_table(grads), one(2, "int32", device), max_norm=1.0))
    assert not math.isfinite(got[0])
    assert got[1:].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_no_tokens_is_flagged(dtype, device):
    """A count of 0 cannot be divided by, whatever the gradients hold."""
    grads = grad_table([normal("float32", (64,), device=device)])
    got = to_host(grad_norm(grads, one(0, dtype, device), max_norm=1.0))
    assert math.isfinite(got[0])
    assert got[1:].tolist() == [0, 0]


@pytest.mark.parametrize("loss", [3.0e38, math.inf, -math.inf, math.nan])
def test_loss_that_is_not_finite_is_flagged(loss, device):
    grads = grad_table([to_device(np.full(4, 0.5, np.float32), device)])
    of_loss = to_device(np.array(loss, np.float32), device)
    got = to_host(grad_norm(grads, one(1, "int32", device), loss=of_loss))
    assert got.tolist() == ([1, 1, 1] if math.isfinite(loss) else [1, 0, 0])


def test_zero_gradient_is_usable(device):
    grads = grad_table([to_device(np.zeros(9, np.float32), device)])
    got = to_host(grad_norm(grads, one(4, "int32", device), max_norm=1.0))
    assert got.tolist() == [0, 0.25, 1]


def test_only_empty_gradients(device):
    grads = grad_table([to_device(np.zeros((0, 3), np.float32), device)])
    assert to_host(grad_norm(grads, one(4, "int32", device))).tolist() == [0, 0.25, 1]


def test_large_sum_keeps_small_terms(device):
    """Within a chunk eight running sums a thread, beyond it float64: no term is lost."""
    size = 1 << 16
    grad = np.full(size, 1.0, np.float32)
    grad[0] = 4096.0  # its square is 2^24: in one float32 sum, each 1.0 after it would vanish
    got = to_host(grad_norm(grad_table([to_device(grad, device)]), one(1, "int32", device)))
    close(got[:1], np.array([math.sqrt(4096.0**2 + size - 1)]), "float32", roundings=8)


def test_refusals():
    x = np.ones((4, 4), np.float32)
    count = np.array([1], np.int32)
    with pytest.raises(ValueError, match="grads must not be empty"):
        grad_table([])
    with pytest.raises(ValueError, match="must be C-contiguous"):
        grad_table([x[:, :2]])
    with pytest.raises(ValueError, match="count must be one int32 or float32"):
        grad_norm(grad_table([x]), np.array([1], np.int64))
    with pytest.raises(ValueError, match="count must be one int32 or float32"):
        grad_norm(grad_table([x]), np.array([1, 2], np.int32))
    with pytest.raises(ValueError, match="max_norm must be positive"):
        grad_norm(grad_table([x]), count, max_norm=0.0)


def test_device_refusals(device):
    """What only the kernel cannot take; the host version takes any chunk and float64."""
    x = normal("float32", (4, 4), device=device)
    if not on_device(x):
        wide = grad_table([x.astype(np.float64)], chunk=12)
        want = np.sqrt((x.astype(np.float64) ** 2).sum())
        close(grad_norm(wide, np.array([1], np.int32))[:1], want[None], "float32")
        return
    with pytest.raises(ValueError, match="chunk must be a positive multiple of 8"):
        grad_table([x], chunk=12)
    with pytest.raises(ValueError, match="no kernel takes float64"):
        grad_table([x.astype(np.float64)])


def test_bfloat16_is_summed_in_float32(device):
    """4096 equal terms: a bfloat16 sum would stop at 256."""
    grad = to_device(np.ones(4096, BF16), device)
    got = to_host(grad_norm(grad_table([grad]), one(1, "int32", device)))
    assert got[0] == 64.0
