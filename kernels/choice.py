"""Which of several implementations of an op to run: the fastest here, measured once and kept.

The candidates run on the real arrays when a problem is met for the first time, and the winner is
kept on disk by card, library versions and problem. So later runs use the same one, and a run that
is started twice gives the same bits even where the candidates round differently. To measure again,
delete the folder ``choice`` of the cache.
"""

import functools
import hashlib
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate.kernels.arrays import require
from surogate.kernels.nvrtc import cache_directory

COOLING_BYTES = 128 << 20  # written before each timing: more than the L2 cache of any card

FINALISTS = 6  # measured again
ROUNDS = 5

_chosen: dict[Any, str] = {}


def _card() -> str:
    import cupy

    return _name_of(cupy.cuda.runtime.getDevice())


@functools.cache
def _name_of(device: int) -> str:
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()


def _capturing() -> bool:
    import cupy

    return cupy.cuda.get_current_stream().is_capturing()


def _seconds(run: Callable[[], object]) -> float:
    import cupy

    stream = cupy.cuda.get_current_stream()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    scratch = cupy.empty(COOLING_BYTES, "u1")
    # Cools the L2 cache, and keeps the card busy while the host enqueues what is measured.
    scratch.data.memset_async(0, COOLING_BYTES, stream)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return cupy.cuda.get_elapsed_time(begin, end) / 1e3


@dataclass(frozen=True)
class Bench:
    """Where candidates are timed: the name of the card, whether it may be used now, and a clock."""

    card: Callable[[], str]
    capturing: Callable[[], bool]
    seconds: Callable[[Callable[[], object]], float]  # of one run


CARD = Bench(_card, _capturing, _seconds)


def choose(
    topic: str,
    candidates: Mapping[str, Callable[[], object]],
    *,
    key: Hashable,
    versions: str,
    bench: Bench = CARD,
) -> str:
    """Returns the name of the candidate that is fastest for the problem ``key``.

    Each candidate runs the whole problem, such as a forward and a backward, and may do so often; a
    single one is not measured. ``topic`` and ``versions`` (of the libraries that candidates call)
    name folders; ``key`` must have a repr that says all of the problem. Runs of several processes
    that measure at the same time agree on the first result that is kept.

    Raises ValueError without candidates, and RuntimeError when there is something to measure while
    the current stream is being captured.
    """
    names = tuple(candidates)
    require(bool(names), f"choose: {topic} needs at least one candidate for {key}")
    if len(names) == 1:
        return names[0]
    card = bench.card()
    memory = (topic, names, key, versions, card)
    if memory not in _chosen:
        path = _path(topic, names, key, versions, card)
        if not path.exists():
            _refuse_capture(bench, topic, key)
            times = _measure(candidates, bench)
            if not path.exists():  # else another process was first: agree with it
                _save(path, topic, key, times)
        _chosen[memory] = json.loads(path.read_text())["choice"]
    return _chosen[memory]


def forget() -> None:
    """Drops what this process remembers: the next choices are read from disk again."""
    _chosen.clear()


def _refuse_capture(bench: Bench, topic: str, key: Hashable) -> None:
    if bench.capturing():
        raise RuntimeError(
            f"choose: first {topic} of {key} while its stream is being captured into a graph: "
            "run the same step once on this stream before capturing it"
        )


def by_speed(
    count: int,
    measure: Callable[[int], float | None],
    closely: Callable[[int], float | None] | None = None,
) -> list[tuple[float, int]]:
    """(seconds, index) of ``count`` alternatives, fastest first.

    ``measure`` times one run, and gives None for an alternative that cannot run. Each is timed
    twice; then the best few by ``closely`` (``measure`` where not given), interleaved so that they
    share a drift of the clock, and these are ranked by their medians.
    """
    first = []
    for index in range(count):
        times = [t for t in (measure(index), measure(index)) if t is not None]
        if times:
            first.append((min(times), index))
    first.sort()
    again: dict[int, list[float]] = {
        index: [] if closely else [time] for time, index in first[:FINALISTS]
    }
    for _ in range(ROUNDS):
        for index, times in again.items():
            time = (closely or measure)(index)
            if time is not None:
                times.append(time)
    ranked = sorted((statistics.median(times), index) for index, times in again.items() if times)
    return ranked + first[FINALISTS:]


def _measure(
    candidates: Mapping[str, Callable[[], object]], bench: Bench
) -> list[tuple[str, float]]:
    """(name, microseconds), fastest first. Each runs once before, which builds what it needs."""
    runs = list(candidates.values())
    for run in runs:
        run()
    ranked = by_speed(len(runs), lambda i: bench.seconds(runs[i]))
    names = tuple(candidates)
    return [(names[i], seconds * 1e6) for seconds, i in ranked]


def _path(topic: str, names: tuple[str, ...], key: Hashable, versions: str, card: str) -> Path:
    place = re.sub(r"[^A-Za-z0-9.]+", "-", f"{card}-{versions}")
    digest = hashlib.sha256(repr((sorted(names), key)).encode()).hexdigest()[:20]
    return cache_directory() / "choice" / topic / place / f"{digest}.json"


def _save(path: Path, topic: str, key: Hashable, times: list[tuple[str, float]]) -> None:
    row = {"topic": topic, "key": repr(key), "choice": times[0][0], "microseconds": dict(times)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(row, file)
    os.replace(file.name, path)
