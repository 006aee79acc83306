"""Clipping over trees; tests/kernels/test_grad_norm.py has the op."""

import math

import numpy as np
import pytest

from surogate.optim import clip
from tests.oracle import close, normal, to_device, to_host


@pytest.mark.parametrize("off", [None, 0.0])
def test_none_and_zero_turn_clipping_off(off, device):
    grads = {"a": normal("float32", (33,), device=device), "b": (None, normal("float32", (4, 4)))}
    grads["b"] = (None, to_device(grads["b"][1], device))
    count = to_device(np.array([8], np.int32), device)
    norm, scale, usable = to_host(clip.grad_norm(grads, count, max_grad_norm=off))
    squares = sum((to_host(g) ** 2).sum(dtype=np.float64) for g in (grads["a"], grads["b"][1]))
    close(np.array([norm]), np.array([math.sqrt(squares) / 8]), "float32")
    assert scale == 1 / 8 and usable == 1


def test_a_small_limit_clips(device):
    grads = [normal("float32", (33,), device=device)]
    count = to_device(np.array([2], np.int32), device)
    norm, scale, _ = to_host(clip.grad_norm(grads, count, max_grad_norm=0.01))
    close(np.array([scale * 2 * norm]), np.array([0.01]), "float32", roundings=8)


def test_negative_limit():
    with pytest.raises(ValueError, match="max_grad_norm must be at least 0"):
        clip.limit(-1.0)
