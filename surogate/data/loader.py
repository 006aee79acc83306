"""Micro-batches of packed rows as a pure function of their index, so a resumed run needs no state.

Micro-batch `index` of rank r is the micro-batch number index * world + r of a global sequence. Its
epoch is index // batches_per_epoch; an epoch is a permutation of the rows drawn from (seed, epoch)
by Philox, whose raw stream NumPy keeps fixed. So ranks take disjoint rows, a row comes at most
once an epoch, and a step of accumulation * world micro-batches holds the same rows however it is
divided.
"""

import queue
import threading
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64

from surogate.data.packed import Packed
from surogate.errors import UserError
from surogate.kernels.arrays import require
from surogate.kernels.batch import IGNORED, Batch, docs_from_lengths, positions_of


def permutation(rows: int, *, seed: int, epoch: int) -> Int64[np.ndarray, " rows"]:
    """The order of the rows in an epoch."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    return np.argsort(bits, kind="stable").astype(np.int64)


def _gather(packed: Packed, chosen: Int64[np.ndarray, " chosen"], rows: int) -> Batch:
    """The chosen rows one after another; rows beyond them are padding documents."""
    length = packed.sequence_len
    tokens = np.zeros((rows, length), np.int32)
    labels = np.full((rows, length), IGNORED, np.int32)
    lengths: list[Int32[np.ndarray, " documents"]] = []
    for slot, index in enumerate(chosen.tolist()):
        tokens[slot], labels[slot], documents = packed.row(index)
        lengths.append(documents)
    lengths.append(np.full(rows - len(chosen), length, np.int32))
    docs = docs_from_lengths(np.concatenate(lengths).tolist())
    return Batch(tokens.reshape(-1), labels.reshape(-1), positions_of(docs), docs)


class Loader:
    """Training micro-batches of one rank: batch(index) for any index, without end.

    rows_per_batch is one rank's micro-batch; accumulation, how many of them a rank takes a step.
    An epoch has whole steps only: the rows that are left (other ones each epoch, when shuffled)
    are dropped. Raises UserError when the rows do not fill one step.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        rows_per_batch: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        accumulation: int = 1,
    ) -> None:
        require(0 <= rank < world, f"Loader: rank must be below world {world}, got {rank}")
        step = rows_per_batch * world * accumulation
        if packed.rows < step:
            raise UserError(
                f"the data fill {packed.rows} rows of {packed.sequence_len} tokens, but one step "
                f"takes {step} (batch {rows_per_batch}, accumulation {accumulation}, {world} "
                "processes); lower them or sequence_len, or add data"
            )
        self.packed = packed
        self.rows_per_batch = rows_per_batch
        self.batches_per_epoch = packed.rows // step * accumulation
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._world = world
        self._drawn: tuple[int, Int64[np.ndarray, " rows"]] | None = None

    def rows(self, index: int) -> Int64[np.ndarray, " rows_per_batch"]:
        """The row numbers of a micro-batch."""
        require(index >= 0, f"Loader: index must not be negative, got {index}")
        epoch, within = divmod(index, self.batches_per_epoch)
        begin = (within * self._world + self._rank) * self.rows_per_batch
        return self._order(epoch)[begin : begin + self.rows_per_batch]

    def batch(self, index: int) -> Batch:
        """Micro-batch index: arrays of rows_per_batch * sequence_len tokens."""
        return _gather(self.packed, self.rows(index), self.rows_per_batch)

    def _order(self, epoch: int) -> Int64[np.ndarray, " rows"]:
        if not self._shuffle:
            return np.arange(self.packed.rows, dtype=np.int64)
        drawn = self._drawn
        if drawn is None or drawn[0] != epoch:
            order = permutation(self.packed.rows, seed=self._seed, epoch=epoch)
            drawn = self._drawn = (epoch, order)
        return drawn[1]


class EvalLoader:
    """Evaluation micro-batches of one rank: every row once over all ranks, in order.

    Every rank has the same number of batches; padding documents fill what the rows do not.
    """

    def __init__(
        self, packed: Packed, *, rows_per_batch: int, rank: int = 0, world: int = 1
    ) -> None:
        require(0 <= rank < world, f"EvalLoader: rank must be below world {world}, got {rank}")
        self.packed = packed
        self.rows_per_batch = rows_per_batch
        self.batches = -(-packed.rows // (rows_per_batch * world))
        self._rank = rank
        self._world = world

    def rows(self, index: int) -> Int64[np.ndarray, " rows"]:
        """The row numbers of a batch; fewer than rows_per_batch, or none, at the end."""
        require(0 <= index < self.batches, f"EvalLoader: no batch {index} of {self.batches}")
        begin = (index * self._world + self._rank) * self.rows_per_batch
        end = min(begin + self.rows_per_batch, self.packed.rows)
        return np.arange(begin, end, dtype=np.int64)

    def batch(self, index: int) -> Batch:
        """Batch index: arrays of rows_per_batch * sequence_len tokens."""
        return _gather(self.packed, self.rows(index), self.rows_per_batch)


@runtime_checkable
class _Batches(Protocol):
    def batch(self, index: int) -> Batch: ...


class Prefetch:
    """Iterates over batch(start), batch(start + 1), ..., built by a thread up to `depth` ahead.

    stop ends the iteration before that index; None: it never ends. An exception in the thread is
    raised by the `next` that would have returned its batch. Close it, or use it as a context.
    """

    def __init__(
        self, loader: _Batches, start: int, *, stop: int | None = None, depth: int = 2
    ) -> None:
        self._queue: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._over = False
        self._thread = threading.Thread(
            target=self._run, args=(loader, start, stop), name="prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, loader: _Batches, index: int, stop: int | None) -> None:
        try:
            while (stop is None or index < stop) and self._put((loader.batch(index), None)):
                index += 1
            self._put((None, None))
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put((None, error))

    def _put(self, item: tuple[Batch | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Batch:
        if self._over or self._closed.is_set():
            raise StopIteration
        batch, error = self._queue.get()
        if batch is None:
            self._over = True
            if error is not None:
                raise error
            raise StopIteration
        return batch

    def close(self) -> None:
        """Ends the thread and drops what it has prepared. Calling it again does nothing."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
