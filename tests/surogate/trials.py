"""Trials of a run's safety: processes that are stopped in every way at random moments.

    python -m tests.surogate.trials --count 200

A trial starts a run, or lets one go on, and does one of KINDS to it at a random moment, which may
be before the first step, in a step, in a save or in the export. Then it looks at what is left:

* no traceback, and the exit status that the kind should give;
* a checkpoint that is whole in every byte, no older than the steps since the last save explain;
* when the run has got to its end after all, weights, moments, result and log equal to those of a
  run that nothing happened to, bit for bit.
"""

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

from surogate import checkpoint
from surogate.manifest import faults
from surogate.report import read_log
from tests.oracle import same_bits
from tests.surogate.runs import prepare, start, steps, write_config

KINDS = ("SIGKILL", "SIGTERM", "SIGINT", "full disk", "read-only", "damage")
STEPS, SAVE_STEPS = 60, 2
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of linux/prctl.h, linux/capability.h


class Result(NamedTuple):
    """How a process ended."""

    status: int
    output: str
    errors: str


class Trial:
    """A run in ``folder``, and the same that nothing happens to."""

    def __init__(self, folder: Path, *, lora: bool, rng: random.Random) -> None:
        self.folder, self.out, self.rng = prepare(folder), folder / "out", rng
        self.options: dict[str, Any] = {
            "sequence_len": 16,
            "per_device_train_batch_size": 1,
            "eval_steps": 7,
            "max_steps": STEPS,
            "save_steps": SAVE_STEPS,
            "save_total_limit": 3,
        }
        if lora:
            chats = [{"path": str(folder / "chats.jsonl"), "type": "conversation"}]
            self.options |= {"lora": True, "lora_rank": 2, "datasets": chats, "sequence_len": 64}
        self.config = write_config(folder, **self.options)
        begin = time.monotonic()
        plain = start(self.config, f"output_dir={folder / 'plain'}")
        assert finished(plain) == Result(0, "", ""), "the run that nothing happens to failed"
        self.seconds = time.monotonic() - begin
        self.reached = 0  # the newest step that was seen saved
        self.damaged: Path | None = None  # the last checkpoint that was damaged

    def strike(self, kind: str) -> str:
        """One trial of a kind; returns in a word what it met: a run that it stopped, or one that
        had already ended.
        """
        before = obeying if kind == "read-only" else None
        with room(self.out) if kind == "full disk" else contextlib.nullcontext():
            process = start(self.config, before=before)
            moment = self._wait(process)
            if kind == "full disk":
                with full(self.out):
                    result = finished(process)
            elif kind == "read-only":
                self.out.mkdir(parents=True, exist_ok=True)  # the run may not have got there yet
                with read_only(self.out):
                    result = finished(process)
            else:
                name = "SIGKILL" if kind == "damage" else kind
                process.send_signal(signal.Signals[name])
                result = finished(process)
        self._look(kind, result)
        if kind == "damage":
            self._damage()
        return moment if result.status else "too late"

    def _wait(self, process: "subprocess.Popen[str]") -> str:
        """Lets a random time go by: any of the whole run's, or a little after a random step."""
        if self.rng.random() < 0.4:
            time.sleep(self.rng.uniform(0, self.seconds))
            return "any time"
        assert process.stdout is not None
        left = self.rng.randrange(1, STEPS // 2)
        for line in process.stdout:
            left -= line.startswith("step ")
            if left == 0:
                break
        time.sleep(self.rng.uniform(0, 0.05))
        return "step"

    def _look(self, kind: str, result: Result) -> None:
        wanted = {
            "SIGKILL": -signal.SIGKILL,
            "damage": -signal.SIGKILL,
            "SIGTERM": 128 + signal.SIGTERM,
            "SIGINT": 128 + signal.SIGINT,
            "full disk": 1,
            "read-only": 1,
        }[kind]
        # A signal that comes before Python is ready to take it ends the process by itself.
        early = -signal.Signals[kind] if kind in ("SIGTERM", "SIGINT") else wanted
        assert result.status in (0, wanted, early), (kind, result)
        ours = result.status in (0, wanted)
        assert not ours or "Traceback" not in result.errors, (kind, result)
        if wanted == 1 and result.status == 1:
            last = result.errors.splitlines()[-1]
            assert last.startswith("error: "), (kind, result)
        left = sorted(self.out.glob("step_*[0-9]"))
        if left and left[-1] == self.damaged and faults(left[-1]):
            del left[-1]  # ours, and the run did not get as far as to put it aside
        assert [fault for path in left for fault in faults(path)] == [], kind
        newest = checkpoint.load(left[-1]).step if left else 0
        assert newest >= self.reached, (kind, newest, self.reached)
        told = f"stopped by {kind} after step "
        if told in result.output:
            assert f"{told}{newest}:" in result.output, (kind, newest, result)
        self.reached = newest

    def _damage(self) -> None:
        """Turns a bit of the newest checkpoint over; the next run must go on from another."""
        path = checkpoint.newest(self.out)
        if path is None:
            return
        self.damaged = path
        files = sorted(file for file in path.iterdir() if file.stat().st_size)
        flip(self.rng.choice(files), self.rng)
        others = [p for p in self.out.glob("step_*[0-9]") if p != path]
        if not others:  # then it must refuse to start
            result = finished(start(self.config))
            assert (result.status, "no checkpoint before it is whole" in result.errors) == (1, True)
            shutil.rmtree(path)
        self.reached = max((checkpoint.load(other).step for other in others), default=0)

    def finish(self) -> None:
        """Lets the run go on to its end, and compares that."""
        result = finished(start(self.config))
        assert (result.status, result.errors) == (0, ""), result
        plain = self.folder / "plain"
        for name in (checkpoint.TRAINED, checkpoint.OPTIMIZER):
            one, other = (load_file(f / f"step_{STEPS:08d}" / name) for f in (plain, self.out))
            assert one.keys() == other.keys()
            for key, array in one.items():
                same_bits(other[key], array)
        for name in ("model.safetensors", "adapter_model.safetensors", "manifest.json"):
            assert (plain / name).exists() == (self.out / name).exists()
            if (plain / name).exists():
                assert (plain / name).read_bytes() == (self.out / name).read_bytes()
        one, other = (read_log(f / "log.jsonl") for f in (plain, self.out))
        for column in ("step", "loss", "norm", "lr"):
            assert steps(one, column) == steps(other, column), column
        assert not list(self.out.glob(".partial*")) and faults(self.out) == []

    def anew(self) -> None:
        """Forgets the run."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.reached = 0


def finished(process: "subprocess.Popen[str]") -> Result:
    """The end of a process; the lines of steps are left out of its output."""
    output, errors = process.communicate(timeout=300)
    return Result(process.returncode, output if process.returncode else "", errors)


def flip(file: Path, rng: random.Random) -> None:
    """Turns a random bit of a file over."""
    raw = bytearray(file.read_bytes())
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)


def obeying() -> None:
    """Takes root's right to write into folders that are read-only from this process."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No file can be made in a folder or its folders."""
    places = [folder, *(path for path in folder.glob("**/") if path.is_dir())]
    for place in places:
        with contextlib.suppress(FileNotFoundError):  # the run removes what it no longer keeps
            place.chmod(0o555)
    try:
        yield
    finally:
        for place in places:
            if place.exists():
                place.chmod(0o755)


@contextlib.contextmanager
def room(folder: Path) -> Iterator[None]:
    """A disk of its own for a folder, where this process may mount one; its content is kept."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        yield
        return
    disk, kept = folder.with_name("disk"), folder.with_name("kept")
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
    try:
        shutil.copytree(folder, disk, dirs_exist_ok=True)
        folder.rename(kept)
        folder.symlink_to(disk)
        yield
    finally:
        folder.unlink()
        shutil.copytree(disk, folder)
        shutil.rmtree(kept)
        subprocess.run(["umount", disk], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """The disk of a folder has no byte left."""
    filler = folder / "filler"
    if os.geteuid() == 0:
        with filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


def campaign(count: int, seed: int, folder: Path) -> Counter[str]:
    """That many trials; returns how many of each kind met what."""
    rng, seen = random.Random(seed), Counter[str]()
    trials = [Trial(folder / name, lora=name == "lora", rng=rng) for name in ("full", "lora")]
    for number in range(count):
        trial, kind = trials[number % 2], KINDS[number // 2 % len(KINDS)]
        met = trial.strike(kind)
        seen[f"{kind}, {met}"] += 1
        print(f"{number + 1}/{count} {kind}: {met}, saved {trial.reached}/{STEPS}", flush=True)
        if trial.reached == STEPS or rng.random() < 0.08:
            trial.finish()
            trial.anew()
            seen["finished bit-equal"] += 1
    for trial in trials:
        trial.finish()
        seen["finished bit-equal"] += 1
    return seen


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trials of a run's safety.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = campaign(options.count, options.seed, Path(folder))
    for what, times in sorted(seen.items()):
        print(f"{times:4} {what}")


if __name__ == "__main__":
    main()
