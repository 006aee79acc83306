"""The ideal time of a training step: what its work takes at stated rates, one after another.

    time = products / 730 TFLOP/s + bytes / 4.2 TB/s
         + attention / 500 TFLOP/s (forward) and 385 TFLOP/s (backward)

The rates are what the best library calls reach on an H200 at training sizes (matrix products of 650
to 800 TFLOP/s, attention of a long row), not a datasheet's. Bytes are the fewest that can be moved
between the products, in bf16: two norms with the residual stream, the norm and rotation of q and k,
SwiGLU; for adapters one more read of what they are applied to; AdamW with bf16 moments once a step;
accumulated gradients read and written once a micro-batch. Nothing overlaps, so a step that hides
memory traffic under products can pass 100 %.

    python -m bench.ceiling
"""

from dataclasses import dataclass

from surogate.models.config import ModelConfig
from surogate.models.flops import matrix_parameters
from surogate.models.registry import lookup


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s that a step is held against."""

    products: float = 730e12
    attention_forward: float = 500e12
    attention_backward: float = 385e12
    copy: float = 4.2e12


def ideal_seconds(
    config: ModelConfig,
    *,
    lora: bool,
    length: int,
    tokens: int,
    accumulation: int,
    recompute: bool = False,
    rates: Rates | None = None,
) -> float:
    """Seconds of a step of ``accumulation`` micro-batches of ``tokens``, in rows of ``length``."""
    rates = rates or Rates()
    body, head = matrix_parameters(config)
    passes, again = 2 if lora else 3, 1 if recompute else 0
    seconds = 2 * (body * (passes + again) + head * passes) / rates.products
    attention = 2 * length * config.q_rows * config.layers  # FLOP of a token, half the square
    seconds += attention * (1 + again) / rates.attention_forward
    seconds += 2.5 * attention / rates.attention_backward
    seconds += layer_bytes(config, lora=lora, again=again) * config.layers / rates.copy
    seconds += 8 * config.vocab / rates.copy  # logits written, read, and their gradient likewise
    if not lora:
        parameters = body + head
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


CASES = (
    ("qwen3-0.6b", True, 2048, 2, 4, False),
    ("qwen3-0.6b", True, 2048, 2, 4, True),
    ("qwen3-0.6b", False, 2048, 8, 1, False),
    ("qwen3-1.7b", True, 2048, 2, 4, False),
    ("qwen3-8b", True, 2048, 2, 4, False),
    ("qwen3-8b", True, 2048, 2, 4, True),
    ("qwen3-8b", False, 2048, 2, 4, False),
    ("qwen2.5-0.5b", False, 1024, 32, 16, False),
    ("qwen2.5-1.5b", False, 1024, 32, 16, False),
)


def main() -> None:
    for name, lora, length, rows, accumulation, recompute in CASES:
        tokens = rows * length
        seconds = ideal_seconds(
            lookup(name),
            lora=lora,
            length=length,
            tokens=tokens,
            accumulation=accumulation,
            recompute=recompute,
        )
        kind = f"{'LoRA' if lora else 'full'}{', recompute' if recompute else ''}"
        shape = f"{rows} x {length} x {accumulation}"
        print(
            f"{name:14s} {kind:16s} {shape:14s} {tokens * accumulation / seconds:10,.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
