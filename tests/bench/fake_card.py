"""A pytest plugin that runs the suites of bench/ without a card: everything but the measurement.

Cases are not built; replays "take" the same three times in turn, and processes of steps give back
what is written here. Of the ops' own tests, one of rope fails. The plugin must not import surogate
before pytest has set up its checks.
"""

import dataclasses
import functools
import itertools
import subprocess
from typing import Any

import pytest

FACTS = {"card": "Test card", "versions": {"numpy": "2.0"}}
FAILING = "FAILED tests/kernels/test_rope.py::test_matches[cuda] - AssertionError\n1 failed\n"
TIMES = itertools.cycle([0.002, 0.001, 0.003])


class Library:
    """What a suite asks of the array library between two cases."""

    @staticmethod
    def get_default_memory_pool() -> Any:
        return Library

    @staticmethod
    def free_all_blocks() -> None:
        pass


def step(*arguments: str) -> dict[str, Any]:
    """What a process of bench.steps or bench.peers would print."""
    from bench.rows import Row, parser

    peer = arguments[0] == "bench.peers"
    row = Row.of(parser(None).parse_args(arguments[3 if peer else 1 :]))
    found = {
        **row.speed([0.5, 0.3, 0.4] if peer else [0.25, 0.15, 0.2]),
        "memory_gib": 8.0,
        **FACTS,
    }
    return found if peer else {**found, "speed_of_light": 0.5, "planned_gib": 7.5, "host_ms": 0.25}


def pytest_configure() -> None:
    from bench import conftest, harness
    from surogate import device

    card = device.Device("cpu", "Test card", Library, device.COMPUTE["cpu"])
    conftest.choose_device = lambda wanted: card
    harness.measure_ceilings = lambda: harness.Ceilings(copy=4e12, matmul=8e14)
    harness.facts = lambda: FACTS
    conftest.run_op_tests = lambda ops: subprocess.CompletedProcess(ops, 1, FAILING, "")
    harness.captured = lambda run: lambda: next(TIMES)
    harness.copy_seconds = functools.cache(lambda size: size / 3e12)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def idle(case: Any) -> Any:
        return dataclasses.replace(case, build=lambda: lambda: None)

    modules: set[Any] = {item.module for item in items if isinstance(item, pytest.Function)}
    for module in modules:
        if module.__name__.endswith("test_ops"):
            module.CASES = {key: idle(case) for key, case in module.CASES.items()}
        elif module.__name__.endswith("test_gemm"):
            cases = module.shape_cases
            module.shape_cases = lambda shape, cases=cases: map(idle, cases(shape))
        else:
            module.run = step
