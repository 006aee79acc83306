"""surogate config: values, their origins and reasons, for people and for machines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from surogate.choices import options_of
from surogate.cli import main
from surogate.config import load_config
from surogate.device import Device, choose_device
from surogate.explain import Line, explain
from surogate.kernels.arrays import BF16, F32
from surogate.settings import DATASET_FIELDS, FIELDS
from surogate.train import schedule
from tests.surogate.test_config import BASE, write

CPU = choose_device("cpu")
CARD = Device("cuda", "a card", np, BF16)


def lines(folder: Path, on: Device = CPU, **table: Any) -> dict[str, Line]:
    file = write(folder, BASE | table)
    config = load_config(file, overrides=["lora_rank=4"], recipe="bf16", verb="run")
    return {line.name: line for line in explain(config, file, on)}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["config", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_key_once_with_its_help(tmp_path):
    found = lines(tmp_path)
    data = {"datasets", "validation_datasets"}
    assert found.keys() == (FIELDS.keys() - data) | {f"datasets.0.{n}" for n in DATASET_FIELDS}
    assert all(line.help for line in found.values())


def test_origins(tmp_path):
    found = lines(tmp_path, learning_rate=1e-3, device="cpu")
    file = str(tmp_path / "run.yaml")
    assert found["learning_rate"][1:4] == (1e-3, "file", file)
    assert found["datasets.0.path"][1:4] == ("rows.jsonl", "file", file)
    assert found["lora_rank"][1:4] == (4, "--set", "--set")
    assert found["recipe"][1:4] == ("bf16", "--recipe", "--recipe")
    assert found["run_name"][1:4] == ("run", "derived", "the file's name")
    assert found["eval_steps"][1:4] == (100, "default", "")
    assert found["device"][1:3] == ("cpu", "file")
    assert found["log_file"][1:4] == ("output/log.jsonl", "derived", "output_dir")


def test_chosen_by_other_keys(tmp_path):
    found = lines(tmp_path, auto_lmhead_chunks=False)
    assert found["lmhead_chunks"][1:4] == (1, "derived", "auto_lmhead_chunks = false")
    text = lines(tmp_path, datasets=[{"path": "x", "type": "text"}])
    assert text["lora"][1:4] == (False, "derived", "verb pt")


def test_device_and_what_rests_on_it(tmp_path):
    found = lines(tmp_path)
    assert found["device"][1:4] == ("cpu", "derived", CPU.fact())
    assert lines(tmp_path, CARD)["device"][1:3] == ("cuda", "derived")


@pytest.mark.parametrize("device", [CPU, CARD])
@pytest.mark.parametrize("table", [{}, {"lora": False}, {"gradient_dtype": "fp32"}])
def test_gradient_dtype_is_what_a_step_uses(tmp_path, device, table):
    value = lines(tmp_path, device, **table)["gradient_dtype"].value
    config = load_config(
        write(tmp_path, BASE | table), overrides=["lora_rank=4", "recompute=block"]
    )
    used = options_of(config, device.kind, device.compute).gradient_dtype
    assert {"fp32": F32, "bf16": BF16}[value] == used


def test_warmup_steps_are_what_a_schedule_uses(tmp_path):
    table = {"warmup_ratio": 0.11, "max_steps": 55}
    value = lines(tmp_path, **table)["warmup_steps"].value
    config = load_config(write(tmp_path, BASE | table))
    assert value == schedule(config, 55).warmup_steps == 7


def test_for_machines(tmp_path):
    file = write(tmp_path, BASE | {"model_type": "x", "use_cuda_graphs": False, "device": "cpu"})
    document = json.loads(run(str(file), "--explain", "--json", "--set", "lora_rank=4"))
    names = [setting["name"] for setting in document["settings"]]
    assert names[:2] == ["run_name", "num_epochs"] and len(names) > len(FIELDS)
    assert {"name", "value", "origin", "source", "help"} == document["settings"][0].keys()
    assert [note["name"] for note in document["ignored"]] == ["model_type", "use_cuda_graphs"]
    assert len(document["hash"]) == 16


def test_for_people(tmp_path):
    file = write(tmp_path, BASE | {"model_type": "x", "run_name": "[bold]mine"})
    output = run(str(file), "--explain")
    assert "[bold]mine" in output  # markup is text
    assert "weight_decay" in output and "Decoupled weight decay" in output
    assert "ignored: model_type = 'x': the model's config.json decides" in output
    short = run(str(file))
    assert "run_name" in short and "weight_decay" not in short


def test_schema_alone():
    assert json.loads(run("--schema"))["properties"]["lora_rank"]["default"] == 16
    assert CliRunner().invoke(main, ["config"]).exit_code == 2


def test_mistakes_are_one_line(tmp_path):
    result = CliRunner().invoke(main, ["config", str(write(tmp_path, BASE | {"lora_rnk": 1}))])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unknown key 'lora_rnk'")


def test_needs_no_trainer(tmp_path):
    """It answers before anything heavy is imported."""
    file = write(tmp_path, BASE)
    code = (
        "import sys; from surogate.cli import main\n"
        f"try: main(['config', {str(file)!r}])\n"
        "except SystemExit: pass\n"
        "heavy = {'surogate.train', 'matplotlib', 'datasets'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
