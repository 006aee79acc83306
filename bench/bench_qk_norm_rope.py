"""Norm and rotation of queries and keys.

Bytes are one read and one write of q and k; with a norm, the backward also reads what came before.
"""

from collections.abc import Callable, Iterator
from typing import Any

from bench.bench_rope import settings
from bench.harness import Case
from bench.inputs import random, rotated
from surogate.kernels.arrays import FROZEN
from surogate.kernels.qk_norm_rope import (
    qk_norm_rope_bwd_,
    qk_norm_rope_fwd,
    qk_norm_rope_fwd_,
)

SHAPES = [  # tokens of a micro-batch, heads, kv_heads, head_dim, norm
    (4096, 16, 8, 128, True),  # Qwen3-0.6B and 1.7B
    (16384, 16, 8, 128, True),
    (4096, 32, 8, 128, True),  # Qwen3-8B
    (32768, 32, 8, 128, True),
    (32768, 14, 2, 64, False),  # Qwen2.5-0.5B
    (32768, 12, 2, 128, False),  # Qwen2.5-1.5B
    (4096, 32, 8, 128, False),  # Llama 3.1 8B
    (8192, 64, 8, 128, True),  # Qwen3-32B
]


def cases() -> Iterator[Case]:
    """Head counts of small and large models."""
    for shape in SHAPES:
        yield from pair_cases(*shape)


def pair_cases(tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool) -> Iterator[Case]:
    """Forward (without a norm in place too), and the backward in place on a packed gradient, with
    the norms' own gradients and with frozen norms.
    """
    shape = (tokens, heads + 2 * kv_heads, head_dim)
    size = 2 * tokens * (heads + kv_heads) * head_dim
    name = f"{tokens} x {heads}/{kv_heads} x {head_dim}" + (", norm" if norm else "")

    def shared() -> tuple:
        given = settings(tokens, head_dim) | {"heads": heads, "kv_heads": kv_heads}
        return (random(head_dim), random(head_dim)) if norm else (None, None), given

    def forward(shared: tuple) -> Callable[[], object]:
        (weights, given), qkv = shared, random(*shape)
        return lambda: qk_norm_rope_fwd(qkv, *weights, **given)

    def forward_in_place(shared: tuple) -> Callable[[], object]:
        (_, given), qkv = shared, random(*shape)
        return lambda: qk_norm_rope_fwd_(qkv, **given)

    def backward(shared: tuple, into: Any = None) -> Callable[[], object]:
        weights, given = shared
        _, res = qk_norm_rope_fwd(random(*shape), *weights, **given)
        grads = random(*shape)
        return lambda: qk_norm_rope_bwd_(res, grads, into=into)

    def frozen(shared: tuple) -> Callable[[], object]:
        return backward(shared, FROZEN)

    for title, build, moved in (
        ("qk_norm_rope_fwd", forward, 2),
        *((("qk_norm_rope_fwd_", forward_in_place, 2),) if not norm else ()),
        ("qk_norm_rope_bwd_", backward, 2 + norm),
        *((("qk_norm_rope_bwd_, frozen norms,", frozen, 3),) if norm else ()),
    ):
        yield Case(f"{title} {name}", rotated(build, size, shared=shared), bytes=moved * size)
