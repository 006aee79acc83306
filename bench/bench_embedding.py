"""Embedding: rows copied forward, rows added by id backward.

Ids follow Zipf's law, as words do; "padded" makes half of them one id. Bytes of the backward are
one read of dy, and a read and a write of the rows of the ids that occur, in a float32 buffer;
"fresh" writes the whole table in bfloat16.
"""

from collections.abc import Callable, Iterator

import numpy as np

from bench.harness import Case
from bench.inputs import cupy, random, rotated
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.embedding import EmbeddingResiduals, embedding_bwd, embedding_fwd

VOCAB = 151936
SIZES = [(4096, 1024), (32768, 4096)]  # tokens, hidden


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
        name = f"{tokens} x {hidden}"

        def forward(tokens: int = tokens, hidden: int = hidden) -> Callable[[], object]:
            weight, ids = random(VOCAB, hidden), cupy.asarray(zipf(tokens, False))
            return lambda: embedding_fwd(weight, tokens=ids)

        yield Case(f"embedding_fwd {name}", forward, bytes=2 * 2 * tokens * hidden)
        yield from backward_cases(name, tokens, hidden)


def backward_cases(name: str, tokens: int, hidden: int) -> Iterator[Case]:
    """Into a float32 buffer with text and with padding, and fresh."""
    size = 2 * tokens * hidden
    for kind, padded, fresh in (
        ("text", False, False),
        ("padded", True, False),
        ("fresh", False, True),
    ):
        ids = zipf(tokens, padded)

        def shared(ids: np.ndarray = ids, fresh: bool = fresh) -> tuple:
            res = EmbeddingResiduals(cupy.asarray(ids), VOCAB, BF16)
            return res, None if fresh else cupy.zeros((VOCAB, hidden), F32)

        def build(shared: tuple) -> Callable[[], object]:
            (res, into), dy = shared, random(tokens, hidden)
            return lambda: embedding_bwd(res, dy, into=into)

        rows = VOCAB * 2 if fresh else len(np.unique(ids)) * 8
        yield Case(
            f"embedding_bwd {name}, {kind}",
            rotated(build, size, shared=shared),
            bytes=size + rows * hidden,
        )
