"""Checkpoints of a run: step_00000050/ with the trained weights, the optimizer's state and a
manifest.

A checkpoint is written beside its final name, every file and the folder are synced to the disk, and
then the folder is renamed and its parent synced; a folder is renamed before it is removed. So a
folder named step_NNNNNNNN is whole whatever moment the machine stops at, and one that is not was
damaged afterwards: ``newest_whole`` says so, puts it aside and takes the one before.

    trained.safetensors    trained weights by their place in the tree
    optimizer.safetensors  number of updates, moments and masters under the same names with a prefix
    checkpoint.json        step, settings, sources
    manifest.json          the hash of every tensor and file, see manifest.py

Arrays are written and read one at a time: a checkpoint costs no memory but its largest array.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from surogate.errors import UserError, reason
from surogate.kernels.arrays import BF16
from surogate.manifest import Damaged, faults, read_manifest, write_manifest
from surogate.models.files import Planned, Staging, sync_directory

FORMAT = 2
FACTS = "checkpoint.json"
TRAINED, OPTIMIZER = "trained.safetensors", "optimizer.safetensors"
HEADERS = 1 << 20  # bytes, more than those of all files but their arrays
_CHUNK = 1 << 16  # elements that are looked at together


class Checkpoint(NamedTuple):
    """What a run needs to go on. Arrays may lie on the host or the device."""

    step: int
    trained: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]  # every key of the configuration
    sources: Mapping[str, Any]  # what else must be as it was: hashes of rows and frozen weights

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(a.nbytes for part in (self.trained, self.optimizer) for a in part.values())


class Saved(NamedTuple):
    """A checkpoint on the disk, and what its checkpoint.json says."""

    path: Path
    step: int
    settings: dict[str, Any]
    sources: dict[str, Any]


def save(
    directory: Path,
    checkpoint: Checkpoint,
    *,
    keep: int,
    commit: AbstractContextManager[Any] | None = None,
) -> Path:
    """Writes step_NNNNNNNN under ``directory`` and removes all but the ``keep`` newest up to it.

    ``commit`` is entered for the moment in which names change; when it raises, none did.
    Raises UserError when the disk refuses or an array holds what is not a finite number; what was
    there before stays whole.
    """
    final = directory / f"step_{checkpoint.step:08d}"
    partial = final.with_name(f".partial-{final.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _require_room(partial, checkpoint.nbytes + HEADERS)
        staging = Staging(partial, {})
        staging.tensors(TRAINED, _finite(checkpoint.trained))
        staging.tensors(OPTIMIZER, _finite(checkpoint.optimizer))
        facts = checkpoint._asdict() | {"format": FORMAT}
        staging.json(FACTS, {k: facts[k] for k in ("format", "step", "settings", "sources")})
        write_manifest(staging)
        sync_directory(partial)
        with commit or nullcontext():
            if final.exists():
                _remove(final)
            os.replace(partial, final)
            sync_directory(directory)
            older = [path for path in _steps(directory) if _number(path) <= checkpoint.step]
            for old in older[:-keep]:
                _remove(old)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{final}: cannot write the checkpoint: {reason(error)}; earlier checkpoints are whole"
        ) from None
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def clean(directory: Path) -> None:
    """Removes what interrupted saves left."""
    for leftover in directory.glob(".partial-step_*"):
        shutil.rmtree(leftover, ignore_errors=True)


def newest(directory: Path) -> Path | None:
    """The newest checkpoint under ``directory``, whole or not, or None."""
    steps = _steps(directory)
    return steps[-1] if steps else None


def newest_whole(directory: Path, *, say: Callable[[str], None]) -> Saved | None:
    """The newest checkpoint of which every byte is as it was written; None if there is none at all.

    Newer ones that are damaged are renamed to step_NNNNNNNN.damaged, and ``say`` gets a line for
    each. Raises UserError when no checkpoint is whole: a run never starts anew in silence.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(_steps(directory)):
        try:
            found = faults(path)
            if not found:
                break
        except PermissionError as error:
            raise UserError(f"{error.filename}: {reason(error)}") from None
        damaged.append((path, found[0]))
    else:
        if damaged:
            raise UserError(
                f"{damaged[0][1]}, and no checkpoint before it is whole; put it back from a copy, "
                "or set resume_from_checkpoint = false to start anew"
            )
        return None
    saved = load(path)
    for one, fault in damaged:
        aside = one.with_name(f"{one.name}.damaged")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(one, aside)
        except OSError as error:
            raise UserError(f"{one}: cannot be put aside: {reason(error)}") from None
        say(f"{fault}: going on from {path.name}, {one.name} is now {aside.name}")
    return saved


def discard(directory: Path) -> None:
    """Removes all checkpoints under ``directory``. Raises UserError when that is refused."""
    for path in _steps(directory):
        try:
            _remove(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be removed: {reason(error)}") from None


def load(path: Path) -> Saved:
    """Reads checkpoint.json. Raises UserError naming the file when it is damaged or of another
    format. The arrays are looked at by manifest.faults.
    """
    remedy = f"remove {path} to go on from the checkpoint before it"
    try:
        read_manifest(path)
        facts = json.loads((path / FACTS).read_bytes())
    except Damaged as error:
        raise UserError(f"{error}; {remedy}") from None
    except (OSError, ValueError):
        raise UserError(f"{path / FACTS}: is missing or damaged; {remedy}") from None
    if facts["format"] != FORMAT:
        raise UserError(
            f"{path}: is of format {facts['format']}, this version reads format {FORMAT}"
        )
    return Saved(path, facts["step"], facts["settings"], facts["sources"])


def fill_(
    file: Path,
    arrays: Mapping[str, Any],
    *,
    put: Callable[[Any], Any],
    left_out: tuple[str, ...] = (),
) -> None:
    """Writes the arrays of a checkpoint's file into arrays of the same names, one at a time; what
    the file has under ``left_out`` (prefixes of names) is not wanted.

    ``put`` moves a NumPy array beside them. Raises UserError when a name, shape or dtype differs.
    """
    with safe_open(file, "numpy") as tensors:
        wanted = {name for name in tensors.keys() if not name.startswith(left_out)}  # noqa: SIM118
        different = sorted(arrays.keys() ^ wanted)
        if different:
            raise UserError(
                f"{file}: is of another run: {different[0]} is on one side alone "
                f"({len(different)} such arrays)"
            )
        for name, array in arrays.items():
            saved = tensors.get_tensor(name)
            if saved.shape != array.shape or saved.dtype != array.dtype:
                raise UserError(
                    f"{file}: {name} is {saved.dtype}{list(saved.shape)}, "
                    f"this run has {array.dtype}{list(array.shape)}"
                )
            array[...] = saved if isinstance(array, np.ndarray) else put(saved)


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """A few words for each setting that differs between a checkpoint and this run, by its dotted
    key.
    """
    # As they come back from a file: lists for tuples.
    before, after = (_dotted(json.loads(json.dumps(settings))) for settings in (saved, now))
    return {
        key: f"{key}: {before.get(key)!r} in the checkpoint, {after.get(key)!r} now"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    }


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of each data set by their own keys, as --set names them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            for index, part in enumerate(value):
                found |= {f"{key}.{index}.{name}": inner for name, inner in part.items()}
        else:
            found[key] = value
    return found


def _finite(arrays: Mapping[str, Any]) -> dict[str, Planned]:
    """Arrays to be written, each of which is refused if a number of it is infinite or NaN."""

    def plan(name: str, array: Any) -> Planned:
        def load() -> np.ndarray:
            host = array if isinstance(array, np.ndarray) else array.get()
            if not is_finite(host):
                raise UserError(
                    f"{name} holds values that are not finite: the checkpoint is not written, "
                    "earlier ones are whole; lower learning_rate, or look at the data"
                )
            return host

        return Planned(tuple(array.shape), np.dtype(array.dtype), load)

    return {name: plan(name, array) for name, array in arrays.items()}


def is_finite(array: np.ndarray) -> bool:
    """Whether every number is. A bfloat16 is not if all bits of its exponent are set."""
    flat = np.ascontiguousarray(array).reshape(-1)
    parts = (flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK))
    if array.dtype == BF16:
        exponent = np.uint16(0x7F80)
        return all(((part.view(np.uint16) & exponent) != exponent).all() for part in parts)
    return all(np.isfinite(part).all() for part in parts)


def _require_room(folder: Path, needed: int) -> None:
    """Raises OSError where the disk says that it has too little room."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        text = f"no space left on device: {needed:,} bytes are needed, {free:,} are free"
        raise OSError(errno.ENOSPC, text)


def _steps(directory: Path) -> list[Path]:
    found = [p for p in directory.glob("step_*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name[5:])


def _remove(path: Path) -> None:
    """Renames first, so that a folder with the name of a checkpoint is never half removed."""
    doomed = path.with_name(f".partial-{path.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
