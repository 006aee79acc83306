"""Embedding: y[i] = weight[tokens[i]].

Backward: dweight[v] = sum of dy[i] over the positions i with tokens[i] = v, added in float32 in a
fixed order and rounded once. Rows of ids that do not occur are zero, or untouched in a buffer.

The kernels cannot refuse a token id outside the vocabulary: it reads or writes beyond the table.
The data loader checks ids; the host version raises ValueError.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from surogate.kernels.arrays import (
    Array,
    Frozen,
    destination,
    empty,
    on_device,
    require,
    rows_aligned,
    store,
    upcast,
    zeros,
)
from surogate.kernels.nvrtc import THREADS, Source, ctype, vector_width
from surogate.kernels.pair import Pair

COPIES = 4  # packs a thread has in flight, as in embedding.cu
RARE = 32  # an id that occurs more often is summed by whole blocks
BLOCKS, HOT_BLOCKS = 1056, 264  # that walk over the ids: eight and two on each SM of an H200
HOT_WARPS = 32

_DTYPES = [("float", "float", 4), ("float", "bf16", 8), ("bf16", "bf16", 8)]
SOURCE = Source(
    "embedding",
    {
        "embedding_fwd": [("float", "4"), ("float", "1"), ("bf16", "8"), ("bf16", "1")],
        "embedding_count": [()],
        "embedding_ranges": [()],
        "embedding_place": [()],
        "embedding_order": [()],
        "embedding_bwd": [
            (out, grad, str(n), str(warps))
            for out, grad, width in _DTYPES
            for n in (width, 1)
            for warps in (1, HOT_WARPS)
        ],
    },
)


class EmbeddingResiduals(NamedTuple):
    tokens: Int32[Array, " tokens"]
    vocab: int
    dtype: np.dtype  # of the weight


def embedding_fwd(
    weight: Float[Array, "vocab hidden"], *, tokens: Int32[Array, " tokens"]
) -> tuple[Float[Array, "tokens hidden"], EmbeddingResiduals]:
    """Returns the rows of ``tokens`` and what embedding_bwd needs.

    On the host, raises ValueError for an id outside the vocabulary.
    """
    vocab, hidden = weight.shape
    res = EmbeddingResiduals(tokens, vocab, weight.dtype)
    if not on_device(weight):
        _check_ids(tokens, vocab)
        return weight[tokens], res
    require(weight.flags.c_contiguous, "embedding_fwd: weight must be C-contiguous")
    y = empty((len(tokens), hidden), weight.dtype, like=weight)
    width = _width(weight.dtype, hidden, weight)
    packs = y.size // width
    require(packs < 1 << 32, f"embedding_fwd: takes less than 2^32 packs of {width}, got {packs}")
    if packs:
        grid = -(-packs // (THREADS * COPIES))
        arguments = [y, weight, tokens, len(tokens), hidden]
        SOURCE.launch("embedding_fwd", (ctype(weight.dtype), str(width)), grid, THREADS, arguments)
    return y, res


def embedding_bwd(
    res: EmbeddingResiduals,
    dy: Float[Array, "tokens hidden"],
    *,
    into: Float[Array, "vocab hidden"] | Frozen | None = None,
) -> Float[Array, "vocab hidden"] | None:
    """Returns dweight."""
    require(
        len(dy) == len(res.tokens) and dy.dtype == res.dtype,
        f"embedding_bwd: dy must be {res.dtype} of {len(res.tokens)} rows, "
        f"got {dy.dtype}{dy.shape}",
    )
    if isinstance(into, Frozen):
        return None
    shape = (res.vocab, dy.shape[1])
    if on_device(dy):
        if into is None:
            out, accumulate = zeros(shape, res.dtype, like=dy), False
        else:
            out, accumulate = destination(into, shape, res.dtype, like=dy)
        _sum_by_id(res.tokens, res.vocab, dy, out, accumulate)
        return out
    wide = upcast(dy)
    dweight = np.zeros(shape, wide.dtype)
    np.add.at(dweight, res.tokens, wide)
    return store(dweight, into, res.dtype)


def _check_ids(tokens: Array, vocab: int) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab))
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"embedding_fwd: tokens[{first}] is {tokens[first]}, outside the vocabulary of {vocab}"
        )


def _width(dtype: np.dtype, hidden: int, *matrices: Array) -> int:
    """Values of ``dtype`` that a thread moves at once."""
    width = vector_width(dtype)
    return width if hidden % width == 0 and rows_aligned(*matrices) else 1


def _sum_by_id(ids: Array, vocab: int, dy: Array, out: Array, accumulate: bool) -> None:
    """Writes or adds the sums of rows of ``dy`` of one id to the rows of ``out``."""
    require(
        dy.flags.c_contiguous and out.flags.c_contiguous,
        "embedding_bwd: dy and into must be C-contiguous",
    )
    tokens, hidden = dy.shape
    if tokens == 0:
        return
    cleared = zeros((vocab + 3,), np.int32, like=dy)
    count, totals = cleared[:vocab], cleared[vocab:]
    begin = empty((vocab,), np.int32, like=dy)
    arrival, rare, placed, order = (empty((tokens,), np.int32, like=dy) for _ in range(4))
    hot = empty((max(1, tokens // (RARE + 1)),), np.int32, like=dy)
    grid = -(-tokens // THREADS)
    for kernel, arguments in (
        ("embedding_count", [count, arrival, ids, tokens]),
        ("embedding_ranges", [begin, rare, hot, totals, count, arrival, ids, tokens, RARE]),
        ("embedding_place", [placed, begin, arrival, ids, tokens]),
        ("embedding_order", [order, placed, begin, count, ids, tokens]),
    ):
        SOURCE.launch(kernel, (), grid, THREADS, arguments)
    types = (ctype(out.dtype), ctype(dy.dtype), str(_width(dy.dtype, hidden, dy, out)))
    for listed, total, warps, blocks in (
        (rare, totals[1:2], 1, BLOCKS),
        (hot, totals[2:3], HOT_WARPS, HOT_BLOCKS),
    ):
        SOURCE.launch(
            "embedding_bwd",
            (*types, str(warps)),
            blocks,
            THREADS if warps == 1 else 32 * warps,
            [out, dy, listed, total, order, begin, count, hidden, accumulate],
        )


def embedding_ref(weight: Array, *, tokens: Array) -> Array:
    """Reference of embedding_fwd."""
    return weight[tokens]


embedding = Pair(embedding_fwd, embedding_bwd)
