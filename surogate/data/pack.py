"""Packing: which piece of which document goes into which row of sequence_len tokens.

`split`, for pre-training: documents lie one after another and the stream is cut into rows. A long
document goes on in the next row, where its piece is a document of its own; the label at the cut is
still the token that follows, so every token is read once and every target is learned once.

`fit`, for fine-tuning: no document is cut. Within a window of documents the longest goes first,
into the row with the least room that takes it (best-fit decreasing), so a row holds whole documents
only.

`single`: one document a row.

In `fit` and `single` a document longer than a row loses its end. What is left of a row is padding,
a document of its own with token 0 and label -100. Plans depend on the lengths alone.
"""

from bisect import bisect_left, insort
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from surogate.kernels.arrays import require
from surogate.kernels.batch import IGNORED

Packing = Literal["split", "fit", "single"]

_WINDOW = 16384  # documents that best-fit looks at together


class Plan(NamedTuple):
    """Pieces in the order of the rows: document, first token in it, number of tokens, row."""

    document: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    length: Int64[np.ndarray, " pieces"]
    row: Int64[np.ndarray, " pieces"]
    rows: int
    truncated: int  # documents that lost their end


def plan_rows(
    lengths: Int64[np.ndarray, " documents"],
    *,
    sequence_len: int,
    packing: Packing,
    window: int = _WINDOW,
) -> Plan:
    """Plans rows for documents of these lengths, which must be positive."""
    require(sequence_len > 0, f"plan_rows: sequence_len must be positive, got {sequence_len}")
    require(bool((lengths > 0).all()), "plan_rows: lengths must be positive")
    if packing == "split":
        return _split(lengths, sequence_len)
    kept = np.minimum(lengths, sequence_len)
    row = np.arange(len(kept)) if packing == "single" else _best_fit(kept, sequence_len, window)
    order = np.argsort(row, kind="stable")
    return Plan(
        order.astype(np.int64),
        np.zeros(len(kept), np.int64),
        kept[order],
        row[order].astype(np.int64),
        int(row.max(initial=-1)) + 1,
        int((lengths > sequence_len).sum()),
    )


def _split(lengths: Int64[np.ndarray, " documents"], sequence_len: int) -> Plan:
    ends = np.cumsum(lengths)
    begins = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(begins, np.arange(0, total, sequence_len)).astype(np.int64)
    document = np.searchsorted(begins, cuts, side="right").astype(np.int64) - 1
    return Plan(
        document,
        cuts - begins[document],
        np.diff(cuts, append=total).astype(np.int64),
        cuts // sequence_len,
        -(-total // sequence_len),
        0,
    )


def _best_fit(
    lengths: Int64[np.ndarray, " documents"], sequence_len: int, window: int
) -> Int64[np.ndarray, " documents"]:
    """The row of each document; rows of a window are numbered by their first document."""
    row = np.empty(len(lengths), np.int64)
    rows = 0
    for begin in range(0, len(lengths), window):
        sizes = lengths[begin : begin + window]
        bins = _fill(sizes, sequence_len)
        _, first, inverse = np.unique(bins, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        row[begin : begin + window] = rows + rank[inverse]
        rows += len(first)
    return row


def _fill(
    sizes: Int64[np.ndarray, " documents"], sequence_len: int
) -> Int64[np.ndarray, " documents"]:
    bins = np.empty(len(sizes), np.int64)
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, ascending
    made = 0
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, chosen = sequence_len, made
            made += 1
        bins[document] = chosen
        left = room - size
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    return bins


def fill_rows(
    plan: Plan,
    tokens: Int32[np.ndarray, " stream"],
    labels: Int32[np.ndarray, " stream"],
    begins: Int64[np.ndarray, " documents"],
    ends: Int64[np.ndarray, " documents"],
    out_tokens: Int32[np.ndarray, "rows sequence_len"],
    out_labels: Int32[np.ndarray, "rows sequence_len"],
) -> tuple[Int32[np.ndarray, " lengths"], Int64[np.ndarray, " bounds"]]:
    """Writes rows into out_tokens and out_labels.

    begins and ends place the documents in the streams of tokens and shifted labels. Returns the
    lengths of all pieces and paddings, and where those of each row begin (one more than rows).
    """
    sequence_len = out_tokens.shape[1]
    lengths: list[int] = []
    bounds = [0]
    row, at = 0, 0
    pieces = zip(
        (begins[plan.document] + plan.start).tolist(), plan.length.tolist(), plan.row.tolist(),
        strict=True,
    )  # fmt: skip

    def close() -> None:
        out_tokens[row, at:] = 0
        out_labels[row, at:] = IGNORED
        if at < sequence_len:
            lengths.append(sequence_len - at)
        bounds.append(len(lengths))

    for source, length, target in pieces:
        if target != row:
            close()
            row, at = target, 0
        out_tokens[row, at : at + length] = tokens[source : source + length]
        out_labels[row, at : at + length] = labels[source : source + length]
        lengths.append(length)
        at += length
    if plan.rows:
        close()
    if plan.truncated:  # the target of the last token that was kept is not in the row
        cut = (ends - begins)[plan.document] > plan.length
        out_labels[plan.row[cut], -1] = IGNORED
    return np.array(lengths, np.int32), np.array(bounds, np.int64)
