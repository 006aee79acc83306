"""Causal attention inside each document of a packed row, with grouped heads, windows and sinks.

    S = scale * Q K^T    P = softmax(S) over the keys a query reads    O = P V

Query i reads key j when start[i] <= j <= i and, with a window, j > i - window (so a window counts
the query itself). Query head h reads kv head h // (heads / kv_heads). A sink is one more logit a
head, in the softmax of every query, without a value.

Backward, with lse = log of the sum of exp(S) (sink included) and delta = sum(do * o) of each query:
    P = exp(S - lse)              dV = P^T dO           (sums over the query heads of a group)
    dS = P * (dO V^T - delta)     dQ = scale * dS K     dK = scale * dS^T Q
    d_sink = -sum over queries of exp(sink - lse) * delta

Forward and backward go over tiles and never hold S, after FlashAttention-2 (Dao 2023, arXiv
2307.08691). What a row costs follows from the lengths of its documents. The kernels take bfloat16
and a head_dim of 64, 96, 128 or 256.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from surogate.kernels import attention_choice
from surogate.kernels.arrays import (
    Array,
    empty,
    namespace,
    on_device,
    require,
)
from surogate.kernels.attention_host import backward_host, forward_host
from surogate.kernels.batch import Docs
from surogate.kernels.pair import Pair


class AttentionResiduals(NamedTuple):
    """What attention_bwd needs: arrays of attention_fwd, its output, and its settings."""

    q: Float[Array, "tokens heads head_dim"]
    k: Float[Array, "tokens kv_heads head_dim"]
    v: Float[Array, "tokens kv_heads head_dim"]
    sinks: Float[Array, " heads"] | None
    o: Float[Array, "tokens heads head_dim"]
    lse: Float[Array, "heads tokens"]  # natural logarithm; float64 for float64 on the host
    docs: Docs
    scale: float
    window: int | None
    rows: int | None = None


def attention_fwd(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    sinks: Float[Array, " heads"] | None = None,
    *,
    docs: Docs,
    scale: float,
    window: int | None = None,
    rows: int | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], AttentionResiduals]:
    """Returns o and what attention_bwd needs.

    ``rows`` promises that the documents are that many equally long pieces of the row: on a card
    cuDNN may then be chosen, which needs to know. Which code runs is measured at first use of a
    problem (attention_choice.py).

    q, k and v may be views of wider rows: the distance of two tokens is free. Under ``vjp`` give
    ``sinks`` also when it is None, as backward answers for four arrays.

    Raises ValueError for shapes that do not fit together, a scale that is not positive, a window
    below 1, and, on a card, for another dtype than bfloat16 or a head_dim that has no kernel.
    """
    _check(q, k, v, sinks, docs, scale, window)
    if on_device(q):
        o, lse = attention_choice.forward(q, k, v, sinks, docs, scale, window, rows)
    else:
        o, lse = forward_host(q, k, v, sinks, docs, scale, window)
    return o, AttentionResiduals(q, k, v, sinks, o, lse, docs, scale, window, rows)


def attention_bwd(
    res: AttentionResiduals, do: Float[Array, "tokens heads head_dim"], *, into: Any = None
) -> tuple[
    Float[Array, "tokens heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, "tokens kv_heads head_dim"],
    Float[Array, " heads"] | None,
]:
    """Returns (dq, dk, dv, d_sinks); d_sinks is None without sinks.

    dq, dk and dv are views of one fresh buffer [tokens, heads + 2 kv_heads, head_dim], in that
    order: the gradient of a fused QKV product. ``into`` is the destination of d_sinks.
    """
    packed, d_sinks = attention_bwd_packed(res, do, into=into)
    heads, kv_heads = res.q.shape[1], res.k.shape[1]
    end = heads + kv_heads
    return packed[:, :heads], packed[:, heads:end], packed[:, end:], d_sinks


def attention_bwd_packed(
    res: AttentionResiduals, do: Float[Array, "tokens heads head_dim"], *, into: Any = None
) -> tuple[Float[Array, "tokens packed head_dim"], Float[Array, " heads"] | None]:
    """attention_bwd that returns (dq, dk and dv in one array, d_sinks)."""
    require(
        do.shape == res.q.shape and do.dtype == res.q.dtype,
        f"attention_bwd: do must be {res.q.dtype}{res.q.shape}, got {do.dtype}{do.shape}",
    )
    heads, kv_heads = res.q.shape[1], res.k.shape[1]
    packed = empty((len(do), heads + 2 * kv_heads, do.shape[2]), do.dtype, like=do)
    grads = (packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :])
    backward = attention_choice.backward if on_device(do) else backward_host
    return packed, backward(res, do, *grads, into)


def _check(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
) -> None:
    tokens, heads, head_dim = q.shape
    require(
        k.shape == v.shape and k.shape[::2] == (tokens, head_dim),
        f"attention_fwd: k and v must be ({tokens}, kv_heads, {head_dim}), "
        f"got {k.shape} and {v.shape}",
    )
    require(
        heads % k.shape[1] == 0,
        f"attention_fwd: heads must be a multiple of kv_heads, got {heads} and {k.shape[1]}",
    )
    require(
        q.dtype == k.dtype == v.dtype,
        f"attention_fwd: q, k and v must agree, got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    require(
        docs.start.shape == docs.end.shape == (tokens,),
        f"attention_fwd: docs must hold {tokens} tokens, "
        f"got {docs.start.shape} and {docs.end.shape}",
    )
    require(
        sinks is None or sinks.shape == (heads,),
        f"attention_fwd: sinks must be ({heads},), got {getattr(sinks, 'shape', None)}",
    )
    require(scale > 0, f"attention_fwd: scale must be positive, got {scale}")
    require(
        window is None or window >= 1,
        f"attention_fwd: window must be at least 1 (it counts the query) or None, got {window}",
    )


def attention_ref(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None = None,
    *,
    docs: Docs,
    scale: float,
    window: int | None = None,
) -> Array:
    """Reference of attention_fwd: all scores at once. docs are NumPy arrays."""
    xp = namespace(q)
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], head_dim)
    s = scale * xp.einsum("ikgd,jkd->kgij", grouped, k)
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    reads = (docs.start[:, None] <= j) & (j <= i) & (j > i - (tokens if window is None else window))
    s = xp.where(xp.asarray(reads), s, -np.inf)
    top = xp.amax(s, axis=-1, keepdims=True)
    weights = xp.exp(s - top)
    total = xp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks.reshape(k.shape[1], -1, 1, 1) - top)
    return xp.einsum("kgij,jkd->ikgd", weights / total, v).reshape(tokens, heads, head_dim)


attention = Pair(attention_fwd, attention_bwd)
