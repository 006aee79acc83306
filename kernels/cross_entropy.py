"""Cross entropy of logits with integer labels: log-probabilities of the labels, and their gradient.

    lse = log(sum(exp(logits)))    logprob = logits[label] - lse    nll = -logprob

Where the label is -100 there is no target: logprob and the row of the gradient are 0. Backward:

    dlogits = (softmax(logits) - onehot(label)) * dnll

Maximum and sum come from one pass over a row (online softmax: Milakov & Gimelshein 2018,
arXiv 1805.02867). ``cross_entropy_fused_`` does both directions over a buffer that nobody needs
afterwards, which is what an LM head wants: the logits become their own gradient. It reads a row
once as far as a multiprocessor can hold it: 311 KB on Hopper, 155,000 values in bfloat16.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from surogate.kernels.arrays import (
    Array,
    compute_dtype,
    describe,
    empty,
    empty_like,
    namespace,
    on_device,
    require,
    upcast,
)
from surogate.kernels.batch import IGNORED
from surogate.kernels.card import multiprocessors, shared_limit
from surogate.kernels.nvrtc import Source, ctype, vector_width
from surogate.kernels.pair import Pair

MOST_THREADS = 1024  # of a block, and of the fused kernel's blocks on a multiprocessor
# Bytes of a row up to which a block has fewer threads: then four or two rows fit a Hopper's shared
# memory at once.
SHORT_ROWS = {256: 32 << 10, 512: 112 << 10}
STATIC_SHARED = 512  # bytes of the fused kernel, besides its rows
KEPT = 5  # 16-byte vectors that a thread of the fused kernel has in registers, as in the .cu file
MAX_TOKENS = 1 << 24  # of one total: the count is taken in float32

SOURCE = Source(
    "cross_entropy",
    {
        "cross_entropy_fwd": [("float",), ("bf16",)],
        "cross_entropy_bwd": [("float",), ("bf16",)],
        "cross_entropy_fused": [("float",), ("bf16",)],
        "nll_total": [()],
    },
)


class CrossEntropyResiduals(NamedTuple):
    logits: Float[Array, "tokens vocab"]
    labels: Int32[Array, " tokens"]
    lse: Float[Array, " tokens"]  # float32 (float64 for float64 logits); 0 where ignored


def cross_entropy_fwd(
    logits: Float[Array, "tokens vocab"],
    *,
    labels: Int32[Array, " tokens"],
    logprobs: Float[Array, " tokens"] | None = None,
    lse: Float[Array, " tokens"] | None = None,
) -> tuple[Float[Array, " tokens"], CrossEntropyResiduals]:
    """Returns the labels' log-probabilities in float32, and what cross_entropy_bwd needs.

    ``logprobs`` and ``lse`` are the caller's buffers for them, if any. A label is -100 or an index
    into the row: anything else is a ValueError on the host and a log-probability of NaN on a card.
    """
    _check("cross_entropy_fwd", logits, labels)
    kind = compute_dtype(logits)
    logprobs = empty(labels.shape, kind, like=logits) if logprobs is None else logprobs
    lse = empty(labels.shape, kind, like=logits) if lse is None else lse
    if on_device(logits):
        _launch("cross_entropy_fwd", logits, [logprobs, lse, logits, labels])
    else:
        rows, values = _supervised(labels), upcast(logits)
        lse[...] = 0
        logprobs[...] = 0
        lse[rows] = _host_lse(values[rows])
        logprobs[rows] = values[rows, labels[rows]] - lse[rows]
    return logprobs, CrossEntropyResiduals(logits, labels, lse)


def cross_entropy_bwd(
    res: CrossEntropyResiduals, d_logprobs: Float[Array, " tokens"]
) -> Float[Array, "tokens vocab"]:
    """Returns dlogits."""
    out = empty_like(res.logits)
    return nll_gradient(res, out, d_nll_sum=None, d_logprobs=d_logprobs)


def nll_gradient(
    res: CrossEntropyResiduals,
    out: Float[Array, "tokens vocab"],
    *,
    d_nll_sum: Float[Array, ""] | None,
    d_logprobs: Float[Array, " tokens"] | None,
) -> Float[Array, "tokens vocab"]:
    """Writes dlogits to ``out``, which may be the logits, and returns it.

    ``d_nll_sum`` is the gradient that every token's nll has, a scalar beside the logits;
    ``d_logprobs`` that of each log-probability. Either may be None.
    """
    require(
        out.shape == res.logits.shape and out.dtype == res.logits.dtype and out.flags.c_contiguous,
        f"cross_entropy: out must be contiguous and like the logits {describe(res.logits)}, "
        f"got {describe(out)} with strides {out.strides}",
    )
    if on_device(out):
        grads = [d_nll_sum, d_logprobs]
        for name, grad in zip(("d_nll_sum", "d_logprobs"), grads, strict=True):
            require(
                grad is None or grad.dtype == np.float32,
                f"cross_entropy: {name} must be float32, got {getattr(grad, 'dtype', None)}",
            )
        _launch("cross_entropy_bwd", out, [out, res.logits, res.lse, res.labels, *grads])
        return out
    rows, scale = _supervised(res.labels), np.zeros(res.lse.shape, res.lse.dtype)
    for sign, grad in ((1, d_nll_sum), (-1, d_logprobs)):
        if grad is not None:
            scale += sign * grad.astype(scale.dtype)
    _host_gradient(out, upcast(res.logits[rows]), res.lse[rows], res.labels, rows, scale[rows])
    return out


def cross_entropy_fused_(
    logits: Float[Array, "tokens vocab"],
    *,
    labels: Int32[Array, " tokens"],
    logprobs: Float[Array, " tokens"] | None = None,
) -> Float[Array, " tokens"]:
    """Replaces logits by the gradient of the sum of all nll. Returns the log-probabilities."""
    _check("cross_entropy_fused_", logits, labels)
    if logprobs is None:
        logprobs = empty(labels.shape, compute_dtype(logits), like=logits)
    if on_device(logits):
        _launch_fused(logprobs, logits, labels)
        return logprobs
    _, res = cross_entropy_fwd(logits, labels=labels, logprobs=logprobs)
    nll_gradient(res, logits, d_nll_sum=np.ones((), res.lse.dtype), d_logprobs=None)
    return logprobs


def nll_total(
    logprobs: Float[Array, " tokens"],
    labels: Int32[Array, " tokens"],
    *,
    totals: tuple[Float[Array, ""], Int32[Array, ""]] | None = None,
) -> tuple[Float[Array, ""], Int32[Array, ""]]:
    """Sum of nll over supervised tokens and their number, as scalar arrays beside ``logprobs``.

    The order of the sum depends on the number of tokens alone. With ``totals`` both are added to
    those arrays, which are returned.
    """
    tokens = len(labels)
    require(tokens < MAX_TOKENS, f"nll_total: tokens must be below {MAX_TOKENS}, got {tokens}")
    fresh = totals is None
    if totals is None:
        totals = (empty((), logprobs.dtype, like=logprobs), empty((), np.int32, like=logprobs))
    nll_sum, count = totals
    if on_device(logprobs):
        args = [nll_sum, count, logprobs, labels, tokens, not fresh]
        SOURCE.launch("nll_total", (), 1, 1024, args)
        return totals
    rows = _supervised(labels)
    summed = -logprobs[rows].sum(dtype=np.float64)
    nll_sum[...] = summed if fresh else nll_sum + summed
    count[...] = len(rows) if fresh else count + len(rows)
    return totals


def _check(name: str, logits: Any, labels: Any) -> None:
    require(
        len(labels) == len(logits) and logits.flags.c_contiguous,
        f"{name}: logits must be contiguous and have a row for each of {len(labels)} labels, "
        f"got {logits.shape} with strides {logits.strides}",
    )
    if not on_device(logits):
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= logits.shape[1]))]
        require(
            wrong.size == 0,
            f"{name}: labels must be {IGNORED} or below {logits.shape[1]}, got {wrong[:1]}",
        )


def _launch(kernel: str, logits: Any, args: list[Any]) -> None:
    tokens, vocab = logits.shape
    if tokens == 0:
        return
    SOURCE.launch(kernel, (ctype(logits.dtype),), tokens, _threads(logits), [*args, vocab])


def _threads(logits: Any) -> int:
    """Threads of a row: by its size alone, so that its sum has one order in all kernels."""
    size = logits.shape[1] * logits.itemsize
    return next((threads for threads, most in SHORT_ROWS.items() if size <= most), MOST_THREADS)


def _launch_fused(logprobs: Any, logits: Any, labels: Any) -> None:
    """As many blocks as are resident at once, or as few as take as many turns: then all end at the
    same time. Each has its share of the shared memory.
    """
    tokens, vocab = logits.shape
    if tokens == 0:
        return
    threads = _threads(logits)
    resident = MOST_THREADS // threads
    share = (shared_limit() + 1024) // resident - 1024 - STATIC_SHARED
    vectors = -(-vocab // vector_width(logits.dtype))
    held = max(0, min(-(-vectors // threads) - KEPT, share // (16 * threads)))
    turns = -(-tokens // (resident * multiprocessors()))
    SOURCE.launch(
        "cross_entropy_fused",
        (ctype(logits.dtype),),
        -(-tokens // turns),
        threads,
        [logprobs, logits, labels, tokens, vocab, held],
        shared=held * 16 * threads,
    )


def _supervised(labels: Any) -> Any:
    return np.flatnonzero(labels != IGNORED)


def _host_lse(values: Any) -> Any:
    top = values.max(axis=1, keepdims=True)
    return top[:, 0] + np.log(np.exp(values - top).sum(axis=1))


def _host_gradient(out: Any, values: Any, lse: Any, labels: Any, rows: Any, scale: Any) -> None:
    """``values``, ``lse`` and ``scale`` are of the supervised rows."""
    gradient = np.exp(values - lse[:, None])
    gradient[np.arange(len(rows)), labels[rows]] -= 1
    out[...] = 0
    out[rows] = (gradient * scale[:, None]).astype(out.dtype)


def cross_entropy_ref(logits: Array, *, labels: Array) -> Array:
    """Reference of cross_entropy_fwd. ``labels`` are NumPy integers."""
    xp, vocab = namespace(logits), logits.shape[1]
    top = xp.amax(logits, axis=1)
    lse = top + xp.log(xp.sum(xp.exp(logits - top[:, None]), axis=1))
    onehot = xp.asarray(labels[:, None] == np.arange(vocab))
    supervised = xp.asarray(labels != IGNORED)
    return (xp.sum(logits * onehot, axis=1) - lse) * supervised


cross_entropy = Pair(cross_entropy_fwd, cross_entropy_bwd)
