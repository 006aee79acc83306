"""A run goes on under the settings that it was made with; which may change, and how it is told."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from surogate import checkpoint
from tests.surogate.runs import TEMPLATE, invoke, prepare, read_log, write_config, write_texts
from tests.surogate.runs import train as run_through
from tests.surogate.test_resume import arrays, newest, settings


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


CHANGED = {
    "learning_rate": 0.004,
    "max_steps": 9,
    "train_seed": 3,
    "sequence_len": 24,
    "weight_decay": 0.5,
    "lr_scheduler_type": "cosine",
    "gradient_accumulation_steps": 2,
    "adamw_beta2": 0.9,
    "sample_packing": False,
}


def test_changed_settings_are_refused_with_their_names(folder):
    run_through(folder, max_steps=2)
    for name, value in CHANGED.items():
        result = invoke(write_config(folder, max_steps=2), f"{name}={json.dumps(value)}")
        assert result.exit_code == 1
        line, error = result.stderr.splitlines()
        assert line.startswith(f"refused: {name}: ") and line.endswith(f"{value!r} now")
        path = folder / "out" / "step_00000002"
        assert error.startswith(f"error: {path}: was made with another {name}; use what it had, ")
    two = invoke(write_config(folder, max_steps=2), "learning_rate=0.1", "weight_decay=0.2")
    assert two.stderr.splitlines()[:2] == [
        "refused: learning_rate: 0.003 in the checkpoint, 0.1 now",
        "refused: weight_decay: 0.0 in the checkpoint, 0.2 now",
    ]
    assert "was made with another learning_rate, weight_decay; " in two.stderr
    # Where and how often things are written, or how fast, may change, and is told.
    again = ["save_steps=1", "logging_steps=2", "eval_steps=1", "run_name=x", "save_total_limit=1"]
    result = invoke(write_config(folder, max_steps=2), *again)
    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if line.startswith("changed: ")] == [
        "changed: eval_steps: 100 in the checkpoint, 1 now",
        "changed: logging_steps: 1 in the checkpoint, 2 now",
        "changed: run_name: 'run' in the checkpoint, 'x' now",
        "changed: save_steps: 50 in the checkpoint, 1 now",
        "changed: save_total_limit: 5 in the checkpoint, 1 now",
    ]
    anew = invoke(
        write_config(folder, max_steps=2), "learning_rate=0.1", "resume_from_checkpoint=false"
    )
    assert anew.exit_code == 0 and "resumed" not in anew.stdout


def test_changed_rows_are_refused_wherever_they_lie(folder):
    run_through(folder, max_steps=2)
    config = write_config(folder, max_steps=2)
    elsewhere = folder / "elsewhere" / "texts.jsonl"
    elsewhere.parent.mkdir()
    shutil.move(folder / "texts.jsonl", elsewhere)
    moved = f"datasets.0.path={elsewhere}"
    result = invoke(config, moved)
    assert result.exit_code == 0, result.output
    assert f"\nchanged: datasets.0.path: '{folder / 'texts.jsonl'}' in the" in result.stdout
    assert "resumed after step 2: " in result.stdout
    other = invoke(config, moved, "datasets.0.samples=9")
    assert [line.split(": ")[:2] for line in other.stderr.splitlines()[:-1]] == [
        ["refused", "datasets.0.path"],
        ["refused", "datasets.0.samples"],
    ]
    write_texts(elsewhere, seed=9)
    result = invoke(config, moved)
    assert result.exit_code == 1
    assert result.stderr.startswith("refused: training rows: '")


def test_rows_of_another_day_are_refused(folder, monkeypatch):
    """A chat template that writes the date, as those of Llama 3.2 and GPT-OSS do."""
    settings_of = folder / "model" / "tokenizer_config.json"
    known = json.loads(settings_of.read_text())
    known["chat_template"] = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    settings_of.write_text(json.dumps(known))
    chats = [{"path": str(folder / "chats.jsonl"), "type": "conversation"}]
    config = write_config(folder, max_steps=4, save_steps=2, sequence_len=96, datasets=chats)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    result = invoke(config)
    assert result.exit_code == 0, result.output
    assert "the chat template wrote the date 1970-01-02 (for another, SOURCE_DATE" in result.stdout
    out = folder / "out"
    weights = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out / "step_00000004")
    shutil.rmtree(out / "data")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "172800")
    line = invoke(config).stderr.splitlines()[0]
    assert line.startswith("refused: training rows: '") and " of 1970-01-02' in the" in line
    assert line.endswith(" of 1970-01-03' now")
    shutil.rmtree(out / "data")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86401")
    assert "resumed after step 2: " in invoke(config).stdout
    assert (out / "model.safetensors").read_bytes() == weights
    # Rows that are kept stay as they are, unless another day is asked for.
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    (kept,) = [path for path in (out / "data").iterdir() if path.is_dir()]
    kept.rename(out / "data" / kept.name.partition("-")[0])
    assert "1970-01-02 (for another, SOURCE_DATE_EPOCH) (kept from" in invoke(config).stdout
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "tomorrow")
    assert invoke(config).stderr == (
        "error: SOURCE_DATE_EPOCH = 'tomorrow': must be seconds since 1970\n"
    )


def test_changed_frozen_weights_are_refused(folder):
    options = settings(folder, lora=True) | {"max_steps": 2}
    run_through(folder, **options)
    file = folder / "model" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1  # the last number's sign or exponent
    file.write_bytes(raw)
    result = invoke(write_config(folder, **options))
    assert result.exit_code == 1
    assert result.stderr.startswith("refused: frozen weights: '")


def test_settings_that_a_checkpoint_does_not_know_had_their_default(folder):
    """A key of a later version: its default is what the earlier version computed."""
    run_through(folder, max_steps=2)
    path = folder / "out" / "step_00000002"
    saved = checkpoint.load(path)
    known = {k: v for k, v in saved.settings.items() if k != "weight_decay"}
    known["datasets"] = [{"path": str(folder / "texts.jsonl"), "type": "text"}]
    trained, optimizer = arrays(path)
    checkpoint.save(
        folder / "out", checkpoint.Checkpoint(2, trained, optimizer, known, saved.sources), keep=5
    )
    assert invoke(write_config(folder, max_steps=2)).exit_code == 0
    result = invoke(write_config(folder, max_steps=2), "weight_decay=0.5")
    assert result.stderr.startswith("refused: weight_decay: 0.0 in the checkpoint, 0.5 now\n")


def test_where_a_run_stands_must_follow_from_its_settings(folder):
    """Such as after a change of our own code: the learning rate would go on along another curve."""
    run_through(folder, max_steps=6, save_steps=3)
    saved = checkpoint.load(folder / "out" / "step_00000003")
    assert saved.sources["rows so far"] == 3 * 2
    assert saved.sources["next learning rate"] == pytest.approx(0.003 * (1 - 3 / 6))
    path = newest(folder / "out")
    sources = checkpoint.load(path).sources | {"next learning rate": 0.002}
    trained, optimizer = arrays(path)
    checkpoint.save(
        folder / "out",
        checkpoint.Checkpoint(6, trained, optimizer, saved.settings, sources),
        keep=5,
    )
    result = invoke(write_config(folder, max_steps=6, save_steps=3))
    assert result.stderr.startswith("refused: next learning rate: 0.002 in the checkpoint, ")


@pytest.mark.parametrize("rows,pieces", [(4, 1), (1, 4)])
def test_a_step_may_be_divided_into_other_micro_batches(folder, rows, pieces):
    """Such as on a smaller card, or on another number of them: the same rows, and the gradients
    that the same rows have, added up in another order.
    """
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_steps": 3}
    run_through(folder, **options)
    want = read_log(folder / "out" / "log.jsonl")
    weights = (folder / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "out" / "step_00000006")
    changed = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": pieces}
    result = invoke(write_config(folder, **options | changed))
    assert result.exit_code == 0, result.output
    assert f"changed: per_device_train_batch_size: 2 in the checkpoint, {rows} now" in result.stdout
    assert "a step has the same rows, added up in another order" in result.stdout
    found = [r for r in read_log(folder / "out" / "log.jsonl") if r["log"] == "step"]
    plain = [r for r in want if r["log"] == "step"]
    assert [r["step"] for r in found] == [r["step"] for r in plain]
    for key in ("loss", "norm", "lr"):
        np.testing.assert_allclose(
            [r[key] for r in found], [r[key] for r in plain], rtol=1e-5, err_msg=key
        )
    for name, array in load(weights).items():
        again = load((folder / "out" / "model.safetensors").read_bytes())[name]
        np.testing.assert_allclose(again, array, atol=2e-5)
