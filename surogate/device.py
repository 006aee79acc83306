"""Where a run computes: the card through CuPy, or this machine's cores through NumPy."""

import os
import platform
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32

COMPUTE = {"cpu": F32, "cuda": BF16}  # dtype of products on each kind of device


class Device(NamedTuple):
    """A place to compute: its array library, what people call it, and the dtype of its products."""

    kind: Literal["cpu", "cuda"]
    name: str
    library: Any  # numpy or cupy
    compute: np.dtype
    no_card: str = ""  # why not on a card, where that was left to us

    def put(self, value: Any) -> Any:
        """A tree of NumPy arrays, there."""
        if self.kind == "cpu":
            return value
        asarray = self.library.asarray
        return tree.map(lambda x: asarray(x) if isinstance(x, np.ndarray) else x, value)

    def fact(self) -> str:
        """What people call it, with the reason where it is not a card."""
        return f"{self.name} ({self.no_card})" if self.no_card else self.name

    def used_memory(self) -> int:
        """Bytes in use: of the card by everything on it, else by this process."""
        if self.kind == "cuda":
            free, total = self.library.cuda.runtime.memGetInfo()
            return int(total - free)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def synchronize(self) -> None:
        """Waits until all work on the current stream is done."""
        if self.kind == "cuda":
            self.library.cuda.get_current_stream().synchronize()


def choose_device(wanted: str) -> Device:
    """The device for "auto", "cpu" or "cuda". Raises UserError when a card was asked for and none
    works.
    """
    if wanted == "cpu":
        return _cpu()
    problem = _why_no_card()
    if problem is None:
        return _card()
    if wanted == "cuda":
        raise UserError(f"device = cuda: {problem}; use device = cpu, or auto")
    return _cpu()._replace(no_card=problem)


def _cpu() -> Device:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Device("cpu", f"{platform.machine()} with {cores} cores", np, COMPUTE["cpu"])


def _why_no_card() -> str | None:
    """None when a card can be used, else the reason why not."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed: pip install 'surogate[cuda13]' (or cuda12)"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "there is no NVIDIA GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the NVIDIA driver does not answer ({error})"
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < 80:
        return f"the GPU is sm_{capability}; sm_80 (Ampere) or newer is needed"
    return None


def _card() -> Device:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    return Device("cuda", name, cupy, COMPUTE["cuda"])
