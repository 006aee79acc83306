"""Cross entropy: log-probabilities and gradients of rows of any length; rows without a label."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import BF16, empty
from surogate.kernels.batch import IGNORED
from surogate.kernels.cross_entropy import (
    cross_entropy_bwd,
    cross_entropy_fused_,
    cross_entropy_fwd,
    cross_entropy_ref,
    nll_gradient,
    nll_total,
)
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

# least; shorter than a vector; rows that start at every alignment, on blocks that walk; aligned;
# models' vocabularies: rows in shared memory; in registers too, ragged; longer than both hold
SHAPES = [(1, 1), (5, 7), (29, 131), (4, 128), (2, 49152), (5, 151937), (1, 262144)]


def inputs(dtype, tokens, vocab, device, spread=3.0):
    """Logits of a trained model's spread, and labels of which every third is ignored."""
    rng = np.random.default_rng(3)
    logits = normal("float32", (tokens, vocab)) * np.float32(spread)
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    labels[2::3] = IGNORED
    kind = BF16 if dtype == "bfloat16" else np.float32
    return to_device(logits.astype(kind), device), to_device(labels, device)


def reference(logits, labels, cotangent):
    return oracle(partial(cross_entropy_ref, labels=to_host(labels)), (logits,), cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens,vocab", SHAPES)
def test_matches_reference(tokens, vocab, dtype, device):
    logits, labels = inputs(dtype, tokens, vocab, device)
    cotangent = normal("float32", (tokens,), seed=1, device=device)
    logprobs, dlogits = reference(logits, labels, cotangent)
    got, res = cross_entropy_fwd(logits, labels=labels)
    # float32 whatever the logits; logits of up to 15 and their exponents round first
    close(got, logprobs, "float32", scale=15.0)
    close(cross_entropy_bwd(res, cotangent), dlogits, dtype, scale=1.0)
    ignored = to_host(labels) == IGNORED
    np.testing.assert_array_equal(to_host(got)[ignored], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens,vocab", SHAPES)
def test_fused_is_forward_and_gradient_of_the_sum(tokens, vocab, dtype, device):
    logits, labels = inputs(dtype, tokens, vocab, device)
    want, res = cross_entropy_fwd(logits.copy(), labels=labels)
    gradient = cross_entropy_bwd(res, to_device(np.full(tokens, -1, np.float32), device))
    logprobs = cross_entropy_fused_(logits, labels=labels)
    same_bits(logprobs, want)
    np.testing.assert_array_equal(to_host(logits), to_host(gradient))


def test_gradient_of_sum_and_of_each_token_in_place(device):
    logits, labels = inputs("float32", 9, 131, device)
    per_token = normal("float32", (9,), seed=1)
    d_nll_sum = to_device(np.array(0.25, np.float32), device)
    _, want = reference(logits, labels, per_token - np.float32(0.25))
    _, res = cross_entropy_fwd(logits, labels=labels)
    d_logprobs = to_device(per_token, device)
    got = nll_gradient(res, logits, d_nll_sum=d_nll_sum, d_logprobs=d_logprobs)
    assert got is logits
    close(got, want, "float32", scale=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_begin_off_16_bytes(dtype, device):
    """Alone, and beside a gradient that begins elsewhere."""
    logits, labels = inputs(dtype, 4, 136, device)
    d_logprobs = normal("float32", (4,), seed=1, device=device)
    want, res = cross_entropy_fwd(logits, labels=labels)
    gradient = cross_entropy_bwd(res, d_logprobs)
    off = unaligned(logits, device)
    got, off_res = cross_entropy_fwd(off, labels=labels)
    close(got, to_host(want), "float32", scale=15.0)
    close(cross_entropy_bwd(off_res, d_logprobs), to_host(gradient), dtype, scale=1.0)
    out = unaligned(logits, device)
    nll_gradient(res, out, d_nll_sum=None, d_logprobs=d_logprobs)
    same_bits(out, gradient)
    fused = off.copy()
    close(cross_entropy_fused_(off, labels=labels), to_host(want), "float32", scale=15.0)
    cross_entropy_fused_(fused, labels=labels)
    close(off, to_host(fused), dtype, scale=1.0)


def test_ignored_rows_may_hold_anything(device):
    logits, labels = inputs("bfloat16", 5, 33, device)
    want = to_host(cross_entropy_fused_(logits.copy(), labels=labels))
    hidden = to_host(labels) == IGNORED
    poisoned = to_host(logits).copy()
    poisoned[hidden] = np.nan
    poisoned = to_device(poisoned, device)
    same_bits(cross_entropy_fused_(poisoned, labels=labels), want)
    assert np.isfinite(to_host(poisoned).astype(np.float32)).all()
    np.testing.assert_array_equal(to_host(poisoned)[hidden].astype(np.float32), 0)


@pytest.mark.gpu
def test_rows_behind_more_elements_than_32_bits_count():
    """The last of 16,384 rows of 151,936 logits, 2.49e9 elements, are as if they were alone."""
    logits, labels = inputs("bfloat16", 8, 151936, "cuda")
    many = empty((16384, 151936), BF16, like=logits)
    many.view(np.uint16).reshape(2048, 8, 151936)[...] = logits.view(np.uint16)
    repeated = to_device(np.tile(to_host(labels), 2048), "cuda")
    want = cross_entropy_fused_(logits, labels=labels)
    got = cross_entropy_fused_(many, labels=repeated)
    same_bits(got[-8:], want)
    same_bits(many[-8:], logits)


def test_all_ignored(device):
    logits, _ = inputs("float32", 6, 40, device)
    labels = to_device(np.full(6, IGNORED, np.int32), device)
    logprobs = cross_entropy_fused_(logits, labels=labels)
    nll_sum, count = nll_total(logprobs, labels)
    assert float(nll_sum) == 0 and int(count) == 0
    np.testing.assert_array_equal(to_host(logits), 0)


def test_large_and_masked_logits(device):
    rows = np.full((3, 50), -np.inf, np.float32)
    rows[0, [3, 9]] = [1e4, 1e4]  # exp overflows unless the maximum is taken off
    rows[1, [3, 9]] = [-1e4, -1e4]
    rows[2, 3] = 0  # certain
    logits, labels = to_device(rows, device), to_device(np.array([3, 9, 3], np.int32), device)
    got = to_host(cross_entropy_fused_(logits, labels=labels))
    np.testing.assert_allclose(got, [-np.log(2), -np.log(2), 0], atol=2e-3, rtol=0)  # ulp of 1e4
    want = np.zeros((3, 50))
    want[0, [3, 9]], want[1, [3, 9]] = [-0.5, 0.5], [0.5, -0.5]
    np.testing.assert_allclose(to_host(logits), want, atol=1e-3, rtol=0)


def test_rows_do_not_depend_on_their_chunk(device):
    logits, labels = inputs("bfloat16", 9, 131, device)
    whole, gradient = logits.copy(), logits.copy()
    logprobs = cross_entropy_fused_(whole, labels=labels)
    for start in range(0, 9, 4):
        rows = slice(start, start + 4)
        same_bits(cross_entropy_fused_(gradient[rows], labels=labels[rows]), logprobs[rows])
    same_bits(gradient, whole)


@pytest.mark.parametrize("tokens", [1, 3000])  # least; several a thread
def test_total(tokens, device):
    _, labels = inputs("float32", tokens, 8, device)
    logprobs = normal("float32", (tokens,), device=device)
    supervised = to_host(labels) != IGNORED
    want = np.asarray(-to_host(logprobs).astype(np.float64)[supervised].sum())
    nll_sum, count = nll_total(logprobs, labels)
    assert nll_sum.shape == count.shape == () and count.dtype == np.int32
    close(nll_sum, want, "float32", scale=np.sqrt(tokens))
    assert int(count) == supervised.sum()
    totals = (to_device(np.array(2, np.float32), device), to_device(np.array(7, np.int32), device))
    assert nll_total(logprobs, labels, totals=totals)[0] is totals[0]
    close(totals[0], np.asarray(want + 2), "float32", scale=np.sqrt(tokens))
    assert int(totals[1]) == supervised.sum() + 7


@pytest.mark.parametrize("label", [-1, 8, 1 << 30])
def test_labels_outside_the_row(label, device):
    logits, labels = inputs("float32", 3, 8, device)
    labels[1] = label
    if device == "host":
        with pytest.raises(ValueError, match="labels must be -100 or below 8"):
            cross_entropy_fwd(logits, labels=labels)
        return
    got = to_host(cross_entropy_fwd(logits, labels=labels)[0])
    assert np.isnan(got[1]) and np.isfinite(got[[0, 2]]).all()


def test_refusals():
    logits, labels = inputs("float32", 3, 8, "host")
    with pytest.raises(ValueError, match="contiguous"):
        cross_entropy_fused_(logits[:, :4], labels=labels)
