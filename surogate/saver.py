"""Saves checkpoints beside the training: the state is copied to the host, and a thread writes it.

On a card the thread starts the copy too, on a stream of its own, so that the next step is launched
at once. Its passes read what is saved, and go on meanwhile; ``before_update`` makes the update,
which writes it, wait for the copy. The host memory (page-locked on a card) is taken once and used
again, so there is one write at a time: a save waits for the one before it. Taking it lasts, 2 s for
6 GB beside an H200: ``prepare`` does so during the first steps.

What goes wrong in the thread is raised by the next call of ``poll``, ``save`` or ``wait``. When a
run ends by an ordinary error, the write at hand is finished, for its state is good; when it is to
end at once (a second signal), the write is given up at whatever point it is, as if the process had
been killed: nothing is renamed after that.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from surogate.checkpoint import Checkpoint, save
from surogate.device import Device
from surogate.kernels.arrays import require

ALIGNMENT = 512  # bytes
# Host memory is taken in pieces of about so many bytes (or of the largest array): while the driver
# locks one, nothing is launched.
PIECE = 64 << 20
SHARE = 0.5  # of the free host memory that copies may take; beyond, a save is made in place


class GivenUp(BaseException):
    """Ends the thread of a write that was given up."""


class Saver:
    """Writes checkpoints, one at a time. Use it in a ``with``: leaving waits for the last.

    ``background`` False writes each in ``save`` itself. ``say`` gets a line when that is done
    because the host has too little memory.
    """

    def __init__(self, device: Device, *, background: bool, say: Callable[[str], None]) -> None:
        self._device, self._background, self._say = device, background, say
        self._buffers: dict[str, np.ndarray] = {}
        self._preparing: threading.Thread | None = None
        self._stream: Any = None
        self._copied: Future[Any] | None = None  # the copy's event, until an update waits for it
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._commit, self._given_up = threading.Lock(), False

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            self._join()
        else:
            with self._commit:
                self._given_up = True

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Begins to take the memory for checkpoints of such arrays, for the first save to find."""
        if self._device.kind == "cpu" or not self._room_for(checkpoint.nbytes):
            return

        def work() -> None:
            with suppress(Exception):  # the save tries again, and says what is wrong
                self._make_buffers(checkpoint)

        self._preparing = threading.Thread(target=work, name="checkpoint memory", daemon=True)
        self._preparing.start()

    def save(self, directory: Path, checkpoint: Checkpoint, *, keep: int) -> None:
        """Saves as ``checkpoint.save`` does. Returns when the arrays may be written to again, on
        the host and, after ``before_update``, on the card.
        """
        self.wait()
        if not self._room_for(checkpoint.nbytes):
            save(directory, checkpoint, keep=keep)
            return
        copy = self._copy(checkpoint)

        def work() -> None:
            try:
                save(directory, copy(), keep=keep, commit=self._committing())
            except BaseException as error:  # for the thread that trains, see poll
                self._error = error

        # A daemon: a process that is told to end at once does not wait for it.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def before_update(self) -> None:
        """To be called before arrays on the card change: their copy is made first."""
        if self._copied is None:
            return
        copied, self._copied = self._copied.result(), None
        if copied is not None:  # else the copy failed, as the next call says
            self._device.library.cuda.get_current_stream().wait_event(copied)

    def poll(self) -> None:
        """Raises what went wrong in the thread, if it has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits for the write at hand and raises what went wrong in it."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def _committing(self) -> Iterator[None]:
        with self._commit:
            if self._given_up:
                raise GivenUp
            yield

    def _room_for(self, size: int) -> bool:
        if not self._background or self._buffers or self._preparing is not None:
            return self._background
        free = free_memory()
        if free is None or size <= SHARE * free:
            return True
        self._background = False
        self._say(
            f"checkpoints are written in the foreground: a copy takes {size / 1e9:.3g} GB, "
            f"the host has {free / 1e9:.3g} GB free"
        )
        return False

    def _copy(self, checkpoint: Checkpoint) -> Callable[[], Checkpoint]:
        """What gives the checkpoint with its arrays on the host, to be called by the thread."""
        if self._device.kind == "cpu":
            copies = self._in_buffers(checkpoint)
            return lambda: copies
        cuda = self._device.library.cuda
        if self._stream is None:
            self._stream = cuda.Stream(non_blocking=True)
        self._stream.wait_event(cuda.get_current_stream().record())
        self._copied = Future()
        return partial(self._from_card, checkpoint, self._copied)

    def _from_card(self, checkpoint: Checkpoint, copied: Future[Any]) -> Checkpoint:
        """Starts the copy, says so, and waits for it."""
        event = None
        try:
            with self._stream:
                copies = self._in_buffers(checkpoint)
                event = self._stream.record()
        finally:
            copied.set_result(event)
        event.synchronize()
        return copies

    def _in_buffers(self, checkpoint: Checkpoint) -> Checkpoint:
        if self._preparing is not None:
            self._preparing.join()
        if not self._buffers:
            self._make_buffers(checkpoint)

        def part(prefix: str, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
            return {name: self._fill(f"{prefix}.{name}", array) for name, array in arrays.items()}

        return checkpoint._replace(
            trained=part("trained", checkpoint.trained),
            optimizer=part("optimizer", checkpoint.optimizer),
        )

    def _fill(self, name: str, array: Any) -> np.ndarray:
        """Starts copying an array to the buffer of its name."""
        buffer = self._buffers[name]
        require(
            (buffer.shape, buffer.dtype) == (array.shape, array.dtype),
            f"Saver: {name} was {buffer.dtype}{buffer.shape}, is {array.dtype}{array.shape}",
        )
        if isinstance(array, np.ndarray):
            np.copyto(buffer, array)
        else:
            array.get(stream=self._stream, out=buffer, blocking=False)
        return buffer

    def _make_buffers(self, checkpoint: Checkpoint) -> None:
        """A piece of host memory for many arrays: CuPy's pool of page-locked memory would round
        each up to a power of two.
        """
        parts = {"trained": checkpoint.trained, "optimizer": checkpoint.optimizer}
        arrays = [(f"{part}.{name}", x) for part, held in parts.items() for name, x in held.items()]
        buffers: dict[str, np.ndarray] = {}
        starts: list[int] = []
        size = 0
        for index, (_, array) in enumerate(arrays, 1):
            starts.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            if size < PIECE and index < len(arrays):
                continue
            memory = self._host_memory(size)
            for start, (name, held) in zip(
                starts, arrays[index - len(starts) : index], strict=True
            ):
                flat = memory[start : start + held.nbytes]
                buffers[name] = flat.view(held.dtype).reshape(held.shape)
            starts, size = [], 0
        self._buffers = buffers

    def _host_memory(self, size: int) -> np.ndarray:
        if self._device.kind == "cpu":
            return np.empty(size, np.uint8)
        cuda = self._device.library.cuda
        return np.frombuffer(cuda.PinnedMemoryPointer(cuda.PinnedMemory(size), 0), np.uint8, size)


def free_memory() -> int | None:
    """Bytes of host memory that can be had; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return free
    return limit - used if free is None else min(free, limit - used)
