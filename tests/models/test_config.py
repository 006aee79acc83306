"""Configurations: against transformers' own reading of the same files, and every refusal."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from surogate.kernels import tree
from surogate.models.config import (
    ModelConfig,
    count,
    from_hf,
    parameter_shapes,
    read_config,
    with_rope_scaling,
)
from surogate.models.names import layer_fields, layout
from surogate.models.registry import lookup

# A checkout has a folder called kernels: transformers must not take it for the package kernels.
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPECIFICS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": LLAMA3,
        "num_hidden_layers": 2,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_hidden_layers": 2},
}


def tiny(architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json as transformers 4 wrote it; a change to None leaves the field out."""
    raw = {
        "model_type": architecture,
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    raw |= SPECIFICS[architecture] | changes
    return {key: value for key, value in raw.items() if value is not None}


def hf_config(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    raw = json.loads(json.dumps(raw))  # transformers writes into nested dictionaries
    return AutoConfig.for_model(raw.pop("model_type"), **raw)


VARIANTS = [
    tiny("llama"),
    tiny("llama", head_dim=16, num_key_value_heads=None),
    tiny("llama", rope_scaling={"type": "linear", "factor": 2.0}),
    tiny("llama", rope_scaling=None, rope_theta=None),
    tiny("qwen2"),
    tiny("qwen2", use_sliding_window=False),
    tiny("qwen2", use_sliding_window=None, sliding_window=4),
    tiny("qwen2", layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    tiny("qwen3"),
    tiny("qwen3", head_dim=None),
    tiny("qwen3", rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    tiny("qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}),
    tiny("qwen3", rope_scaling=LLAMA3, use_sliding_window=True, sliding_window=8),
]


@pytest.mark.parametrize("style", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("raw", VARIANTS)
def test_means_what_transformers_reads(raw: dict[str, Any], style: str, tmp_path: Path) -> None:
    theirs = hf_config(raw)
    if style == "transformers 5":
        theirs.save_pretrained(tmp_path)
        ours = read_config(tmp_path)
        assert "rope_parameters" in ours.raw
    else:
        ours = from_hf(raw)
    assert (ours.vocab, ours.hidden, ours.ffn) == (128, 32, 48)
    assert ours.layers == theirs.num_hidden_layers
    assert (ours.heads, ours.kv_heads) == (4, theirs.num_key_value_heads)
    assert ours.head_dim == getattr(theirs, "head_dim", 8)
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.initializer_range == theirs.initializer_range
    assert ours.torch_dtype == "float32"
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * ours.layers
    assert ours.windows == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds
    )
    rope = theirs.rope_parameters
    assert (ours.rope.kind, ours.rope.base) == (rope["rope_type"], rope["rope_theta"])
    for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast"):
        if key in rope:
            assert getattr(ours.rope, key) == rope[key]
    assert ours.rope.original_max_positions == rope.get("original_max_position_embeddings", 256)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_names_and_shapes_are_transformers(architecture: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    raw = tiny(architecture)
    config = from_hf(raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(raw))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ours = {
        piece.name: field.shape_of(piece)
        for field in tree.leaves(layout(config))
        for piece in field.pieces
    }
    assert ours == theirs
    assert count(config) == sum(parameter.numel() for parameter in model.parameters())


def test_shapes_of_stacked_weights() -> None:
    shapes = parameter_shapes(from_hf(tiny("qwen3")))
    layer = shapes.layers[1]
    assert (layer.w_qkv, layer.w_o, layer.w_gate_up) == ((128, 32), (32, 64), (96, 32))
    assert (layer.q_norm, layer.b_qkv, shapes.head) == ((16,), None, (128, 32))


def test_head_dim_is_not_hidden_over_heads() -> None:
    """Qwen3-4B, whose 32 heads of 128 are wider than its hidden size, and a tiny one."""
    for config, want in (
        (
            lookup("Qwen3-4B"),
            {"q": (4096, 2560), "k": (1024, 2560), "o": (2560, 4096), "n": (128,)},
        ),
        (
            from_hf(tiny("qwen3", hidden_size=48, num_key_value_heads=2, head_dim=16)),
            {"q": (64, 48), "k": (32, 48), "o": (48, 64), "n": (16,)},
        ),
    ):
        layer = layer_fields(config, 0)
        q, k, v = (layer.w_qkv.shape_of(piece) for piece in layer.w_qkv.pieces)
        assert (q, k, v) == (want["q"], want["k"], want["k"])
        assert layer.w_o.shape == want["o"]
        assert layer.q_norm.shape == layer.k_norm.shape == want["n"]


def test_configurations_are_values() -> None:
    one, other = from_hf(tiny("qwen3")), from_hf(tiny("qwen3", use_cache=True))
    assert one == other and hash(one) == hash(other)
    assert one != from_hf(tiny("qwen3", rms_norm_eps=1e-5))


@pytest.mark.parametrize(
    "architecture,changes,message",
    [
        ("llama", {"model_type": "mamba"}, "model_type 'mamba' .* supported: llama, qwen2, qwen3"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"hidden_size": 31}, "hidden_size 31 must be a multiple"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0 must be a positive whole"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 must be at most 1"),
        ("llama", {"vocab_size": 2**31}, "vocab_size 2147483648 must be at most 2147483647"),
        ("llama", {"rope_theta": 10**400}, "rope_theta 1000* must be a positive number"),
        ("llama", {"vocab_size": True}, "vocab_size True must be a positive whole"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of 3"),
        ("qwen3", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ("qwen3", {"head_dim": 7}, "head_dim 7 must be even"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6' must be a positive number"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings 1 must be true or false"),
        ("llama", {"attention_bias": True}, "attention_bias True is not supported for llama"),
        ("qwen3", {"attention_bias": True}, "attention_bias True is not supported for qwen3"),
        ("llama", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; must be 'silu'"),
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8"}},
            "must have a weight_block_size",
        ),
        ("qwen2", {"torch_dtype": "int8"}, "torch_dtype 'int8' is not supported"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types .* num_hidden_layers = 3"),
        ("qwen2", {"layer_types": ["linear"] * 3}, "layer_types 'linear' is not full_attention"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "layer_types names sliding_attention, but use_sliding_window",
        ),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers -1 must be a whole number"),
        ("llama", {"original_max_position_embeddings": 64}, "must be inside rope_scaling"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("llama", {"rope_scaling": [2]}, r"rope_scaling \[2\] must be an object"),
        ("llama", {"rope_scaling": {"type": 7}}, "rope_type 7 is not supported; known: default"),
        ("llama", {"rope_scaling": {"type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_type linear needs factor"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, "factor 0.5 must be at least 1"),
        (
            "llama",
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
            "low_freq_factor must be less than high_freq_factor",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fats": 16}},
            "beta_fats is not a key of rope_type yarn, did you mean beta_fast?",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
            "truncate 1 must be true or false",
        ),
    ],
)
def test_refuses_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_hf(tiny(architecture, **changes))
    assert "\n" not in str(error.value)


def test_read_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no config.json"):
        read_config(tmp_path)
    path = tmp_path / "config.json"
    for text, message in [
        ("{", "config.json: cannot be read as JSON"),
        ("[]", "config.json: must hold a JSON object, got list"),
        (json.dumps(tiny("llama", mlp_bias=True)), "config.json: mlp_bias True"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)


def both_styles(architecture: str, tmp_path: Path) -> list[ModelConfig]:
    raw = tiny(architecture)
    hf_config(raw).save_pretrained(tmp_path)
    return [from_hf(raw), read_config(tmp_path)]


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
def test_rope_scaling_by_name(kind: str, tmp_path: Path) -> None:
    for config in both_styles("qwen3", tmp_path):
        scaled = with_rope_scaling(config, kind, 1024)
        assert (scaled.rope.kind, scaled.rope.factor) == (kind, 4.0)
        # linear divides every position alike, whatever the model was trained on
        assert scaled.rope.original_max_positions == (1024 if kind == "linear" else 256)
        assert scaled.max_positions == (256 if kind == "dynamic" else 1024)
        theirs = hf_config(scaled.raw)
        assert theirs.max_position_embeddings == scaled.max_positions
        assert theirs.rope_parameters["rope_type"] == kind
        assert theirs.rope_parameters["rope_theta"] == scaled.rope.base == 10000.0
        assert theirs.rope_parameters["factor"] == 4.0
        assert from_hf(scaled.raw) == scaled
        rest = dataclasses.replace(
            scaled, rope=config.rope, max_positions=config.max_positions, raw=config.raw
        )
        assert rest == config  # nothing else changed


def test_rope_scaling_by_dictionary(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 2.0, "attention_factor": 1.5, "rope_theta": 500.0}
    for config in both_styles("llama", tmp_path):
        for scaling in (keys, json.dumps(keys)):
            scaled = with_rope_scaling(config, scaling)
            assert scaled.rope.attention_factor == 1.5
            assert (scaled.rope.base, scaled.max_positions) == (500.0, 512)
            assert hf_config(scaled.raw).rope_parameters["rope_theta"] == 500.0
            # A yarn model is stretched from what it was trained on, not from what it reaches.
            assert with_rope_scaling(scaled, "yarn", 1024).rope.factor == 4.0
        assert with_rope_scaling(config, {"rope_type": "default"}).rope.kind == "default"


@pytest.mark.parametrize(
    "scaling,length,message",
    [
        ("yrn", 1024, "rope_scaling 'yrn' is not a kind, did you mean yarn?"),
        ("yarn", None, "rope_scaling yarn needs max_model_len, or a factor"),
        ("yarn", 256, "max_model_len 256 is within the 256 positions"),
        ({"rope_type": "linear", "factor": 2.0}, 1024, "256 positions to 512, less than"),
        ({"factor": 2.0}, None, "rope_scaling None is not a kind"),
        ({"rope_type": "linear", "facto": 2.0}, 512, "facto is not a key of rope_type linear"),
        ("{", 512, "rope_scaling: not a JSON object"),
        ({"rope_type": "llama3", "factor": 2.0}, 512, "rope_type llama3 needs high_freq_factor"),
    ],
)
def test_rope_scaling_refuses(scaling: Any, length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_rope_scaling(from_hf(tiny("qwen3")), scaling, length)
