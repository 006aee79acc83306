"""Pre-quantised checkpoints: each layout read, and each way to break one refused by name."""

import hashlib
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from surogate.kernels.arrays import BF16
from surogate.kernels.quant.checkpoints import BNB_STATE, Scheme, assemble, scheme_of
from surogate.kernels.quant.codes import NF4_VALUES
from surogate.kernels.quant.nf4 import DYNAMIC_MAP
from surogate.kernels.quant.quantized import Quantized, dequantize, quantize
from tests.kernels.quant.expected import ramp
from tests.oracle import same_bits

F32, E4M3, E8M0 = np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
LAYER = "model.layers.0.mlp.down_proj"
FP8, MODELOPT = Scheme("fp8", "fp8", (128, 128)), Scheme("modelopt", "nvfp4", (1, 16))
COMPRESSED = Scheme("compressed-tensors", "nvfp4", (1, 16))
BNB, MXFP4 = Scheme("bitsandbytes", "nf4", (1, 64)), Scheme("mxfp4", "mxfp4", (1, 32))
RNG = np.random.default_rng(0)


def fp8_tensors() -> dict[str, Any]:
    codes = RNG.standard_normal((200, 300)).astype(E4M3)
    scales = RNG.uniform(1e-4, 1e-2, (2, 3)).astype(F32)
    norm = np.ones(300, BF16)
    return {
        f"{LAYER}.weight": codes,
        f"{LAYER}.weight_scale_inv": scales,
        "model.layers.0.input_layernorm.weight": norm,
    }


def fp4_codes(outer: int, inner: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, E4M3 scales, and their product without the tensor's scale."""
    codes = RNG.integers(0, 16, (outer, inner), dtype=np.uint8)
    scales = RNG.uniform(1, 400, (outer, inner // 16)).astype(E4M3)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, values


def modelopt_tensors() -> dict[str, Any]:
    packed, scales, _ = fp4_codes(24, 64)
    return {
        f"{LAYER}.weight": packed,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_scale_2": np.array(6.176e-5, F32),
        f"{LAYER}.input_scale": np.array(0.01, F32),
        "model.layers.0.self_attn.k_proj.k_scale": np.array(1, F32),
    }


def compressed_tensors() -> dict[str, Any]:
    packed, scales, _ = fp4_codes(24, 64)
    return {
        f"{LAYER}.weight_packed": packed,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_global_scale": np.array([16191.248], F32),
        f"{LAYER}.input_global_scale": np.array([10.0], F32),
    }


# What bitsandbytes 0.50.2 wrote of ramp(16, 64), blocks of 64, doubly quantised.
BNB_JSON = (
    b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [16, 64], '
    b'"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.048858642578125}'
)


def bnb_tensors() -> dict[str, Any]:
    weight = f"{LAYER}.weight"
    return {
        weight: quantize(ramp(16, 64), "nf4").codes[:, None],  # test_quantized: bitsandbytes' bytes
        f"{weight}.absmax": np.frombuffer(
            bytes.fromhex("f03a5cf00b5c00e43a5ce40b3ac2e42e"), np.uint8
        ),
        f"{weight}.quant_map": NF4_VALUES,
        f"{weight}.nested_absmax": np.frombuffer(bytes.fromhex("0000c43a"), F32),
        f"{weight}.nested_quant_map": DYNAMIC_MAP,
        f"{weight}.{BNB_STATE}": np.frombuffer(BNB_JSON, np.uint8),
    }


def mxfp4_tensors(experts: int = 3) -> dict[str, Any]:
    base = "model.layers.0.mlp.experts.gate_up_proj"
    return {
        f"{base}_blocks": RNG.integers(0, 256, (experts, 6, 2, 16), dtype=np.uint8),
        f"{base}_scales": RNG.integers(110, 130, (experts, 6, 2), dtype=np.uint8),
        f"{base}_bias": np.zeros((experts, 6), BF16),
    }


def only(out: dict[str, Any], name: str = f"{LAYER}.weight") -> Quantized:
    found = [value for value in out.values() if isinstance(value, Quantized)]
    assert found == [out[name]]
    return found[0]


@pytest.mark.parametrize("dtype", [F32, BF16, E8M0])
def test_fine_grained_fp8(dtype):
    tensors = fp8_tensors()
    name = f"{LAYER}.weight_scale_inv"
    tensors[name] = np.exp2(np.round(np.log2(tensors[name]))).astype(dtype)
    out = assemble(tensors, FP8)
    q = only(out)
    rows, columns = np.arange(200)[:, None] // 128, np.arange(300) // 128
    scales = tensors[name].astype(F32)[rows, columns]
    same_bits(dequantize(q), (tensors[f"{LAYER}.weight"].astype(F32) * scales).astype(BF16))
    norm = "model.layers.0.input_layernorm.weight"
    assert out.keys() == {f"{LAYER}.weight", norm} and out[norm] is tensors[norm]


def test_fp8_as_bytes_is_the_same():
    tensors = fp8_tensors()
    want = dequantize(only(assemble(tensors, FP8)))
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].view(np.uint8)
    same_bits(dequantize(only(assemble(tensors, FP8))), want)


def nvfp4_values(packed: np.ndarray, scales: np.ndarray, factor: np.float32) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)
    return (values * np.repeat(scales.astype(F32) * factor, 16, axis=1)).astype(BF16)


def test_modelopt():
    tensors = modelopt_tensors()
    out = assemble(tensors, MODELOPT)
    packed, scales = tensors[f"{LAYER}.weight"], tensors[f"{LAYER}.weight_scale"]
    same_bits(dequantize(only(out)), nvfp4_values(packed, scales, F32(6.176e-5)))
    assert len(out) == 1


def test_compressed_tensors_is_the_reciprocal_of_modelopt():
    tensors = compressed_tensors()
    q = only(assemble(tensors, COMPRESSED))
    packed, scales = tensors[f"{LAYER}.weight_packed"], tensors[f"{LAYER}.weight_scale"]
    same_bits(dequantize(q), nvfp4_values(packed, scales, F32(1) / F32(16191.248)))
    same = {
        f"{LAYER}.weight": packed,
        f"{LAYER}.weight_scale": scales,
        f"{LAYER}.weight_scale_2": np.array(F32(1) / F32(16191.248)),
    }
    same_bits(dequantize(only(assemble(same, MODELOPT))), dequantize(q))


def test_bitsandbytes_gives_its_own_values():
    got = dequantize(only(assemble(bnb_tensors(), BNB)))
    hashed = hashlib.sha256(got.view(np.uint16).tobytes()).hexdigest()[:16]
    assert hashed == "92b19bf73bab306e"  # of bitsandbytes.functional.dequantize_4bit


def test_bitsandbytes_without_double_quantisation():
    w = ramp(16, 64)
    q = quantize(w, "nf4", block=128)
    state = {"quant_type": "nf4", "blocksize": 128, "dtype": "bfloat16", "shape": [16, 64]}
    weight = f"{LAYER}.weight"
    tensors = {
        weight: q.codes.view(BF16)[:, None],  # bnb_4bit_quant_storage = bfloat16
        f"{weight}.absmax": q.scales,
        f"{weight}.quant_map": NF4_VALUES,
        f"{weight}.{BNB_STATE}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    same_bits(dequantize(only(assemble(tensors, BNB))), dequantize(q))


def test_mxfp4_gives_a_matrix_an_expert():
    tensors = mxfp4_tensors()
    base = "model.layers.0.mlp.experts.gate_up_proj"
    out = assemble(tensors, MXFP4)
    assert out.keys() == {base, f"{base}_bias"} and len(out[base]) == 3
    blocks, scales = tensors[f"{base}_blocks"], tensors[f"{base}_scales"]
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, 6, 2, 32)
    values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    want = np.ldexp(values, scales.astype(int)[..., None] - 127).reshape(3, 6, 64)
    for got, expert in zip(out[base], want, strict=True):
        np.testing.assert_array_equal(dequantize(got).astype(np.float64), expert)
    alone = {name: x[0] for name, x in tensors.items()}
    same_bits(dequantize(assemble(alone, MXFP4)[base]), want[0].astype(BF16))


BASE = "model.layers.0.mlp.experts.gate_up_proj"
NEEDED = [
    (FP8, fp8_tensors, f"{LAYER}.weight_scale_inv", r"float32 or .*\(2, 3\)"),
    (MODELOPT, modelopt_tensors, f"{LAYER}.weight_scale", r"float8_e4m3fn or uint8\(24, 4\)"),
    (MODELOPT, modelopt_tensors, f"{LAYER}.weight_scale_2", r"float32\(\)"),
    (COMPRESSED, compressed_tensors, f"{LAYER}.weight_scale", r"\(24, 4\)"),
    (COMPRESSED, compressed_tensors, f"{LAYER}.weight_global_scale", r"float32\(\)"),
    (BNB, bnb_tensors, f"{LAYER}.weight", "uint8 or"),
    (BNB, bnb_tensors, f"{LAYER}.weight.absmax", r"uint8\(16,\)"),
    (BNB, bnb_tensors, f"{LAYER}.weight.quant_map", r"float32\(16,\)"),
    (BNB, bnb_tensors, f"{LAYER}.weight.nested_absmax", r"float32\(1,\)"),
    (BNB, bnb_tensors, f"{LAYER}.weight.nested_quant_map", r"float32\(256,\)"),
    (MXFP4, mxfp4_tensors, f"{BASE}_scales", r"\(3, 6, 2\)"),
]


def brief(value: object) -> str:
    """Without addresses, which differ from process to process."""
    return getattr(value, "__name__", str(value))[:60]


@pytest.mark.parametrize("scheme,make,name,wanted", NEEDED, ids=brief)
def test_a_missing_tensor_is_named(scheme, make, name, wanted):
    tensors = make()
    del tensors[name]
    with pytest.raises(ValueError, match=rf"{name}: missing; .* needs it: expected .*{wanted}"):
        assemble(tensors, scheme)


@pytest.mark.parametrize("scheme,make,name,wanted", NEEDED, ids=brief)
def test_another_shape_is_named(scheme, make, name, wanted):
    tensors = make()
    tensors[name] = np.stack([tensors[name]] * 2)[:, ..., None]
    with pytest.raises(ValueError, match=rf"^{name}: .*(expected|must be) .*, got "):
        assemble(tensors, scheme)


@pytest.mark.parametrize("scheme,make,name,wanted", NEEDED, ids=brief)
def test_another_dtype_is_named(scheme, make, name, wanted):
    tensors = make()
    tensors[name] = np.zeros(tensors[name].shape, np.int16)
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got int16"):
        assemble(tensors, scheme)


@pytest.mark.parametrize(
    "scheme,make,name",
    [
        (FP8, fp8_tensors, "model.layers.0.input_layernorm.weight_scale_inv"),
        (FP8, fp8_tensors, f"{LAYER}.weight_scale"),
        (FP8, modelopt_tensors, f"{LAYER}.weight"),
        (MODELOPT, modelopt_tensors, f"{LAYER}.weight_zero_point"),
        (COMPRESSED, compressed_tensors, f"{LAYER}.weight_shape"),
        (BNB, bnb_tensors, "other.weight.absmax"),
        (BNB, bnb_tensors, "other.weight.quant_state.bitsandbytes__fp4"),
        (MXFP4, mxfp4_tensors, "other_scales"),
    ],
)
def test_an_unused_tensor_is_named(scheme, make, name):
    tensors = {name: np.ones((1, 1), np.uint8)} | make()
    with pytest.raises(ValueError, match=name):
        assemble(tensors, scheme)


def test_codes_without_scales_are_named():
    tensors = {"model.embed_tokens.weight": np.zeros((4, 32), np.uint8)}
    with pytest.raises(ValueError, match="embed_tokens.weight: has uint8 codes"):
        assemble(tensors, BNB)


@pytest.mark.parametrize("value", [0, -1, np.inf, np.nan])
def test_a_global_scale_must_be_a_number_to_divide_by(value):
    tensors = compressed_tensors() | {f"{LAYER}.weight_global_scale": np.array([value], F32)}
    with pytest.raises(ValueError, match="weight_global_scale: must be positive and finite"):
        assemble(tensors, COMPRESSED)


def test_another_table_is_not_nf4():
    tensors = bnb_tensors() | {f"{LAYER}.weight.quant_map": np.linspace(-1, 1, 16, dtype=F32)}
    with pytest.raises(ValueError, match="quant_map: must be the table of nf4"):
        assemble(tensors, BNB)


def config(**settings: Any) -> dict[str, Any]:
    return {"model_type": "qwen3", "quantization_config": settings}


@pytest.mark.parametrize(
    "found,scheme",
    [
        ({"model_type": "qwen3"}, None),
        ({"quantization_config": None}, None),
        (
            config(
                quant_method="fp8",
                fmt="e4m3",
                activation_scheme="dynamic",
                weight_block_size=[128, 64],
            ),
            Scheme("fp8", "fp8", (128, 64)),
        ),
        (config(quant_method="modelopt", quant_algo="NVFP4"), MODELOPT),
        (
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []},
            },
            MODELOPT,
        ),
        (config(quant_method="compressed-tensors", format="nvfp4-pack-quantized"), COMPRESSED),
        (config(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"), BNB),
        (
            config(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
            MXFP4._replace(left=("lm_head",)),
        ),
        (
            config(
                quant_method="bitsandbytes",
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                llm_int8_skip_modules=["lm_head"],
            ),
            BNB._replace(double_quant=True, left=("lm_head",)),
        ),
    ],
)
def test_scheme_of(found, scheme):
    assert scheme_of(found) == scheme


@pytest.mark.parametrize(
    "entry,module,left",
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("down_proj", "model.layers.1.mlp.down_proj", True),
        ("*self_attn*", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1.*", "model.layers.11.mlp.up_proj", False),
        (r"re:.*\.self_attn\..*", "model.layers.1.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.1.self_attn.q_proj", False),
    ],
)
def test_modules_that_were_left_as_they_are(entry, module, left):
    for method in (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [entry]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [entry]},
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "ignore": ["other", entry],
        },
    ):
        scheme = scheme_of(config(**method))
        assert scheme is not None and scheme.leaves(module) is left


@pytest.mark.parametrize(
    "state",
    [
        *(b"{", b"{}", b"7", b"[" * 5000),
        BNB_JSON.replace(b"nested_blocksize", b"n"),
        BNB_JSON.replace(b"[16, 64]", b"1024"),
        BNB_JSON.replace(b"[16, 64]", b'["16", 64]'),
        BNB_JSON.replace(b"256", b"0"),
        BNB_JSON.replace(b"0.048858642578125", b"NaN"),
    ],
)
def test_a_state_that_says_too_little_is_named(state):
    name = f"{LAYER}.weight.{BNB_STATE}"
    with pytest.raises(ValueError, match=rf"^{name}: (does not hold JSON|must h|has a size that)"):
        assemble(bnb_tensors() | {name: np.frombuffer(state, np.uint8)}, BNB)


@pytest.mark.parametrize(
    "found,message",
    [
        ({"quantization_config": "fp8"}, "must be an object, got 'fp8'"),
        (config(quant_method="gptq", bits=4), "quant_method gptq is not read"),
        (config(quant_method="awq"), "quant_method awq is not read"),
        (config(quant_method="fp8", weight_block_size=None), "must have a weight_block_size"),
        (config(quant_method="fp8", weight_block_size=[128, 128], fmt="e5m2"), "got e5m2"),
        (config(quant_method="fp8", weight_block_size=[0, 128]), r"two numbers, got \[0, 128\]"),
        (config(quant_method="fp8", weight_block_size=[[1], 128]), r"numbers, got \[\[1\], 128\]"),
        (
            config(quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=5),
            "modules_to_not_convert must be a list, got 5",
        ),
        (config(quant_method="modelopt", quant_algo="FP8"), "quant_algo NVFP4, got FP8"),
        ({"quantization": {"quant_algo": "MIXED_PRECISION"}}, "got MIXED_PRECISION"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 32}}, "group_size 16, got 32"),
        (config(quant_method="compressed-tensors", format="pack-quantized"), "got pack-quantized"),
        (config(quant_method="bitsandbytes", load_in_8bit=True), "got int8"),
        (config(quant_method="bitsandbytes", load_in_4bit=True), "got fp4"),
    ],
)
def test_refuses_other_schemes_by_name(found, message):
    with pytest.raises(ValueError, match=message):
        scheme_of(found)
