"""Attention as a model calls it, forward and backward. FLOPs are those of the causal cells that the
documents need.

A query of a document of n tokens reads n / 2 keys on average. Forward makes two products of
2 head_dim operations a cell, so 2 heads * head_dim * n^2; backward makes five.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bench.harness import Case
from bench.inputs import cupy, packed_lengths, random
from surogate.kernels.arrays import Array
from surogate.kernels.attention import attention_bwd, attention_fwd
from surogate.kernels.batch import Docs, docs_from_lengths

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
HEADS = {"0.6B": (16, 8), "8B": (32, 8)}  # heads and kv_heads
DENSE = {"2 x 2048": [2048] * 2, "8 x 2048": [2048] * 8, "1 x 16384": [16384]}


def rows() -> dict[str, list[int]]:
    """Documents of a micro-batch: whole rows, and rows packed from documents of about 256."""
    rng = np.random.default_rng(0)
    packed = (packed_lengths(tokens, 256, rng) for tokens in (4096, 16384))
    return DENSE | {f"{sum(each)} in {len(each)} documents": each for each in packed}


class Layer(NamedTuple):
    """Arrays of a layer's attention, lying as in a model: q and k in the buffer that the rotation
    writes, v in that of the fused product.
    """

    q: Array
    k: Array
    v: Array
    do: Array
    docs: Docs

    @classmethod
    def of(cls, lengths: list[int], heads: int, kv_heads: int) -> "Layer":
        """Random arrays for documents of these lengths."""
        tokens = sum(lengths)
        rotated = random(tokens, heads + kv_heads, HEAD_DIM)
        v = random(tokens, heads + 2 * kv_heads, HEAD_DIM)[:, heads + kv_heads :]
        docs = Docs(*map(cupy.asarray, docs_from_lengths(lengths)))
        return cls(rotated[:, :heads], rotated[:, heads:], v, random(tokens, heads, HEAD_DIM), docs)

    def gradients(self) -> tuple[Array, Array, Array]:
        """Where dq, dk and dv go: views of one buffer."""
        heads, kv_heads = self.q.shape[1], self.k.shape[1]
        packed = cupy.empty((len(self.q), heads + 2 * kv_heads, HEAD_DIM), self.q.dtype)
        end = heads + kv_heads
        return packed[:, :heads], packed[:, heads:end], packed[:, end:]


def flops(lengths: list[int], heads: int) -> int:
    """Operations of a forward."""
    return 2 * heads * HEAD_DIM * sum(n * n for n in lengths)


def cases() -> Iterator[Case]:
    """Dense and packed rows, at the head counts of a small and of a large model."""
    for model, heads in HEADS.items():
        for name, lengths in rows().items():
            yield from pair_cases(f"{model}, {name}", lengths, *heads)


def pair_cases(name: str, lengths: list[int], heads: int, kv_heads: int) -> Iterator[Case]:
    """Forward and backward; the code that the choice by measurement takes for equal rows."""
    equal = len(lengths) if len(set(lengths)) == 1 else None

    def forward() -> Callable[[], object]:
        q, k, v, _, docs = Layer.of(lengths, heads, kv_heads)
        return lambda: attention_fwd(q, k, v, docs=docs, scale=SCALE, rows=equal)

    def backward() -> Callable[[], object]:
        q, k, v, do, docs = Layer.of(lengths, heads, kv_heads)
        _, res = attention_fwd(q, k, v, docs=docs, scale=SCALE, rows=equal)
        return lambda: attention_bwd(res, do)

    work = flops(lengths, heads)
    yield Case(f"attention_fwd {name}", forward, flops=work)
    yield Case(f"attention_bwd {name}", backward, flops=work * 5 // 2)
