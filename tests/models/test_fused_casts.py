"""Casts by the kernels that make what is cast: a whole step, bit for bit as with casts apart."""

import contextlib
from typing import Any

import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.arrays import on_device
from surogate.kernels.batch import batch_of
from surogate.kernels.fp8 import Cast
from surogate.models.recipe import Fp8Options, Fp8Recipe
from surogate.models.walk import CARD
from surogate.step import TrainStep
from tests.emulator.launch import emulated
from tests.models.test_memory import ALL, TWO, step_of, work_of
from tests.oracle import same_bits

TOKENS, LONGEST = 32, 16


def run(targets: tuple[str, ...], recompute: str) -> tuple[TrainStep, list[Any]]:
    """Two steps, the first of which calibrates, and an evaluation: the step, and what it gave."""
    work = work_of(TWO, targets, CARD, recompute, None, Fp8Options())
    widen = bool(targets) and on_device(np.empty(0))
    step = step_of(work._replace(tokens=TOKENS, longest=LONGEST, widen=widen))
    step._ready = False
    random = np.random.default_rng(0)
    found: list[Any] = []
    for _ in range(2):
        tokens = random.integers(0, TWO.vocab, TOKENS).astype(np.int32)
        batch = batch_of(tokens, [LONGEST] * (TOKENS // LONGEST))
        step.micro(batch)
        found += [leaf.copy() for leaf in tree.leaves(step.grads)]
        found.append(np.array(step.update(0.01).result().loss))
    found.append(step.logprobs(batch))
    return step, found


@pytest.mark.parametrize("where", [contextlib.nullcontext, emulated], ids=["host", "emulated"])
@pytest.mark.parametrize(
    "targets,recompute,casts",
    [  # of a layer: what a training pass casts in its kernels
        (ALL, "none", 4),  # for qkv, gate and up, down, and backward for gate and up
        (ALL, "block", 6),  # qkv, gate and up once more
        ((), "none", 0),  # products for dW take transposed codes
        ((), "block", 3),  # the first pass, whose codes go no further
    ],
)
def test_a_step_is_that_of_casts_apart(monkeypatch, targets, recompute, casts, where):
    begin, made = Cast.begin, []

    def counted(*args: Any, **settings: Any) -> Cast | None:
        cast = begin(*args, **settings)
        made.append(cast is not None)
        return cast

    with where():
        monkeypatch.setattr(Cast, "begin", counted)
        step, found = run(targets, recompute)
        monkeypatch.setattr(Cast, "begin", lambda *args, **settings: None)
        apart, want = run(targets, recompute)
    of_evaluation = 3
    assert sum(made) == TWO.layers * (2 * casts + of_evaluation)
    for got, exact in zip(found, want, strict=True):
        same_bits(got, exact)
    assert isinstance(step.recipe, Fp8Recipe) and isinstance(apart.recipe, Fp8Recipe)
    same_bits(step.recipe.state.history, apart.recipe.state.history)
    assert (step.recipe.state.history[0, 0::3] > 0).all()  # of every input
