"""Adapters inside their weights' arrays: linear as one product, and the refresh of a whole model.

FLOPs are those of the weight's products alone, as in bench_linear.py, whose cases are the same on
plain weights. Bytes are one read of every A and B and one write of every block.
"""

from collections.abc import Callable, Iterator
from typing import Any

from bench.bench_linear import RANK, TOKENS, WEIGHTS, adapter, into_buffers
from bench.harness import Case
from bench.inputs import random
from surogate.kernels.linear import LoRA, linear_bwd, linear_fwd
from surogate.kernels.widened import Adapted, Refresh, Widened, with_room

LAYERS, SCALE = 28, 2.0
Parts = tuple[tuple[int, int], ...]


def cases() -> Iterator[Case]:
    """Every weight with room on both sides; then all layers' refresh at once."""
    for name, (inner, outer, parts) in WEIGHTS.items():
        yield from product_cases(name, inner, outer, parts)
    for size in ("0.6B", "8B"):
        yield refresh_case(size)


def adapted(inner: int, outer: int, parts: Parts) -> Adapted:
    """A weight of random values with its adapter."""
    a, b = adapter(inner, outer, parts)
    return Adapted(Widened.of(random(outer, inner), len(a)), a, b, parts)


def product_cases(name: str, inner: int, outer: int, parts: Parts) -> Iterator[Case]:
    """Forward, and backward with a frozen weight."""
    flops = 2 * TOKENS * inner * outer

    def forward() -> Callable[[], object]:
        weight, x, lora = layer(inner, outer, parts)
        return lambda: linear_fwd(x, weight, None, lora, parts=parts, scale=SCALE)

    def backward() -> Callable[[], object]:
        weight, x, lora = layer(inner, outer, parts)
        _, res = linear_fwd(x, weight, None, lora, parts=parts, scale=SCALE)
        dy, into = roomy(random(TOKENS, outer), weight), into_buffers(lora)
        return lambda: linear_bwd(res, dy, into=into)

    yield Case(f"widened_fwd {name}, rank {RANK}", forward, flops=flops)
    yield Case(f"widened_bwd {name}, rank {RANK}", backward, flops=flops)


def layer(inner: int, outer: int, parts: Parts) -> tuple:
    """A refreshed weight, an x with room, and the adapter."""
    made = adapted(inner, outer, parts)
    Refresh([made], SCALE).launch_()
    x = roomy(random(TOKENS, inner), made.weight)
    return made.weight, x, LoRA(made.a, made.b)


def roomy(x: Any, weight: Any) -> Any:
    """A copy of x with room for a product with the weight."""
    out = with_room(x, x.shape[1], weight)
    out[...] = x
    return out


def refresh_case(size: str) -> Case:
    """The blocks of 28 layers of a model's size."""
    weights = [shape for name, shape in WEIGHTS.items() if name.startswith(size)]
    elements = sum(RANK * (len(parts) * inner + outer) for inner, outer, parts in weights)

    def build() -> Callable[[], object]:
        made = [adapted(*shape) for shape in weights for _ in range(LAYERS)]
        return Refresh(made, SCALE).launch_

    return Case(f"refresh {size}, {LAYERS} layers", build, bytes=2 * 2 * LAYERS * elements)
