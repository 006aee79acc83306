"""Embedding: exact rows forward, sums of rows backward in every mode, and ids that repeat a lot."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import FROZEN
from surogate.kernels.embedding import (
    RARE,
    embedding,
    embedding_bwd,
    embedding_fwd,
    embedding_ref,
)
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

SIZES = [
    (1, 1, 1),  # least
    (50, 11, 7),  # odd rows: no 16-byte accesses
    (300, 40, 264),  # rows of one piece and a bit; ids repeat
    (40, 5000, 1024),  # a vocabulary far larger than the batch
]
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def problem(dtype: str, tokens: int, vocab: int, hidden: int, device: str) -> tuple:
    """weight, dy, ids; the last id of the vocabulary occurs."""
    weight, dy = normal(dtype, (vocab, hidden), (tokens, hidden), device=device)
    ids = np.random.default_rng(1).integers(0, vocab, tokens).astype(np.int32)
    ids[-1] = vocab - 1
    return weight, dy, to_device(ids, device)


def most(ids: np.ndarray) -> int:
    """How often the most frequent id occurs."""
    return int(np.unique(to_host(ids), return_counts=True)[1].max())


@pytest.mark.parametrize("tokens,vocab,hidden", SIZES)
@each_dtype
def test_matches_reference(tokens, vocab, hidden, dtype, device):
    weight, dy, ids = problem(dtype, tokens, vocab, hidden, device)
    y, dweight = oracle(partial(embedding_ref, tokens=to_host(ids)), (weight,), dy)
    got_y, res = embedding_fwd(weight, tokens=ids)
    same_bits(got_y, y.astype(weight.dtype))
    close(embedding_bwd(res, dy), dweight, dtype, terms=most(ids))


# All equal; one id just rare and one just hot; a hot id of two turns of all warps among others.
HISTOGRAMS = [[700], [RARE, RARE + 1], [1, 130, 2, 3, 1, 40]]


@pytest.mark.parametrize("hidden", [264, 9])
@pytest.mark.parametrize("histogram", HISTOGRAMS)
@each_dtype
def test_frequent_ids(histogram, hidden, dtype, device):
    ids = np.repeat(np.arange(len(histogram), dtype=np.int32) * 2, histogram)
    ids = to_device(np.random.default_rng(2).permutation(ids), device)
    weight, dy = normal(dtype, (12, hidden), (len(ids), hidden), device=device)
    _, dweight = oracle(partial(embedding_ref, tokens=to_host(ids)), (weight,), dy)
    _, res = embedding_fwd(weight, tokens=ids)
    got = embedding_bwd(res, dy)
    close(got, dweight, dtype, terms=max(histogram))
    same_bits(embedding_bwd(res, dy), got)
    assert not to_host(got)[1::2].any()


def test_float64_is_computed_in_float64():
    weight, dy, ids = problem("float64", 30, 5, 4, "host")
    y, dweight = oracle(partial(embedding_ref, tokens=ids), (weight,), dy)
    got_y, res = embedding_fwd(weight, tokens=ids)
    same_bits(got_y, y)
    close(embedding_bwd(res, dy), dweight, "float64", terms=most(ids))


@pytest.mark.parametrize("buffer", ["bfloat16", "float32"])
@pytest.mark.parametrize("hidden", [24, 5])  # with and without 16-byte accesses
def test_into_adds_to_a_buffer(hidden, buffer, device):
    weight, dy, ids = problem("bfloat16", 30, 50, hidden, device)
    _, dweight = oracle(partial(embedding_ref, tokens=to_host(ids)), (weight,), dy)
    _, res = embedding_fwd(weight, tokens=ids)
    into = normal(buffer, (50, hidden), seed=3, device=device)
    before = to_host(into).copy()
    assert embedding_bwd(res, dy, into=into) is into
    close(into, before.astype(np.float64) + dweight, buffer, terms=most(ids))
    absent = np.setdiff1d(np.arange(50), to_host(ids))
    same_bits(to_host(into)[absent], before[absent])


def test_frozen_weight_has_no_gradient(device):
    weight, dy, ids = problem("bfloat16", 3, 4, 8, device)
    _, res = embedding_fwd(weight, tokens=ids)
    assert embedding_bwd(res, dy, into=FROZEN) is None


def test_tokens_do_not_depend_on_the_split(device):
    weight, _, ids = problem("bfloat16", 10, 20, 72, device)
    y, _ = embedding_fwd(weight, tokens=ids)
    for part in (slice(0, 5), slice(5, 10)):
        same_bits(embedding_fwd(weight, tokens=ids[part])[0], y[part])


def test_no_tokens(device):
    weight, _, ids = problem("float32", 1, 4, 8, device)
    y, res = embedding_fwd(weight, tokens=ids[:0])
    assert y.shape == (0, 8)
    assert not to_host(embedding_bwd(res, y)).any()


@pytest.mark.parametrize("wrong", [-1, 4])
def test_host_refuses_an_id_outside_the_vocabulary(wrong):
    weight = normal("float32", (4, 8))
    ids = np.array([0, 3, wrong, 1], np.int32)
    with pytest.raises(ValueError, match=rf"tokens\[2\] is {wrong}, outside the vocabulary of 4"):
        embedding_fwd(weight, tokens=ids)


def test_refuses_a_gradient_of_another_dtype():
    weight, dy, ids = problem("float32", 3, 4, 8, "host")
    _, res = embedding_fwd(weight, tokens=ids)
    with pytest.raises(ValueError, match="dy must be float32 of 3 rows, got float64"):
        embedding_bwd(res, dy.astype(np.float64))


def test_pair_holds_its_functions():
    assert embedding.fwd is embedding_fwd and embedding.bwd is embedding_bwd


@each_dtype
def test_arrays_that_begin_off_16_bytes(dtype, device):
    weight, dy, ids = problem(dtype, 60, 11, 40, device)
    y, res = embedding_fwd(weight, tokens=ids)
    same_bits(embedding_fwd(unaligned(weight, device), tokens=ids)[0], y)
    want = embedding_bwd(res, dy)
    same_bits(embedding_bwd(res, unaligned(dy, device)), want)
    into = unaligned(np.zeros(weight.shape, weight.dtype), device)
    same_bits(embedding_bwd(res, dy, into=into), want)
