"""Takes kernel launches in place of the card: checks the arguments, runs the kernel on the host."""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels.arrays import BF16, Backend
from surogate.kernels.nvrtc import Source, _argument, _expression
from tests.emulator import build

SECONDS = 120  # of processor time, after which a launch is taken for an endless loop
MAX_PARAMETERS = 64
LOCK = threading.Lock()  # there is one emulated multiprocessor


class _Index(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _Region(ctypes.Structure):
    _fields_ = [
        ("low", ctypes.c_void_p),
        ("high", ctypes.c_void_p),
        ("writable", ctypes.c_int),
        ("item_size", ctypes.c_int),
        ("argument", ctypes.c_int),
    ]


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_int),
        ("pointer", ctypes.c_int),
        ("writable", ctypes.c_int),
        ("kind", ctypes.c_char),
    ]


class _Image(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("low", "shared_low", "shared_high")]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", _Index),
        ("block", _Index),
        ("dynamic_shared", ctypes.c_uint),
        ("image", _Image),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_int),
        ("open", ctypes.c_int),
        ("seconds", ctypes.c_int),
    ]


class _Failure(ctypes.Structure):
    _fields_ = [("message", ctypes.c_char * 1024), ("instruction", ctypes.c_void_p)]


class Kernel(NamedTuple):
    """A compiled instance: its library's file and place in memory, its entry and parameters."""

    path: str
    image: _Image
    entry: Any
    parameters: list[_Parameter]


def install() -> None:
    """Sends all kernel launches of this process to the emulator."""
    Backend.launch = launch


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Sends kernel launches to the emulator inside the ``with`` block."""
    before = Backend.launch
    Backend.launch = launch
    try:
        yield
    finally:
        Backend.launch = before


def launch(
    source: Source,
    kernel: str,
    types: tuple[str, ...],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: list[Any],
    shared: int,
) -> None:
    """Runs all threads of the grid, with the arguments that ``Source.launch`` takes.

    Raises RuntimeError with the kernel, block, thread and line when the kernel does what CUDA
    leaves undefined, faults, deadlocks or does not end; TypeError when arguments do not fit it.
    """
    expression = _expression(kernel, types)
    name = f"{source.stem}.cu: {expression}"
    compiled = _kernel(source.stem, source.text(), tuple(source.expressions()), expression)
    values = [_argument(a) for a in args]
    _check_arguments(name, compiled.parameters, values)
    arrays = [(i, v) for i, v in enumerate(values) if isinstance(v, np.ndarray)]
    held = [np.array(v.ctypes.data if isinstance(v, np.ndarray) else v) for v in values]
    pointers = (ctypes.c_void_p * (len(held) + 1))(*[h.ctypes.data for h in held])
    regions = (_Region * (len(arrays) + 1))(
        *[_region(i, v, compiled.parameters[i].writable) for i, v in arrays]
    )
    job = _Launch(
        ctypes.cast(compiled.entry, ctypes.c_void_p),
        ctypes.cast(pointers, ctypes.c_void_p),
        _Index(*grid),
        _Index(*block),
        shared,
        compiled.image,
        ctypes.cast(regions, ctypes.c_void_p),
        len(arrays),
        any(v.dtype.kind in "iu" and v.dtype.itemsize == 8 for _, v in arrays),
        SECONDS,
    )
    failure = _Failure()
    with LOCK:
        finished = _runtime().emulator_run(ctypes.byref(job), ctypes.byref(failure))
    if not finished:
        where = build.source_line(compiled.path, compiled.image.low, failure.instruction)
        raise RuntimeError(f"{name}: {failure.message.decode()}{where}")


def _region(argument: int, array: np.ndarray, writable: int) -> _Region:
    low, high = np.lib.array_utils.byte_bounds(array)
    return _Region(low, high if array.size else low, writable, array.itemsize, argument)


def _check_arguments(name: str, parameters: list[_Parameter], values: list[Any]) -> None:
    if len(values) != len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments, got {len(values)}")
    for i, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        wanted = f"{parameter.kind.decode()}{parameter.size}{'*' * parameter.pointer}"
        got = f"{value.dtype}{'*' if isinstance(value, np.ndarray) else ''}"
        if not _fits(parameter, value):
            raise TypeError(f"{name}: argument {i} is {wanted}, got {got}")
        if parameter.writable and isinstance(value, np.ndarray) and not value.flags.writeable:
            raise TypeError(f"{name}: argument {i} is written, got a read-only array")


def _fits(parameter: _Parameter, value: Any) -> bool:
    """Whether the kernel reads ``value`` as what it is. Single bytes and void* may be anything."""
    if not parameter.pointer:
        return isinstance(value, np.generic) and _same(parameter, value.dtype)
    if isinstance(value, np.ndarray):
        return parameter.size in (0, value.itemsize == 1) or _same(parameter, value.dtype)
    return value.dtype == np.uint64 and value == 0


def _same(parameter: _Parameter, dtype: np.dtype) -> bool:
    kinds = {"f": b"f", "i": b"i", "u": b"i", "b": b"B"}
    kind = b"b" if dtype == BF16 else kinds.get(dtype.kind, b"o")
    return dtype.itemsize == parameter.size and parameter.kind in (kind, b"o")


@functools.cache
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(build.runtime()))


@functools.cache
def _library(stem: str, text: str, expressions: tuple[str, ...]) -> tuple[str, ctypes.CDLL]:
    path = str(build.kernels(stem, text, expressions))
    return path, ctypes.CDLL(path)


@functools.cache
def _kernel(stem: str, text: str, expressions: tuple[str, ...], expression: str) -> Kernel:
    path, library = _library(stem, text, expressions)
    number = expressions.index(expression)
    parameters, image = (_Parameter * MAX_PARAMETERS)(), _Image()
    count = getattr(library, f"emulated_parameters_{number}")(parameters)
    library.emulated_image(ctypes.byref(image))
    return Kernel(
        path, image, getattr(library, f"emulated_entry_{number}"), list(parameters)[:count]
    )
