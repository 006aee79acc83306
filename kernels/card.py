"""What a launch needs to know of the current card. The emulator stands for a small Hopper."""

import functools

from surogate.kernels.arrays import Backend


def multiprocessors() -> int:
    """Multiprocessors of the current card. The emulator has two, so that blocks walk in tests."""
    return 2 if Backend.launch is not None else _attribute("MultiProcessorCount")


def shared_limit() -> int:
    """Bytes of shared memory that a block may have. A multiprocessor has 1024 more, and takes that
    many for each block.
    """
    if Backend.launch is not None:
        return 227 * 1024
    return _attribute("MaxSharedMemoryPerBlockOptin")


def _attribute(name: str) -> int:
    import cupy

    return _attribute_of(cupy.cuda.runtime.getDevice(), name)


@functools.cache
def _attribute_of(card: int, name: str) -> int:
    import cupy

    return int(cupy.cuda.Device(card).attributes[name])
