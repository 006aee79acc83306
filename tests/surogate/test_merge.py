"""surogate merge: the sum, its rounding, what it reports, and the memory that it takes."""

import functools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file

import surogate
from surogate.cli import main
from surogate.manifest import faults
from surogate.models import hf
from surogate.models.files import planned
from surogate.models.lora import MergeReport
from tests.oracle import same_bits
from tests.surogate.runs import invoke, make_model, prepare, train, write_config

CHATS = {"sequence_len": 64, "lora_rank": 4, "lora_alpha": 8, "lora": True, "learning_rate": 0.02}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


def chats(folder: Path) -> list[dict[str, str]]:
    return [{"path": str(folder / "chats.jsonl"), "type": "conversation"}]


def merge(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["merge", *map(str, arguments)])


def error_of(result: Result) -> str:
    assert result.exit_code == 1, result.output
    [line] = result.stderr.splitlines()
    return line.removeprefix("error: ")


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_each_weight_is_the_exact_sum_rounded_once(tmp_path, stored):
    folder = prepare(tmp_path, stored=stored)
    modules = ["q_proj", "v_proj", "down_proj"]
    options = CHATS | {"datasets": chats(folder), "max_steps": 4, "lora_target_modules": modules}
    train(folder, **options)
    out, to = folder / "out", folder / "merged"
    result = merge(out, "--output", to)
    assert result.exit_code == 0, result.output
    base = load_file(folder / "model" / "model.safetensors")
    adapter = load_file(out / "adapter_model.safetensors")
    found = load_file(to / "model.safetensors")
    assert found.keys() == base.keys()
    adapted = changed = 0
    half_unit = {"float32": 2.0**-22, "bfloat16": 2.0**-9, "float16": 2.0**-12}[stored]
    for name, weight in base.items():
        assert found[name].dtype == weight.dtype == np.dtype(stored)
        if not any(module in name for module in modules):
            same_bits(found[name], weight)
            continue
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (adapter[f"{stem}.lora_{x}.weight"].astype(np.float64) for x in "AB")
        exact = weight.astype(np.float64) + 2.0 * b @ a
        error = np.abs(found[name].astype(np.float64) - exact)
        # Half a unit in the last place, of a sum whose terms were rounded in float32.
        assert (error <= np.abs(exact) * 2 * half_unit + 2.0**-22 + 2.0**-25).all()
        adapted += weight.size
        changed += int((bits(found[name]) != bits(weight)).sum())
    share = changed / adapted
    assert 0.2 < share <= 1
    line = f"merged: {changed:,} of {adapted:,} adapted weights changed ({share:.1%})"
    assert result.stdout.splitlines() == [line, f"model: {to}"]
    assert faults(to) == []
    assert json.loads((to / "config.json").read_text())["torch_dtype"] == stored


def test_the_verb_writes_what_the_end_of_the_run_does(tmp_path):
    """The weights, the tokenizer, and the end of an answer that the base does not name."""
    folder = prepare(tmp_path, stored="bfloat16")
    settings = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(settings | {"eos_token_id": 3}))
    train(folder, **CHATS, datasets=chats(folder), max_steps=3, merge_adapter=True)
    out = folder / "out"
    for number, place in enumerate((out, out / "adapter")):  # of a run, or an adapter
        to = folder / f"m{number}"
        assert merge(place, "--output", to).exit_code == 0
        assert {p.name for p in to.iterdir()} > {"generation_config.json", "tokenizer.json"}
        for file in to.iterdir():
            if file.name != "README.md":
                assert file.read_bytes() == (out / file.name).read_bytes(), file.name
        card = ModelCard.load(to / "README.md")
        assert card.data.base_model == str(folder / "model") and card.data.library_name
        assert "a LoRA adapter of rank 4 and alpha 8 added to its weights" in card.text
        own = (place if place != out else out / "adapter") / "README.md"
        assert card.text.endswith(ModelCard.load(own).text.lstrip())  # the facts of the run
        assert json.loads((to / "config.json").read_text())["eos_token_id"] == [3, 0]


@pytest.mark.parametrize(
    "kind", [{"qlora_bnb": True}, {"qlora_fp8": True, "qlora_block_size": 64}, {"qlora_fp4": True}]
)
def test_weights_that_were_quantised_are_merged_as_they_were_trained_on(tmp_path, kind):
    """P06: against the adapter on the quantised base, over a thousand positions. Merging onto the
    weights of the files instead is far off.
    """
    folder = prepare(tmp_path)
    options = CHATS | kind | {"datasets": chats(folder), "max_steps": 6, "merge_adapter": True}
    train(folder, **options)
    out = folder / "out"
    assert merge(out, "--output", folder / "m").exit_code == 0
    live, merged = (surogate.load(f, device="cpu") for f in (out, folder / "m"))
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 320, 64).tolist() for _ in range(16)]
    want, got = (logprobs(surogate.logits(model, rows)) for model in (live, merged))
    assert np.abs(got - want).mean() <= 0.01
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= 0.99
    # As of an adapter of another trainer, which says nothing of how its base was stored.
    (out / "adapter" / "surogate.json").unlink()
    assert merge(out, "--output", folder / "other").exit_code == 0
    other = logprobs(surogate.logits(surogate.load(folder / "other", device="cpu"), rows))
    assert np.abs(other - want).mean() > 10 * np.abs(got - want).mean()


def logprobs(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64)
    z -= z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_changes_that_are_lost_in_rounding_are_told(tmp_path):
    folder = prepare(tmp_path, stored="bfloat16")
    train(folder, **CHATS, datasets=chats(folder), max_steps=1)
    file = folder / "out" / "adapter_model.safetensors"
    tiny = {k: v * np.float32(1e-12 if "lora_B" in k else 1) for k, v in load_file(file).items()}
    save_file(tiny, file)
    result = merge(folder / "out", "--output", folder / "m")
    assert result.stdout.startswith("warning: merged: 0 of 21,504 adapted weights changed (0.0%): ")
    for name, array in load_file(folder / "m" / "model.safetensors").items():
        same_bits(array, load_file(folder / "model" / "model.safetensors")[name])


def test_one_tensor_at_a_time_in_shards(tmp_path, monkeypatch):
    """Memory does not grow with the model, and files no larger than is asked for."""
    folder = tmp_path
    make_model(folder / "model", num_hidden_layers=16, intermediate_size=8192)
    size = (folder / "model" / "model.safetensors").stat().st_size
    config = surogate.models.config.read_config(folder / "model")
    spec = surogate.models.lora.LoraSpec.of(2, 4, ["down_proj"])
    pair = surogate.models.lora.init_adapter(config, spec, 0, np.dtype(np.float32))
    hf.write_adapter(pair, config, spec, folder / "a", str(folder / "model"))
    small = functools.partial(hf.write_weights, max_shard_bytes=4e6)
    monkeypatch.setattr("surogate.merge.write_weights", small)
    assert merge(folder / "none", "--output", folder / "m").exit_code == 1  # imports modules
    tracemalloc.start()
    try:
        result = merge(folder / "a", "--output", folder / "m")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.exit_code == 0, result.output
    shards = sorted((folder / "m").glob("model-*.safetensors"))
    assert len(shards) > 10 and max(s.stat().st_size for s in shards) < 4.1e6
    largest = 8192 * 32 * 4
    assert peak < 8 * largest < size / 5
    assert surogate.load(folder / "m", device="cpu").config.layers == 16


def test_refusals(tmp_path):
    folder = prepare(tmp_path)
    train(folder, **CHATS, datasets=chats(folder), max_steps=1)
    out = folder / "out"
    assert error_of(merge(folder / "model", "--output", folder / "m")).startswith(
        f"{folder / 'model'}: holds no adapter (adapter_config.json); surogate export "
    )
    for place in (out, folder / "model"):
        message = error_of(merge(out, "--output", place))
        assert message.startswith(f"--output {place}: would replace what is merged")
    make_model(folder / "other", hidden_size=48)
    message = error_of(merge(out, "--output", folder / "m", "--base", folder / "other"))
    assert "must have shape (4, 48), got (4, 32)" in message
    file = out / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    assert error_of(merge(out, "--output", folder / "m")).endswith(
        "names no base model; give --base"
    )
    assert merge(out, "--output", folder / "m", "--base", folder / "model").exit_code == 0
    (folder / "model" / "model.safetensors").unlink()
    assert "has neither model.safetensors" in error_of(
        merge(out, "--output", folder / "n", "--base", folder / "model")
    )
    assert not (folder / "n").exists()


def test_weights_beyond_float16_are_refused(tmp_path):
    from surogate.models.config import read_config
    from surogate.models.files import CheckpointError
    from surogate.models.lora import merge_adapter

    folder = prepare(tmp_path, stored="float16")
    train(folder, **CHATS, datasets=chats(folder), max_steps=1)
    config = read_config(folder / "model")
    pair, spec = hf.read_adapter(folder / "out", config)
    adapted = pair.layers[0].o
    assert adapted is not None
    adapted.b[...] = 1e6
    base = planned(load_file(folder / "model" / "model.safetensors"))
    merged = merge_adapter(base, pair, spec, config, np.dtype(np.float16))
    assert merged.report == MergeReport()
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name}: exceeds the range of float16"):
        merged.tensors[name].load()


def test_merging_at_the_end_reports_too(tmp_path):
    folder = prepare(tmp_path, stored="bfloat16")
    options = CHATS | {"datasets": chats(folder), "max_steps": 2, "learning_rate": 0.0}
    result = invoke(write_config(folder, **options, merge_adapter=True))
    assert "warning: merged: 0 of 21,504 adapted weights changed" in result.stdout
