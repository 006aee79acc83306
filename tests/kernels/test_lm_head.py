"""LM head: loss and gradients in chunks, tied and frozen weights, totals, all labels ignored."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.batch import IGNORED
from surogate.kernels.lm_head import (
    default_chunk,
    lm_head_loss,
    lm_head_loss_and_grad,
    lm_head_loss_bwd,
    lm_head_loss_fwd,
    lm_head_loss_ref,
    lm_logits,
)
from surogate.kernels.matmul import record
from surogate.kernels.pair import vjp
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host

TOKENS, HIDDEN, VOCAB = 21, 32, 67
CHUNKS = [1, 4, 7, 21, 64, None]  # of one token; with and without a rest; whole; more than there is


def inputs(dtype, device):
    """Logits of the spread of 2; of the last chunk of 7 no token is supervised."""
    x, weight = normal("float32", (TOKENS, HIDDEN), (VOCAB, HIDDEN))
    labels = np.random.default_rng(3).integers(0, VOCAB, TOKENS).astype(np.int32)
    labels[5] = IGNORED
    labels[14:] = IGNORED
    kind = BF16 if dtype == "bfloat16" else np.float32
    weight = weight * np.float32(2 * HIDDEN**-0.5)
    return [to_device(a, device) for a in (x.astype(kind), weight.astype(kind), labels)]


def scalar(value, device):
    return to_device(np.array(value, np.float32), device)


def reference(x, weight, labels, d_nll_sum, d_logprobs):
    ref = partial(lm_head_loss_ref, labels=to_host(labels))
    return oracle(ref, (x, weight), d_nll_sum, d_logprobs)


def compare(got, want, dtype):
    """(nll_sum, logprobs, dx, dweight) against the reference."""
    # A logit of about 4 rounds to the type of x; a probability then is off by as much, relatively.
    close(got[0], want[0], dtype, scale=4.0, terms=TOKENS)
    close(got[1], want[1], dtype, scale=4.0)
    close(got[2], want[2], dtype, scale=2.0)
    close(got[3], want[3], dtype, scale=2.0, terms=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_loss_and_grad(chunk, dtype, device):
    x, weight, labels = inputs(dtype, device)
    want = reference(x, weight, labels, np.array(1.0), None)
    outputs, dx, dweight = lm_head_loss_and_grad(x, weight, labels=labels, chunk=chunk)
    assert outputs.nll_sum.shape == () and int(outputs.count) == 13
    assert dx.dtype == dweight.dtype == x.dtype
    compare((outputs.nll_sum, outputs.logprobs, dx, dweight), want, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("cotangents", ["sum", "tokens", "both"])
def test_pair(cotangents, chunk, dtype, device):
    x, weight, labels = inputs(dtype, device)
    d_nll_sum = scalar(0.5, device) if cotangents != "tokens" else None
    d_logprobs = normal("float32", (TOKENS,), seed=1, device=device)
    d_logprobs = d_logprobs if cotangents != "sum" else None
    want = reference(x, weight, labels, d_nll_sum, d_logprobs)
    outputs, res = lm_head_loss_fwd(x, weight, labels=labels, chunk=chunk)
    dx, dweight = lm_head_loss_bwd(res, d_nll_sum, None, d_logprobs)
    compare((outputs.nll_sum, outputs.logprobs, dx, dweight), want, dtype)


def test_the_fast_path_is_the_pair(device):
    x, weight, labels = inputs("bfloat16", device)
    outputs, res = lm_head_loss_fwd(x, weight, labels=labels, chunk=8)
    dx, dweight = lm_head_loss_bwd(res, scalar(1, device))
    fast, fast_dx, fast_dweight = lm_head_loss_and_grad(x, weight, labels=labels, chunk=8)
    for got, want in zip((*fast, fast_dx, fast_dweight), (*outputs, dx, dweight), strict=True):
        np.testing.assert_array_equal(to_host(got), to_host(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_agree(dtype, device):
    x, weight, labels = inputs(dtype, device)
    whole, dx, dweight = lm_head_loss_and_grad(x, weight, labels=labels)
    for chunk in (1, 4, 7):
        outputs, chunk_dx, chunk_dweight = lm_head_loss_and_grad(
            x, weight, labels=labels, chunk=chunk
        )
        compare(
            (outputs.nll_sum, outputs.logprobs, chunk_dx, chunk_dweight),
            (whole.nll_sum, whole.logprobs, dx, dweight),
            dtype,
        )
        assert int(outputs.count) == int(whole.count)


@pytest.mark.parametrize("run", ["fast", "pair"])
def test_all_labels_ignored(run, device):
    x, weight, _ = inputs("bfloat16", device)
    labels = to_device(np.full(TOKENS, IGNORED, np.int32), device)
    if run == "fast":
        outputs, *grads = lm_head_loss_and_grad(x, weight, labels=labels, chunk=8)
    else:
        outputs, res = lm_head_loss_fwd(x, weight, labels=labels, chunk=8)
        grads = lm_head_loss_bwd(res, scalar(1, device))
    assert int(outputs.count) == 0 and float(outputs.nll_sum) == 0
    for zero in (outputs.logprobs, *grads):
        np.testing.assert_array_equal(to_host(zero).astype(np.float32), 0)


@pytest.mark.parametrize("buffer", ["bfloat16", "float32"])
@pytest.mark.parametrize("run", ["fast", "pair"])
def test_tied_weight_adds_to_the_embedding_gradient(run, buffer, device):
    x, weight, labels = inputs("bfloat16", device)
    held = normal(buffer, (VOCAB, HIDDEN), seed=2, device=device)
    before = to_host(held).astype(np.float64)
    *_, want = reference(x, weight, labels, np.array(1.0), None)
    if run == "fast":
        _, _, dweight = lm_head_loss_and_grad(x, weight, labels=labels, chunk=8, into=held)
    else:
        _, res = lm_head_loss_fwd(x, weight, labels=labels, chunk=8)
        _, dweight = lm_head_loss_bwd(res, scalar(1, device), into=held)
    assert dweight is held
    # Three chunks are added in the buffer's type; logits and their gradient are bf16 in either.
    close(held, before + want, "bfloat16", scale=2.0, terms=4)


def test_a_frozen_weight_takes_no_product(device):
    x, weight, labels = inputs("bfloat16", device)
    _, dx, dweight = lm_head_loss_and_grad(x, weight, labels=labels, chunk=8)
    for options in (dict(into=FROZEN), dict(need_dweight=False)):
        with record([]) as products:
            _, frozen_dx, none = lm_head_loss_and_grad(x, weight, labels=labels, chunk=8, **options)
        assert none is None and len(products) == 2 * 3
        same_bits(frozen_dx, dx)
    _, res = lm_head_loss_fwd(x, weight, labels=labels, chunk=8)
    frozen_dx, none = lm_head_loss_bwd(res, scalar(1, device), into=FROZEN)
    assert none is None
    same_bits(frozen_dx, dx)


def test_totals_run_over_micro_batches(device):
    x, weight, labels = inputs("float32", device)
    alone = lm_head_loss_fwd(x, weight, labels=labels)[0]
    totals = (scalar(0, device), to_device(np.array(0, np.int32), device))
    for run in (lm_head_loss_fwd, lm_head_loss_and_grad, lm_head_loss_and_grad):
        outputs = run(x, weight, labels=labels, totals=totals)[0]
        assert outputs.nll_sum is totals[0] and outputs.count is totals[1]
    close(totals[0], np.asarray(3 * to_host(alone.nll_sum)), "float32")
    assert int(totals[1]) == 3 * int(alone.count) == 39


def test_no_more_than_a_chunk_of_logits(device, monkeypatch):
    """The only arrays with a vocabulary of columns are chunks."""
    from surogate.kernels import cross_entropy, lm_head

    made = []

    def watch(make):
        def made_by(shape, *args, **kwargs):
            made.append(shape)
            return make(shape, *args, **kwargs)

        return made_by

    for module in (lm_head, cross_entropy):
        monkeypatch.setattr(module, "empty", watch(module.empty))
    x, weight, labels = inputs("float32", device)
    lm_head_loss_and_grad(x, weight, labels=labels, chunk=4)
    _, res = lm_head_loss_fwd(x, weight, labels=labels, chunk=4)
    lm_head_loss_bwd(res, scalar(1, device))
    assert [shape for shape in made if VOCAB in shape] == [(4, VOCAB)] * 3


def test_derived_backward(device):
    x, weight, labels = inputs("float32", device)
    pair = vjp(lambda x, w, *, labels: lm_head_loss(x, w, labels=labels, chunk=8))
    outputs, res = pair.fwd(x, weight, labels=labels)
    grads = pair.bwd(res, scalar(1, device), None, None)
    _, *want = lm_head_loss_and_grad(x, weight, labels=labels, chunk=8)
    for got, grad in zip(grads, want, strict=True):
        np.testing.assert_array_equal(to_host(got), to_host(grad))
    assert int(outputs.count) == 13


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits(dtype, device):
    x, weight, _ = inputs(dtype, device)
    got = lm_logits(x, weight)
    assert got.dtype == np.float32
    want = to_host(x).astype(np.float64) @ to_host(weight).astype(np.float64).T
    close(got, want, "float32", terms=HIDDEN)


def test_default_chunk():
    # 640 MiB hold 2208 rows of 151936 in bf16, 1280 MiB hold 4416
    assert default_chunk(4096, 151936, 2) == 2048
    assert default_chunk(16384, 151936, 2) == 2048
    assert default_chunk(32768, 151936, 2) == 4096
    assert default_chunk(1 << 20, 151936, 2) == 4096
    assert default_chunk(1 << 20, 49152, 2) == 8192
    assert default_chunk(100, 151936, 2) == 100
    assert default_chunk(100, 1 << 40, 2) == 1
    for vocab in (128, 50257, 201088):
        chunk = default_chunk(1 << 30, vocab, 2)
        assert 640 << 20 < chunk * vocab * 2 <= 1280 << 20
        short = default_chunk(8, vocab, 2)
        assert short == 8


def test_refusals():
    x, weight, labels = inputs("float32", "host")
    with pytest.raises(ValueError, match="expected at least one token"):
        lm_head_loss_fwd(x[:0], weight, labels=labels[:0])
    with pytest.raises(ValueError, match="chunk must be positive"):
        lm_head_loss_and_grad(x, weight, labels=labels, chunk=0)
