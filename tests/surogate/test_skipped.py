"""Updates that cannot be used: left out, told, counted, never saved, and not for ever."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from surogate import train
from surogate.checkpoint import OPTIMIZER, TRAINED
from surogate.manifest import faults
from surogate.report import read_log
from tests.oracle import same_bits
from tests.surogate.runs import invoke, prepare, steps, write_config


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def spoil(monkeypatch: pytest.MonkeyPatch, what: str, *numbers: int) -> None:
    """Makes the gradient, the loss or the count of those updates of each run useless."""
    real = train.TrainStep.update
    calls: dict[int, int] = {}

    def update(step: Any, lr: float) -> Any:
        calls[id(step)] = number = calls.get(id(step), 0) + 1
        if number in numbers:
            if what == "gradient":
                step.grads.norm[0] = np.inf
            else:
                getattr(step, f"_{what}")[...] = {"nll": np.nan, "count": 0}[what]
        return real(step, lr)

    monkeypatch.setattr(train.TrainStep, "update", update)


def messages(folder: Path) -> list[str]:
    return [r["text"] for r in read_log(folder / "out" / "log.jsonl") if r["log"] == "message"]


def state(path: Path) -> dict[str, np.ndarray]:
    assert faults(path) == []
    return load_file(path / TRAINED) | load_file(path / OPTIMIZER)


@pytest.mark.parametrize(
    "what,words",
    [
        ("gradient", "a gradient that is not finite"),
        ("nll", "a loss that is not finite"),
        ("count", "no supervised token"),
    ],
)
def test_is_told_with_its_rows_and_counted(folder, monkeypatch, what, words):
    spoil(monkeypatch, what, 3)
    options = {"max_steps": 5, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    result = invoke(write_config(folder, **options))
    assert result.exit_code == 0, result.output
    told = [text for text in messages(folder) if "left out (packed" in text]
    assert len(told) == 1 and told[0].startswith(f"step 3: {words}: the update was left out (")
    rows = told[0].partition("rows ")[2].rstrip(")").split(", ")
    assert len(set(rows)) == 4  # two micro-batches of two rows
    assert result.stdout.splitlines()[-1] == (
        "done: 5 steps, 1 of them left out: their loss or gradient could not be used"
    )
    found = state(folder / "out" / "step_00000005")
    assert found["step"] == 4  # that were made


def test_nothing_is_left_of_it(folder, monkeypatch):
    """Weights, moments and the number of updates are those of before, bit for bit."""
    options = {"max_steps": 4, "save_steps": 1}
    spoil(monkeypatch, "count", 4)  # a step that is saved all the same
    assert invoke(write_config(folder, **options)).exit_code == 0
    before, after = (state(folder / "out" / f"step_0000000{n}") for n in (3, 4))
    assert before.keys() == after.keys()
    for name, array in before.items():
        same_bits(after[name], array)


@pytest.mark.parametrize("background", [False, True])
def test_is_never_saved_over_a_good_state(folder, monkeypatch, background):
    """And the run that goes on from there makes the steps again, this time with their end."""
    options = {"max_steps": 6, "save_steps": 2, "save_total_limit": 1, "async_save": background}
    with monkeypatch.context() as patch:
        spoil(patch, "nll", 4, 6)
        assert invoke(write_config(folder, **options)).exit_code == 0
    out = folder / "out"
    assert [p.name for p in out.glob("step_*")] == ["step_00000002"]
    assert [text for text in messages(folder) if "not saved" in text] == [
        f"step {n}: not saved: its loss or gradient is not finite; the checkpoint before stays "
        "the newest"
        for n in (4, 6)
    ]
    result = invoke(write_config(folder, **options))
    assert "resumed after step 2" in result.stdout
    assert invoke(write_config(folder, **options), f"output_dir={folder / 'plain'}").exit_code == 0
    want = state(folder / "plain" / "step_00000006")
    for name, array in state(out / "step_00000006").items():
        same_bits(array, want[name])
    assert steps(read_log(out / "log.jsonl")) == steps(read_log(folder / "plain" / "log.jsonl"))


@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_in_a_row_end_the_run(folder, monkeypatch, limit):
    spoil(monkeypatch, "nll", 3, 5, 6, 7)
    result = invoke(write_config(folder, max_steps=9, max_skipped_steps=limit, save_steps=2))
    step = {1: 3, 3: 7}[limit]
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: step {step}: {limit} updates in a row could not be used; lower learning_rate, or "
        "look at the data; earlier checkpoints are whole\n",
    )
    assert sorted(p.name for p in (folder / "out").glob("step_*"))[-1] == (
        "step_00000002" if limit == 1 else "step_00000004"
    )


@pytest.mark.parametrize("background", [False, True])
def test_weights_that_are_not_finite_are_never_saved(folder, monkeypatch, background):
    """Such as after an update whose gradient was finite and whose step was not."""
    real = train.TrainStep.update

    def update(step: Any, lr: float) -> Any:
        pending = real(step, lr)
        if step.state.step == 4:
            step.model.norm[3] = np.inf
        return pending

    monkeypatch.setattr(train.TrainStep, "update", update)
    options = {"max_steps": 4, "save_steps": 2, "save_total_limit": 1, "async_save": background}
    with np.errstate(all="ignore"):
        result = invoke(write_config(folder, **options))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: norm holds values that are not finite: the checkpoint ")
    assert faults(folder / "out" / "step_00000002") == []
    assert not list((folder / "out").glob("*step_00000004"))
