"""Checkpoints that a thread writes: what is saved, what is raised, and what is given up."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate import saver
from surogate.checkpoint import OPTIMIZER, TRAINED, Checkpoint, clean, fill_, newest
from surogate.device import Device, choose_device
from surogate.errors import UserError
from surogate.kernels.arrays import BF16
from surogate.manifest import faults
from surogate.saver import Saver, free_memory
from tests.oracle import same_bits

CPU = choose_device("cpu")


def made(step: int) -> Checkpoint:
    weight = np.full((64, 8), step, np.float32)
    state = {"step": np.array(step, np.int64), "m.w": weight.astype(BF16)}
    return Checkpoint(step, {"w": weight}, state, {}, {})


def saved(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of the newest checkpoint, which must be whole."""
    path = newest(directory)
    assert path is not None and faults(path) == []
    like = made(int(path.name[5:]))
    for file, arrays in ((TRAINED, like.trained), (OPTIMIZER, like.optimizer)):
        for array in arrays.values():
            array[...] = 0
        fill_(path / file, arrays, put=lambda array: array)
    return {**like.trained, **like.optimizer}


def with_say(**options: Any) -> Saver:
    settings: dict[str, Any] = {"background": True, "say": pytest.fail} | options
    return Saver(CPU, **settings)


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        real = saver.save

        def save(*arguments: Any, **options: Any) -> Path:
            self.reached.set()
            assert self.opened.wait(10)
            return real(*arguments, **options)

        monkeypatch.setattr(saver, "save", save)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def test_what_was_there_is_saved_and_not_what_came_after(tmp_path, gate):
    """Training goes on while a write is held up."""
    state = made(1)
    with with_say() as background:
        background.save(tmp_path, state, keep=3)
        assert gate.reached.wait(10) and newest(tmp_path) is None
        for array in (*state.trained.values(), *state.optimizer.values()):
            array[...] = 99
        background.poll()
        gate.opened.set()
    for name, array in saved(tmp_path).items():
        want = made(1)
        same_bits(array, {**want.trained, **want.optimizer}[name])


def test_one_write_at_a_time_and_in_order(tmp_path):
    with with_say() as background:
        for step in (1, 2, 3):
            background.save(tmp_path, made(step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    assert int(saved(tmp_path)["step"]) == 3


@pytest.mark.parametrize("call", ["poll", "save", "wait", "exit"])
def test_errors_of_the_thread_come_to_the_next_call(tmp_path, monkeypatch, call):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(saver, "save", refuse)
    with pytest.raises(UserError, match="the disk is full"), with_say() as background:
        background.save(tmp_path, made(1), keep=1)
        assert background._thread is not None
        background._thread.join()
        if call == "poll":
            background.poll()
        elif call == "save":
            background.save(tmp_path, made(2), keep=1)
        elif call == "wait":
            background.wait()
        if call != "exit":
            pytest.fail("nothing was raised")
    background.poll()  # and once only
    background.wait()


def test_an_ordinary_error_lets_the_write_be_finished(tmp_path, gate):
    def fail() -> None:
        with with_say() as background:
            background.save(tmp_path, made(1), keep=1)
            threading.Timer(0.1, gate.opened.set).start()
            raise UserError("the loss is not finite")

    with pytest.raises(UserError, match="the loss is not finite"):
        fail()
    assert int(saved(tmp_path)["step"]) == 1


def test_to_end_at_once_gives_the_write_up(tmp_path, gate):
    """What the thread still does changes no name; the error that it ends by is nobody's."""
    with with_say() as background:
        gate.opened.set()
        background.save(tmp_path, made(1), keep=9)
    gate.opened.clear()
    again = with_say()
    with pytest.raises(SystemExit), again:
        again.save(tmp_path, made(2), keep=9)
        raise SystemExit(143)
    thread = again._thread
    assert thread is not None and thread.daemon and thread.is_alive()
    gate.opened.set()
    thread.join(10)
    assert int(saved(tmp_path)["step"]) == 1
    clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_in_the_foreground(tmp_path):
    with with_say(background=False) as foreground:
        foreground.save(tmp_path, made(1), keep=1)
        assert int(saved(tmp_path)["step"]) == 1 and foreground._thread is None


def test_a_host_with_too_little_memory_writes_in_the_foreground(tmp_path, monkeypatch):
    """And says so once."""
    size = made(1).nbytes
    said: list[str] = []
    for free, lines in ((2 * size - 1, 1), (2 * size, 1), (None, 1)):
        monkeypatch.setattr(saver, "free_memory", lambda free=free: free)
        with with_say(say=said.append) as background:
            for step in (1, 2):
                background.save(tmp_path, made(step), keep=1)
                assert bool(background._buffers) == (free != 2 * size - 1)
        assert len(said) == lines
    assert said[0].startswith("checkpoints are written in the foreground: a copy takes ")


def test_free_memory_is_less_than_there_is():
    free = free_memory()
    assert free is not None and 0 < free < 1 << 50


def test_memory_is_taken_once(tmp_path):
    with with_say() as background:
        background.save(tmp_path, made(1), keep=1)
        first = dict(background._buffers)
        background.save(tmp_path, made(2), keep=1)
        assert all(background._buffers[name] is array for name, array in first.items())
        with pytest.raises(ValueError, match=r"Saver: trained.w was float32\(64, 8\), is float32"):
            background.save(tmp_path, made(3)._replace(trained={"w": np.ones(3, "f4")}), keep=1)


def test_a_save_costs_a_copy_and_no_more(tmp_path, monkeypatch):
    """However long the disk takes: here half a second for each file."""
    from surogate.models import files

    real = files.write_bytes
    monkeypatch.setattr(files, "write_bytes", lambda *a: time.sleep(0.5) or real(*a))
    with with_say() as background:
        begin = time.perf_counter()
        background.save(tmp_path, made(1), keep=1)
        assert time.perf_counter() - begin < 0.4
        background.wait()
        assert time.perf_counter() - begin > 1.5


class Recorded:
    """Streams and events of a card that only write down what they were told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.cuda = self
        self.may_copy = threading.Event()
        self.may_copy.set()

    def get_current_stream(self) -> Any:
        return FakeStream(self, "compute")

    def Stream(self, *, non_blocking: bool) -> Any:
        assert non_blocking
        return FakeStream(self, "copy")

    def PinnedMemory(self, size: int) -> bytearray:
        assert self.may_copy.wait(10)
        self.log.append("host memory")
        return bytearray(size)

    def PinnedMemoryPointer(self, memory: bytearray, start: int) -> bytearray:
        return memory[start:]


class FakeStream:
    def __init__(self, library: Recorded, name: str) -> None:
        self.library, self.name = library, name

    def record(self) -> Any:
        self.library.log.append(f"record {self.name}")
        return FakeEvent(self.library, self.name)

    def wait_event(self, event: Any) -> None:
        self.library.log.append(f"{self.name} waits for {event.name}")

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeEvent:
    def __init__(self, library: Recorded, name: str) -> None:
        self.library, self.name = library, name

    def synchronize(self) -> None:
        self.library.log.append(f"host waits for {self.name}")


class FakeArray:
    """An array of the card: ``get`` copies on a stream."""

    def __init__(self, host: np.ndarray, log: list[str]) -> None:
        self.host, self.log = host, log
        self.shape, self.dtype, self.nbytes, self.size = (
            host.shape,
            host.dtype,
            host.nbytes,
            host.size,
        )

    def get(self, *, stream: FakeStream, out: np.ndarray, blocking: bool) -> None:
        assert not blocking
        self.log.append(f"copy on {stream.name}")
        out[...] = self.host


def on_card(library: Recorded) -> tuple[Saver, Checkpoint]:
    """A saver of a card's state, and such a state."""
    plain = made(1)
    state = plain._replace(
        trained={k: FakeArray(v, library.log) for k, v in plain.trained.items()},
        optimizer={
            k: v if k == "step" else FakeArray(v, library.log) for k, v in plain.optimizer.items()
        },
    )
    card = Device("cuda", "a card", library, np.dtype(BF16))
    return Saver(card, background=True, say=pytest.fail), state


def test_order_of_streams(tmp_path):
    """The copy comes after the update that made the state, and the next update after the copy."""
    library = Recorded()
    background, state = on_card(library)
    with background:
        background.save(tmp_path, state, keep=1)
        background.before_update()
        background.before_update()  # there is nothing more to wait for
        background.wait()
    assert [line for line in library.log if not line.startswith("host")] == [
        "record compute",
        "copy waits for compute",
        "copy on copy",
        "copy on copy",
        "record copy",
        "compute waits for copy",
    ]
    assert library.log.count("host memory") == 1 and "host waits for copy" in library.log
    same_bits(saved(tmp_path)["w"], made(1).trained["w"])


def test_the_next_passes_do_not_wait_until_a_copy_begins(tmp_path):
    """Page-locked memory takes long to get, and a thousand copies some time to be launched."""
    library = Recorded()
    library.may_copy.clear()
    background, state = on_card(library)
    with background:
        background.save(tmp_path, state, keep=1)
        assert "copy on copy" not in library.log  # it returned before
        threading.Timer(0.1, library.may_copy.set).start()
        background.before_update()
        assert library.log.count("copy on copy") == 2
        assert "compute waits for copy" in library.log


def test_the_first_save_finds_the_memory_that_was_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "PIECE", 1)  # a piece for each array
    library = Recorded()
    library.may_copy.clear()
    background, state = on_card(library)
    with background:
        background.prepare(state)  # returns before it is there
        assert library.log == []
        background.save(tmp_path, state, keep=1)
        library.may_copy.set()
        background.wait()
        assert library.log.count("host memory") == 3 and library.log[-1] == "host waits for copy"
        background.save(tmp_path, state, keep=1)
        background.wait()
    assert library.log.count("host memory") == 3
    same_bits(saved(tmp_path)["w"], made(1).trained["w"])


def test_memory_that_cannot_be_prepared_is_asked_for_again(tmp_path, monkeypatch):
    library = Recorded()
    background, state = on_card(library)
    taken, refused = library.PinnedMemory, []

    def once(size: int) -> bytearray:
        if refused:
            return taken(size)
        refused.append(size)
        raise MemoryError("no page-locked memory")

    monkeypatch.setattr(library, "PinnedMemory", once)
    with background:
        background.prepare(state)
        background.save(tmp_path, state, keep=1)
        background.wait()
    assert refused and library.log.count("host memory") == 1
    same_bits(saved(tmp_path)["w"], made(1).trained["w"])


def test_a_copy_that_fails_stops_no_update_and_is_raised(tmp_path, monkeypatch):
    library = Recorded()
    background, state = on_card(library)

    def refuse(*_: Any) -> None:
        raise MemoryError("no page-locked memory")

    monkeypatch.setattr(library, "PinnedMemory", refuse)
    with pytest.raises(MemoryError, match="no page-locked memory"), background:
        background.save(tmp_path, state, keep=1)
        background.before_update()
        assert "compute waits for copy" not in library.log
        background.wait()
    assert newest(tmp_path) is None


@pytest.mark.gpu
def test_on_a_card_updates_wait_for_the_copy(tmp_path):
    import cupy

    card = choose_device("cuda")
    with cupy.cuda.Stream(non_blocking=True), Saver(card, background=True, say=print) as background:
        array = cupy.full((64 << 20,), 1, np.float32)
        for step in (1, 2, 3):
            array.fill(step)
            state = Checkpoint(step, {"w": array}, {}, {}, {})
            background.save(tmp_path, state, keep=3)
            background.before_update()
            array.fill(99)
        background.wait()
    for step in (1, 2, 3):
        found = {"w": np.zeros(64 << 20, np.float32)}
        path = tmp_path / f"step_{step:08d}"
        assert faults(path) == []
        fill_(path / TRAINED, found, put=lambda x: x)
        assert (found["w"] == step).all()
