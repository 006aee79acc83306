"""A step whose adapted weights lie with their adapters: as the plain step, but for rounding."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.widened import Widened
from surogate.models.names import layout
from surogate.models.recipe import Fp8Options, Fp8Recipe, Recipe, Scope, Storage
from surogate.models.stored_recipe import QuantizedRecipe
from surogate.models.widen import making_room
from surogate.step import TrainStep
from tests.oracle import same_bits
from tests.surogate.test_step import batches, folders, loaded, train_step

__all__ = ["folders"]  # a fixture


def run(step: TrainStep) -> list[float]:
    losses = []
    for seed in range(3):
        for batch in batches(2, seed=seed):
            step.micro(batch)
        losses.append(step.update(0.02).result().loss)
    return losses


@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
def test_updates_equal_those_of_the_plain_step(folders, recompute):
    model = loaded(folders("qwen3"), lora=True)
    plain = train_step(model, recompute=recompute)
    wide = train_step(model, recompute=recompute, widen=True)
    assert run(wide) == pytest.approx(run(plain), rel=1e-5)
    for got, want in zip(tree.leaves(wide.adapter), tree.leaves(plain.adapter), strict=True):
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    evaluated = [step.logprobs(batches(1)[0]).sum() for step in (wide, plain)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


def test_the_model_is_that_which_was_given_and_holds_no_adapter(folders):
    model = loaded(folders("qwen3"), lora=True)
    step = train_step(model, widen=True)
    run(step)
    for got, want in zip(tree.leaves(step.model), tree.leaves(model.params), strict=True):
        assert not isinstance(got, Widened)
        same_bits(got, want)


def test_a_written_adapter_counts_after_a_refresh(folders):
    model = loaded(folders("qwen3"), lora=True)
    (batch,) = batches(1)
    step, other = (train_step(model, widen=True) for _ in range(2))
    before = step.logprobs(batch)
    run(other)
    for leaf, trained in zip(tree.leaves(step.adapter), tree.leaves(other.adapter), strict=True):
        leaf[...] = trained
    same_bits(step.logprobs(batch), before)
    step.refresh()
    same_bits(step.logprobs(batch), other.logprobs(batch))
    assert not np.array_equal(step.logprobs(batch), before)


def test_without_adapters_there_is_nothing_to_widen(folders):
    model = loaded(folders("qwen3"), lora=False)
    wide, plain = train_step(model, widen=True), train_step(model)
    assert run(wide) == run(plain)


@pytest.mark.parametrize("stored", [None, Storage("nf4", 64)], ids=["plain", "nf4"])
def test_bf16_evaluations_of_a_recipe_equal_those_of_bf16(folders, monkeypatch, stored):
    """With the adapter as it is after updates, and the weights of before them."""
    monkeypatch.setattr("surogate.models.recipe.on_device", lambda x: True)  # room for adapters
    model = loaded(folders("qwen3"), lora=True)
    config, lora = model.settings

    def step_of(recipe: Recipe, **options: Any) -> TrainStep:
        room = making_room(lambda path, x: x.copy(), config, lora)
        put = recipe.frozen(lambda path, x: x.copy(), room, lora)
        made = tree.map(lambda field, x: put(field.path, x), layout(config), model.params)
        there = model._replace(params=made)
        return train_step(there, recipe=recipe, widen=True, **options)

    def below() -> Recipe:
        return Recipe() if stored is None else QuantizedRecipe(config, Scope(), stored)

    def fp8() -> Recipe:
        return Fp8Recipe(config, Fp8Options(scaling="tensor"), storing=below(), keep=True)

    step = step_of(fp8(), plain_evaluation=True)
    same, plain = step_of(fp8()), step_of(below())
    (batch,) = batches(1)
    for one in (step, same):
        run(one)
    for leaf, trained in zip(tree.leaves(plain.adapter), tree.leaves(step.adapter), strict=True):
        leaf[...] = trained
    plain.refresh()
    same_bits(step.logprobs(batch), plain.logprobs(batch))
    assert not np.array_equal(same.logprobs(batch), step.logprobs(batch))
    assert run(step) == run(same)
