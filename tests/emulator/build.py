"""Shared libraries of the emulator: the runtime, and one per .cu file."""

import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from surogate.kernels.nvrtc import cache_directory, cuda_directory

HERE = Path(__file__).parent
RUNTIME = ("launch.cpp", "fibers.cpp", "warp.cpp", "memory.cpp", "hooks.cpp", "hopper.cpp")
RUNTIME_HEADERS = ("runtime.h", "machine.h", "switch.h", "hopper.h")
COMPILE = ("g++", "-std=c++17", "-fPIC", "-fvisibility=hidden")
RUNTIME_FLAGS = ("-O3",)
CHECKS = "alignment,bounds,null,signed-integer-overflow,integer-divide-by-zero,unreachable,return"
# No fused products and sums. Statics of inline functions are shared memory: a library has its own.
# -w: the pragmas are nvcc's.
KERNEL_FLAGS = (
    *("-O1", "-g1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique"),
    "-fstack-clash-protection",  # so that a deep stack meets its guard page
    *("-fsanitize=thread", f"-fsanitize={CHECKS}", "-fno-sanitize-recover=all"),
)


@functools.cache
def runtime() -> Path:
    """The library that runs kernels."""
    digest = _digest([HERE / n for n in (*RUNTIME, *RUNTIME_HEADERS)], *COMPILE, *RUNTIME_FLAGS)
    units = [str(HERE / name) for name in RUNTIME]
    command = [*COMPILE, *RUNTIME_FLAGS, "-shared", *units, "-lrt", "-o", "library.so"]
    return _cached(f"runtime-{digest}", [command], {})


def kernels(stem: str, text: str, expressions: tuple[str, ...]) -> Path:
    """The library of a .cu file of this text, with entries for the instances of ``expressions``.

    Raises RuntimeError with the compiler's messages.
    """
    if "extern __shared__" in text:
        raise RuntimeError(f"{stem}.cu: dynamic shared memory is DYNAMIC_SHARED(type, name)")
    headers = [*HERE.glob("*.cuh"), HERE / "runtime.h", *cuda_directory().glob("*.cuh")]
    unit = _translation_unit(stem, text, expressions)
    flags = (*COMPILE, *KERNEL_FLAGS)
    name = f"{stem}-{_digest(sorted(headers), unit, str(runtime()), *flags)}"
    include = (f"-I{HERE}", f"-I{cuda_directory()}")
    compiling = [*flags, *include, "-c", "-x", "c++", f"{stem}.cu", "-o", "object.o"]
    linking = ["g++", "-shared", "object.o", str(runtime()), "-o", "library.so"]
    return _cached(name, [compiling, linking], {f"{stem}.cu": unit})


def source_line(library: str, base: int, instruction: int | None) -> str:
    """Where a kernel was, as in " (add.cu:7)", given the address behind an instruction.

    Empty for None, and for an address elsewhere (in the runtime or libm).
    """
    if instruction is None or instruction <= base:
        return ""
    command = ["addr2line", "-e", library, hex(instruction - 1 - base)]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    return "" if line.startswith("?") else f" ({line.rsplit('/', 1)[-1]})"


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
#define ENTRY extern "C" __attribute__((visibility("default"))) EMULATOR_UNCHECKED
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], __bss_start[], _end[];
ENTRY void emulated_image(emulator::Image* out) {{ *out = {{__ehdr_start, __bss_start, _end}}; }}
{entries}
"""


def _digest(files: list[Path], *parts: str) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for part in (*(f"{path.name}\0{path.read_text()}" for path in files), *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cached(name: str, commands: list[list[str]], files: dict[str, str]) -> Path:
    """The library of that name; if it is not there yet, ``commands`` make it from ``files``."""
    path = cache_directory() / "emulator" / f"{name}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        for file, text in files.items():
            (Path(scratch) / file).write_text(text)
        for command in commands:
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} does not compile for the emulator:\n{done.stderr}")
        os.replace(Path(scratch) / "library.so", path)
    return path
