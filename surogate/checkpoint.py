"""Checkpoints of a run: step_00000050/ with the trained weights, the optimizer's state and a manifest.

A checkpoint is written beside its final name, every file and the folder are synced to the disk, and then
the folder is renamed and its parent synced. So a folder named step_NNNNNNNN is whole, whatever moment
the machine stops at; ``newest`` also checks that every file has the size that the manifest says.

    trained.safetensors    trained weights under their checkpoint (or PEFT) names
    optimizer.safetensors  masters and moments under the same names with a prefix
    checkpoint.json        step, settings, and the size and SHA-256 of each file
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from surogate.errors import UserError

FORMAT = 1
MANIFEST = "checkpoint.json"
TRAINED, OPTIMIZER = "trained.safetensors", "optimizer.safetensors"


class Checkpoint(NamedTuple):
    """What a run needs to go on: arrays are NumPy, names are the checkpoint's."""

    step: int
    trained: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    settings: dict[str, Any]


def save(directory: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes step_NNNNNNNN under ``directory`` and removes all but the ``keep`` newest.

    Raises UserError when the disk refuses; what was there before stays whole.
    """
    final = directory / f"step_{checkpoint.step:08d}"
    partial = directory / f".partial-{final.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {TRAINED: checkpoint.trained, OPTIMIZER: checkpoint.optimizer}
        for name, arrays in files.items():
            save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, partial / name)
        manifest = {
            "format": FORMAT,
            "step": checkpoint.step,
            "settings": checkpoint.settings,
            "files": {name: _facts(partial / name) for name in files},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _sync(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{final}: cannot write the checkpoint: {_reason(error)}; earlier checkpoints are whole"
        ) from None
    for old in _steps(directory)[:-keep]:
        _remove(old)
    return final


def newest(directory: Path) -> Path | None:
    """The newest whole checkpoint under ``directory``, or None. Removes what an interrupted save left."""
    if not directory.is_dir():
        return None
    for leftover in directory.glob(".partial-step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in reversed(_steps(directory)):
        if _whole(path):
            return path
    return None


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint and checks every file against its manifest. Raises UserError naming the file."""
    manifest = _manifest(path)
    if manifest is None:
        raise UserError(f"{path}: {MANIFEST} is missing or is not JSON; use an older checkpoint")
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path}: is of format {manifest['format']}, this version reads format {FORMAT}"
        )
    arrays = {}
    for name, facts in manifest["files"].items():
        found = _facts(path / name) if (path / name).exists() else None
        if found != facts:
            raise UserError(
                f"{path / name}: does not match {MANIFEST} (damaged); remove {path} and resume again"
            )
        arrays[name] = load_file(path / name)
    return Checkpoint(manifest["step"], arrays[TRAINED], arrays[OPTIMIZER], manifest["settings"])


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each setting that differs between a checkpoint and this run."""
    return [
        f"{key}: {saved.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]


def _steps(directory: Path) -> list[Path]:
    return sorted(p for p in directory.glob("step_*") if p.is_dir() and p.name[5:].isdigit())


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return None


def _whole(path: Path) -> bool:
    manifest = _manifest(path)
    return manifest is not None and all(
        (path / name).exists() and (path / name).stat().st_size == facts["bytes"]
        for name, facts in manifest["files"].items()
    )


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Renames first, so that a folder with the name of a checkpoint is never half removed."""
    doomed = path.with_name(f".partial-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)
