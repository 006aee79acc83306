"""Cross entropy of one chunk of an LM head's logits.

Bytes are one read of the logits, and for gradients one write: the fused kernel keeps a row on the
chip between its passes, except for what is left of the longest rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.harness import Case
from bench.inputs import cupy, random
from surogate.kernels.cross_entropy import (
    cross_entropy_bwd,
    cross_entropy_fused_,
    cross_entropy_fwd,
)

SIZES = [  # tokens of a chunk, vocabulary: no chunk fits an L2 cache
    (2048, 151936),  # Qwen, 4096 tokens and more; then 32768 tokens
    (4096, 151936),
    (2048, 128256),  # Llama 3
    (4096, 49152),  # SmolLM2: two rows a multiprocessor
    (512, 262144),  # Gemma 3: a third of a row is read twice
]


def cases() -> Iterator[Case]:
    """Forward, backward, and both in place."""
    for tokens, vocab in SIZES:
        yield from size_cases(tokens, vocab)


def size_cases(tokens: int, vocab: int) -> Iterator[Case]:
    """Every call writes the same arrays: each is read from memory, since all are beyond the L2."""
    name, size = f"{tokens} x {vocab}", 2 * tokens * vocab

    def labels() -> Any:
        return cupy.random.randint(0, vocab, tokens).astype("i4")

    def forward() -> Callable[[], object]:
        logits, ids = random(tokens, vocab), labels()
        return lambda: cross_entropy_fwd(logits, labels=ids)

    def backward() -> Callable[[], object]:
        _, res = cross_entropy_fwd(random(tokens, vocab), labels=labels())
        d_logprobs = cupy.ones(tokens, np.float32)
        return lambda: cross_entropy_bwd(res, d_logprobs)

    def fused() -> Callable[[], object]:
        gradient, ids = random(tokens, vocab), labels()
        return lambda: cross_entropy_fused_(gradient, labels=ids)

    yield Case(f"cross_entropy_fwd {name}", forward, bytes=size)
    yield Case(f"cross_entropy_bwd {name}", backward, bytes=2 * size)
    yield Case(f"cross_entropy_fused_ {name}", fused, bytes=2 * size)
