"""Compiles the CUDA sources for the host and launches them there, in place of the card.

Each .cu file becomes a shared library with an entry per template instance of its ``Source``, cached on disk
by the text of everything that goes into it. The runtime (runtime.cpp, memory.cpp) is a library of its own:
it runs the threads of a block as fibers, one block after the other.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels.arrays import BF16, Backend
from surogate.kernels.nvrtc import Source, _argument, _expression, cache_directory, cuda_directory

HERE = Path(__file__).parent
SECONDS = 120  # of processor time that a launch may take
COMPILER = ("g++", "-std=c++17", "-O1", "-g1", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
# No fused multiply-add behind the source's back, and statics of inline functions (shared memory) stay ours.
KERNEL_FLAGS = ("-ffp-contract=off", "-fno-gnu-unique", "-fno-strict-aliasing")
RUNTIME = ("runtime.cpp", "memory.cpp")
LOCK = threading.Lock()  # the emulated multiprocessor is one


class _Index(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _Region(ctypes.Structure):
    _fields_ = [("low", ctypes.c_void_p), ("high", ctypes.c_void_p), ("writable", ctypes.c_int)]


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_int),
        ("pointer", ctypes.c_int),
        ("writable", ctypes.c_int),
        ("kind", ctypes.c_char),
    ]


class Kernel(NamedTuple):
    """A compiled instance: its entry, its parameters and its static shared memory."""

    entry: Any
    parameters: list[_Parameter]
    shared_low: int
    shared_high: int


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

    Raises RuntimeError with the kernel, the block and the thread when the kernel does something that CUDA does
    not allow (or that would hang or crash), and TypeError when the arguments do not fit its signature.
    """
    expression = _expression(kernel, types)
    name = f"{source.stem}.cu: {expression}"
    compiled = _kernel(source.stem, source.text(), tuple(source.expressions()), expression)
    values = [_argument(a) for a in args]
    _check_arguments(name, compiled.parameters, values)
    holders, regions = [], []
    for value, parameter in zip(values, compiled.parameters, strict=True):
        if isinstance(value, np.ndarray):
            holders.append(np.array(value.ctypes.data, np.uint64))
            low, high = np.lib.array_utils.byte_bounds(value)
            regions.append(_Region(low, high, parameter.writable))
        else:
            holders.append(np.array(value))
    pointers = (ctypes.c_void_p * (len(holders) + 1))(*[h.ctypes.data for h in holders])
    region_array = (_Region * (len(regions) + 1))(*regions)
    with LOCK:
        failure = _runtime().emulator_run(
            compiled.entry,
            pointers,
            ctypes.byref(_Index(*grid)),
            ctypes.byref(_Index(*block)),
            shared,
            compiled.shared_low,
            compiled.shared_high,
            region_array,
            len(regions),
            SECONDS,
        )
    if failure is not None:
        raise RuntimeError(f"{name}: {failure.decode()}")


def _check_arguments(name: str, parameters: list[_Parameter], values: list[Any]) -> None:
    if len(values) != len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments, got {len(values)}")
    for i, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        what = f"{name}: argument {i}"
        if isinstance(value, np.ndarray):
            if not parameter.pointer:
                raise TypeError(f"{what} is not a pointer, got an array")
            if parameter.size and not _same_kind(parameter, value.dtype):
                kind = parameter.kind.decode()
                raise TypeError(f"{what} points to {kind}{parameter.size}, got {value.dtype}")
            if parameter.writable and not value.flags.writeable:
                raise TypeError(f"{what} is written by the kernel, got a read-only array")
        elif parameter.pointer:
            if not (isinstance(value, np.uint64) and value == 0):
                raise TypeError(f"{what} is a pointer, got {value!r}")
        elif not isinstance(value, np.generic) or not _same_kind(parameter, value.dtype):
            kind = parameter.kind.decode()
            raise TypeError(f"{what} is {kind}{parameter.size}, got {type(value).__name__}")


def _same_kind(parameter: _Parameter, dtype: np.dtype) -> bool:
    """Whether elements of ``dtype`` are what the kernel takes them for; bytes are anybody's."""
    if parameter.size == 1 and parameter.pointer:
        return dtype.itemsize == 1
    kind = {"f": b"f", "i": b"i", "u": b"i", "b": b"B"}.get(dtype.kind, b"o")
    if dtype == BF16:
        kind = b"b"
    return dtype.itemsize == parameter.size and parameter.kind in (kind, b"o")


@functools.cache
def _runtime() -> Any:
    library = ctypes.CDLL(str(_runtime_path()))
    library.emulator_run.restype = ctypes.c_char_p
    library.emulator_run.argtypes = [
        *[ctypes.c_void_p] * 4,
        ctypes.c_uint,
        *[ctypes.c_void_p] * 3,
        *[ctypes.c_int] * 2,
    ]
    return library


@functools.cache
def _runtime_path() -> Path:
    texts = {n: (HERE / n).read_text() for n in (*RUNTIME, "runtime.h", "machine.h")}
    command = [*COMPILER, *(str(HERE / n) for n in RUNTIME), "-lrt"]
    return _library("runtime", command, texts)


@functools.lru_cache(maxsize=None)
def _kernel(stem: str, text: str, expressions: tuple[str, ...], expression: str) -> Kernel:
    library = _module(stem, text, expressions)
    number = expressions.index(expression)
    parameters = (_Parameter * 64)()
    count = getattr(library, f"emulated_parameters_{number}")(parameters)
    low, high = ctypes.c_void_p(), ctypes.c_void_p()
    library.emulated_shared(ctypes.byref(low), ctypes.byref(high))
    entry = ctypes.cast(getattr(library, f"emulated_entry_{number}"), ctypes.c_void_p)
    return Kernel(entry, list(parameters)[:count], low.value or 0, high.value or 0)


@functools.lru_cache(maxsize=None)
def _module(stem: str, text: str, expressions: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a .cu file with all its instances."""
    if "extern __shared__" in text:
        raise RuntimeError(f"{stem}.cu: declare dynamic shared memory by DYNAMIC_SHARED(type, name)")
    unit = _translation_unit(stem, text, expressions)
    headers = [*sorted(HERE.glob("*.cuh")), HERE / "runtime.h", *sorted(cuda_directory().glob("*.cuh"))]
    texts = {str(path.name): path.read_text() for path in headers} | {"unit": unit}
    runtime = str(_runtime_path())
    texts["runtime"] = runtime
    include = [f"-I{HERE}", f"-I{cuda_directory()}"]
    command = [*COMPILER, *KERNEL_FLAGS, *include, "-x", "c++", "-", "-x", "none", runtime]
    return ctypes.CDLL(str(_library(stem, command, texts, unit)))


def _translation_unit(stem: str, text: str, expressions: tuple[str, ...]) -> str:
    entries = "\n".join(
        f"ENTRY void emulated_entry_{i}(void** a) {{ emulator::call({e}, a); }}\n"
        f"ENTRY int emulated_parameters_{i}(emulator::Parameter* out)"
        f" {{ return emulator::describe({e}, out); }}"
        for i, e in enumerate(expressions)
    )
    return f"""#define SUROGATE_EMULATED
#line 1 "{stem}.cu"
{text}
#line 1 "entries of {stem}.cu"
#define ENTRY extern "C" __attribute__((visibility("default")))
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];
ENTRY void emulated_shared(char** low, char** high) {{ *low = __bss_start, *high = _end; }}
{entries}
"""


def _library(stem: str, command: list[str], texts: dict[str, str], unit: str = "") -> Path:
    """Compiles to a shared library, unless one of the same texts and flags is in the cache."""
    digest = hashlib.sha256(repr((COMPILER, KERNEL_FLAGS, sorted(texts.items()))).encode())
    path = cache_directory() / "emulator" / f"{stem}-{digest.hexdigest()[:20]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    done = subprocess.run([*command, "-o", scratch], input=unit, capture_output=True, text=True)
    if done.returncode:
        os.unlink(scratch)
        raise RuntimeError(f"{stem} does not compile for the emulator:\n{done.stderr}")
    os.replace(scratch, path)
    return path
