"""Rotary positions of heads. Bytes are one read and one write."""

from collections.abc import Callable, Iterator

from bench.harness import Case
from bench.inputs import cupy, random, rotated
from surogate.kernels.rope import RopeTable, rope_bwd, rope_frequencies, rope_fwd, rope_table

TOKENS = (4096, 32768)
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
            yield from pair_cases(tokens, heads, head_dim)


def pair_cases(tokens: int, heads: int, head_dim: int) -> Iterator[Case]:
    """Forward and backward."""
    shape, size = (tokens, heads, head_dim), 2 * tokens * heads * head_dim
    name = f"{tokens} x {heads} x {head_dim}"

    def given() -> dict:
        return settings(tokens, head_dim)

    def forward(given: dict) -> Callable[[], object]:
        x = random(*shape)
        return lambda: rope_fwd(x, **given)

    def backward(given: dict) -> Callable[[], object]:
        dy = random(*shape)
        _, res = rope_fwd(random(*shape), **given)
        return lambda: rope_bwd(res, dy)

    yield Case(f"rope_fwd {name}", rotated(forward, size, shared=given), bytes=2 * size)
    yield Case(f"rope_bwd {name}", rotated(backward, size, shared=given), bytes=2 * size)
