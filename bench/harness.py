"""What a benchmark is (``Case``), how it is timed on a card, and what its time is held against.

A case states the bytes it must move or the operations it must do. It is recorded into a CUDA graph
of many calls and timed by events around a replay, so that no launch of the host is in the time; its
share is of the copy or matrix-product rate of the same sitting. Cases rotate their arguments among
more memory than the L2 cache holds (inputs.py). A few megabytes are copied at a lower rate than
many, for a launch and the card's way to full speed are as long: so what moves bytes is also held
against a copy of just as many.
"""

import functools
import importlib.metadata
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ROUNDS = 7
# Bytes up to which a case is held against an equal copy: what counts there is how long anything
# takes to start. On an H200, larger copies inside a graph ran at 2.8 TB/s, 4.25 outside.
EQUAL = 256 << 20
MOST_CALLS, LEAST_SECONDS = 20, 2e-3  # of a graph: enough for the resolution of events


@dataclass(frozen=True)
class Case:
    """One measured call: its name, what builds it, and the bytes or operations it cannot avoid.

    ``build`` makes the arguments on the card and returns the call. Making a case needs neither a
    card nor CuPy; bytes that depend on the card are a function, which is called there.
    """

    name: str
    build: Callable[[], Callable[[], object]]
    bytes: int | Callable[[], int] = 0
    flops: int = 0


@dataclass(frozen=True)
class Ceilings:
    """Rates of this card in this sitting: copy in bytes/s, bf16 products in FLOP/s."""

    copy: float
    matmul: float


class Unsupported(Exception):
    """Raised by ``Case.build`` when this card or a library cannot run the case; says why."""


class Clock:
    """A clock that moves only by the time a card spent in what is measured.

    pytest-benchmark reads its timer before and after a round. A host clock there would time a
    launch and a synchronisation too; this one is moved by the events' own figure in between, so
    that its statistics and files hold the card's time and nothing else.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


def seconds_of(launch: Callable[[], object]) -> float:
    """Seconds on the card of what ``launch`` enqueues, from events around it.

    It is launched once before: while the card is busy with that, the host enqueues the rest, and no
    gap between two launches is timed.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    launch()
    begin.record(stream)
    launch()
    end.record(stream)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / 1e3


def captured(run: Callable[[], object]) -> Callable[[], float]:
    """Records calls of ``run`` into a CUDA graph; the function returned replays them and gives the
    seconds of one call.
    """
    from surogate.kernels.capture import capture

    run()  # compiles its kernels, chooses its algorithms
    calls = max(1, min(MOST_CALLS, round(LEAST_SECONDS / seconds_of(run))))

    def repeat() -> None:
        for _ in range(calls):
            run()

    replay = capture(repeat)
    return lambda: seconds_of(replay) / calls


def measure_ceilings() -> Ceilings:
    """Copies 2 GiB and multiplies 8192 x 8192 bf16 matrices of random numbers."""
    import cupy

    from bench.inputs import random
    from surogate.kernels.matmul import matmul

    size, side = 2 << 30, 8192
    source, target = cupy.ones(size, cupy.uint8), cupy.empty(size, cupy.uint8)
    stream = cupy.cuda.get_current_stream()
    a, b, out = (random(side, side) for _ in range(3))
    matmul(a, b, transpose_b=True, out=out)  # chooses its algorithm

    def median(run: Callable[[], object]) -> float:
        return statistics.median(seconds_of(run) for _ in range(5 * ROUNDS))

    copy = median(lambda: target.data.copy_from_device_async(source.data, size, stream))
    product = median(lambda: matmul(a, b, transpose_b=True, out=out))
    return Ceilings(2 * size / copy, 2 * side**3 / product)


@functools.cache
def copy_seconds(size: int) -> float:
    """Seconds of a copy that moves ``size`` bytes, half of them read and half written, timed as
    cases are.
    """
    import cupy

    from bench.inputs import rotated

    half = size // 2

    def build() -> Callable[[], object]:
        source, target = cupy.ones(half, cupy.uint8), cupy.empty(half, cupy.uint8)
        stream = cupy.cuda.get_current_stream()
        return lambda: target.data.copy_from_device_async(source.data, half, stream)

    seconds = captured(rotated(build, size)())
    return statistics.median(seconds() for _ in range(ROUNDS))


def speed(case: Case, seconds: float, ceilings: Ceilings) -> dict[str, float]:
    """Bytes or operations of a case, their rate a second, and its share of the ceiling.

    ``equal_copy``: a copy of as many bytes takes this share of the case's time; 0 above EQUAL.
    """
    if case.bytes:
        work = case.bytes() if callable(case.bytes) else case.bytes
        rate, equal_copy = work / seconds, copy_seconds(work) / seconds if work <= EQUAL else 0.0
        share = rate / ceilings.copy
        return {"bytes": work, "rate": rate, "share": share, "equal_copy": equal_copy}
    rate = case.flops / seconds
    return {"flops": case.flops, "rate": rate, "share": rate / ceilings.matmul}


def facts() -> dict[str, Any]:
    """The card, and the versions of everything that decides its speed."""
    import cupy

    from surogate.train import versions

    found = versions()
    for name in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    driver = cupy.cuda.runtime.driverGetVersion()
    found["driver's CUDA"] = f"{driver // 1000}.{driver % 1000 // 10}"
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    return {"card": name, "versions": found}
