"""The result of a run: it loads elsewhere with the same logits, or does not take its place."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard
from safetensors.numpy import load_file

import surogate
from surogate import export
from surogate.cli import main
from surogate.manifest import MANIFEST, faults
from surogate.models import companions, files, hf
from surogate.models.lora import named_adapter
from surogate.models.names import named
from tests.oracle import close, same_bits
from tests.surogate.runs import (
    FAMILIES,
    invoke,
    make_model,
    prepare,
    train,
    write_chats,
    write_config,
)

CHATS = {"sequence_len": 64, "lora_rank": 4, "lora_alpha": 8, "lora": True, "learning_rate": 0.02}
TOKENS = list(range(7, 40))
# PEFT asks transformers for an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def chats(folder: Path) -> list[dict[str, str]]:
    return [{"path": str(folder / "chats.jsonl"), "type": "conversation"}]


def transformer(folder: Path) -> Any:
    """The model of a folder in transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def scores(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS])).logits[0].float().numpy()


@pytest.mark.parametrize("mode", ["full", "adapter", "merged"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_mode_loads_elsewhere(tmp_path, monkeypatch, family, tied, mode):
    """With the logits of the live model at the end of the run, not of our files."""
    live: list[np.ndarray] = []
    real = export.Export.write

    def write(result: export.Export, directory: Path) -> list[str]:
        live.append(result.step.logits(surogate.batch([TOKENS])))
        return real(result, directory)

    monkeypatch.setattr(export.Export, "write", write)
    make_model(tmp_path / "model", family=family, tie_word_embeddings=tied)
    write_chats(tmp_path / "chats.jsonl")
    options = CHATS | {"lora": mode != "full", "merge_adapter": mode == "merged"}
    train(tmp_path, **options, datasets=chats(tmp_path), max_steps=4)
    out = tmp_path / "out"
    assert faults(out) == []
    if mode == "adapter":
        theirs = peft.PeftModel.from_pretrained(transformer(tmp_path / "model"), out)
    else:
        theirs = transformer(out)
        assert theirs.config.tie_word_embeddings == tied
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token == "<|end|>"
    # Some ten products of 32 to 64 terms, one behind another.
    close(scores(theirs), live[0], "float32", terms=64, roundings=16)
    before = scores(transformer(tmp_path / "model"))
    assert np.abs(live[0] - before).max() > 1000 * np.abs(live[0] - scores(theirs)).max()


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_beside_the_weights(folder, lora):
    model, out = folder / "model", folder / "out"
    train(folder, **CHATS | {"lora": lora}, datasets=chats(folder), max_steps=2, run_name="mine")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    card = ModelCard.load(out / "README.md")
    head = card.data.to_dict()
    assert head["base_model"] == str(model)
    assert head["library_name"] == ("peft" if lora else "transformers")
    assert head["tags"] == ["surogate", "lora" if lora else "full-training"]
    assert "datasets" not in head  # a local file is nobody else's
    for line in ("# mine", "sequence_len = 64", "| Steps | 2 of 2 x 1 rows of 64 tokens |"):
        assert f"\n{line}\n" in card.text, card.text
    chosen = [line for line in card.text.splitlines() if line.startswith("datasets.")]
    path, kind = chosen  # of a long path, the begin
    assert path.startswith(f"datasets.0.path = '{folder / 'chats.jsonl'}"[:60])
    assert kind == "datasets.0.type = 'conversation'"
    losses = [float(x) for x in card.text.split() if x.startswith("5.")]
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    last = {r["log"]: r["loss"] for r in records if r["log"] in ("step", "eval")}
    assert losses == [round(last["step"], 4), round(last["eval"], 4)]
    # People edit the card; verify looks at the rest.
    (out / "README.md").write_text("my own words")
    assert faults(out) == []
    assert "README.md" not in json.loads((out / MANIFEST).read_text())["files"]


def test_the_card_names_public_data(folder):
    from surogate.card import Card
    from surogate.config import load_config

    data = [{"path": "someone/rows", "type": "text"}, {"path": "someone/rows", "type": "text"}]
    config = load_config(write_config(folder, datasets=data), verb="run")
    (folder / "README.md").write_text(Card(config, [("a", "b")]).text(adapter=False))
    assert ModelCard.load(folder / "README.md").data.to_dict()["datasets"] == ["someone/rows"]


def test_a_source_without_a_generation_config_gets_one(folder):
    """With the end of an answer, which the base does not name."""
    settings = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(settings | {"eos_token_id": 3}))
    train(folder, **CHATS | {"lora": False}, datasets=chats(folder), max_steps=1)
    found = json.loads((folder / "out" / "generation_config.json").read_text())
    assert found == {"eos_token_id": [3, 0]}
    assert transformer(folder / "out").generation_config.eos_token_id == [3, 0]


def error_of(result: Result) -> str:
    assert result.exit_code == 1, result.output
    [line] = result.stderr.splitlines()
    return line.removeprefix("error: ")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.suffix != ".png"}


def test_logits_that_differ_keep_the_result_from_its_place(folder, monkeypatch):
    train(folder, max_steps=2)
    out = folder / "out"
    before = contents(out)
    real = companions.with_stop_token

    def other(settings: Any, stop_token: int | None) -> dict[str, Any]:
        return real(settings, stop_token) | {"rms_norm_eps": 1.0}

    options = {"max_steps": 3, "save_steps": 3, "resume_from_checkpoint": False}
    with monkeypatch.context() as patch:
        patch.setattr(hf, "with_stop_token", other)
        message = error_of(invoke(write_config(folder, **options)))
        assert message.startswith(f"{out}: the result was not put in place: loaded again, its ")
        assert "rounding explains" in message and "verify_export = false" in message
        after = contents(out)
        assert all(after[name] == data for name, data in before.items() if name != "log.jsonl")
        assert not list(out.glob(".*partial"))
        assert invoke(write_config(folder, **options), "verify_export=false").exit_code == 0
        assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1.0
    result = invoke(write_config(folder, **options | {"resume_from_checkpoint": True}))
    assert result.exit_code == 0 and "verified: loaded again, logits over 32" in result.stdout


def test_a_disk_that_changes_a_bit_is_found(folder, monkeypatch):
    """Even where logits are not looked at."""
    real = files.write_bytes

    def write(path: Path, blocks: Any) -> int:
        size = real(path, blocks)
        if path.name == "model.safetensors":
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        return size

    monkeypatch.setattr(files, "write_bytes", write)
    message = error_of(invoke(write_config(folder, max_steps=1), "verify_export=false"))
    assert "tensor model.norm.weight is damaged: does not read back as it was written" in message
    assert not (folder / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("fault", ["scale", "adapter"])
def test_a_wrong_adapter_is_found(folder, monkeypatch, fault):
    real = export.write_adapter

    def write(adapter: Any, config: Any, spec: Any, *rest: Any, **options: Any) -> None:
        import dataclasses

        if fault == "scale":
            spec = dataclasses.replace(spec, alpha=spec.alpha * 3)
        else:
            for array in named_adapter(adapter, config, spec).values():
                array[...] = 0
        real(adapter, config, spec, *rest, **options)

    live = export.Export._compare

    def compare(result: export.Export, *rest: Any) -> tuple[bool, str]:
        if fault == "adapter":  # as it was before it was zeroed
            monkeypatch.setattr(result.step, "logits", lambda batch: want)
        return live(result, *rest)

    monkeypatch.setattr(export, "write_adapter", write)
    monkeypatch.setattr(export.Export, "_compare", compare)
    want = np.random.default_rng(0).standard_normal((64, 320)).astype(np.float32)
    options = CHATS | {"datasets": chats(folder), "max_steps": 5}
    assert "was not put in place" in error_of(invoke(write_config(folder, **options)))
    assert not (folder / "out" / "adapter_model.safetensors").exists()


def test_distance():
    """Of logits as far as they change probabilities; NaN is as far as can be."""
    rng = np.random.default_rng(0)
    want = rng.standard_normal((5, 300)).astype(np.float32)
    assert export.distance(want, want) == 0
    assert export.distance(want + 3, want) < 1e-6
    assert export.distance(want * np.float32(1.01), want) == pytest.approx(0.01, rel=1e-3)
    assert not export.distance(want * np.nan, want) <= 1
    other = rng.standard_normal((5, 300)).astype(np.float32)
    assert export.distance(other, want) == pytest.approx(2**0.5, rel=0.1)
    assert export.distance(0 * want, 0 * want) == 0


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_rounding_to_the_stored_type_is_explained(tmp_path, stored):
    """The live model is in float32 here."""
    folder = prepare(tmp_path, family="llama", stored=stored)
    result = invoke(write_config(folder, max_steps=3))
    assert result.exit_code == 0
    [line] = [x for x in result.stdout.splitlines() if x.startswith("verified: ")]
    error, limit = map(float, re.findall(r"(?:by|most) ([\d.e-]+)", line))
    assert 0 < 4 * error < limit < 0.05


def test_one_layer_at_a_time(tmp_path):
    """What reads the result again holds no more than embedding, head and a layer."""
    import tracemalloc

    make_model(tmp_path / "m", num_hidden_layers=24, intermediate_size=2048)
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    device = surogate.load(tmp_path / "m", device="cpu").device
    batch = surogate.batch([TOKENS])
    tracemalloc.start()
    try:
        got = export.reloaded_logits(tmp_path / "m", batch, device, length=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 6
    want = surogate.logits(surogate.load(tmp_path / "m", device="cpu"), [TOKENS])
    same_bits(got, want)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("lora", [False, True])
def test_verb_writes_what_the_end_of_the_run_does(folder, lora):
    options = CHATS | {"lora": lora, "datasets": chats(folder), "max_steps": 4, "save_steps": 2}
    train(folder, **options)
    out, other = folder / "out", folder / "other"
    result = run("export", str(out), "--output", str(other))
    assert result.exit_code == 0, result.output
    written = contents(other)
    assert MANIFEST in written
    assert {name: contents(out)[name] for name in written} == written
    # Of a run that was stopped half-way, and into the run's own folder.
    shutil.rmtree(out / "step_00000004")
    shutil.rmtree(other)
    result = run("export", str(out), "--no-verify")
    assert result.exit_code == 0 and "verified" not in result.stdout
    assert "| Steps | 2 of " in (out / "README.md").read_text()
    trained = load_file(out / "step_00000002" / "trained.safetensors")
    if lora:
        loaded = surogate.load(folder / "model", adapter=out, device="cpu")
        pair = loaded.adapter.layers[0].qkv if loaded.adapter else None
        assert pair is not None
        same_bits(pair.a, trained["layers.0.qkv.a"])
    else:
        model = surogate.load(out, device="cpu")
        same_bits(named(model.params, model.config)["model.norm.weight"], trained["norm"])


def test_verb_refuses(tmp_path):
    assert error_of(run("export", str(tmp_path))) == (
        f"{tmp_path}: has no checkpoint; give the output_dir of a run"
    )
