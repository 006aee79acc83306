"""The blocks that transformer layers are made of: written-out pairs over ops.

    Attention:  y = x + W_o attention(rope(qk_norm(W_qkv norm(x))))
    MLP:        y = x + W_down swiglu(W_gate_up norm(x))

The residual add happens inside the last matrix product, forward, and inside the norm's kernel,
backward. ``keep=False`` drops the outputs of norms and activations, which the backward then
computes again.

Where a weight is widened by its adapter (kernels/widened.py), what a block hands to a product is
written into rows with room for the adapter's share: the outputs of norms and activation, the
gradient of gate and up, and the dx that a block returns, which is the dy of the product that ends
the block before it.

What norms and activation make for a product of codes they may cast in the same pass: ``input_cast``
and ``gradient_cast`` (kernels/linear.py) ask the weight.
"""

import functools
from typing import Any, NamedTuple

from jaxtyping import Float, Int32

from surogate.kernels.arrays import Array
from surogate.kernels.attention import attention_bwd_packed, attention_fwd
from surogate.kernels.batch import Docs
from surogate.kernels.fp8 import Cast
from surogate.kernels.linear import (
    LinearInto,
    gradient_cast,
    input_cast,
    linear_bwd,
    linear_fwd,
    linear_residuals,
    needs_x,
)
from surogate.kernels.qk_norm_rope import qk_norm_rope_bwd_, qk_norm_rope_fwd
from surogate.kernels.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from surogate.kernels.rope import RopeTable
from surogate.kernels.swiglu import swiglu_bwd, swiglu_fwd
from surogate.kernels.widened import with_room
from surogate.models.config import ModelConfig
from surogate.models.lora import LoraSpec
from surogate.models.tree import Layer, LayerAdapter


class Context(NamedTuple):
    """What every layer of a micro-batch shares."""

    docs: Docs
    positions: Int32[Array, " tokens"]
    table: RopeTable
    rows: int | None = None  # documents are this many equally long pieces, see Batch


class Settings(NamedTuple):
    """What does not change within a run."""

    config: ModelConfig
    lora: LoraSpec | None = None

    def adapter(self, field: str) -> dict[str, Any]:
        """Settings of the linear op for one weight's adapter."""
        if self.lora is None:
            return {}
        return {"parts": _parts(self.lora, self.config, field), "scale": self.lora.scale}


@functools.cache
def _parts(lora: LoraSpec, config: ModelConfig, field: str) -> tuple[tuple[int, int], ...]:
    return lora.parts(config, field)


class AttentionResiduals(NamedTuple):
    norm: Any
    qkv: Any
    rope: Any
    attention: Any
    out: Any


class MLPResiduals(NamedTuple):
    norm: Any
    gate_up: Any
    swiglu: Any
    down: Any


def part_of(tree: Any, name: str) -> Any:
    """A field of a tree; None where there is no tree."""
    return None if tree is None else getattr(tree, name)


def attention_block_fwd(
    x: Float[Array, "tokens hidden"],
    layer: Layer,
    adapter: LayerAdapter | None,
    *,
    context: Context,
    settings: Settings,
    window: int | None,
    keep: bool = True,
) -> tuple[Float[Array, "tokens hidden"], AttentionResiduals]:
    """Returns x + attention(norm(x)) and what the backward needs."""
    config = settings.config
    cast = input_cast(layer.w_qkv, x, keep_x=keep)
    n, norm = _norm(x, layer.attn_norm, layer.w_qkv, config, cast)
    flat, qkv = linear_fwd(
        n,
        layer.w_qkv,
        layer.b_qkv,
        part_of(adapter, "qkv"),
        keep_x=keep,
        cast=cast,
        **settings.adapter("w_qkv"),
    )
    del cast
    (q, k, v), rope = rotate(flat, layer, context, config)
    o, attention = attention_fwd(
        q,
        k,
        v,
        docs=context.docs,
        scale=config.head_dim**-0.5,
        window=window,
        rows=context.rows,
    )
    y, out = linear_fwd(
        o.reshape(len(x), -1), layer.w_o, None, part_of(adapter, "o"), x, **settings.adapter("w_o")
    )
    return y, AttentionResiduals(norm, qkv, rope, attention, out)


def _norm(
    x: Array, weight: Array, reader: Any, config: ModelConfig, cast: Cast | None = None
) -> Any:
    """The norm of x, with room for the weight that reads it, and its residuals."""
    out = with_room(x, x.shape[1], reader)
    return rmsnorm_fwd(x, weight, eps=config.eps, out=out, cast=cast)


def rotate(flat: Array, layer: Layer, context: Context, config: ModelConfig) -> Any:
    """Splits a fused projection into q, k and v, and normalises and rotates q and k."""
    heads = config.heads + 2 * config.kv_heads
    return qk_norm_rope_fwd(
        flat.reshape(len(flat), heads, config.head_dim),
        layer.q_norm,
        layer.k_norm,
        table=context.table,
        positions=context.positions,
        heads=config.heads,
        kv_heads=config.kv_heads,
        eps=config.eps,
    )


def attention_block_bwd(
    res: AttentionResiduals,
    dy: Float[Array, "tokens hidden"],
    *,
    layer: Layer,
    settings: Settings,
    into: tuple[Layer, LayerAdapter | None] | None = None,
    below: Any = None,
) -> tuple[Float[Array, "tokens hidden"], dict[str, Any], dict[str, Any]]:
    """Returns dx, the gradients of the layer's fields that this block uses, and those of its
    adapters. ``below`` is the weight whose product made x, if any: dx has room for it.
    """
    weights, adapters = into if into is not None else (None, None)
    config = settings.config
    do, d_w_o, _, d_o, _ = linear_bwd(
        res.out, dy, into=LinearInto(part_of(weights, "w_o"), None, part_of(adapters, "o"))
    )
    assert do is not None
    packed, _ = attention_bwd_packed(
        res.attention, do.reshape(len(dy), config.heads, config.head_dim)
    )
    dqkv, d_q_norm, d_k_norm = qk_norm_rope_bwd_(
        res.rope, packed, into=(part_of(weights, "q_norm"), part_of(weights, "k_norm"))
    )
    x = res.qkv.x
    if needs_x(res.qkv):
        x = _norm(res.norm.x, layer.attn_norm, layer.w_qkv, config)[0]
    dn, d_w_qkv, d_b_qkv, d_qkv, _ = linear_bwd(
        res.qkv,
        dqkv.reshape(len(dy), -1),
        into=LinearInto(
            part_of(weights, "w_qkv"), part_of(weights, "b_qkv"), part_of(adapters, "qkv")
        ),
        x=x,
    )
    assert dn is not None
    dx, d_attn_norm = rmsnorm_bwd(
        res.norm,
        dn,
        dresidual=dy,
        into=part_of(weights, "attn_norm"),
        out=with_room(dy, dy.shape[1], below),
    )
    grads = dict(
        attn_norm=d_attn_norm,
        w_qkv=d_w_qkv,
        b_qkv=d_b_qkv,
        q_norm=d_q_norm,
        k_norm=d_k_norm,
        w_o=d_w_o,
    )
    return dx, grads, dict(qkv=d_qkv, o=d_o)


def mlp_block_fwd(
    x: Float[Array, "tokens hidden"],
    layer: Layer,
    adapter: LayerAdapter | None,
    *,
    settings: Settings,
    keep: bool = True,
    need_y: bool = True,
) -> tuple[Any, MLPResiduals]:
    """Returns x + mlp(norm(x)) and what the backward needs; without ``need_y``, that alone."""
    cast = input_cast(layer.w_gate_up, x, keep_x=keep)
    n, norm = _norm(x, layer.mlp_norm, layer.w_gate_up, settings.config, cast)
    both, gate_up = linear_fwd(
        n,
        layer.w_gate_up,
        None,
        part_of(adapter, "gate_up"),
        keep_x=keep,
        cast=cast,
        **settings.adapter("w_gate_up"),
    )
    del cast
    cast = input_cast(layer.w_down, both, keep_x=keep) if need_y else None
    a, swiglu = _activation(both, layer, cast)
    if not need_y:
        down = linear_residuals(
            a,
            layer.w_down,
            None,
            part_of(adapter, "down"),
            has_residual=True,
            **settings.adapter("w_down"),
        )
        return None, MLPResiduals(norm, gate_up, swiglu, down)
    y, down = linear_fwd(
        a,
        layer.w_down,
        None,
        part_of(adapter, "down"),
        x,
        keep_x=keep,
        cast=cast,
        **settings.adapter("w_down"),
    )
    return y, MLPResiduals(norm, gate_up, swiglu, down)


def _activation(both: Array, layer: Layer, cast: Cast | None = None) -> Any:
    """swiglu_fwd with room for w_down."""
    return swiglu_fwd(both, out=with_room(both, both.shape[1] // 2, layer.w_down), cast=cast)


def mlp_block_bwd(
    res: MLPResiduals,
    dy: Float[Array, "tokens hidden"],
    *,
    layer: Layer,
    settings: Settings,
    into: tuple[Layer, LayerAdapter | None] | None = None,
) -> tuple[Float[Array, "tokens hidden"], dict[str, Any], dict[str, Any]]:
    """Returns dx, the gradients of the layer's fields that this block uses, and those of its
    adapters.
    """
    weights, adapters = into if into is not None else (None, None)
    a = _activation(res.swiglu.gate_up, layer)[0] if needs_x(res.down) else res.down.x
    da, d_w_down, _, d_down, _ = linear_bwd(
        res.down,
        dy,
        into=LinearInto(part_of(weights, "w_down"), None, part_of(adapters, "down")),
        x=a,
    )
    del a
    assert da is not None
    cast = gradient_cast(layer.w_gate_up, da)
    room = with_room(da, 2 * da.shape[1], layer.w_gate_up)
    d_both: Any = swiglu_bwd(res.swiglu, da, out=room, cast=cast)
    del da
    n = res.gate_up.x
    if needs_x(res.gate_up):
        n = _norm(res.norm.x, layer.mlp_norm, layer.w_gate_up, settings.config)[0]
    dn, d_w_gate_up, _, d_gate_up, _ = linear_bwd(
        res.gate_up,
        d_both,
        into=LinearInto(part_of(weights, "w_gate_up"), None, part_of(adapters, "gate_up")),
        x=n,
        cast=cast,
    )
    del cast
    assert dn is not None
    dx, d_mlp_norm = rmsnorm_bwd(
        res.norm,
        dn,
        dresidual=dy,
        into=part_of(weights, "mlp_norm"),
        out=with_room(dy, dy.shape[1], layer.w_o),
    )
    grads = dict(mlp_norm=d_mlp_norm, w_gate_up=d_w_gate_up, w_down=d_w_down)
    return dx, grads, dict(gate_up=d_gate_up, down=d_down)
