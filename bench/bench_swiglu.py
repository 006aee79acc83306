"""SwiGLU. Bytes are one read of each input and one write of each output."""

from collections.abc import Callable, Iterator

from bench.bench_fp8 import slot_of
from bench.harness import Case
from bench.inputs import random, rotated
from surogate.kernels.fp8 import E4M3, E5M2, Cast
from surogate.kernels.swiglu import SwiGLUResiduals, swiglu_bwd, swiglu_bwd_, swiglu_fwd

TOKENS = (4096, 32768)
FFN = (3072, 4864, 12288)  # Qwen3-0.6B, Qwen2.5-0.5B, Qwen3-8B
CAST = (4096, 12288)  # the shape that is also tried with casts of y and of d_gate_up


def cases() -> Iterator[Case]:
    """MLP widths of small and large models, from small to large micro-batches."""
    for ffn in FFN:
        for tokens in TOKENS:
            yield from pair_cases(tokens, ffn)
    yield from cast_cases(*CAST)


def pair_cases(tokens: int, ffn: int) -> Iterator[Case]:
    """Forward, backward, backward with the output once more, and backward in place."""
    name, size = f"{tokens} x {ffn}", 2 * tokens * ffn

    def forward() -> Callable[[], object]:
        gate_up = random(tokens, 2 * ffn)
        return lambda: swiglu_fwd(gate_up)

    def backward(run: Callable, recompute: bool) -> Callable[[], object]:
        res, dy = SwiGLUResiduals(random(tokens, 2 * ffn)), random(tokens, ffn)
        return lambda: run(res, dy, recompute=recompute)

    yield Case(f"swiglu_fwd {name}", rotated(forward, 2 * size), bytes=3 * size)
    for title, run, recompute in (
        ("swiglu_bwd", swiglu_bwd, False),
        ("swiglu_bwd and y", swiglu_bwd, True),
        ("swiglu_bwd_", swiglu_bwd_, False),
    ):
        yield Case(
            f"{title} {name}",
            rotated(lambda run=run, recompute=recompute: backward(run, recompute), 3 * size),
            bytes=(5 + recompute) * size,
        )


def cast_cases(tokens: int, ffn: int) -> Iterator[Case]:
    """Forward and backward that also write the codes of what they make."""
    name, size = f"{tokens} x {ffn}", tokens * ffn

    def forward() -> Callable[[], object]:
        gate_up = random(tokens, 2 * ffn)
        cast = Cast.begin(slot_of(E4M3), (tokens, ffn), like=gate_up)
        return lambda: swiglu_fwd(gate_up, cast=cast)

    def backward() -> Callable[[], object]:
        res, dy = SwiGLUResiduals(random(tokens, 2 * ffn)), random(tokens, ffn)
        cast = Cast.begin(slot_of(E5M2), (tokens, 2 * ffn), like=dy)
        return lambda: swiglu_bwd(res, dy, cast=cast)

    yield Case(f"swiglu_fwd and codes {name}", rotated(forward, 4 * size), bytes=7 * size)
    yield Case(f"swiglu_bwd and codes {name}", rotated(backward, 6 * size), bytes=12 * size)
