"""A micro-batch: one flat row of tokens that holds whole documents, and where each begins and
ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from surogate.kernels.arrays import Array, require

IGNORED = -100  # a label that is not supervised
STAGED = 2  # copies of a micro-batch on a card, on their way to where the passes read it


class Docs(NamedTuple):
    """Document boundaries, a value per token, so that no op needs to know how many documents there
    are.
    """

    start: Int32[Array, " tokens"]  # flat index of the first token of this token's document
    end: Int32[Array, " tokens"]  # one past its last


class Batch(NamedTuple):
    """A micro-batch. No op mixes two documents; padding is a document whose labels are all -100."""

    tokens: Int32[Array, " tokens"]
    labels: Int32[Array, " tokens"]  # already shifted: the target of each position, or -100
    positions: Int32[Array, " tokens"]  # restart at 0 in each document
    docs: Docs
    rows: int | None = None  # where given, a promise: documents are this many equally long pieces


def equal_rows(docs: Docs) -> int | None:
    """How many documents there are when all are equally long, else None (host arrays)."""
    length = int(docs.end[0])
    edges = np.arange(len(docs.start), dtype=np.int32) // length * length
    whole = len(docs.start) % length == 0
    equal = whole and bool((docs.start == edges).all() and (docs.end == edges + length).all())
    return len(docs.start) // length if equal else None


def docs_from_lengths(lengths: Sequence[int]) -> Docs:
    """Boundaries of documents that lie one after another.

    Raises ValueError when a length is not positive.
    """
    sizes = np.asarray(lengths, np.int64)
    require(
        sizes.ndim == 1 and bool((sizes > 0).all()),
        f"docs_from_lengths: lengths must be positive, got {list(lengths)}",
    )
    ends = np.cumsum(sizes)
    return Docs(
        np.repeat(ends - sizes, sizes).astype(np.int32), np.repeat(ends, sizes).astype(np.int32)
    )


def positions_of(docs: Docs) -> Int32[Array, " tokens"]:
    """Position of each token in its document."""
    return np.arange(len(docs.start), dtype=np.int32) - docs.start


def batch_of(tokens: Int32[Array, " tokens"], lengths: Sequence[int] | None = None) -> Batch:
    """A batch for next-token prediction: every token but each document's last is supervised."""
    docs = docs_from_lengths(lengths if lengths is not None else [len(tokens)])
    require(
        len(docs.start) == len(tokens),
        f"batch_of: lengths must sum to {len(tokens)} tokens, got {len(docs.start)}",
    )
    labels = np.full(len(tokens), IGNORED, np.int32)
    inside = np.arange(len(tokens)) + 1 < docs.end
    labels[inside] = tokens[1:][inside[:-1]]
    return Batch(tokens, labels, positions_of(docs), docs)
