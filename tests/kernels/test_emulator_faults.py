"""The emulator names what is wrong with a kernel, where CUDA would crash, hang or go on with
garbage.
"""

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from surogate.kernels.arrays import Backend, on_device
from tests.emulator import launch as emulator
from tests.emulator.launch import emulated
from tests.emulator.sample import Sample

THREADS = 64
X = np.ones(THREADS, np.float32)
SHARED_RACE = r"race: (reads|writes) shared memory that thread \(\d+,0,0\) of block 0"

# Kernel, arguments after y ("y" stands for a fresh array), and what the message must say.
FAULTS: list[tuple[str, list[Any], str]] = [
    (
        "write_past_end",
        ["y"],
        r"thread \(63,0,0\): writes 4 bytes, 4 bytes past the end of argument 0",
    ),
    ("read_before_start", ["y", X], r"thread \(0,0,0\): reads 4 bytes, 4 bytes before the start"),
    ("write_const", [X], "writes 4 bytes to argument 0, which is const"),
    ("read_null", ["y", None], "null pointer to 'const float'"),
    ("misaligned_vector", ["y"], r"thread \(1,0,0\): address \w+ is not aligned to the 16 bytes"),
    ("misaligned_copy", [X], "cp_async_16: address .* not aligned to 16 bytes"),
    ("misaligned_source", [X], "cp_async_16: source .* not aligned to 16 bytes"),
    ("misaligned_rows", [], r"thread \(1,0,0\): ldmatrix_x4: address .* not aligned to 16 bytes"),
    ("rows_in_global", [X], "ldmatrix_x4: address .* not in the shared memory"),
    ("past_static_array", ["y"], r"thread \(16,0,0\): index outside of an array"),
    (
        "past_dynamic_shared",
        [],
        r"thread \(8,0,0\): writes 4 bytes, 4 bytes past the end of shared",
    ),
    ("no_barrier_before_read", ["y"], SHARED_RACE),
    ("no_barrier_before_reuse", ["y"], SHARED_RACE),
    ("no_warp_sync", ["y"], SHARED_RACE),
    ("warp_sync_alone", ["y"], SHARED_RACE),
    ("all_write_one", ["y"], r"race: writes global memory that thread \(0,0,0\) of block 0 wrote"),
    ("read_in_flight", ["y", X], "race: touches shared memory that a cp_async_16"),
    ("copy_not_seen", ["y", X], SHARED_RACE),
    ("wait_without_commit", ["y", X], "race: touches shared memory that a cp_async_16"),
    (
        "divergent_barrier",
        [],
        r"__syncthreads diverges: .*faults.cu:\d+, others are at faults.cu:\d+",
    ),
    ("barrier_and_shuffle", ["y"], "deadlock: this thread waits at __syncthreads .* at shuffle"),
    ("shuffle_and_ballot", ["y"], "the warp diverges: this thread is in shuffle .* are in ballot"),
    ("shuffle_with_exited", ["y"], "shuffle: lane 0 reads lane 1, which has exited"),
    ("mma_with_exited", [], "mma_m16n8k16 needs all 32 lanes of the warp, but only 16 are left"),
    ("overflow", [np.zeros(THREADS, np.int32), 2**31 - 1], "signed addition overflows"),
    ("divide", [np.zeros(THREADS, np.int32), 0], "integer division by zero"),
    ("recurse", ["y"], "stack overflow"),
    ("trap", [], "__trap"),
    ("other_threads_local", ["y"], "local variable of another thread"),
]
BLOCK_FAULTS = ["blocks_write_one", "blocks_read_others"]
SOURCE = Sample(
    "faults", {name: [()] for name in [*(f[0] for f in FAULTS), *BLOCK_FAULTS, "endless", "fine"]}
)


def launch(
    kernel: str, args: list[Any], grid: Any = 1, block: Any = THREADS, shared: int = 32
) -> None:
    with emulated():
        SOURCE.launch(kernel, (), grid, block, args, shared=shared)


def fresh(args: list[Any]) -> list[Any]:
    return [np.zeros(THREADS, np.float32) if isinstance(a, str) else a for a in args]


@pytest.mark.parametrize("kernel,args,message", FAULTS, ids=[f[0] for f in FAULTS])
def test_faults_are_named(kernel: str, args: list[Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        launch(kernel, fresh(args))
    assert str(error.value).startswith(f"faults.cu: {kernel}: block (0,0,0), thread (")


@pytest.mark.parametrize("kernel", BLOCK_FAULTS)
def test_blocks_race(kernel: str) -> None:
    y = np.zeros(THREADS, np.float32)
    launch(kernel, [y])  # one block is fine
    with pytest.raises(RuntimeError, match=r"block \(1,0,0\), .*race: .* global memory .* block 0"):
        launch(kernel, [y], grid=2)


def test_the_message_names_the_line() -> None:
    lines = SOURCE.text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "void write_past_end" in text)
    with pytest.raises(RuntimeError, match=rf"\(faults\.cu:{line}\)$"):
        launch("write_past_end", fresh(["y"]))


def test_a_kernel_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "SECONDS", 1)
    start = time.process_time()
    with pytest.raises(RuntimeError, match="still running after 1 s of processor time"):
        launch("endless", [np.zeros(1, np.int32)])
    assert time.process_time() - start < 5


def test_launches_work_after_a_fault() -> None:
    y = np.zeros(THREADS, np.float32)
    for kernel in ("recurse", "divergent_barrier", "read_in_flight"):
        args = next(f[1] for f in FAULTS if f[0] == kernel)
        with pytest.raises(RuntimeError):
            launch(kernel, fresh(args))
        launch("fine", [y])
        np.testing.assert_array_equal(y, np.arange(THREADS)[::-1])


@pytest.mark.parametrize(
    "grid,block,shared,message",
    [
        (0, 32, 0, r"grid \(0,1,1\) is empty or too large"),
        ((1, 70_000), 32, 0, r"grid \(1,70000,1\) is empty or too large"),
        (1, (32, 0), 0, r"block \(32,0,1\) is empty or too large"),
        (1, 1025, 0, r"block \(1025,1,1\) is empty or too large"),
        (1, 32, 228 * 1024, "asks for 233472 bytes of shared memory, a block has 232448"),
    ],
)
def test_launches_that_a_driver_refuses(grid: Any, block: Any, shared: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"faults.cu: fine: {message}"):
        launch("fine", fresh(["y"]), grid, block, shared)


@pytest.mark.parametrize(
    "kernel,args,message",
    [
        ("fine", [], "takes 1 arguments, got 0"),
        ("fine", [X.astype(np.float64)], r"argument 0 is f4\*, got float64\*"),
        ("fine", [1.0], r"argument 0 is f4\*, got float32"),
        ("overflow", [np.zeros(64, np.int32), 1.5], "argument 1 is i4, got float32"),
        ("overflow", [np.zeros(64, np.int32), np.int64(1)], "argument 1 is i4, got int64"),
        ("overflow", [np.zeros(64, np.int32), X], r"argument 1 is i4, got float32\*"),
        ("fine", [np.broadcast_to(X[:1], 64)], "argument 0 is written, got a read-only array"),
    ],
)
def test_arguments_must_fit_the_signature(kernel: str, args: list[Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        launch(kernel, args)


def test_a_syntax_error_is_readable() -> None:
    text = '#include "common.cuh"\n__global__ void broken(float* y) {\n    y[0] = missing;\n}\n'
    with emulated(), pytest.raises(RuntimeError, match=r"broken.cu:3:.*missing") as error:
        Sample("broken", {"broken": [()]}, text).launch("broken", (), 1, 1, [X])
    assert "does not compile for the emulator" in str(error.value)


def test_undeclared_shared_memory_form_is_refused() -> None:
    text = "__global__ void f() { extern __shared__ float memory[]; }"
    with emulated(), pytest.raises(RuntimeError, match=r"DYNAMIC_SHARED\(type, name\)"):
        Sample("old_form", {"f": [()]}, text).launch("f", (), 1, 1, [])


def test_emulated_is_a_scope() -> None:
    assert Backend.launch is None and not on_device(X)
    with emulated():
        assert on_device(X)
        with emulated():
            pass
        assert on_device(X)
    assert Backend.launch is None


def test_install_and_faults_in_a_fresh_process() -> None:
    """The signal handlers of Python's fault handler survive a fault of a kernel."""
    code = (
        "import faulthandler; faulthandler.enable()\n"
        "import numpy as np\n"
        "from tests.kernels.test_emulator_faults import SOURCE\n"
        "from tests.emulator.launch import install\n"
        "install()\n"
        "try: SOURCE.launch('recurse', (), 1, 1, [np.zeros(1, np.float32)])\n"
        "except RuntimeError as error: print(error)\n"
        "import ctypes; ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "stack overflow" in done.stdout
    assert done.returncode < 0 and "Fatal Python error: Segmentation fault" in done.stderr
