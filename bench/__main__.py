"""python -m bench [NAME ...]: every op's cases on this card, with this sitting's ceilings.

Prints a line a case and appends JSON lines to --json.
"""

import argparse
import gc
import importlib
import traceback
from pathlib import Path

from bench.harness import facts, measure_ceilings, report, write_json
from surogate.device import choose_device
from surogate.train import stream_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="ops, such as rmsnorm; all when none is given")
    parser.add_argument("--json", help="file to append the rows to")
    args = parser.parse_args()
    found = sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))
    device = choose_device("cuda")
    failed = []
    with stream_of(device):
        ceilings = measure_ceilings()
        print(f"{facts()}  copy {ceilings.copy / 1e12:.2f} TB/s  ", end="")
        print(f"bf16 products {ceilings.matmul / 1e12:.0f} TFLOP/s")
        for name in args.names or found:
            try:
                rows = report(importlib.import_module(f"bench.bench_{name}").cases(), ceilings)
            except Exception:  # one op's failure must not hide the others' numbers
                traceback.print_exc()
                failed.append(name)
                continue
            if args.json:
                write_json(args.json, [{"op": name, **row} for row in rows])
            gc.collect()
            device.library.get_default_memory_pool().free_all_blocks()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
