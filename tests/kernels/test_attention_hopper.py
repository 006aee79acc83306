"""Attention on Hopper: against float64 autodiff, by document, by window, by how arrays lie."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from surogate.kernels import attention_hopper, attention_mma, nvrtc
from surogate.kernels.arrays import empty
from surogate.kernels.attention import AttentionResiduals, attention_ref
from surogate.kernels.batch import Docs, docs_from_lengths
from tests.emulator.launch import emulated
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host

# Roundings, of values of size 1, as o and the summands of all gradients are for unit normals.
OUT = 3  # of the weights before the product, and of the result
GRAD = 8  # also of o in delta, which is dS's subtrahend, and of dS

HEAD_DIM = 128
ONE = [260]  # three tiles of 128 and a ragged end
EDGES = [1, 2, 3, 58, 64, 20, 107, 1]  # least documents; borders on and off tile edges
ALIGNED = [128, 128]  # no ragged end
SHORT = [20]  # less than a warpgroup's rows
PACKS = pytest.mark.parametrize(
    "lengths", [ONE, EDGES, ALIGNED, SHORT], ids=["one", "edges", "aligned", "short"]
)
HEADS = pytest.mark.parametrize("heads,kv_heads", [(2, 2), (4, 2), (4, 1), (7, 1)])
HEAD_DIMS = pytest.mark.parametrize("head_dim", attention_hopper.TILES)


def is_hopper() -> bool:
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "emulated":
        with emulated():
            yield "emulated"
    elif is_hopper():
        yield "cuda"
    else:
        pytest.skip("needs a Hopper card")


def docs_on(device: str, lengths: list[int]) -> Docs:
    return Docs(*(to_device(x, device) for x in docs_from_lengths(lengths)))


def problem(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int = HEAD_DIM, seed: int = 0
) -> Any:
    """q, k, v, do on the host."""
    tokens = sum(lengths)
    queries, keys = (tokens, heads, head_dim), (tokens, kv_heads, head_dim)
    return normal("bfloat16", queries, keys, keys, queries, seed=seed)


def run(device, arrays, sinks, do, lengths, *, window=None):
    """(o, lse, dq, dk, dv, stats) of forward and backward."""
    q, k, v, do = (to_device(x, device) for x in (*arrays, do))
    sinks = None if sinks is None else to_device(sinks, device)
    settings = (docs_on(device, lengths), q.shape[2] ** -0.5, window)
    o, lse = attention_hopper.forward(q, k, v, sinks, *settings)
    res = AttentionResiduals(q, k, v, sinks, o, lse, *settings, None)
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    packed = empty((tokens, heads + 2 * kv_heads, head_dim), q.dtype, like=q)
    grads = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    stats = attention_hopper.backward(res, do, *grads)
    return (o, lse, *grads, stats)


def check(device, lengths, heads, kv_heads, *, head_dim=HEAD_DIM, window=None, sinks=None):
    *arrays, do = problem(lengths, heads, kv_heads, head_dim)
    docs = docs_from_lengths(lengths)
    reference = partial(attention_ref, docs=docs, scale=head_dim**-0.5, window=window)
    o, dq, dk, dv, _ = oracle(reference, (*arrays, sinks), do)
    got_o, lse, got_dq, got_dk, got_dv, stats = run(
        device, arrays, sinks, do, lengths, window=window
    )
    close(got_o, o, "bfloat16", roundings=OUT, scale=1)
    for got, want in ((got_dq, dq), (got_dk, dk), (got_dv, dv)):
        close(got, want, "bfloat16", roundings=GRAD, scale=1)
    stats, tokens = to_host(stats), len(do)
    delta = (do.astype(np.float32) * to_host(got_o).astype(np.float32)).sum(-1).T
    close(stats[:, :tokens, 0], to_host(lse) / np.log(2), "float32", scale=1)
    close(stats[:, :tokens, 1], delta, "float32", terms=head_dim)
    assert (stats[:, tokens:] == (np.inf, 0)).all(), "rows of padding must weigh nothing"


@HEADS
@HEAD_DIMS
def test_matches_reference(heads, kv_heads, head_dim, device):
    check(device, EDGES, heads, kv_heads, head_dim=head_dim)


@PACKS
@HEAD_DIMS
def test_documents(lengths, head_dim, device):
    check(device, lengths, 2, 1, head_dim=head_dim)


@PACKS
@pytest.mark.parametrize("window", [1, 5, 130, 1000])  # itself; in a tile; over tiles; all
def test_window(lengths, window, device):
    check(device, lengths, 2, 1, window=window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("size", [1.0, 4.0])  # like the logits; above them
def test_sinks(window, size, device):
    sinks = size * normal("float32", (4,), seed=3)
    check(device, EDGES, 4, 2, window=window, sinks=sinks)


def test_sections(monkeypatch, device):
    """Heads one after the other, as for keys that do not fit the cache: the same bits."""
    *arrays, do = problem(EDGES, 4, 2)
    together = run(device, arrays, None, do, EDGES)
    monkeypatch.setattr(attention_hopper, "CACHE", 0)
    for a, b in zip(run(device, arrays, None, do, EDGES), together, strict=True):
        same_bits(a, b)


def test_lse(device):
    q, k, v, _ = problem([9], 1, 1)
    sinks = np.array([0.5], np.float32)
    arrays = [to_device(x, device) for x in (q, k, v, sinks)]
    _, lse = attention_hopper.forward(*arrays, docs_on(device, [9]), 0.3, None)
    s = 0.3 * (q[:, 0].astype(np.float64) @ k[:, 0].astype(np.float64).T)
    want = [np.log(np.exp(s[i, : i + 1]).sum() + np.exp(0.5)) for i in range(9)]
    close(lse, np.array([want]), "float32", terms=HEAD_DIM)


def test_views(device):
    """q and k in one buffer, v and do in wider ones: the same bits as contiguous arrays."""
    lengths, heads, kv_heads = [70, 3, 157], 4, 2
    q, k, v, do = problem(lengths, heads, kv_heads)
    plain = run(device, (q, k, v), None, do, lengths)
    wide = to_device(np.concatenate([q, k, v, do], 1), device)
    q, k, v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads : -heads]
    viewed = run(device, (q, k, v), None, wide[:, -heads:], lengths)
    for a, b in zip(viewed, plain, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_documents_do_not_mix(changed, window, device):
    """Another document leaves outputs and gradients of the others as they were, to the bit."""
    lengths = [70, 3, 157]
    *arrays, do = problem(lengths, 4, 2)
    *others, other_do = problem(lengths, 4, 2, seed=1)
    ends = np.cumsum(lengths)
    here = slice(ends[changed] - lengths[changed], ends[changed])
    mixed = [x.copy() for x in (*arrays, do)]
    for x, y in zip(mixed, (*others, other_do), strict=True):
        x[here] = 100 * y[here]
    before = run(device, arrays, None, do, lengths, window=window)
    after = run(device, mixed[:3], None, mixed[3], lengths, window=window)
    kept = np.ones(sum(lengths), bool)
    kept[here] = False
    for i in (0, 2, 3, 4):
        a, b = to_host(before[i]), to_host(after[i])
        same_bits(a[kept], b[kept])
        assert (a[here] != b[here]).any()


def test_same_bits_twice(device):
    *arrays, do = problem(EDGES, 4, 2)
    first = run(device, arrays, None, do, EDGES)
    for a, b in zip(first, run(device, arrays, None, do, EDGES), strict=True):
        same_bits(a, b)


def test_empty_row(device):
    *arrays, do = problem([], 4, 2)
    o, lse, dq, dk, _, stats = run(device, arrays, None, do, [])
    assert o.shape == dq.shape == (0, 4, HEAD_DIM) and dk.shape == (0, 2, HEAD_DIM)
    assert lse.shape == (4, 0) and stats.shape == (4, 0, 2)


def test_refuses_scattered_columns():
    with emulated():
        q, k, v, _ = problem([10], 2, 1)
        scattered = np.ascontiguousarray(q.transpose(0, 2, 1)).transpose(0, 2, 1)
        with pytest.raises(ValueError, match="columns of q must lie together"):
            attention_hopper.forward(scattered, k, v, None, docs_from_lengths([10]), 1.0, None)


@pytest.mark.parametrize("source", [attention_hopper.FORWARD, attention_hopper.BACKWARD])
def test_compiler_keeps_products_in_the_background(source):
    """It says so when it makes each product wait for the one before, and when registers spill."""
    from cupy.cuda import nvrtc as compiler

    headers = nvrtc._headers()
    texts, names = ([x.encode() for x in part] for part in (headers.values(), headers))
    program = compiler.createProgram(source.text(), f"{source.stem}.cu", texts, names)
    for expression in source.expressions():
        compiler.addNameExpression(program, expression)
    options = ("--gpu-architecture=sm_90a", "--ptxas-options=-v", *nvrtc.FLAGS)
    compiler.compileProgram(program, (*options, *nvrtc._include_flags()))
    log = compiler.getProgramLog(program)
    assert "serialized" not in log and "wait_group is injected" not in log, log
    spills = re.findall(r"(\d+) bytes spill stores", log)
    assert len(spills) == len(source.expressions()) and set(spills) == {"0"}, log


def views_of_one(q: Any, k: Any, v: Any) -> list[Any]:
    """Arrays of the shapes of q, k and v in one buffer, as attention_bwd lays gradients out."""
    tokens, heads, head_dim = q.shape
    packed = empty((tokens, heads + 2 * k.shape[1], head_dim), q.dtype, like=q)
    ends = np.cumsum([0, heads, k.shape[1], k.shape[1]])
    return [packed[:, a:b] for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 500])
@HEAD_DIMS
@pytest.mark.parametrize(
    "lengths", [[4096], [2048, 2048], [256] * 16, [1000, 1, 2, 3000, 93]], ids=str
)
def test_large(lengths, head_dim, window):
    """A model's sizes, against the kernels for every card."""
    if not is_hopper():
        pytest.skip("needs a Hopper card")
    *arrays, do = (to_device(x, "cuda") for x in problem(lengths, 8, 2, head_dim))
    got = run("cuda", arrays, None, do, lengths, window=window)
    settings = (docs_on("cuda", lengths), head_dim**-0.5, window)
    o, lse = attention_mma.forward(*arrays, None, *settings)
    res = AttentionResiduals(*arrays, None, o, lse, *settings, None)
    want = views_of_one(*arrays)
    attention_mma.backward(res, do, *want)
    close(got[0], o, "bfloat16", roundings=OUT, scale=1)
    close(got[1], lse, "float32", terms=head_dim)
    for a, b in zip(got[2:5], want, strict=True):
        close(a, b, "bfloat16", roundings=2 * GRAD, scale=1)  # both are rounded
