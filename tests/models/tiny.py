"""Small models of each family, in transformers and here, with the same random weights.

Weights are drawn wide (standard deviation 0.2), so that no branch is too faint to be seen in the
loss.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from surogate.api import LoadedModel, load

COMMON = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=False),
    "qwen3_tied": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True),
    "llama": dict(model_type="llama", tie_word_embeddings=False, rope_parameters=LLAMA3),
    "llama_tied": dict(model_type="llama", tie_word_embeddings=True, rope_parameters=LLAMA3),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen2_window": dict(
        model_type="qwen2",
        num_hidden_layers=3,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
}


def reference(family: str, *, layers: int | None = None, seed: int = 0) -> Any:
    """A transformers model in float32 with eager attention."""
    settings = {**COMMON, **FAMILIES[family]}
    if layers is not None:
        settings["num_hidden_layers"] = layers
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model.float().eval()


def both(family: str, directory: Path, **options: Any) -> tuple[Any, LoadedModel]:
    """The same model in transformers and here."""
    model = reference(family, **options)
    model.save_pretrained(directory)
    return model, load(directory, device="cpu")


def documents(*lengths: int, seed: int = 0, vocab: int = 128) -> list[list[int]]:
    """Random token lists."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def reference_loss(model: Any, tokens: list[int]) -> Any:
    """Sum of the negative log-likelihood of a document in transformers, to be differentiated."""
    ids = torch.tensor([tokens])
    scores = model(input_ids=ids, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(scores[:-1], ids[0, 1:], reduction="sum")
