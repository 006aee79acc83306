"""The ideal time of a training step: what its work takes at stated rates, one after another.

    time = products / 730 TFLOP/s + bytes / 4.2 TB/s
         + attention / 500 TFLOP/s (forward) and 385 TFLOP/s (backward)

The rates are what the best library calls reach on an H200 at training sizes (matrix products of 650
to 800 TFLOP/s, attention of a long row), not a datasheet's. Bytes are the fewest that can be moved
between the products, in bf16: two norms with the residual stream, the norm and rotation of q and k,
SwiGLU; for adapters one more read of what they are applied to; AdamW with bf16 moments once a step;
accumulated gradients read and written once a micro-batch. In FP8 the layers' products take 1450
TFLOP/s, and their inputs are written and read as codes too. Nothing overlaps, so a step that hides
memory traffic under products can pass 100 %.
"""

from dataclasses import dataclass

from surogate.models.config import ModelConfig
from surogate.models.flops import matrix_parameters, recomputed_parameters


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s that a step is held against."""

    products: float = 730e12
    fp8_products: float = 1450e12
    attention_forward: float = 500e12
    attention_backward: float = 385e12
    copy: float = 4.2e12


def ideal_seconds(
    config: ModelConfig,
    *,
    lora: bool,
    keys: float,
    tokens: int,
    accumulation: int,
    recompute: bool = False,
    fp8: bool = False,
    rates: Rates | None = None,
) -> float:
    """Seconds of a step of ``accumulation`` micro-batches of ``tokens``.

    ``keys`` are what a token attends to on average: half of a row's length, half of the mean square
    over the mean of documents.
    """
    rates = rates or Rates()
    body, head = matrix_parameters(config)
    passes, again = 2 if lora else 3, 1 if recompute else 0
    body = body * passes + again * recomputed_parameters(config)
    seconds = 2 * body / (rates.fp8_products if fp8 else rates.products)
    seconds += 2 * head * passes / rates.products
    attention = 4 * keys * config.q_rows * config.layers  # FLOP of a token
    seconds += attention * (1 + again) / rates.attention_forward
    seconds += 2.5 * attention / rates.attention_backward
    seconds += layer_bytes(config, lora=lora, again=again) * config.layers / rates.copy
    seconds += 8 * config.vocab / rates.copy  # logits written, read, and their gradient likewise
    if fp8:  # a code more of each input
        inputs = 3 * config.hidden + config.q_rows + 2 * config.ffn
        seconds += 3 * inputs * config.layers / rates.copy
    if not lora:
        parameters = sum(matrix_parameters(config))
        seconds += parameters * 14 / rates.copy / (tokens * accumulation)
        seconds += parameters * 4 / rates.copy / tokens
    return seconds * tokens * accumulation


def layer_bytes(config: ModelConfig, *, lora: bool, again: int) -> float:
    """Fewest bytes of a token in a layer, between its products."""
    hidden, ffn, q, kv = config.hidden, config.ffn, config.q_rows, config.kv_rows
    forward = 2 * (8 * hidden + 2 * (q + kv) + 3 * ffn)
    backward = 2 * (10 * hidden + 3 * (q + kv) + 5 * ffn)
    inputs, outputs = 3 * hidden + q + ffn, q + 2 * kv + 2 * hidden + 2 * ffn
    adapters = 3 * (3 * inputs + 2 * outputs) if lora else 0
    return forward * (1 + again) + backward + adapters
