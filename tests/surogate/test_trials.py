"""A trial of each kind (trials.py), for every day; the campaign of hundreds is run by hand."""

import random

import pytest

from tests.surogate.trials import KINDS, STEPS, Trial


@pytest.fixture(scope="module", params=["full", "lora"])
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    folder = tmp_path_factory.mktemp(request.param)
    return Trial(folder, lora=request.param == "lora", rng=random.Random(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_once_and_finished(trial, kind):
    """The run ends as if nothing had happened, whatever did."""
    trial.anew()
    trial.strike(kind)
    trial.finish()
    assert trial.out.joinpath(f"step_{STEPS:08d}").exists()


@pytest.mark.slow
def test_one_after_another(trial):
    """A run that is stopped again and again comes to the same end."""
    trial.anew()
    for kind in ("SIGKILL", "damage", "SIGTERM", "SIGKILL"):
        trial.strike(kind)
    trial.finish()
