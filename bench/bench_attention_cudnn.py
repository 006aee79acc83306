"""Attention of a layer through cuDNN beside our own kernels: whole rows, and packed documents.

FLOPs are those of the scores that a causal mask leaves: 4 * head_dim a score forward, 10 * head_dim
backward (five products for two). What cuDNN does not take is printed with its reason. Packed
documents have an exponential distribution of lengths around 256 tokens; cuDNN sees them through a
table as long as they are many, through the default one, and through tables by size class.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from bench.harness import Case
from surogate.kernels import attention_cudnn
from surogate.kernels.arrays import BF16
from surogate.kernels.attention import AttentionResiduals, attention_bwd, attention_fwd
from surogate.kernels.attention_cudnn import Documents, Rows, token_strides
from surogate.kernels.attention_plans import release_scratch
from surogate.kernels.batch import Docs, docs_from_lengths
from surogate.kernels.documents import (
    SizeClass,
    default_documents,
    document_table,
    fits,
    size_classes,
)

ROW = 2048  # tokens of a row; no document is longer
# heads, kv_heads, head_dim
SHAPES = {"0.6B": (16, 8, 128), "8B": (32, 8, 128), "d64": (32, 8, 64), "d256": (16, 2, 256)}


def random(*shape: int) -> cupy.ndarray:
    return cupy.random.standard_normal(shape, dtype="f4").astype(BF16)


def packed(tokens: int, mean: int) -> list[int]:
    """Lengths of documents that end where rows do."""
    rng, lengths = np.random.default_rng(0), []
    for _ in range(tokens // ROW):
        left = ROW
        while left:
            lengths.append(int(min(max(8, rng.exponential(mean)), left)))
            left -= lengths[-1]
    return lengths


class Layer:
    """Arrays of a layer's attention, lying as in a model, and its passes."""

    def __init__(self, name: str, shape: tuple[int, int, int], lengths: Sequence[int]) -> None:
        self.name = name
        heads, kv_heads, head_dim = self.shape = shape
        tokens = sum(lengths)
        rotated = random(tokens, heads + kv_heads, head_dim)
        self.fused = random(tokens, heads + 2 * kv_heads, head_dim)
        self.q, self.k = rotated[:, :heads], rotated[:, heads:]
        self.v, self.do = self.fused[:, heads + kv_heads :], random(tokens, heads, head_dim)
        self.host_docs = docs_from_lengths(lengths)
        self.docs = Docs(*map(cupy.asarray, self.host_docs))
        self.settings = dict(scale=head_dim**-0.5, window=None)
        scores = sum(length * (length + 1) // 2 for length in lengths)
        self.flops = 4 * heads * head_dim * scores

    def cases(self, label: str, forward: Any, backward: Any) -> Iterator[Case]:
        """A case a pass."""
        if forward is not None:
            yield Case(f"{self.name} fwd, {label}", forward, flops=self.flops)
        if backward is not None:
            yield Case(f"{self.name} bwd, {label}", backward, flops=5 * self.flops // 2)

    def ours(self) -> Iterator[Case]:
        """Our own kernels."""
        forward = partial(attention_fwd, self.q, self.k, self.v, docs=self.docs, **self.settings)
        res = forward()[1]
        yield from self.cases("own kernels", forward, partial(attention_bwd, res, self.do))

    def cudnn(self, label: str, documents: Documents, **settings: Any) -> Iterator[Case]:
        """The passes that cuDNN takes; prints why it does not take the others."""
        arrays = self.q, self.k, self.v
        asked = dict(documents=documents, **self.settings)
        answers = [
            attention_cudnn.supported(*arrays, **asked, backward=b, **(settings if b else {}))
            for b in (False, True)
        ]
        for answer, pass_name in zip(answers, ("fwd", "bwd"), strict=True):
            print(f"{self.name} {pass_name}, cuDNN {label}: {answer.reason}")
        if not answers[0]:
            return
        forward = partial(attention_cudnn.forward, *arrays, **asked)
        res = AttentionResiduals(*arrays, None, *forward(), self.docs, *self.settings.values())
        heads, kv_heads, _ = self.shape
        out = cupy.empty_like(self.fused)
        grads = out[:, :heads], out[:, heads : heads + kv_heads], out[:, heads + kv_heads :]
        backward = partial(
            attention_cudnn.backward, res, self.do, *grads, documents=documents, **settings
        )
        for case in self.cases(f"cuDNN {label}", forward, backward if answers[1] else None):
            yield case
            release_scratch()  # each case runs, and is captured, on a stream of its own

    def tables(self, classes: Sequence[SizeClass]) -> Documents:
        """Tables on the card."""
        assert fits(self.host_docs, classes)
        strides = token_strides(*self.shape)
        return tuple(
            document_table(
                self.docs,
                max_documents=size.max_documents,
                strides=strides,
                shortest=size.shortest,
                longest=size.longest,
            )
            for size in classes
        )


def cases() -> Iterator[Case]:
    """Rows, then packed documents, then what making a table costs."""
    for number, (name, shape) in enumerate(SHAPES.items()):
        sizes = (8,) if number else (2, 8)
        for rows in sizes:
            layer = Layer(f"{name} {rows}x{ROW}", shape, [ROW] * rows)
            yield from layer.ours()
            yield from layer.cudnn("rows", Rows(rows))
            yield from layer.cudnn("rows, any order", Rows(rows), deterministic=False)
        for rows in sizes:
            yield from packed_cases(name, shape, rows)
    docs = Docs(*map(cupy.asarray, docs_from_lengths(packed(8 * ROW, 256))))
    make = partial(document_table, docs, max_documents=256, strides=token_strides(16, 8, 128))
    yield Case("document_table of 16384 tokens", make, bytes=8 * 8 * ROW)


def packed_cases(name: str, shape: tuple[int, int, int], rows: int) -> Iterator[Case]:
    """Documents of about 256 tokens."""
    lengths = packed(rows * ROW, 256)
    tokens = sum(lengths)
    many = max(default_documents(tokens), len(lengths))
    layer = Layer(f"{name} {len(lengths)} documents in {rows}x{ROW}", shape, lengths)
    yield from layer.ours()
    exact = layer.tables([SizeClass(1, max(lengths), len(lengths))])
    yield from layer.cudnn("exact table", exact)
    yield from layer.cudnn("exact table, any order", exact, deterministic=False)
    table = layer.tables([SizeClass(1, ROW, many)])
    yield from layer.cudnn(f"table of {many}", table)
    yield from layer.cudnn(f"table of {many}, any order", table, deterministic=False)
    classes = size_classes(tokens, longest=ROW, max_documents=many)
    yield from layer.cudnn("size classes", layer.tables(classes))
