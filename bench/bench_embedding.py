"""Embedding: rows copied forward, rows added by id backward.

Ids follow Zipf's law, as words do; "padded" makes half of them one id. Bytes of the backward are
one read of dy, and a read and a write of the rows of the ids that occur, in a float32 buffer;
"fresh" writes the whole table in bfloat16.
"""

from collections.abc import Callable, Iterator

import cupy
import numpy as np

from bench.bench_rmsnorm import random, rotated
from bench.harness import Case
from surogate.kernels.embedding import EmbeddingResiduals, embedding_bwd, embedding_fwd

VOCAB = 151936
SIZES = [(4096, 1024), (8192, 4096), (32768, 4096)]


def zipf(tokens: int, padded: bool) -> np.ndarray:
    """Ids whose frequency is inverse to their rank, the ranks spread over the vocabulary."""
    rng = np.random.default_rng(0)
    ranks = np.exp(rng.uniform(0, np.log(VOCAB), tokens)).astype(np.int64) - 1
    ids = rng.permutation(VOCAB)[ranks].astype(np.int32)
    if padded:
        ids[tokens // 2 :] = 0
    return ids


def cases() -> Iterator[Case]:
    """Small and large micro-batches over the vocabulary of Qwen."""
    for tokens, hidden in SIZES:
        weight, size, name = random(VOCAB, hidden), 2 * tokens * hidden, f"{tokens} x {hidden}"
        ids = cupy.asarray(zipf(tokens, False))

        def forward(weight: cupy.ndarray = weight, ids: cupy.ndarray = ids) -> object:
            return embedding_fwd(weight, tokens=ids)

        yield Case(f"embedding_fwd {name}", forward, bytes=2 * size)
        yield from backward_cases(name, tokens, hidden)


def backward_cases(name: str, tokens: int, hidden: int) -> Iterator[Case]:
    """Into a float32 buffer with text and with padding, and fresh."""
    buffer, size = cupy.zeros((VOCAB, hidden), np.float32), 2 * tokens * hidden
    for kind, padded, into in (
        ("text", False, buffer),
        ("padded", True, buffer),
        ("fresh", False, None),
    ):
        ids = zipf(tokens, padded)
        res = EmbeddingResiduals(cupy.asarray(ids), VOCAB, random(1).dtype)

        def build(res: EmbeddingResiduals = res, into: object = into) -> Callable[[], object]:
            dy = random(tokens, hidden)
            return lambda: embedding_bwd(res, dy, into=into)

        rows = VOCAB * 2 if into is None else len(np.unique(ids)) * 8
        yield Case(
            f"embedding_bwd {name}, {kind}", rotated(build, size), bytes=size + rows * hidden
        )
