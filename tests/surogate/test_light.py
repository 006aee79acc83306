"""The share of the speed of light: by the formula, and never above 100 %."""

import pytest

from surogate import light
from surogate.config import load_config
from surogate.device import choose_device
from surogate.light import Light
from surogate.models.config import from_hf
from surogate.models.flops import training_flops
from tests.models.test_config import tiny
from tests.surogate.runs import write_config

RATE = 1e9  # FLOP/s
STEP = {"tokens": 100, "cells": 1000}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A Light that measured RATE, and the seconds that a step takes at it."""
    monkeypatch.setattr(light, "product_rate", lambda device: RATE)
    config, model = load_config(write_config(tmp_path, recompute="none")), from_hf(tiny("llama"))
    flops = training_flops(model, **STEP, lora_rank=None, recompute="none").total
    return Light(choose_device("cpu"), model, config), flops / RATE


def test_share_is_operations_over_rate_and_seconds(measured):
    found, seconds = measured
    assert found.share(**STEP, seconds=4 * seconds) == pytest.approx(25)
    assert found.rate == RATE


def test_a_step_that_beats_the_rate_raises_it(measured):
    found, seconds = measured
    assert found.share(**STEP, seconds=seconds / 2) == 100
    assert found.rate == pytest.approx(2 * RATE)
    assert found.share(**STEP, seconds=seconds) == pytest.approx(50)
    assert found.share(**STEP, seconds=seconds / 3) == 100
