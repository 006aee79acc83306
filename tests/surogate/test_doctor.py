"""surogate doctor: well on this machine, and a line with a remedy for each fault put in."""

import importlib.metadata
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from surogate import doctor, doctor_compute, doctor_machine
from surogate.cli import main
from surogate.device import Device, choose_device
from surogate.doctor import _within_limit, examine, libraries
from surogate.errors import UserError
from surogate.kernels.arrays import BF16

CPU = choose_device("cpu")
GIB = 2**30
H200 = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 140 * GIB}


def card(*facts: dict[str, Any], free: int = 139, driver: int = 13000) -> Device:
    """A device whose runtime says this."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: len(facts),
        getDeviceProperties=lambda index: facts[index],
        memGetInfo=lambda: (free * GIB, 140 * GIB),
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13010,
    )
    return Device(
        "cuda", "NVIDIA H200", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), BF16
    )


def fault(check: Callable[..., Any], *arguments: Any) -> str:
    """The line of a check that must find something."""
    with pytest.raises(UserError) as error:
        check(*arguments)
    line = str(error.value)
    assert "\n" not in line and ": " in line
    return line


def test_this_machine_is_well(tmp_path, monkeypatch):
    """All of it, as a person calls it; on a machine without a card, the CPU path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(main, ["doctor"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.stdout
    assert all(line.startswith("ok     ") for line in lines[:-1])
    assert lines[-1].startswith("verdict: ready to train (")
    names = [line.split()[1] for line in lines[:-1]]
    assert names[:3] == ["python", "libraries", "card"]
    assert {"cache", "disk", "product", "attention", "step"} <= set(names)
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]


def test_faults_are_named_and_counted(monkeypatch):
    monkeypatch.setattr(doctor_machine, "LEAST_FREE", 1 << 60)
    monkeypatch.setattr(doctor_compute, "CHECKS", {})
    result = CliRunner().invoke(main, ["doctor", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1 and document["ok"] is False
    faults = {check["name"]: check["text"] for check in document["checks"] if not check["ok"]}
    assert faults.keys() == {"cache", "disk"}
    assert all("MiB are free: make room" in text for text in faults.values())
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "verdict: 2 faults; the lines above say what to do" in result.stdout


def declared(monkeypatch: pytest.MonkeyPatch, *requirements: str, **versions: str) -> None:
    """A surogate that needs these, in an environment with these beside what is there."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(requirements))
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or found(name)
    )


def test_libraries(monkeypatch):
    assert libraries().startswith("numpy ")
    declared(monkeypatch, "numpy>=99")
    assert fault(libraries).endswith("does not fit: pip install -U 'numpy>=99'")
    declared(monkeypatch, "no-such-library>=2")
    assert fault(libraries) == ("no-such-library is missing: pip install -U 'no-such-library>=2'")
    declared(monkeypatch, "no-such-library; extra == 'wandb'", "numpy>=1")
    assert libraries()

    def unknown(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert fault(libraries) == "surogate itself is not installed: pip install surogate"


def test_libraries_of_a_card(monkeypatch, tmp_path):
    """Two CuPys in one environment, and one that cannot be loaded."""
    both = [SimpleNamespace(name=f"cupy-cuda{n}x") for n in (12, 13)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: both)
    assert fault(libraries) == (
        "cupy-cuda12x and cupy-cuda13x overwrite each other: pip uninstall cupy-cuda12x "
        "cupy-cuda13x, then pip install 'surogate[cuda13]'"
    )
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: both[:1])
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    declared(monkeypatch)

    def broken(module: str) -> None:
        raise ImportError("libcublas.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert fault(libraries) == (
        "cupy cannot be loaded (libcublas.so.12: cannot open shared object file): "
        "pip install -U 'surogate[cuda12]'"
    )


def test_library_that_is_missing_altogether(monkeypatch):
    """Then our own modules cannot be imported: the verdict comes all the same."""
    import sys

    monkeypatch.delitem(sys.modules, "surogate.doctor_compute")
    monkeypatch.delattr("surogate.doctor_compute", raising=False)
    monkeypatch.setitem(sys.modules, "surogate.train", None)
    monkeypatch.setattr(doctor, "libraries", lambda: (_ for _ in ()).throw(UserError("x: do y")))
    found = list(examine())
    assert [(f.name, f.ok) for f in found] == [
        ("python", True),
        ("libraries", False),
        ("surogate", False),
    ]


def test_card(monkeypatch, tmp_path):
    small = H200 | {"name": b"GTX 1080", "major": 6, "minor": 1}
    assert doctor_machine.card(card(H200, H200)).count("NVIDIA H200 (sm_90, 140 GiB)") == 2
    assert fault(doctor_machine.card, card(H200, small)) == (
        "GTX 1080 is sm_61: use sm_80 or newer"
    )
    assert fault(doctor_machine.card, card(H200, free=3)) == (
        "NVIDIA H200 (sm_90, 140 GiB): 3.0 of 140.0 GiB are free: end what uses it "
        "(nvidia-smi lists it)"
    )
    none = CPU._replace(no_card="there is no NVIDIA GPU")
    monkeypatch.setattr(doctor_machine, "DRIVER", tmp_path / "none")
    assert "the CPU is used" in doctor_machine.card(none)
    monkeypatch.setattr(doctor_machine, "DRIVER", tmp_path)
    assert fault(doctor_machine.card, none).startswith(
        "the NVIDIA driver is here, but there is no NVIDIA GPU: do that, or look whether"
    )


def test_driver():
    assert doctor_machine.driver(CPU) is None
    assert doctor_machine.driver(card(H200)) == "for CUDA 13.0; libraries for 13.1"
    assert fault(doctor_machine.driver, card(H200, driver=12080)) == (
        "the driver is for CUDA 12.8, the libraries for 13.1: update the driver, or "
        "pip install 'surogate[cuda12]' in an environment of its own"
    )


def test_cache_and_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path / "cache"))
    assert " GiB free, written at " in doctor_machine.cache(CPU)
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUROGATE_CACHE", str(tmp_path / "file"))
    line = "file: cannot be written (File exists): set SUROGATE_CACHE to another folder"
    assert fault(doctor_machine.cache, CPU) == f"{tmp_path}/{line}"
    monkeypatch.setattr(doctor_machine, "LEAST_SPEED", 1e15)
    assert "MB/s are written: run in another folder" in fault(doctor_machine.disk, CPU)


def test_product_that_is_wrong_in_one_element(monkeypatch):
    right = doctor_compute.matmul
    assert doctor_compute.product(CPU).endswith("and right")

    def flipped(*arguments: Any, **options: Any) -> np.ndarray:
        result = right(*arguments, **options)
        result[17, 5] += 0.5
        return result

    monkeypatch.setattr(doctor_compute, "matmul", flipped)
    assert fault(doctor_compute.product, CPU).startswith(
        "1 of 131072 elements of a product are wrong: the hardware is faulty"
    )


@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_attention_that_is_wrong(monkeypatch, value):
    right, calls = doctor_compute.attention_fwd, []

    def wrong(*arguments: Any, **options: Any) -> Any:
        o, res = right(*arguments, **options)
        calls.append(o)
        if len(calls) == 2:
            o[300, 3, 7] += value
        return o, res

    assert doctor_compute.attention(CPU) == "NumPy, over documents"
    monkeypatch.setattr(doctor_compute, "attention_fwd", wrong)
    assert "and try again; if it stays, report it" in fault(doctor_compute.attention, CPU)


@pytest.mark.parametrize(
    "losses", [[6.2, 6.3, 6.2], [6.2, np.nan, 6.0], [2.0, 1.9, 1.8], [6.2, 6.2, 6.2]]
)
def test_step_that_does_not_learn(monkeypatch, losses):
    monkeypatch.setattr(doctor_compute, "_losses", lambda device, updates: losses[:updates])
    assert "the losses of three updates are" in fault(doctor_compute.step, CPU)


def test_step_that_differs_from_the_host(monkeypatch):
    monkeypatch.setattr(
        doctor_compute, "_losses", lambda device, updates: [[6.6], [6.2, 6.0, 5.8]][updates > 1]
    )
    assert "the first on the CPU 6.600, and should fall and agree" in fault(
        doctor_compute.step, card(H200)
    )


def test_check_that_hangs_or_breaks(monkeypatch):
    monkeypatch.setattr(doctor, "LIMIT", 0.1)
    release = threading.Event()
    ok, text = _within_limit(lambda: str(release.wait())) or (True, "")
    release.set()
    assert not ok and text.startswith("did not come back in 0 s: the GPU or the disk hangs")

    def broken() -> str:
        raise MemoryError("cudaErrorIllegalAddress\nmore")

    assert _within_limit(broken) == (
        False,
        "MemoryError: cudaErrorIllegalAddress; report it if this stays",
    )
    assert _within_limit(lambda: None) is None


class Cards:
    """What the check of a collective calls of CuPy, with sums by NumPy."""

    def __init__(self, count: int, error: float = 0.0) -> None:
        self.runtime = SimpleNamespace(getDeviceCount=lambda: count)
        self.arrays: dict[int, np.ndarray] = {}
        self.error = error
        self.cuda = self
        self.Stream = SimpleNamespace(null=Context(ptr=0))
        self.nccl = SimpleNamespace(
            NcclCommunicator=SimpleNamespace(initAll=lambda devices: [self] * len(devices)),
            groupStart=lambda: self.started.clear(),
            groupEnd=self.end,
            NCCL_FLOAT32=7,
            NCCL_SUM=0,
        )
        self.started: list[int] = []

    def Device(self, index: int = 0) -> "Context":
        return Context(synchronize=lambda: None)

    def full(self, size: int, value: float, dtype: Any) -> Any:
        made = np.full(size, value, dtype).view(Pointed)
        self.arrays[id(made)] = made
        return made

    def allReduce(
        self, source: int, target: int, size: int, kind: int, add: int, stream: int
    ) -> None:
        assert source == target and size == 1 << 22 and (kind, add) == (7, 0)
        self.started.append(source)

    def end(self) -> None:
        total = sum(self.arrays[name].copy() for name in self.started)
        for name in self.started:
            self.arrays[name][...] = total + self.error


class Pointed(np.ndarray):
    """An array whose address is its identity."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=id(self))


class Context(SimpleNamespace):
    """A context manager of anything."""

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def test_collective(monkeypatch):
    import sys

    def check(cards: Cards) -> str | None:
        monkeypatch.setitem(sys.modules, "cupy", cards)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cards)
        return doctor_machine.collective(Device("cuda", "x", cards, BF16))

    assert doctor_machine.collective(CPU) is None
    assert check(Cards(1)) is None
    assert (check(Cards(4)) or "").startswith("4 GPUs add up rightly, ")
    with pytest.raises(UserError, match="a sum over the GPUs is wrong: set NCCL_P2P_DISABLE=1"):
        check(Cards(4, error=1.0))
    missing = Cards(2)
    del missing.nccl
    with pytest.raises(UserError, match="NCCL cannot be loaded"):
        check(missing)


@pytest.mark.gpu
def test_on_a_card(tmp_path: Path):
    found = {finding.name: finding for finding in examine()}
    assert not [finding for finding in found.values() if not finding.ok]
    assert {"card", "driver", "product", "attention", "step"} <= found.keys()
    assert "TFLOP/s in bfloat16" in found["product"].text
    assert sum(finding.seconds for finding in found.values()) < 60
