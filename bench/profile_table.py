"""Sums an Nsight Compute CSV of durations by kernel: where the time of a step goes.

    ncu --clock-control none --profile-from-start off --metrics gpu__time_duration.sum --csv \\
        python -m bench.steps qwen3-0.6b lora --profile > ncu.csv
    python -m bench.profile_table ncu.csv
"""

import csv
import re
import sys
from collections import defaultdict


def main() -> None:
    with open(sys.argv[1], encoding="utf8") as file:
        lines = [line for line in file if line.startswith('"')]
    total: dict[str, list[float]] = defaultdict(list)
    for row in csv.DictReader(lines):
        if row["Metric Name"] != "gpu__time_duration.sum":
            continue
        name = re.sub(r"\(.*|<unnamed>::", "", row["Kernel Name"])
        scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
        total[name].append(float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]])
    everything = sum(map(sum, total.values()))
    print(f"{everything / 1e3:.2f} ms in {sum(map(len, total.values()))} kernels")
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:40]:
        spent = sum(times)
        print(
            f"{spent:10.0f} us {spent / everything:6.1%} {len(times):5d} x "
            f"{spent / len(times):8.1f} {name[:80]}"
        )


if __name__ == "__main__":
    main()
