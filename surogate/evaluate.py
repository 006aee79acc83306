"""Evaluation: the loss on rows that are not trained on, and what is made of it.

The loss is nats per supervised token, over all of them alike: sum over tokens / number of tokens,
in float64 on the host, so it does not depend on how many rows a batch holds. Each source of rows
has its own, and their sums make the whole. From the losses so far follow

    the best step    that of the lowest loss; its checkpoint may be kept and exported
    early stopping   when the loss has not been lower, by a threshold, for a number of evaluations

A loss that is not finite is never lower. The losses so far come from the log, so both survive an
interruption.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from surogate.api import LoadedModel, generate
from surogate.config import Config
from surogate.data.loader import EvalLoader
from surogate.data.packed import Packed
from surogate.errors import UserError
from surogate.kernels.batch import IGNORED
from surogate.report import EvalRecord, SampleRecord, SourceLoss, read_log
from surogate.setup import Sources
from surogate.step import TrainStep

Logprobs = Callable[..., Float32[np.ndarray, " tokens"]]


class Evaluation(NamedTuple):
    """Of each source: the sum of the negative log-likelihood (nats) and the supervised tokens."""

    names: tuple[str, ...]
    nll: Float64[np.ndarray, " sources"]
    tokens: Float64[np.ndarray, " sources"]

    @property
    def loss(self) -> float:
        """Nats per supervised token of all sources."""
        count = self.tokens.sum()
        return float(self.nll.sum() / count) if count else math.nan

    def by_source(self) -> dict[str, SourceLoss]:
        """The loss of each source that has tokens; empty when there is one source."""
        if len(self.names) == 1:
            return {}
        return {
            name: SourceLoss(tokens=int(tokens), loss=float(nll / tokens))
            for name, nll, tokens in zip(self.names, self.nll, self.tokens, strict=True)
            if tokens
        }


def evaluate(
    rows: Packed, logprobs: Logprobs, *, rows_per_batch: int, asked: Callable[[], object]
) -> Evaluation | None:
    """Evaluates every row once. ``logprobs`` gives each token of a batch the log-probability of its
    label. None when ``asked`` turns true between batches.
    """
    loader = EvalLoader(rows, rows_per_batch=rows_per_batch)
    nll, tokens = np.zeros((2, len(rows.names)))
    for index in range(loader.batches):
        if asked():
            return None
        batch = loader.batch(index)
        seen = batch.labels != IGNORED
        source = np.concatenate([rows.sources_of(row) for row in loader.rows(index).tolist()])
        source = source[seen[: len(source)]]  # rows that fill a batch up have no label
        values = logprobs(batch)[seen].astype(np.float64)
        nll -= np.bincount(source, values, len(nll))
        tokens += np.bincount(source, minlength=len(nll))
    return Evaluation(rows.names, nll, tokens)


def reads_history(config: Config) -> bool:
    """Whether anything of a run is decided by the evaluations before it."""
    return config.early_stop or config.best_checkpoint != "none"


def history(log: Path, step: int, *, needed: bool) -> list[tuple[int, float]]:
    """(step, loss) of the evaluations up to ``step``, which a run goes on from, 0 for a new one.

    Raises UserError when they are needed and the log is a device or a pipe, which keeps nothing.
    """
    if needed and log.exists() and not log.is_file():
        raise UserError(
            f"log_file = {log}: must be a file with early_stop or best_checkpoint: a run that goes "
            "on finds its earlier evaluations there"
        )
    if not step or not log.is_file():
        return []
    return [
        (record["step"], math.nan if record["loss"] is None else record["loss"])
        for record in read_log(log)
        if record["log"] == "eval" and record["step"] <= step
    ]


def lowest(history: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """(step, loss) of the lowest loss, the first of equal ones; None without a finite one."""
    finite = [entry for entry in history if math.isfinite(entry[1])]
    return min(finite, key=lambda entry: entry[1]) if finite else None


def stalled(losses: Sequence[float], *, patience: int, threshold: float) -> bool:
    """Whether the last ``patience`` losses are none of them below the lowest before it by more than
    ``threshold``.
    """
    best, since = math.inf, 0
    for loss in losses:
        if loss < best - threshold:
            best, since = loss, 0
        else:
            since += 1
    return since >= patience


class Evaluator:
    """The evaluations of a run. ``history`` has (step, loss) of those before it went on."""

    def __init__(
        self,
        config: Config,
        rows: Packed | None,
        sources: Sources,
        step: TrainStep,
        history: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._config, self._rows, self._sources, self._step = config, rows, sources, step
        self.history = list(history)

    def let_go(self) -> None:
        """Holds no step, until it is told to ``turn_to`` another."""
        del self._sources, self._step

    def turn_to(self, sources: Sources, step: TrainStep) -> None:
        """Evaluates another step from here on."""
        self._sources, self._step = sources, step

    def measure(self, step: int, epoch: float, asked: Callable[[], object]) -> EvalRecord | None:
        """Evaluates the rows, if there are any, and remembers the loss."""
        if self._rows is None:
            return None
        begin = time.perf_counter()
        found = evaluate(
            self._rows,
            self._step.logprobs,
            rows_per_batch=self._config.per_device_train_batch_size,
            asked=asked,
        )
        if found is None:
            return None
        self.history.append((step, found.loss))
        return EvalRecord(
            step=step,
            epoch=epoch,
            tokens=int(found.tokens.sum()),
            loss=found.loss,
            recipe=self._step.evaluation_recipe,
            duration_ms=(time.perf_counter() - begin) * 1e3,
            sources=found.by_source(),
        )

    def samples(self, number: int) -> list[SampleRecord]:
        """What the model makes of the fixed prompts after a step, by its likeliest tokens."""
        prompts = self._config.eval_prompts
        if not prompts:
            return []
        step, tokens = self._step, self._config.eval_max_new_tokens
        with step.evaluating():
            model = LoadedModel(
                self._sources.directory, step.device, step.evaluated, step.adapter, step.settings
            )
            texts = generate(model, prompts, max_new_tokens=tokens, temperature=0.0)
        return [
            SampleRecord(step=number, prompt=prompt, text=text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def is_best(self) -> bool:
        """Whether the last loss is the lowest."""
        return lowest(self.history) == self.history[-1]

    def over(self) -> str:
        """Why the run should stop early, or nothing."""
        config = self._config
        if not config.early_stop or not stalled(
            [loss for _, loss in self.history],
            patience=config.early_stop_patience,
            threshold=config.early_stop_threshold,
        ):
            return ""
        times = config.early_stop_patience
        return f"the evaluation loss has not fallen for {times} evaluations (early_stop)"
