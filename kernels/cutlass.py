"""Our instance of CUTLASS for products of NVFP4 codes: built by nvcc, kept on disk, called here.

python -m surogate.kernels.cutlass --arch 120a      # or 100a, 103a, 121a; needs no card

CUTLASS is headers alone; the extra ``cutlass`` (nvidia-cutlass on PyPI) brings them. A build takes
nvcc 12.8 or newer, about two minutes and 6 GB of memory, and is done once for a source, a version
of CUTLASS and of nvcc, and an architecture.
"""

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from surogate.kernels.arrays import BF16, Array, address, describe, require
from surogate.kernels.nvrtc import architecture, cache_directory, cuda_directory

ARCHITECTURES = ("100a", "103a", "120a", "121a")
STEM = "nvfp4_cutlass"
FLAGS = ("-std=c++17", "-O3", "-shared", "--expt-relaxed-constexpr")
HOST_FLAGS = ("-Xcompiler", "-fPIC,-fvisibility=hidden")
INSTALL = "install surogate[cutlass], which brings the headers"


def product(
    out: Array,
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    alpha: Array,
    added: Array | None,
) -> None:
    """Writes out = alpha a b^T + added, of codes and tiled scales as nvfp4.py has them.

    ``out`` and ``added`` are bfloat16 and contiguous. Raises RuntimeError where CUTLASS refuses.
    """
    rows, columns = out.shape
    inner = 2 * a.shape[1]
    require(
        out.dtype == BF16 and out.flags.c_contiguous and columns % 8 == 0,
        f"cutlass: out must be contiguous bfloat16 with columns in multiples of 8, got "
        f"{describe(out)}",
    )
    require(
        added is None or (added.dtype == BF16 and added.flags.c_contiguous),
        "cutlass: what is added must be contiguous bfloat16",
    )
    import cupy

    library = load(architecture())
    scratch = cupy.empty(library.nvfp4_product_workspace(rows, columns, inner), cupy.uint8)
    pointers = [address(x) for x in (out, a, b, a_scales, b_scales, alpha)]
    pointers.append(0 if added is None else address(added))
    stream = cupy.cuda.get_current_stream().ptr
    status = library.nvfp4_product(
        *(ctypes.c_void_p(p) for p in pointers), rows, columns, inner,
        ctypes.c_void_p(scratch.data.ptr), ctypes.c_void_p(stream),
    )  # fmt: skip
    if status:
        message = library.nvfp4_product_error(status).decode()
        raise RuntimeError(f"cutlass: {rows} x {columns} x {inner}: {message}")


@functools.cache
def load(arch: str) -> ctypes.CDLL:
    """The library for an architecture, built if it is not on disk. Needs no card."""
    library = ctypes.CDLL(str(build(arch)))
    library.nvfp4_product_workspace.restype = ctypes.c_size_t
    library.nvfp4_product_error.restype = ctypes.c_char_p
    return library


def build(arch: str) -> Path:
    """The file of that library, compiled if need be.

    Raises ValueError for an architecture without such products, FileNotFoundError without the
    headers or nvcc, RuntimeError with the compiler's messages.
    """
    require(
        arch in ARCHITECTURES,
        f"cutlass: NVFP4 products exist for {', '.join(ARCHITECTURES)}, got {arch}",
    )
    include, nvcc = _headers(), shutil.which("nvcc")
    if nvcc is None:
        raise FileNotFoundError("cutlass: nvcc is not on PATH: install the CUDA toolkit's compiler")
    source = cuda_directory() / f"{STEM}.cu"
    path = _path(arch, source, include, nvcc)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [
            nvcc, *FLAGS, *HOST_FLAGS, f"-DSUROGATE_ARCH={arch.rstrip('a')}",
            f"-gencode=arch=compute_{arch},code=sm_{arch}", *(f"-I{x}" for x in include),
            "-o", str(made), str(source),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{STEM}.cu does not compile for sm_{arch}:\n{done.stderr}")
        os.replace(made, path)
    return path


def _headers() -> list[Path]:
    """Include folders of CUTLASS, as the package nvidia-cutlass installs them."""
    found = importlib.util.find_spec("cutlass_library")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"cutlass: its headers are missing: {INSTALL}")
    root = Path(found.submodule_search_locations[0]) / "source"
    return [root / "include", root / "tools" / "util" / "include"]


def _path(arch: str, source: Path, include: list[Path], nvcc: str) -> Path:
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(repr((FLAGS, HOST_FLAGS, arch, version)).encode())
    digest.update(source.read_bytes())
    digest.update((include[0] / "cutlass" / "version.h").read_bytes())
    name = f"{STEM}-{arch}-{digest.hexdigest()[:20]}.so"
    return cache_directory() / "kernels" / name


def main() -> None:
    """Builds for the architectures that are asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m surogate.kernels.cutlass", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, required=True)
    for arch in parser.parse_args().arch:
        path = build(arch)
        print(f"{STEM} sm_{arch}: {path.stat().st_size / 1024:.1f} KiB in {path}")


if __name__ == "__main__":
    main()
