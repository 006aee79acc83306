"""LM head and loss: the training path at several chunks.

Three products of tokens x vocab x hidden are what the training path cannot avoid.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.harness import Case
from bench.inputs import cupy, random
from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.lm_head import default_chunk, lm_head_loss_and_grad, lm_head_loss_fwd

TOKENS = 16384
HEADS = {"0.6B": (151936, 1024), "8B": (151936, 4096), "135M": (49152, 576)}  # vocab, hidden


def cases() -> Iterator[Case]:
    """Every head at its default chunk, half and twice that."""
    for name, (vocab, hidden) in HEADS.items():
        yield from head_cases(name, vocab, hidden)


def head_cases(name: str, vocab: int, hidden: int) -> Iterator[Case]:
    """Training with and without a gradient of the weight, and evaluation."""
    product, usual = 2 * TOKENS * vocab * hidden, default_chunk(TOKENS, vocab, 2)

    def arrays() -> tuple[Any, Any, Any]:
        weight = (cupy.random.standard_normal((vocab, hidden), dtype="f4") * hidden**-0.5).astype(
            BF16
        )
        return random(TOKENS, hidden), weight, cupy.random.randint(0, vocab, TOKENS).astype("i4")

    def train(chunk: int) -> Callable[[], object]:
        x, weight, labels = arrays()
        held = cupy.zeros((vocab, hidden), "f4")
        return lambda: lm_head_loss_and_grad(x, weight, labels=labels, chunk=chunk, into=held)

    def frozen() -> Callable[[], object]:
        x, weight, labels = arrays()
        return lambda: lm_head_loss_and_grad(x, weight, labels=labels, into=FROZEN)

    def evaluate() -> Callable[[], object]:
        x, weight, labels = arrays()
        return lambda: lm_head_loss_fwd(x, weight, labels=labels)

    for chunk in (usual // 2, usual, 2 * usual):
        yield Case(
            f"lm_head {name} loss and gradients, chunk {chunk}",
            partial(train, chunk),
            flops=3 * product,
        )
    yield Case(f"lm_head {name} loss and dx, frozen weight", frozen, flops=2 * product)
    yield Case(f"lm_head {name} loss", evaluate, flops=product)
