"""Compilation of the CUDA sources without a card, and its cache."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.kernels import cutlass, nvrtc
from surogate.kernels.arrays import BF16, Backend
from tests.emulator.sample import Sample

nvrtc.all_sources()  # imports every op

GENERATIONS = ["80", "90a", "120a"]  # `make compile` compiles for all of nvrtc.ARCHITECTURES
TEXT = """#include "common.cuh"
template <typename T> __global__ void twice(T* y, const T* x) {
    y[threadIdx.x] = from_float<T>(2.0f * to_float(x[threadIdx.x]));
}
__global__ void zero(float* y) { y[threadIdx.x] = 0.0f; }
"""
INSTANCES: dict[str, list[tuple[str, ...]]] = {"twice": [("float",), ("bf16",)], "zero": [()]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: the folder that compiled sources go to."""
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    "source,arch",
    [(s, arch) for s in nvrtc.SOURCES for arch in GENERATIONS if arch in s.architectures],
    ids=lambda value: value.stem if isinstance(value, nvrtc.Source) else value,
)
def test_every_instance_compiles(source: nvrtc.Source, arch: str) -> None:
    compiled = source.compile(arch)
    assert set(compiled.names) == set(source.expressions())
    assert all(name.encode() in compiled.cubin for name in compiled.names.values())


def test_every_file_has_a_source() -> None:
    files = {path.stem for path in nvrtc.cuda_directory().glob("*.cu")}
    files -= {cutlass.STEM}  # nvcc's
    assert files == {source.stem for source in nvrtc.SOURCES}
    assert len(nvrtc.SOURCES) == len(files), "two sources share a file"


def test_every_kernel_bounds_its_threads() -> None:
    """Else the compiler may give a thread more registers than the largest block can have."""
    for path in nvrtc.cuda_directory().glob("*.cu*"):
        found = re.findall(r"__global__ void\s+(\w+)", path.read_text())
        assert set(found) <= {"__launch_bounds__"}, f"{path.name}: {found}"


def test_the_second_compilation_is_read_from_disk(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Sample("twice", INSTANCES, TEXT).compile("80")
    assert set(first.names) == {"twice<float>", "twice<bf16>", "zero"}
    monkeypatch.setattr(nvrtc, "_compile", None)  # calling it would fail
    assert Sample("twice", INSTANCES, TEXT).compile("80") == first
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("change", ["text", "header", "instances", "arch", "flags"])
def test_any_change_compiles_again(
    change: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sample("twice", INSTANCES, TEXT).compile("80")
    text, instances, arch = TEXT, INSTANCES, "80"
    if change == "text":
        text += "// a comment\n"
    elif change == "header":
        headers = nvrtc._headers() | {"unused.cuh": ""}
        monkeypatch.setattr(nvrtc, "_headers", lambda: headers)
    elif change == "instances":
        instances = {"twice": [("float",)]}
    elif change == "arch":
        arch = "90a"
    else:
        monkeypatch.setattr(nvrtc, "FLAGS", (*nvrtc.FLAGS, "--use_fast_math"))
    Sample("twice", instances, text).compile(arch)
    assert len(list(cache.iterdir())) == 2


def test_a_syntax_error_names_the_line(cache: Path) -> None:
    text = '#include "common.cuh"\n__global__ void zero(float* y) {\n    y[0] = missing;\n}\n'
    with pytest.raises(RuntimeError, match=r"broken.cu does not compile for sm_90a") as error:
        Sample("broken", {"zero": [()]}, text).compile("90a")
    assert 'broken.cu(3): error: identifier "missing" is undefined' in str(error.value)
    assert not cache.exists(), "a failure must not be cached"


def test_an_instance_that_does_not_exist_is_an_error(cache: Path) -> None:
    with pytest.raises(RuntimeError, match="does not compile for sm_80"):
        Sample("twice", {"thrice": [("float",)]}, TEXT).compile("80")
    with pytest.raises(AssertionError, match=r"twice.cu: twice\('half',\) is not declared"):
        Sample("twice", INSTANCES, TEXT).launch("twice", ("half",), 1, 1, [])


def test_launch_passes_three_sizes_and_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Backend, "launch", lambda *args: seen.append(args))
    source, y = Sample("twice", INSTANCES, TEXT), np.zeros(1, np.float32)
    source.launch("zero", (), 2, (3, 4), [y], shared=16)
    assert seen == [(source, "zero", (), (2, 1, 1), (3, 4, 1), [y], 16)]


@pytest.mark.parametrize(
    "value,want",
    [
        (None, np.uint64(0)),
        (True, np.bool_(True)),
        (3, np.int32(3)),
        (0.1, np.float32(0.1)),
        (np.int64(2**40), np.int64(2**40)),
    ],
)
def test_arguments_have_the_width_of_the_signature(value: Any, want: Any) -> None:
    got = nvrtc._argument(value)
    assert got == want and got.dtype == want.dtype


def test_names_and_widths_of_dtypes() -> None:
    assert [nvrtc.ctype(d) for d in ("float32", BF16, np.int32)] == ["float", "bf16", "int"]
    assert [nvrtc.vector_width(d) for d in ("float32", BF16, np.uint8)] == [4, 8, 16]
    with pytest.raises(ValueError, match="no kernel takes float64; kernels take float32, bfloat16"):
        nvrtc.ctype(np.float64)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUROGATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert nvrtc.cache_directory() == Path("/somewhere/surogate")
    monkeypatch.setenv("SUROGATE_CACHE", "/elsewhere")
    assert nvrtc.cache_directory() == Path("/elsewhere")
