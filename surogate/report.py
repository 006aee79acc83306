"""What a run tells: progress on the console and log.jsonl, one JSON object a line.

Every record has `log` (its kind) and `time` (UTC). The kinds:

    run      config, versions, device, total_steps: one for each start or resumption
    step     step, epoch, tokens, duration_ms, loss, norm, lr, tokens_per_second, sol, memory
    eval     step, epoch, tokens, loss, recipe, duration_ms, sources
    sample   step, prompt, text
    message  step, text
    end      step, status (done, stopped or failed), text

A number that is not finite is null. Each line is flushed as it is written. A resumed run first
drops what was recorded after the step that it resumes from, so that no step appears twice.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from surogate.errors import UserError
from surogate.trackers import Trackers

# Steps that the speed of the console's ETA is taken over.
_RECENT = 50
_BAR, _WIDE = 20, 116  # columns of the bar, and of a terminal that has room for it


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One update. `loss` is nats per supervised token, `norm` the gradient's before clipping,
    `tokens` those of this update, `sol` the percentage of the speed of light, None if unknown,
    `memory` the bytes in use: of the card, or of this process on the CPU."""

    step: int
    epoch: float
    tokens: int
    duration_ms: float
    loss: float
    norm: float
    lr: float
    tokens_per_second: float
    sol: float | None = None
    memory: int | None = None


class SourceLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an evaluation that one source of rows has."""

    tokens: int
    loss: float


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the evaluation rows. `loss` is nats per supervised token, `recipe` that of the
    products; `sources` has the loss of each source of rows where there are several."""

    step: int
    epoch: float
    tokens: int
    loss: float
    recipe: str
    duration_ms: float
    sources: dict[str, SourceLoss] = {}


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the model wrote after a prompt."""

    step: int
    prompt: str
    text: str


class Reporter:
    """Progress and the log of one run. Use it in a `with`: leaving closes the bar and the log.

    `resumed_step` is the last step that the checkpoint holds, 0 for a new run, which starts a new
    log. On a terminal there is one bar; elsewhere one line each `logging_steps` updates. The log
    and the trackers have every update. A log that cannot be written is a UserError; a tracker that
    fails is a message.
    """

    def __init__(
        self,
        log_path: str | Path,
        *,
        total_steps: int,
        resumed_step: int = 0,
        logging_steps: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        trackers: Trackers | None = None,
    ) -> None:
        self.total_steps = total_steps
        self._trackers = trackers or Trackers({})
        self._logging_steps = logging_steps
        self._step = resumed_step
        self._console = console or Console()
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_RECENT + 1)
        self._log = _Log(Path(log_path), resumed_step)
        self._progress = self._bar() if self._console.is_terminal else None

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self._log.closed:
            status = "stopped" if isinstance(error, SystemExit) else "failed"
            with contextlib.suppress(UserError):  # the error on its way says more
                self._end(status, str(error) if isinstance(error, UserError) else repr(error))
        self.close()

    def start(
        self,
        facts: Sequence[str],
        *,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        device: str,
    ) -> None:
        """Prints the facts, one a line, and records what runs where."""
        for fact in facts:
            self._print(fact)
        facts_of_run = {"config": config, "versions": versions, "device": device}
        self._log.write("run", facts_of_run | {"total_steps": self.total_steps})
        if self._progress:
            self._progress.start()

    def step(self, record: StepRecord) -> None:
        """Reports an update."""
        self._step = record.step
        self._ends.append(self._clock())
        self._log.write("step", msgspec.structs.asdict(record))
        self._trackers.scalars(record.step, step_scalars(record))
        self._note_faults()
        numbers = step_numbers(record, self._eta(record), room=self._room())
        if self._progress:
            self._progress.update(self._progress.task_ids[0], completed=record.step, text=numbers)
            self._progress.refresh()
        elif record.step % self._logging_steps == 0 or record.step == self.total_steps:
            self._print(f"step {self._of_total(record.step)}  {numbers}")

    def evaluation(self, record: EvalRecord) -> None:
        """Reports an evaluation."""
        self._log.write("eval", msgspec.to_builtins(record))
        self._trackers.scalars(record.step, eval_scalars(record))
        seconds = record.duration_ms / 1000
        self._print(
            f"eval {self._of_total(record.step)}  loss {record.loss:.4f}"
            f"  {record.tokens} tokens in {seconds:.1f} s"
            + (f", {record.recipe} products" if record.recipe != "bf16" else "")
        )
        for name, part in record.sources.items():
            self._print(f"     {part.loss:.4f} of {part.tokens} tokens of {name}")

    def sample(self, record: SampleRecord) -> None:
        """Reports what the model wrote after a prompt."""
        self._log.write("sample", msgspec.structs.asdict(record))
        self._trackers.text(record.step, f"sample/{record.prompt[:40]}", record.text)
        self._print(f"sample {record.prompt!r}: {record.text!r}")

    def message(self, text: str) -> None:
        """Prints a line and records it at the current step."""
        self._print(text)
        self._log.write("message", {"step": self._step, "text": text})

    def finish(self, lines: Sequence[str] = (), *, status: str = "done") -> None:
        """Takes the bar down, reports the lines, the last of them as the run's end, and closes."""
        if self._progress:
            self._progress.stop()
        for line in lines:
            self.message(line)
        self._trackers.close()
        self._note_faults()
        self._end(status, lines[-1] if lines else "")
        self.close()

    def close(self) -> None:
        """Takes the bar down and closes the log and the trackers. A second call does nothing."""
        if self._progress:
            self._progress.stop()
        self._trackers.close()
        self._log.close()

    def _end(self, status: str, text: str) -> None:
        self._log.write("end", {"step": self._step, "status": status, "text": text})

    def _note_faults(self) -> None:
        for fault in self._trackers.new_faults():
            self.message(fault)

    def _bar(self) -> Progress:
        # No refresh thread: the bar moves when a step ends.
        bar = [BarColumn(bar_width=_BAR)] if self._console.width >= _WIDE else []
        progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            *bar,
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            auto_refresh=False,
        )
        progress.add_task("", total=self.total_steps, completed=self._step, text="")
        return progress

    def _room(self) -> int | None:
        """Columns of the terminal beside the bar; None where lines may be of any length."""
        if self._progress is None:
            return None
        bar = _BAR + 1 if len(self._progress.columns) > 2 else 0
        return self._console.width - len(f"step {self.total_steps}/{self.total_steps} ") - bar - 1

    def _print(self, line: str) -> None:
        if self._progress:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._console.out(line, highlight=False)

    def _of_total(self, step: int) -> str:
        return f"{step:>{max(4, len(str(self.total_steps)))}}/{self.total_steps}"

    def _eta(self, record: StepRecord) -> float:
        """Seconds to go at the pace of recent steps, with the evaluations between them."""
        pace = record.duration_ms / 1000
        if len(self._ends) > 1:
            pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self.total_steps - record.step)


class _Log:
    """log.jsonl, open for writing. The path may be of a link, a device or a pipe and stays one."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resumed_step and path.is_file():
                _drop_after(path.resolve(), resumed_step)
            self._file: BinaryIO | None = path.open("ab" if resumed_step else "wb")
        except OSError as e:
            raise self._error(e) from None

    @property
    def closed(self) -> bool:
        """Whether no more can be written."""
        return self._file is None

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        if self._file is None:
            raise ValueError(f"Reporter: a {kind} record came after the log was closed")
        try:
            self._file.write(orjson.dumps({"log": kind, "time": now, **fields}) + b"\n")
            self._file.flush()
        except OSError as e:
            raise self._error(e) from None

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as e:
            raise self._error(e) from None

    def _error(self, error: OSError) -> UserError:
        return UserError(
            f"{self._path}: cannot be written: {error.strerror}; "
            "free the disk or set another output_dir or log_file"
        )


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log; none of a device or a pipe. A line cut short by a crash is left out."""
    if Path(path).exists() and not Path(path).is_file():
        return []
    records = []
    for line in Path(path).read_bytes().splitlines():
        try:
            records.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return records


def _drop_after(path: Path, step: int) -> None:
    kept = [record for record in read_log(path) if record.get("step", 0) <= step]
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in kept))
    os.replace(scratch, path)


def step_scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of an update under the names that trackers show."""
    found = {
        "train/loss": record.loss,
        "train/norm": record.norm,
        "train/lr": record.lr,
        "train/epoch": record.epoch,
        "train/tokens_per_second": record.tokens_per_second,
        "train/sol": record.sol,
        "train/memory_gib": None if record.memory is None else record.memory / 2**30,
    }
    return {name: value for name, value in found.items() if value is not None}


def eval_scalars(record: EvalRecord) -> dict[str, float]:
    """The losses of an evaluation under the names that trackers show."""
    found = {f"eval/loss/{name}": part.loss for name, part in record.sources.items()}
    return {"eval/loss": record.loss} | found


def step_numbers(record: StepRecord, eta: float, *, room: int | None = None) -> str:
    """The numbers of an update on one line; `eta` is in seconds. What is wanted least goes where
    there is no room for all.
    """
    parts = {
        "loss": f"loss {record.loss:.4f}",
        "norm": f"norm {record.norm:.2f}",
        "lr": f"lr {record.lr:.1e}",
        "speed": f"{compact(record.tokens_per_second)} tok/s",
    }
    if record.sol is not None:
        parts["sol"] = f"sol {record.sol:.1f} %"
    parts["eta"] = f"eta {duration(eta)}"
    for name in ("lr", "sol", "norm", "speed", "eta"):
        if room is None or len("  ".join(parts.values())) <= room:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def compact(number: float) -> str:
    """412, 41.2k, 3.4M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """00:12:05, or 2d 03:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hour:02}:{minute:02}:{second:02}"
