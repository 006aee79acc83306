"""The build of our CUTLASS instance, with stand-ins for nvcc and for the headers.

``python -m surogate.kernels.cutlass --arch 120a --arch 100a`` builds with the real ones.
"""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from surogate.kernels import cutlass
from surogate.kernels.arrays import BF16
from surogate.kernels.nvrtc import cuda_directory

# Writes down what it was asked, and a library with the three functions of ours.
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "release ${NVCC_RELEASE:-13.0}"; exit; fi
echo "$@" >> "$NVCC_LOG"
[ -n "$NVCC_FAILS" ] && { echo "error: no such type" >&2; exit 2; }
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
exec gcc -shared -fPIC -x c -o "$out" - <<END
#include <stddef.h>
size_t nvfp4_product_workspace(int rows, int columns, int inner) {
    return (size_t)rows * columns * inner;
}
int nvfp4_product(void) { return 7; }
const char* nvfp4_product_error(int status) { return status == 7 ? "Error Internal" : "Success"; }
END
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a compiler and headers; returns the log of compilations."""
    include = tmp_path / "site" / "cutlass_library" / "source" / "include" / "cutlass"
    include.mkdir(parents=True)
    (tmp_path / "site" / "cutlass_library" / "__init__.py").touch()
    (include / "version.h").write_text("#define CUTLASS_MAJOR 4\n")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NVCC_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "cutlass_library", raising=False)
    cutlass.load.cache_clear()
    return tmp_path / "log"


def compilations(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_what_the_compiler_is_asked(tools: Path) -> None:
    path = cutlass.build("120a")
    assert path.exists() and path.parent.name == "kernels"
    (command,) = compilations(tools)
    source = str(cuda_directory() / "nvfp4_cutlass.cu")
    include = tools.parent / "site" / "cutlass_library" / "source"
    for part in (
        "-gencode=arch=compute_120a,code=sm_120a",
        "-DSUROGATE_ARCH=120 ",
        f"-I{include / 'include'}",
        f"-I{include / 'tools' / 'util' / 'include'}",
        source,
    ):
        assert part in command


def test_built_once_and_again_after_any_change(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {cutlass.build("120a"), cutlass.build("120a")}
    assert len(paths) == 1 and len(compilations(tools)) == 1
    paths.add(cutlass.build("100a"))
    header = tools.parent / "site/cutlass_library/source/include/cutlass/version.h"
    header.write_text("#define CUTLASS_MAJOR 5\n")
    paths.add(cutlass.build("120a"))
    monkeypatch.setenv("NVCC_RELEASE", "13.1")
    paths.add(cutlass.build("120a"))
    assert len(paths) == 4 and len(compilations(tools)) == 4


def test_the_library_is_called_with_its_types(tools: Path) -> None:
    library = cutlass.load("100a")
    size = 1 << 20
    assert library.nvfp4_product_workspace(size, size, 1) == 1 << 40
    assert library.nvfp4_product_error(7) == b"Error Internal"
    assert isinstance(library, ctypes.CDLL) and cutlass.load("100a") is library


def test_what_is_missing_is_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="exist for 100a, 103a, 120a, 121a, got 90a"):
        cutlass.build("90a")
    monkeypatch.setenv("NVCC_FAILS", "1")
    with pytest.raises(RuntimeError, match="does not compile for sm_120a:\nerror: no such type"):
        cutlass.build("120a")
    assert not list((tools.parent / "cache").rglob("*.so"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="nvcc is not on PATH"):
        cutlass.build("120a")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(FileNotFoundError, match=r"install surogate\[cutlass\]"):
        cutlass.build("120a")


def test_command_line(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cutlass", "--arch", "100a", "--arch", "121a"])
    cutlass.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "nvfp4_cutlass sm_100a", "nvfp4_cutlass sm_121a"
    ]  # fmt: skip


def test_refuses_outputs_that_it_cannot_write() -> None:
    codes, scales, alpha = np.zeros((8, 32), np.uint8), np.zeros(512, np.uint8), np.ones(1, "f4")
    for out in (np.zeros((8, 12), BF16), np.zeros((8, 16), np.float32)):
        with pytest.raises(ValueError, match="contiguous bfloat16 with columns in multiples of 8"):
            cutlass.product(out, codes, codes, scales, scales, alpha, None)
    with pytest.raises(ValueError, match="what is added must be contiguous bfloat16"):
        added = np.zeros((8, 8), np.float32)
        cutlass.product(np.zeros((8, 8), BF16), codes, codes, scales, scales, alpha, added)
