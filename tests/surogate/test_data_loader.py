"""Batches are a pure function of their index and cover the rows once, on any number of ranks."""

import threading

import numpy as np
import pytest

from surogate.data.loader import EvalLoader, Loader, Prefetch, permutation
from surogate.data.packed import Packed, Report
from surogate.errors import UserError

LENGTH = 6


def _packed(rows):
    """Row i holds tokens 100 * i + 1 ... in documents of 2 and 3, and one token of padding."""
    tokens = (100 * np.arange(rows)[:, None] + np.arange(1, LENGTH + 1)).astype(np.int32)
    tokens[:, -1] = 0
    labels = np.full((rows, LENGTH), -100, np.int32)
    labels[:, [0, 2, 3]] = tokens[:, [1, 3, 4]]
    report = Report(
        documents=2 * rows,
        tokens=5 * rows,
        supervised=3 * rows,
        rows=rows,
        truncated=0,
        unsupervised=0,
        packing="fit",
        fill=5 / LENGTH,
    )
    bounds = np.arange(0, 3 * rows + 1, 3)
    lengths = np.tile(np.array([2, 3, 1], np.int32), rows)
    sources = np.tile(np.array([0, 1, -1], np.int32), rows)
    return Packed(tokens, labels, lengths, bounds, report, False, sources, ("a", "b"))


def _same(one, other):
    return all(
        np.array_equal(a, b)
        for a, b in zip((*one[:3], *one.docs), (*other[:3], *other.docs), strict=True)
    )


def test_batch_is_its_rows_one_after_another():
    packed = _packed(4)
    batch = Loader(packed, rows_per_batch=2, seed=1, shuffle=False).batch(1)
    assert batch.tokens.tolist() == [201, 202, 203, 204, 205, 0, 301, 302, 303, 304, 305, 0]
    assert (
        batch.labels.tolist() == [202, -100, 204, 205, -100, -100, 302, -100, 304, 305] + [-100] * 2
    )
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 0] * 2
    assert batch.docs.start.tolist() == [0, 0, 2, 2, 2, 5, 6, 6, 8, 8, 8, 11]
    assert batch.docs.end.tolist() == [2, 2, 5, 5, 5, 6, 8, 8, 11, 11, 11, 12]
    assert {array.dtype for array in (*batch[:3], *batch.docs)} == {np.dtype(np.int32)}


def test_every_row_at_most_once_an_epoch_and_another_order_each_epoch():
    loader = Loader(_packed(64), rows_per_batch=4, seed=7)
    per_epoch = loader.batches_per_epoch
    epochs = [
        np.concatenate([loader.rows(epoch * per_epoch + i) for i in range(per_epoch)]).tolist()
        for epoch in range(3)
    ]
    assert per_epoch == 16
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert loader.rows(0).tolist() != Loader(_packed(64), rows_per_batch=4, seed=8).rows(0).tolist()


def test_resumed_in_the_second_epoch_the_rest_is_the_same():
    # 64 rows, batch 4: five steps into epoch 2, then a fresh loader from that index.
    loader = Loader(_packed(64), rows_per_batch=4, seed=7)
    whole = [loader.batch(i) for i in range(40)]
    resumed = Loader(_packed(64), rows_per_batch=4, seed=7)
    for index in (39, 21, 30, 22):  # in any order: nothing is remembered
        assert _same(resumed.batch(index), whole[index])


def test_order_is_fixed_for_all_versions():
    assert permutation(8, seed=1234, epoch=0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]
    assert permutation(8, seed=1234, epoch=1).tolist() == [0, 5, 6, 4, 2, 1, 7, 3]


@pytest.mark.parametrize("rows_per_batch,accumulation,world", [(1, 4, 2), (2, 2, 2), (4, 1, 2)])
def test_a_step_holds_the_same_rows_however_it_is_divided(rows_per_batch, accumulation, world):
    packed = _packed(37)
    alone = Loader(packed, rows_per_batch=8, seed=3)
    ranks = [
        Loader(
            packed,
            rows_per_batch=rows_per_batch,
            seed=3,
            rank=rank,
            world=world,
            accumulation=accumulation,
        )
        for rank in range(world)
    ]
    for step in range(9):  # two epochs and one step
        parts = [
            rank.rows(step * accumulation + i).tolist()
            for rank in ranks
            for i in range(accumulation)
        ]
        rows = [row for part in parts for row in part]
        assert len(set(rows)) == 8 and sorted(rows) == sorted(alone.rows(step).tolist())


def test_too_few_rows_for_a_step():
    with pytest.raises(UserError, match="the data fill 3 rows of 6 tokens, but one step takes 8"):
        Loader(_packed(3), rows_per_batch=2, seed=0, world=2, accumulation=2)


def test_bad_indices_are_refused():
    with pytest.raises(ValueError, match="index must not be negative"):
        Loader(_packed(3), rows_per_batch=1, seed=0).batch(-1)
    with pytest.raises(ValueError, match="rank must be below world 2, got 2"):
        Loader(_packed(3), rows_per_batch=1, seed=0, rank=2, world=2)
    with pytest.raises(ValueError, match="no batch 3 of 3"):
        EvalLoader(_packed(3), rows_per_batch=1).batch(3)


@pytest.mark.parametrize("rows,rows_per_batch,world", [(7, 3, 1), (7, 2, 2), (1, 4, 3), (8, 4, 2)])
def test_evaluation_covers_every_row_once(rows, rows_per_batch, world):
    packed = _packed(rows)
    ranks = [
        EvalLoader(packed, rows_per_batch=rows_per_batch, rank=rank, world=world)
        for rank in range(world)
    ]
    assert len({rank.batches for rank in ranks}) == 1
    batches = [rank.batch(i) for rank in ranks for i in range(rank.batches)]
    assert {len(batch.tokens) for batch in batches} == {rows_per_batch * LENGTH}
    first = [t for batch in batches for t in batch.tokens[::LENGTH].tolist()]
    assert sorted(t for t in first if t) == [100 * i + 1 for i in range(rows)]
    assert sum((batch.labels != -100).sum() for batch in batches) == 3 * rows
    for batch in batches:
        padding = np.flatnonzero(batch.tokens[::LENGTH] == 0)
        assert all(batch.docs.end[LENGTH * i] == LENGTH * (i + 1) for i in padding)


def test_prefetch_yields_in_order_and_ends():
    loader = Loader(_packed(16), rows_per_batch=2, seed=1)
    with Prefetch(loader, 5, stop=12) as batches:
        got = list(batches)
    assert len(got) == 7
    assert all(_same(batch, loader.batch(5 + i)) for i, batch in enumerate(got))


def test_prefetch_stops_its_thread_while_it_waits():
    batches = Prefetch(Loader(_packed(16), rows_per_batch=2, seed=1), 0)
    next(batches)
    batches.close()
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]
    with pytest.raises(StopIteration):
        next(batches)


def test_prefetch_raises_in_the_consumer_after_the_batches_before():
    class Broken:
        def batch(self, index):
            if index == 2:
                raise OSError("the disk is gone")
            return Loader(_packed(2), rows_per_batch=1, seed=1).batch(index)

    with Prefetch(Broken(), 0) as batches:
        next(batches)
        next(batches)
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)
