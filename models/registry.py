"""Published models by name: their config.json without the weights.

For training from scratch, benchmarks and memory plans. ``Qwen/Qwen3-0.6B``, ``Qwen3-0.6B`` and
``qwen3-0.6b`` are one name. Each entry is the base model of its size (Qwen3: the post-trained one,
which carries the plain name). Parameter counts are checked against the published ones in tests.
"""

import copy
from typing import Any

from surogate.models.config import ModelConfig, from_hf, nearest


def _qwen3(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def _qwen25(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    tied: bool = False,
    eps: float = 1e-6,
) -> dict[str, Any]:
    # The tied sizes were trained on shorter sequences and pad their vocabulary less.
    positions = 32768 if tied else 131072
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": positions,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": eps,
        "rope_theta": 1000000.0,
        "sliding_window": positions,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936 if tied else 152064,
    }


def _llama3(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
    rope_factor: float = 8.0,
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": ffn,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": rope_factor,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "Qwen/Qwen2.5-0.5B": _qwen25(896, 4864, 24, 14, 2, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2, tied=True),
    "Qwen/Qwen2.5-3B": _qwen25(2048, 11008, 36, 16, 2, tied=True),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen25(5120, 13824, 48, 40, 8, eps=1e-5),
    "Qwen/Qwen2.5-32B": _qwen25(5120, 27648, 64, 40, 8, eps=1e-5),
    "Qwen/Qwen2.5-72B": _qwen25(8192, 29568, 80, 64, 8, eps=1e-5),
    "meta-llama/Llama-3.2-1B": _llama3(
        2048, 8192, 16, 32, head_dim=64, tied=True, rope_factor=32.0
    ),
    "meta-llama/Llama-3.2-3B": _llama3(3072, 8192, 28, 24, tied=True, rope_factor=32.0),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B": _llama3(8192, 28672, 80, 64),
    "meta-llama/Llama-3.1-405B": _llama3(16384, 53248, 126, 128),
}


def resolve(name: str) -> str:
    """The full name of a model, from any spelling of it, with or without its organisation.

    Raises:
        ValueError: no such model; gives the nearest name.
    """
    wanted = name.strip().lower()
    for full in MODELS:
        if wanted in (full.lower(), full.lower().split("/")[1]):
            return full
    known = [full if "/" in name else full.split("/")[1] for full in MODELS]
    raise ValueError(f"model {name!r} is not in the registry{nearest(name.strip(), known)}")


def hf_config(name: str) -> dict[str, Any]:
    """A copy of the config.json of a model. Raises ValueError with the nearest name."""
    return copy.deepcopy(MODELS[resolve(name)])


def lookup(name: str) -> ModelConfig:
    """The configuration of a model. Raises ValueError with the nearest name."""
    return from_hf(MODELS[resolve(name)])
