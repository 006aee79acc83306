"""What TensorBoard, W&B and Aim have on the disk after a run and its resumption, read back.

Needs the packages of the extras tensorboard, wandb and aim. No network: W&B is offline.
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surogate.config import Config
from surogate.errors import UserError
from surogate.trackers import open_trackers, require_trackers
from tests.surogate.test_trackers import config_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages' own


def record(folder: Path, name: str, **settings: Any) -> Config:
    """Steps 1 to 5, then a resumption after step 3 that goes to 8."""
    config = config_of(folder, report_to=(name,), **settings)
    require_trackers(config)
    for resumed, last in ((0, 5), (3, 8)):
        opened = open_trackers(config, folder, resumed)
        for number in range(resumed + 1, last + 1):
            opened.scalars(number, {"train/loss": 1 / number, "train/lr": 1e-4})
        opened.scalars(last, {"eval/loss": math.nan})
        opened.text(last, "sample/Why?", "Because\nof it.")
        opened.close()
        assert opened.new_faults() == []
    return config


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(n, pytest.approx(1 / n, rel=1e-6)) for n in range(1, 9)]  # each step once
    assert math.isnan(found.Scalars("eval/loss")[-1].value)
    text = found.Tensors("sample/Why?")[-1]
    assert text.step == 8
    assert text.tensor_proto.string_val[0].decode() == "    Because\n    of it."
    assert found.SummaryMetadata("sample/Why?").plugin_data.plugin_name == "text"


def test_tensorboard_needs_no_framework(tmp_path):
    pytest.importorskip("tensorboard")
    import subprocess
    import sys

    code = (
        "import sys\n"
        "sys.modules['tensorflow'] = sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from surogate.trackers import TensorBoard\n"
        f"TensorBoard(None, Path({str(tmp_path)!r}), 0).scalars(1, {{'a': 1.0}})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert list((tmp_path / "tensorboard").iterdir())


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log of protobufs in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            made = Record()
            made.ParseFromString(parts)
            parts = b""
            yield made


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no login here
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = record(tmp_path, "wandb", wandb_mode="offline", wandb_project="theirs")
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and config.wandb_name is None
    name = (tmp_path / "wandb_id.txt").read_text().strip()
    assert {file.stem for file in files} == {f"run-{name}"}  # one run of two parts
    losses: dict[int, float] = {}
    for file in files:
        found = list(wandb_records(file))
        [run] = [r.run for r in found if r.HasField("run")]
        assert (run.display_name, run.project, run.run_id) == ("mine", "theirs", name)
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert settings["model"] == "tiny" and settings["learning_rate"] == config.learning_rate
        rows = [
            {item.key or "/".join(item.nested_key): item.value_json for item in r.history.item}
            for r in found
            if r.HasField("history")
        ]
        losses |= {
            int(row["step"]): float(row["train/loss"]) for row in rows if "train/loss" in row
        }
        assert any("sample/Why?" in key for row in rows for key in row)
        steps = [r.metric for r in found if r.HasField("metric")]
        assert any(m.glob_name == "*" and m.step_metric == "step" for m in steps)
    assert losses == {n: 1 / n for n in range(1, 9)}


def test_wandb_without_a_login(tmp_path, monkeypatch):
    """An error before the start, not a question that nobody answers."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="is not logged in: run `wandb login`, or set wandb_mode"):
        require_trackers(config_of(tmp_path, report_to=("wandb",), wandb_mode="online"))
    require_trackers(config_of(tmp_path, report_to=("wandb",), wandb_mode="offline"))


def test_aim(tmp_path, monkeypatch):
    aim = pytest.importorskip("aim")
    from aim.sdk.index_manager import RepoIndexManager

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    record(tmp_path, "aim", aim_experiment="theirs", aim_name="named")
    repository = aim.Repo(str(tmp_path))
    [name] = repository.list_all_runs()  # one run, gone on with
    assert name == (tmp_path / "aim_run_hash.txt").read_text().strip()
    RepoIndexManager.get_index_manager(repository).index(name)
    run = repository.get_run(name)
    assert (run.name, run.experiment, run["config", "model"]) == ("named", "theirs", "tiny")
    metrics = {metric.name: metric.values.sparse_list()[1] for metric in run.metrics()}
    assert sorted(metrics["train/loss"]) == sorted(1 / n for n in range(1, 9))
    kinds = run.collect_sequence_info(("texts",))
    assert [text["name"] for text in kinds["texts"]] == ["sample/Why?"]
