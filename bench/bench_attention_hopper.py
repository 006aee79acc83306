"""Attention on Hopper beside the mma kernels of every card. FLOPs are those of the causal cells.

A query of a document of n tokens reads n / 2 keys on average. Forward makes two products of
2 head_dim operations a cell, so 2 heads * head_dim * n^2. Backward's gradients need five, though
the kernels here make seven: three in dq, four in dkdv.
"""

from collections.abc import Iterator

import cupy
import numpy as np

from bench.harness import Case
from surogate.kernels import attention_hopper, attention_mma
from surogate.kernels.arrays import BF16
from surogate.kernels.attention import AttentionResiduals
from surogate.kernels.batch import Docs, docs_from_lengths

HEAD_DIM, HEADS, KV_HEADS = 128, 16, 8


def packed_lengths(rng: np.random.Generator, tokens: int) -> list[int]:
    """Document lengths that fall off exponentially, 256 on average, 8 at least."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(min(max(8, rng.exponential(256)), tokens - sum(lengths))))
    return lengths


def rows() -> dict[str, list[int]]:
    """Dense rows, and packed ones."""
    rng = np.random.default_rng(0)
    short, long = packed_lengths(rng, 4096), packed_lengths(rng, 16384)
    return {
        "2 x 2048": [2048] * 2,
        "8 x 2048": [2048] * 8,
        "1 x 16384": [16384],
        f"4096 in {len(short)} documents": short,
        f"16384 in {len(long)} documents": long,
    }


def cases() -> Iterator[Case]:
    """Forward, backward and its two parts of each row; mma: those of attention_mma."""
    for name, lengths in rows().items():
        yield from row_cases(name, lengths)


def row_cases(name: str, lengths: list[int]) -> Iterator[Case]:
    """q, k and v are views of one buffer, as in a model."""
    tokens = sum(lengths)
    shape = (tokens, 2 * HEADS + 2 * KV_HEADS, HEAD_DIM)
    wide = cupy.random.standard_normal(shape, dtype="f4").astype(BF16)
    q, k = wide[:, :HEADS], wide[:, HEADS : HEADS + KV_HEADS]
    v, do = wide[:, HEADS + KV_HEADS : HEADS + 2 * KV_HEADS], wide[:, -HEADS:]
    docs = Docs(*map(cupy.asarray, docs_from_lengths(lengths)))
    settings = (None, docs, HEAD_DIM**-0.5, None)
    o, lse = attention_hopper.forward(q, k, v, *settings)
    res = AttentionResiduals(q, k, v, None, o, lse, *settings[1:], None)
    packed = cupy.empty((tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), BF16)
    grads = packed[:, :HEADS], packed[:, HEADS : HEADS + KV_HEADS], packed[:, HEADS + KV_HEADS :]
    stats = attention_hopper.backward(res, do, *grads)
    flops = 2 * HEADS * HEAD_DIM * sum(n * n for n in lengths)

    def dq() -> None:
        attention_hopper.launch_dq(res, do, grads[0], stats, cupy.zeros(1, "i4"))

    def dkdv() -> None:
        attention_hopper.launch_dkdv(res, do, *grads[1:], stats, cupy.zeros(1, "i4"))

    yield Case(f"fwd {name}", lambda: attention_hopper.forward(q, k, v, *settings), flops=flops)
    yield Case(f"fwd {name}, mma", lambda: attention_mma.forward(q, k, v, *settings), flops=flops)
    yield Case(
        f"bwd {name}", lambda: attention_hopper.backward(res, do, *grads), flops=flops * 5 // 2
    )
    yield Case(f"bwd {name}, dq", dq, flops=flops * 3 // 2)
    yield Case(f"bwd {name}, dkdv", dkdv, flops=flops * 2)
    yield Case(
        f"bwd {name}, mma",
        lambda: attention_mma.backward(res, do, *grads),
        flops=flops * 5 // 2,
    )
