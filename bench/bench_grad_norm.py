"""Global gradient norm of the tensors of a model: bytes are one read of every gradient."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bench.bench_adamw import ADAPTER, MODEL
from bench.harness import Case
from bench.inputs import cupy
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.grad_norm import grad_norm, grad_table


def cases() -> Iterator[Case]:
    """Both dtypes over a model, larger than any L2 cache, and over an adapter."""
    for shapes, what in ((MODEL, "0.6B"), (ADAPTER, "rank 16")):
        for name, dtype in (("fp32", F32), ("bf16", BF16)):

            def build(shapes: Sequence = shapes, dtype: np.dtype = dtype) -> Callable[[], object]:
                count = cupy.array([8192], np.int32)
                grads = [cupy.random.standard_normal(s, dtype="f4").astype(dtype) for s in shapes]
                table = grad_table(grads)
                return lambda: grad_norm(table, count, max_norm=1.0)

            size = dtype.itemsize * sum(map(math.prod, shapes))
            yield Case(f"grad_norm {what}, {name}", build, bytes=size)
