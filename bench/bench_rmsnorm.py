"""RMSNorm alone and with the residual stream.

Bytes are one read of each input and one write of each output.
"""

from collections.abc import Callable, Iterator
from typing import Any

from bench.harness import Case
from bench.inputs import random, rotated
from surogate.kernels.arrays import FROZEN
from surogate.kernels.rmsnorm import add_rmsnorm_bwd, add_rmsnorm_fwd, rmsnorm_bwd, rmsnorm_fwd

TOKENS = (4096, 8192, 32768)
HIDDEN = (896, 1024, 2560, 4096, 5120, 8192)
EPS = 1e-6


def cases() -> Iterator[Case]:
    """Hidden sizes from 0.5 to 70 billion parameters, from small to large micro-batches."""
    for hidden in HIDDEN:
        for tokens in TOKENS:
            yield from pair_cases(tokens, hidden)


def pair_cases(tokens: int, hidden: int) -> Iterator[Case]:
    """Forward and backward, each with and without the residual stream."""
    shape, size = (tokens, hidden), 2 * tokens * hidden
    name = f"{tokens} x {hidden}"

    def weight() -> Any:
        return random(hidden)

    def plain(weight: Any) -> Callable[[], object]:
        x = random(*shape)
        return lambda: rmsnorm_fwd(x, weight, eps=EPS)

    def added(weight: Any) -> Callable[[], object]:
        x, residual = random(*shape), random(*shape)
        return lambda: add_rmsnorm_fwd(x, residual, weight, eps=EPS)

    def plain_backward(weight: Any, into: Any = None) -> Callable[[], object]:
        dy = random(*shape)
        _, res = rmsnorm_fwd(random(*shape), weight, eps=EPS)
        return lambda: rmsnorm_bwd(res, dy, into=into)

    def added_backward(weight: Any) -> Callable[[], object]:
        dy, dh = random(*shape), random(*shape)
        _, res = add_rmsnorm_fwd(random(*shape), dh, weight, eps=EPS)
        return lambda: add_rmsnorm_bwd(res, dy, dh)

    def frozen(weight: Any) -> Callable[[], object]:
        return plain_backward(weight, FROZEN)

    for title, build, read, moved in (
        (f"rmsnorm_fwd {name}", plain, 1, 2),
        (f"add_rmsnorm_fwd {name}", added, 2, 4),
        (f"rmsnorm_bwd {name}", plain_backward, 2, 3),
        (f"rmsnorm_bwd {name}, frozen weight", frozen, 2, 3),
        (f"add_rmsnorm_bwd {name}", added_backward, 3, 4),
    ):
        yield Case(title, rotated(build, read * size, shared=weight), bytes=moved * size)
