"""The documents of a micro-batch as tables of a fixed number of rows: their lengths and offsets.

Ops that work a document at a time (cuDNN's attention) want a list of documents; a captured graph
wants shapes that do not depend on the batch. So a table has ``max_documents`` rows, those beyond
the last document have length 0 and lie at the end, and one launch a micro-batch fills it from the
boundaries of each token, without the host.

How many rows: a row costs a document's worth of blocks that find nothing to do. On an H200, at 16
heads, 512 rows of up to 16384 tokens (a million blocks) add 86 us to 180 us of cuDNN's forward, so
a row of up to 2048 tokens costs about 0.02 us. ``default_documents`` is a row for every 64 tokens.
Batches of more documents do not fit: the loader asks ``fits`` before, and ``uncovered`` reads from
the card what was left out.

Some ops need scratch memory of rows * longest^2. ``size_classes`` splits a table by length, so that
this product is bounded by 2 * tokens * longest whatever the lengths are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from surogate.kernels.arrays import Array, empty, on_device, require
from surogate.kernels.batch import Docs
from surogate.kernels.nvrtc import Source

BLOCK = 1024  # threads, as in documents.cu
MAX_STRIDES = 6
TOKENS_PER_ROW = 64
SOURCE = Source("documents", {"document_table": [()]})


class SizeClass(NamedTuple):
    """Documents of ``shortest`` to ``longest`` tokens, and the rows kept for them."""

    shortest: int
    longest: int
    max_documents: int


class DocumentTable(NamedTuple):
    """Documents of a size class, in the order of tokens; see ``document_table``."""

    lengths: Int32[Array, " max_documents"]  # tokens; 0 in rows without a document
    offsets: Int64[Array, "strides bounds"]  # first token times stride, max_documents + 1 of them
    found: Int32[Array, " 2"]  # documents of the class; tokens of those that have a row
    strides: tuple[int, ...]  # elements from a token to the next, one for each row of offsets
    tokens: int
    size: SizeClass

    def offsets_of(self, stride: int) -> Int64[Array, " bounds"]:
        """Where each document begins, and the end, when tokens are ``stride`` elements apart."""
        require(
            stride in self.strides,
            f"document_table: no offsets for tokens {stride} elements apart, only for "
            f"{self.strides}: name that stride when the table is made",
        )
        return self.offsets[self.strides.index(stride)]


def document_table(
    docs: Docs,
    *,
    max_documents: int,
    strides: Sequence[int],
    shortest: int = 1,
    longest: int | None = None,
) -> DocumentTable:
    """The documents of ``shortest`` to ``longest`` (None: any) tokens, of the first max_documents.

    ``strides`` are the distinct distances of tokens, in elements, of the arrays that the table is
    for; at most six. Launches one kernel, waits for nothing, and may be captured. Raises ValueError
    for sizes that are not positive and for more strides.
    """
    tokens = len(docs.start)
    size = SizeClass(shortest, tokens if longest is None else longest, max_documents)
    distinct = tuple(dict.fromkeys(int(stride) for stride in strides))
    require(
        max_documents >= 1 and 1 <= shortest <= max(size.longest, 1),
        f"document_table: needs max_documents >= 1 and 1 <= shortest <= longest, got {size}",
    )
    require(
        1 <= len(distinct) <= MAX_STRIDES and min(distinct) >= 1,
        f"document_table: takes 1 to {MAX_STRIDES} positive strides, got {distinct}",
    )
    lengths = empty((max_documents,), np.int32, like=docs.start)
    offsets = empty((len(distinct), max_documents + 1), np.int64, like=docs.start)
    found = empty((2,), np.int32, like=docs.start)
    if on_device(docs.start):
        padded = [*distinct, *[0] * (MAX_STRIDES - len(distinct))]
        sizes = [tokens, max_documents, shortest, size.longest, len(distinct)]
        SOURCE.launch(
            "document_table",
            (),
            1,
            BLOCK,
            [lengths, offsets, found, docs.start, docs.end, *sizes, *map(np.int64, padded)],
        )
    else:
        _host(lengths, offsets, found, docs, size, np.array(distinct, np.int64))
    return DocumentTable(lengths, offsets, found, distinct, tokens, size)


def _host(
    lengths: Array, offsets: Array, found: Array, docs: Docs, size: SizeClass, strides: Array
) -> None:
    first = first_tokens(docs)
    tokens = docs.end[first] - first
    inside = (size.shortest <= tokens) & (tokens <= size.longest)
    first, tokens = first[inside], tokens[inside]
    kept = min(len(first), size.max_documents)
    lengths[:kept], lengths[kept:] = tokens[:kept], 0
    offsets[:, :kept] = first[:kept] * strides[:, None]
    offsets[:, kept:] = len(docs.start) * strides[:, None]
    found[:] = len(first), lengths.sum()


def first_tokens(docs: Docs) -> Int64[np.ndarray, " documents"]:
    """Index of the first token of each document. On the host."""
    return np.flatnonzero(docs.start == np.arange(len(docs.start), dtype=np.int32))


def count_documents(docs: Docs) -> int:
    """How many documents a micro-batch holds, padding included. On the host."""
    return len(first_tokens(docs))


def fits(docs: Docs, classes: Sequence[SizeClass]) -> bool:
    """Whether tables of these classes would hold every document. On the host."""
    first = first_tokens(docs)
    lengths = docs.end[first] - first
    held = 0
    for size in classes:
        count = np.count_nonzero((size.shortest <= lengths) & (lengths <= size.longest))
        if count > size.max_documents:
            return False
        held += int(count)
    return held == len(first)


def uncovered(tables: Sequence[DocumentTable]) -> int:
    """Tokens of documents that have a row in none of the tables: 0 unless a batch did not fit.

    Waits for the card: read it late, such as with the step's loss.
    """
    return tables[0].tokens - sum(int(table.found[1]) for table in tables)


def default_documents(tokens: int) -> int:
    """Rows of a table for micro-batches of ``tokens`` tokens."""
    return max(16, tokens // TOKENS_PER_ROW)


def size_classes(
    tokens: int, *, longest: int, max_documents: int, smallest: int = 128
) -> tuple[SizeClass, ...]:
    """Classes that halve in length from ``longest`` down to ``smallest``, which takes all below.

    Documents of at least n tokens are at most tokens / n, so that all classes but the last hold
    every batch; the last has ``max_documents`` rows.
    """
    require(
        1 <= longest <= tokens and max_documents >= 1 and smallest >= 1,
        f"size_classes: needs 1 <= longest <= {tokens} tokens and positive sizes, got "
        f"longest {longest}, max_documents {max_documents}, smallest {smallest}",
    )
    classes = []
    while longest > smallest:
        half = -(-longest // 2)
        classes.append(SizeClass(half + 1, longest, tokens // (half + 1)))
        longest = half
    return (*classes, SizeClass(1, longest, min(max_documents, tokens)))
