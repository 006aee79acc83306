"""Every distinct matrix product of the published models: its share of the product rate.

pytest bench/test_gemm.py -m gpu --benchmark-json gemm.json      # -k 'Qwen3-8B' for some
"""

from collections.abc import Callable

import pytest

from bench.bench_matmul import shape_cases, shapes
from bench.harness import CLOCK, Case

SHAPES = {shape.name: shape for shape in shapes()}
PRODUCTS = ("y", "dx", "dweight")


@pytest.mark.gpu
@pytest.mark.benchmark(group="gemm", timer=CLOCK.read)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("op", ["matmul"])
def test_gemm(op: str, name: str, product: str, measure: Callable) -> None:
    shape = SHAPES[name]
    cases: dict[str, Case] = dict(zip(PRODUCTS, shape_cases(shape), strict=True))
    measure(op, cases[product], shape=shape._asdict(), product=product)
