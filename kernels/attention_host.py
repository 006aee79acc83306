"""The host version of attention: a document at a time, in blocks of queries, all heads at once.

The formulas stand in attention.py. Memory beside inputs and outputs is a float32 copy of them and a
few arrays of SCORES scores, whatever the length of a document.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels.arrays import FROZEN, Array, compute_dtype, empty, store, upcast
from surogate.kernels.batch import Docs

SCORES = 1 << 20  # of a block over all heads: 4 MiB in float32


class Block(NamedTuple):
    """Queries of a document, the keys that any of them reads, and which of those each does not."""

    queries: slice
    keys: slice
    hidden: np.ndarray  # [queries, keys] bool


def _blocks(docs: Docs, heads: int, window: int | None) -> Iterator[Block]:
    tokens = len(docs.start)
    starts = np.flatnonzero(docs.start == np.arange(tokens, dtype=np.int32))
    for start in starts.tolist():
        end = int(docs.end[start])
        reach = end - start if window is None else min(end - start, window)
        size = max(1, min(end - start, SCORES // (heads * reach)))
        for first in range(start, end, size):
            last = min(first + size, end)
            low = start if window is None else max(start, first - window + 1)
            i, j = np.arange(first, last)[:, None], np.arange(low, last)
            hidden = (j > i) if window is None else (j > i) | (j <= i - window)
            yield Block(slice(first, last), slice(low, last), hidden)


def _by_head(x: Array, kv_heads: int) -> Array:
    """[tokens, heads, d] as [kv_heads, group, tokens, d] in the dtype of the host version."""
    tokens, heads, head_dim = x.shape
    grouped = upcast(x).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    return np.ascontiguousarray(grouped.transpose(1, 2, 0, 3))


def _flat(x: Array) -> Array:
    """[kv_heads, group, rows, n] as [kv_heads, group * rows, n]: one product a kv head."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def forward_host(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    tokens, heads, head_dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    queries = _by_head(q, kv_heads) * compute_dtype(q).type(scale)
    keys, values = _by_head(k, kv_heads)[:, 0], _by_head(v, kv_heads)[:, 0]
    o = empty(q.shape, q.dtype, like=q)
    lse = empty((kv_heads, group, tokens), queries.dtype, like=q)
    for block in _blocks(docs, heads, window):
        part = queries[:, :, block.queries]
        s = (_flat(part) @ keys[:, block.keys].transpose(0, 2, 1)).reshape(*part.shape[:3], -1)
        np.copyto(s, -np.inf, where=block.hidden)
        top = s.max(-1, keepdims=True)
        if sinks is not None:
            logit = upcast(sinks).astype(s.dtype).reshape(kv_heads, group, 1, 1)
            top = np.maximum(top, logit)
        np.exp(s - top, out=s)
        total = s.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(logit - top)
        out = (_flat(s) @ values[:, block.keys]).reshape(part.shape) / total
        o[block.queries] = out.transpose(2, 0, 1, 3).reshape(-1, heads, head_dim)
        lse[:, :, block.queries] = (top + np.log(total))[..., 0]
    return o, lse.reshape(heads, tokens)


def backward_host(res: Any, do: Array, dq: Array, dk: Array, dv: Array, into: Any) -> Array | None:
    tokens, heads, head_dim = do.shape
    kv_heads = res.k.shape[1]
    scale = compute_dtype(do).type(res.scale)
    queries, d_out = _by_head(res.q, kv_heads) * scale, _by_head(do, kv_heads)
    keys, values = _by_head(res.k, kv_heads)[:, 0], _by_head(res.v, kv_heads)[:, 0]
    delta = (d_out * _by_head(res.o, kv_heads)).sum(-1, keepdims=True)
    lse = res.lse.reshape(*delta.shape)
    d_keys, d_values = np.zeros_like(keys), np.zeros_like(values)
    for block in _blocks(res.docs, heads, res.window):
        part, d_part = queries[:, :, block.queries], _flat(d_out[:, :, block.queries])
        k, v = keys[:, block.keys], values[:, block.keys]
        p = (_flat(part) @ k.transpose(0, 2, 1)).reshape(*part.shape[:3], -1)
        np.copyto(p, -np.inf, where=block.hidden)
        p -= lse[:, :, block.queries]
        np.exp(p, out=p)
        d_values[:, block.keys] += _flat(p).transpose(0, 2, 1) @ d_part
        ds = (d_part @ v.transpose(0, 2, 1)).reshape(p.shape) - delta[:, :, block.queries]
        ds *= p
        d_keys[:, block.keys] += _flat(ds).transpose(0, 2, 1) @ _flat(part)
        d_queries = ((_flat(ds) @ k) * scale).reshape(part.shape)
        dq[block.queries] = d_queries.transpose(2, 0, 1, 3).reshape(-1, heads, head_dim)
    dk[...], dv[...] = d_keys.transpose(1, 0, 2), d_values.transpose(1, 0, 2)
    if res.sinks is None or into is FROZEN:
        return None
    logit = upcast(res.sinks).astype(lse.dtype).reshape(kv_heads, -1, 1, 1)
    d_sinks = -(np.exp(logit - lse) * delta).sum((2, 3)).reshape(heads)
    return store(d_sinks, into, res.sinks.dtype)
