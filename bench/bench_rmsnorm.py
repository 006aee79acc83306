"""RMSNorm alone and with the residual stream.

Bytes are one read of each input and one write of each output.
"""

from collections.abc import Callable, Iterator
from typing import Any

from bench.bench_fp8 import slot_of
from bench.harness import Case
from bench.inputs import random, rotated
from surogate.kernels.arrays import FROZEN
from surogate.kernels.fp8 import E4M3, Cast
from surogate.kernels.rmsnorm import add_rmsnorm_bwd, add_rmsnorm_fwd, rmsnorm_bwd, rmsnorm_fwd

SHAPES = [  # tokens of a micro-batch, hidden size; those of the training steps first (rows.py)
    (4096, 1024),
    (4096, 2048),
    (4096, 4096),
    (16384, 1024),
    (32768, 896),
    (32768, 1536),
    (8192, 5120),
    (8192, 8192),
]
CAST = (4096, 4096)  # the shape that is also tried with a cast of y
EPS = 1e-6


def cases() -> Iterator[Case]:
    """Hidden sizes from 0.5 to 70 billion parameters."""
    for shape in SHAPES:
        yield from pair_cases(*shape)
    yield cast_case(*CAST)


def pair_cases(tokens: int, hidden: int) -> Iterator[Case]:
    """Forward and backward, each with and without the residual stream; adapters are trained with
    frozen norms.
    """
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

    def added_backward(weight: Any, into: Any = None) -> Callable[[], object]:
        dy, dh = random(*shape), random(*shape)
        _, res = add_rmsnorm_fwd(random(*shape), dh, weight, eps=EPS)
        return lambda: add_rmsnorm_bwd(res, dy, dh, into=into)

    def frozen(weight: Any) -> Callable[[], object]:
        return added_backward(weight, FROZEN)

    for title, build, read, moved in (
        (f"rmsnorm_fwd {name}", plain, 1, 2),
        (f"add_rmsnorm_fwd {name}", added, 2, 4),
        (f"rmsnorm_bwd {name}", plain_backward, 2, 3),
        (f"add_rmsnorm_bwd {name}", added_backward, 3, 4),
        (f"add_rmsnorm_bwd {name}, frozen weight", frozen, 3, 4),
    ):
        yield Case(title, rotated(build, read * size, shared=weight), bytes=moved * size)


def cast_case(tokens: int, hidden: int) -> Case:
    """Forward that also writes the codes of y."""
    size = tokens * hidden

    def build(weight: Any) -> Callable[[], object]:
        x, slot = random(tokens, hidden), slot_of(E4M3)
        cast = Cast.begin(slot, x.shape, like=x)
        return lambda: rmsnorm_fwd(x, weight, eps=EPS, cast=cast)

    rotating = rotated(build, 2 * size, shared=lambda: random(hidden))
    return Case(f"rmsnorm_fwd and codes {tokens} x {hidden}", rotating, bytes=5 * size)
