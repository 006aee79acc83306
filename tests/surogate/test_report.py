"""Console lines, log.jsonl and its truncation on resumption, and the plot."""

import contextlib
import io
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from matplotlib.image import imread
from rich.console import Console

from surogate.errors import UserError
from surogate.plot import curves, smooth, write_plot
from surogate.report import (
    EvalRecord,
    Reporter,
    SampleRecord,
    SourceLoss,
    StepRecord,
    compact,
    duration,
    eval_scalars,
    read_log,
    step_scalars,
)


def step(number: int, **fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number,
        "epoch": 0.5,
        "tokens": 16384,
        "duration_ms": 400.0,
        "loss": 2.34561,
        "norm": 0.834,
        "lr": 2e-4,
        "tokens_per_second": 41234.0,
        "sol": 38.14,
    }
    return StepRecord(**values | fields)


def evaluation(number: int) -> EvalRecord:
    return EvalRecord(
        step=number, epoch=0.5, tokens=1000, loss=2.5, recipe="bf16", duration_ms=1250.0
    )


class Clock:
    """Ten seconds a call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=40), out


def record_steps(path: Path, numbers: range, *, resumed_step: int = 0) -> None:
    console, _ = plain_console()
    with Reporter(path, total_steps=100, resumed_step=resumed_step, console=console) as reporter:
        reporter.start([], config={}, versions={}, device="cpu")
        for number in numbers:
            reporter.step(step(number))
            if number % 2 == 0:
                reporter.evaluation(evaluation(number))
            reporter.message(f"at {number}")


def steps_of(path: Path, kind: str = "step") -> list[int]:
    return [record["step"] for record in read_log(path) if record["log"] == kind]


def test_plain_lines(tmp_path):
    console, out = plain_console()
    clock = Clock()
    reporter = Reporter(
        tmp_path / "log.jsonl", total_steps=200, logging_steps=5, console=console, clock=clock
    )
    reporter.start(["model [tiny] 3M"], config={}, versions={}, device="cpu")
    for number in range(1, 11):
        reporter.step(step(number))
    reporter.evaluation(evaluation(10))
    reporter.message("saved")
    for number in (199, 200):
        reporter.step(step(number, sol=None))
    reporter.finish(["done"])
    assert out.getvalue().splitlines() == [
        "model [tiny] 3M",
        "step    5/200  loss 2.3456  norm 0.83  lr 2.0e-04  41.2k tok/s  sol 38.1 %  eta 00:32:30",
        "step   10/200  loss 2.3456  norm 0.83  lr 2.0e-04  41.2k tok/s  sol 38.1 %  eta 00:31:40",
        "eval   10/200  loss 2.5000  1000 tokens in 1.2 s",
        "saved",
        "step  200/200  loss 2.3456  norm 0.83  lr 2.0e-04  41.2k tok/s  eta 00:00:00",
        "done",
    ]


def test_first_step_takes_its_own_duration_for_the_eta(tmp_path):
    console, out = plain_console()
    with Reporter(tmp_path / "log.jsonl", total_steps=11, console=console) as reporter:
        reporter.step(step(1, duration_ms=2000.0))
    assert out.getvalue().endswith("eta 00:00:20\n")


def test_terminal_has_a_bar_and_keeps_messages(tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, color_system=None)
    with Reporter(tmp_path / "log.jsonl", total_steps=4, console=console) as reporter:
        reporter.start(["facts"], config={}, versions={}, device="cpu")
        reporter.step(step(1))
        reporter.evaluation(evaluation(1))
        reporter.step(step(4))
        reporter.finish(["done"])
    text = out.getvalue()
    assert "step 1/4 " in text and "step 4/4 " in text
    assert "loss 2.3456  norm 0.83" in text
    assert "\neval    1/4  loss 2.5000" in text.replace("\r", "\n").replace("\x1b[2K", "")
    assert text.rstrip().endswith("done")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


@pytest.mark.parametrize(
    "width,want",
    [
        (80, "step 90/12345 loss 2.3456  norm 0.83  41.2k tok/s  sol 38.1 %  eta 01:21:42"),
        (60, "step 90/12345 loss 2.3456  41.2k tok/s  eta 01:21:42"),
        (30, "step 90/12345 loss 2.3456"),
    ],
)
def test_a_narrow_terminal_shows_whole_numbers(tmp_path, width, want):
    """Those wanted most, and no bar."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with Reporter(tmp_path / "log.jsonl", total_steps=12345, console=console) as reporter:
        reporter.start([], config={}, versions={}, device="cpu")
        reporter.step(step(90))
    assert "…" not in out.getvalue()
    line = out.getvalue().replace("\r", "\n").split("step 90")[1].partition("\x1b")[0]
    assert f"step 90{line}".rstrip() == want


def test_log_records(tmp_path):
    console, _ = plain_console()
    path = tmp_path / "deep" / "log.jsonl"
    with Reporter(path, total_steps=2, console=console) as reporter:
        reporter.start(["x"], config={"model": "tiny"}, versions={"surogate": "1"}, device="cpu")
        reporter.step(step(1, loss=float("nan")))
        reporter.evaluation(evaluation(1))
        reporter.message("hello")
        # Each line is on the disk as soon as it is written.
        records = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        assert datetime.fromisoformat(record.pop("time")).utcoffset() is not None
    assert records == [
        {
            "log": "run",
            "config": {"model": "tiny"},
            "versions": {"surogate": "1"},
            "device": "cpu",
            "total_steps": 2,
        },
        {
            "log": "step",
            "step": 1,
            "epoch": 0.5,
            "tokens": 16384,
            "duration_ms": 400.0,
            "loss": None,
            "norm": 0.834,
            "lr": 2e-4,
            "tokens_per_second": 41234.0,
            "sol": 38.14,
            "memory": None,
        },
        {
            "log": "eval",
            "step": 1,
            "epoch": 0.5,
            "tokens": 1000,
            "loss": 2.5,
            "recipe": "bf16",
            "duration_ms": 1250.0,
            "sources": {},
        },
        {"log": "message", "step": 1, "text": "hello"},
    ]


def test_resumed_log_has_each_step_once(tmp_path):
    path = tmp_path / "log.jsonl"
    record_steps(path, range(1, 9))
    with path.open("ab") as file:
        file.write(b'{"log":"step","st')  # a crash in the middle of a line
    record_steps(path, range(6, 11), resumed_step=5)
    assert steps_of(path) == list(range(1, 11))
    assert steps_of(path, "eval") == [2, 4, 6, 8, 10]
    assert steps_of(path, "message") == list(range(1, 11))
    assert [record["log"] for record in read_log(path)].count("run") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]


def test_new_run_starts_a_new_log(tmp_path):
    path = tmp_path / "log.jsonl"
    record_steps(path, range(1, 9))
    record_steps(path, range(1, 3))
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize("resumed_step", [0, 5])
def test_a_link_stays_a_link(tmp_path, resumed_step):
    target, path = tmp_path / "elsewhere.jsonl", tmp_path / "log.jsonl"
    record_steps(target, range(1, 9))
    path.symlink_to(target)
    record_steps(path, range(resumed_step + 1, 8), resumed_step=resumed_step)
    assert path.is_symlink() and steps_of(target) == list(range(1, 8))


@pytest.mark.parametrize("resumed_step", [0, 5])
def test_a_pipe_stays_a_pipe(tmp_path, resumed_step):
    """It stands for /dev/null, which a test must not risk."""
    path = tmp_path / "log.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        record_steps(path, range(6, 8), resumed_step=resumed_step)
        sent = [orjson.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
    finally:
        os.close(reader)
    assert [record["step"] for record in sent if record["log"] == "step"] == [6, 7]
    assert path.is_fifo() and read_log(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]


def test_resumption_without_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    record_steps(path, range(6, 8), resumed_step=5)
    assert steps_of(path) == [6, 7]


def test_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/log.jsonl: cannot be written: .*; free the disk or"):
        Reporter(tmp_path / "file" / "log.jsonl", total_steps=1)


def test_full_disk(tmp_path):
    console, _ = plain_console()
    reporter = Reporter(tmp_path / "log.jsonl", total_steps=1, console=console)
    with open("/dev/full", "ab", buffering=0) as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter._log, "_file", full)
        with pytest.raises(UserError, match="cannot be written: No space left on device; free"):
            reporter.message("x")
    reporter.close()


def test_record_after_the_end_is_a_bug(tmp_path):
    console, _ = plain_console()
    reporter = Reporter(tmp_path / "log.jsonl", total_steps=1, console=console)
    reporter.finish()
    reporter.close()
    with pytest.raises(ValueError, match="after the log was closed"):
        reporter.step(step(1))


def test_sources_and_samples(tmp_path):
    console, out = plain_console()
    parts = {"a.jsonl": SourceLoss(tokens=600, loss=2.0), "b": SourceLoss(tokens=400, loss=3.25)}
    with Reporter(tmp_path / "log.jsonl", total_steps=9, console=console) as reporter:
        reporter.evaluation(msgspec.structs.replace(evaluation(3), sources=parts))
        reporter.sample(SampleRecord(step=3, prompt="Why?", text="Because\n[b]"))
    assert out.getvalue().splitlines() == [
        "eval    3/9  loss 2.5000  1000 tokens in 1.2 s",
        "     2.0000 of 600 tokens of a.jsonl",
        "     3.2500 of 400 tokens of b",
        "sample 'Why?': 'Because\\n[b]'",
    ]
    found, sample = read_log(tmp_path / "log.jsonl")
    assert found["sources"]["b"] == {"tokens": 400, "loss": 3.25}
    assert (sample["log"], sample["prompt"], sample["text"]) == ("sample", "Why?", "Because\n[b]")


@pytest.mark.parametrize(
    "error,status,text",
    [
        (None, "done", "written"),
        (UserError("x: do y"), "failed", "x: do y"),
        (MemoryError("no room"), "failed", "MemoryError('no room')"),
        (SystemExit(143), "stopped", "SystemExit(143)"),
    ],
)
def test_last_record_says_how_a_run_ended(tmp_path, error, status, text):
    console, _ = plain_console()
    with (
        contextlib.suppress(UserError, MemoryError, SystemExit),
        Reporter(tmp_path / "log.jsonl", total_steps=9, console=console) as reporter,
    ):
        reporter.step(step(4))
        if error is not None:
            raise error
        reporter.finish(["written"])
    last = read_log(tmp_path / "log.jsonl")[-1]
    assert (last["log"], last["step"], last["status"], last["text"]) == ("end", 4, status, text)


def test_names_of_numbers_for_trackers():
    assert step_scalars(step(1, memory=2**31)) == {
        "train/loss": 2.34561,
        "train/norm": 0.834,
        "train/lr": 2e-4,
        "train/epoch": 0.5,
        "train/tokens_per_second": 41234.0,
        "train/sol": 38.14,
        "train/memory_gib": 2.0,
    }
    assert not {"train/sol", "train/memory_gib"} & step_scalars(step(1, sol=None)).keys()
    parts = {"a": SourceLoss(tokens=600, loss=2.0)}
    assert eval_scalars(msgspec.structs.replace(evaluation(3), sources=parts)) == {
        "eval/loss": 2.5,
        "eval/loss/a": 2.0,
    }


def test_numbers_for_people():
    assert [compact(x) for x in (3.4, 412.0, 41_234.0, 3.4e6)] == ["3", "412", "41.2k", "3.4M"]
    assert [duration(x) for x in (0.0, 725.0, 86_399.4, 183_600.0)] == [
        "00:00:00",
        "00:12:05",
        "23:59:59",
        "2d 03:00:00",
    ]


def test_smooth():
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    np.testing.assert_allclose(smooth(values, window=3), [1.5, 1.5, 3.0, 4.5, 4.5])
    np.testing.assert_allclose(smooth(np.array([7.0]), window=21), [7.0])
    gap = smooth(np.full(5, np.nan), window=3)
    assert np.isnan(gap).all()


def test_curves_of_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    record_steps(path, range(1, 5))
    data = curves(read_log(path))
    assert data.step.tolist() == [1, 2, 3, 4]
    assert data.eval_step.tolist() == [2, 4]
    assert data.eval_loss.tolist() == [2.5, 2.5]
    assert set(data.lr) == {2e-4}


@pytest.mark.parametrize("steps", [1, 2, 24, 25, 300])  # a dot, few, the last few, a mean, many
def test_plot(tmp_path, steps):
    path, png = tmp_path / "log.jsonl", tmp_path / "training_plot.png"
    record_steps(path, range(1, steps + 1))
    write_plot(path, png, title="100 $ for $ and _^{")
    image = imread(png)
    assert image.shape[0] > 500 and image.shape[1] > 800
    assert image[..., :3].std() > 0.02  # not one colour
    assert {entry.name for entry in tmp_path.iterdir()} == {"log.jsonl", "training_plot.png"}


def test_plot_of_losses_that_are_not_finite(tmp_path):
    console, _ = plain_console()
    with Reporter(tmp_path / "log.jsonl", total_steps=30, console=console) as reporter:
        for number in range(1, 31):
            reporter.step(step(number, loss=float("nan"), lr=0.0))
    write_plot(tmp_path / "log.jsonl", tmp_path / "plot.png", title="nothing to see")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_plot_without_a_step(tmp_path):
    record_steps(tmp_path / "log.jsonl", range(0))
    write_plot(tmp_path / "log.jsonl", tmp_path / "plot.png", title="empty")
    assert not (tmp_path / "plot.png").exists()


def test_plot_that_cannot_be_written(tmp_path):
    record_steps(tmp_path / "log.jsonl", range(1, 3))
    with pytest.raises(UserError, match="none/plot.png: cannot be written: No such file or"):
        write_plot(tmp_path / "log.jsonl", tmp_path / "none" / "plot.png", title="x")
