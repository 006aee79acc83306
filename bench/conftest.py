"""What the suites share: the sitting (a card and its ceilings), and the ops' own tests first."""

import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench import harness
from bench.harness import CLOCK, ROUNDS, Case, Ceilings, Unsupported
from surogate.device import Device, choose_device
from surogate.kernels.attention_plans import release_scratch
from surogate.train import stream_of

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench")
    group.addoption("--commit", help="what is measured, where git cannot tell: a copy of the tree")
    group.addoption(
        "--skip-op-tests", action="store_true", help="measure ops without running their tests first"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measures, though the settings of the tests switch benchmarks off."""
    config.option.benchmark_skip = config.option.benchmark_disable = False
    # What failed before it was measured has said so already.
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole steps first, while this process holds no memory of the card."""
    items.sort(key=lambda item: item.path.stem != "test_steps")


@pytest.fixture(scope="session")
def commit(request: pytest.FixtureRequest) -> str:
    """The commit that is measured; "-dirty" where files differ from it."""
    given = request.config.getoption("--commit")
    if given:
        return given
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


class Sitting(NamedTuple):
    """A card, its rates now, and what every result of the sitting says."""

    device: Device
    ceilings: Ceilings
    facts: dict[str, Any]


@pytest.fixture(scope="session")
def sitting(commit: str) -> Iterator[Sitting]:
    """The card that the ops run on, on a stream of their own. UserError when there is none."""
    device = choose_device("cuda")
    with stream_of(device):
        ceilings = harness.measure_ceilings()
        _release(device)
        rates = {"copy": ceilings.copy, "matmul": ceilings.matmul}
        yield Sitting(device, ceilings, {**harness.facts(), "commit": commit, "ceilings": rates})


@pytest.fixture(scope="session")
def broken_ops(request: pytest.FixtureRequest) -> set[str]:
    """Of the ops to be measured, those whose own tests fail on this card: all are run first, in one
    process.
    """
    if request.config.getoption("--skip-op-tests"):
        return set()
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    ops = {str(_parameters(item)["op"]) for item in items if "op" in _parameters(item)}
    found = run_op_tests(sorted(ops))
    if found.returncode not in (0, 1):
        pytest.exit(f"the ops' own tests did not run: {found.stdout[-2000:]}{found.stderr[-2000:]}")
    failed = r"^(?:FAILED|ERROR) tests/kernels/(?:test_)?(\w+)[./]"
    return set(re.findall(failed, found.stdout, re.M))


def own_tests(op: str) -> Path:
    """The file, or the folder, of an op's own tests."""
    file = ROOT / "tests/kernels" / f"test_{op}.py"
    return file if file.exists() else file.parent / op


def run_op_tests(ops: list[str]) -> "subprocess.CompletedProcess[str]":
    """The tests of these ops that need a card, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [str(own_tests(op).relative_to(ROOT)) for op in ops]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture
def measure(benchmark: Any, sitting: Sitting, broken_ops: set[str]) -> Iterator[Callable]:
    """Measures a case of an op. The rounds are replays of a CUDA graph, timed by the card."""

    def run(op: str, case: Case, **info: Any) -> None:
        if op in broken_ops:
            pytest.fail(f"{own_tests(op).relative_to(ROOT)} fails on this card")
        try:
            call = case.build()
        except Unsupported as error:
            pytest.skip(str(error))
        seconds = harness.captured(call)
        benchmark.pedantic(lambda: CLOCK.advance(seconds()), rounds=ROUNDS)
        benchmark.extra_info.update(
            op=op,
            case=case.name,
            **info,
            **harness.speed(case, benchmark.stats["median"], sitting.ceilings),
            **sitting.facts,
        )

    yield run
    _release(sitting.device)


def _release(device: Device) -> None:
    """Gives back what a case held, so that the next finds the card empty."""
    gc.collect()
    release_scratch()
    device.library.get_default_memory_pool().free_all_blocks()
