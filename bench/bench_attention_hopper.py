"""Attention on Hopper beside the mma kernels of every card. FLOPs are those of the causal cells.

Backward's gradients need five products a cell, though the kernels here make seven: three in dq,
four in dkdv.
"""

from collections.abc import Callable, Iterator
from types import ModuleType

from bench.bench_attention import HEADS, SCALE, Layer, flops, rows
from bench.harness import Case, Unsupported
from bench.inputs import cupy
from surogate.kernels import attention_hopper, attention_mma
from surogate.kernels.attention import AttentionResiduals

BACKENDS: dict[str, ModuleType] = {
    "attention_hopper": attention_hopper,
    "attention_mma": attention_mma,
}


def cases() -> Iterator[Case]:
    """Forward and backward of each row by both, and the two parts of the backward."""
    for name, lengths in rows().items():
        for backend in BACKENDS:
            yield from pair_cases(backend, name, lengths)
        yield from part_cases(name, lengths)


def residuals(backend: str, lengths: list[int]) -> tuple[Layer, AttentionResiduals]:
    """A layer of the small model after its forward."""
    made = Layer.of(lengths, *HEADS["0.6B"])
    if backend == "attention_hopper" and not attention_hopper.supported(made.q):
        raise Unsupported("needs an sm_90 card")
    q, k, v, _, docs = made
    o, lse = BACKENDS[backend].forward(q, k, v, None, docs, SCALE, None)
    return made, AttentionResiduals(q, k, v, None, o, lse, docs, SCALE, None, None)


def pair_cases(backend: str, name: str, lengths: list[int]) -> Iterator[Case]:
    """Forward and backward."""

    def forward() -> Callable[[], object]:
        (q, k, v, _, docs), _ = residuals(backend, lengths)
        return lambda: BACKENDS[backend].forward(q, k, v, None, docs, SCALE, None)

    def backward() -> Callable[[], object]:
        made, res = residuals(backend, lengths)
        grads = made.gradients()
        return lambda: BACKENDS[backend].backward(res, made.do, *grads)

    work = flops(lengths, HEADS["0.6B"][0])
    yield Case(f"{backend}_fwd {name}", forward, flops=work)
    yield Case(f"{backend}_bwd {name}", backward, flops=work * 5 // 2)


def part_cases(name: str, lengths: list[int]) -> Iterator[Case]:
    """dq, and dk with dv."""

    def dq() -> Callable[[], object]:
        made, res = residuals("attention_hopper", lengths)
        grads = made.gradients()
        stats = attention_hopper.backward(res, made.do, *grads)
        return lambda: attention_hopper.launch_dq(
            res, made.do, grads[0], stats, cupy.zeros(1, "i4")
        )

    def dkdv() -> Callable[[], object]:
        made, res = residuals("attention_hopper", lengths)
        grads = made.gradients()
        stats = attention_hopper.backward(res, made.do, *grads)
        return lambda: attention_hopper.launch_dkdv(
            res, made.do, *grads[1:], stats, cupy.zeros(1, "i4")
        )

    work = flops(lengths, HEADS["0.6B"][0])
    yield Case(f"attention_hopper_bwd {name}, dq", dq, flops=work * 3 // 2)
    yield Case(f"attention_hopper_bwd {name}, dkdv", dkdv, flops=work * 2)
