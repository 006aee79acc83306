"""Bytes of the optimizers: their state, tables of addresses, and what an update makes meanwhile."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from surogate.kernels import adamw8bit, multi_tensor
from surogate.kernels.adamw8bit import BLOCK, HOST_PART, LEAST_ELEMENTS
from surogate.kernels.arrays import BF16, F32
from surogate.models.config import parameter_shapes
from surogate.models.walk import BYTE, INT32, Shape, Walk, Work

F64, INT64 = np.dtype(np.float64), np.dtype(np.int64)
# Columns of the tables of kernels/adamw.py, adamw8bit.py and normuon.py, sizes included.
ADAMW_COLUMNS, ADAMW8_COLUMNS, NORMUON_COLUMNS = 10, 12, 5
# In float32 of a leaf, or of a part of it, that the host versions make: AdamW's, that with 8-bit
# moments, NorMuon's.
HOST_COPIES, HOST_COPIES_8BIT, HOST_COPIES_NORMUON = 7, 18, 7


def state_arrays(work: Work, trained: list[Shape]) -> Iterator[int]:
    """Bytes of each array: two moments of a parameter, or with NorMuon one of a matrix and a number
    a row; perhaps masters.
    """
    layout = work.layout
    matrices, others = _split(work) if work.normuon else ([], trained)
    for shape in matrices:
        yield from _moment(work, shape)
        yield layout.bytes(shape[:1], F32)
    for shape in others:
        yield from 2 * _moment(work, shape)
    if work.masters:
        yield from (layout.bytes(shape, F32) for shape in trained)


def _moment(work: Work, shape: Shape) -> list[int]:
    size = math.prod(shape)
    if work.moment_dtype != BYTE:
        return [work.layout.bytes(shape, work.moment_dtype)]
    if size < LEAST_ELEMENTS:
        return [work.layout.bytes(shape, F32)]
    return [work.layout.bytes(shape, BYTE), work.layout.bytes((-(-size // BLOCK),), F32)]


def _split(work: Work) -> tuple[list[Shape], list[Shape]]:
    """The layers' matrices, as they are stacked, and all other parameters."""
    embed, layers, norm, head = parameter_shapes(work.config)
    inside: list[Any] = [shape for layer in layers for shape in layer if shape is not None]
    others: list[Any] = [shape for shape in (embed, norm, head) if shape is not None]
    matrices = [shape for shape in inside if len(shape) == 2]
    return matrices, others + [shape for shape in inside if len(shape) != 2]


def _pieces(walk: Walk) -> Iterator[Shape]:
    """The matrices that NorMuon makes orthogonal."""
    for matrices in walk.of:
        for w in matrices:
            yield from ((rows, w.inner) for rows in w.pieces)


def table_bytes(walk: Walk, trained: list[Shape]) -> int:
    """Tables of addresses on a card, and what is summed of each chunk of a momentum."""
    work, layout = walk.work, walk.work.layout
    if work.normuon:
        pieces = list(_pieces(walk))
        held = _table(work, pieces, NORMUON_COLUMNS) + _table(work, _split(work)[1], ADAMW_COLUMNS)
        return held + layout.bytes((_chunks(pieces),), F64)
    if work.moment_dtype != BYTE:
        return _table(work, trained, ADAMW_COLUMNS)
    large = [shape for shape in trained if math.prod(shape) >= LEAST_ELEMENTS]
    small = [shape for shape in trained if math.prod(shape) < LEAST_ELEMENTS]
    held = _table(work, large, ADAMW8_COLUMNS) + _table(work, small, ADAMW_COLUMNS)
    return held + layout.bytes(adamw8bit.codebook().shape, F32)


def _table(work: Work, shapes: list[Shape], columns: int) -> int:
    blocks = work.layout.bytes((_chunks(shapes),), INT32)
    return blocks + work.layout.bytes((len(shapes), columns), INT64)


def _chunks(shapes: list[Shape]) -> int:
    return sum(-(-math.prod(shape) // multi_tensor.CHUNK) for shape in shapes)


def update(walk: Walk, trained: list[Shape]) -> None:
    """What an update makes and drops, but for vectors: products of NorMuon, copies on the host."""
    work, ledger = walk.work, walk.ledger
    ledger.phase = "update"
    largest = max(map(math.prod, _split(work)[1] if work.normuon else trained))
    if work.moment_dtype == BYTE:
        ledger.host_scratch(min(largest, HOST_PART), copies=HOST_COPIES_8BIT)
    else:
        ledger.host_scratch(largest, copies=HOST_COPIES)
    if not work.normuon:
        return
    for rows, columns in _pieces(walk):
        small = min(rows, columns)
        if work.layout.host:
            ledger.host_scratch(rows, columns, copies=HOST_COPIES_NORMUON)
            continue
        for name in ("x", "spare"):
            ledger.make(name, rows, columns, dtype=BF16)
        for name in ("gram", "square"):
            ledger.make(name, small, small, dtype=BF16)
        ledger.drop("x", "spare", "gram", "square")
