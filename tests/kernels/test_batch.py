"""Documents of a micro-batch: their boundaries, and whether they are equally long rows."""

import numpy as np
import pytest

from surogate.kernels.batch import Docs, docs_from_lengths, equal_rows


@pytest.mark.parametrize(
    "lengths,rows",
    [
        ([4, 4, 4], 3),
        ([12], 1),  # a single document
        ([1], 1),  # one token
        ([1, 1, 1], 3),
        ([4, 5, 4], None),
        ([4, 4, 3], None),  # a ragged end
        ([3, 4], None),
        ([4, 8], None),  # a multiple of the first
        ([4, 2, 2, 4], None),  # edges where equal rows have them, and others
        ([4, 3, 1, 4], None),
    ],
)
def test_equal_rows(lengths, rows):
    assert equal_rows(docs_from_lengths(lengths)) == rows


@pytest.mark.parametrize("field", ["start", "end"])
@pytest.mark.parametrize("token", [0, 5, 11])
def test_equal_rows_looks_at_every_token(field, token):
    docs = docs_from_lengths([4, 4, 4])
    edges = getattr(docs, field).copy()
    edges[token] += 1
    assert equal_rows(docs._replace(**{field: edges})) is None


def test_boundaries():
    docs = docs_from_lengths([2, 3])
    assert isinstance(docs, Docs)
    np.testing.assert_array_equal(docs.start, [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(docs.end, [2, 2, 5, 5, 5])
