"""Every kernel of a whole step as it is trained: from CUDA graphs, on a card that is warm and busy.

    python -m bench.trace qwen2.5-1.5b full --rows 32 --length 1024 --out step.csv

Nsight Compute runs kernels one at a time, with pauses between them. Here the clock is that of
training, which power bounds, and what lies between kernels is seen too. Kernels are recorded by
CUPTI through torch's profiler, so that torch with CUDA is needed. ``bench.profile_table`` and
``bench.report`` read the file.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.profile_table import METRIC
from bench.rows import Row, parser
from bench.steps import batches, build_step, timed_steps
from surogate.device import choose_device
from surogate.models.registry import lookup
from surogate.train import stream_of


class Ran(NamedTuple):
    """A kernel, or a copy, from ``begin`` to ``end``, in nanoseconds."""

    name: str
    begin: int
    end: int


def last_step(ran: Sequence[Ran], seconds: float) -> list[Ran]:
    """Those of the last ``seconds`` before the end of the last one."""
    end = max(each.end for each in ran)
    return sorted(
        (each for each in ran if each.begin >= end - seconds * 1e9), key=lambda x: x.begin
    )


def idle(ran: Sequence[Ran]) -> int:
    """Nanoseconds in which nothing ran, between the first and the last of what began in order."""
    gaps, end = 0, ran[0].begin
    for each in ran:
        gaps += max(0, each.begin - end)
        end = max(end, each.end)
    return gaps


def write(path: Path, ran: Sequence[Ran]) -> None:
    """A line for each, as Nsight Compute writes them."""
    with path.open("w", encoding="utf8", newline="") as file:
        rows = csv.writer(file, quoting=csv.QUOTE_ALL)
        rows.writerow(["Kernel Name", "Metric Name", "Metric Unit", "Metric Value"])
        rows.writerows([each.name, METRIC, "ns", each.end - each.begin] for each in ran)


def traced(row: Row) -> tuple[list[Ran], float]:
    """What ran in a step after those that warm up, and its seconds."""
    # From a checkout, libraries would take our folder kernels/ for the package of that name.
    modules: dict[str, Any] = sys.modules
    modules.setdefault("kernels", None)
    from torch.profiler import ProfilerActivity, profile

    device = choose_device("cuda")
    with stream_of(device):
        step, micros = build_step(row, device, graphs=True), batches(lookup(row.model), row)
        timed_steps(step, micros, 0)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            seconds, _ = timed_steps(step, micros, 1)
    events: Any = found.profiler
    ran = [
        Ran(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    ]
    return last_step(ran, seconds[-1]), seconds[-1]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--out", type=Path, required=True, help="CSV file")
    args = made.parse_args()
    row = Row.of(args)
    ran, seconds = traced(row)
    write(args.out, ran)
    print(
        f"{row.name}: {seconds * 1e3:.2f} ms, {len(ran)} kernels and copies, "
        f"{idle(ran) / 1e6:.2f} ms with none of them"
    )


if __name__ == "__main__":
    main()
