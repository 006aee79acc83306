"""A training run: from a configuration to a model directory or an adapter.

The state of a run is the step number, the trained weights and the optimizer's state: the order of
rows, the learning rate and every random number are functions of the step and the seeds. So a run
that was stopped anywhere goes on from its newest checkpoint with the same bits.

SIGINT and SIGTERM end a run after the step at hand, with a checkpoint and exit status 128 + the
signal's number; before the first step and after the last they end it at once.
"""

import contextlib
import importlib.metadata
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
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
from surogate.optim.state import STEP, named_leaves, state_to_named
from surogate.report import EvalRecord, Reporter, StepRecord, read_log
from surogate.settings import BOOKKEEPING
from surogate.setup import Sources, claimed, export, load_rows, load_sources, locate
from surogate.step import Pending, TrainStep
from surogate.stop import Stop

UNUSABLE_LIMIT = 20  # updates in a row with a gradient that is not finite


def train(config: Config) -> None:
    """Trains as the configuration says. Raises UserError for whatever the user can put right."""
    device = choose_device(config.device)
    with claimed(Path(config.output_dir)), stream_of(device), Stop() as stop:
        Run(config, device, stop).go()


def tokenize(config: Config) -> None:
    """Prepares the rows of a run and prints what they hold."""
    _say(*load_rows(config, *locate(config)).facts())


class Launched(NamedTuple):
    """An update that was started, and what to report of it."""

    step: int
    lr: float
    cells: int  # keys that all its tokens attend to
    pending: Pending


class Run:
    """One run from start to end: making it reads everything, ``go`` does the rest."""

    def __init__(self, config: Config, device: Device, stop: Stop) -> None:
        self.config, self.device, self.stop = config, device, stop
        self.directory = Path(config.output_dir)
        self.log = Path(config.log_file) if config.log_file else self.directory / "log.jsonl"
        _say(f"surogate {__version__} on {device.fact()}", *ignored(config))
        saved = self._checkpoint()
        directory, model_config = locate(config)
        self.rows = load_rows(config, directory, model_config)
        _say(*self.rows.facts())
        self.loader = Loader(
            self.rows.train,
            rows_per_batch=config.per_device_train_batch_size,
            seed=config.train_seed,
            accumulation=config.gradient_accumulation_steps,
        )
        self.total = total_steps(config, self.loader.batches_per_epoch)
        self.schedule = schedule(config, self.total)
        self.sources = load_sources(config, directory, model_config, device)
        _say(*self.sources.facts())
        self.fingerprints = {"training rows": self.rows.fingerprint, **self.sources.fingerprints()}
        self.step = train_step(config, device, self.sources)
        self.done = self.evaluated = 0
        self.resumed = saved is not None
        if saved is not None:
            self._resume(saved)
        self.light = Light(device, model_config, config)
        self.unusable = 0

    def go(self) -> None:
        """Trains, evaluates, saves, exports."""
        config = self.config
        with Reporter(
            self.log,
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
            with self.stop.deferred():
                self._train()
            if self.stop.asked:
                again = "run again to go on"
                reporter.finish([f"stopped by {self.stop.asked} after step {self.done}: {again}"])
                plot(self.log, self.directory, config.run_name)
                raise SystemExit(self.stop.status)
            written = export(config, self.sources, self.rows, self.step, self.directory)
            plot(self.log, self.directory, config.run_name)
            reporter.finish([*written, f"done: {self.total} steps"])

    def _train(self) -> None:
        """Steps until the last or until asked to stop. A step is reported, saved, then
        evaluated.
        """
        config = self.config
        saved, pending = self.done, None
        self._last = time.perf_counter()
        if self.done and self.done % config.eval_steps == 0:
            self._evaluate()
        with Prefetch(self.loader, self.done * config.gradient_accumulation_steps) as batches:
            while self.done < self.total and not self.stop.asked:
                launched = self._launch(batches)
                if pending is not None:
                    self._report(pending)
                pending = launched
                self.done += 1
                due_save = self.done % config.save_steps == 0
                due_evaluation = self.done % config.eval_steps == 0
                # A card computes this step while the host reports the one before it.
                if self.device.kind == "cpu" or due_save or due_evaluation:
                    self._report(pending)
                    pending = None
                if due_save:
                    self._save()
                    saved = self.done
                if due_evaluation:
                    self._evaluate()
        if pending is not None:
            self._report(pending)
        if saved != self.done:
            self._save()
        if self.done == self.total:
            self._evaluate()

    def _launch(self, batches: Prefetch) -> Launched:
        """Starts the next update."""
        cells = 0
        for _ in range(self.config.gradient_accumulation_steps):
            batch = next(batches)
            cells += int(batch.positions.sum(dtype=np.int64)) + len(batch.positions)
            self.step.micro(batch)
        lr = self.schedule.at(self.done + 1)
        return Launched(self.done + 1, lr, cells, self.step.update(lr))

    def _report(self, launched: Launched) -> None:
        result, number = launched.pending.result(), launched.step
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        tokens = self.step.options.tokens * self.config.gradient_accumulation_steps
        if not result.applied:
            self._note_unusable(number, result.count)
        else:
            self.unusable = 0
        self.reporter.step(
            StepRecord(
                step=number,
                epoch=self._epoch(number),
                tokens=tokens,
                duration_ms=seconds * 1e3,
                loss=result.loss,
                norm=result.norm,
                lr=launched.lr,
                tokens_per_second=tokens / seconds,
                sol=self.light.share(tokens=tokens, cells=launched.cells, seconds=seconds),
            )
        )
        if self.unusable >= UNUSABLE_LIMIT:
            raise UserError(
                f"step {number}: {UNUSABLE_LIMIT} updates in a row could not be used; "
                "lower learning_rate, or look at the data; earlier checkpoints are whole"
            )

    def _note_unusable(self, number: int, count: int) -> None:
        self.unusable += 1
        what = "no supervised token" if count == 0 else "a gradient that is not finite"
        self.reporter.message(f"step {number}: {what}: the update was left out")

    def _epoch(self, step: int) -> float:
        return step * self.config.gradient_accumulation_steps / self.loader.batches_per_epoch

    def _evaluate(self) -> None:
        """Reports the loss on the evaluation rows, once a step; gives up when asked to stop."""
        if self.rows.evaluation is None or self.evaluated == self.done:
            return
        begin, nll, count = time.perf_counter(), 0.0, 0
        loader = EvalLoader(
            self.rows.evaluation, rows_per_batch=self.config.per_device_train_batch_size
        )
        for index in range(loader.batches):
            if self.stop.asked:
                return
            part, tokens = self.step.evaluate(loader.batch(index))
            nll, count = nll + part, count + tokens
        self.evaluated = self.done
        self._last = time.perf_counter()
        self.reporter.evaluation(
            EvalRecord(
                step=self.done,
                epoch=self._epoch(self.done),
                tokens=count,
                loss=nll / count if count else math.nan,
                duration_ms=(self._last - begin) * 1e3,
            )
        )

    def _save(self) -> None:
        if not self.resumed:  # a run that starts anew replaces what an earlier one left
            checkpoints.discard(self.directory)
            self.resumed = True
        checkpoints.save(
            self.directory,
            checkpoints.Checkpoint(
                self.done,
                dict(named_leaves(self.step.trainable)),
                state_to_named(self.step.state),
                _deciding(self.config),
                self.fingerprints,
            ),
            keep=self.config.save_total_limit,
        )
        self._last = time.perf_counter()

    def _checkpoint(self) -> checkpoints.Saved | None:
        """The checkpoint to go on from, of the same settings; None to start anew."""
        path = checkpoints.newest(self.directory)
        if path is None or not self.config.resume_from_checkpoint:
            return None
        saved = checkpoints.load(path)
        _refuse(saved, checkpoints.changes(saved.settings, _deciding(self.config)))
        return saved

    def _resume(self, saved: checkpoints.Saved) -> None:
        """Takes the weights and the optimizer's state over from a checkpoint."""
        _refuse(saved, checkpoints.changes(saved.sources, self.fingerprints))
        step = self.step
        state = state_to_named(step.state)
        for file, arrays in (
            (checkpoints.TRAINED, dict(named_leaves(step.trainable))),
            (checkpoints.OPTIMIZER, state),
        ):
            checkpoints.fill_(saved.path / file, arrays, put=self.device.put)
        step.state = step.state._replace(step=int(state[STEP]))
        step.refresh()
        self.done = saved.step
        if self.log.exists():
            logged = [r["step"] for r in read_log(self.log) if r["log"] == "eval"]
            self.evaluated = self.done if self.done in logged else 0

    def _facts(self) -> list[str]:
        config = self.config
        rows, pieces = config.per_device_train_batch_size, config.gradient_accumulation_steps
        facts = [
            f"{self.total} steps of {rows} x {pieces} rows of {config.sequence_len} tokens "
            f"({self._epoch(self.total):.2f} epochs), to {self.directory}",
            self.light.fact(),
        ]
        return [*facts, f"resumed after step {self.done}"] if self.done else facts


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def _refuse(saved: checkpoints.Saved, changed: list[str]) -> None:
    if changed:
        raise UserError(
            f"{saved.path}: was made with other settings ({'; '.join(changed)}); use those, "
            "another output_dir, or resume_from_checkpoint = false to start anew"
        )


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


def _deciding(config: Config) -> dict[str, Any]:
    """The settings that decide what is computed."""
    return {k: v for k, v in config_to_dict(config).items() if k not in BOOKKEEPING}


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
