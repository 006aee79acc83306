"""cuDNN's attention. Without a card: what cuDNN is told, to one in NumPy. With a card: numbers."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from surogate.kernels import (
    attention_choice,
    attention_cudnn,
    attention_hopper,
    attention_mma,
    attention_plans,
)
from surogate.kernels.arrays import empty
from surogate.kernels.attention import AttentionResiduals
from surogate.kernels.attention_cudnn import available, backward, forward, supported
from surogate.kernels.attention_host import backward_host, forward_host
from surogate.kernels.attention_plans import State, release_scratch, scratch_bytes
from surogate.kernels.batch import Docs, docs_from_lengths
from tests.emulator.launch import emulated
from tests.kernels.fake_cudnn import HostCard, Library, NotSupported, Stream
from tests.oracle import close, normal, same_bits, to_device, to_host

OUT, GRAD = 3, 8  # roundings, as in test_attention.py


def layer(tokens, heads, kv_heads, head_dim, device="host", seed=0):
    """q, k, v, do as a model's layer has them: q and k in one buffer, v in the fused projection."""
    rotated, fused, do = (
        to_device(x, device)
        for x in normal(
            "bfloat16",
            (tokens, heads + kv_heads, head_dim),
            (tokens, heads + 2 * kv_heads, head_dim),
            (tokens, heads, head_dim),
            seed=seed,
        )
    )
    return rotated[:, :heads], rotated[:, heads:], fused[:, heads + kv_heads :], do


def docs_of(tokens, rows, device="host"):
    return Docs(*(to_device(x, device) for x in docs_from_lengths([tokens // rows] * rows)))


def gradients(res, do, rows, **settings):
    """dq, dk, dv, views of one buffer."""
    heads, kv_heads = res.q.shape[1], res.k.shape[1]
    packed = empty((len(do), heads + 2 * kv_heads, do.shape[2]), do.dtype, like=do)
    grads = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    backward(res, do, *grads, rows=rows, **settings)
    return grads


def run(arrays, rows, *, window=None, scale=None, **settings):
    """(o, lse, dq, dk, dv)."""
    q, k, v, do = arrays
    scale = scale or q.shape[2] ** -0.5
    o, lse = forward(q, k, v, rows=rows, scale=scale, window=window)
    docs = Docs(*(empty((len(q),), np.int32, like=q) for _ in Docs._fields))  # cuDNN reads none
    res = AttentionResiduals(q, k, v, None, o, lse, docs, scale, window, rows)
    return (o, lse, *gradients(res, do, rows, **settings))


def check(got, arrays, rows, *, window=None):
    """(o, lse, dq, dk, dv) against the host version of attention.py."""
    q, k, v, do = (to_host(x) for x in arrays)
    docs, scale = docs_of(len(q), rows), q.shape[2] ** -0.5
    o, lse = forward_host(q, k, v, None, docs, scale, window)
    close(got[0], o, "bfloat16", roundings=OUT, scale=1)
    close(got[1], lse, "float32", roundings=64, terms=q.shape[2], scale=1)
    grads = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    res = AttentionResiduals(q, k, v, None, o, lse, docs, scale, window)
    backward_host(res, do, *grads, None)
    for mine, want in zip(got[2:], grads, strict=True):
        close(mine, want, "bfloat16", roundings=GRAD, scale=1)


# Without a card.


@pytest.fixture
def cudnn(monkeypatch):
    """A cuDNN in NumPy; our own kernels are emulated."""
    library = Library()
    monkeypatch.setattr(attention_plans, "library", lambda: library)
    monkeypatch.setattr(attention_plans, "state", State(HostCard()))
    with emulated():
        yield library


SHAPES = pytest.mark.parametrize(
    "heads,kv_heads,head_dim", [(2, 2, 64), (4, 2, 64), (4, 1, 128), (2, 1, 256)]
)
WINDOWS = pytest.mark.parametrize("window", [None, 5, 1000])  # all; some; more than there are


@pytest.mark.parametrize(
    "heads,kv_heads,head_dim", [(2, 2, 64), (4, 2, 64), (4, 1, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("window", [None, 5, 1000])  # all; some; more than there are
@pytest.mark.parametrize("rows", [1, 3])  # statistics lie as ours; they do not
def test_rows(heads, kv_heads, head_dim, rows, window, cudnn):
    arrays = layer(16 * rows, heads, kv_heads, head_dim)
    check(run(arrays, rows, window=window), arrays, rows, window=window)


@pytest.mark.parametrize("rows", [1, 2])
def test_heads_run_in_groups_where_scratch_memory_is_short(rows, cudnn):
    arrays = layer(24 * rows, 8, 4, 64)
    whole = run(arrays, rows)
    executions, full = cudnn.executions, rows * 8 * 24 * 24 * 2
    grouped = run(arrays, rows, scratch_limit=full // 3)  # 4 groups: 3 do not divide
    assert cudnn.executions - executions == 1 + 4
    for a, b in zip(whole, grouped, strict=True):
        same_bits(a, b)
    check(grouped, arrays, rows)


def test_no_tokens(cudnn):
    q, k, v, do = (x[:0] for x in layer(4, 4, 2, 64))
    o, lse, *grads = run((q, k, v, do), 1)
    assert o.shape == q.shape and lse.shape == (4, 0) and grads[0].shape == q.shape
    assert cudnn.builds == 0


def test_a_plan_is_built_once(cudnn):
    arrays = layer(48, 4, 2, 64)
    settings = dict(rows=2, scale=0.125)
    run(arrays, 2)
    assert cudnn.builds == 2
    assert supported(*arrays[:3], **settings) and supported(*arrays[:3], **settings, backward=True)
    run(arrays, 2)
    assert cudnn.builds == 2
    run(arrays, 2, window=24)  # all that a row has: no window
    assert cudnn.builds == 2
    run(arrays, 2, window=23)
    run(arrays, 1)
    run(arrays, 2, scale=0.5)
    assert cudnn.builds == 8
    contiguous = [np.ascontiguousarray(x) for x in arrays]  # other strides
    run(contiguous, 2)
    assert cudnn.builds == 10


def test_nothing_is_built_while_capturing(cudnn):
    stream = attention_plans.state.card.now
    arrays = layer(24, 4, 2, 64)
    stream.capturing = True
    with pytest.raises(RuntimeError, match="first Problem.* while its stream is being captured"):
        run(arrays, 1)
    stream.capturing = False
    run(arrays, 1)
    stream.capturing = True
    run(arrays, 1)
    attention_plans.state.card.now = other = Stream(2)
    other.capturing = True
    with pytest.raises(RuntimeError, match="first use of cuDNN's scratch memory"):
        run(arrays, 1)


def test_scratch_memory_is_a_streams_own_and_outlives_graphs(cudnn):
    state = attention_plans.state
    small, large = layer(8, 2, 1, 64), layer(32, 2, 1, 64)
    run(small, 1)
    memory, size = state.scratch[0, 1]
    assert size == 2 * 8 * 8 * 2 and scratch_bytes() == 16 + size
    run(large, 1)
    assert state.scratch[0, 1][1] == 2 * 32 * 32 * 2
    assert memory in [held for held, _ in state.outgrown]
    run(small, 1)
    assert state.scratch[0, 1][1] == 2 * 32 * 32 * 2
    state.card.now = Stream(2)
    run(small, 1)
    assert set(state.scratch) == {(0, 1), (0, 2)} and set(cudnn.streams) == {1, 2}
    release_scratch()
    assert scratch_bytes() == 0
    run(small, 1)
    assert set(state.scratch) == {(0, 2)}


def test_a_trial_gives_its_scratch_memory_back(cudnn):
    small, large = layer(8, 2, 1, 64), layer(32, 2, 1, 64)
    run(small, 1)
    before, outgrown = dict(attention_plans.state.scratch), list(attention_plans.state.outgrown)
    with attention_plans.borrowed_scratch():
        run(large, 1)
        attention_plans.state.card.now = Stream(2)
        run(large, 1)
        assert scratch_bytes() > 2 * 2 * 32 * 32 * 2
    assert attention_plans.state.scratch == before
    assert attention_plans.state.outgrown == outgrown


def asks(tokens=24, heads=4, kv_heads=2, head_dim=64, sinks=None, **settings):
    q, k, v, _ = layer(tokens, heads, kv_heads, head_dim)
    return supported(q, k, v, sinks, **{"rows": 1, "scale": 0.125, **settings})


def test_says_what_it_would_run(cudnn):
    assert asks() == (True, "cuDNN 9.19.0 through its frontend 1.18.0, 0 MiB of scratch memory")
    grouped = asks(tokens=512, backward=True, scratch_limit=1 << 20)
    assert grouped and grouped.reason.endswith("1 MiB of scratch memory in 2 groups of heads")


def test_says_why_not(cudnn):
    assert "has no sinks" in asks(sinks=np.zeros(4, "f4")).reason
    assert "head_dim 64, 128, 256, got 96" in asks(head_dim=96).reason
    q, k, v, _ = (x.astype("f4") for x in layer(24, 4, 2, 64))
    assert "takes bfloat16, got float32" in supported(q, k, v, rows=1, scale=0.1).reason
    assert cudnn.builds == 0
    short = asks(backward=True, scratch_limit=100)
    assert not short and "backward of 1 rows of 24 tokens takes" in short.reason


@pytest.mark.parametrize(
    "refusal", [NotSupported("no\n such  kernel"), RuntimeError("no such kernel")]
)
def test_says_what_cudnn_refuses(refusal, cudnn):
    cudnn.refusal = refusal
    assert asks() == (False, "attention: cuDNN has no plan for it: no such kernel")
    q, k, v, _ = layer(24, 4, 2, 64)
    with pytest.raises(ValueError, match="no plan for it: no such kernel"):
        forward(q, k, v, rows=1, scale=0.125)


def test_rows_of_one_token_are_left_to_our_kernels(cudnn):
    assert "one token is not supported" in asks(rows=24).reason


def test_says_what_is_missing(cudnn, monkeypatch):
    assert available() == (True, "cuDNN 9.19.0 through its frontend 1.18.0")
    cudnn.version = 91500
    assert not asks() and "cuDNN 9.15.0" in asks().reason and "9.18.1 or newer" in asks().reason

    def unable() -> int:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(cudnn, "backend_version", unable)
    assert not asks() and "does not load (Unable to find" in asks().reason


def test_without_the_frontend(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    attention_plans.library.cache_clear()
    answer = available()
    assert not answer and "nvidia-cudnn-frontend" in answer.reason
    assert "surogate[cuda13]" in answer.reason
    with pytest.raises(ImportError, match=r"install surogate\[cuda13\]"):
        attention_plans.library()


@pytest.mark.parametrize("rows", [0, 5, 48])
def test_refuses_other_rows(rows, cudnn):
    with pytest.raises(ValueError, match=f"24 tokens are not {rows} equal rows"):
        run(layer(24, 4, 2, 64), rows)


def test_refuses_arrays_it_cannot_reach(cudnn):
    q, k, v, do = layer(24, 4, 2, 64)
    apart = np.concatenate([q, q], 2)[:, :, :64]
    with pytest.raises(ValueError, match="heads of a token of q must lie together"):
        run((apart, k, v, do), 1)
    attention_plans.state.card.device = 1
    with pytest.raises(ValueError, match="arrays are on card 0, the current one is 1"):
        run((q, k, v, do), 1)


@pytest.mark.parametrize("rows", [None, 3])
def test_is_a_candidate_where_documents_are_rows(rows, cudnn, monkeypatch):
    """And what attention_choice.py then calls gives the numbers."""
    offered = []

    def last(topic, candidates, **_):
        offered.append(list(candidates))
        return offered[-1][-1]

    monkeypatch.setattr(attention_choice, "choose", last)
    monkeypatch.setattr(attention_choice, "Backend", SimpleNamespace(launch=None))  # as on a card
    monkeypatch.setattr(attention_hopper, "supported", lambda q: False)
    (*arrays, do), docs = layer(48, 4, 2, 64), docs_of(48, 3)
    packed = empty((48, 8, 64), do.dtype, like=do)
    grads = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    o, lse = attention_choice.forward(*arrays, None, docs, 64**-0.5, None, rows)
    res = AttentionResiduals(*arrays, None, o, lse, docs, 64**-0.5, None, rows)
    assert attention_choice.backward(res, do, *grads, None) is None
    assert offered == [["mma", "cudnn"] if rows else ["mma"]] * 2
    check((o, lse, *grads), (*arrays, do), 3)


@pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
@pytest.mark.parametrize("to_cudnn", [False, True])
@pytest.mark.parametrize("rows,seq,heads", [(3, 50, 4), (1, 7, 3)])
def test_statistics_move(rows, seq, heads, to_cudnn, device):
    ours = normal("float32", (heads, rows * seq))
    theirs = ours.reshape(heads, rows, seq).swapaxes(0, 1)
    source, want = (ours, theirs) if to_cudnn else (theirs, ours)
    source = to_device(np.ascontiguousarray(source), device)
    out = empty(want.shape, np.float32, like=source)
    attention_cudnn._move_stats(out, source, rows, heads, to_cudnn=to_cudnn)
    same_bits(out, want)


# On a card. What cuDNN does not take there must say so, and raise.

gpu = pytest.mark.gpu


def on_card(rows, seq, heads, kv_heads, head_dim, *, window=None, **settings):
    """Runs a layer, and a second time for the same bits; None where cuDNN's backward refuses."""
    arrays = layer(rows * seq, heads, kv_heads, head_dim, "cuda")
    asked = dict(rows=rows, scale=head_dim**-0.5, window=window)
    assert supported(*arrays[:3], **asked)
    answer = supported(*arrays[:3], **asked, backward=True, **settings)
    if not answer:
        assert answer.reason.startswith("attention: cuDNN")
        with pytest.raises(ValueError, match="attention: cuDNN"):
            run(arrays, rows, window=window, **settings)
        return None
    got = run(arrays, rows, window=window, **settings)
    check(got, arrays, rows, window=window)
    for a, b in zip(got, run(arrays, rows, window=window, **settings), strict=True):
        same_bits(a, b)
    return got


@gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("rows,seq", [(1, 512), (3, 256), (2, 200)])  # one; tiles; off tiles
def test_rows_on_a_card(rows, seq, heads, kv_heads, head_dim, window):
    got = on_card(rows, seq, heads, kv_heads, head_dim, window=window)
    assert got is not None or head_dim == 256


@gpu
def test_groups_of_heads_on_a_card():
    whole = on_card(2, 256, 8, 4, 128)
    grouped = on_card(2, 256, 8, 4, 128, scratch_limit=3 << 19)
    assert grouped is not None
    for a, b in zip(whole, grouped, strict=True):
        close(a, b, "bfloat16", roundings=2, scale=1)


@gpu
def test_mixes_with_our_kernels():
    """Forward of one, backward of the other."""
    arrays, docs = layer(512, 8, 2, 128, "cuda"), docs_of(512, 2, "cuda")
    q, k, v, do = arrays
    scale, packed = 128**-0.5, empty((512, 12, 128), q.dtype, like=q)
    grads = packed[:, :8], packed[:, 8:10], packed[:, 10:]
    o, lse = forward(q, k, v, rows=2, scale=scale)
    res = AttentionResiduals(q, k, v, None, o, lse, docs, scale, None)
    attention_mma.backward(res, do, *grads)
    check((o, lse, *grads), arrays, 2)
    o, lse = attention_mma.forward(q, k, v, None, docs, scale, None)
    check((o, lse, *gradients(res._replace(o=o, lse=lse), do, 2)), arrays, 2)


@gpu
def test_one_graph_serves_every_batch():
    import cupy

    from surogate.kernels.capture import capture

    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays = layer(512, 8, 2, 128, "cuda")
        graph = capture(lambda: run(arrays, 2))
        for seed in range(3):
            for target, source in zip(arrays, layer(512, 8, 2, 128, "cuda", seed), strict=True):
                target[...] = source
            got = graph()
            stream.synchronize()
            check(got, arrays, 2)
