"""Attention of a layer through cuDNN beside our own kernels, on equally long rows.

FLOPs are those of the scores that a causal mask leaves: 4 * head_dim a score forward, 10 * head_dim
backward (five products for two). What cuDNN does not take is printed with its reason.
"""

from collections.abc import Iterator
from functools import partial

import cupy

from bench.harness import Case
from surogate.kernels import attention_cudnn
from surogate.kernels.arrays import BF16
from surogate.kernels.attention import AttentionResiduals, attention_bwd, attention_fwd
from surogate.kernels.attention_plans import release_scratch
from surogate.kernels.batch import Docs, docs_from_lengths

HEAD_DIM, KV_HEADS = 128, 8
SCALE = HEAD_DIM**-0.5
HEADS = {"0.6B": 16, "8B": 32}
ROWS = ((2, 2048), (8, 2048), (1, 16384))


def random(*shape: int) -> cupy.ndarray:
    return cupy.random.standard_normal(shape, dtype="f4").astype(BF16)


class Layer:
    """Arrays of a layer's attention, lying as in a model, and its passes."""

    def __init__(self, name: str, heads: int, rows: int, seq: int) -> None:
        self.name, self.rows, self.heads = f"{name} {rows}x{seq}", rows, heads
        tokens = rows * seq
        rotated = random(tokens, heads + KV_HEADS, HEAD_DIM)
        fused = random(tokens, heads + 2 * KV_HEADS, HEAD_DIM)
        self.arrays = rotated[:, :heads], rotated[:, heads:], fused[:, heads + KV_HEADS :]
        self.do, self.out = random(tokens, heads, HEAD_DIM), cupy.empty_like(fused)
        self.docs = Docs(*map(cupy.asarray, docs_from_lengths([seq] * rows)))
        self.flops = 4 * heads * HEAD_DIM * rows * (seq * (seq + 1) // 2)

    def ours(self) -> Iterator[Case]:
        """Our own kernels, the faster of them."""
        forward = partial(attention_fwd, *self.arrays, docs=self.docs, scale=SCALE)
        backward = partial(attention_bwd, forward()[1], self.do)
        yield Case(f"{self.name} fwd, own kernels", forward, flops=self.flops)
        yield Case(f"{self.name} bwd, own kernels", backward, flops=5 * self.flops // 2)

    def cudnn(self) -> Iterator[Case]:
        """The passes that cuDNN takes; prints what it says of each."""
        takes_forward, takes_backward = (
            attention_cudnn.supported(*self.arrays, rows=self.rows, scale=SCALE, backward=backward)
            for backward in (False, True)
        )
        print(f"{self.name} fwd, cuDNN: {takes_forward.reason}")
        print(f"{self.name} bwd, cuDNN: {takes_backward.reason}")
        if not takes_forward:
            return
        forward = partial(attention_cudnn.forward, *self.arrays, rows=self.rows, scale=SCALE)
        o, lse = forward()
        res = AttentionResiduals(*self.arrays, None, o, lse, self.docs, SCALE, None, self.rows)
        end = self.heads + KV_HEADS
        grads = self.out[:, : self.heads], self.out[:, self.heads : end], self.out[:, end:]
        backward = partial(attention_cudnn.backward, res, self.do, *grads, rows=self.rows)
        yield Case(f"{self.name} fwd, cuDNN", forward, flops=self.flops)
        release_scratch()  # each case runs, and is captured, on a stream of its own
        if takes_backward:
            yield Case(f"{self.name} bwd, cuDNN", backward, flops=5 * self.flops // 2)
            release_scratch()


def cases() -> Iterator[Case]:
    """Forward and backward of each model and each shape of a micro-batch."""
    for name, heads in HEADS.items():
        for rows, seq in ROWS:
            layer = Layer(name, heads, rows, seq)
            yield from layer.ours()
            yield from layer.cudnn()
