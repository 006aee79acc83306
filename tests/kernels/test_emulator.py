"""Emulated kernels give what a card gives: the same assertions run on a card where there is one."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import BF16
from tests.emulator.launch import emulated
from tests.emulator.sample import Sample
from tests.kernels.test_emulator_faults import SOURCE as FAULTS
from tests.oracle import normal, same_bits, to_device, to_host

WARP = Sample(
    "warp",
    {
        "shuffle": [("float",), ("int",), ("bf16",), ("double",)],
        "vote": [()],
        "reduce": [()],
        "tiles": [("false",), ("true",)],
        "multiply": [()],
    },
)
MEMORY = Sample(
    "memory",
    {
        "pipeline": [()],
        "reverse": [("float",), ("bf16",)],
        "unwritten": [()],
        "through_table": [()],
        "rounded": [()],
        "atomics": [()],
        "integers": [()],
        "scalars": [("float",), ("bf16",)],
    },
)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulated() if request.param == "emulated" else contextlib.nullcontext():
        yield request.param


def run(
    machine: str,
    source: Sample,
    kernel: str,
    types: tuple[str, ...],
    grid: Any,
    block: Any,
    args: list[Any],
    **settings: Any,
) -> list[np.ndarray]:
    """Launches, and returns the arrays among the arguments as they are after it."""
    moved = [to_device(a, machine) if isinstance(a, np.ndarray) else a for a in args]
    source.launch(kernel, types, grid, block, moved, **settings)
    return [to_host(a) for a, b in zip(moved, args, strict=True) if isinstance(b, np.ndarray)]


@pytest.mark.parametrize("mask,lane", [(1, 0), (16, 31), (31, 7), (0, 40)])  # lanes count modulo 32
@pytest.mark.parametrize(
    "types,dtype",
    [("float", np.float32), ("int", np.int32), ("bf16", BF16), ("double", np.float64)],
)
def test_shuffles(types: str, dtype: Any, mask: int, lane: int, machine: str) -> None:
    x = np.arange(96).astype(dtype)
    args = [np.zeros_like(x), np.zeros_like(x), x, mask, lane]
    xored, read, _ = run(machine, WARP, "shuffle", (types,), 1, 96, args)
    lanes = np.arange(96)
    same_bits(xored, x[lanes ^ mask])
    same_bits(read, x[lanes // 32 * 32 + lane % 32])


def test_ballot(machine: str) -> None:
    x = np.random.default_rng(0).integers(-1, 2, 64).astype(np.int32)
    votes, _ = run(machine, WARP, "vote", (), 1, 64, [np.zeros(2, np.uint32), x])
    bits = (x.reshape(2, 32) > 0).astype(np.uint32)
    same_bits(votes, (bits << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32))


@pytest.mark.parametrize("grid,block", [(1, 32), ((2, 3, 2), (8, 4, 2)), (3, (32, 32))])
def test_barriers_and_indices(grid: Any, block: Any, machine: str) -> None:
    blocks, threads = int(np.prod(grid)), int(np.prod(block))
    x = np.random.default_rng(0).integers(-100, 100, (blocks, threads)).astype(np.float32)
    args = [np.zeros_like(x), np.zeros_like(x), x]
    total, most, _ = run(machine, WARP, "reduce", (), grid, block, args)
    same_bits(total, np.broadcast_to(x.sum(1, keepdims=True), x.shape))
    same_bits(most, np.broadcast_to(x.max(1, keepdims=True), x.shape))


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed: bool, machine: str) -> None:
    matrix = np.arange(256, dtype=np.uint16).reshape(32, 8)
    types = (str(transposed).lower(),)
    words, _ = run(machine, WARP, "tiles", types, 1, 32, [np.zeros((32, 4), np.uint32), matrix])
    tiles = matrix.reshape(4, 8, 8)
    tiles = tiles.transpose(0, 2, 1) if transposed else tiles
    # Lane l holds elements 2 * (l % 4) and the next of row l // 4.
    want = tiles.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 8)
    same_bits(words.view(np.uint16), want)


def test_matrix_product(machine: str) -> None:
    a, b = (np.round(8 * x) / 8 for x in normal("float32", (16, 16), (16, 8)))
    d = np.arange(128, dtype=np.float32).reshape(16, 8)
    args = [d, a.astype(BF16), b.astype(BF16)]
    got, _, _ = run(machine, WARP, "multiply", (), 1, 32, args, shared=2 * 16 * 16 * 2)
    same_bits(got, np.arange(128, dtype=np.float32).reshape(16, 8) + a @ b)  # every sum is exact


@pytest.mark.parametrize("rows,valid", [(1, 1), (2, 0), (7, 5)])
def test_background_copies(rows: int, valid: int, machine: str) -> None:
    x = normal("float32", (rows, 512))
    y, _ = run(machine, MEMORY, "pipeline", (), 1, 128, [np.zeros_like(x), x, rows, valid])
    want = 2 * x[:, ::-1]
    want[valid:] = 0
    same_bits(y, want)


@pytest.mark.parametrize("types,dtype", [("float", np.float32), ("bf16", BF16)])
@pytest.mark.parametrize("threads", [1, 33, 1024])
def test_dynamic_shared_memory(threads: int, types: str, dtype: Any, machine: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, threads)).astype(dtype)
    shared = threads * x.itemsize
    args = [np.zeros_like(x), x]
    y, _ = run(machine, MEMORY, "reverse", (types,), 3, threads, args, shared=shared)
    same_bits(y, np.ascontiguousarray(x[:, ::-1]))


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    y = np.zeros((2, 2), np.float32)
    with emulated():
        MEMORY.launch("unwritten", (), 2, 1, [y], shared=4)
    assert np.isnan(y).all()


def test_rounding(machine: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 50_000, dtype=np.uint32)
    ties = np.arange(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits, ties, ties + np.uint32(1)]).view(np.float32)
    args = [np.zeros(x.size, BF16), np.zeros(x.size, np.uint32), np.zeros_like(x), x]
    got, pairs, powers, _ = run(
        machine, MEMORY, "rounded", (), -(-x.size // 256), 256, [*args, np.int64(x.size)]
    )
    with np.errstate(invalid="ignore"):  # signalling NaN
        want = x.astype(BF16)
    number = ~np.isnan(x)
    same_bits(got[number], want[number])
    assert np.isnan(got[~number].astype(np.float32)).all()
    same_bits(pairs, got.view(np.uint16).astype(np.uint32) * np.uint32(65537))
    small = number & (np.abs(x) < 120)
    error = np.abs(powers[small] / np.exp2(x[small].astype(np.float64)) - 1)
    assert error.max() < 2.0**-22  # the bound that PTX gives for ex2.approx
    assert (powers[x < -127] == 0).all() and np.isinf(powers[x > 128]).all()


def test_atomics(machine: str) -> None:
    x = np.random.default_rng(0).integers(-50, 50, 256).astype(np.int32)
    args = [np.zeros(4, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint32), x]
    counts, total, arrived, _ = run(machine, MEMORY, "atomics", (), 4, 64, args)
    assert list(counts) == [x.sum(), max(0, x.max()), min(0, x.min()), x.sum()]
    assert total[0] == x.sum() and arrived[0] == 256


def test_integers(machine: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 64, dtype=np.uint32)
    y = rng.integers(-200, 200, 64).astype(np.int32)
    args = [np.zeros_like(x), np.zeros_like(y), x, y]
    high, clamped, _, _ = run(machine, MEMORY, "integers", (), 1, 64, args)
    same_bits(
        high, (x.astype(np.uint64) * np.uint64(0x9E3779B9) >> np.uint64(32)).astype(np.uint32)
    )
    same_bits(clamped, np.clip(y, -100, 100))


@pytest.mark.parametrize("types,dtype", [("float", np.float32), ("bf16", BF16)])
def test_scalar_arguments(types: str, dtype: Any, machine: str) -> None:
    out = np.zeros(1, dtype)
    (got,) = run(machine, MEMORY, "scalars", (types,), 1, 1, [out, -3, np.int64(2**10), 0.5, True])
    same_bits(got, np.array([-3 + 2**10 + 0.5 + 1000], np.float32).astype(dtype))


def test_a_view_is_its_first_element(machine: str) -> None:
    x = np.arange(64, dtype=np.float32)
    columns = to_device(np.zeros((32, 4), np.float32), machine)
    MEMORY.launch(
        "reverse", ("float",), 1, 32, [columns[1:], to_device(x, machine)[32:]], shared=128
    )
    want = np.zeros((32, 4), np.float32)
    want.reshape(-1)[4:36] = x[32:][::-1]
    same_bits(columns, want)


def test_addresses_from_a_table(machine: str) -> None:
    arrays = [to_device(np.full(3, i, np.float32), machine) for i in range(4)]
    pointers = [a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr for a in arrays]
    run(machine, MEMORY, "through_table", (), 1, 4, [np.array(pointers, np.int64)])
    for i, array in enumerate(arrays):
        same_bits(array, np.array([i + 1, i, i], np.float32))


def test_arguments_may_overlap() -> None:
    x = np.arange(96, dtype=np.float32)
    with emulated():
        MEMORY.launch("reverse", ("float",), 2, 32, [x[:64], x[:64]], shared=128)
    want = np.concatenate([np.arange(32)[::-1], np.arange(32, 64)[::-1], np.arange(64, 96)])
    same_bits(x, want.astype(np.float32))


def test_launches_from_several_threads() -> None:
    x = np.arange(1024, dtype=np.float32)

    def reverse(_: int) -> np.ndarray:
        y = np.zeros_like(x)
        MEMORY.launch("reverse", ("float",), 1, 1024, [y, x], shared=4096)
        return y

    with emulated(), ThreadPoolExecutor(4) as pool:
        for y in pool.map(reverse, range(16)):
            same_bits(y, np.ascontiguousarray(x[::-1]))


@pytest.mark.parametrize("source", [WARP, MEMORY, FAULTS], ids=lambda source: source.stem)
def test_samples_are_cuda(source: Sample) -> None:
    """They compile for a card too: the emulator takes no language of its own."""
    assert set(source.compile("90a").names) == set(source.expressions())
