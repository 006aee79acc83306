"""Dense decoder-only transformers: Qwen2/2.5, Qwen3 and Llama 3, forward, backward and loss.

    x = embed[tokens];  x = mlp(attention(x)) for each layer;  loss = cross entropy of head(norm(x))

What differs between the three is in the configuration alone: biases on q, k and v (Qwen2), norms of
q and k (Qwen3), the rotary frequencies and the windows.
"""

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Float

from surogate.kernels.arrays import Array
from surogate.kernels.batch import Batch
from surogate.kernels.embedding import EmbeddingResiduals, embedding_bwd, embedding_fwd
from surogate.kernels.lm_head import (
    LossOutputs,
    lm_head_loss_and_grad,
    lm_head_loss_fwd,
    lm_logits,
)
from surogate.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from surogate.kernels.rope import RopeTable, rope_frequencies, rope_table
from surogate.kernels.widened import with_room
from surogate.models.blocks import (
    Context,
    Settings,
    attention_block_bwd,
    attention_block_fwd,
    mlp_block_bwd,
    mlp_block_fwd,
)
from surogate.models.config import ModelConfig
from surogate.models.stack import (
    Collected,
    LayerPair,
    LayerSource,
    Recompute,
    Resident,
    stack_apply,
    stack_bwd,
    stack_fwd,
)
from surogate.models.tree import Adapter, Layer, LayerAdapter, Model


class LayerResiduals(NamedTuple):
    attention: Any
    mlp: Any


class HiddenResiduals(NamedTuple):
    """Of the whole body: one entry a layer, and the final norm's."""

    layers: list[Any]
    norm: Any


class Grads(NamedTuple):
    """Gradients, or their destinations: of the model, and of the adapter where there is one."""

    model: Any
    adapter: Any


def rotary_table(config: ModelConfig, length: int) -> RopeTable:
    """cos and sin of positions 0..length-1 (NumPy, float32)."""
    frequencies, factor = rope_frequencies(
        config.head_dim, sequence_len=length, **dataclasses.asdict(config.rope)
    )
    return rope_table(frequencies, factor, positions=length)


def layer_fwd(
    layer: Layer,
    adapter: LayerAdapter | None,
    x: Float[Array, "tokens hidden"],
    *,
    context: Context,
    settings: Settings,
    window: int | None = None,
    keep: bool = True,
    need_y: bool = True,
) -> tuple[Any, LayerResiduals]:
    """One layer: attention, then MLP. Without ``need_y``, its residuals alone."""
    x, attention = attention_block_fwd(
        x, layer, adapter, context=context, settings=settings, window=window, keep=keep
    )
    y, mlp = mlp_block_fwd(x, layer, adapter, settings=settings, keep=keep, need_y=need_y)
    return y, LayerResiduals(attention, mlp)


def layer_bwd(
    layer: Layer,
    res: LayerResiduals,
    dy: Float[Array, "tokens hidden"],
    *,
    settings: Settings,
    into: tuple[Layer, LayerAdapter | None] | None = None,
    below: Any = None,
) -> tuple[Float[Array, "tokens hidden"], tuple[Layer, LayerAdapter | None]]:
    """Returns dx and the gradients of the layer and of its adapter. ``below`` is the weight whose
    product made the layer's input, if any.
    """
    dx, of_mlp, of_mlp_adapter = mlp_block_bwd(
        res.mlp, dy, layer=layer, settings=settings, into=into
    )
    dx, of_attention, of_attention_adapter = attention_block_bwd(
        res.attention, dx, layer=layer, settings=settings, into=into, below=below
    )
    adapter = LayerAdapter(**of_attention_adapter, **of_mlp_adapter) if settings.lora else None
    return dx, (Layer(**of_attention, **of_mlp), adapter)


def _layer_pair(context: Context, settings: Settings, model: Model) -> LayerPair:
    windows = settings.config.windows

    def fwd(params: Any, x: Array, index: int, keep: bool, need_y: bool) -> Any:
        layer, adapter = params
        return layer_fwd(
            layer,
            adapter,
            x,
            context=context,
            settings=settings,
            window=windows[index],
            keep=keep,
            need_y=need_y,
        )

    def bwd(params: Any, res: Any, dy: Array, index: int, into: Any) -> Any:
        below = model.layers[index - 1].w_down if index else None  # the first is on tokens
        return layer_bwd(params[0], res, dy, settings=settings, into=into, below=below)

    return LayerPair(fwd, bwd)


def adapters_of(model: Model, adapter: Adapter | None) -> tuple[LayerAdapter | None, ...]:
    """The adapter of each layer."""
    return adapter.layers if adapter is not None else (None,) * len(model.layers)


def _layers(model: Model, adapter: Adapter | None) -> tuple[Any, ...]:
    return tuple(zip(model.layers, adapters_of(model, adapter), strict=True))


def hidden_fwd(
    model: Model,
    adapter: Adapter | None,
    batch: Batch,
    *,
    table: RopeTable,
    settings: Settings,
    recompute: Recompute = "none",
) -> tuple[Float[Array, "tokens hidden"], HiddenResiduals]:
    """The normed hidden state that the head multiplies."""
    x, _ = embedding_fwd(model.embed, tokens=batch.tokens)
    pair = _layer_pair(Context(batch.docs, batch.positions, table, batch.rows), settings, model)
    x, layers = stack_fwd(Resident(_layers(model, adapter)), x, pair, recompute=recompute)
    y, norm = rmsnorm_fwd(x, model.norm, eps=settings.config.eps)
    return y, HiddenResiduals(layers, norm)


def hidden(
    model: Model,
    adapter: Adapter | None,
    batch: Batch,
    *,
    table: RopeTable,
    settings: Settings,
    source: LayerSource | None = None,
) -> Float[Array, "tokens hidden"]:
    """hidden_fwd without residuals: the memory of one layer.

    ``source`` gives (layer, adapter) pairs in the place of those of the two trees.
    """
    pair = _layer_pair(Context(batch.docs, batch.positions, table, batch.rows), settings, model)
    if source is None:
        source = Resident(_layers(model, adapter))
    x = stack_apply(source, embedding_fwd(model.embed, tokens=batch.tokens)[0], pair)
    return rmsnorm_fwd(x, model.norm, eps=settings.config.eps)[0]


def hidden_bwd(
    model: Model,
    adapter: Adapter | None,
    res: HiddenResiduals,
    dy: Float[Array, "tokens hidden"],
    *,
    batch: Batch,
    table: RopeTable,
    settings: Settings,
    recompute: Recompute = "none",
    into: Grads | None = None,
) -> tuple[Float[Array, "tokens hidden"], Any, tuple[Any, ...]]:
    """Returns the gradient of the embedded tokens, of the final norm and of (layer, adapter) pairs.

    Consumes ``res``: a layer's residuals are freed when its backward is done.
    """
    buffers = None if into is None else _layers(into.model, into.adapter)
    dx, d_norm = rmsnorm_bwd(
        res.norm,
        dy,
        into=None if into is None else into.model.norm,
        out=with_room(dy, dy.shape[1], model.layers[-1].w_down),
    )
    pair = _layer_pair(Context(batch.docs, batch.positions, table, batch.rows), settings, model)
    sink = Collected(buffers, len(model.layers))
    source = Resident(_layers(model, adapter))
    dx = stack_bwd(source, res.layers, dx, sink, pair, recompute=recompute)
    return dx, d_norm, tuple(sink.grads)


def head_weight(model: Model) -> Float[Array, "vocab hidden"]:
    """The output projection: the embedding where they are tied."""
    return model.embed if model.head is None else model.head


def loss_fwd(
    model: Model,
    adapter: Adapter | None,
    batch: Batch,
    *,
    table: RopeTable,
    settings: Settings,
    chunk: int | None = None,
) -> LossOutputs:
    """Sum of the negative log-likelihood, count of supervised tokens, and log-probabilities."""
    x = hidden(model, adapter, batch, table=table, settings=settings)
    outputs, _ = lm_head_loss_fwd(x, head_weight(model), labels=batch.labels, chunk=chunk)
    return outputs


def loss_and_grads(
    model: Model,
    adapter: Adapter | None,
    batch: Batch,
    *,
    table: RopeTable,
    settings: Settings,
    recompute: Recompute = "none",
    chunk: int | None = None,
    into: Grads | None = None,
    totals: Any = None,
) -> tuple[LossOutputs, Grads]:
    """Loss of a micro-batch and the gradients of its SUM, added into ``into`` where buffers are
    given.

    ``into`` holds arrays to add to, FROZEN leaves to leave out, or None for fresh gradients of
    everything. ``totals`` are (nll_sum, count) arrays that the outputs are added to.
    """
    x, res = hidden_fwd(model, adapter, batch, table=table, settings=settings, recompute=recompute)
    tied = model.head is None
    to_embed = None if into is None else into.model.embed
    to_head = None if into is None else into.model.head
    outputs, dx, d_head = lm_head_loss_and_grad(
        x,
        head_weight(model),
        labels=batch.labels,
        chunk=chunk,
        into=to_embed if tied else to_head,
        totals=totals,
    )
    del x
    dx, d_norm, layers = hidden_bwd(
        model,
        adapter,
        res,
        dx,
        batch=batch,
        table=table,
        settings=settings,
        recompute=recompute,
        into=into,
    )
    d_embed = embedding_bwd(
        EmbeddingResiduals(batch.tokens, len(model.embed), model.embed.dtype),
        dx,
        into=d_head if tied and into is None else to_embed,
    )
    grads = Model(
        d_embed,  # type: ignore[arg-type]  # None where frozen
        tuple(layer for layer, _ in layers),
        d_norm,
        None if tied else d_head,
    )
    of_adapter = Adapter(tuple(a for _, a in layers)) if adapter is not None else None
    return outputs, Grads(grads, of_adapter)


def logits(
    model: Model,
    adapter: Adapter | None,
    batch: Batch,
    *,
    table: RopeTable,
    settings: Settings,
    source: LayerSource | None = None,
) -> Float[Array, "tokens vocab"]:
    """Logits of every position, float32. ``source`` is that of ``hidden``."""
    x = hidden(model, adapter, batch, table=table, settings=settings, source=source)
    return lm_logits(x, head_weight(model))
