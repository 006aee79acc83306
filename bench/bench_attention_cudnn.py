"""Attention of a layer through cuDNN on equally long rows, to hold beside bench_attention.py."""

from collections.abc import Callable, Iterator

from bench.bench_attention import DENSE, HEADS, SCALE, Layer, flops
from bench.harness import Case, Unsupported
from surogate.kernels import attention_cudnn
from surogate.kernels.attention import AttentionResiduals


def cases() -> Iterator[Case]:
    """Forward and backward of each model and each shape of a micro-batch."""
    for model, heads in HEADS.items():
        for name, lengths in DENSE.items():
            yield from pair_cases(f"{model}, {name}", lengths, *heads)


def pair_cases(name: str, lengths: list[int], heads: int, kv_heads: int) -> Iterator[Case]:
    """The passes, where cuDNN takes them."""
    rows = len(lengths)

    def layer(backward: bool) -> Layer:
        made = Layer.of(lengths, heads, kv_heads)
        takes = attention_cudnn.supported(*made[:3], rows=rows, scale=SCALE, backward=backward)
        if not takes:
            raise Unsupported(takes.reason)
        return made

    def forward() -> Callable[[], object]:
        q, k, v, *_ = layer(backward=False)
        return lambda: attention_cudnn.forward(q, k, v, rows=rows, scale=SCALE)

    def backward() -> Callable[[], object]:
        made = layer(backward=True)
        q, k, v, do, docs = made
        o, lse = attention_cudnn.forward(q, k, v, rows=rows, scale=SCALE)
        res = AttentionResiduals(q, k, v, None, o, lse, docs, SCALE, None, rows)
        grads = made.gradients()
        return lambda: attention_cudnn.backward(res, do, *grads, rows=rows)

    work = flops(lengths, heads)
    yield Case(f"attention_cudnn_fwd {name}", forward, flops=work)
    yield Case(f"attention_cudnn_bwd {name}", backward, flops=work * 5 // 2)
