"""Global gradient norm of the tensors of a model: bytes are one read of every gradient."""

from collections.abc import Iterator

import cupy
import numpy as np

from bench.bench_adamw import ADAPTER, MODEL
from bench.harness import Case
from surogate.kernels.arrays import BF16
from surogate.kernels.grad_norm import grad_norm, grad_table


def cases() -> Iterator[Case]:
    """Both dtypes over a model, larger than any L2 cache, and over an adapter."""
    count = cupy.array([8192], np.int32)
    for shapes, what in ((MODEL, "0.6B"), (ADAPTER, "adapter")):
        for name, dtype in (("fp32", np.float32), ("bf16", BF16)):
            grads = [cupy.random.standard_normal(s, dtype="f4").astype(dtype) for s in shapes]
            table = grad_table(grads)

            def norm(table=table) -> None:
                grad_norm(table, count, max_norm=1.0)

            yield Case(f"grad_norm {what}, {name}", norm, bytes=sum(g.nbytes for g in grads))
