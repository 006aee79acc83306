"""Choosing among implementations: with counted runs and a clock that the test winds."""

import json
from collections.abc import Callable

import pytest

from surogate.kernels import choice
from surogate.kernels.choice import Bench, choose


class Workshop:
    """Candidates that take the time the test says, and what was run and timed."""

    def __init__(self, seconds: dict[str, float], card: str = "NVIDIA H200", capturing=False):
        self.seconds, self.now = seconds, ""
        self.runs: list[str] = []
        self.timed: list[str] = []
        self.bench = Bench(lambda: card, lambda: capturing, self._time)

    def candidates(self) -> dict[str, Callable[[], object]]:
        def run(name: str) -> Callable[[], object]:
            def record() -> None:
                self.now = name
                self.runs.append(name)

            return record

        return {name: run(name) for name in self.seconds}

    def _time(self, run: Callable[[], object]) -> float:
        run()
        self.timed.append(self.now)
        return self.seconds[self.now]

    def choose(self, topic="attention", key=(4, 8), versions="cudnn-9.19") -> str:
        return choose(topic, self.candidates(), key=key, versions=versions, bench=self.bench)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path))
    choice.forget()
    yield tmp_path
    choice.forget()


@pytest.mark.parametrize("fastest", ["mma", "cudnn", "third"])
def test_the_fastest_wins(fastest):
    seconds = {"mma": 2.0, "cudnn": 3.0, "third": 4.0} | {fastest: 1.0}
    shop = Workshop(seconds)
    assert shop.choose() == fastest
    assert shop.runs[:3] == ["mma", "cudnn", "third"] and shop.timed[0] == "mma", "warm-up first"


def test_measured_once_per_process_and_kept_for_the_next(cache):
    shop = Workshop({"mma": 2.0, "cudnn": 1.0})
    assert shop.choose() == "cudnn"
    runs = len(shop.runs)
    assert shop.choose() == "cudnn" and len(shop.runs) == runs
    choice.forget()
    later = Workshop({"mma": 1.0, "cudnn": 2.0})  # today the other one is faster
    assert later.choose() == "cudnn" and later.runs == []
    [path] = cache.rglob("*.json")
    assert path.parent == cache / "choice" / "attention" / "NVIDIA-H200-cudnn-9.19"
    row = json.loads(path.read_text())
    assert row["key"] == "(4, 8)" and row["microseconds"] == {"cudnn": 1e6, "mma": 2e6}


@pytest.mark.parametrize(
    "change", [{"topic": "norm"}, {"key": (4, 9)}, {"versions": "cudnn-9.20"}, {"card": "L4"}]
)
def test_another_problem_is_measured_again(change):
    Workshop({"mma": 2.0, "cudnn": 1.0}).choose()
    card = change.pop("card", "NVIDIA H200")
    other = Workshop({"mma": 1.0, "cudnn": 2.0}, card)
    assert other.choose(**change) == "mma"


def test_other_candidates_are_measured_again():
    Workshop({"mma": 2.0, "cudnn": 1.0}).choose()
    assert Workshop({"mma": 2.0, "cudnn": 1.0, "third": 0.5}).choose() == "third"


def test_the_order_of_candidates_does_not_matter():
    Workshop({"mma": 2.0, "cudnn": 1.0}).choose()
    choice.forget()
    other = Workshop({"cudnn": 2.0, "mma": 1.0})
    assert other.choose() == "cudnn" and other.runs == []


def test_agrees_with_a_process_that_was_first(monkeypatch):
    """Both find nothing on disk; the other one writes while this one measures."""
    other = Workshop({"mma": 1.0, "cudnn": 2.0})
    measure = choice._measure

    def meanwhile(candidates, bench):
        monkeypatch.setattr(choice, "_measure", measure)
        assert other.choose() == "mma"
        choice.forget()
        return measure(candidates, bench)

    monkeypatch.setattr(choice, "_measure", meanwhile)
    assert Workshop({"mma": 2.0, "cudnn": 1.0}).choose() == "mma"


def test_one_candidate_is_not_measured(cache):
    shop = Workshop({"mma": 1.0}, capturing=True)
    assert shop.choose() == "mma" and shop.runs == [] and not list(cache.rglob("*.json"))


def test_does_not_measure_while_capturing(cache):
    shop = Workshop({"mma": 2.0, "cudnn": 1.0}, capturing=True)
    with pytest.raises(RuntimeError, match=r"first attention of \(4, 8\) while its stream"):
        shop.choose()
    assert shop.runs == [] and not list(cache.rglob("*.json"))
    assert Workshop(shop.seconds).choose() == "cudnn"
    choice.forget()
    assert shop.choose() == "cudnn", "what is known may be looked up"


def test_a_failing_candidate_is_heard(cache):
    shop = Workshop({"mma": 2.0, "cudnn": 1.0})
    candidates = shop.candidates() | {"cudnn": lambda: 1 // 0}
    with pytest.raises(ZeroDivisionError):
        choose("attention", candidates, key=1, versions="", bench=shop.bench)
    assert not list(cache.rglob("*.json"))


def test_needs_a_candidate():
    with pytest.raises(ValueError, match="at least one candidate"):
        Workshop({}).choose()


@pytest.mark.gpu
def test_on_a_card():
    import cupy

    small, large = cupy.zeros(1 << 10, "f4"), cupy.zeros(1 << 28, "f4")
    candidates = {"large": lambda: large.fill(1), "small": lambda: small.fill(1)}
    with cupy.cuda.Stream(non_blocking=True):
        assert choose("fill", candidates, key="sizes", versions=cupy.__version__) == "small"


def test_by_speed_takes_medians_of_finalists_and_skips_what_cannot_run():
    # 1 is fast at first and slow from then on, 2 never runs; 7 and 8 are no finalists.
    times = {i: [float(i)] for i in range(9)} | {0: [6.5], 1: [1.0, 1.0, 9.0], 2: [None]}

    def measure(index):
        left = times[index]
        return left.pop(0) if len(left) > 1 else left[0]

    ranked = choice.by_speed(9, measure)
    assert [index for _, index in ranked] == [3, 4, 5, 6, 0, 1, 7, 8]


def test_by_speed_ranks_finalists_by_a_closer_look_alone():
    closely = {0: 3.0, 1: 1.0, 2: None, 3: 2.0}.get
    assert choice.by_speed(4, float, closely) == [(1.0, 1), (2.0, 3), (3.0, 0)]
