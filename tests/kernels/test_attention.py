"""Attention: against float64 autodiff, by document, by window, by how arrays lie in memory."""

from functools import partial

import numpy as np
import pytest

from surogate.kernels.arrays import FROZEN
from surogate.kernels.attention import (
    attention,
    attention_bwd,
    attention_fwd,
    attention_ref,
)
from surogate.kernels.attention_mma import TILES
from surogate.kernels.batch import Docs, docs_from_lengths
from surogate.kernels.pair import vjp
from tests.emulator.launch import emulated
from tests.oracle import (
    ROUNDING,
    close,
    normal,
    oracle,
    same_bits,
    to_device,
    to_host,
    unaligned,
)

# Roundings, of values of size 1, as o and the summands of all gradients are for unit normals.
OUT = 3  # of the weights before the product, and of the result
GRAD = 8  # also of o in delta, which is dS's subtrahend, and of dS

ONE = [130]  # a tile edge and a ragged end
EDGES = [1, 2, 3, 58, 64, 1, 20]  # least documents; borders on and off tile edges
ALIGNED = [64, 128]  # no ragged end
PACKS = pytest.mark.parametrize("lengths", [ONE, EDGES, ALIGNED], ids=["one", "edges", "aligned"])
HEADS = pytest.mark.parametrize("heads,kv_heads", [(2, 2), (4, 2), (4, 1), (7, 1)])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 96, 128, 256])


def docs_on(device: str, lengths: list[int]) -> Docs:
    return Docs(*(to_device(x, device) for x in docs_from_lengths(lengths)))


def problem(lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype="bfloat16", seed=0):
    """q, k, v, do on the host."""
    tokens = sum(lengths)
    queries, keys = (tokens, heads, head_dim), (tokens, kv_heads, head_dim)
    return normal(dtype, queries, keys, keys, queries, seed=seed)


def run(device, arrays, sinks, do, lengths, *, window=None, scale=None):
    """(o, dq, dk, dv, d_sinks) of the pair."""
    q, k, v = (to_device(x, device) for x in arrays)
    sinks = None if sinks is None else to_device(sinks, device)
    scale = scale or q.shape[-1] ** -0.5
    docs = docs_on(device, lengths)
    o, res = attention_fwd(q, k, v, sinks, docs=docs, scale=scale, window=window)
    return (o, *attention_bwd(res, to_device(do, device)))


def check(device, lengths, heads, kv_heads, head_dim, *, dtype="bfloat16", window=None, sinks=None):
    *arrays, do = problem(lengths, heads, kv_heads, head_dim, dtype)
    settings = dict(docs=docs_from_lengths(lengths), scale=head_dim**-0.5, window=window)
    o, *grads = oracle(partial(attention_ref, **settings), (*arrays, sinks), do)
    got_o, *got = run(device, arrays, sinks, do, lengths, window=window)
    terms = 1 if dtype == "bfloat16" else head_dim  # products are summed in float32 at least
    close(got_o, o, dtype, roundings=OUT, terms=terms, scale=1)
    for grad, want in zip(got[:3], grads[:3], strict=True):
        close(grad, want, dtype, roundings=GRAD, terms=terms, scale=1)
    if sinks is not None:
        size = sinks_terms(arrays, sinks, o, do, **settings)
        allowed = OUT * ROUNDING[dtype] * np.sqrt(terms) * size
        np.testing.assert_array_less(np.abs(to_host(got[3]) - grads[3]), allowed)


def sinks_terms(arrays, sinks, o, do, **settings):
    """Root of the sum of squares of what the gradient of each sink sums: p do o over tokens and
    columns, where p is the sink's share of a token's softmax.

    Of a term, o alone is rounded to the storage dtype, and the weights that it is made from: two
    errors of random signs with a root mean square of 0.42 roundings each. Their sum is then 0.6
    roundings of this size, so that OUT roundings are five times what is to be expected.
    """
    q, k, v = (x.astype(np.float64) for x in arrays)
    kept = attention_ref(q, k, np.ones_like(v), sinks.astype(np.float64), **settings)
    terms = (1 - kept) * do.astype(np.float64) * o
    return np.sqrt(np.sum(terms**2, axis=(0, 2)))


@HEADS
@HEAD_DIMS
def test_matches_reference(heads, kv_heads, head_dim, device):
    check(device, EDGES, heads, kv_heads, head_dim)


@pytest.mark.parametrize("lengths", [ONE, ALIGNED], ids=["one", "aligned"])
@HEAD_DIMS
def test_documents(lengths, head_dim, device):
    check(device, lengths, 2, 1, head_dim)


@PACKS
@pytest.mark.parametrize("window", [1, 5, 100, 1000])  # itself; in a tile; over tiles; all
def test_window(lengths, window, device):
    check(device, lengths, 2, 1, 64, window=window)


def test_a_window_of_the_longest_document_and_a_sink_of_nothing_change_nothing(device):
    """To the bit, as a softmax without either."""
    *arrays, do = problem(EDGES, 2, 1, 64)
    plain = run(device, arrays, None, do, EDGES)
    none = np.full(2, -np.inf, np.float32)
    for sinks, window in ((None, 64), (none, None)):
        *got, d_sinks = run(device, arrays, sinks, do, EDGES, window=window)
        for one, other in zip(got, plain[:4], strict=True):
            same_bits(one, other)
        assert d_sinks is None if sinks is None else not to_host(d_sinks).any()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("size", [1.0, 4.0])  # like the logits; above them
def test_sinks(window, size, device):
    sinks = size * normal("float32", (4,), seed=3)
    check(device, EDGES, 4, 2, 64, window=window, sinks=sinks)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lengths", [ONE, EDGES, [5] * 20], ids=["one", "edges", "short"])
def test_host_in_full_precision(dtype, lengths):
    sinks = normal(dtype, (4,), seed=3)
    check("host", lengths, 4, 2, 40, dtype=dtype, sinks=sinks)


def test_host_blocks(monkeypatch):
    """A document of several blocks of queries."""
    monkeypatch.setattr("surogate.kernels.attention_host.SCORES", 4 * 130 * 16)
    check("host", ONE, 4, 2, 64, dtype="float32")
    check("host", ONE, 4, 2, 64, dtype="float32", window=7)


def test_matches_torch(device):
    """A second oracle: torch's own attention, a document at a time."""
    import torch

    lengths = [64, 66]
    *arrays, do = problem(lengths, 4, 2, 64)
    got = run(device, arrays, None, do, lengths)
    leaves = [torch.tensor(x.astype(np.float64), requires_grad=True) for x in arrays]
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in leaves), strict=True):
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        parts.append(o[0].transpose(0, 1))
    o = torch.cat(parts)
    grads = torch.autograd.grad(o, leaves, torch.tensor(do.astype(np.float64)))
    close(got[0], o.detach().numpy(), "bfloat16", roundings=OUT, scale=1)
    for grad, want in zip(got[1:4], grads, strict=True):
        close(grad, want.numpy(), "bfloat16", roundings=GRAD, scale=1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_views(head_dim, device):
    """q and k in one buffer, v and do in wider ones: the same bits as contiguous arrays."""
    lengths, heads, kv_heads = [70, 3, 57], 4, 2
    q, k, v, do = problem(lengths, heads, kv_heads, head_dim)
    rotated = np.concatenate([q, k], 1)
    qkv = np.concatenate([q, k, v], 1)
    views = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
    wide_do = np.concatenate([do, do], 1)[:, heads:]
    plain = run(device, (q, k, v), None, do, lengths)
    viewed = run(device, _keep_views(views, (rotated, rotated, qkv), device), None, do, lengths)
    wide = run(device, (q, k, v), None, _keep_views([wide_do], [wide_do.base], device)[0], lengths)
    for a, b, c in zip(plain[:4], viewed[:4], wide[:4], strict=True):
        same_bits(a, b)
        same_bits(a, c)


def _keep_views(views, bases, device):
    """The views, on the device over a copy of their base."""
    out = []
    for view, base in zip(views, bases, strict=True):
        first = (view.ctypes.data - base.ctypes.data) // (view.shape[2] * view.itemsize)
        out.append(to_device(base, device)[:, first : first + view.shape[1]])
    return out


def test_gradients_are_one_buffer(device):
    *arrays, do = problem([20], 4, 2, 64)
    _, dq, dk, dv, d_sinks = run(device, arrays, None, do, [20])
    assert d_sinks is None
    assert dq.base is dk.base is dv.base and dq.base.shape == (20, 8, 64)
    joined = np.concatenate([to_host(x) for x in (dq, dk, dv)], 1)
    same_bits(dq.base, joined)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_documents_do_not_mix(changed, window, device):
    """Another document leaves outputs and gradients of the others as they were, to the bit."""
    lengths = [70, 3, 57]
    *arrays, do = problem(lengths, 4, 2, 64)
    *others, other_do = problem(lengths, 4, 2, 64, seed=1)
    ends = np.cumsum(lengths)
    here = slice(ends[changed] - lengths[changed], ends[changed])
    mixed = [x.copy() for x in (*arrays, do)]
    for x, y in zip(mixed, (*others, other_do), strict=True):
        x[here] = 100 * y[here]
    before = run(device, arrays, None, do, lengths, window=window)
    after = run(device, mixed[:3], None, mixed[3], lengths, window=window)
    kept = np.ones(sum(lengths), bool)
    kept[here] = False
    for a, b in zip(before[:4], after[:4], strict=True):
        same_bits(to_host(a)[kept], to_host(b)[kept])
        assert (to_host(a)[here] != to_host(b)[here]).any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_same_bits_twice(head_dim, device):
    *arrays, do = problem(EDGES, 4, 2, head_dim)
    sinks = normal("float32", (4,), seed=3)
    first = run(device, arrays, sinks, do, EDGES)
    for a, b in zip(first, run(device, arrays, sinks, do, EDGES), strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("window", [None, 30])
def test_packed_equals_alone(window, device):
    """Tiles cut a document elsewhere when it is packed, so sums are rounded in another order."""
    lengths = [70, 3, 57]
    *arrays, do = problem(lengths, 4, 2, 64)
    packed = run(device, arrays, None, do, lengths, window=window)
    end = 0
    for length in lengths:
        here = slice(end, end + length)
        end += length
        alone = run(device, [x[here] for x in arrays], None, do[here], [length], window=window)
        for a, b in zip(packed[:4], alone[:4], strict=True):
            close(to_host(a)[here], b, "bfloat16", roundings=OUT, scale=1)


def test_lse(device):
    """lse is the natural logarithm of the sum of exp(scale q k), sink included."""
    q, k, v, _ = problem([9], 1, 1, 64)
    sinks = np.array([0.5], np.float32)
    arrays = [to_device(x, device) for x in (q, k, v, sinks)]
    _, res = attention_fwd(*arrays, docs=docs_on(device, [9]), scale=0.3)
    s = 0.3 * (q[:, 0].astype(np.float64) @ k[:, 0].astype(np.float64).T)
    want = [np.log(np.exp(s[i, : i + 1]).sum() + np.exp(0.5)) for i in range(9)]
    close(res.lse, np.array([want]), "float32", terms=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_destination(dtype, device):
    q, k, v, do = problem(EDGES, 4, 2, 64)
    sinks, have = normal(dtype, (4,), (4,), seed=3)
    arrays = [to_device(x, device) for x in (q, k, v, sinks)]
    _, res = attention_fwd(*arrays, docs=docs_on(device, EDGES), scale=0.125)
    do = to_device(do, device)
    fresh = attention_bwd(res, do)[3]
    assert fresh.dtype == sinks.dtype
    assert attention_bwd(res, do, into=FROZEN)[3] is None
    into = to_device(have.astype(np.float32), device)
    assert attention_bwd(res, do, into=into)[3] is into
    close(into, have.astype(np.float64) + to_host(fresh).astype(np.float64), dtype)


def test_under_vjp(device):
    *arrays, do = problem([20, 13], 4, 2, 64)
    q, k, v = (to_device(x, device) for x in arrays)
    settings = dict(docs=docs_on(device, [20, 13]), scale=0.125, window=None)
    derived = vjp(lambda q, k, v, docs: attention(q, k, v, None, **{**settings, "docs": docs}))
    o, res = derived.fwd(q, k, v, settings["docs"])
    grads = derived.bwd(res, to_device(do, device))
    want_o, want = attention_fwd(q, k, v, **settings)
    same_bits(o, want_o)
    for a, b in zip(grads[:3], attention_bwd(want, to_device(do, device))[:3], strict=True):
        same_bits(a, b)


def test_empty_row(device):
    *arrays, do = problem([], 4, 2, 64)
    o, dq, dk, dv, _ = run(device, arrays, None, do, [])
    assert o.shape == dq.shape == (0, 4, 64) and dk.shape == dv.shape == (0, 2, 64)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(scale=0.0), "scale must be positive"),
        (dict(window=0), "window must be at least 1"),
        (dict(kv_heads=3), "multiple of kv_heads, got 4 and 3"),
        (dict(v_tokens=9), r"k and v must be \(10, kv_heads, 64\)"),
        (dict(docs=[9]), "docs must hold 10 tokens"),
        (dict(sinks=3), r"sinks must be \(4,\)"),
    ],
)
def test_refuses(change, message):
    kv_heads = change.pop("kv_heads", 2)
    q, k, v = normal("bfloat16", (10, 4, 64), (10, kv_heads, 64), (10, kv_heads, 64))
    v = v[: change.pop("v_tokens", 10)]
    sinks = np.zeros(change.pop("sinks"), np.float32) if "sinks" in change else None
    change["docs"] = docs_from_lengths(change.get("docs", [10]))
    # The shape checks of the signature would come first: this is what a run without them says.
    plain = getattr(attention_fwd, "__wrapped__", attention_fwd)
    with pytest.raises(ValueError, match=message):
        plain(q, k, v, sinks, **{"scale": 1.0, **change})


@pytest.mark.parametrize(
    "dtype,head_dim,message",
    [("float32", 64, "take bfloat16, got float32"), ("bfloat16", 32, "head_dim 64, 96, 128, 256")],
)
def test_kernels_refuse(dtype, head_dim, message, device):
    if device == "host":
        check(device, [5], 2, 1, head_dim, dtype=dtype)  # the host version takes both
        return
    q, k, v, _ = (to_device(x, device) for x in problem([5], 2, 1, head_dim, dtype))
    with pytest.raises(ValueError, match=message):
        attention_fwd(q, k, v, docs=docs_on(device, [5]), scale=1.0)


@pytest.mark.parametrize("number,name", [(0, "q"), (1, "k"), (2, "v"), (3, "do")])
def test_kernels_refuse_arrays_that_begin_off_16_bytes(number, name, device):
    arrays = list(problem([5], 2, 1, 64))
    arrays[number] = unaligned(arrays[number], device)
    if device == "host":
        run(device, arrays[:3], None, arrays[3], [5])
        return
    with pytest.raises(ValueError, match=f"{name} must lie together, .*multiples of 16 bytes"):
        run(device, arrays[:3], None, arrays[3], [5])


def test_tiles_fit_every_card():
    """99 KiB is what the smallest cards from sm_80 on give a block."""
    for head_dim, tiles in TILES.items():
        for tile in (tiles.forward, tiles.dkdv[-1], tiles.dq):
            assert tile.shared <= 99 * 1024, f"{tile} of head_dim {head_dim}"


def test_tiles_of_small_cards(monkeypatch):
    """The tiles that a card with 99 KiB of shared memory uses."""
    monkeypatch.setattr("surogate.kernels.attention_mma.shared_limit", lambda: 99 * 1024)
    with emulated():
        check("emulated", EDGES, 4, 2, 128)


@pytest.mark.gpu
def test_large_sinks():
    check("cuda", [1000, 1, 2, 3000, 93], 2, 1, 64, sinks=normal("float32", (2,), seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize(
    "lengths", [[4096], [2048, 2048], [256] * 16, [1000, 1, 2, 3000, 93]], ids=str
)
def test_large(lengths, head_dim, window):
    """A model's sizes, on the card against the host version."""
    *arrays, do = problem(lengths, 8, 2, head_dim)
    want = run("host", arrays, None, do, lengths, window=window)
    got = run("cuda", arrays, None, do, lengths, window=window)
    close(got[0], want[0], "bfloat16", roundings=OUT, scale=1)
    for a, b in zip(got[1:4], want[1:4], strict=True):
        close(a, b, "bfloat16", roundings=GRAD, scale=1)
