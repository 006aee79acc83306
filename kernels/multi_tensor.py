"""Many tensors in one launch: a table of sizes and pointers, and the tensor of each block.

Every tensor is cut into chunks of ``chunk`` elements; a block works on one chunk. A table is built
once and holds addresses, so its arrays must stay where they are: it keeps a reference to each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from surogate.kernels.arrays import Array, namespace, require

CHUNK = 16384  # elements of a block: eight passes of 256 threads by 8 elements


class TensorTable(NamedTuple):
    """What a multi-tensor kernel reads; cuda/multi_tensor.cuh has the other side."""

    rows: Int64[Array, "tensors columns"]  # size, first chunk, then the op's columns
    chunk_tensor: Int32[Array, " chunks"]
    chunk: int  # elements
    arrays: tuple[Any, ...]  # kept alive


def tensor_table(
    columns: Sequence[Sequence[Any]], *, chunk: int = CHUNK, like: Any
) -> TensorTable | None:
    """A table beside ``like``, or None when every tensor is empty.

    ``columns`` holds one row a tensor: C-contiguous arrays of one size (they become addresses),
    None (address 0) and integers; the first is an array. Raises ValueError for a ``chunk`` of
    elements that is not a positive multiple of 8.
    """
    require(
        chunk > 0 and chunk % 8 == 0,
        f"tensor_table: chunk must be a positive multiple of 8, got {chunk}",
    )
    sizes = [row[0].size for row in columns]
    chunks = [-(-size // chunk) for size in sizes]
    if not sum(chunks):
        return None
    first = np.cumsum([0, *chunks[:-1]])
    rows = np.array(
        [
            [size, begin, *(_word(value) for value in row)]
            for size, begin, row in zip(sizes, first, columns, strict=True)
        ],
        np.int64,
    )
    chunk_tensor = np.repeat(np.arange(len(sizes), dtype=np.int32), chunks)
    library = namespace(like)
    arrays = tuple(v for row in columns for v in row if v is not None and not isinstance(v, int))
    return TensorTable(library.asarray(rows), library.asarray(chunk_tensor), chunk, arrays)


def _word(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    return value.ctypes.data if isinstance(value, np.ndarray) else value.data.ptr
