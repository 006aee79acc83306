"""The last product of a language model and its loss, in chunks of tokens.

    logits = x W^T    logprob = logits[label] - log(sum(exp(logits)))    nll_sum = -sum of logprob

over the tokens whose label is not -100. No more than one chunk of logits exists at a time. Backward
needs x and one number a token, and computes a chunk of logits again:

    dlogits = (softmax(logits) - onehot(label)) * (d_nll_sum - d_logprob)
    dx = dlogits W    dW = sum over chunks of dlogits^T x

Training wants loss and gradient at once: ``lm_head_loss_and_grad`` computes each chunk's logits
once and turns them into their gradient in place. The chunk changes no result, except where
products of other shapes round otherwise, and the order in which dW is summed. ``weight`` may be the
embedding table (a tied head): pass its gradient's buffer as ``into``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxtyping import Float, Int32

from surogate.kernels.arrays import (
    BF16,
    F32,
    FROZEN,
    Array,
    Frozen,
    compute_dtype,
    destination,
    empty,
    empty_like,
    require,
)
from surogate.kernels.cross_entropy import (
    CrossEntropyResiduals,
    cross_entropy_fused_,
    cross_entropy_fwd,
    cross_entropy_ref,
    nll_gradient,
    nll_total,
)
from surogate.kernels.matmul import matmul
from surogate.kernels.pair import Pair

# Of a chunk's logits: 2048 tokens of a vocabulary of 151936. On an H200 the head's products take
# 7 % less time so than with 1024; a long row, whose activations dwarf them, gets more.
CHUNK_BYTES, MOST_CHUNK_BYTES = 640 << 20, 1280 << 20
PIECES = 8  # of a long row

Totals = tuple[Float[Array, ""], Int32[Array, ""]]


class LossOutputs(NamedTuple):
    """Sums over the supervised tokens, and each token's log-probability, 0 where not supervised."""

    nll_sum: Float[Array, ""]
    count: Int32[Array, ""]  # type: ignore[assignment]  # of tokens; tuples have a method count
    logprobs: Float[Array, " tokens"]


class LMHeadResiduals(NamedTuple):
    x: Float[Array, "tokens hidden"]
    weight: Float[Array, "vocab hidden"]
    labels: Int32[Array, " tokens"]
    lse: Float[Array, " tokens"]
    chunk: int


def default_chunk(tokens: int, vocab: int, itemsize: int) -> int:
    """Tokens: the largest power of two whose logits fit CHUNK_BYTES, or all of them; of a long row
    up to an eighth, within MOST_CHUNK_BYTES.
    """

    def fitting(size: int) -> int:
        return 1 << (max(1, size // (vocab * itemsize)).bit_length() - 1)

    most = min(fitting(MOST_CHUNK_BYTES), tokens // PIECES)
    return max(1, min(tokens, max(fitting(CHUNK_BYTES), most)))


def lm_head_loss_fwd(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    *,
    labels: Int32[Array, " tokens"],
    chunk: int | None = None,
    totals: Totals | None = None,
) -> tuple[LossOutputs, LMHeadResiduals]:
    """Returns the loss and what lm_head_loss_bwd needs.

    ``chunk`` is the number of tokens whose logits exist at a time. With ``totals``, the scalar
    arrays of a running sum and count, both are added there and returned in the outputs.
    """
    chunk, buffer = _prepare("lm_head_loss_fwd", x, weight, labels, chunk)
    logprobs, lse = (empty(labels.shape, compute_dtype(x), like=x) for _ in range(2))
    for rows in _chunks(len(x), chunk):
        logits = _logits(x[rows], weight, buffer)
        cross_entropy_fwd(logits, labels=labels[rows], logprobs=logprobs[rows], lse=lse[rows])
    outputs = LossOutputs(*nll_total(logprobs, labels, totals=totals), logprobs)
    return outputs, LMHeadResiduals(x, weight, labels, lse, chunk)


def lm_head_loss_bwd(
    res: LMHeadResiduals,
    d_nll_sum: Float[Array, ""] | None,
    d_count: None = None,
    d_logprobs: Float[Array, " tokens"] | None = None,
    *,
    into: Float[Array, "vocab hidden"] | Frozen | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "vocab hidden"] | None]:
    """Returns (dx, dweight). ``d_nll_sum`` is a scalar array; either gradient may be None."""
    x, weight, labels, lse, chunk = res
    dx, dweight = empty_like(x), WeightGradient(weight, into, chunks=-(-len(x) // chunk))
    buffer = empty((chunk, len(weight)), x.dtype, like=x)
    for rows in _chunks(len(x), chunk):
        logits = _logits(x[rows], weight, buffer)
        nll_gradient(
            CrossEntropyResiduals(logits, labels[rows], lse[rows]),
            logits,
            d_nll_sum=d_nll_sum,
            d_logprobs=None if d_logprobs is None else d_logprobs[rows],
        )
        matmul(logits, weight, out=dx[rows])
        dweight.add(logits, x[rows])
    return dx, dweight.result()


def lm_head_loss_and_grad(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    *,
    labels: Int32[Array, " tokens"],
    chunk: int | None = None,
    into: Float[Array, "vocab hidden"] | Frozen | None = None,
    need_dweight: bool = True,
    totals: Totals | None = None,
) -> tuple[LossOutputs, Float[Array, "tokens hidden"], Float[Array, "vocab hidden"] | None]:
    """Returns the loss, and the gradients (dx, dweight) of nll_sum, from one product of logits.

    ``into`` and ``totals`` as in lm_head_loss_bwd and lm_head_loss_fwd. dweight is None when it is
    FROZEN or not needed.
    """
    chunk, buffer = _prepare("lm_head_loss_and_grad", x, weight, labels, chunk)
    into = into if need_dweight else FROZEN
    dx, dweight = empty_like(x), WeightGradient(weight, into, chunks=-(-len(x) // chunk))
    logprobs = empty(labels.shape, compute_dtype(x), like=x)
    for rows in _chunks(len(x), chunk):
        logits = _logits(x[rows], weight, buffer)
        cross_entropy_fused_(logits, labels=labels[rows], logprobs=logprobs[rows])
        matmul(logits, weight, out=dx[rows])
        dweight.add(logits, x[rows])
    outputs = LossOutputs(*nll_total(logprobs, labels, totals=totals), logprobs)
    return outputs, dx, dweight.result()


def lm_logits(
    x: Float[Array, "tokens hidden"], weight: Float[Array, "vocab hidden"]
) -> Float[Array, "tokens vocab"]:
    """All logits in float32 (float64 for float64 input), from one product that writes float32."""
    return matmul(x, weight, transpose_b=True, dtype=compute_dtype(x))


class WeightGradient:
    """dW as it grows by chunks: in the caller's buffer, or in float32 and rounded at the end."""

    def __init__(self, weight: Any, into: Any, *, chunks: int) -> None:
        self.out: Any = None
        self.accumulate = False
        self.dtype = weight.dtype if into is None else None  # of the result, when it is fresh
        if into is not FROZEN:
            rounded = into is None and chunks > 1 and weight.dtype == BF16
            kind = F32 if rounded else weight.dtype
            self.out, self.accumulate = destination(into, weight.shape, kind, like=weight)

    def add(self, dlogits: Any, x: Any) -> None:
        """Adds dlogits^T x inside the product."""
        if self.out is not None:
            matmul(dlogits, x, transpose_a=True, out=self.out, accumulate=self.accumulate)
            self.accumulate = True

    def result(self) -> Any:
        """The gradient; None when it is frozen."""
        return self.out if self.dtype is None else self.out.astype(self.dtype, copy=False)


def _prepare(name: str, x: Any, weight: Any, labels: Any, chunk: int | None) -> tuple[int, Any]:
    """The number of tokens in a chunk, and the buffer for their logits."""
    tokens, vocab = len(x), len(weight)
    require(tokens == len(labels), f"{name}: expected {tokens} labels, got {len(labels)}")
    require(tokens > 0, f"{name}: expected at least one token, got none")
    require(chunk is None or chunk > 0, f"{name}: chunk must be positive, got {chunk}")
    chunk = min(tokens, chunk or default_chunk(tokens, vocab, x.dtype.itemsize))
    return chunk, empty((chunk, vocab), x.dtype, like=x)


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk):
        yield slice(start, min(tokens, start + chunk))


def _logits(x: Any, weight: Any, buffer: Any) -> Any:
    return matmul(x, weight, transpose_b=True, out=buffer[: len(x)])


def lm_head_loss_ref(x: Array, weight: Array, *, labels: Array) -> tuple[Array, Array]:
    """Reference of lm_head_loss_fwd: (nll_sum, logprobs). ``labels`` are NumPy integers."""
    logprobs = cross_entropy_ref(x @ weight.T, labels=labels)
    return -logprobs.sum(), logprobs


lm_head_loss = Pair(lm_head_loss_fwd, lm_head_loss_bwd)
