"""A training run: from a configuration to a model directory or an adapter.

The state of a run is the step number, the trained weights and the optimizer's state: the order of
rows, the learning rate and every random number are functions of the step and the seeds. So a run
that was stopped anywhere goes on from its newest checkpoint with the same bits.

SIGINT and SIGTERM end a run after the step at hand, with a checkpoint and exit status 128 + the
signal's number; before the first step and after the last they end it at once.
"""

import contextlib
import gc
import importlib.metadata
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from surogate import __version__, resume
from surogate import checkpoint as checkpoints
from surogate.card import card_of
from surogate.choices import after_recipe, optimizer_of, options_of
from surogate.config import Config, config_to_dict, ignored
from surogate.data.loader import Loader, Prefetch
from surogate.device import Device, choose_device
from surogate.errors import UserError
from surogate.evaluate import Evaluator, history, reads_history
from surogate.export import Export
from surogate.light import Light
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig
from surogate.models.recipe import Recipe
from surogate.optim.adamw import AdamWState
from surogate.optim.schedule import Schedule
from surogate.plan import in_words, place_of, settled
from surogate.report import Reporter, StepRecord
from surogate.saver import Saver
from surogate.setup import Sources, begin_at_error, claimed, load_rows, load_sources, locate
from surogate.step import Pending, StepResult, TrainStep
from surogate.stop import Stop
from surogate.trackers import open_trackers, require_trackers

BEST = "best"  # folder of the checkpoint of the lowest evaluation loss
ROWS_NAMED = 8  # of a step that was left out


def train(config: Config) -> None:
    """Trains as the configuration says. Raises UserError for whatever the user can put right."""
    device = choose_device(config.device)
    with claimed(Path(config.output_dir)), stream_of(device), Stop() as stop:
        Run(config, device, stop).go()


def tokenize(config: Config) -> None:
    """Prepares the rows of a run and prints what they hold."""
    _say(*load_rows(config, *locate(config)).facts())


def export_run(run: str, *, output: str | None, verify: bool, device: str | None) -> None:
    """surogate export: the result of a run as its newest checkpoint has it."""
    saved = checkpoints.newest_whole(Path(run), say=_say)
    if saved is None:
        raise UserError(f"{run}: has no checkpoint; give the output_dir of a run")
    config = msgspec.structs.replace(
        msgspec.convert(saved.settings, Config),
        output_dir=run,
        device=device or saved.settings["device"],
        resume_from_checkpoint=True,
        verify_export=verify,
        report_to=(),
    )
    where = choose_device(config.device)
    with claimed(Path(run)), stream_of(where), Stop() as stop:
        _say(*Run(config, where, stop).export(Path(output or run)))


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
        _say(f"surogate {__version__} on {device.fact()}", *ignored(config, device.kind))
        require_trackers(config)
        saved = resume.find(config, self.directory)
        directory, model_config = locate(config)
        config = self.config = decided(config, model_config, device)
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
        self.done = 0 if saved is None else saved.step
        now = self._now()
        self.sources = load_sources(now, directory, model_config, device)
        _say(*self.sources.facts())
        if config.lora_init == "error" and config.lora and saved is None:
            self.sources, line = begin_at_error(config, self.sources, self.loader, device)
            _say(line)
        self.fingerprints = {"training rows": self.rows.fingerprint, **self.sources.fingerprints()}
        self.step = train_step(now, device, self.sources)
        self.resumed = saved is not None
        if saved is not None:
            self._resume(saved)
        past = history(self.log, self.done, needed=reads_history(config))
        self.evaluator = Evaluator(config, self.rows.evaluation, self.sources, self.step, past)
        self.early = self.evaluator.over()
        self.evaluated = past[-1][0] if past else 0
        self.light = Light(device, model_config, now)
        self.unusable = self.left_out = 0  # updates: in a row at the end, in all
        self.tainted = False  # the last update's loss or gradient was not finite
        self.saver = Saver(device, background=config.async_save, say=_say)
        self._looked, self._used = -math.inf, 0

    def go(self) -> None:
        """Trains, evaluates, saves, exports."""
        config = self.config
        with Reporter(
            self.log,
            total_steps=self.total,
            resumed_step=self.done,
            logging_steps=config.logging_steps,
            trackers=open_trackers(config, self.directory, self.done),
        ) as reporter:
            self.reporter = reporter
            reporter.start(
                self._facts(),
                config=config_to_dict(config),
                versions=versions(),
                device=self.device.name,
            )
            with self.stop.deferred(), self.saver:
                self._train()
                self.saver.wait()  # here, where a second signal gives the write up
            if self.stop.asked:
                again = "run again to go on"
                text = f"stopped by {self.stop.asked} after step {self.done}: {again}"
                reporter.finish([text], status="stopped")
                plot(self.log, self.directory, config.run_name)
                raise SystemExit(self.stop.status)
            if self.early:
                reporter.message(f"stopping early after step {self.done}: {self.early}")
            if config.best_checkpoint == "export":
                self._take_best()
            written = self.export(self.directory)
            plot(self.log, self.directory, config.run_name)
            reporter.finish([*written, f"done: {self.done} steps{self._left_out()}"])

    def export(self, directory: Path) -> list[str]:
        """Writes the result of the run as it stands; returns lines that say what is where."""
        trained = self.sources.facts()[0]
        card = card_of(
            self.config, log=self.log, steps=self.done, trained=trained, device=self.device.name
        )
        return Export(self.config, self.sources, self.rows, self.step, card).write(directory)

    def _left_out(self) -> str:
        if not self.left_out:
            return ""
        return f", {self.left_out} of them left out: their loss or gradient could not be used"

    def _train(self) -> None:
        """Steps until the last or until asked to stop. A step is reported, saved, then
        evaluated.
        """
        config = self.config
        begun = saved = self.done
        pending = None
        self._last = time.perf_counter()
        if self.done and self.done % config.eval_steps == 0:
            self._evaluate()
        with Prefetch(self.loader, self.done * config.gradient_accumulation_steps) as batches:
            while self.done < self.total and not self.stop.asked and not self.early:
                self.saver.poll()
                launched = self._launch(batches)
                if pending is not None:
                    self._report(pending)
                pending = launched
                self.done += 1
                if self.done == begun + 1:
                    self.saver.prepare(resume.state_of(self.step, self.done, config, {}))
                due_save = self.done % config.save_steps == 0
                due_evaluation = self.done % config.eval_steps == 0
                recipe_ends = self.done == self._last_of_recipe() < self.total
                # A card computes this step while the host reports the one before it.
                if self.device.kind == "cpu" or due_save or due_evaluation or recipe_ends:
                    self._report(pending)
                    pending = None
                if recipe_ends:
                    self._leave_recipe()
                if due_save:
                    self._save(self.directory, keep=config.save_total_limit)
                    saved = self.done
                if due_evaluation:
                    self._evaluate()
        if pending is not None:
            self._report(pending)
        if saved != self.done:
            self._save(self.directory, keep=config.save_total_limit)
        if self.done == self.total:
            self._evaluate()

    def _last_of_recipe(self) -> int:
        """The last step whose products the recipe computes."""
        if after_recipe(self.config) is None:
            return self.total
        return math.ceil(self.config.recipe_until * self.total - 1e-9)

    def _now(self) -> Config:
        """The configuration of the next step."""
        later, last = after_recipe(self.config), self._last_of_recipe()
        return self.config if later is None or self.done < last or last == self.total else later

    def _leave_recipe(self) -> None:
        """Goes on with bf16 products: a step of its own over the same trained weights and the same
        state of the optimizer. Frozen weights that the recipe kept as codes alone are read again.
        """
        config, sources, device = self._now(), self.sources, self.device
        self.reporter.message(f"step {self.done}: products in bf16 from here on (recipe_until)")
        self.step.settle()
        state, adapter = self.step.state, self.step.adapter
        del self.step, self.sources
        self.evaluator.let_go()
        if config.lora:
            directory, model_config = sources.directory, sources.model_config
            del sources
            self._release()
            sources = load_sources(config, directory, model_config, device)
            sources = sources._replace(adapter=adapter)
        else:
            sources = sources._replace(recipe=Recipe())
            self._release()
        self.sources, self.step = sources, train_step(config, device, sources, state)
        self.fingerprints |= sources.fingerprints()
        self.evaluator.turn_to(self.sources, self.step)
        self.light = Light(device, sources.model_config, config)
        self._last = time.perf_counter()

    def _release(self) -> None:
        """Gives back what nothing holds any more."""
        self.device.synchronize()
        gc.collect()
        if self.device.kind == "cuda":
            self.device.library.get_default_memory_pool().free_all_blocks()

    def _launch(self, batches: Prefetch) -> Launched:
        """Starts the next update."""
        cells = 0
        for _ in range(self.config.gradient_accumulation_steps):
            batch = next(batches)
            cells += int(batch.positions.sum(dtype=np.int64)) + len(batch.positions)
            self.step.micro(batch)
        lr = self.schedule.at(self.done + 1)
        self.saver.before_update()
        return Launched(self.done + 1, lr, cells, self.step.update(lr))

    def _report(self, launched: Launched) -> None:
        result, number = launched.pending.result(), launched.step
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        tokens = self.step.options.tokens * self.config.gradient_accumulation_steps
        if not result.applied:
            self._note_unusable(number, result)
        else:
            self.unusable, self.tainted = 0, False
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
                memory=self._used_memory(now),
            )
        )
        if self.unusable >= self.config.max_skipped_steps:
            raise UserError(
                f"step {number}: {self.unusable} updates in a row could not be used; "
                "lower learning_rate, or look at the data; earlier checkpoints are whole"
            )

    def _used_memory(self, now: float) -> int:
        """Bytes in use, looked at once a second."""
        if now - self._looked >= 1:
            self._looked, self._used = now, self.device.used_memory()
        return self._used

    def _note_unusable(self, number: int, result: StepResult) -> None:
        self.unusable += 1
        self.left_out += 1
        self.tainted = result.count > 0
        what = "no supervised token"
        if result.count:
            part = "gradient" if math.isfinite(result.loss) else "loss"
            what = f"a {part} that is not finite"
        pieces = self.config.gradient_accumulation_steps
        first = (number - 1) * pieces
        rows = [int(r) for i in range(first, first + pieces) for r in self.loader.rows(i)]
        listed = ", ".join(map(str, rows[:ROWS_NAMED])) + (", ..." if rows[ROWS_NAMED:] else "")
        self.reporter.message(
            f"step {number}: {what}: the update was left out (packed rows {listed})"
        )

    def _epoch(self, step: int) -> float:
        return step * self.config.gradient_accumulation_steps / self.loader.batches_per_epoch

    def _evaluate(self) -> None:
        """Reports the loss on the evaluation rows and the samples, once a step; gives up when asked
        to stop.
        """
        if self.evaluated == self.done:
            return
        number, evaluator = self.done, self.evaluator
        record = evaluator.measure(number, self._epoch(number), lambda: self.stop.asked)
        if record is None and self.stop.asked:
            return
        if record is not None:
            if self.config.best_checkpoint != "none" and evaluator.is_best():
                self._save(self.directory / BEST, keep=1)
                self.saver.wait()  # before the log says that this one was the best
            self.reporter.evaluation(record)
        for sample in () if self.stop.asked else evaluator.samples(number):
            self.reporter.sample(sample)
        self.early = evaluator.over()
        self.evaluated = number
        self._last = time.perf_counter()

    def _save(self, directory: Path, *, keep: int) -> None:
        if not self.resumed:  # a run that starts anew replaces what an earlier one left
            checkpoints.discard(self.directory)
            checkpoints.discard(self.directory / BEST)
            self.resumed = True
        if self.tainted:
            self.reporter.message(
                f"step {self.done}: not saved: its loss or gradient is not finite; "
                "the checkpoint before stays the newest"
            )
            return
        sources = self.fingerprints | self._place(self.done)
        self.saver.save(
            directory, resume.state_of(self.step, self.done, self.config, sources), keep=keep
        )
        self._last = time.perf_counter()

    def _place(self, step: int) -> dict[str, Any]:
        """Where a run stands after a step, which follows from the step and the settings."""
        config = self.config
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        return {
            "rows so far": step * rows,
            "next learning rate": self.schedule.at(min(step + 1, self.total)),
        }

    def _resume(self, saved: checkpoints.Saved) -> None:
        """Goes on from a checkpoint."""
        now = self.fingerprints | self._place(saved.step)
        resume.refuse(saved, checkpoints.changes(saved.sources, now))
        resume.take_(self.step, saved)

    def _take_best(self) -> None:
        """Takes the state of the lowest evaluation loss over, for the export."""
        saved = checkpoints.newest_whole(self.directory / BEST, say=self.reporter.message)
        if saved is None:
            self.reporter.message("no evaluation loss was finite: the last weights are exported")
            return
        if saved.step != self.done:
            resume.take_(self.step, saved)
        self.reporter.message(f"the weights of step {saved.step}, the best, are exported")

    def _facts(self) -> list[str]:
        config = self.config
        rows, pieces = config.per_device_train_batch_size, config.gradient_accumulation_steps
        facts = [
            f"{self.total} steps of {rows} x {pieces} rows of {config.sequence_len} tokens "
            f"({self._epoch(self.total):.2f} epochs), to {self.directory}",
            self.light.fact(),
        ]
        if self.done < (last := self._last_of_recipe()) < self.total:
            facts.append(f"recipe = {config.recipe} until step {last}, then products in bf16")
        if not self.done:
            return facts
        place = self._place(self.done)
        return [
            *facts,
            f"resumed after step {self.done}: weights, optimizer ({self.step.state.step} updates), "
            f"epoch {self._epoch(self.done):.2f}, "
            f"next learning rate {place['next learning rate']:.3g}",
        ]


def decided(config: Config, model_config: ModelConfig, device: Device) -> Config:
    """The configuration with recompute = auto decided by the memory that is free, and said."""
    if config.recompute != "auto":
        return config
    free = place_of(config).free
    config = settled(config, model_config, device.kind, free)
    known = "" if free is None else f", the fastest that fits {in_words(free)}"
    _say(f"recompute = {config.recompute}{known}")
    return config


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


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


def train_step(
    config: Config, device: Device, sources: Sources, state: AdamWState | None = None
) -> TrainStep:
    """The arrays and functions of a run's step; ``state`` is that of a step before it."""
    options = options_of(config, device.kind, device.compute)
    settings = Settings(sources.model_config, sources.lora)
    optimizer = optimizer_of(config)
    return TrainStep(
        device,
        sources.model,
        sources.adapter,
        settings,
        optimizer,
        options,
        sources.recipe,
        say=_say,
        state=state,
    )


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
