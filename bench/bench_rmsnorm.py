"""RMSNorm alone and with the residual stream.

Bytes are one read of each input and one write of each output.
"""

import itertools
from collections.abc import Callable, Iterator

import cupy

from bench.harness import Case
from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.rmsnorm import add_rmsnorm_bwd, add_rmsnorm_fwd, rmsnorm_bwd, rmsnorm_fwd

TOKENS = (4096, 8192, 32768)
HIDDEN = (896, 1024, 2560, 4096, 5120, 8192)
COLD = 128 << 20  # bytes of arguments that no L2 cache holds
EPS = 1e-6


def random(*shape: int) -> cupy.ndarray:
    """Standard normal bfloat16."""
    return cupy.random.standard_normal(shape, dtype="f4").astype(BF16)


def rotated(build: Callable[[], Callable[[], object]], size: int) -> Callable[[], object]:
    """A call that takes other arguments each time.

    ``build`` makes a call with arguments of ``size`` bytes; as many are made as no cache holds.
    """
    calls = itertools.cycle([build() for _ in range(-(-COLD // size))])
    return lambda: next(calls)()


def cases() -> Iterator[Case]:
    """Hidden sizes from 0.5 to 70 billion parameters, from small to large micro-batches."""
    for hidden in HIDDEN:
        for tokens in TOKENS:
            yield from pair_cases(tokens, hidden)


def pair_cases(tokens: int, hidden: int) -> Iterator[Case]:
    """Forward and backward, each with and without the residual stream."""
    weight, shape, size = random(hidden), (tokens, hidden), 2 * tokens * hidden
    name = f"{tokens} x {hidden}"

    def plain() -> Callable[[], object]:
        x = random(*shape)
        return lambda: rmsnorm_fwd(x, weight, eps=EPS)

    def added() -> Callable[[], object]:
        x, residual = random(*shape), random(*shape)
        return lambda: add_rmsnorm_fwd(x, residual, weight, eps=EPS)

    def plain_backward(into: object = None) -> Callable[[], object]:
        dy = random(*shape)
        _, res = rmsnorm_fwd(random(*shape), weight, eps=EPS)
        return lambda: rmsnorm_bwd(res, dy, into=into)

    def added_backward() -> Callable[[], object]:
        dy, dh = random(*shape), random(*shape)
        _, res = add_rmsnorm_fwd(random(*shape), dh, weight, eps=EPS)
        return lambda: add_rmsnorm_bwd(res, dy, dh)

    yield Case(f"rmsnorm_fwd {name}", rotated(plain, size), bytes=2 * size)
    yield Case(f"add_rmsnorm_fwd {name}", rotated(added, 2 * size), bytes=4 * size)
    yield Case(f"rmsnorm_bwd {name}", rotated(plain_backward, 2 * size), bytes=3 * size)
    yield Case(
        f"rmsnorm_bwd {name}, frozen weight",
        rotated(lambda: plain_backward(FROZEN), 2 * size),
        bytes=3 * size,
    )
    yield Case(f"add_rmsnorm_bwd {name}", rotated(added_backward, 3 * size), bytes=4 * size)
