"""One AdamW step over the tensors of a model, in one launch a combination of dtypes.

Bytes are what a step must move: parameter, master and moments are read and written, the gradient is
read, and written where the step clears it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from bench.harness import Case
from surogate.kernels.adamw import AdamWLeaf, adamw_scalars, adamw_step_, adamw_table
from surogate.kernels.arrays import BF16

SETTINGS: dict[str, Any] = dict(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
LAYERS = [(2048, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1024,), (1024,)] * 28
MODEL = [(151936, 1024), *LAYERS]  # the tensors of a model of 0.6 billion parameters
# Many small tensors, of 3 and 13 million elements.
ADAPTER, WIDE_ADAPTER = (
    [(rank, 1024), (2048, rank), (rank, 3072), (1024, rank)] * 28 for rank in (16, 64)
)
# name: dtypes of parameter, gradient and moments, and whether there is a master
KINDS = {
    "bf16 + master, fp32 gradient": (BF16, np.float32, np.float32, True),
    "bf16 + master": (BF16, BF16, np.float32, True),
    "bf16, bf16 moments": (BF16, BF16, BF16, False),
    "fp32": (np.float32, np.float32, np.float32, False),
}


def leaves(shapes: Sequence[tuple[int, ...]], kind: tuple) -> list[AdamWLeaf]:
    """Random tensors in the middle of a run."""
    param_dtype, grad_dtype, moment_dtype, mastered = kind

    def leaf(index: int, shape: tuple[int, ...]) -> AdamWLeaf:
        param, grad, m = (cupy.random.standard_normal(shape, dtype="f4") for _ in range(3))
        return AdamWLeaf(
            param.astype(param_dtype),
            grad.astype(grad_dtype),
            m.astype(moment_dtype),
            (m * m).astype(moment_dtype),
            param if mastered else None,
            len(shape) > 1,
            index,
        )

    return [leaf(index, shape) for index, shape in enumerate(shapes)]


def cases() -> Iterator[Case]:
    """Every kind over a model, larger than any L2 cache, and over adapters."""
    scalars = cupy.asarray(adamw_scalars(lr=1e-4, step=10, beta1=0.9, beta2=0.999))
    norm = cupy.asarray(np.array([1, 1e-3, 1], np.float32))
    for shapes, what in ((MODEL, "0.6B"), (ADAPTER, "rank 16"), (WIDE_ADAPTER, "rank 64")):
        for name, kind in KINDS.items():
            table = adamw_table(leaves(shapes, kind))
            state = [x for each in table.leaves for x in (each.param, each.m, each.v, each.master)]
            moved = 2 * sum(x.nbytes for x in state if x is not None)
            grads = sum(each.grad.nbytes for each in table.leaves)
            for zero_grad in (False, True):

                def step(table=table, zero_grad=zero_grad) -> None:
                    adamw_step_(table, scalars, norm, zero_grad=zero_grad, **SETTINGS)

                suffix = ", clears gradients" if zero_grad else ""
                total = moved + (1 + zero_grad) * grads
                yield Case(f"adamw {what}, {name}{suffix}", step, bytes=total)
