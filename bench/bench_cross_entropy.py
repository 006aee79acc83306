"""Cross entropy of one chunk of an LM head's logits.

Bytes are one read of the logits, and for gradients one write: the fused kernel keeps a row on the
chip between its passes, except for what is left of the longest rows.
"""

from collections.abc import Iterator

import cupy
import numpy as np

from bench.harness import Case
from surogate.kernels.arrays import BF16
from surogate.kernels.cross_entropy import (
    cross_entropy_bwd,
    cross_entropy_fused_,
    cross_entropy_fwd,
)

SIZES = [  # tokens of a chunk, vocabulary: no chunk fits an L2 cache
    (4096, 49152),  # SmolLM2: two rows a multiprocessor
    (1024, 128256),  # Llama 3
    (1024, 151936),  # Qwen
    (8192, 151936),
    (512, 262144),  # Gemma 3: a third of a row is read twice
]


def cases() -> Iterator[Case]:
    """Forward, backward, and both in place."""
    for tokens, vocab in SIZES:
        logits = cupy.random.standard_normal((tokens, vocab), dtype="f4").astype(BF16)
        labels = cupy.random.randint(0, vocab, tokens).astype("i4")
        yield from size_cases(f"{tokens} x {vocab}", logits, labels)


def size_cases(name: str, logits: cupy.ndarray, labels: cupy.ndarray) -> Iterator[Case]:
    """Every call writes the same arrays: each is read from memory, since all are beyond the L2."""
    gradient, d_logprobs = logits.copy(), cupy.ones(len(labels), np.float32)
    _, res = cross_entropy_fwd(logits, labels=labels)

    def forward() -> None:
        cross_entropy_fwd(logits, labels=labels)

    def backward() -> None:
        cross_entropy_bwd(res, d_logprobs)

    def fused() -> None:
        cross_entropy_fused_(gradient, labels=labels)

    yield Case(f"cross_entropy_fwd {name}", forward, bytes=logits.nbytes)
    yield Case(f"cross_entropy_bwd {name}", backward, bytes=2 * logits.nbytes)
    yield Case(f"cross_entropy_fused_ {name}", fused, bytes=2 * logits.nbytes)
