"""One training step on one device: micro-batches that add up gradients, then one update.

Everything lies in arrays that stay where they are, so that on a card both halves are recorded into
CUDA graphs once and replayed; without graphs the same functions run eagerly and give the same bits.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from surogate.device import Device
from surogate.kernels import tree
from surogate.kernels.arrays import FROZEN
from surogate.kernels.batch import IGNORED, STAGED, Batch, Docs, equal_rows
from surogate.kernels.capture import CaptureError, capture
from surogate.kernels.grad_norm import grad_norm, grad_table
from surogate.kernels.widened import Refresh, plain
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.names import hidden_matrices
from surogate.models.recipe import Recipe
from surogate.models.stack import Recompute
from surogate.models.tree import Adapter, Model
from surogate.models.widen import refresh_of, widened
from surogate.optim.adamw import AdamWState
from surogate.optim.clip import limit
from surogate.optim.rule import Rule, init, plan_of


class StepResult(NamedTuple):
    """What an update did, on the host."""

    nll: float  # sum over supervised tokens, nats
    count: int  # type: ignore[assignment]  # supervised tokens; tuples have a method count
    norm: float  # of the mean gradient, before clipping
    applied: bool  # False: the loss or the gradient was not finite, nothing changed

    @property
    def loss(self) -> float:
        """Nats per supervised token."""
        return self.nll / self.count if self.count else float("nan")


class StepOptions(NamedTuple):
    """What decides how a step is computed, beside the model."""

    tokens: int  # of a micro-batch
    recompute: Recompute
    chunk: int | None  # tokens whose logits exist at a time
    gradient_dtype: np.dtype
    max_grad_norm: float
    graphs: bool
    longest: int | None = None  # tokens of the longest document, such as a row's; None: all
    widen: bool | None = None  # adapted weights lie with their adapters; None: on a card
    plain_evaluation: bool = False  # with bf16 products, whatever the recipe


class TrainStep:
    """The arrays of a run and the two functions over them.

    ``model`` and ``adapter`` are updated in place; with an adapter the model is frozen.

    On a card, the passes read an adapted weight from one array with its adapter, and ``model`` is
    the views of it. Weights that ``making_room`` put there are taken over; others are copied, and
    the tree given here should be dropped. Whoever writes to the adapter calls ``refresh``.

    ``state`` is that of an earlier step over the same trained arrays, which this one goes on from.

    A half that cannot be recorded is run eagerly, with the same numbers: ``say`` gets one line, and
    ``graphs`` is False from then on.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        adapter: Adapter | None,
        settings: Settings,
        optimizer: Rule,
        options: StepOptions,
        recipe: Recipe | None = None,
        say: Callable[[str], None] = warnings.warn,
        state: AdamWState | None = None,
    ) -> None:
        self.recipe = recipe or Recipe()
        self._say, self.graphs = say, options.graphs
        self.device, self.settings, self.options = device, settings, options
        self.optimizer = optimizer
        if adapter is None:
            self._read, self._refresh, self.model = self.recipe.trained(model), None, model
        else:
            self._read, self._refresh = self._widened(model, adapter)
            self.model = tree.map(plain, self._read)
        self.adapter = adapter
        self._evaluated, self._refresh_evaluated = self._of_evaluations(model)
        self.trainable: Any = model if adapter is None else adapter
        matrices = hidden_matrices(settings.config) if adapter is None else None
        self.state: AdamWState = (
            init(self.trainable, optimizer, matrices) if state is None else state
        )
        zeros = device.library.zeros
        self.grads = tree.map(lambda p: zeros(p.shape, options.gradient_dtype), self.trainable)
        frozen = tree.map(lambda _: FROZEN, model)
        self._into = (
            dense.Grads(self.grads, None) if adapter is None else dense.Grads(frozen, self.grads)
        )
        self._plan = plan_of(self.trainable, self.grads, self.state, optimizer, matrices)
        self._norms = grad_table(tree.leaves(self.grads))
        self._longest = options.longest or options.tokens
        self._table = device.put(dense.rotary_table(settings.config, self._longest))
        self._nll, self._count = zeros((), np.float32), zeros((), np.int32)
        self._out = (zeros((), np.float32), zeros((), np.int32), zeros(3, np.float32))
        self._feed = Feed(device, options.tokens)
        self._pending: Pending | None = None  # the last update, until it is known what it did
        self._ready = False  # known when the first micro-batch comes, after a checkpoint was loaded
        self._micros: dict[int | None, Callable[[], Any]] = {}
        self._pool = device.library.cuda.MemoryPool() if options.graphs else None
        self._update: Callable[[], Any] = self._run_update
        if self.graphs:
            self._record()

    def _widened(self, model: Model, adapter: Adapter) -> tuple[Model, Refresh | None]:
        """The model that the passes read, and what brings it up to date with the adapter."""
        widen = self.device.kind == "cuda" if self.options.widen is None else self.options.widen
        if not widen:
            return model, None
        config, lora = self.settings
        assert lora is not None, "an adapter has a spec"
        model = widened(model, adapter)
        refresh = refresh_of(model, adapter, lora, config)
        refresh.launch_()
        return model, refresh

    def _of_evaluations(self, model: Model) -> tuple[Model, Refresh | None]:
        """What evaluations read, and what brings it up to date where updates do not."""
        if not self.options.plain_evaluation:
            return self._read, None
        if self.adapter is None:
            return model, None
        return self._widened(self.recipe.plain(model), self.adapter)

    def refresh(self) -> None:
        """Brings the weights that the passes read up to date with an adapter that was written to.

        Updates do it themselves.
        """
        if self._refresh is not None:
            self._refresh.launch_()

    def micro(self, batch: Batch) -> None:
        """Adds a micro-batch's loss and gradients to the step's."""
        rows = self._whole_rows(batch)
        if not self._ready:
            self._calibrate(batch)
        if self.graphs and rows not in self._micros:
            self._record_micro(rows)
        self._feed.write(batch)
        if self.graphs:
            self._micros[rows]()
        else:
            self._run_micro(rows)

    def _calibrate(self, batch: Batch) -> None:
        """Lets the recipe see a micro-batch that does not count, if it has seen none."""
        self._ready = True
        if self.recipe.calibrated:
            return
        self._feed.write(batch)
        with self.recipe.calibrating():
            self._run_micro(self._whole_rows(batch))
        self.recipe.update_()
        for buffer in (*tree.leaves(self.grads), self._nll, self._count):
            buffer.fill(0)

    def _whole_rows(self, batch: Batch) -> int | None:
        """The number of documents when each fills a row: attention has faster code then."""
        rows = equal_rows(batch.docs)
        return rows if rows == self.options.tokens // self._longest else None

    def update(self, lr: float) -> "Pending":
        """Clips, divides by the count of supervised tokens, updates, and starts the next step from
        zero.

        Waits for the update before, not for this one, whose result is read when ``Pending.result``
        is called.
        """
        self.settle()
        self.state = self.state._replace(step=self.state.step + 1)
        self._plan.write_scalars_(lr=lr, step=self.state.step)
        self._update()
        self._pending = Pending(self.device, self._out)
        return self._pending

    def settle(self) -> None:
        """Waits for the last update, and takes it out of ``state.step`` if it was not applied."""
        if self._pending is not None and not self._pending.result().applied:
            self.state = self.state._replace(step=self.state.step - 1)
        self._pending = None

    def logits(self, batch: Batch) -> Float32[np.ndarray, "tokens vocab"]:
        """Logits of a host batch of any length, on the host, with the weights as they are: trained
        ones in the compute type, frozen ones as the recipe has them.
        """
        self.recipe.begin()
        with self.recipe.unrecorded():
            found = dense.logits(
                self.model if self.adapter is None else self._read,
                self.adapter,
                self.device.put(batch),
                table=self._table,
                settings=self.settings,
            )
        return found if isinstance(found, np.ndarray) else found.get()

    @property
    def evaluation_recipe(self) -> str:
        """The recipe of the products of evaluations."""
        return Recipe.name if self.options.plain_evaluation else self.recipe.name

    @property
    def evaluated(self) -> Model:
        """The weights that evaluations multiply with: without an adapter, those of ``model``. To be
        read while ``evaluating``.
        """
        return self.model if self.adapter is None else tree.map(plain, self._evaluated)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Passes inside may read ``evaluated``; what training remembers stays as it was."""
        self.recipe.begin()
        if self._refresh_evaluated is not None:
            self._refresh_evaluated.launch_()
        try:
            with self.recipe.unrecorded():
                yield
        finally:
            self.recipe.begin()  # what was decoded for them alone goes

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, " tokens"]:
        """The log-probability of each token's label, on the host; 0 where it has none."""
        self._feed.write(batch)
        with self.evaluating():
            outputs = dense.loss_fwd(
                self._evaluated,
                self.adapter,
                self._feed.batch,
                table=self._table,
                settings=self.settings,
                chunk=self.options.chunk,
            )
        found = outputs.logprobs
        return found if isinstance(found, np.ndarray) else found.get()

    def _run_micro(self, rows: int | None) -> None:
        self.recipe.begin()
        self.recipe.draw_()
        dense.loss_and_grads(
            self._read,
            self.adapter,
            self._feed.batch._replace(rows=rows),
            table=self._table,
            settings=self.settings,
            recompute=self.options.recompute,
            chunk=self.options.chunk,
            into=self._into,
            totals=(self._nll, self._count),
        )

    def _run_update(self) -> None:
        most = limit(self.options.max_grad_norm)
        norm = grad_norm(self._norms, self._count, max_norm=most, loss=self._nll)
        self._plan.launch_(norm, zero_grad=True)
        self.refresh()
        self.recipe.update_()
        for out, value in zip(self._out, (self._nll, self._count, norm), strict=True):
            out[...] = value
        self._nll.fill(0)
        self._count.fill(0)

    def _record_micro(self, rows: int | None) -> None:
        """Records the micro-batch's half. Its trial runs see no supervised token and add zeros."""
        self._feed.write(padding(self.options.tokens, self._longest))
        with self.recipe.restored(), self._or_eagerly():
            self._micros[rows] = capture(lambda: self._run_micro(rows), pool=self._pool)

    def _record(self) -> None:
        """Records the update. Its trial runs see no supervised token, so none is applied."""
        self._plan.write_scalars_(lr=0.0, step=1)
        with self._or_eagerly():
            self._update = capture(self._run_update)
        self._update()
        self.device.synchronize()

    @contextmanager
    def _or_eagerly(self) -> Iterator[None]:
        """Goes on without graphs where one cannot be recorded, and says so."""
        try:
            yield
        except CaptureError as error:
            self.graphs = False
            self._micros.clear()
            self._say(f"CUDA graphs are off, and steps take longer: {error}")


class Pending:
    """An update whose result may still be on its way from the card."""

    def __init__(self, device: Device, out: tuple[Any, Any, Any]) -> None:
        if device.kind == "cpu":
            self._values, self._event = tuple(o.copy() for o in out), None
            return
        cuda = device.library.cuda
        stream = cuda.get_current_stream()
        self._values = tuple(cupy_to_pinned(device, o, stream) for o in out)
        self._event = cuda.Event()
        self._event.record(stream)

    def result(self) -> StepResult:
        """Waits for this update alone."""
        if self._event is not None:
            self._event.synchronize()
        nll, count, norm = self._values
        return StepResult(float(nll), int(count), float(norm[0]), bool(norm[2]))


def cupy_to_pinned(device: Device, x: Any, stream: Any) -> np.ndarray:
    """A copy in page-locked memory that the stream fills in its turn."""
    memory = device.library.cuda.alloc_pinned_memory(x.nbytes)
    host = np.frombuffer(memory, x.dtype, x.size).reshape(x.shape)
    x.get(stream=stream, out=host, blocking=False)
    return host


class Feed:
    """The micro-batch at a fixed place on the device, written from the host without waiting.

    On a card, a stream of its own brings the next batch while the passes of this one run; theirs
    then only moves it to its place.
    """

    AHEAD = 8  # page-locked copies: how many micro-batches the host may run ahead

    def __init__(self, device: Device, tokens: int) -> None:
        self._device = device
        zeros = device.library.zeros
        self._rows = rows = zeros((5, tokens), np.int32)
        self.batch = Batch(rows[0], rows[1], rows[2], Docs(rows[3], rows[4]))
        if device.kind == "cuda":
            cuda = device.library.cuda
            self._stream = cuda.Stream(non_blocking=True)
            self._pinned: deque[Any] = deque()  # arrays, and when they have been copied
            for _ in range(self.AHEAD):
                memory = cuda.alloc_pinned_memory(rows.nbytes)
                host = np.frombuffer(memory, np.int32, rows.size).reshape(rows.shape)
                self._pinned.append((host, cuda.Event(disable_timing=True)))
            self._staged: deque[Any] = deque()  # arrays, and when they have been moved
            for _ in range(STAGED):
                self._staged.append((zeros(rows.shape, np.int32), cuda.Event(disable_timing=True)))
            device.synchronize()  # the zeros were written by another stream

    def write(self, batch: Batch) -> None:
        """Puts a host batch at the fixed place, after everything that is already on the stream."""
        fields = (batch.tokens, batch.labels, batch.positions, batch.docs.start, batch.docs.end)
        if self._device.kind == "cpu":
            for row, field in zip(self._rows, fields, strict=True):
                row[...] = field
            return
        (host, copied), (staged, moved) = self._pinned[0], self._staged[0]
        self._pinned.rotate(-1)
        self._staged.rotate(-1)
        copied.synchronize()
        for row, field in zip(host, fields, strict=True):
            row[...] = field
        self._stream.wait_event(moved)
        staged.set(host, stream=self._stream)
        copied.record(self._stream)
        stream = self._device.library.cuda.get_current_stream()
        stream.wait_event(copied)
        self._rows.data.copy_from_device_async(staged.data, staged.nbytes, stream)
        moved.record(stream)


def padding(tokens: int, longest: int) -> Batch:
    """A batch of unsupervised documents of up to ``longest`` tokens."""
    index = np.arange(tokens, dtype=np.int32)
    positions = index % longest
    start = index - positions
    return Batch(
        np.zeros(tokens, np.int32),
        np.full(tokens, IGNORED, np.int32),
        positions,
        Docs(start, np.minimum(start + longest, tokens).astype(np.int32)),
    )
