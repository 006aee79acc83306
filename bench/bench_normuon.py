"""One NorMuon step over the matrices of a model of 0.6 billion parameters, and its products alone.

Operations are those of the products: of a matrix with a rows or columns, whichever are fewer, and b
of the others, five times 4 a^2 b + 2 a^3.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.harness import Case
from bench.inputs import cupy, random
from surogate.kernels.adamw import adamw_scalars
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.normuon import (
    POLAR_EXPRESS,
    NorMuonLeaf,
    NorMuonSettings,
    normuon_step_,
    normuon_table,
    polar_express_,
)

SETTINGS = NorMuonSettings(weight_decay=0.1, cautious=True)
# q, k, v, o, gate, up, down of a layer
LAYER = [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048), *[(3072, 1024)] * 2, (1024, 3072)]
LARGE = (12288, 4096)  # gate or up of a model of 8 billion


def flops(shapes: Sequence[tuple[int, int]]) -> int:
    """Of the products of all matrices."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    return len(POLAR_EXPRESS) * sum(4 * a * a * b + 2 * a**3 for a, b in sides)


def step(shapes: Sequence[tuple[int, int]], moment: np.dtype) -> Callable[[], object]:
    """A whole step in the middle of a run, of bf16 matrices without masters."""

    def leaf(index: int, shape: tuple[int, int]) -> NorMuonLeaf:
        m = cupy.random.standard_normal(shape, dtype="f4").astype(moment)
        v = cupy.full(shape[0], 1 / shape[1], "f4")
        return NorMuonLeaf(random(*shape), random(*shape), m, v, tensor=index)

    scalars = cupy.asarray(adamw_scalars(lr=1e-4, step=10, beta1=0.9, beta2=0.999))
    norm: Any = cupy.asarray([1, 1e-3, 1], "f4")
    table = normuon_table([leaf(index, shape) for index, shape in enumerate(shapes)])
    return lambda: normuon_step_(table, scalars, norm, settings=SETTINGS, zero_grad=True)


def products(shape: tuple[int, int]) -> Callable[[], object]:
    """Polar Express of one matrix, which is copied, as it is scratch."""
    x = cupy.random.standard_normal(shape, dtype="f4")
    x = (x / (1.02 * cupy.linalg.norm(x))).astype(BF16)
    return lambda: polar_express_(x.copy())


def cases() -> Iterator[Case]:
    """Products of single matrices, and whole steps."""
    for shape in (*dict.fromkeys(LAYER), LARGE):
        name = f"polar express {shape[0]} x {shape[1]}"
        yield Case(name, partial(products, shape), flops=flops([shape]))
    for moment in (F32, BF16):
        name = f"normuon 0.6B, {moment} momentum"
        yield Case(name, partial(step, LAYER * 28, moment), flops=flops(LAYER * 28))
