"""Where the time of a step goes: an Nsight Compute CSV of durations, by kind and by kernel.

    ncu --clock-control none --profile-from-start off --metrics gpu__time_duration.sum --csv \\
        python -m bench.steps qwen3-0.6b lora --profile > qwen3-0.6b-lora.csv
    python -m bench.profile_table qwen3-0.6b-lora.csv

``python -m bench.report`` takes such files too.
"""

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from surogate.errors import UserError

METRIC = "gpu__time_duration.sum"
UNITS = {"n": 1e-3, "u": 1.0, "m": 1e3, "s": 1e6}  # microseconds; ncu writes "us" or "usecond"
# The first pattern found in a kernel's name decides. Libraries' names come last: theirs are long.
KINDS = {
    "attention": r"attention|sdpa|flash|fmha",
    "rotary": r"rope",
    "norms": r"rmsnorm|sum_partials",
    "activation": r"swiglu",
    "loss": r"cross_entropy|nll_total",
    "optimizer": r"adamw|grad_norm|copy_blocks",
    "products": r"gemm|nvjet|cutlass|xmma|splitk|cublas|block_diagonal|take_diagonal|column_sum",
}
OTHER = "other"


class Group(NamedTuple):
    """Kernels of one kind, or of one name: microseconds in all, launches, share of everything."""

    name: str
    us: float
    count: int  # type: ignore[assignment]  # tuples have a method count
    share: float


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    lower = kernel.lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, lower)), OTHER)


def durations(path: Path) -> dict[str, list[float]]:
    """Microseconds of each launch of each kernel. Raises UserError for a file without any."""
    found: dict[str, list[float]] = defaultdict(list)
    with path.open(encoding="utf8") as file:
        rows = csv.DictReader(line for line in file if line.startswith('"'))
        for row in rows:
            if row.get("Metric Name") == METRIC:
                name = re.sub(r"\(.*|<unnamed>::|^void ", "", row["Kernel Name"])
                microseconds = float(row["Metric Value"].replace(",", ""))
                found[name].append(microseconds * UNITS[row["Metric Unit"][0]])
    if not found:
        raise UserError(f"{path}: holds no {METRIC}; write it with ncu --metrics {METRIC} --csv")
    return found


def grouped(times: dict[str, list[float]], keys: Iterable[str]) -> list[Group]:
    """Sums of the kernels that share a key, the longest first; ``keys`` are one a kernel."""
    total: dict[str, list[float]] = defaultdict(list)
    for key, each in zip(keys, times.values(), strict=True):
        total[key] += each
    everything = sum(map(sum, times.values()))
    groups = [
        Group(name, sum(each), len(each), sum(each) / everything) for name, each in total.items()
    ]
    return sorted(groups, key=lambda group: -group.us)


def by_kind(times: dict[str, list[float]]) -> list[Group]:
    """Products, attention, norms and so on."""
    return grouped(times, map(kind_of, times))


def by_kernel(times: dict[str, list[float]]) -> list[Group]:
    """Each kernel."""
    return grouped(times, times)


def main() -> None:
    for name in sys.argv[1:]:
        try:
            times = durations(Path(name))
        except (UserError, OSError) as error:
            raise SystemExit(f"error: {error}") from None
        for groups in (by_kind(times), by_kernel(times)[:40]):
            print(f"{name}: {sum(map(sum, times.values())) / 1e3:.2f} ms")
            for group in groups:
                print(
                    f"{group.us:10.0f} us {group.share:6.1%} {group.count:5d} x "
                    f"{group.us / group.count:8.1f} {group.name[:80]}"
                )


if __name__ == "__main__":
    main()
