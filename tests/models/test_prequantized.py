"""Checkpoints that are quantised already, against their plain twin: the same model with every
weight decoded by torch. On the CPU a run on one takes the steps of a run on the other, bit for bit.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import surogate
from surogate.cli import main
from surogate.config import load_config
from surogate.device import choose_device
from surogate.kernels import tree
from surogate.kernels.arrays import BF16
from surogate.kernels.quantized_linear import QuantizedWeight
from surogate.kernels.widened import plain
from surogate.models.config import read_config, unquantized
from surogate.models.files import CheckpointError
from surogate.models.hf import read_model
from surogate.models.lora import LoraSpec
from surogate.models.names import named
from surogate.models.recipe import Scope
from surogate.models.stored_recipe import StoredRecipe
from surogate.plan import predict
from surogate.report import read_log
from surogate.setup import load_sources
from tests.models.quantized_files import KINDS, fine_grained, quantise
from tests.oracle import same_bits, to_device
from tests.surogate.runs import (
    invoke,
    make_model,
    steps,
    train,
    write_config,
    write_texts,
    write_tokenizer,
)

LORA: dict[str, Any] = {
    "lora": True,
    "lora_rank": 4,
    "max_steps": 3,
    "learning_rate": 0.02,
    "validation_split_ratio": 0,
}
# Modules that a checkpoint may leave: of a stacked matrix one part, and a whole matrix.
LEFT = ("layers.1.self_attn.k_proj", "layers.0.mlp.down_proj")
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with model/, plain/, which is its twin, and texts.jsonl; made once each."""

    @functools.cache
    def make(kind: str, left: tuple[str, ...] = ()) -> Path:
        folder = tmp_path_factory.mktemp("quantised")
        make_model(folder / "plain", stored="bfloat16", tie_word_embeddings=False)
        shutil.copytree(folder / "plain", folder / "model")
        decoded = quantise(folder / "model", KINDS[kind], left)
        save_file(decoded, folder / "plain" / "model.safetensors", {"format": "pt"})
        write_texts(folder / "texts.jsonl")
        return folder

    return make


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("left", [(), LEFT], ids=["all", "in part"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_what_its_codes_are_worth(made, kind, left):
    folder = made(kind, left)
    config, want = read_config(folder / "model"), load_file(folder / "plain/model.safetensors")
    got = named(read_model(folder / "model", config, BF16), config)
    assert got.keys() == want.keys()
    for name, array in got.items():
        same_bits(array.view(np.uint16), want[name].view(torch.uint16).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_stays_in_codes_and_the_plan_knows_its_size(made, kind):
    """Every array is counted: what is stored, and one matrix of each kind that it is decoded to."""
    for left, count in (((), "8"), (LEFT, "6 of 8")):
        folder = made(kind, left)
        config = load_config(write_config(folder, **LORA))
        model_config, device = read_config(folder / "model"), choose_device("cpu")
        sources = load_sources(config, folder / "model", model_config, device)
        leaves = tree.leaves(sources.model)
        stored = [leaf for leaf in leaves if isinstance(leaf, QuantizedWeight)]
        words = f"base weights in {KINDS[kind].words}, as stored: {count} matrices"
        assert sources.recipe.facts() == [words]
        assert len(stored) == int(count[0])
        shared = {id(leaf.shared): leaf.shared.matrix.nbytes for leaf in stored}
        plan = predict(config, model_config, "cpu")
        assert plan.memory.weights == sum(leaf.nbytes for leaf in leaves) + sum(shared.values())
        files = load_file(folder / "model/model.safetensors")
        codes = {"compressed": "weight_packed"}.get(kind, "weight")
        want = files[f"{ATTENTION}.q_proj.{codes}"].view(torch.uint8).numpy()
        same_bits(sources.model.layers[0].w_qkv.stored.reshape(-1), want.reshape(-1))


@pytest.mark.parametrize("kind", ["fp8", "modelopt", "nf4 double"])
def test_a_device_decodes_them_one_at_a_time(made, kind, device):
    """In memory that the layers share, and with room for the adapter on a card."""
    config, lora = read_config(made(kind) / "model"), LoraSpec.of(4, 8, ("all",))

    def there(path: str, leaf: Any) -> Any:
        return to_device(leaf, device)

    put = StoredRecipe(config, Scope()).frozen(there, there, lora)
    first, second = read_model(made(kind) / "model", config, BF16, put=put).layers
    twin = read_model(made(kind) / "plain", unquantized(config), BF16)
    assert (first.w_qkv.extra > 0) is (device != "host")
    for layer, plain_layer in ((first, twin.layers[0]), (second, twin.layers[1])):
        for field in ("w_qkv", "w_o", "w_gate_up", "w_down"):
            assert getattr(first, field).shared is getattr(second, field).shared
            same_bits(plain(getattr(layer, field).decoded()), getattr(plain_layer, field))


def merged(folder: Path, adapter: Path, base: Path, to: Path) -> None:
    arguments = ["merge", str(adapter), "--base", str(base), "--output", str(to)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(torch.arange(64)[None] * 5)
    return found.logits[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT's own
@pytest.mark.parametrize("kind", ["fp8", "modelopt", "compressed", "nf4 double"])
def test_trains_and_merges_as_its_plain_twin(made, tmp_path, kind):
    """Bit for bit; and in transformers, PEFT's adapter on the twin is the merged model but for the
    rounding of the sum.
    """
    folder, left = made(kind, LEFT), str(tmp_path / "model")
    config = write_config(folder, output_dir=left, **LORA)
    result = invoke(config)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert f"base weights in {KINDS[kind].words}, as stored: 6 of 8 matrices" in result.output
    assert "verified: loaded again" in result.output
    train(folder, output_dir=str(tmp_path / "plain"), model=str(folder / "plain"), **LORA)
    adapter = tmp_path / "model"
    same = [(tmp_path / x / "adapter_model.safetensors").read_bytes() for x in ("model", "plain")]
    assert same[0] == same[1]
    for base in ("model", "plain"):
        merged(folder, adapter, folder / base, tmp_path / f"merged {base}")
    files = {file for file in (tmp_path / "merged plain").iterdir() if file.name != "README.md"}
    assert len(files) >= 3
    for file in files:  # the card names the base
        assert file.read_bytes() == (tmp_path / "merged model" / file.name).read_bytes(), file.name
    load = transformers.AutoModelForCausalLM.from_pretrained
    twin = load(folder / "plain", dtype=torch.float32)
    alone = logits(twin)
    want = logits(peft.PeftModel.from_pretrained(twin, str(adapter)))
    got = logits(load(tmp_path / "merged model", dtype=torch.float32))
    error, learned = (got - want).norm(), (want - alone).norm()
    assert error < 2 * 2.0**-8 * want.norm() < 0.2 * learned


def test_the_end_of_a_run_merges_and_says_nothing_of_codes(made, tmp_path):
    folder = made("nf4")
    train(folder, output_dir=str(tmp_path / "out"), merge_adapter=True, **LORA)
    merged(folder, tmp_path / "out/adapter", folder / "plain", tmp_path / "merged")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "merged" / file).read_bytes()
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert {x.dtype for x in load_file(tmp_path / "out/model.safetensors").values()} == {
        torch.bfloat16
    }


def test_is_scored_and_goes_on_writing_as_its_plain_twin(made):
    folder, rows = made("fp8", LEFT), [[5, 9, 2, 40], [7]]
    models = [surogate.load(folder / name, device="cpu") for name in ("model", "plain")]
    same_bits(*(surogate.logits(model, rows) for model in models))
    texts = [surogate.generate(model, ["the cat"], max_new_tokens=4) for model in models]
    assert texts[0] == texts[1]


def test_other_codes_are_other_weights_to_a_checkpoint(made, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made("nf4"), folder)
    train(folder, **LORA)
    file = folder / "model/model.safetensors"
    tensors = load_file(file)
    tensors[f"{ATTENTION}.q_proj.weight"][0] ^= 1
    save_file(tensors, file, {"format": "pt"})
    result = invoke(write_config(folder, **LORA))
    assert result.exit_code == 1 and "frozen weights" in result.output


def test_from_scratch_takes_the_shape_alone(made, tmp_path):
    folder, out = made("fp8"), tmp_path / "out"
    losses = steps(train(folder, output_dir=str(out), from_scratch=True, max_steps=1))
    assert np.isfinite(losses).all()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert read_model(out, read_config(out), BF16).head.dtype == BF16


def test_scales_may_lie_in_another_file(made, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made("fp8") / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    files = {"a": {}, "b": {}}
    for name, tensor in tensors.items():
        files["b" if name.endswith("_inv") else "a"][name] = tensor
    index = {name: f"{file}.safetensors" for file, found in files.items() for name in found}
    for file, found in files.items():
        save_file(found, folder / f"{file}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = read_config(folder)
    got = read_model(folder, config, BF16).layers[1].w_o
    want = load_file(made("fp8") / "plain/model.safetensors")
    same_bits(
        got.view("u2"), want["model.layers.1.self_attn.o_proj.weight"].view(torch.uint16).numpy()
    )


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


Q, NORM = f"{ATTENTION}.q_proj", "model.layers.0.input_layernorm"
FAULTS: dict[str, tuple[str, Callable[..., object], str]] = {
    "missing scale": (
        "fp8",
        drop(f"{Q}.weight_scale_inv"),
        f"{Q}.weight_scale_inv: missing; {Q}.weight needs it",
    ),
    "missing codes": ("fp8", drop(f"{Q}.weight"), f"{Q}.weight_scale_inv: belongs to no weight"),
    "missing weight": (
        "compressed",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(Q)],
        f"no file has tensor {Q}.weight of shape (64, 32)",
    ),
    "missing state": (
        "nf4",
        drop(f"{Q}.weight.quant_state.bitsandbytes__nf4"),
        f"{Q}.weight: has uint8 codes, but no tensor says how bitsandbytes scaled them",
    ),
    "extra scale": (
        "fp8",
        put(f"{NORM}.weight_scale_inv", torch.ones(1, 1)),
        f"{NORM}.weight_scale_inv: belongs to no weight",
    ),
    "of another model": (
        "modelopt",
        put("model.layers.2.mlp.up_proj.weight_scale_2", torch.ones(())),
        "tensor model.layers.2.mlp.up_proj.weight_scale_2 of shape () is not part of this qwen3",
    ),
    "an unknown bias": (
        "fp8",
        put(f"{Q}.bias", torch.ones(64)),
        f"tensor {Q}.bias of shape (64,) is not part of this qwen3",
    ),
    "wrong block": (
        "fp8",
        lambda tensors: tensors.update(fine_grained(Q, torch.ones(64, 32), 16)[0]),
        f"{Q}.weight_scale_inv: expected float32 or bfloat16 or float16 or float8_e8m0fnu or "
        f"uint8(2, 1) for {Q}.weight, got float32(4, 2)",
    ),
    "wrong shape": (
        "modelopt",
        lambda tensors: tensors.update(KINDS["modelopt"].write(Q, torch.ones(64, 64))[0]),
        f"tensor {Q}.weight has shape (64, 64), the configuration expects (64, 32)",
    ),
    "no codes": (
        "nf4",
        lambda tensors: tensors.update(plain_tensors(tensors)),
        "quantization_config says bitsandbytes, but no tensor is quantised",
    ),
    "another dtype": (
        "fp8",
        put(f"{Q}.weight_shape", torch.ones(2, dtype=torch.int64)),
        f"tensor {Q}.weight_shape has dtype I64, which is not supported",
    ),
}


def plain_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In the place of all ``tensors``, those that were quantised as zeros."""
    states = [name for name in tensors if ".quant_state." in name]
    weights = {name.partition(".quant_state")[0]: tensors[name] for name in states}
    shapes = {w: json.loads(bytes(state.tolist()))["shape"] for w, state in weights.items()}
    for name in [name for name in tensors if any(name.startswith(w) for w in weights)]:
        del tensors[name]
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_whole_is_refused_by_name(made, tmp_path, fault):
    kind, change, message = FAULTS[fault]
    folder = tmp_path / "model"
    shutil.copytree(made(kind) / "model", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    line = error_of(lambda: read_model(folder, read_config(folder), BF16))
    assert message in line and line.startswith(str(folder))


def test_a_truncated_file_is_refused(made, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(made("fp8") / "model", folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    line = error_of(lambda: read_model(folder, read_config(folder), BF16))
    assert line.startswith(f"{file}: truncated or not a safetensors file")


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"lora": False}, "weights are in fp8; set lora = true, or use the bf16 model"),
        ({"qlora_bnb": True}, "weights are in fp8, and stay so; set qlora_bnb = false"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(made, tmp_path, settings, message):
    config = write_config(made("fp8"), output_dir=str(tmp_path), **LORA | settings)
    for result in (invoke(config), CliRunner().invoke(main, ["plan", str(config)])):
        assert result.exit_code == 1 and result.output.count("error:") == 1
        assert message in result.output


def test_a_recipe_multiplies_what_is_stored(made, tmp_path):
    settings = LORA | {"recipe": "fp8_hybrid", "max_steps": 4, "learning_rate": 0.01}
    result = invoke(write_config(made("modelopt", LEFT), output_dir=str(tmp_path), **settings))
    assert result.exit_code == 0, result.output
    assert "base weights in nvfp4" in result.output and "fp8_hybrid: 8 matrices" in result.output
    losses = [r["loss"] for r in read_log(tmp_path / "log.jsonl") if r["log"] == "step"]
    assert losses[-1] < losses[0]


def test_unknown_methods_are_refused_with_the_file(made, tmp_path):
    write_tokenizer(tmp_path)
    raw = json.loads((made("fp8") / "model/config.json").read_text())
    for beside, file, message in (
        ({}, "config.json", "quant_method gptq is not read"),
        ({"producer": {}}, "hf_quant_config.json", "has no object called quantization"),
    ):
        raw["quantization_config"] = None if beside else {"quant_method": "gptq"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if beside:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
        with pytest.raises(ValueError, match=rf"{file}: .*{message}"):
            read_config(tmp_path)


def test_plan_says_what_is_stored(made):
    config = write_config(made("modelopt", LEFT), **LORA)
    result = CliRunner().invoke(main, ["plan", str(config)])
    assert result.exit_code == 0, result.output
    assert "LoRA rank 4 on weights in nvfp4, as stored" in result.output
