"""Attention of one new token a sequence against a cache of keys and values. Forward only.

    o = softmax(scale * q K^T) V    over the last min(lengths, window) entries of its cache

Query head h reads kv head h // (heads / kv_heads), as in attention.py, whose last row this is.
"""

import numpy as np
from jaxtyping import Float, Int32

from surogate.kernels.arrays import (
    Array,
    aligned,
    empty_like,
    namespace,
    on_device,
    require,
    upcast,
)
from surogate.kernels.nvrtc import Source, ctype

THREADS = 256  # of a block, as in decode.cu
LANES = (8, 16, 32)  # that share a key, eight columns each
SOURCE = Source(
    "decode",
    {"attention_decode": [(t, str(lanes)) for t in ("float", "bf16") for lanes in LANES]},
)


def attention_decode(
    q: Float[Array, "seqs heads head_dim"],
    k_cache: Float[Array, "seqs max_len kv_heads head_dim"],
    v_cache: Float[Array, "seqs max_len kv_heads head_dim"],
    *,
    lengths: Int32[Array, " seqs"],
    scale: float,
    window: int | None = None,
) -> Float[Array, "seqs heads head_dim"]:
    """Returns o. The new token's key and value are in the caches already, at ``lengths - 1``.

    ``lengths`` are at most max_len; a length of 0 marks an idle sequence, whose o is zero.
    ``window`` counts the new token. Raises ValueError for shapes that do not fit together and, on a
    card, for a head_dim that is no multiple of 8 up to 256 and for arrays that are not contiguous
    from a multiple of 16 bytes on.
    """
    seqs, heads, head_dim = q.shape
    max_len, kv_heads = k_cache.shape[1:3]
    require(
        k_cache.shape == v_cache.shape == (seqs, max_len, kv_heads, head_dim),
        f"attention_decode: caches must be ({seqs}, max_len, kv_heads, {head_dim}), "
        f"got {k_cache.shape} and {v_cache.shape}",
    )
    require(
        heads % kv_heads == 0,
        f"attention_decode: heads must be a multiple of kv_heads, got {heads} and {kv_heads}",
    )
    require(
        q.dtype == k_cache.dtype == v_cache.dtype,
        f"attention_decode: q and the caches must agree, "
        f"got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}",
    )
    require(
        window is None or window >= 1,
        f"attention_decode: window must be at least 1 (it counts the new token), got {window}",
    )
    reach = max_len if window is None else min(window, max_len)
    if not on_device(q):
        return _host(q, k_cache, v_cache, lengths, scale, reach)
    require(
        head_dim % 8 == 0 and head_dim <= 256,
        f"attention_decode: the kernel takes a head_dim of 8, 16, ... 256, got {head_dim}",
    )
    require(
        all(x.flags.c_contiguous for x in (q, k_cache, v_cache)),
        "attention_decode: q and the caches must be C-contiguous",
    )
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        require(
            aligned(x),
            f"attention_decode: {name} must begin at a multiple of 16 bytes: pass a copy",
        )
    o = empty_like(q)
    if o.size:
        lanes = next(n for n in LANES if n * 8 >= head_dim)
        sizes = [max_len, heads, kv_heads, head_dim, reach, float(scale)]
        SOURCE.launch(
            "attention_decode",
            (ctype(q.dtype), str(lanes)),
            seqs * heads,
            THREADS,
            [o, q, k_cache, v_cache, lengths, *sizes],
        )
    return o


def _host(
    q: Array, k_cache: Array, v_cache: Array, lengths: Array, scale: float, reach: int
) -> Array:
    seqs, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    o = empty_like(q)
    for seq, length in enumerate(lengths.tolist()):
        require(
            0 <= length <= k_cache.shape[1],
            f"attention_decode: lengths must be 0 to {k_cache.shape[1]}, got {length}",
        )
        keys = slice(max(length - reach, 0), length)
        k, v = (upcast(x[seq, keys]).transpose(1, 0, 2) for x in (k_cache, v_cache))
        queries = upcast(q[seq]).reshape(kv_heads, heads // kv_heads, head_dim)
        s = (queries @ k.transpose(0, 2, 1)) * scale
        weights = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
        out = weights @ v / np.maximum(weights.sum(-1, keepdims=True), np.finfo(s.dtype).tiny)
        o[seq] = out.reshape(heads, head_dim)
    return o


def attention_decode_ref(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    lengths: Array,
    scale: float,
    window: int | None = None,
) -> Array:
    """Reference of attention_decode, for lengths of at least 1. ``lengths`` is a NumPy array."""
    xp = namespace(q)
    seqs, heads, head_dim = q.shape
    max_len, kv_heads = k_cache.shape[1:3]
    grouped = q.reshape(seqs, kv_heads, heads // kv_heads, head_dim)
    s = scale * xp.einsum("skgd,sjkd->skgj", grouped, k_cache)
    j, length = np.arange(max_len), lengths[:, None]
    reads = (j < length) & (j >= length - (max_len if window is None else window))
    s = xp.where(xp.asarray(reads[:, None, None]), s, -np.inf)
    weights = xp.exp(s - xp.amax(s, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    return xp.einsum("skgj,sjkd->skgd", weights, v_cache).reshape(seqs, heads, head_dim)
