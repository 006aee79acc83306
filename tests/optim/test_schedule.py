"""The learning rate: exact tables, phases that join, and settings that cannot be."""

import math
from dataclasses import replace

import pytest

from surogate.optim.schedule import Schedule


def table(schedule: Schedule) -> list[float]:
    return [schedule.at(step) for step in range(1, schedule.total_steps + 1)]


def test_linear_without_warmup_steps_down_by_a_tenth():
    """A run that resumes at step 6 of 10 goes on at half the peak."""
    got = table(Schedule(1e-5, 10))
    assert got == pytest.approx([1e-5 * (10 - k) / 10 for k in range(10)], rel=1e-15, abs=0)
    assert got[5:] == pytest.approx([5e-6, 4e-6, 3e-6, 2e-6, 1e-6], rel=1e-15, abs=0)


def root(x: float) -> float:
    return 1 - math.sqrt(x)


COSINE = [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]


@pytest.mark.parametrize(
    "settings,want",
    [
        (dict(total_steps=6, warmup_steps=2), [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (dict(total_steps=4, final_fraction=0.5), [1, 0.875, 0.75, 0.625]),
        (dict(total_steps=3, warmup_steps=3), [1 / 3, 2 / 3, 1]),
        (dict(total_steps=4, kind="cosine"), COSINE),
        (
            dict(total_steps=5, kind="cosine", warmup_steps=1, final_fraction=0.2),
            [1] + [0.2 + 0.8 * c for c in COSINE],
        ),
        (dict(total_steps=3, kind="constant"), [1, 1, 1]),
        (dict(total_steps=4, kind="constant", warmup_steps=2, final_fraction=0.5), [0.5, 1, 1, 1]),
        (
            dict(total_steps=8, kind="wsd", wsd_decay_fraction=0.5, warmup_steps=2),
            [0.5, 1, 1, 1, 1, root(1 / 4), root(2 / 4), root(3 / 4)],
        ),
        (
            dict(total_steps=4, kind="wsd", wsd_decay_fraction=0.5, final_fraction=0.25),
            [1, 1, 1, 1 - 0.75 * math.sqrt(0.5)],
        ),
        (dict(total_steps=3, kind="wsd", wsd_decay_fraction=0.0), [1, 1, 1]),
        (
            dict(total_steps=6, kind="constant", cooldown_steps=4, final_fraction=0.1),
            [1, 1, 1] + [1 - 0.9 * math.sqrt(k / 4) for k in (1, 2, 3)],
        ),
        (
            dict(total_steps=8, cooldown_steps=4),  # linear: half the peak is left where it starts
            [1, 0.875, 0.75, 0.625, 0.5, 0.25, 0.5 * root(0.5), 0.5 * root(0.75)],
        ),
    ],
)
def test_tables(settings, want):
    got = table(Schedule(peak=3.0, **settings))
    assert got == pytest.approx([3.0 * share for share in want], rel=1e-14, abs=0)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "wsd"])
@pytest.mark.parametrize("warmup,cooldown", [(0, 0), (10, 0), (0, 20), (10, 20), (10, 90)])
def test_rises_once_then_never_rises_and_never_wastes_a_step(kind, warmup, cooldown):
    schedule = Schedule(
        2e-4, 100, kind=kind, warmup_steps=warmup, cooldown_steps=cooldown, final_fraction=0.0
    )
    rates = table(schedule)
    top = max(warmup, 1) - 1
    assert rates[top] == pytest.approx(2e-4, rel=1e-15)
    assert all(a < b for a, b in zip(rates[:top], rates[1 : top + 1], strict=True))
    assert all(a >= b for a, b in zip(rates[top:], rates[top + 1 :], strict=False))
    assert min(rates) > 0


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_end_value_belongs_to_the_step_after_the_last(kind):
    """A schedule that is one step longer than its decay would reach final_fraction exactly."""
    long = Schedule(1.0, 1_000_000, kind=kind, final_fraction=0.1, wsd_decay_fraction=0.5)
    assert long.at(long.total_steps) == pytest.approx(0.1, abs=2e-6)
    assert long.at(long.total_steps) > 0.1


def test_equal_settings_are_equal_and_a_changed_one_is_not():
    schedule = Schedule(1e-4, 10)
    assert schedule == Schedule(1e-4, 10)
    assert schedule != replace(schedule, total_steps=11)


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(peak=-1e-4), "peak must be finite"),
        (dict(peak=math.nan), "peak must be finite"),
        (dict(peak=math.inf), "peak must be finite"),
        (dict(total_steps=0), "total_steps must be at least 1"),
        (dict(warmup_steps=-1), "warmup_steps must be at least 0"),
        (dict(cooldown_steps=-1), "cooldown_steps must be at least 0"),
        (dict(warmup_steps=11), "must fit into total_steps"),
        (dict(warmup_steps=6, cooldown_steps=5), r"cooldown_steps \(5\) must fit"),
        (dict(kind="wsd", wsd_decay_fraction=0.5, warmup_steps=6), r"wsd decay \(5\) must fit"),
        (dict(final_fraction=1.5), "final_fraction must be from 0 to 1"),
        (dict(wsd_decay_fraction=-0.1), "wsd_decay_fraction must be from 0 to 1"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"peak": 1e-4, "total_steps": 10, **settings})


@pytest.mark.parametrize("step", [0, -1, 11])
def test_steps_outside_the_run(step):
    with pytest.raises(ValueError, match="step must be from 1 to 10"):
        Schedule(1e-4, 10).at(step)
