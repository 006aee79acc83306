"""Adapters beside their weights: linear with and without room, and the refresh of a whole model.

FLOPs are those of the weight's products alone, as in bench_matmul, whose adapter cases are the same
products on plain weights. Bytes are one read of every A and B and one write of every block.
"""

from collections.abc import Iterator

import cupy

from bench.bench_matmul import RANK, TOKENS, WEIGHTS, random
from bench.harness import Case
from surogate.kernels.arrays import FROZEN
from surogate.kernels.linear import LinearInto, LoRA, linear_bwd, linear_fwd
from surogate.kernels.widened import Adapted, Refresh, Widened, with_room

LAYERS = 28


def cases() -> Iterator[Case]:
    """Every weight with room on both sides and on neither; then all layers' refresh at once."""
    for name, (inner, outer, parts) in WEIGHTS.items():
        yield from product_cases(name, inner, outer, parts or ((0, outer),))
    for size in ("0.6B", "8B"):
        yield refresh_case(size)


def adapted(inner: int, outer: int, parts: tuple[tuple[int, int], ...]) -> Adapted:
    """A weight of random values with its adapter."""
    a, b = random(len(parts) * RANK, inner), random(outer, RANK)
    return Adapted(Widened.of(random(outer, inner), len(a)), a, b, parts)


def product_cases(
    name: str, inner: int, outer: int, parts: tuple[tuple[int, int], ...]
) -> Iterator[Case]:
    """Forward, and backward with a frozen weight."""
    weight, *pair, _ = made = adapted(inner, outer, parts)
    Refresh([made], 2.0).launch_()
    lora = LoRA(*pair)
    into = LinearInto(FROZEN, None, LoRA(*(cupy.zeros(each.shape, "f4") for each in lora)))
    flops = 2 * TOKENS * inner * outer
    for title, room in (("with room", True), ("without room", False)):
        x, dy = random(TOKENS, inner), random(TOKENS, outer)
        if room:
            x, dy = roomy(x, weight), roomy(dy, weight)
        _, res = linear_fwd(x, weight, None, lora, parts=parts, scale=2.0)

        def forward(x=x) -> None:
            linear_fwd(x, weight, None, lora, parts=parts, scale=2.0)

        def backward(res=res, dy=dy) -> None:
            linear_bwd(res, dy, into=into)

        yield Case(f"widened {name} fwd {title}", forward, flops=flops)
        yield Case(f"widened {name} bwd {title}", backward, flops=flops)


def roomy(x: cupy.ndarray, weight: Widened) -> cupy.ndarray:
    """A copy of x with room for a product with the weight."""
    out = with_room(x, x.shape[1], weight)
    out[...] = x
    return out


def refresh_case(size: str) -> Case:
    """The blocks of 28 layers of a model's size."""
    made = [
        adapted(inner, outer, parts or ((0, outer),))
        for name, (inner, outer, parts) in WEIGHTS.items()
        if name.startswith(size)
        for _ in range(LAYERS)
    ]
    moved = 2 * sum(each.a.nbytes + each.b.nbytes for each in made)
    return Case(f"refresh {size}, {LAYERS} layers", Refresh(made, 2.0).launch_, bytes=moved)
