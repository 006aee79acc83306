"""Packing keeps every token, mixes no documents, and its rows are what the plan says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate.data.pack import fill_rows, plan_rows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def _pack(lengths, sequence_len, packing, **options):
    """Rows as (tokens, labels, lengths); token t of document d is 1000 * (d + 1) + t."""
    lengths = np.array(lengths, np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    tokens = np.concatenate([1000 * (d + 1) + np.arange(n) for d, n in enumerate(lengths)])
    tokens = tokens.astype(np.int32)
    labels = np.append(tokens[1:], -100).astype(np.int32)
    labels[ends - 1] = -100
    plan = plan_rows(lengths, sequence_len=sequence_len, packing=packing, **options)
    out = np.full((2, plan.rows, sequence_len), 77, np.int32)
    sizes, bounds = fill_rows(plan, tokens, labels, begins, ends, out[0], out[1])
    rows = [
        (out[0, i], out[1, i], sizes[bounds[i] : bounds[i + 1]].tolist()) for i in range(plan.rows)
    ]
    return plan, rows


def _pieces(rows):
    """(tokens, labels) of every piece that is not padding."""
    for tokens, labels, lengths in rows:
        assert sum(lengths) == len(tokens) and min(lengths) > 0
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            piece = tokens[end - length : end], labels[end - length : end]
            if piece[0][0] == 0:
                assert end == len(tokens) and not piece[0].any() and (piece[1] == -100).all()
            else:
                yield piece


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 30))
def test_split_keeps_every_token_and_every_target_in_order(lengths, sequence_len):
    plan, rows = _pack(lengths, sequence_len, "split")
    pieces = list(_pieces(rows))
    for tokens, labels in pieces:
        document, first = divmod(int(tokens[0]), 1000)
        assert tokens.tolist() == [1000 * document + first + i for i in range(len(tokens))]
        targets = [t + 1 if t % 1000 + 1 < lengths[document - 1] else -100 for t in tokens.tolist()]
        assert labels.tolist() == targets
    want = [1000 * (d + 1) + t for d, n in enumerate(lengths) for t in range(n)]
    assert np.concatenate([tokens for tokens, _ in pieces]).tolist() == want
    assert plan.rows == -(-sum(lengths) // sequence_len) and plan.truncated == 0


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 50), st.integers(1, 70))
@pytest.mark.parametrize("packing", ["fit", "single"])
def test_whole_documents_once_each(packing, lengths, sequence_len, window):
    plan, rows = _pack(lengths, sequence_len, packing, window=window)
    seen = []
    for tokens, labels in _pieces(rows):
        document, first = divmod(int(tokens[0]), 1000)
        kept = min(lengths[document - 1], sequence_len)
        want = [1000 * document + i for i in range(kept)]
        assert first == 0 and tokens.tolist() == want
        assert labels.tolist() == [*want[1:], -100]
        seen.append(document)
    assert sorted(seen) == list(range(1, len(lengths) + 1))
    assert plan.truncated == sum(n > sequence_len for n in lengths)
    if packing == "single":
        assert plan.rows == len(lengths) and seen == sorted(seen)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_best_fit_leaves_at_most_one_row_half_empty(lengths):
    _, rows = _pack(lengths, 30, "fit")
    used = [sum(n for n in row[2][:-1]) if row[0][-1] == 0 else 30 for row in rows]
    assert sum(2 * n <= 30 for n in used) <= 1


def test_best_fit_chooses_the_tightest_row():
    # 7 and 6 open rows with 3 and 4 left; 4 goes to the second, 3 to the first, 2 opens a third.
    plan, _ = _pack([6, 2, 4, 7, 3], 10, "fit")
    rows = [plan.document[plan.row == i].tolist() for i in range(plan.rows)]
    assert rows == [[0, 2], [1], [3, 4]]


def test_windows_share_no_row():
    plan, _ = _pack([5, 5, 5, 5], 20, "fit", window=2)
    assert plan.rows == 2 and plan.row.tolist() == [0, 0, 1, 1]


def test_no_documents_make_no_rows():
    for packing in ("split", "fit", "single"):
        plan = plan_rows(np.empty(0, np.int64), sequence_len=8, packing=packing)
        assert plan.rows == 0 and len(plan.row) == 0


def test_refuses_empty_documents():
    with pytest.raises(ValueError, match="lengths must be positive"):
        plan_rows(np.array([3, 0]), sequence_len=8, packing="fit")
    with pytest.raises(ValueError, match="sequence_len must be positive, got 0"):
        plan_rows(np.array([3]), sequence_len=0, packing="fit")
