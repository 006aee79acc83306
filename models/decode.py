"""Generation: the prompts in one packed pass, then a token a sequence against a cache of keys and
values.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int32

from surogate.kernels.arrays import Array, namespace
from surogate.kernels.batch import Batch
from surogate.kernels.decode import attention_decode
from surogate.kernels.embedding import embedding_fwd
from surogate.kernels.linear import linear_fwd
from surogate.kernels.lm_head import lm_logits
from surogate.kernels.rmsnorm import rmsnorm_fwd
from surogate.kernels.rope import RopeTable
from surogate.models import dense
from surogate.models.blocks import Context, Settings, mlp_block_fwd, part_of, rotate
from surogate.models.tree import Adapter, Layer, Model


class Cache(NamedTuple):
    """Keys and values of every layer, one row of ``max_len`` a sequence."""

    keys: tuple[Float[Array, "seqs max_len kv_heads head_dim"], ...]
    values: tuple[Float[Array, "seqs max_len kv_heads head_dim"], ...]


def new_cache(settings: Settings, *, seqs: int, max_len: int, like: Array) -> Cache:
    """Zeros beside ``like`` and of its dtype."""
    config = settings.config
    shape = (seqs, max_len, config.kv_heads, config.head_dim)

    def make() -> tuple[Array, ...]:
        return tuple(namespace(like).zeros(shape, like.dtype) for _ in range(config.layers))

    return Cache(make(), make())


def prefill(
    model: Model,
    adapter: Adapter | None,
    batch: Batch,
    cache: Cache,
    *,
    table: RopeTable,
    settings: Settings,
) -> Float[Array, "seqs vocab"]:
    """Runs the prompts, one document each, fills the cache, and returns the logits after each.

    Writes into ``cache``. The number of documents must be the cache's number of sequences.
    """
    x, _ = embedding_fwd(model.embed, tokens=batch.tokens)
    context = Context(batch.docs, batch.positions, table)
    starts, ends = (np.unique(_host(a)) for a in batch.docs)
    sequence = np.repeat(np.arange(len(starts)), ends - starts)
    layers = zip(model.layers, dense.adapters_of(model, adapter), strict=True)
    for index, (layer, part) in enumerate(layers):
        window = settings.config.windows[index]
        x, res = dense.layer_fwd(layer, part, x, context=context, settings=settings, window=window)
        at = (sequence, _host(batch.positions))
        _write_(cache.keys[index], at, res.attention.attention.k)
        _write_(cache.values[index], at, res.attention.attention.v)
    last = _bits(x)[namespace(x).asarray(ends - 1)].view(x.dtype)
    return _head(model, last, settings)


def decode(
    model: Model,
    adapter: Adapter | None,
    tokens: Int32[Array, " seqs"],
    lengths: Int32[Array, " seqs"],
    cache: Cache,
    *,
    table: RopeTable,
    settings: Settings,
) -> Float[Array, "seqs vocab"]:
    """Appends one token to each sequence, ``lengths`` long before, and returns the logits after it.

    Writes into ``cache``.
    """
    x, _ = embedding_fwd(model.embed, tokens=tokens)
    context = Context(None, lengths, table)  # type: ignore[arg-type]  # no op here mixes tokens
    layers = zip(model.layers, dense.adapters_of(model, adapter), strict=True)
    for index, (layer, part) in enumerate(layers):
        x = _attend(x, layer, part, lengths, cache, index, context, settings)
        x, _ = mlp_block_fwd(x, layer, part, settings=settings)
    return _head(model, x, settings)


def _attend(
    x: Array,
    layer: Layer,
    adapter: Any,
    lengths: Array,
    cache: Cache,
    index: int,
    context: Context,
    settings: Settings,
) -> Array:
    config = settings.config
    n, _ = rmsnorm_fwd(x, layer.attn_norm, eps=config.eps)
    flat, _ = linear_fwd(
        n, layer.w_qkv, layer.b_qkv, part_of(adapter, "qkv"), **settings.adapter("w_qkv")
    )
    (q, k, v), _ = rotate(flat, layer, context, config)
    at = (np.arange(len(x)), _host(lengths))
    _write_(cache.keys[index], at, k)
    _write_(cache.values[index], at, v)
    o = attention_decode(
        namespace(q).ascontiguousarray(q),
        cache.keys[index],
        cache.values[index],
        lengths=lengths + np.int32(1),
        scale=config.head_dim**-0.5,
        window=config.windows[index],
    )
    y, _ = linear_fwd(
        o.reshape(len(x), -1), layer.w_o, None, part_of(adapter, "o"), x, **settings.adapter("w_o")
    )
    return y


def _head(model: Model, x: Array, settings: Settings) -> Array:
    x, _ = rmsnorm_fwd(x, model.norm, eps=settings.config.eps)
    return lm_logits(x, dense.head_weight(model))


def _bits(x: Array) -> Array:
    """The array as unsigned integers of its width: CuPy's fancy indexing does not take bfloat16."""
    return x.view(f"u{x.dtype.itemsize}")


def _write_(cache: Array, at: tuple[Array, Array], rows: Array) -> None:
    library = namespace(cache)
    _bits(cache)[library.asarray(at[0]), library.asarray(at[1])] = _bits(rows)


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()
