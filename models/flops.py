"""Floating-point operations of a training step, counted from the configuration.

A product of m x k and k x n is 2mkn operations. Attention needs two products a causal cell forward
(scores, values) and five backward (scores again, and the gradients of probabilities, q, k and v).
Norms, rotations and activations are bound by memory and not counted.
"""

from typing import NamedTuple

from surogate.models.config import ModelConfig, parameter_shapes
from surogate.models.stack import Recompute


class Flops(NamedTuple):
    """Operations of some tokens: of dense products, and of attention."""

    products: int
    attention: int

    @property
    def total(self) -> int:
        return self.products + self.attention


def matrix_parameters(config: ModelConfig) -> tuple[int, int]:
    """Elements of the layers' matrices, and of the head's (tied or not)."""
    shapes = parameter_shapes(config)
    body = 0
    for layer in shapes.layers:
        for rows, columns in (layer.w_qkv, layer.w_o, layer.w_gate_up, layer.w_down):
            body += rows * columns
    return body, config.vocab * config.hidden


def recomputed_parameters(config: ModelConfig) -> int:
    """Elements of the matrices whose products a layer that is computed again repeats."""
    body, _ = matrix_parameters(config)
    return body - config.layers * config.hidden * config.ffn


def training_flops(
    config: ModelConfig, *, tokens: int, cells: int, lora_rank: int | None, recompute: Recompute
) -> Flops:
    """Operations of forward and backward over ``tokens`` that attend to ``cells`` keys in all.

    With adapters (``lora_rank``) the base weights have no gradient; the adapters' own products are
    left out (under 2 % at rank 16). Recomputing blocks adds the layers' forward but for its last
    product, whose result nobody needs; the selective policy recomputes no product.
    """
    body, head = matrix_parameters(config)
    passes = 2 if lora_rank else 3
    again = 1 if recompute == "block" else 0
    recomputed = again * recomputed_parameters(config)
    products = 2 * tokens * (body * passes + recomputed + head * passes)
    forward = 4 * config.heads * config.head_dim * cells * config.layers
    return Flops(products, forward * (1 + again) + forward * 5 // 2)
