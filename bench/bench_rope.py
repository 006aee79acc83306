"""Rotary positions of heads. Bytes are one read and one write."""

from collections.abc import Callable, Iterator

import cupy

from bench.bench_rmsnorm import random, rotated
from bench.harness import Case
from surogate.kernels.rope import RopeTable, rope_bwd, rope_frequencies, rope_fwd, rope_table

TOKENS = (4096, 8192, 32768)
HEADS = [(14, 64), (16, 128), (64, 128)]  # heads, head_dim


def settings(tokens: int, rotary: int) -> dict:
    """A table of 4096 positions and rows of 4096 tokens."""
    table = rope_table(*rope_frequencies(rotary, base=1e6), positions=4096)
    positions = cupy.arange(tokens, dtype=cupy.int32) % 4096
    return {"table": RopeTable(*map(cupy.asarray, table)), "positions": positions}


def cases() -> Iterator[Case]:
    """The queries of small and large models."""
    for heads, head_dim in HEADS:
        for tokens in TOKENS:
            shape, size = (tokens, heads, head_dim), 2 * tokens * heads * head_dim
            given, name = settings(tokens, head_dim), f"{tokens} x {heads} x {head_dim}"

            def forward(shape: tuple = shape, given: dict = given) -> Callable[[], object]:
                x = random(*shape)
                return lambda: rope_fwd(x, **given)

            def backward(shape: tuple = shape, given: dict = given) -> Callable[[], object]:
                x, dy = random(*shape), random(*shape)
                _, res = rope_fwd(x, **given)
                return lambda: rope_bwd(res, dy)

            yield Case(f"rope_fwd {name}", rotated(forward, size), bytes=2 * size)
            yield Case(f"rope_bwd {name}", rotated(backward, size), bytes=2 * size)
