"""Every matrix product of the published models: forward and both gradients, at a micro-batch.

A layer's weights are the fused ones that linear takes (qkv, o, gate and up, down), a weight's
gradient is added to a bf16 buffer as accumulation does, and the head works on as many tokens as the
loss takes at a time. Models that share a shape share its cases.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.harness import Case
from bench.inputs import cupy, random
from surogate.kernels.lm_head import default_chunk
from surogate.kernels.matmul import matmul
from surogate.models.config import parameter_shapes
from surogate.models.registry import MODELS, lookup

TOKENS = 4096


class Shape(NamedTuple):
    """A weight, the tokens it meets, and where it stands ("Qwen3-8B qkv")."""

    tokens: int
    inner: int
    outer: int
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        """tokens x inner x outer, and the first place."""
        return f"{self.tokens} x {self.inner} x {self.outer}, {self.places[0]}"


def shapes() -> list[Shape]:
    """Each distinct shape once, models in the registry's order."""
    places: dict[tuple[int, int, int], list[str]] = {}
    for full in MODELS:
        config = lookup(full)
        layer = parameter_shapes(config).layers[0]
        chunk = default_chunk(TOKENS, config.vocab, 2)
        for name, tokens, (outer, inner) in (
            ("qkv", TOKENS, layer.w_qkv),
            ("o", TOKENS, layer.w_o),
            ("gate up", TOKENS, layer.w_gate_up),
            ("down", TOKENS, layer.w_down),
            ("head", chunk, (config.vocab, config.hidden)),
        ):
            place = f"{full.split('/')[1]} {name}"
            places.setdefault((tokens, inner, outer), []).append(place)
    return [Shape(*size, tuple(names)) for size, names in places.items()]


def cases() -> Iterator[Case]:
    """y, dx and dweight of every shape."""
    for shape in shapes():
        yield from shape_cases(shape)


def shape_cases(shape: Shape) -> Iterator[Case]:
    """y = x W^T, dx = dy W, and dW += dy^T x."""
    tokens, inner, outer, _ = shape
    flops = 2 * tokens * inner * outer

    def forward() -> Callable[[], object]:
        x, weight, y = random(tokens, inner), random(outer, inner), random(tokens, outer)
        return lambda: matmul(x, weight, transpose_b=True, out=y)

    def data_gradient() -> Callable[[], object]:
        dy, weight, dx = random(tokens, outer), random(outer, inner), random(tokens, inner)
        return lambda: matmul(dy, weight, out=dx)

    def weight_gradient() -> Callable[[], object]:
        dy, x = random(tokens, outer), random(tokens, inner)
        held = cupy.zeros((outer, inner), x.dtype)
        return lambda: matmul(dy, x, transpose_a=True, out=held, accumulate=True)

    yield Case(f"{shape.name} y", forward, flops=flops)
    yield Case(f"{shape.name} dx", data_gradient, flops=flops)
    yield Case(f"{shape.name} dweight", weight_gradient, flops=flops)
