"""Adapters: which rows they adapt, round trips through PEFT with many targets, merging."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from surogate.kernels import tree
from surogate.kernels.arrays import BF16
from surogate.models.config import from_hf
from surogate.models.hf import (
    ADAPTER,
    ADAPTER_CONFIG,
    CheckpointError,
    read_adapter,
    write_adapter,
    write_model,
)
from surogate.models.init import init_model
from surogate.models.lora import (
    TARGETS,
    LoraSpec,
    adapter_from_named,
    init_adapter,
    matches,
    named_adapter,
)
from surogate.models.names import named
from surogate.models.tree import Adapter
from tests.models.merged import merged_model
from tests.models.test_config import hf_config, tiny

# A checkout has a folder called kernels: transformers must not take it for the package kernels.
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]

# PEFT asks transformers for an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

F32 = np.dtype(np.float32)
# Everything; parts of both stacked matrices, with a gap; one plain matrix; the default of PEFT.
CHOICES = [["all"], ["q_proj", "v_proj", "up_proj"], ["down_proj"], ["k_proj", "o_proj"]]


def random_adapter(config: Any, spec: LoraSpec, dtype: np.dtype = F32) -> Adapter:
    """An adapter whose B is random too."""
    random = np.random.default_rng(1)
    fresh = init_adapter(config, spec, 0, dtype)
    return tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.3).astype(dtype), fresh)


def base(architecture: str, directory: Path) -> Any:
    config = from_hf(tiny(architecture, initializer_range=0.3))
    model = init_model(config, 0, F32)
    write_model(model, config, directory, dtype=F32)
    return config, model


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.arange(24)[None], use_cache=False).logits.numpy()


def hf_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize("targets", CHOICES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_peft_loads_ours(architecture: str, targets: list[str], tmp_path: Path) -> None:
    from peft import PeftModel

    config, model = base(architecture, tmp_path / "base")
    spec = LoraSpec.of(4, 8, targets)
    adapter = random_adapter(config, spec)
    write_adapter(adapter, config, spec, tmp_path / "adapter", str(tmp_path / "base"))
    plain = logits(hf_model(tmp_path / "base"))
    peft = PeftModel.from_pretrained(hf_model(tmp_path / "base"), tmp_path / "adapter")

    ours = named_adapter(adapter, config, spec)
    theirs = {
        name.replace(".default.", "."): parameter.detach().numpy()
        for name, parameter in peft.named_parameters()
        if ".lora_" in name
    }
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])

    adapted = logits(peft)
    assert abs(adapted - plain).max() > 0.01 * abs(plain).max()
    write_model(merged_model(model, adapter, spec, config), config, tmp_path / "merged", dtype=F32)
    # Two float32 computations of one product, in another order.
    np.testing.assert_allclose(
        logits(hf_model(tmp_path / "merged")), adapted, rtol=0, atol=1e-4 * abs(adapted).max()
    )
    merged = {
        name.removeprefix("base_model.model."): value
        for name, value in peft.merge_and_unload().state_dict().items()
    }
    for name, array in named(merged_model(model, adapter, spec, config), config).items():
        scale = abs(array).max()
        np.testing.assert_allclose(array, merged[name].numpy(), rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("targets", [*CHOICES, "all-linear", r".*\.(q|gate)_proj"])
def test_ours_loads_peft(targets: Any, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    config, _ = base("qwen3", tmp_path / "base")
    wanted = list(TARGETS) if targets == ["all"] else targets
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=wanted, task_type="CAUSAL_LM")
    peft = get_peft_model(hf_model(tmp_path / "base"), settings)
    torch.manual_seed(0)
    for name, parameter in peft.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(tmp_path / "adapter")

    adapter, spec = read_adapter(tmp_path / "adapter", config)
    assert (spec.rank, spec.alpha, spec.scale) == (4, 6.0, 1.5)
    if isinstance(wanted, list):
        assert spec.targets == set(wanted)
    else:  # PEFT writes a pattern back as a pattern
        assert spec.targets == (set(TARGETS) if wanted == "all-linear" else {"q_proj", "gate_proj"})
    theirs = load_file(tmp_path / "adapter" / ADAPTER)
    ours = named_adapter(adapter, config, spec)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("targets", CHOICES)
def test_round_trip(targets: list[str], dtype: str, tmp_path: Path) -> None:
    config = from_hf(tiny("qwen2"))
    spec = LoraSpec.of(3, 4.5, targets)
    kind = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    adapter = random_adapter(config, spec, kind)
    for _ in range(2):  # the second time over the first
        write_adapter(adapter, config, spec, tmp_path / "a", "base", dropout=0.05)
    got, got_spec = read_adapter(tmp_path / "a", config)
    assert got_spec == spec
    tree.map(np.testing.assert_array_equal, got, adapter)
    assert all(leaf.dtype == kind for leaf in tree.leaves(got))
    settings = json.loads((tmp_path / "a" / ADAPTER_CONFIG).read_text())
    assert (settings["lora_alpha"], settings["lora_dropout"]) == (4.5, 0.05)
    assert settings["base_model_name_or_path"] == "base"


def test_parts() -> None:
    config = from_hf(tiny("qwen3"))  # q 64 rows, k and v 32, ffn 48, hidden 32
    some = LoraSpec.of(4, 8, ["q_proj", "v_proj", "up_proj"])
    assert some.parts(config, "w_qkv") == ((0, 64), (96, 128))
    assert some.parts(config, "w_gate_up") == ((48, 96),)
    assert some.parts(config, "w_o") == some.parts(config, "w_down") == ()
    every = LoraSpec.of(4, 8, ["all"])
    assert every.parts(config, "w_qkv") == ((0, 64), (64, 96), (96, 128))
    assert every.parts(config, "w_o") == every.parts(config, "w_down") == ((0, 32),)


def test_stacking_of_partial_targets() -> None:
    config = from_hf(tiny("qwen3"))
    spec = LoraSpec.of(4, 8, ["q_proj", "v_proj"])
    adapter = random_adapter(config, spec)
    pair = adapter.layers[1].qkv
    assert pair is not None and pair.a.shape == (8, 32) and pair.b.shape == (96, 4)
    arrays = named_adapter(adapter, config, spec)
    stem = "base_model.model.model.layers.1.self_attn.v_proj"
    np.testing.assert_array_equal(arrays[f"{stem}.lora_A.weight"], pair.a[4:])
    np.testing.assert_array_equal(arrays[f"{stem}.lora_B.weight"], pair.b[64:])
    tree.map(np.testing.assert_array_equal, adapter_from_named(arrays, config, spec), adapter)
    for array in arrays.values():
        array[...] = 0
    assert all((leaf == 0).all() for leaf in tree.leaves(adapter))


def test_merge_rounds_once_and_leaves_the_rest_alone() -> None:
    config = from_hf(tiny("qwen3", initializer_range=0.3))
    model = init_model(config, 0, BF16)
    before = tree.map(np.copy, model)
    spec = LoraSpec.of(4, 8, ["k_proj"])
    adapter = random_adapter(config, spec)
    merged = merged_model(model, adapter, spec, config)
    tree.map(np.testing.assert_array_equal, model, before)
    layer, pair = merged.layers[0], adapter.layers[0].qkv
    assert pair is not None
    np.testing.assert_array_equal(layer.w_o, model.layers[0].w_o)
    delta = np.float32(2) * (pair.b @ pair.a)
    expected = (model.layers[0].w_qkv[64:96].astype(F32) + delta).astype(BF16)
    np.testing.assert_array_equal(layer.w_qkv[64:96], expected)
    np.testing.assert_array_equal(layer.w_qkv[:64], model.layers[0].w_qkv[:64])
    np.testing.assert_array_equal(layer.w_qkv[96:], model.layers[0].w_qkv[96:])


def test_init_is_pefts_and_independent_of_targets() -> None:
    config = from_hf(tiny("qwen3", hidden_size=256, intermediate_size=512))
    every, some = (LoraSpec.of(32, 32, names) for names in (["all"], ["v_proj", "down_proj"]))
    whole = named_adapter(init_adapter(config, every, 3, F32), config, every)
    part = named_adapter(init_adapter(config, some, 3, F32), config, some)
    for name, array in part.items():
        np.testing.assert_array_equal(array, whole[name])
    other = named_adapter(init_adapter(config, every, 4, F32), config, every)
    for name, array in whole.items():
        if name.endswith("lora_B.weight"):
            assert not array.any()
            continue
        assert not np.array_equal(array, other[name])
        bound = array.shape[1] ** -0.5
        assert 0.99 * bound < abs(array).max() <= bound
        # The mean of squares is 1/3 of the bound's, with a standard error of sqrt(4/45 / size).
        assert abs((array / bound).var() - 1 / 3) < 6 * (4 / 45 / array.size) ** 0.5
        assert abs((array / bound).mean()) < 6 * (1 / 3 / array.size) ** 0.5
    assert len({array.tobytes() for name, array in whole.items() if "lora_A" in name}) == 14


@pytest.mark.parametrize(
    "rank,targets,message",
    [
        (4, ["q_porj"], "LoRA target 'q_porj' does not exist, did you mean q_proj?"),
        (4, ["q_proj", "in_proj"], "LoRA target 'in_proj' does not exist"),  # of Mamba, GDN
        (4, ["all", "experts"], "LoRA target 'experts' does not exist"),
        (4, [r"^model\.layers\..*q_proj$"], "LoRA target '.*' does not exist"),  # a pattern
        (4, [], "LoRA needs targets"),
        (0, ["all"], "LoRA rank must be at least 1, got 0"),
    ],
)
def test_spec_refuses(rank: int, targets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSpec.of(rank, 8, targets)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_all_is_every_product_of_transformers_but_the_head(architecture: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    raw = tiny(architecture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(raw))
    products = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    products.remove("lm_head")
    want = Counter(name.rsplit(".", 1)[1] for name in products)
    assert matches(from_hf(raw), LoraSpec.of(4, 8, ["all"])) == want
    some = matches(from_hf(raw), LoraSpec.of(4, 8, ["v_proj", "down_proj"]))
    assert some == {name: want[name] for name in ("v_proj", "down_proj")}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = from_hf(tiny("qwen3"))
    spec = LoraSpec.of(4, 8, ["q_proj", "down_proj"])
    write_adapter(random_adapter(config, spec), config, spec, tmp_path / "a", "base")
    return tmp_path / "a"


def refuses(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_adapter(directory, from_hf(tiny("qwen3")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' != LORA"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"use_rslora": True}, "use_rslora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern .* is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save .* is not supported"),
        ({"r": None}, "r and lora_alpha must be numbers"),
        ({"r": 8}, r"lora_A.weight: must have shape \(8, 32\), got \(4, 32\)"),
        ({"target_modules": ["q_proj", "k_proj"]}, "has no tensors for target k_proj"),
    ],
)
def test_settings_that_are_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    path = saved / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refuses(saved, message)


Q1 = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop(Q1), rf"{Q1}: missing, expected shape \(64, 4\)"),
        (lambda t: t.update({Q1: t[Q1][1:]}), rf"{Q1}: must have shape \(64, 4\), got \(63, 4\)"),
        (
            lambda t: t.update({Q1.replace("layers.1", "layers.2"): t[Q1]}),
            "layers.2.self_attn.q_proj.lora_B.weight: not an adapter tensor of this qwen3 model",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[Q1]}),
            "base_model.model.lm_head.lora_A.weight adapts none of q_proj",
        ),
        (lambda t: t.update({"q_proj.lora_A.weight": t[Q1]}), "q_proj.lora_A.weight adapts none"),
    ],
)
def test_tensors_that_are_refused(saved: Path, change: Any, message: str) -> None:
    tensors = load_file(saved / ADAPTER)
    change(tensors)
    save_file(tensors, saved / ADAPTER)
    refuses(saved, message)


def test_files_that_are_missing_or_cut(saved: Path) -> None:
    refuses(saved.parent / "nowhere", "adapter_config.json: missing")
    weights = (saved / ADAPTER).read_bytes()
    (saved / ADAPTER).write_bytes(weights[:-1])
    refuses(saved, "adapter_model.safetensors: truncated")
    (saved / ADAPTER).unlink()
    refuses(saved, "adapter_model.safetensors: missing")
    (saved / ADAPTER_CONFIG).write_text("{")
    refuses(saved, "adapter_config.json: cannot be read as JSON")
