"""Trackers: what they get, and that a run neither waits for them nor fails with them.

The threads and faults are tested with trackers that record; TensorBoard, W&B and Aim by reading
back what was written, with the packages where they are there (`pip install 'surogate[trackers]'`)
and with modules that record the same calls where they are not.
"""

import importlib.util
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surogate import trackers
from surogate.config import Config
from surogate.errors import UserError
from surogate.report import read_log
from surogate.settings import DatasetConfig
from surogate.trackers import Trackers, open_trackers, require_trackers
from tests.surogate.runs import prepare, steps, train


def config_of(folder: Path, **settings: Any) -> Config:
    data = (DatasetConfig(path="rows.jsonl", type="text"),)
    fields = {"model": "tiny", "run_name": "mine", "output_dir": str(folder), "datasets": data}
    return Config(**fields | settings)


class Recorder:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, ...]] = []
        self.closed = threading.Event()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.got.append((step, dict(values)))

    def text(self, step: int, name: str, text: str) -> None:
        self.got.append((step, name, text))

    def close(self) -> None:
        self.closed.set()


class Failing(Recorder):
    """Raises at a step, at the end, or never."""

    def __init__(self, at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.error = at, error or RuntimeError("no route to host\nand more")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            raise self.error
        super().scalars(step, values)

    def close(self) -> None:
        if self.at is None:
            raise self.error


def fill(opened: Trackers, count: int = 5) -> None:
    for number in range(1, count + 1):
        opened.scalars(number, {"train/loss": 1.0 / number})
    opened.text(count, "sample/Why?", "Because.")


def test_everything_arrives_in_order_and_is_closed():
    one, other = Recorder(), Recorder()
    opened = Trackers({"one": lambda: one, "other": lambda: other})
    fill(opened)
    opened.close()
    opened.close()
    for tracker in (one, other):
        assert tracker.closed.is_set()
        assert tracker.got[:5] == [(n, {"train/loss": 1.0 / n}) for n in range(1, 6)]
        assert tracker.got[5] == (5, "sample/Why?", "Because.")
    assert opened.new_faults() == []


@pytest.mark.parametrize("error", [RuntimeError("no route to host\nand more"), SystemExit(3)])
def test_tracker_that_fails_is_reported_once_and_others_go_on(error):
    good = Recorder()
    opened = Trackers({"bad": lambda: Failing(3, error), "good": lambda: good})
    fill(opened)
    opened.close()
    reason = "no route to host" if isinstance(error, RuntimeError) else "3"
    line = f"bad: {reason}; nothing more is sent there, log.jsonl has everything"
    assert opened.new_faults() == [line]
    assert opened.new_faults() == []
    assert len(good.got) == 6 and good.closed.is_set()


def test_failures_while_opening_and_closing_are_faults():
    def refuse() -> Recorder:
        raise OSError(28, "No space left on device")

    opened = Trackers({"one": refuse, "other": Failing})
    fill(opened)
    opened.close()
    assert [fault.split(";")[0] for fault in opened.new_faults()] == [
        "one: [Errno 28] No space left on device",
        "other: no route to host",
    ]


def test_tracker_that_hangs_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    monkeypatch.setattr(trackers, "ROOM", 3)
    release = threading.Event()

    class Hanging(Recorder):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            release.wait()

    begin = time.monotonic()
    opened = Trackers({"slow": Hanging})
    fill(opened, 50)
    assert [fault.split(";")[0] for fault in opened.new_faults()] == ["slow: does not keep up"]
    opened.close()
    patient = Trackers({"slow": Hanging})
    patient.scalars(1, {})
    patient.close()
    assert patient.new_faults()[0].startswith("slow: did not finish in 0 s;")
    assert time.monotonic() - begin < 5
    release.set()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "aim"])
def test_package_that_is_missing_is_an_error_before_anything_is_loaded(tmp_path, name, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else found(n))
    with pytest.raises(UserError) as error:
        require_trackers(config_of(tmp_path, report_to=(name,)))
    assert str(error.value) == (
        f"report_to = {name}: the package is not installed: pip install 'surogate[{name}]'"
    )


def test_surogate_stands_for_the_log(tmp_path):
    config = config_of(tmp_path, report_to=("surogate",))
    require_trackers(config)
    assert open_trackers(config, tmp_path, 0)._threads == []


def test_a_run_goes_on_without_its_tracker(tmp_path, monkeypatch):
    """The same losses, one line in the log, and the exit of a run that is well."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)
    folder = prepare(tmp_path)
    plain = train(folder, output_dir=str(folder / "plain"))
    seen: list[Recorder] = []

    def opened(config: Config, directory: Path, resumed: int) -> Trackers:
        seen.append(Recorder())
        return Trackers({"wandb": lambda: Failing(2), "other": lambda: seen[0]})

    monkeypatch.setattr("surogate.train.open_trackers", opened)
    records = train(folder, eval_prompts=["the cat"], eval_max_new_tokens=3)
    assert steps(records) == steps(plain)
    notes = [r["text"] for r in records if r["log"] == "message" and "wandb" in r["text"]]
    assert notes == [
        "wandb: no route to host; nothing more is sent there, log.jsonl has everything"
    ]
    numbers = [entry[1] for entry in seen[0].got if len(entry) == 2]
    assert [entry["train/loss"] for entry in numbers if "train/loss" in entry] == steps(plain)
    assert {"train/norm", "train/lr", "train/tokens_per_second", "train/sol"} <= numbers[0].keys()
    [evaluation] = [entry for entry in numbers if "eval/loss" in entry]
    assert evaluation["eval/loss"] == next(r["loss"] for r in records if r["log"] == "eval")
    assert [entry[1] for entry in seen[0].got if len(entry) == 3] == ["sample/the cat"]
    assert records[-1]["log"] == "end" and records[-1]["status"] == "done"
    assert json.dumps(read_log(folder / "out" / "log.jsonl")[-1]) == json.dumps(records[-1])
