"""``surogate doctor``: tries out what training needs, and says what to do where it fails.

Each check returns what it found, or None where there is nothing to check; what is wrong it raises
as a UserError of one line: what, and what to do. A check that does not come back is given up after
LIMIT seconds, so that a verdict comes in any case. Nothing but the kernel cache is written to.

This module imports nothing that may be missing: the checks that need libraries are in
doctor_machine.py and doctor_compute.py, which are imported when the libraries have been looked at.
"""

import importlib
import importlib.metadata
import json
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from surogate.errors import UserError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

LIMIT = 40.0  # seconds for a check; the first on a card compiles its kernels
DRIVER = Path("/proc/driver/nvidia/version")
Check = Callable[[], str | None]


class Finding(NamedTuple):
    """What a check found."""

    name: str
    ok: bool
    text: str
    seconds: float


def python_check() -> str:
    """The interpreter and the machine."""
    return f"{platform.python_version()} on {platform.platform()}"


def libraries() -> str:
    """Every library that is needed: there, in a version that fits, and loadable."""
    names = {(dist.name or "").lower() for dist in importlib.metadata.distributions()}
    if len(cupy := sorted(name for name in names if name.startswith("cupy-cuda"))) > 1:
        raise UserError(
            f"{' and '.join(cupy)} overwrite each other: pip uninstall {' '.join(cupy)}, then "
            "pip install 'surogate[cuda13]'"
        )
    extra = "cuda" + cupy[0].removeprefix("cupy-cuda").removesuffix("x") if cupy else ""
    on_card = bool(cupy) and DRIVER.exists()
    for requirement in _requirements(extra if on_card else ""):
        _check_version(requirement)
    wanted = ["numpy", "tokenizers", "safetensors"]
    if on_card:
        for module in ("cupy", "nvmath.bindings.cublasLt", "cudnn"):
            _import(module, extra)
        wanted += [*cupy, "nvmath-python", "nvidia-cudnn-frontend"]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in wanted)


def _requirements(extra: str) -> "Iterator[Requirement]":
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("surogate") or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError("surogate itself is not installed: pip install surogate") from None
    for requirement in map(Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _check_version(requirement: "Requirement") -> None:
    remedy = f"pip install -U '{requirement.name}{requirement.specifier}'"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{requirement.name} is missing: {remedy}") from None
    if not requirement.specifier.contains(found, prereleases=True):
        raise UserError(f"{requirement.name} {found} does not fit: {remedy}")


def _import(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{module} cannot be loaded ({first}): pip install -U 'surogate[{extra}]'"
        ) from None


def examine() -> Iterator[Finding]:
    """The findings, one by one as they are made; of checks that have nothing to check, none."""
    yield from _findings({"python": python_check, "libraries": libraries})
    try:
        from surogate import doctor_compute, doctor_machine
        from surogate.device import choose_device
        from surogate.train import stream_of
    except ImportError as error:
        yield Finding("surogate", False, f"cannot be loaded ({error}); see above", 0.0)
        return
    device = choose_device("auto")

    def on_device(check: Callable[..., str | None]) -> str | None:
        with stream_of(device):
            return check(device)

    checks = doctor_machine.CHECKS | doctor_compute.CHECKS
    yield from _findings({name: partial(on_device, check) for name, check in checks.items()})


def _findings(checks: dict[str, Check]) -> Iterator[Finding]:
    for name, check in checks.items():
        begin = time.perf_counter()
        outcome = _within_limit(check)
        if outcome is not None:
            yield Finding(name, *outcome, time.perf_counter() - begin)


def _within_limit(check: Check) -> tuple[bool, str] | None:
    """(whether all is well, the text), or None. The check runs in a thread, which may be left."""
    outcome: list[tuple[bool, str] | None] = []

    def run() -> None:
        try:
            text = check()
            outcome.append(None if text is None else (True, text))
        except UserError as error:
            outcome.append((False, str(error)))
        except Exception as error:  # a library's own: what it says is what there is to know
            first = str(error).strip().partition("\n")[0]
            outcome.append((False, f"{type(error).__name__}: {first}; report it if this stays"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    if not outcome:
        return False, f"did not come back in {LIMIT:.0f} s: the GPU or the disk hangs; restart it"
    return outcome[0]


def doctor_command(*, as_json: bool) -> int:
    """surogate doctor. Returns the exit status: 1 when something is wrong."""
    begin = time.perf_counter()
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(f"{'ok   ' if finding.ok else 'FAULT'}  {finding.name:10s} {finding.text}")
            sys.stdout.flush()
    faults = sum(not finding.ok for finding in findings)
    if as_json:
        checks = [finding._asdict() for finding in findings]
        print(json.dumps({"ok": not faults, "checks": checks}, indent=1))
        return min(faults, 1)
    verdict = "ready to train"
    if faults:
        verdict = f"{faults} fault{'s' if faults > 1 else ''}; the lines above say what to do"
    print(f"verdict: {verdict} ({time.perf_counter() - begin:.0f} s)")
    return min(faults, 1)
