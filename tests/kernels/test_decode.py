"""Decoding: against the float64 reference, and against the last row of whole attention."""

import numpy as np
import pytest

from surogate.kernels.attention import attention_fwd
from surogate.kernels.batch import Docs, docs_from_lengths
from surogate.kernels.decode import attention_decode, attention_decode_ref
from tests.oracle import close, normal, same_bits, to_device, to_host, unaligned

MAX_LEN = 150
LENGTHS = np.array([1, 2, 33, 100, 150], np.int32)  # least, fewer than workers, more, full


def problem(heads, kv_heads, head_dim, dtype):
    cache = (len(LENGTHS), MAX_LEN, kv_heads, head_dim)
    return normal(dtype, (len(LENGTHS), heads, head_dim), cache, cache)


def run(device, arrays, lengths, **settings):
    arrays = [to_device(x, device) for x in arrays]
    return attention_decode(*arrays, lengths=to_device(lengths, device), **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "heads,kv_heads,head_dim",
    [(1, 1, 8), (4, 2, 64), (7, 1, 40), (4, 1, 128), (2, 2, 96), (2, 1, 256)],
)
def test_matches_reference(heads, kv_heads, head_dim, dtype, device):
    arrays = problem(heads, kv_heads, head_dim, dtype)
    settings = dict(scale=head_dim**-0.5)
    exact = [x.astype(np.float64) for x in arrays]
    want = attention_decode_ref(*exact, lengths=LENGTHS, **settings)
    close(run(device, arrays, LENGTHS, **settings), want, dtype, terms=head_dim, scale=1)


@pytest.mark.parametrize("window", [1, 5, 40, 1000])  # itself; one round of workers; more; all
def test_window(window, device):
    arrays = problem(4, 2, 64, "float32")
    exact = [x.astype(np.float64) for x in arrays]
    want = attention_decode_ref(*exact, lengths=LENGTHS, scale=0.125, window=window)
    got = run(device, arrays, LENGTHS, scale=0.125, window=window)
    close(got, want, "float32", terms=64, scale=1)


def test_entries_past_the_length_are_not_read(device):
    q, k, v = problem(4, 2, 64, "bfloat16")
    before = run(device, (q, k, v), LENGTHS, scale=0.125)
    for seq, length in enumerate(LENGTHS):
        k[seq, length:] = v[seq, length:] = np.nan
    same_bits(before, run(device, (q, k, v), LENGTHS, scale=0.125))


def test_idle_sequence_is_zero(device):
    arrays = problem(4, 2, 64, "bfloat16")
    lengths = LENGTHS.copy()
    lengths[2] = 0
    got = to_host(run(device, arrays, lengths, scale=0.125)).astype(np.float32)
    assert not got[2].any() and got[1].any()


@pytest.mark.parametrize("window", [None, 30])
def test_is_the_last_row_of_attention(window, device):
    q, k, v = problem(4, 2, 64, "bfloat16")
    got = run(device, (q, k, v), LENGTHS, scale=0.125, window=window)
    lengths = LENGTHS.tolist()
    ends = np.cumsum(lengths)
    rows = [np.concatenate([c[s, :n] for s, n in enumerate(lengths)]) for c in (k, v)]
    queries = np.zeros((ends[-1], 4, 64), q.dtype)
    queries[ends - 1] = q
    docs = Docs(*(to_device(x, device) for x in docs_from_lengths(lengths)))
    arrays = [to_device(x, device) for x in (queries, *rows)]
    o, _ = attention_fwd(*arrays, docs=docs, scale=0.125, window=window)
    close(got, to_host(o)[ends - 1], "bfloat16", scale=1)


def test_refuses():
    q, k, v = problem(4, 2, 64, "float32")
    plain = getattr(attention_decode, "__wrapped__", attention_decode)
    with pytest.raises(ValueError, match="caches must be"):
        plain(q, k, v[:, :9], lengths=LENGTHS, scale=1.0)
    with pytest.raises(ValueError, match="multiple of kv_heads, got 3 and 2"):
        plain(q[:, :3], k, v, lengths=LENGTHS, scale=1.0)
    with pytest.raises(ValueError, match="window must be at least 1"):
        plain(q, k, v, lengths=LENGTHS, scale=1.0, window=0)
    with pytest.raises(ValueError, match="lengths must be 0 to 150, got 151"):
        plain(q, k, v, lengths=LENGTHS + np.int32(1), scale=1.0)


def test_kernel_refuses(device):
    q, k, v = problem(4, 2, 64, "float32")
    if device == "host":
        every_other = (k[:, ::2], v[:, ::2])  # the host version takes views
        copies = [x.copy() for x in every_other]
        viewed = attention_decode(q, *every_other, lengths=LENGTHS // 2, scale=1.0)
        same_bits(viewed, attention_decode(q, *copies, lengths=LENGTHS // 2, scale=1.0))
        return
    narrow = [x[..., :12].copy() for x in (q, k, v)]
    with pytest.raises(ValueError, match="head_dim of 8, 16, ... 256, got 12"):
        run(device, narrow, LENGTHS, scale=1.0)
    strided = [to_device(q, device), to_device(k, device)[:, ::2], to_device(v, device)[:, ::2]]
    with pytest.raises(ValueError, match="C-contiguous"):
        attention_decode(*strided, lengths=to_device(LENGTHS, device), scale=1.0)
    for number, name in enumerate(("q", "k_cache", "v_cache")):
        arrays = [to_device(x, device) for x in (q, k, v)]
        arrays[number] = unaligned(arrays[number], device)
        with pytest.raises(ValueError, match=f"{name} must begin at a multiple of 16 bytes"):
            attention_decode(*arrays, lengths=to_device(LENGTHS, device), scale=1.0)
