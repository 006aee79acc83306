"""Rows of training steps: command lines, the ideal time, and a whole measurement on the host."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench import rows as rows_module
from bench import steps
from bench.rows import RECIPES, ROWS, Row, parser
from surogate.device import choose_device
from surogate.kernels.arrays import BF16
from surogate.models.config import from_hf
from surogate.models.names import build
from surogate.models.recipe import Fp8Recipe, Nvfp4Recipe, Recipe
from surogate.models.registry import hf_config, lookup
from surogate.models.stored_recipe import QuantizedRecipe

TINY = from_hf(
    hf_config("Qwen3-0.6B")
    | dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_row_survives_its_command_line(row):
    assert Row.of(parser(None).parse_args(row.arguments())) == row
    lookup(row.model)


def test_rows_have_names_of_their_own():
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_its_class(recipe):
    made = steps.recipe_of(Row("tiny", "lora", recipe=recipe), TINY, choose_device("cpu"))
    others = {"bf16": Recipe, "nvfp4": Nvfp4Recipe}
    storages = ("nf4", "fp8_blocks", "nvfp4_blocks")
    stored = QuantizedRecipe if recipe in storages else Fp8Recipe
    assert type(made) is others.get(recipe, stored)


def test_lengths_fill_every_row():
    row = Row("Qwen3-0.6B", "lora", rows=3, length=500, documents=40)
    lengths = row.lengths(0)
    assert sum(lengths) == 1500 and set(np.cumsum(lengths)) >= {500, 1000, 1500}
    assert lengths == row.lengths(0) != row.lengths(1)
    assert Row("Qwen3-0.6B", "lora", rows=3, length=500).lengths(0) == [500] * 3


@pytest.mark.parametrize(
    ("row", "tokens_per_second"),
    [
        # From a count of the same work that shares no code with ours.
        (ROWS[0], 136_774),
        (ROWS[3], 123_198),
        (ROWS[7], 13_457),
    ],
    ids=lambda value: value.name if isinstance(value, Row) else "",
)
def test_ideal(row, tokens_per_second):
    assert row.tokens / row.ideal_seconds(lookup(row.model)) == pytest.approx(
        tokens_per_second, abs=0.5
    )


def test_short_documents_have_a_shorter_ideal():
    whole, packed = ROWS[0], dataclasses.replace(ROWS[0], documents=256)
    config = lookup(whole.model)
    assert packed.ideal_seconds(config) < 0.95 * whole.ideal_seconds(config)


class Queue:
    """A step whose calls wait when the card is far behind, as a full launch queue makes them."""

    def __init__(self):
        self.device, self.behind, self.now, self.calls = self, 0, 0.0, []

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now += 1.0  # what the card takes
        self.behind = 0

    def micro(self, batch):
        self._call(0.002)

    def update(self, lr):
        self._call(0.005)

    def _call(self, seconds):
        assert self.behind < 8, "this call would have waited for the card"
        self.behind += 1
        self.calls.append(seconds)
        self.now += seconds


def test_host_time_is_that_of_calls_that_wait_for_nothing(monkeypatch):
    step: Any = Queue()
    monkeypatch.setattr(steps, "time", step)
    micros: Any = [None] * 16
    assert steps.host_seconds(step, micros) == pytest.approx(16 * 0.002 + 0.005)
    assert len(step.calls) == steps.HOST_ROUNDS * (steps.HOST_MICROS + 1)


@pytest.fixture
def on_host(monkeypatch):
    """bench.steps with a small model, drawn by NumPy."""

    def random_model(config, device, dtype=BF16, put=lambda path, array: array):
        rng = np.random.default_rng(0)
        return build(
            config, lambda field: put(field.path, rng.standard_normal(field.shape).astype(dtype))
        )

    monkeypatch.setattr(steps, "random_model", random_model)
    monkeypatch.setattr(steps, "held_bytes", lambda device: 3 << 30)
    for module in (steps, rows_module):
        monkeypatch.setattr(module, "lookup", lambda name: TINY)
    return choose_device("cpu")


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_row_is_measured(mode, on_host):
    row = Row("tiny", mode, rows=2, accumulation=2, length=16, documents=5, steps=2, rank=2)
    found = steps.measure(row, on_host, graphs=False)
    assert len(found["seconds"]) == 2 and found["memory_gib"] == 3
    assert found["tokens_per_second"] == pytest.approx(64 / np.median(found["seconds"]))
    assert 0 < found["speed_of_light"] < 1 and 0 < found["ceiling"] < 1
    assert found["host_ms"] > 0 and found["planned_gib"] > 0
    assert np.isfinite(found["loss"]).all()
