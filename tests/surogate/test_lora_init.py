"""lora_init = error in whole runs: where a run begins, goes on and ends, and what is refused."""

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

import surogate
from surogate.cli import main
from surogate.data.loader import Loader
from surogate.data.packed import open_packed
from surogate.merge import ORIGIN
from tests.models.quantized_files import KINDS, quantise
from tests.surogate.runs import invoke, make_model, prepare, steps, train, write_config, write_texts

KEPT: dict[str, dict[str, Any]] = {
    "fp8": {"qlora_fp8": True, "qlora_block_size": 64},
    "nvfp4": {"qlora_fp4": True},
    "nf4": {"qlora_bnb": True},
}
ERROR = {"lora": True, "lora_rank": 8, "lora_init": "error", "learning_rate": 0.01}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("lora_init"))


def first_batch(folder: Path, out: Path) -> Any:
    [rows] = (path.parent for path in (out / "data").glob("*/*/tokens.npy") if "train" in str(path))
    return Loader(open_packed(rows, reused=True), rows_per_batch=2, seed=1234).batch(0)


def loss(model: Any, batch: Any) -> float:
    result = surogate.loss_and_grads(model, batch)
    return result.nll_sum / result.count


@pytest.mark.parametrize("kind", KEPT)
def test_first_step_is_of_the_adapter_that_is_written(folder, tmp_path, kind):
    """Without a learning rate a run ends where it begins: at the adapter on the stored base, whose
    loss is nearer to the plain model's than the stored base's alone.
    """
    found = {}
    for init in ("default", "error"):
        out = tmp_path / init
        still = ERROR | {"lora_init": init, "learning_rate": 0.0, "max_steps": 1, "lora_rank": 16}
        [found[init]] = steps(train(folder, output_dir=str(out), **still, **KEPT[kind]))
        batch = first_batch(folder, out)
        written = surogate.load(folder / "model", adapter=out, device="cpu")
        assert loss(written, batch) == pytest.approx(found[init], rel=1e-6)
    plain = loss(surogate.load(folder / "model", device="cpu"), batch)
    assert abs(found["error"] - plain) < 0.5 * abs(found["default"] - plain)


@functools.cache
def through(folder: Path, kind: str) -> Path:
    """The output of a whole run."""
    out = folder / f"through {kind}"
    train(folder, output_dir=str(out), save_steps=3, **ERROR, **KEPT[kind])
    return out


def test_two_runs_are_the_same(folder, tmp_path):
    train(folder, output_dir=str(tmp_path / "out"), save_steps=3, **ERROR, **KEPT["nf4"])
    folders = through(folder, "nf4"), tmp_path / "out"
    one, other = (place / "adapter_model.safetensors" for place in folders)
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("kind", KEPT)
def test_goes_on_from_a_checkpoint_without_measuring_again(folder, tmp_path, monkeypatch, kind):
    out = tmp_path / "out"
    shutil.copytree(through(folder, kind), out)
    shutil.rmtree(out / "step_00000006")
    (out / "adapter_model.safetensors").unlink()

    def never(*arguments: Any) -> None:
        raise AssertionError("a run that goes on has its adapter")

    monkeypatch.setattr("surogate.train.begin_at_error", never)
    train(folder, output_dir=str(out), save_steps=3, **ERROR, **KEPT[kind])
    file = "adapter_model.safetensors"
    assert (out / file).read_bytes() == (through(folder, kind) / file).read_bytes()


@pytest.mark.parametrize("kind", KEPT)
def test_merged_it_is_the_model_that_was_trained(folder, tmp_path, kind):
    """By the verb and by the run itself. Merged onto the plain base it is another model."""
    out = tmp_path / "out"
    train(folder, output_dir=str(out), merge_adapter=True, **ERROR, **KEPT[kind])
    assert merge(out / "adapter", tmp_path / "merged") == 0
    file = "model.safetensors"
    assert (out / file).read_bytes() == (tmp_path / "merged" / file).read_bytes()
    live = surogate.load(folder / "model", adapter=out / "adapter", device="cpu")
    want = logits(live)
    assert np.abs(logits(surogate.load(out, device="cpu")) - want).max() < 1e-4
    (out / "adapter" / ORIGIN).unlink()
    assert merge(out / "adapter", tmp_path / "plain") == 0
    assert np.abs(logits(surogate.load(tmp_path / "plain", device="cpu")) - want).max() > 1e-2


def merge(adapter: Path, to: Path) -> int:
    return CliRunner().invoke(main, ["merge", str(adapter), "--output", str(to)]).exit_code


def logits(model: Any) -> np.ndarray:
    return surogate.logits(model, [list(range(0, 320, 5))])


NOTES = {
    "nf4": "the base quantised so (PEFT: load_in_4bit, nf4, bnb_4bit_use_double_quant = true), or ",
    "nvfp4": "the base quantised so, or merge it first (surogate merge)",
}


@pytest.mark.parametrize("kind", NOTES)
def test_says_what_it_starts_from_and_what_it_belongs_to(folder, tmp_path, kind):
    out = tmp_path / "out"
    config = write_config(folder, output_dir=str(out), max_steps=1, **ERROR, **KEPT[kind])
    result = invoke(config)
    assert result.exit_code == 0, result.output
    assert "lora_init = error: adapters take off " in result.output
    assert "(mean of 14 modules, by the inputs of 832 tokens)" in result.output  # an epoch
    [note] = (line for line in result.output.splitlines() if line.startswith("note: "))
    assert f"what its base lost in {kind}: use it with {NOTES[kind]}" in note
    assert "verified: loaded again" in result.output
    assert note.removeprefix("note: ") in (out / "README.md").read_text()
    exported = CliRunner().invoke(main, ["export", str(out), "--output", str(tmp_path / "again")])
    assert note in exported.stdout and "take off" not in exported.stdout
    plain = invoke(config, "lora_init=default", f"output_dir={tmp_path / 'plain'}")
    assert plain.exit_code == 0 and "note: " not in plain.output
    assert "makes up for" not in (tmp_path / "plain" / "README.md").read_text()


def test_only_what_is_adapted(folder, tmp_path):
    options = ERROR | KEPT["nf4"] | {"lora_target_modules": ["k_proj"], "max_steps": 1}
    out = tmp_path / "out"
    train(folder, output_dir=str(out), **options)
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == 4 and all(x.any() for x in tensors.values())


@pytest.mark.parametrize("settings", [{}, {"qlora_fp4": False}, {"recipe": "fp8_hybrid"}])
def test_refused_where_nothing_is_stored(folder, tmp_path, settings):
    result = invoke(write_config(folder, output_dir=str(tmp_path / "out"), **ERROR, **settings))
    assert result.exit_code == 1
    allowed = "must be default without qlora_fp8, qlora_fp4 or qlora_bnb: nothing is lost"
    assert f"lora_init = 'error': {allowed}" in result.output


def test_refused_where_the_files_are_quantised(tmp_path):
    make_model(tmp_path / "model", stored="bfloat16", tie_word_embeddings=False)
    quantise(tmp_path / "model", KINDS["nf4"], ())
    write_texts(tmp_path / "texts.jsonl")
    result = invoke(write_config(tmp_path, **ERROR, **KEPT["nf4"]))
    assert result.exit_code == 1
    assert "weights are in nf4, and what they lost is not known; set lora_init" in result.output


def test_without_adapters_it_is_reported(folder, tmp_path):
    given = ERROR | {"lora": False, "max_steps": 1}
    result = invoke(write_config(folder, output_dir=str(tmp_path / "out"), **given))
    assert result.exit_code == 0
    assert "ignored: lora_init = 'error': lora = false" in result.output


def test_a_model_that_is_not_finite_is_refused(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.input_layernorm.weight"][3] = np.nan
    save_file(tensors, file, {"format": "pt"})
    given = {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / "out")}
    result = invoke(write_config(folder, **given, **ERROR, **KEPT["nf4"]))
    assert result.exit_code == 1
    assert "error: lora_init = error: model.layers.1.self_attn.q_proj: " in result.output
