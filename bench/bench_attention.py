"""Attention, forward and backward. FLOPs are those of the causal cells that the documents need.

A query of a document of n tokens reads n / 2 keys on average. Forward makes two products of
2 head_dim operations a cell, so 4 heads * head_dim * n^2 / 2; backward makes five.
"""

from collections.abc import Iterator

import cupy
import numpy as np

from bench.harness import Case
from surogate.kernels.arrays import BF16
from surogate.kernels.attention import attention_bwd, attention_fwd
from surogate.kernels.batch import Docs, docs_from_lengths

HEAD_DIM = 128
ROWS = {
    "2 x 2048": [2048] * 2,
    "8 x 2048": [2048] * 8,
    "1 x 16384": [16384],
}
PACKED = {"packed 4096": 4096, "packed 16384": 16384}  # tokens, in documents of about 256
HEADS = [(16, 8), (32, 8)]


def packed_lengths(tokens: int) -> list[int]:
    """Document lengths of 128 to 384 tokens, 256 on average."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while tokens > 0:
        lengths.append(min(int(rng.integers(128, 385)), tokens))
        tokens -= lengths[-1]
    return lengths


def cases() -> Iterator[Case]:
    """Rows of one length, and packed rows, at the head counts of small and large models."""
    rows = ROWS | {name: packed_lengths(tokens) for name, tokens in PACKED.items()}
    for heads, kv_heads in HEADS:
        for name, lengths in rows.items():
            yield from pair_cases(f"{name}, {heads}/{kv_heads} heads", lengths, heads, kv_heads)


def pair_cases(name: str, lengths: list[int], heads: int, kv_heads: int) -> Iterator[Case]:
    """Forward and backward of a row; q, k and v are views of one buffer, as in a model."""
    tokens = sum(lengths)
    shape = (tokens, 2 * heads + 2 * kv_heads, HEAD_DIM)
    all_heads = cupy.random.standard_normal(shape, dtype="f4").astype(BF16)
    q, k = all_heads[:, :heads], all_heads[:, heads : heads + kv_heads]
    v, do = all_heads[:, heads + kv_heads : heads + 2 * kv_heads], all_heads[:, -heads:]
    docs = Docs(*map(cupy.asarray, docs_from_lengths(lengths)))
    _, res = attention_fwd(q, k, v, docs=docs, scale=HEAD_DIM**-0.5)
    flops = 2 * heads * HEAD_DIM * sum(n * n for n in lengths)

    def forward() -> None:
        attention_fwd(q, k, v, docs=docs, scale=HEAD_DIM**-0.5)

    yield Case(f"attention_fwd {name}", forward, flops=flops)
    yield Case(f"attention_bwd {name}", lambda: attention_bwd(res, do), flops=flops * 5 // 2)
