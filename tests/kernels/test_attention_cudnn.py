"""cuDNN's attention. Without a card: what cuDNN is told, to one in NumPy. With a card: numbers."""

import sys

import numpy as np
import pytest

from surogate.kernels import attention_cudnn, attention_plans
from surogate.kernels.arrays import empty
from surogate.kernels.attention import AttentionResiduals
from surogate.kernels.attention_cudnn import (
    Rows,
    available,
    backward,
    forward,
    supported,
    token_strides,
)
from surogate.kernels.attention_host import backward_host, forward_host
from surogate.kernels.attention_plans import (
    Problem,
    State,
    Strides,
    release_scratch,
    scratch_bytes,
)
from surogate.kernels.batch import Docs, docs_from_lengths
from surogate.kernels.documents import document_table, size_classes
from tests.emulator.launch import emulated
from tests.kernels.fake_cudnn import HostCard, Library, NotSupported, Stream
from tests.oracle import close, normal, same_bits, to_device, to_host

OUT, GRAD = 3, 8  # roundings, as in test_attention.py
PACKED = [10, 1, 30, 7]  # least and usual documents, off any tile's edge


def layer(lengths, heads, kv_heads, head_dim, device="host", seed=0):
    """q, k, v, do as a model's layer has them: q and k in one buffer, v in the fused projection."""
    tokens = sum(lengths)
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


def docs_on(device, lengths):
    return Docs(*(to_device(x, device) for x in docs_from_lengths(lengths)))


def tables(docs, q, k, *, max_documents=6, classes=None, longest=None):
    """One table, or one for each size class."""
    strides = token_strides(q.shape[1], k.shape[1], q.shape[2])
    sizes = classes or [(1, longest, max_documents)]
    return tuple(
        document_table(docs, max_documents=n, strides=strides, shortest=a, longest=b)
        for a, b, n in sizes
    )


def gradients(res, do, documents, **settings):
    """dq, dk, dv, views of one buffer."""
    heads, kv_heads = res.q.shape[1], res.k.shape[1]
    packed = empty((len(do), heads + 2 * kv_heads, do.shape[2]), do.dtype, like=do)
    grads = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    backward(res, do, *grads, documents=documents, **settings)
    return grads


def run(arrays, docs, documents, *, window=None, scale=None, **settings):
    """(o, lse, dq, dk, dv)."""
    q, k, v, do = arrays
    scale = scale or q.shape[2] ** -0.5
    o, lse = forward(q, k, v, documents=documents, scale=scale, window=window)
    res = AttentionResiduals(q, k, v, None, o, lse, docs, scale, window)
    return (o, lse, *gradients(res, do, documents, **settings))


def check(got, arrays, lengths, *, window=None):
    """(o, lse) or (o, lse, dq, dk, dv) against the host version of attention.py."""
    q, k, v, do = (to_host(x) for x in arrays)
    docs, scale = docs_from_lengths(lengths), q.shape[2] ** -0.5
    o, lse = forward_host(q, k, v, None, docs, scale, window)
    close(got[0], o, "bfloat16", roundings=OUT, scale=1)
    close(got[1], lse, "float32", roundings=64, terms=q.shape[2], scale=1)
    if len(got) == 2:
        return
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


@SHAPES
@WINDOWS
@pytest.mark.parametrize("rows", [1, 3])  # statistics lie as ours; they do not
def test_rows(heads, kv_heads, head_dim, rows, window, cudnn):
    lengths = [16] * rows
    arrays = layer(lengths, heads, kv_heads, head_dim)
    got = run(arrays, docs_from_lengths(lengths), Rows(rows), window=window)
    check(got, arrays, lengths, window=window)


@SHAPES
@WINDOWS
@pytest.mark.parametrize("max_documents", [4, 6])  # full; rows without a document
def test_table(heads, kv_heads, head_dim, max_documents, window, cudnn):
    arrays = layer(PACKED, heads, kv_heads, head_dim)
    docs = docs_from_lengths(PACKED)
    documents = tables(docs, *arrays[:2], max_documents=max_documents)
    check(run(arrays, docs, documents, window=window), arrays, PACKED, window=window)


def test_tables_of_size_classes(cudnn):
    """Together they give what one table gives."""
    lengths = [10, 1, 30, 7, 3, 16, 16, 17]
    arrays, docs = layer(lengths, 4, 2, 64), docs_from_lengths(lengths)
    classes = size_classes(100, longest=32, max_documents=10, smallest=8)
    documents = tables(docs, *arrays[:2], classes=classes)
    assert len(documents) == 3
    check(run(arrays, docs, documents), arrays, lengths)
    assert cudnn.executions == 6


@pytest.mark.parametrize("packed", [False, True])
def test_heads_run_in_groups_where_scratch_memory_is_short(packed, cudnn):
    lengths = PACKED if packed else [24, 24]
    arrays, docs = layer(lengths, 8, 4, 64), docs_from_lengths(lengths)
    documents = tables(docs, *arrays[:2], longest=30) if packed else Rows(2)
    whole = run(arrays, docs, documents)
    executions = cudnn.executions
    full = 6 * 8 * 30 * 30 * 2 if packed else 2 * 8 * 24 * 24 * 2
    grouped = run(arrays, docs, documents, scratch_limit=full // 3)  # 4 groups: 3 do not divide
    assert cudnn.executions - executions == 1 + 4
    for a, b in zip(whole, grouped, strict=True):
        same_bits(a, b)
    check(grouped, arrays, lengths)


def test_without_determinism_scratch_memory_is_small(cudnn):
    arrays, docs = layer([24, 24], 4, 2, 64), docs_from_lengths([24, 24])
    settings = dict(documents=Rows(2), scale=0.125, backward=True, scratch_limit=2 * 4 * 24 * 4)
    assert not supported(*arrays[:3], **settings)
    assert supported(*arrays[:3], **settings, deterministic=False)
    limit = settings["scratch_limit"]
    got = run(arrays, docs, Rows(2), deterministic=False, scratch_limit=limit)
    check(got, arrays, [24, 24])


def test_no_tokens(cudnn):
    q, k, v, do = (x[:0] for x in layer([4], 4, 2, 64))
    o, lse, *grads = run((q, k, v, do), docs_from_lengths([]), Rows(1))
    assert o.shape == q.shape and lse.shape == (4, 0) and grads[0].shape == q.shape
    assert cudnn.builds == 0


def test_a_plan_is_built_once(cudnn):
    arrays, docs = layer([24, 24], 4, 2, 64), docs_from_lengths([24, 24])
    settings = dict(documents=Rows(2), scale=0.125)
    run(arrays, docs, Rows(2))
    assert cudnn.builds == 2
    assert supported(*arrays[:3], **settings) and supported(*arrays[:3], **settings, backward=True)
    run(arrays, docs, Rows(2))
    assert cudnn.builds == 2
    run(arrays, docs, Rows(2), window=24)  # all that a row has: no window
    assert cudnn.builds == 2
    run(arrays, docs, Rows(2), window=23)
    run(arrays, docs, Rows(1))
    run(arrays, docs, Rows(2), scale=0.5)
    assert cudnn.builds == 8
    contiguous = [np.ascontiguousarray(x) for x in arrays]  # other strides
    run(contiguous, docs, Rows(2))
    assert cudnn.builds == 10


def test_one_plan_serves_every_batch(cudnn):
    for lengths in ([48], [1] * 5 + [43], [20, 28]):
        arrays, docs = layer(lengths, 4, 2, 64), docs_from_lengths(lengths)
        got = run(arrays, docs, tables(docs, *arrays[:2]))
        check(got, arrays, lengths)
    assert cudnn.builds == 2


def test_nothing_is_built_while_capturing(cudnn):
    stream = attention_plans.state.card.now
    arrays, docs = layer([24], 4, 2, 64), docs_from_lengths([24])
    stream.capturing = True
    with pytest.raises(RuntimeError, match="first Problem.* while its stream is being captured"):
        run(arrays, docs, Rows(1))
    stream.capturing = False
    run(arrays, docs, Rows(1))
    stream.capturing = True
    run(arrays, docs, Rows(1))
    attention_plans.state.card.now = other = Stream(2)
    other.capturing = True
    with pytest.raises(RuntimeError, match="first use of cuDNN's scratch memory"):
        run(arrays, docs, Rows(1))


def test_scratch_memory_is_a_streams_own_and_outlives_graphs(cudnn):
    state = attention_plans.state
    small, large = layer([8], 2, 1, 64), layer([32], 2, 1, 64)
    run(small, docs_from_lengths([8]), Rows(1))
    memory, size = state.scratch[0, 1]
    assert size == 2 * 8 * 8 * 2 and scratch_bytes() == 16 + size
    run(large, docs_from_lengths([32]), Rows(1))
    assert state.scratch[0, 1][1] == 2 * 32 * 32 * 2
    assert memory in [held for held, _ in state.outgrown]
    run(small, docs_from_lengths([8]), Rows(1))
    assert state.scratch[0, 1][1] == 2 * 32 * 32 * 2
    state.card.now = Stream(2)
    run(small, docs_from_lengths([8]), Rows(1))
    assert set(state.scratch) == {(0, 1), (0, 2)} and set(cudnn.streams) == {1, 2}
    release_scratch()
    assert scratch_bytes() == 0
    run(small, docs_from_lengths([8]), Rows(1))
    assert set(state.scratch) == {(0, 2)}


def test_token_strides_are_those_of_a_layer(cudnn):
    """And a table without one of them says which."""
    arrays, docs = layer([24], 4, 2, 64), docs_from_lengths([24])
    assert token_strides(4, 2, 64) == (6 * 64, 8 * 64, 4 * 64, 4)
    short = document_table(docs, max_documents=2, strides=token_strides(4, 2, 64)[:-1])
    with pytest.raises(ValueError, match="no offsets for tokens 4 elements apart"):
        run(arrays, docs, (short,))


def asks(lengths=(24,), heads=4, kv_heads=2, head_dim=64, sinks=None, **settings):
    q, k, v, _ = layer(list(lengths), heads, kv_heads, head_dim)
    return supported(q, k, v, sinks, **{"documents": Rows(1), "scale": 0.125, **settings})


def test_says_what_it_would_run(cudnn):
    assert asks() == (True, "cuDNN 9.19.0 through its frontend 1.18.0, 0 MiB of scratch memory")
    grouped = asks(lengths=[512], backward=True, scratch_limit=1 << 20)
    assert grouped and grouped.reason.endswith("1 MiB of scratch memory in 2 groups of heads")


def test_says_why_not(cudnn):
    assert "has no sinks" in asks(sinks=np.zeros(4, "f4")).reason
    assert "head_dim 64, 128, 256, got 96" in asks(head_dim=96).reason
    q, k, v, _ = (x.astype("f4") for x in layer([24], 4, 2, 64))
    assert "takes bfloat16, got float32" in supported(q, k, v, documents=Rows(1), scale=0.1).reason
    assert cudnn.builds == 0
    short = asks(backward=True, scratch_limit=100)
    assert not short and "backward of 1 documents of up to 24 tokens takes" in short.reason


@pytest.mark.parametrize(
    "refusal", [NotSupported("no\n such  kernel"), RuntimeError("no such kernel")]
)
def test_says_what_cudnn_refuses(refusal, cudnn):
    cudnn.refusal = refusal
    assert asks() == (False, "attention: cuDNN has no plan for it: no such kernel")
    q, k, v, _ = layer([24], 4, 2, 64)
    with pytest.raises(ValueError, match="no plan for it: no such kernel"):
        forward(q, k, v, documents=Rows(1), scale=0.125)


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


def test_refuses(cudnn):
    arrays, docs = layer([24], 4, 2, 64), docs_from_lengths([24])
    q, k, v, do = arrays
    with pytest.raises(ValueError, match="24 tokens are not 5 equal rows"):
        run(arrays, docs, Rows(5))
    other = tables(docs_from_lengths([20]), q, k)
    with pytest.raises(ValueError, match=r"needs tables of 24 tokens, got \[20\]"):
        run(arrays, docs, other)
    apart = np.concatenate([q, q], 2)[:, :, :64]
    with pytest.raises(ValueError, match="heads of a token of q must lie together"):
        run((apart, k, v, do), docs, Rows(1))
    attention_plans.state.card.device = 1
    with pytest.raises(ValueError, match="arrays are on card 0, the current one is 1"):
        run(arrays, docs, Rows(1))


@pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
@pytest.mark.parametrize("to_cudnn", [False, True])
@pytest.mark.parametrize(
    "ragged,batch,seq,heads", [(False, 3, 50, 4), (False, 1, 7, 3), (True, 9, 50, 5)]
)
def test_statistics_move(ragged, batch, seq, heads, to_cudnn, device):
    tokens = 150 if ragged else batch * seq
    ours = normal("float32", (heads, tokens))
    theirs = ours.T if ragged else ours.reshape(heads, batch, seq).swapaxes(0, 1)
    source, want = (ours, theirs) if to_cudnn else (theirs, ours)
    source = to_device(np.ascontiguousarray(source), device)
    out = empty(want.shape, np.float32, like=source)
    strides = Strides(64, 64, 64, 64)
    sizes = dict(batch=batch, seq=seq, tokens=tokens, heads=heads, kv_heads=1, head_dim=64)
    problem = Problem(
        0, False, True, ragged, **sizes, strides=strides, scale=1.0, window=None, scratch_limit=1
    )
    attention_cudnn._move_stats(out, source, problem, to_cudnn=to_cudnn)
    same_bits(out, want)


# On a card. What cuDNN does not take there must say so, and raise.

gpu = pytest.mark.gpu


def on_card(lengths, heads, kv_heads, head_dim, *, rows=None, window=None, **settings):
    """Runs a layer, and a second time for the same bits; None where cuDNN's backward refuses."""
    arrays, docs = layer(lengths, heads, kv_heads, head_dim, "cuda"), docs_on("cuda", lengths)
    documents = Rows(rows) if rows else tables(docs, *arrays[:2], longest=max(lengths))
    asked = dict(documents=documents, scale=head_dim**-0.5, window=window)
    assert supported(*arrays[:3], **asked)
    answer = supported(*arrays[:3], **asked, backward=True, **settings)
    if not answer:
        assert answer.reason.startswith("attention: cuDNN")
        with pytest.raises(ValueError, match="attention: cuDNN"):
            run(arrays, docs, documents, window=window, **settings)
        return None
    got = run(arrays, docs, documents, window=window, **settings)
    check(got, arrays, lengths, window=window)
    if settings.get("deterministic", True):
        for a, b in zip(got, run(arrays, docs, documents, window=window, **settings), strict=True):
            same_bits(a, b)
    return got


@gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("rows,seq", [(1, 512), (3, 256), (2, 200)])  # one; tiles; off tiles
def test_rows_on_a_card(rows, seq, heads, kv_heads, head_dim, window):
    got = on_card([seq] * rows, heads, kv_heads, head_dim, rows=rows, window=window)
    assert got is not None or head_dim == 256


@gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [[512], [200, 1, 130, 64, 117], [128] * 4, [1, 511]], ids=str)
def test_table_on_a_card(lengths, head_dim, window, deterministic):
    got = on_card(lengths, 8, 2, head_dim, window=window, deterministic=deterministic)
    assert got is not None or deterministic


@gpu
def test_groups_of_heads_on_a_card():
    whole = on_card([256] * 2, 8, 4, 128, rows=2)
    grouped = on_card([256] * 2, 8, 4, 128, rows=2, scratch_limit=3 << 19)
    assert grouped is not None
    for a, b in zip(whole, grouped, strict=True):
        close(a, b, "bfloat16", roundings=2, scale=1)


@gpu
def test_mixes_with_our_kernels():
    """Forward of one, backward of the other."""
    from surogate.kernels.attention import attention_bwd, attention_fwd

    lengths = [200, 1, 130, 64, 117]
    arrays, docs = layer(lengths, 8, 2, 128, "cuda"), docs_on("cuda", lengths)
    q, k, v, do = arrays
    documents = tables(docs, q, k)
    o, lse = forward(q, k, v, documents=documents, scale=128**-0.5)
    res = AttentionResiduals(q, k, v, None, o, lse, docs, 128**-0.5, None)
    check((o, lse, *attention_bwd(res, do)[:3]), arrays, lengths)
    rows = docs_on("cuda", [256, 256])
    _, ours = attention_fwd(q, k, v, docs=rows, scale=128**-0.5)
    check((ours.o, ours.lse, *gradients(ours, do, Rows(2))), arrays, [256, 256])


@gpu
@pytest.mark.parametrize("here", [slice(0, 70), slice(70, 73), slice(73, 128)])
def test_documents_do_not_mix_on_a_card(here):
    """Another document leaves what the others give as it was, to the bit."""
    lengths = [70, 3, 55]
    arrays, docs = layer(lengths, 4, 2, 128, "cuda"), docs_on("cuda", lengths)
    documents = tables(docs, *arrays[:2])
    before = forward(*arrays[:3], documents=documents, scale=0.1)
    for x, y in zip(arrays[:3], layer(lengths, 4, 2, 128, "cuda", seed=1), strict=False):
        x[here] = y[here]
    after = forward(*arrays[:3], documents=documents, scale=0.1)
    others = np.ones(128, bool)
    others[here] = False
    same_bits(to_host(before[0])[others], to_host(after[0])[others])
    same_bits(to_host(before[1])[:, others], to_host(after[1])[:, others])
    assert (to_host(before[1])[:, here] != to_host(after[1])[:, here]).any()


@gpu
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_serves_every_batch(packed):
    import cupy

    from surogate.kernels.capture import capture

    first, *others = ([512], [200, 1, 311], [128] * 4) if packed else ([256] * 2, [256] * 2)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays, docs = layer(first, 8, 2, 128, "cuda"), docs_on("cuda", first)

        def step():
            if not packed:
                return run(arrays, docs, Rows(2))
            documents = tables(docs, *arrays[:2])
            return forward(*arrays[:3], documents=documents, scale=128**-0.5)

        graph = capture(step)
        for seed, lengths in enumerate([first, *others]):
            for target, source in zip(arrays, layer(lengths, 8, 2, 128, "cuda", seed), strict=True):
                target[...] = source
            for target, source in zip(docs, docs_from_lengths(lengths), strict=True):
                target.set(source)
            got = graph()
            stream.synchronize()
            check(got, arrays, lengths)
