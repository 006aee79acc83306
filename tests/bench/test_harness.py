"""What a case is held against: a copy of exactly as many bytes, timed as cases are, and once."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench import harness
from bench.inputs import COLD

SIZE = 12_582_918  # no power of two, nor a multiple of 16


@pytest.fixture
def copies(monkeypatch):
    """Sizes of copies, in place of a card that takes a second for each."""
    sizes = []

    def array(size, dtype):
        def copy(source, count, stream):
            assert source.size >= count and stream == "this stream"
            sizes.append((size, count))

        return SimpleNamespace(data=SimpleNamespace(size=size, copy_from_device_async=copy))

    def captured(run):
        for _ in range(2 * -(-COLD // SIZE)):
            run()
        return lambda: 1.0

    stream = SimpleNamespace(get_current_stream=lambda: "this stream")
    fake = SimpleNamespace(ones=array, empty=array, uint8=np.uint8, cuda=stream)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(harness, "captured", captured)
    harness.copy_seconds.cache_clear()
    yield sizes
    harness.copy_seconds.cache_clear()


def test_a_copy_moves_as_many_bytes_and_is_timed_once(copies):
    case = harness.Case("moves", lambda: lambda: None, bytes=SIZE)
    ceilings = harness.Ceilings(copy=1e9, matmul=1e12)
    found = [harness.speed(case, seconds, ceilings)["equal_copy"] for seconds in (2.0, 4.0)]
    assert found == [0.5, 0.25]
    assert set(copies) == {(SIZE // 2, SIZE // 2)}
    assert len(copies) == 2 * -(-COLD // SIZE)


def test_what_multiplies_is_held_against_no_copy(copies):
    case = harness.Case("multiplies", lambda: lambda: None, flops=10**9)
    found = harness.speed(case, 2.0, harness.Ceilings(copy=1e9, matmul=1e12))
    assert found == {"flops": 10**9, "rate": 5e8, "share": 5e-4}
    assert not copies
