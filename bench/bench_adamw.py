"""One AdamW step over the tensors of a model, in one launch a combination of dtypes.

Bytes are what a step must move: parameter, master and moments are read and written, the gradient is
read, and written where the step clears it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.harness import Case
from bench.inputs import cupy
from surogate.kernels.adamw import AdamWLeaf, adamw_scalars, adamw_step_, adamw_table
from surogate.kernels.adamw8bit import (
    BLOCK,
    AdamW8Leaf,
    Moment8,
    adamw8bit_step_,
    adamw8bit_table,
    values,
)
from surogate.kernels.arrays import BF16, F32

U8 = np.dtype(np.uint8)
SETTINGS: dict[str, Any] = dict(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
LAYERS = [(2048, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1024,), (1024,)] * 28
MODEL = [(151936, 1024), *LAYERS]  # the tensors of a model of 0.6 billion parameters
ADAPTER = [(16, 1024), (2048, 16), (16, 3072), (1024, 16)] * 28  # many small tensors


class Kind(NamedTuple):
    """Dtypes of a tensor's arrays, and whether it has a float32 master."""

    param: np.dtype
    grad: np.dtype
    moment: np.dtype
    master: bool

    def bytes(self, zero_grad: bool) -> float:
        """What a step moves for one element."""
        moment = self.moment.itemsize + (4 / BLOCK if self.moment == U8 else 0)
        state = self.param.itemsize + 2 * moment + 4 * self.master
        return 2 * state + (1 + zero_grad) * self.grad.itemsize


KINDS = {
    "bf16 + master, fp32 gradient": Kind(BF16, F32, F32, True),
    "bf16, bf16 moments": Kind(BF16, BF16, BF16, False),
    "fp32": Kind(F32, F32, F32, False),
    "bf16 + master, fp32 gradient, 8 bits": Kind(BF16, F32, U8, True),
    "bf16, 8 bits": Kind(BF16, BF16, U8, False),
    "bf16, fp32 moments": Kind(BF16, BF16, F32, False),  # what 8 bits are held against
    "fp32, 8 bits": Kind(F32, F32, U8, False),
}


def moments(m: Any, kind: Kind) -> tuple[Any, Any]:
    """Both moments, of numbers that are as normal as ``m`` and their squares."""
    if kind.moment != U8:
        return m.astype(kind.moment), (m * m).astype(kind.moment)
    scale = cupy.full(-(-m.size // BLOCK), 3.5, "f4")  # about the largest of a block
    codes = (
        cupy.searchsorted(cupy.asarray(values(which)), x / x.max()).astype(U8)
        for which, x in (("m", m), ("v", m * m))
    )
    return Moment8(next(codes), scale), Moment8(next(codes), scale * scale)


def leaves(shapes: Sequence[tuple[int, ...]], kind: Kind) -> list[Any]:
    """Random tensors in the middle of a run."""

    def leaf(index: int, shape: tuple[int, ...]) -> Any:
        param, grad, m = (cupy.random.standard_normal(shape, dtype="f4") for _ in range(3))
        return (AdamW8Leaf if kind.moment == U8 else AdamWLeaf)(
            param.astype(kind.param),
            grad.astype(kind.grad),
            *moments(m, kind),
            param if kind.master else None,
            len(shape) > 1,
            index,
        )

    return [leaf(index, shape) for index, shape in enumerate(shapes)]


def cases() -> Iterator[Case]:
    """Every kind over a model, larger than any L2 cache, and over an adapter; gradients are
    cleared, as a step does.
    """
    for shapes, what in ((MODEL, "0.6B"), (ADAPTER, "rank 16")):
        elements = sum(map(math.prod, shapes))
        for name, kind in KINDS.items():

            def build(shapes: Sequence = shapes, kind: Kind = kind) -> Callable[[], object]:
                scalars = cupy.asarray(adamw_scalars(lr=1e-4, step=10, beta1=0.9, beta2=0.999))
                norm = cupy.asarray(np.array([1, 1e-3, 1], np.float32))
                step: Any = adamw8bit_step_ if kind.moment == U8 else adamw_step_
                made: Any = adamw8bit_table if kind.moment == U8 else adamw_table
                table = made(leaves(shapes, kind))
                return lambda: step(table, scalars, norm, zero_grad=True, **SETTINGS)

            yield Case(f"adamw {what}, {name}", build, bytes=round(kind.bytes(True) * elements))
