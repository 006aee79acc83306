"""A training run: from a configuration to a model directory or an adapter.

The state of a run is the step number, the trained weights and the optimizer's state: the order of rows,
the learning rate and every random number are functions of the step and the seeds. So a run that was
stopped anywhere goes on from its newest checkpoint with the same bits.
"""

import contextlib
import importlib.metadata
import math
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from surogate import __version__
from surogate import checkpoint as checkpoints
from surogate.choices import optimizer_of, options_of
from surogate.config import Config, config_to_dict, ignored
from surogate.data.loader import EvalLoader, Loader, Prefetch
from surogate.device import Device, choose_device
from surogate.errors import UserError
from surogate.light import Light
from surogate.models.blocks import Settings
from surogate.optim.schedule import Schedule
from surogate.optim.state import named_leaves, state_from_named, state_to_named
from surogate.report import EvalRecord, Reporter, StepRecord
from surogate.settings import BOOKKEEPING
from surogate.setup import Sources, export, load_rows, load_sources
from surogate.step import Pending, TrainStep

UNUSABLE_LIMIT = 20  # updates in a row with a gradient that is not finite


def train(config: Config) -> None:
    """Trains as the configuration says. Raises UserError for whatever the user can put right.

    SIGINT or SIGTERM ends the run after the step at hand, with a checkpoint; a second one at once.
    """
    device = choose_device(config.device)
    with stream_of(device), Stop() as stop:
        Run(config, device, stop).go()


def tokenize(config: Config) -> None:
    """Prepares the rows of a run and prints what they hold."""
    for line in load_rows(config).facts():
        print(line)


class Launched(NamedTuple):
    """An update that was started, and what to report of it."""

    step: int
    lr: float
    cells: int  # keys that all its tokens attend to
    pending: Pending


class Run:
    """One run from start to end; ``go`` is the whole of it."""

    def __init__(self, config: Config, device: Device, stop: "Stop") -> None:
        self.config, self.device, self.stop = config, device, stop
        self.directory = Path(config.output_dir)
        self.rows = load_rows(config)
        self.loader = Loader(
            self.rows.train,
            rows_per_batch=config.per_device_train_batch_size,
            seed=config.train_seed,
            accumulation=config.gradient_accumulation_steps,
        )
        self.total = total_steps(config, self.loader.batches_per_epoch)
        self.schedule = schedule(config, self.total)
        resumed = checkpoints.newest(self.directory) if config.resume_from_checkpoint else None
        saved = checkpoints.load(resumed) if resumed else None
        self._check_same_run(resumed, saved)
        self.sources = load_sources(config, device)
        self.step = train_step(config, device, self.sources)
        self.done = 0
        if saved is not None:
            restore(self.step, saved)
            self.done = saved.step
        self.light = Light(device, self.sources.model_config, config)
        self.unusable = 0

    def go(self) -> None:
        """Trains, evaluates, saves, exports."""
        config = self.config
        log = Path(config.log_file) if config.log_file else self.directory / "log.jsonl"
        with Reporter(
            log,
            total_steps=self.total,
            resumed_step=self.done,
            logging_steps=config.logging_steps,
        ) as reporter:
            self.reporter = reporter
            reporter.start(
                self._facts(),
                config=config_to_dict(config),
                versions=versions(),
                device=self.device.name,
            )
            self._train()
            if self.stop.asked:
                reporter.finish(
                    [f"stopped by {self.stop.asked} after step {self.done}: run again to go on"]
                )
                plot(log, self.directory, config.run_name)
                raise SystemExit(self.stop.status)
            written = export(config, self.sources, self.step, self.directory)
            plot(log, self.directory, config.run_name)
            reporter.finish([*written, f"done: {self.total} steps, {self.directory}"])

    def _train(self) -> None:
        config, accumulation = self.config, self.config.gradient_accumulation_steps
        pending: Launched | None = None
        self._last = time.perf_counter()
        evaluated = saved = self.done
        with Prefetch(self.loader, self.done * accumulation) as batches:
            while self.done < self.total and not self.stop.asked:
                cells = 0
                for _ in range(accumulation):
                    batch = next(batches)
                    cells += int(batch.positions.sum()) + len(batch.positions)
                    self.step.micro(batch)
                lr = self.schedule.at(self.done + 1)
                launched = Launched(self.done + 1, lr, cells, self.step.update(lr))
                if pending is not None:
                    self._report(pending)
                pending = launched
                self.done += 1
                at_end = self.done == self.total or bool(self.stop.asked)
                due_eval = self.done % config.eval_steps == 0 or self.done == self.total
                due_save = self.done % config.save_steps == 0 or at_end
                if due_eval or due_save:
                    self._report(pending)
                    pending = None
                if due_eval:
                    self._evaluate()
                    evaluated = self.done
                if due_save:
                    self._save()
                    saved = self.done
        if pending is not None:
            self._report(pending)
        if saved != self.done:
            self._save()
        if self.done == self.total and evaluated != self.done:
            self._evaluate()

    def _report(self, launched: "Launched") -> None:
        result, number = launched.pending.result(), launched.step
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        tokens = self.step.options.tokens * self.config.gradient_accumulation_steps
        if not result.applied:
            self.unusable += 1
            what = "no supervised token" if result.count == 0 else "a gradient that is not finite"
            self.reporter.message(f"step {number}: {what}: the update was left out")
            if self.unusable >= UNUSABLE_LIMIT:
                raise UserError(
                    f"step {number}: {UNUSABLE_LIMIT} updates in a row could not be used; "
                    "lower learning_rate, or look at the data; earlier checkpoints are whole"
                )
        else:
            self.unusable = 0
        self.reporter.step(
            StepRecord(
                step=number,
                epoch=number * self.config.gradient_accumulation_steps / self.loader.batches_per_epoch,
                tokens=tokens,
                duration_ms=seconds * 1e3,
                loss=result.loss,
                norm=result.norm,
                lr=launched.lr,
                tokens_per_second=tokens / seconds,
                sol=self.light.share(tokens=tokens, cells=launched.cells, seconds=seconds),
            )
        )

    def _evaluate(self) -> None:
        if self.rows.evaluation is None:
            return
        begin, nll, count = time.perf_counter(), 0.0, 0
        loader = EvalLoader(
            self.rows.evaluation, rows_per_batch=self.config.per_device_train_batch_size
        )
        for index in range(loader.batches):
            part, tokens = self.step.evaluate(loader.batch(index))
            nll, count = nll + part, count + tokens
        seconds = time.perf_counter() - begin
        self.reporter.evaluation(
            EvalRecord(
                step=self.done,
                epoch=self.done
                * self.config.gradient_accumulation_steps
                / self.loader.batches_per_epoch,
                tokens=count,
                loss=nll / count,
                duration_ms=seconds * 1e3,
            )
        )
        self._last = time.perf_counter()

    def _save(self) -> None:
        host = dict(named_leaves(self.step.trainable))
        state = state_to_named(self.step.state)
        checkpoints.save(
            self.directory,
            checkpoints.Checkpoint(
                self.done, _on_host(host), _on_host(state), _deciding(self.config)
            ),
            keep=self.config.save_total_limit,
        )
        self._last = time.perf_counter()

    def _check_same_run(self, path: Path | None, saved: checkpoints.Checkpoint | None) -> None:
        if saved is None:
            return
        changed = checkpoints.changes(saved.settings, _deciding(self.config))
        if changed:
            raise UserError(
                f"{path}: was made with other settings ({'; '.join(changed)}); use those, another "
                "output_dir, or resume_from_checkpoint = false"
            )
        if saved.step > self.total:
            raise UserError(f"{path}: is at step {saved.step} of a run of {self.total} steps")

    def _facts(self) -> list[str]:
        config = self.config
        rows = config.per_device_train_batch_size
        facts = [
            f"surogate {__version__} on {self.device.name}",
            *self.sources.facts(),
            *self.rows.facts(),
            f"{self.total} steps of {rows} x {config.gradient_accumulation_steps} rows of "
            f"{config.sequence_len} tokens",
            self.light.fact(),
            *ignored(config),
        ]
        if self.done:
            facts.append(f"resumed after step {self.done}")
        return facts


def total_steps(config: Config, batches_per_epoch: int) -> int:
    """Updates of a run: max_steps, or what num_epochs gives."""
    if config.max_steps > 0:
        return config.max_steps
    return max(1, config.num_epochs * batches_per_epoch // config.gradient_accumulation_steps)


def schedule(config: Config, total: int) -> Schedule:
    """The learning rate of each step."""
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
    try:
        return Schedule(
            config.learning_rate,
            total,
            config.lr_scheduler_type,
            warmup_steps=warmup,
            cooldown_steps=config.cooldown_steps,
            final_fraction=config.final_lr_fraction,
            wsd_decay_fraction=config.wsd_decay_steps_fraction,
        )
    except ValueError as error:
        raise UserError(f"learning rate schedule: {error}") from None


def train_step(config: Config, device: Device, sources: Sources) -> TrainStep:
    """The arrays and functions of a run's step."""
    options = options_of(config, device.kind, device.compute)
    settings = Settings(sources.model_config, sources.lora)
    optimizer = optimizer_of(config)
    return TrainStep(device, sources.model, sources.adapter, settings, optimizer, options)


def restore(step: TrainStep, saved: checkpoints.Checkpoint) -> None:
    """Writes a checkpoint's weights and optimizer state into a step's arrays."""
    wanted = dict(named_leaves(step.trainable))
    if wanted.keys() != saved.trained.keys():
        raise UserError("the checkpoint holds other weights than this configuration trains")
    for name, array in wanted.items():
        array[...] = step.device.put(saved.trained[name])
    state = state_from_named(saved.optimizer, step.trainable, step.optimizer)
    for name, array in state_to_named(step.state).items():
        if name != "step":
            array[...] = state_to_named(state)[name]
    step.state = step.state._replace(step=state.step)


def _deciding(config: Config) -> dict[str, Any]:
    """The settings that decide what is computed."""
    return {k: v for k, v in config_to_dict(config).items() if k not in BOOKKEEPING}


def _on_host(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {k: v if isinstance(v, np.ndarray) else v.get() for k, v in arrays.items()}


def plot(log: Path, directory: Path, title: str) -> None:
    """Draws training_plot.png from the log."""
    from surogate.plot import write_plot

    write_plot(log, directory / "training_plot.png", title=title)


def versions() -> dict[str, str]:
    """Of everything that decides bits."""
    found = {"surogate": __version__, "python": platform.python_version()}
    for name in ("numpy", "tokenizers", "cupy-cuda13x", "cupy-cuda12x", "nvmath-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def stream_of(device: Device) -> Iterator[None]:
    """Work goes to a stream of its own on a card: the null stream cannot be captured."""
    if device.kind == "cpu":
        yield
        return
    with device.library.cuda.Stream(non_blocking=True):
        yield


class Stop:
    """Remembers SIGINT and SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked, self.status = "", 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        with contextlib.suppress(ValueError):  # not in the main thread: signals are not ours
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise SystemExit(128 + number)
        self.asked, self.status = signal.Signals(number).name, 128 + number
