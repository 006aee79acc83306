"""Products of a dense model's layers, forward and both gradients, and of its adapters.

Weights are the fused ones that linear takes; a micro-batch is of 16384 tokens. A weight's gradient
is added to a float32 or a bfloat16 buffer, as accumulation does. Adapter cases time all of linear.
"""

from collections.abc import Iterator

import cupy

from bench.harness import Case
from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.linear import LinearInto, LoRA, linear_bwd, linear_fwd
from surogate.kernels.matmul import matmul

TOKENS = 16384
# name: inner, outer, and the parts that adapters take
WEIGHTS = {
    "0.6B qkv": (1024, 4096, ((0, 2048), (2048, 3072), (3072, 4096))),
    "0.6B o": (2048, 1024, ()),
    "0.6B gate up": (1024, 6144, ((0, 3072), (3072, 6144))),
    "0.6B down": (3072, 1024, ()),
    "8B qkv": (4096, 6144, ((0, 4096), (4096, 5120), (5120, 6144))),
    "8B o": (4096, 4096, ()),
    "8B gate up": (4096, 24576, ((0, 12288), (12288, 24576))),
    "8B down": (12288, 4096, ()),
}
RANK = 16


def random(*shape: int) -> cupy.ndarray:
    """Normal bf16 numbers: a product of zeros would run at a clock that no training sees."""
    return cupy.random.standard_normal(shape, dtype="f4").astype(BF16)


def cases() -> Iterator[Case]:
    """Every weight: y, dx, dweight into both buffers, then forward and backward with an adapter."""
    for name, (inner, outer, parts) in WEIGHTS.items():
        x, weight, dy = random(TOKENS, inner), random(outer, inner), random(TOKENS, outer)
        y, dx = cupy.empty_like(dy), cupy.empty_like(x)
        flops = 2 * TOKENS * inner * outer

        def forward(x=x, weight=weight, y=y) -> None:
            matmul(x, weight, transpose_b=True, out=y)

        def data_gradient(dy=dy, weight=weight, dx=dx) -> None:
            matmul(dy, weight, out=dx)

        yield Case(f"matmul {name} y", forward, flops=flops)
        yield Case(f"matmul {name} dx", data_gradient, flops=flops)
        for dtype in ("float32", "bfloat16"):
            held = cupy.zeros((outer, inner), BF16 if dtype == "bfloat16" else dtype)

            def weight_gradient(dy=dy, x=x, held=held) -> None:
                matmul(dy, x, transpose_a=True, out=held, accumulate=True)

            yield Case(f"matmul {name} dweight into {dtype}", weight_gradient, flops=flops)
        yield from adapter_cases(name, x, weight, dy, parts or ((0, outer),))


def adapter_cases(
    name: str,
    x: cupy.ndarray,
    weight: cupy.ndarray,
    dy: cupy.ndarray,
    parts: tuple[tuple[int, int], ...],
) -> Iterator[Case]:
    """A frozen weight with an adapter; FLOPs are those of the weight's products alone."""
    lora = LoRA(random(len(parts) * RANK, x.shape[1]), random(dy.shape[1], RANK))
    held = LoRA(*(cupy.zeros(each.shape, "f4") for each in lora))
    into = LinearInto(FROZEN, None, held)
    _, res = linear_fwd(x, weight, None, lora, parts=parts)
    flops = 2 * len(x) * weight.size

    def forward() -> None:
        linear_fwd(x, weight, None, lora, parts=parts)

    def backward() -> None:
        linear_bwd(res, dy, into=into)

    yield Case(f"linear {name} forward, rank {RANK}", forward, flops=flops)
    yield Case(f"linear {name} backward, rank {RANK}", backward, flops=flops)
