"""Every op at telling shapes: its share of the copy rate or of the product rate.

pytest bench/test_ops.py -m gpu --benchmark-json ops.json      # -k rmsnorm_fwd for some
"""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness import CLOCK, Case

OPS = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
CASES: dict[tuple[str, str], Case] = {
    (op, case.name): case
    for op in OPS
    if op != "matmul"  # test_gemm.py
    for case in importlib.import_module(f"bench.bench_{op}").cases()
}


@pytest.mark.gpu
@pytest.mark.benchmark(group="ops", timer=CLOCK.read)
@pytest.mark.parametrize(("op", "name"), CASES)
def test_op(op: str, name: str, measure: Callable) -> None:
    measure(op, CASES[op, name])
