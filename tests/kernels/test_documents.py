"""Tables of documents: against a plain loop, on every device, and every way to overflow one."""

import numpy as np
import pytest

from surogate.kernels.batch import Docs, docs_from_lengths
from surogate.kernels.documents import (
    DocumentTable,
    SizeClass,
    count_documents,
    default_documents,
    document_table,
    fits,
    size_classes,
    uncovered,
)
from tests.oracle import same_bits, to_device, to_host

STRIDES = (6, 1, 1 << 33)  # the last: offsets beyond 32 bits
LENGTHS = {
    "one token": [1],
    "one document": [3000],
    "fewer tokens than threads": [5, 1, 7, 2],
    "short": [1] * 1500,
    "several a thread": [1, 2, 3] * 700 + [50],
    "mixed": [1000, 1, 1, 64, 2000, 3, 1027, 1],
}
CASES = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())


def docs_on(device: str, lengths: list[int]) -> Docs:
    return Docs(*(to_device(x, device) for x in docs_from_lengths(lengths)))


def table_of(
    lengths: list[int], max_documents: int, strides, shortest: int, longest: int
) -> tuple[list[int], list[list[int]], list[int]]:
    """(lengths, offsets, found), a document at a time."""
    rows, first, count = [], 0, 0
    for length in lengths:
        if shortest <= length <= longest:
            count += 1
            if len(rows) < max_documents:
                rows.append((length, first))
        first += length
    held = sum(length for length, _ in rows)
    rows += [(0, first)] * (max_documents - len(rows))
    offsets = [[at * stride for _, at in rows] + [first * stride] for stride in strides]
    return [length for length, _ in rows], offsets, [count, held]


def check(table: DocumentTable, lengths: list[int], strides=STRIDES) -> None:
    want = table_of(lengths, table.size.max_documents, strides, *table.size[:2])
    for got, expected in zip((table.lengths, table.offsets, table.found), want, strict=True):
        np.testing.assert_array_equal(to_host(got), expected)


@CASES
@pytest.mark.parametrize("max_documents", [1, 4, 2200])  # overflows; borders on; more than a block
def test_rows(lengths, max_documents, device):
    docs = docs_on(device, lengths)
    check(document_table(docs, max_documents=max_documents, strides=STRIDES), lengths)


@CASES
@pytest.mark.parametrize("bounds", [(1, 1), (2, 63), (64, 1000), (1001, 5000)])
def test_rows_of_a_size_class(lengths, bounds, device):
    shortest, longest = bounds
    table = document_table(
        docs_on(device, lengths),
        max_documents=7,
        strides=STRIDES,
        shortest=shortest,
        longest=longest,
    )
    check(table, lengths)


def test_strides(device):
    """Six at most, each once, found again by value."""
    docs = docs_on(device, [3, 4])
    table = document_table(docs, max_documents=2, strides=(5, 5, 2, 3, 7, 11, 13, 2))
    assert table.strides == (5, 2, 3, 7, 11, 13)
    check(table, [3, 4], table.strides)
    for stride in table.strides:
        np.testing.assert_array_equal(
            to_host(table.offsets_of(stride)), [0, 3 * stride, 7 * stride]
        )
    with pytest.raises(ValueError, match="no offsets for tokens 4 elements apart"):
        table.offsets_of(4)


def test_the_same_bits_twice(device):
    docs = docs_on(device, LENGTHS["several a thread"])
    a, b = (document_table(docs, max_documents=3000, strides=STRIDES) for _ in range(2))
    for x, y in zip(a[:3], b[:3], strict=True):
        same_bits(x, y)


def test_what_does_not_fit_is_seen(device):
    docs = docs_on(device, [10, 20, 30])
    enough = document_table(docs, max_documents=3, strides=(1,))
    assert uncovered([enough]) == 0
    too_few = document_table(docs, max_documents=2, strides=(1,))
    assert uncovered([too_few]) == 30 and to_host(too_few.found)[0] == 3
    too_short = document_table(docs, max_documents=3, strides=(1,), longest=25)
    assert uncovered([too_short]) == 30
    rest = document_table(docs, max_documents=1, strides=(1,), shortest=26)
    assert uncovered([too_short, rest]) == 0


def test_counted_on_the_host():
    docs = docs_from_lengths([10, 20, 30])
    assert count_documents(docs) == 3
    assert fits(docs, [SizeClass(1, 60, 3)])
    assert not fits(docs, [SizeClass(1, 60, 2)])
    assert not fits(docs, [SizeClass(1, 29, 3)])
    assert fits(docs, [SizeClass(1, 29, 2), SizeClass(30, 60, 1)])
    assert not fits(docs, [SizeClass(1, 29, 1), SizeClass(30, 60, 1)])


@pytest.mark.parametrize("longest", [1, 100, 128, 129, 2047, 2048, 16384])
def test_size_classes_cover_every_length_once(longest):
    classes = size_classes(16384, longest=longest, max_documents=256)
    lengths = [n for size in classes for n in range(size.shortest, size.longest + 1)]
    assert sorted(lengths) == list(range(1, longest + 1))
    assert classes[-1].max_documents == 256
    for size in classes[:-1]:
        assert size.max_documents * size.longest**2 <= 2 * 16384 * longest


@pytest.mark.parametrize("length", [65, 128, 129, 256, 257, 500])
def test_all_classes_but_the_last_hold_every_batch(length):
    """As many documents of a length as there can be."""
    *classes, last = size_classes(1000, longest=512, max_documents=1, smallest=64)
    count = 1000 // length
    [size] = [size for size in classes if size.shortest <= length <= size.longest]
    assert count <= size.max_documents
    assert fits(docs_from_lengths([length] * count), [*classes, last])


def test_default_documents():
    assert default_documents(100) == 16 and default_documents(16384) == 256


@pytest.mark.parametrize(
    "change,message",
    [
        ({"max_documents": 0}, "max_documents >= 1"),
        ({"shortest": 0}, "1 <= shortest <= longest"),
        ({"shortest": 9, "longest": 8}, "1 <= shortest <= longest"),
        ({"strides": ()}, "1 to 6 positive strides"),
        ({"strides": (1, 2, 3, 4, 5, 6, 7)}, "1 to 6 positive strides"),
        ({"strides": (4, 0)}, "1 to 6 positive strides"),
    ],
)
def test_refuses(change, message):
    settings = {"max_documents": 2, "strides": (4,), **change}
    with pytest.raises(ValueError, match=message):
        document_table(docs_from_lengths([10, 20]), **settings)
    with pytest.raises(ValueError, match="1 <= longest <= 100 tokens"):
        size_classes(100, longest=101, max_documents=1)


@pytest.mark.gpu
def test_in_a_captured_graph():
    """A graph made with one batch serves another."""
    import cupy

    batches = [LENGTHS["mixed"], [4097]]
    docs = docs_on("cuda", batches[0])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        document_table(docs, max_documents=20, strides=STRIDES)
        stream.begin_capture()
        table = document_table(docs, max_documents=20, strides=STRIDES)
        graph = stream.end_capture()
        for lengths in batches:
            for target, source in zip(docs, docs_from_lengths(lengths), strict=True):
                target.set(source)
            graph.launch(stream)
            stream.synchronize()
            check(table, lengths)
