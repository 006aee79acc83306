"""Parameter trees of the dense decoders (Llama, Qwen2, Qwen3), and of their LoRA adapters.

A tree is a NamedTuple of arrays and holds no behaviour. Gradients, optimizer moments and master
weights are trees of the same types with other leaves; None stands for a leaf that an architecture
does not have (a bias, a q norm, an untied head) or that nobody trains.

Matrices are [out, in], as in checkpoints: y = x W^T. Projections that read the same input are
stacked by rows into one matrix, so that each layer runs four matrix products and not seven.
The tree that a pass reads may have a ``Widened`` for a matrix with an adapter (models/widen.py).
``models.names`` holds the map between these fields and the tensors of a checkpoint.
"""

from typing import NamedTuple

from jaxtyping import Float

from surogate.kernels.arrays import Array
from surogate.kernels.linear import LoRA


class Layer(NamedTuple):
    """Parameters of one decoder layer. qkv = (heads + 2 * kv_heads) * head_dim."""

    attn_norm: Float[Array, " hidden"]
    w_qkv: Float[Array, "qkv hidden"]
    """Rows of q, then of k, then of v."""
    b_qkv: Float[Array, " qkv"] | None
    q_norm: Float[Array, " head_dim"] | None
    k_norm: Float[Array, " head_dim"] | None
    w_o: Float[Array, "hidden q"]
    """q = heads * head_dim columns, which need not be hidden."""
    mlp_norm: Float[Array, " hidden"]
    w_gate_up: Float[Array, "two_ffn hidden"]
    """Rows of gate, then of up."""
    w_down: Float[Array, "hidden ffn"]


class Model(NamedTuple):
    """Parameters of a model. ``head`` is None when the embedding is also the output matrix."""

    embed: Float[Array, "vocab hidden"]
    layers: tuple[Layer, ...]
    norm: Float[Array, " hidden"]
    head: Float[Array, "vocab hidden"] | None


class LayerAdapter(NamedTuple):
    """LoRA pairs of one layer's four matrices; None where the matrix is not adapted.

    When only some parts of a stacked matrix are adapted (say q and v), ``a`` stacks the A matrices
    of those parts by rows, ``b`` their rows of B, both in the order of the matrix. Part p then uses
    a[p * rank : (p + 1) * rank] and its own rows of b.
    """

    qkv: LoRA | None
    o: LoRA | None
    gate_up: LoRA | None
    down: LoRA | None


class Adapter(NamedTuple):
    """LoRA pairs of a model."""

    layers: tuple[LayerAdapter, ...]
