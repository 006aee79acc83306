"""W&B online, with a stand-in for its server on this machine: what arrives there, and runs whose
server refuses or dies.

Runs are processes of their own: W&B's service outlives the first run of a process.
"""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from surogate.report import read_log
from tests.surogate.runs import prepare, start, steps, write_config
from tests.surogate.wandb_server import WandbServer

pytest.importorskip("wandb")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_SERVICE", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    settings = {"MODE": "online", "API_KEY": "0123456789" * 4, "SILENT": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return prepare(tmp_path)


def run(
    folder: Path, server: WandbServer, *, seconds: float = 30.0, **settings: Any
) -> list[dict[str, Any]]:
    """The records of a run that must be well, and whose process must not last. W&B has
    ``seconds`` to begin and to end.
    """
    config = write_config(
        folder,
        report_to="wandb",
        run_name="mine",
        wandb_project="theirs",
        verify_export=False,
        **settings,
    )
    first = f"from surogate import trackers; trackers.PATIENCE = trackers.OPENING = {seconds}"
    process = start(config, first=first, environment={"WANDB_BASE_URL": server.url})
    try:
        output, errors = process.communicate(timeout=40)  # without end, or 90 s, if W&B decides
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "done: " in output
    return read_log(folder / "out" / "log.jsonl")


def faults(records: list[dict[str, Any]]) -> list[str]:
    """Lines about W&B."""
    return [r["text"] for r in records if r["log"] == "message" and r["text"].startswith("wandb")]


def test_numbers_and_samples_arrive_and_a_resumption_goes_on(folder):
    settings = {"max_steps": 4, "save_steps": 2, "eval_prompts": ["cat"], "eval_max_new_tokens": 3}
    with WandbServer() as server:
        records = run(folder, server, **settings)
        assert faults(records) == []
        [(name, kept)] = server.runs.items()
        assert (folder / "out" / "wandb_id.txt").read_text().strip() == name
        assert (kept.settings["displayName"], kept.settings["project"]) == ("mine", "theirs")
        given = records[0]["config"]
        assert {key: kept.config[key] for key in given} == given
        logged = [row for row in kept.history if "train/loss" in row]
        assert [row["step"] for row in logged] == [1, 2, 3, 4]
        for name in ("loss", "norm", "lr"):
            assert [row[f"train/{name}"] for row in logged] == steps(records, name)
        [evaluation] = [r for r in records if r["log"] == "eval"]
        assert [r["eval/loss"] for r in kept.history if "eval/loss" in r] == [evaluation["loss"]]
        [table] = [file for file in server.files if file.endswith(".table.json")]
        [sample] = [r["text"] for r in records if r["log"] == "sample"]
        assert json.loads(server.files[table])["data"] == [[4, sample]]
        assert kept.exits == [0]

        shutil.rmtree(folder / "out" / "step_00000004")
        assert faults(run(folder, server, **settings)) == []
        [again] = server.runs.values()  # the same run
        numbers = [row["step"] for row in again.history if "train/loss" in row]
        assert numbers == [1, 2, 3, 4, 3, 4] and again.exits == [0, 0]


@pytest.mark.parametrize("status,reason", [(403, "not today"), (500, "HTTP 500")])
def test_a_server_that_refuses_is_one_line(folder, status, reason):
    with WandbServer(status=status) as server:
        records = run(folder, server, seconds=1.0, max_steps=3)
    [fault] = faults(records)
    assert reason in fault
    assert fault.endswith("; nothing more is sent there, log.jsonl has everything")
    assert len(steps(records)) == 3 and records[-1]["status"] == "done"


def test_a_server_that_dies_is_one_line(folder):
    """In the midst of the steps, when the first of them have arrived."""
    dead = threading.Event()

    def seen(path: str) -> None:
        if path.endswith("file_stream") and not dead.is_set():
            dead.set()
            threading.Thread(target=server.close).start()

    with WandbServer(seen=seen) as server:
        records = run(folder, server, seconds=3.0, max_steps=60)
        assert dead.is_set()
    [fault] = faults(records)
    assert fault.startswith("wandb: Timed out finishing run")
    assert len(steps(records)) == 60 and records[-1]["status"] == "done"
