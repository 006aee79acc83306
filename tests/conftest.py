"""Fixtures of all tests: fresh memory is poisoned, and ``device`` says where an op runs."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# pytest --hypothesis-profile thorough
settings.register_profile("thorough", max_examples=20_000)

# From a checkout, transformers would take our folder kernels/ for the package of that name.
modules: dict[str, Any] = sys.modules
modules.setdefault("kernels", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def has_card() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # CuPy raises its own types for a missing driver; any of them means no card
        return False


HAS_CARD = has_card()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CARD:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that an op allocates starts as NaN, so what a kernel forgets to write shows."""
    from surogate.kernels.arrays import Backend

    monkeypatch.setattr(Backend, "poison", True)


@pytest.fixture(params=["host", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on the host version, on the kernel under emulation, and on a card if there is
    one.
    """
    if request.param != "emulated":
        yield request.param
        return
    from tests.emulator.launch import emulated

    with emulated():
        yield request.param
