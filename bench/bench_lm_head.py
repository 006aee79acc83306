"""LM head and loss: the training path at several chunks.

Three products of tokens x vocab x hidden are what the training path cannot avoid.
"""

from collections.abc import Iterator

import cupy

from bench.harness import Case
from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.lm_head import default_chunk, lm_head_loss_and_grad, lm_head_loss_fwd

TOKENS = 16384
HEADS = {"0.6B": (151936, 1024), "8B": (151936, 4096), "135M": (49152, 576)}  # vocab, hidden


def cases() -> Iterator[Case]:
    """Every head at its default chunk, half and twice that."""
    for name, (vocab, hidden) in HEADS.items():
        x = cupy.random.standard_normal((TOKENS, hidden), dtype="f4").astype(BF16)
        weight = (cupy.random.standard_normal((vocab, hidden), dtype="f4") * hidden**-0.5).astype(
            BF16
        )
        labels = cupy.random.randint(0, vocab, TOKENS).astype("i4")
        held = cupy.zeros((vocab, hidden), "f4")
        product = 2 * TOKENS * vocab * hidden
        usual = default_chunk(TOKENS, vocab, 2)
        for chunk in (usual // 2, usual, 2 * usual):

            def train(x=x, weight=weight, labels=labels, chunk=chunk, into=held) -> None:
                lm_head_loss_and_grad(x, weight, labels=labels, chunk=chunk, into=into)

            yield Case(
                f"lm_head {name} loss and gradients, chunk {chunk}", train, flops=3 * product
            )

        def frozen(x=x, weight=weight, labels=labels) -> None:
            lm_head_loss_and_grad(x, weight, labels=labels, into=FROZEN)

        def evaluate(x=x, weight=weight, labels=labels) -> None:
            lm_head_loss_fwd(x, weight, labels=labels)

        yield Case(f"lm_head {name} loss and dx, frozen weight", frozen, flops=2 * product)
        yield Case(f"lm_head {name} loss", evaluate, flops=product)
