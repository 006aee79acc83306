"""docs/adding-a-model.md is true: its code runs, and the model that it adds learns."""

import re
from pathlib import Path

import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.batch import batch_of

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


@pytest.fixture(scope="module")
def page() -> dict:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_page_trains_its_model(page):
    losses = page["losses"]
    assert losses[0] == pytest.approx(np.log(page["VOCAB"]), rel=0.1)
    assert losses[-1] < 0.2 * losses[0]


def test_the_derived_gradient_is_the_slope_of_the_loss(page):
    params = tree.map(lambda x: x.astype(np.float64), page["init"](1))
    rng = np.random.default_rng(0)
    batch = batch_of(rng.integers(0, page["VOCAB"], 20).astype(np.int32), [12, 8])
    settings = {"batch": batch, "table": page["table"]}
    pair = page["vjp"](page["loss"])
    _, res = pair.fwd(params, **settings)
    grads = pair.bwd(res, np.float64(1))
    direction = tree.map(lambda x: rng.standard_normal(x.shape), params)
    size = 1e-5

    def at(factor: float) -> float:
        moved = tree.map(lambda p, d: p + factor * size * d, params, direction)
        return float(pair.fwd(moved, **settings)[0])

    slope = (at(1) - at(-1)) / (2 * size)
    predicted = sum(
        float((g * d).sum())
        for g, d in zip(tree.leaves(grads), tree.leaves(direction), strict=True)
    )
    assert predicted == pytest.approx(slope, rel=1e-6)
