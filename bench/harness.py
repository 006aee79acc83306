"""What a benchmark is (``Case``) and how it is timed on a card.

A case states the bytes it must move or the operations it must do; the harness reports the median
time and the share of the copy or matrix-product rate measured in the same sitting. Arguments are
rotated between buffers larger than the L2 cache by the cases themselves; timing uses CUDA events
around batches of calls.
"""

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One measured call: its name, the call, and the bytes or operations that it cannot avoid."""

    name: str
    run: Callable[[], Any]
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Ceilings:
    """Rates of this card in this sitting: copy in bytes/s, bf16 products in FLOP/s."""

    copy: float
    matmul: float


def time_call(run: Callable[[], Any], *, calls: int = 20, repeats: int = 7) -> float:
    """Median seconds of one call on the card, from events around ``calls`` calls."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        for _ in range(calls):
            run()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / calls)
    return statistics.median(times)


def time_captured(run: Callable[[], Any], *, calls: int = 10, repeats: int = 7) -> float:
    """Median seconds of one call inside a CUDA graph of ``calls`` calls: no launch cost of the
    host.
    """
    import cupy

    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.get_current_stream()  # the one that made the arguments
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            run()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(calls):
            run()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        times = []
        for _ in range(repeats):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / calls)
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Copies 2 GiB and multiplies 8192 x 8192 bf16 matrices of random numbers."""
    import cupy

    from surogate.kernels.arrays import BF16
    from surogate.kernels.matmul import matmul

    size = 2 << 30
    source, target = cupy.ones(size, cupy.uint8), cupy.empty(size, cupy.uint8)
    stream = cupy.cuda.get_current_stream()
    copy = time_call(lambda: target.data.copy_from_device_async(source.data, size, stream), calls=5)
    side = 8192
    a, b = (cupy.random.standard_normal((side, side), dtype="f4").astype(BF16) for _ in range(2))
    product = time_call(lambda: matmul(a, b, transpose_b=True), calls=5)
    return Ceilings(2 * size / copy, 2 * side**3 / product)


def report(cases: Iterable[Case], ceilings: Ceilings) -> list[dict[str, Any]]:
    """Times each case and prints a line for it."""
    rows = []
    for case in cases:
        seconds = time_captured(case.run)
        row: dict[str, Any] = {"name": case.name, "us": seconds * 1e6}
        if case.bytes:
            row |= {
                "TB/s": case.bytes / seconds / 1e12,
                "share": case.bytes / seconds / ceilings.copy,
            }
        if case.flops:
            row |= {
                "TFLOP/s": case.flops / seconds / 1e12,
                "share": case.flops / seconds / ceilings.matmul,
            }
        rows.append(row)
        shown = (
            f"{row['TB/s']:6.2f} TB/s" if case.bytes else f"{row.get('TFLOP/s', 0):6.0f} TFLOP/s"
        )
        print(f"{case.name:56s} {row['us']:9.1f} us {shown} {row.get('share', 0):6.1%}", flush=True)
    return rows


def facts() -> dict[str, Any]:
    """Card, versions and commit of a sitting."""
    import cupy

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return {"card": name, "cupy": cupy.__version__, "commit": commit}


def write_json(path: str, rows: list[dict[str, Any]]) -> None:
    """One JSON line a row, each with the facts of the sitting."""
    with open(path, "a", encoding="utf8") as file:
        for row in rows:
            file.write(json.dumps({**facts(), **row}) + "\n")
