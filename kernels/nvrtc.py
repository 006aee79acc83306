"""CUDA sources compiled at run time for the card at hand, and kept on disk.

A ``Source`` names a file of kernels/cuda and every template instance that is ever launched, so that
``python -m surogate.kernels.nvrtc`` can compile all of them for all architectures with no card
present. Machine code is cached by source, headers, flags, architecture and compiler version.
"""

import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels.arrays import Backend, require

ARCHITECTURES = ("80", "86", "89", "90a", "100a", "103a", "120a", "121a")
THREADS = 256  # of an elementwise kernel's block
FLAGS = ("--std=c++17", "-default-device", "--restrict")
TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "half", "int32": "int"}
SOURCES: list["Source"] = []


def ctype(dtype: Any) -> str:
    """The CUDA name of a dtype, as template argument."""
    name = str(np.dtype(dtype))
    require(name in TYPES, f"ctype: no kernel takes {name}; kernels take {', '.join(TYPES)}")
    return TYPES[name]


def vector_width(dtype: Any) -> int:
    """Elements in one 16-byte access."""
    return 16 // np.dtype(dtype).itemsize


def cuda_directory() -> Path:
    """Where the .cu and .cuh files are."""
    return Path(str(resources.files("surogate.kernels") / "cuda"))


def cache_directory() -> Path:
    """The folder that SUROGATE_CACHE names, or surogate under the user's cache folder."""
    chosen = os.environ.get("SUROGATE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "surogate"


class Compiled(NamedTuple):
    """Machine code and the mangled name of each instance."""

    cubin: bytes
    names: dict[str, str]


class Source:
    """One .cu file, the template instances of its kernels, and the architectures it is for."""

    def __init__(
        self,
        stem: str,
        instances: dict[str, list[tuple[str, ...]]],
        *,
        architectures: tuple[str, ...] = ARCHITECTURES,
    ) -> None:
        self.stem, self.instances, self.architectures = stem, instances, architectures
        self._functions: dict[Any, Any] = {}
        self._shared: dict[Any, int] = {}  # dynamic shared memory that a function was promised
        SOURCES.append(self)

    def expressions(self) -> list[str]:
        """C++ names of all instances, as in ``rmsnorm_fwd<bf16>``."""
        return [
            _expression(kernel, types) for kernel, rows in self.instances.items() for types in rows
        ]

    def text(self) -> str:
        """The source."""
        return (cuda_directory() / f"{self.stem}.cu").read_text()

    def launch(
        self,
        kernel: str,
        types: tuple[str, ...],
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: list[Any],
        *,
        shared: int = 0,
    ) -> None:
        """Launches an instance on the current stream.

        Arrays become pointers and None a null pointer; int is int32, float is float32, bool is
        bool, and NumPy scalars are themselves. ``shared`` is dynamic shared memory in bytes.
        """
        assert types in self.instances[kernel], f"{self.stem}.cu: {kernel}{types} is not declared"
        grid, block = _three(grid), _three(block)
        if Backend.launch is not None:
            Backend.launch(self, kernel, types, grid, block, args, shared)
            return
        function = self.function(kernel, types, shared)
        function(grid, block, [_argument(a) for a in args], shared)

    def function(self, kernel: str, types: tuple[str, ...], shared: int = 0) -> Any:
        """An instance on the current card, promised so much dynamic shared memory."""
        import cupy

        expression = _expression(kernel, types)
        key = (cupy.cuda.runtime.getDevice(), expression)
        if key not in self._functions:
            compiled = self.compile(architecture())
            module = cupy.cuda.function.Module()
            module.load(compiled.cubin)
            for name, mangled in compiled.names.items():
                self._functions[key[0], name] = (module.get_function(mangled), module)
        function = self._functions[key][0]
        if shared > self._shared.get(key, 0):
            attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, shared)
            self._shared[key] = shared
        return function

    def compile(self, arch: str) -> Compiled:
        """Machine code for an architecture such as "90a", from the disk cache when it is there."""
        path = cache_directory() / "kernels" / f"{self.stem}-{arch}-{self._key(arch)}.bin"
        if path.exists():
            header, _, cubin = path.read_bytes().partition(b"\n")
            return Compiled(cubin, json.loads(header))
        compiled = _compile(self, arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(json.dumps(compiled.names).encode() + b"\n" + compiled.cubin)
        os.replace(file.name, path)
        return compiled

    def _key(self, arch: str) -> str:
        from cupy.cuda import nvrtc

        digest = hashlib.sha256(repr((FLAGS, arch, nvrtc.getVersion())).encode())
        for part in (self.text(), *self.expressions(), *_headers().values()):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()[:20]


def _expression(kernel: str, types: tuple[str, ...]) -> str:
    return f"{kernel}<{', '.join(types)}>" if types else kernel


def _three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else size
    full = (*sizes, 1, 1)[:3]
    return (int(full[0]), int(full[1]), int(full[2]))


def _argument(value: Any) -> Any:
    if value is None:
        return np.uint64(0)
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    return value


@functools.cache
def _headers() -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted(cuda_directory().glob("*.cuh"))}


@functools.cache
def _include_flags() -> tuple[str, ...]:
    from cuda.pathfinder import find_nvidia_header_directory

    found = [find_nvidia_header_directory(name) for name in ("cudart", "cccl")]
    return tuple(f"-I{directory}" for directory in found if directory)


def architecture() -> str:
    """The target of the current card: "90a" on Hopper, "80" on an A100."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return f"{capability}a" if int(capability) >= 90 else capability


def _compile(source: Source, arch: str) -> Compiled:
    from cupy.cuda import nvrtc

    headers = _headers()
    program = nvrtc.createProgram(
        source.text(),
        f"{source.stem}.cu",
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    expressions = source.expressions()
    for expression in expressions:
        nvrtc.addNameExpression(program, expression)
    options = (f"--gpu-architecture=sm_{arch}", *FLAGS, *_include_flags())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(f"{source.stem}.cu does not compile for sm_{arch}:\n{log}") from error
    names = {e: nvrtc.getLoweredName(program, e) for e in expressions}
    return Compiled(nvrtc.getCUBIN(program), names)


def compile_all(architectures: tuple[str, ...] = ARCHITECTURES) -> list[tuple[str, str, int]]:
    """Compiles every source of every op: (stem, architecture, bytes of machine code) a row.

    One process a core, as NVRTC compiles on one.
    """
    from concurrent.futures import ProcessPoolExecutor

    wanted = [
        (source.stem, arch)
        for source in all_sources().values()
        for arch in architectures
        if arch in source.architectures
    ]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_one, *zip(*wanted, strict=True)))


def all_sources() -> dict[str, Source]:
    """Every source by its stem, after importing every op."""
    import pkgutil

    import surogate.kernels as package

    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {source.stem: source for source in SOURCES}


def _compile_one(stem: str, arch: str) -> tuple[str, str, int]:
    return stem, arch, len(all_sources()[stem].compile(arch).cubin)


def main() -> None:
    """python -m surogate.kernels.nvrtc [ARCH ...]: compiles all kernels; needs no card."""
    import sys

    from surogate.kernels import nvrtc  # the module that the ops registered with, not __main__

    for stem, arch, size in nvrtc.compile_all(tuple(sys.argv[1:]) or ARCHITECTURES):
        print(f"{stem:16s} sm_{arch:5s} {size / 1024:8.1f} KiB")


if __name__ == "__main__":
    main()
