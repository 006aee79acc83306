"""A run that was stopped anywhere goes on with the same bits: kills and signals."""

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from surogate import checkpoint, resume, train
from surogate.config import Config
from surogate.errors import UserError
from surogate.manifest import MANIFEST, faults
from surogate.models.recipe import Nvfp4Settings
from surogate.models.walk import CARD
from surogate.report import read_log
from surogate.stop import Stop
from tests.models.test_memory import TWO, step_of, work_of
from tests.oracle import same_bits
from tests.surogate.runs import invoke, prepare, start, steps, write_config
from tests.surogate.runs import train as run_through


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def settings(folder: Path, *, lora: bool) -> dict[str, Any]:
    """Small rows, so that a process spends its time in saving as much as in computing."""
    common = {"sequence_len": 16, "per_device_train_batch_size": 1, "eval_steps": 7}
    chats = [{"path": str(folder / "chats.jsonl"), "type": "conversation"}]
    if not lora:
        return common
    return common | {"lora": True, "lora_rank": 2, "datasets": chats, "sequence_len": 64}


def newest(output: Path) -> Path:
    """The newest checkpoint of a run that has one."""
    path = checkpoint.newest(output)
    assert path is not None
    return path


def arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Those of a checkpoint's two files."""
    return load_file(path / checkpoint.TRAINED), load_file(path / checkpoint.OPTIMIZER)


def final(output: Path) -> dict[str, np.ndarray]:
    """Weights, moments and step of the newest checkpoint, after a look at its hashes."""
    path = newest(output)
    assert faults(path) == []
    return load_file(path / checkpoint.TRAINED) | load_file(path / checkpoint.OPTIMIZER)


def assert_same_end(one: Path, other: Path) -> None:
    first, second = final(one), final(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        same_bits(second[name], array)
    for file in ("model.safetensors", "adapter_model.safetensors"):
        assert (one / file).exists() == (other / file).exists()
        if (one / file).exists():
            assert (one / file).read_bytes() == (other / file).read_bytes()


def assert_whole_log(output: Path, total: int, other: Path) -> None:
    """Each step and evaluation once, in order, with the numbers of the uninterrupted run."""
    records, wanted = read_log(output / "log.jsonl"), read_log(other / "log.jsonl")
    assert steps(records, "step") == list(range(1, total + 1))
    for name in ("loss", "norm", "lr", "epoch"):
        assert steps(records, name) == steps(wanted, name)
    evaluations, expected = (
        [(r["step"], r["loss"]) for r in log if r["log"] == "eval"] for log in (records, wanted)
    )
    assert evaluations == expected


def wait_for_step(process: "subprocess.Popen[str]") -> bool:
    """Reads the output up to the first line of a step; False when the run ended before."""
    assert process.stdout is not None
    return any(line.startswith("step ") for line in process.stdout)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_ends_with_its_status(folder, number, lora):
    options = settings(folder, lora=lora) | {"save_steps": 1000, "max_steps": 60}
    process = start(write_config(folder, **options))
    assert wait_for_step(process)
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    assert (
        errors
        == f"{name}: stopping after this step, with a checkpoint; once more to stop at once\n"
    )
    [path] = (folder / "out").glob("step_*")
    done = int(path.name[5:])
    assert 0 < done < 60
    assert output.splitlines()[-1] == f"stopped by {name} after step {done}: run again to go on"
    assert steps(read_log(folder / "out" / "log.jsonl"), "step") == list(range(1, done + 1))
    # A short run of the same schedule is not the same run: the whole length is run twice.
    again = start(write_config(folder, **options))
    assert again.communicate()[1] == "" and again.returncode == 0
    plain = start(write_config(folder, **options), f"output_dir={folder / 'plain'}")
    assert plain.communicate()[1] == ""
    assert_same_end(folder / "plain", folder / "out")
    assert_whole_log(folder / "out", 60, folder / "plain")


@pytest.mark.parametrize("background", [False, True])
def test_second_signal_ends_at_once(folder, monkeypatch, background):
    """Also in a save, whose thread is left behind: what was there stays whole."""
    options = {"max_steps": 6, "save_steps": 2, "save_total_limit": 9, "async_save": background}
    run_through(folder, **options)
    out = folder / "out"
    before = {p.name: final_bytes(p) for p in out.glob("step_*")}
    shutil.rmtree(out / "step_00000006")
    shutil.rmtree(out / "step_00000004")
    ended, calls, real = threading.Event(), [], os.fsync

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)  # two of a kind at one moment are one
            signal.raise_signal(signal.SIGTERM)
            assert not background or ended.wait(30)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    config = write_config(folder, **options)
    result = invoke(config)
    assert result.exit_code == 128 + signal.SIGTERM
    ended.set()  # a process would be gone by now
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(10)
    monkeypatch.undo()
    assert newest(out).name == "step_00000002"
    assert invoke(config).exit_code == 0
    assert {p.name: final_bytes(p) for p in out.glob("step_*")} == before


def final_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_signal_before_the_first_step_ends_at_once(folder, monkeypatch):
    def load(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal should have ended the run")

    monkeypatch.setattr(train, "load_rows", load)
    result = invoke(write_config(folder))
    assert result.exit_code == 128 + signal.SIGINT
    assert not list((folder / "out").glob("step_*"))


def test_signal_in_an_evaluation_leaves_it_to_the_next_run(folder, monkeypatch):
    """The evaluation that was cut short is made by the run that goes on."""
    options = {"eval_steps": 2, "max_steps": 5, "save_steps": 100, "validation_split_ratio": 0.3}
    run_through(folder, **options, output_dir=str(folder / "plain"))
    real = train.TrainStep.logprobs
    seen = []

    def logprobs(step: Any, batch: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(step, batch)

    with monkeypatch.context() as patch:
        patch.setattr(train.TrainStep, "logprobs", logprobs)
        result = invoke(write_config(folder, **options))
    assert result.exit_code == 128 + signal.SIGTERM
    records = read_log(folder / "out" / "log.jsonl")
    assert [r["log"] for r in records] == ["run", "step", "step", "message", "end"]
    run_through(folder, **options)
    assert_same_end(folder / "plain", folder / "out")
    assert_whole_log(folder / "out", 5, folder / "plain")


def test_stop_restores_the_handlers_and_tells_signals_apart(capfd):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGTERM)
        assert end.value.code == 143 and not stop.asked
        with stop.deferred():
            signal.raise_signal(signal.SIGINT)
            assert (stop.asked, stop.status) == ("SIGINT", 130)
            with pytest.raises(SystemExit) as end:
                signal.raise_signal(signal.SIGTERM)
            assert end.value.code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert capfd.readouterr().err.count("\n") == 1


def test_stop_outside_the_main_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Stop() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.asked))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, "")]


class Crash(BaseException):
    """The end of a process, as far as this test goes."""


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("call", ["report", "save", "evaluate", "micro", "update"])
def test_dying_at_any_call_of_any_step(folder, monkeypatch, call, lora):
    """Every step of a short run dies once at a call, the run is started again, and so on."""
    options = settings(folder, lora=lora) | {"max_steps": 5, "save_steps": 2, "eval_steps": 2}
    run_through(folder, **options, output_dir=str(folder / "plain"))
    owner, name = {
        "report": (train.Run, "_report"),
        "save": (train.Run, "_save"),
        "evaluate": (train.Run, "_evaluate"),
        "micro": (train.TrainStep, "micro"),
        "update": (train.TrainStep, "update"),
    }[call]
    real, left = getattr(owner, name), 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, dying)
    deaths = 0
    for calls in (1, 2, 3, 2, 1):
        left = calls
        try:
            result = invoke(write_config(folder, **options))
        except Crash:
            deaths += 1
        else:
            assert result.exit_code == 0
            break
    assert deaths >= 2
    left = -1
    result = invoke(write_config(folder, **options))
    assert result.exit_code == 0, result.output
    assert_same_end(folder / "plain", folder / "out")
    assert_whole_log(folder / "out", 5, folder / "plain")


def test_rows_go_on_where_they_were(folder, monkeypatch):
    """Over epochs, with accumulation: the sequence of rows of the two runs is the plain one's."""
    seen: list[list[tuple[int, list[int]]]] = []
    real = train.Loader.batch

    def batch(loader: Any, index: int) -> Any:
        seen[-1].append((index, loader.rows(index).tolist()))
        return real(loader, index)

    monkeypatch.setattr(train.Loader, "batch", batch)
    options = {"gradient_accumulation_steps": 3, "max_steps": 12, "save_steps": 5}
    config = write_config(folder, **options)
    seen.append([])
    assert invoke(config, f"output_dir={folder / 'plain'}").exit_code == 0
    out = folder / "out"
    seen.append([])
    with monkeypatch.context() as patch:
        real_save = train.Run._save

        def save_and_die(run: Any, directory: Path, *, keep: int) -> None:
            real_save(run, directory, keep=keep)
            run.saver.wait()
            if run.done == 10:  # of epoch 3
                raise Crash

        patch.setattr(train.Run, "_save", save_and_die)
        with pytest.raises(Crash):
            invoke(config)
    seen.append([])
    assert invoke(config).exit_code == 0
    plain, first, second = (dict(part) for part in seen)
    wanted = {index: plain[index] for index in range(36)}
    found = {i: r for i, r in first.items() if i < 30} | {i: r for i, r in second.items() if i < 36}
    assert min(second) == 30 and found == wanted
    per_epoch = 27 // 6 * 3  # micro-batches
    for epoch in range(3):
        rows = [r for i in range(epoch * per_epoch, (epoch + 1) * per_epoch) for r in wanted[i]]
        assert len(rows) == len(set(rows)) == 2 * per_epoch
    assert_same_end(folder / "plain", out)


@pytest.mark.parametrize("name", [checkpoint.TRAINED, checkpoint.OPTIMIZER, MANIFEST])
def test_damage_is_one_line_and_never_a_cold_start(folder, name):
    options = {"max_steps": 4, "save_steps": 2}
    run_through(folder, **options)
    want = final(folder / "out")
    paths = [folder / "out" / f"step_0000000{step}" for step in (4, 2)]
    flip(paths[0] / name)
    result = invoke(write_config(folder, **options))
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if "damaged" in line]
    assert len(lines) == 1 and lines[0].startswith(f"{paths[0] / name}: ")
    assert "resumed after step 2" in result.stdout
    for key, array in final(folder / "out").items():
        same_bits(array, want[key])
    for path in paths:
        flip(path / name)
    result = invoke(write_config(folder, **options))
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: {paths[0] / name}: ")
    assert "no checkpoint before it is whole" in line


def flip(file: Path) -> None:
    """Turns a bit in the middle of a file over."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 16
    file.write_bytes(raw)


def test_a_cold_start_is_not_the_same(folder):
    """The moments matter: weights alone would give another end."""
    run_through(folder, max_steps=6, save_steps=3, save_total_limit=9)
    want = final(folder / "out")
    for path in (folder / "out").glob("step_00000006"):
        shutil.rmtree(path)
    path = folder / "out" / "step_00000003"
    arrays = load_file(path / checkpoint.OPTIMIZER)
    assert any(array.any() for name, array in arrays.items() if name.startswith("m."))
    cold = {k: v if k == "step" else np.zeros_like(v) for k, v in arrays.items()}
    saved = checkpoint.load(path)
    trained = load_file(path / checkpoint.TRAINED)
    shutil.rmtree(path)
    checkpoint.save(
        folder / "out",
        checkpoint.Checkpoint(3, trained, cold, saved.settings, saved.sources),
        keep=9,
    )
    run_through(folder, max_steps=6, save_steps=3, save_total_limit=9)
    got = final(folder / "out")
    assert not np.array_equal(got["embed"], want["embed"])


def test_another_device_s_checkpoint_is_refused(folder):
    """A card computes in bfloat16: its moments and masters do not fit a run in float32."""
    run_through(folder, max_steps=2)
    path = folder / "out" / "step_00000002"
    saved = checkpoint.load(path)
    trained = load_file(path / checkpoint.TRAINED)
    optimizer = load_file(path / checkpoint.OPTIMIZER)
    sources = saved.sources | {"compute dtype": "bfloat16"}
    made = checkpoint.Checkpoint(2, trained, optimizer, saved.settings, sources)
    checkpoint.save(folder / "out", made, keep=5)
    result = invoke(write_config(folder, max_steps=2))
    assert result.exit_code == 1
    assert "refused: compute dtype: 'bfloat16' in the checkpoint, 'float32' now" in result.stderr


def test_two_runs_do_not_share_a_folder(folder):
    from surogate.setup import claimed

    with claimed(folder / "out"):
        result = invoke(write_config(folder))
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: output_dir = {folder / 'out'}: another run is using it; wait, or set another\n",
    )
    assert invoke(write_config(folder)).exit_code == 0


def test_resuming_holds_no_second_copy(folder, monkeypatch):
    """The checkpoint is read into the run's arrays, one at a time."""
    run_through(folder, max_steps=2)
    filled = []
    real = checkpoint.fill_

    def fill_(file: Path, arrays: Any, **settings: Any) -> None:
        filled.append(sorted(arrays))
        real(file, arrays, **settings)

    monkeypatch.setattr(checkpoint, "fill_", fill_)
    assert invoke(write_config(folder, max_steps=2)).exit_code == 0
    assert len(filled) == 2 and "step" in filled[1]


def test_missing_manifest_is_a_user_error(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(UserError, match=r"manifest.json: is missing; remove"):
        checkpoint.load(newest(tmp_path))


def test_a_micro_batch_changes_nothing_that_is_being_saved():
    """The copy to the host may still run when the next passes draw their random bits."""
    step = step_of(work_of(TWO, (), CARD, "block", None, Nvfp4Settings()))
    state = resume.state_of(step, 0, Config(model="", output_dir=""), {})
    step.recipe.draw_()
    assert step.recipe.named()["nvfp4.key"][1] == 1
    assert state.optimizer["nvfp4.key"][1] == 0
