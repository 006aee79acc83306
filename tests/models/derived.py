"""The layer as a forward alone, for vjp: the same pairs in the same order as models/blocks.py."""

from surogate.kernels.attention import attention
from surogate.kernels.linear import linear
from surogate.kernels.qk_norm_rope import qk_norm_rope
from surogate.kernels.reshape import reshape
from surogate.kernels.rmsnorm import rmsnorm
from surogate.kernels.swiglu import swiglu
from surogate.models.blocks import part_of


def attention_forward(x, layer, adapter, *, context, settings, window=None):
    config = settings.config
    n = rmsnorm(x, layer.attn_norm, eps=config.eps)
    flat = linear(n, layer.w_qkv, layer.b_qkv, part_of(adapter, "qkv"), **settings.adapter("w_qkv"))
    heads = config.heads + 2 * config.kv_heads
    q, k, v = qk_norm_rope(
        reshape(flat, shape=(x.shape[0], heads, config.head_dim)),
        layer.q_norm,
        layer.k_norm,
        table=context.table,
        positions=context.positions,
        heads=config.heads,
        kv_heads=config.kv_heads,
        eps=config.eps,
    )
    o = attention(q, k, v, docs=context.docs, scale=config.head_dim**-0.5, window=window)
    return linear(
        reshape(o, shape=(x.shape[0], config.heads * config.head_dim)),
        layer.w_o,
        None,
        part_of(adapter, "o"),
        x,
        **settings.adapter("w_o"),
    )


def layer_forward(layer, adapter, x, *, context, settings):
    x = attention_forward(x, layer, adapter, context=context, settings=settings)
    n = rmsnorm(x, layer.mlp_norm, eps=settings.config.eps)
    both = linear(
        n, layer.w_gate_up, None, part_of(adapter, "gate_up"), **settings.adapter("w_gate_up")
    )
    return linear(
        swiglu(both),
        layer.w_down,
        None,
        part_of(adapter, "down"),
        x,
        **settings.adapter("w_down"),
    )
