"""Linear with an adapter beside a frozen weight, as two products: forward and backward.

FLOPs are those of the weight's products alone. bench_widened.py has the same as one product.
"""

from collections.abc import Callable, Iterator

from bench.harness import Case
from bench.inputs import cupy, random
from surogate.kernels.arrays import FROZEN
from surogate.kernels.linear import LinearInto, LoRA, linear_bwd, linear_fwd

TOKENS, RANK = 4096, 16
# name: inner, outer, and the parts that adapters take
WEIGHTS = {
    "0.6B qkv": (1024, 4096, ((0, 2048), (2048, 3072), (3072, 4096))),
    "0.6B o": (2048, 1024, ((0, 1024),)),
    "0.6B gate up": (1024, 6144, ((0, 3072), (3072, 6144))),
    "0.6B down": (3072, 1024, ((0, 1024),)),
    "8B qkv": (4096, 6144, ((0, 4096), (4096, 5120), (5120, 6144))),
    "8B o": (4096, 4096, ((0, 4096),)),
    "8B gate up": (4096, 24576, ((0, 12288), (12288, 24576))),
    "8B down": (12288, 4096, ((0, 4096),)),
}


def cases() -> Iterator[Case]:
    """Weights of a small and of a large model."""
    for name, (inner, outer, parts) in WEIGHTS.items():
        yield from weight_cases(name, inner, outer, parts)


def adapter(inner: int, outer: int, parts: tuple[tuple[int, int], ...]) -> LoRA:
    """Random A and B of every part."""
    return LoRA(random(len(parts) * RANK, inner), random(outer, RANK))


def into_buffers(lora: LoRA) -> LinearInto:
    """A frozen weight, and float32 buffers for the adapter's gradient."""
    return LinearInto(FROZEN, None, LoRA(*(cupy.zeros(each.shape, "f4") for each in lora)))


def weight_cases(
    name: str, inner: int, outer: int, parts: tuple[tuple[int, int], ...]
) -> Iterator[Case]:
    """Forward, and backward with a frozen weight."""
    flops = 2 * TOKENS * inner * outer

    def forward() -> Callable[[], object]:
        x, weight, lora = random(TOKENS, inner), random(outer, inner), adapter(inner, outer, parts)
        return lambda: linear_fwd(x, weight, None, lora, parts=parts)

    def backward() -> Callable[[], object]:
        x, weight, lora = random(TOKENS, inner), random(outer, inner), adapter(inner, outer, parts)
        _, res = linear_fwd(x, weight, None, lora, parts=parts)
        dy, into = random(TOKENS, outer), into_buffers(lora)
        return lambda: linear_bwd(res, dy, into=into)

    yield Case(f"linear_fwd {name}, rank {RANK}", forward, flops=flops)
    yield Case(f"linear_bwd {name}, rank {RANK}", backward, flops=flops)
