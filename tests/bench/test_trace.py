"""What a trace of a step says, of made-up kernels."""

from bench.profile_table import by_kind, durations
from bench.trace import Ran, idle, last_step, write

RAN = [
    Ran("void rmsnorm_fwd<float>(float*)", 0, 500),
    Ran("nvjet_sm90", 2_000, 3_000),
    Ran("nvjet_sm90", 2_500, 2_700),  # on another stream, inside the first
    Ran("void swiglu_fwd<float>(float*)", 3_400, 4_000),
]


def test_the_last_step_is_what_began_within_it():
    assert last_step(RAN[::-1], 2e-6) == RAN[1:]


def test_idle_time_is_between_what_runs_at_all():
    assert idle(RAN[1:]) == 400
    assert idle(RAN) == 1_500 + 400


def test_a_trace_is_read_as_a_profile_is(tmp_path):
    write(tmp_path / "step.csv", RAN)
    found = {
        group.name: (group.us, group.count) for group in by_kind(durations(tmp_path / "step.csv"))
    }
    assert found == {"products": (1.2, 2), "activation": (0.6, 1), "norms": (0.5, 1)}
