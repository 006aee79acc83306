"""Arguments of cases: random arrays, copies that no cache holds, and lengths of documents."""

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from surogate.kernels.arrays import BF16

COLD = 128 << 20  # bytes of arguments that no L2 cache holds
SHORTEST = 8  # tokens of a document


class Late:
    """A module that is imported when a name of it is first used: cases are listed without CuPy."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


cupy: Any = Late("cupy")


def random(*shape: int) -> Any:
    """Standard normal bf16 on the card: a product of zeros would run at a clock that no training
    sees.
    """
    return cupy.random.standard_normal(shape, dtype="f4").astype(BF16)


def rotated(
    build: Callable[..., Callable[[], object]],
    size: int,
    *,
    shared: Callable[[], object] | None = None,
) -> Callable[[], Any]:
    """Builds a call that takes other arguments each time.

    ``build`` makes a call with arguments of ``size`` bytes; as many are made as no cache holds.
    It is given what ``shared`` makes, once, for all of them: weights and tables, which a step reads
    again and again.
    """

    def build_all() -> Callable[[], object]:
        given = () if shared is None else (shared(),)
        calls = itertools.cycle([build(*given) for _ in range(-(-COLD // size))])
        return lambda: next(calls)()

    return build_all


def packed_lengths(tokens: int, mean: int, rng: np.random.Generator) -> list[int]:
    """Document lengths that fill ``tokens``: they fall off exponentially around a mean."""
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(int(min(max(SHORTEST, rng.exponential(mean)), left)))
        left -= lengths[-1]
    return lengths
