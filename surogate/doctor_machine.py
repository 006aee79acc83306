"""What surogate doctor finds out about the machine: its GPUs, their driver, its disks.

Each is a check of doctor.py: it returns what it found, None where there is nothing to check, or
raises a UserError that says what to do.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from surogate.device import Device
from surogate.doctor import DRIVER
from surogate.errors import UserError
from surogate.kernels.nvrtc import cache_directory

LEAST_FREE = 1 << 30  # bytes that a disk should have left
LEAST_SPEED = 5e6  # bytes a second


def card(device: Device) -> str:
    """The GPUs, or that there is none."""
    if device.kind == "cpu":
        if DRIVER.exists():
            raise UserError(
                f"the NVIDIA driver is here, but {device.no_card}: do that, or look whether "
                "CUDA_VISIBLE_DEVICES or the container hides the GPU"
            )
        return f"{device.fact()}; the CPU is used, which is right for small models only"
    runtime = device.library.cuda.runtime
    found = []
    for index in range(runtime.getDeviceCount()):
        facts = runtime.getDeviceProperties(index)
        name = facts["name"].decode()
        if facts["major"] < 8:
            raise UserError(f"{name} is sm_{facts['major']}{facts['minor']}: use sm_80 or newer")
        total = facts["totalGlobalMem"] / 2**30
        found.append(f"{name} (sm_{facts['major']}{facts['minor']}, {total:.0f} GiB)")
    free, total = runtime.memGetInfo()
    if free < total / 2:
        raise UserError(
            f"{found[0]}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: end what uses it "
            "(nvidia-smi lists it)"
        )
    return "; ".join(found)


def driver(device: Device) -> str | None:
    """Whether the driver is new enough for the libraries."""
    if device.kind == "cpu":
        return None
    runtime = device.library.cuda.runtime
    versions = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    have, need = (f"{v // 1000}.{v % 1000 // 10}" for v in versions)
    if versions[0] // 1000 < versions[1] // 1000:
        raise UserError(
            f"the driver is for CUDA {have}, the libraries for {need}: update the driver, or "
            f"pip install 'surogate[cuda{versions[0] // 1000}]' in an environment of its own"
        )
    return f"for CUDA {have}; libraries for {need}"


def cache(device: Device) -> str:
    """The folder of compiled kernels: writable, with room, and fast enough."""
    folder = cache_directory()
    speed = _write_speed(folder, "set SUROGATE_CACHE to another folder")
    return f"{folder}: {_room(folder)}, written at {speed / 1e6:.0f} MB/s"


def disk(device: Device) -> str:
    """The folder that the command runs in, where output_dir is by default."""
    folder = Path.cwd()
    speed = _write_speed(folder, "run in another folder, or set output_dir")
    return f"{folder}: {_room(folder)}, written at {speed / 1e6:.0f} MB/s"


def _room(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        raise UserError(f"{folder}: {free / 2**20:.0f} MiB are free: make room")
    return f"{free / 2**30:.0f} GiB free"


def _write_speed(folder: Path, remedy: str) -> float:
    """Bytes a second, with a sync, of a file of 32 MiB."""
    block = np.random.default_rng(0).bytes(1 << 20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(32):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}): {remedy}") from None
    speed = 32 * len(block) / (time.perf_counter() - begin)
    if speed < LEAST_SPEED:
        raise UserError(f"{folder}: only {speed / 1e6:.1f} MB/s are written: {remedy}")
    return speed


def collective(device: Device) -> str | None:
    """A sum over all GPUs, where there are several."""
    if device.kind == "cpu" or device.library.cuda.runtime.getDeviceCount() == 1:
        return None
    cupy = device.library
    count, size = cupy.cuda.runtime.getDeviceCount(), 1 << 22
    try:
        from cupy.cuda import nccl

        communicators = nccl.NcclCommunicator.initAll(list(range(count)))
    except (ImportError, AttributeError) as error:
        raise UserError(f"NCCL cannot be loaded ({error}): reinstall 'surogate[cuda13]'") from None
    arrays = []
    for index in range(count):
        with cupy.cuda.Device(index):
            arrays.append(cupy.full(size, index + 1, np.float32))
            cupy.cuda.Device().synchronize()

    def add_up() -> None:
        nccl.groupStart()
        for index, (communicator, x) in enumerate(zip(communicators, arrays, strict=True)):
            with cupy.cuda.Device(index), cupy.cuda.Stream.null as stream:
                kind, add = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
                communicator.allReduce(x.data.ptr, x.data.ptr, size, kind, add, stream.ptr)
        nccl.groupEnd()
        for index in range(count):
            cupy.cuda.Device(index).synchronize()

    add_up()
    want = count * (count + 1) / 2
    if any(float(end) != want for x in arrays for end in (x[0], x[-1])):
        raise UserError("a sum over the GPUs is wrong: set NCCL_P2P_DISABLE=1 and report it")
    begin = time.perf_counter()
    add_up()
    rate = 2 * (count - 1) / count * size * 4 / (time.perf_counter() - begin)
    return f"{count} GPUs add up rightly, {rate / 1e9:.1f} GB/s of 16 MiB"


CHECKS = {"card": card, "driver": driver, "cache": cache, "disk": disk, "collective": collective}
