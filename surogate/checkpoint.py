"""Checkpoints of a run: step_00000050/ with the trained weights, the optimizer's state and a
manifest.

A checkpoint is written beside its final name, every file and the folder are synced to the disk, and
then the folder is renamed and its parent synced; a folder is renamed before it is removed. So a
folder named step_NNNNNNNN is whole whatever moment the machine stops at, and one that is not was
damaged afterwards: ``load`` says so rather than going on from less.

    trained.safetensors    trained weights by their place in the tree
    optimizer.safetensors  number of updates, moments and masters under the same names with a prefix
    checkpoint.json        step, settings, sources, the size and SHA-256 of each file, and its own

Arrays are written and read one at a time: a checkpoint costs no memory but its largest array.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from surogate.errors import UserError
from surogate.kernels.arrays import BF16

FORMAT = 1
MANIFEST = "checkpoint.json"
TRAINED, OPTIMIZER = "trained.safetensors", "optimizer.safetensors"
# safetensors' names of the dtypes that a state holds.
DTYPES = {
    BF16: "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
}


class Checkpoint(NamedTuple):
    """What a run needs to go on. Arrays may lie on the host or the device."""

    step: int
    trained: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]  # that decide what is computed
    sources: Mapping[str, str]  # hashes of what the settings point at: rows, frozen weights


class Saved(NamedTuple):
    """A checkpoint on the disk whose files are what its manifest says."""

    path: Path
    step: int
    settings: dict[str, Any]
    sources: dict[str, str]


def save(directory: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Writes step_NNNNNNNN under ``directory`` and removes all but the ``keep`` newest.

    Raises UserError when the disk refuses; what was there before stays whole.
    """
    final = directory / f"step_{checkpoint.step:08d}"
    partial = _partial(final)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {TRAINED: checkpoint.trained, OPTIMIZER: checkpoint.optimizer}
        manifest = {
            "format": FORMAT,
            "step": checkpoint.step,
            "settings": checkpoint.settings,
            "sources": checkpoint.sources,
            "files": {name: _write(partial / name, _blocks(a)) for name, a in files.items()},
        }
        sealed = {**manifest, "seal": _seal(manifest)}
        _write(partial / MANIFEST, iter([json.dumps(sealed, indent=1).encode()]))
        _sync(partial)
        if final.exists():
            _remove(final)
        os.replace(partial, final)
        _sync(directory)
        for old in _steps(directory)[:-keep]:
            _remove(old)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{final}: cannot write the checkpoint: {reason(error)}; earlier checkpoints are whole"
        ) from None
    return final


def newest(directory: Path) -> Path | None:
    """The newest checkpoint under ``directory``, or None. Removes what an interrupted save left."""
    for leftover in directory.glob(".partial-step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = _steps(directory)
    return steps[-1] if steps else None


def discard(directory: Path) -> None:
    """Removes all checkpoints under ``directory``. Raises UserError when that is refused."""
    for path in _steps(directory):
        try:
            _remove(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be removed: {reason(error)}") from None


def load(path: Path) -> Saved:
    """Reads a manifest and checks every file against it. Raises UserError naming the file."""
    remedy = f"remove {path} to go on from the checkpoint before it"
    try:
        manifest = dict(json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        manifest = {}
    made_by = manifest.get("format", FORMAT)
    if made_by != FORMAT:
        raise UserError(f"{path}: is of format {made_by}, this version reads format {FORMAT}")
    if manifest.pop("seal", None) != _seal(manifest):
        raise UserError(f"{path / MANIFEST}: is missing or damaged; {remedy}")
    for name, facts in manifest["files"].items():
        try:
            found = _facts(path / name)
        except OSError as error:
            raise UserError(f"{path / name}: {reason(error)}; {remedy}") from None
        if found != facts:
            raise UserError(f"{path / name}: is not what {MANIFEST} says (damaged); {remedy}")
    return Saved(path, manifest["step"], manifest["settings"], manifest["sources"])


def fill_(file: Path, arrays: Mapping[str, Any], *, put: Callable[[Any], Any]) -> None:
    """Writes the arrays of a checkpoint's file into arrays of the same names, one at a time.

    ``put`` moves a NumPy array beside them. Raises UserError when a name, shape or dtype differs.
    """
    with safe_open(file, "numpy") as tensors:
        different = sorted(arrays.keys() ^ set(tensors.keys()))
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
            array[...] = put(saved)


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A few words for each setting that differs between a checkpoint and this run."""
    now = json.loads(json.dumps(now))  # as it comes back from a file: lists for tuples
    return [
        f"{key}: {saved.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]


def reason(error: OSError) -> str:
    """What an OSError says, in lower case. NumPy's own, of a write cut short, has no number."""
    if error.strerror:
        return error.strerror.lower()
    return f"{error}; is the disk full?"


def _blocks(arrays: Mapping[str, Any]) -> Iterator[Any]:
    """The bytes of a safetensors file: length of the header, the header, and each array."""
    header, offset = {}, 0
    for name, array in arrays.items():
        span = [offset, offset + array.nbytes]
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays.values():
        host = array if isinstance(array, np.ndarray) else array.get()
        yield np.ascontiguousarray(host).reshape(-1).view(np.uint8)


def _write(path: Path, blocks: Iterator[Any]) -> dict[str, Any]:
    """Writes and syncs a file; returns what the manifest says of it."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in blocks:
            digest.update(block)
            size += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _seal(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest's content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _steps(directory: Path) -> list[Path]:
    found = [p for p in directory.glob("step_*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _partial(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")


def _remove(path: Path) -> None:
    """Renames first, so that a folder with the name of a checkpoint is never half removed."""
    doomed = path.with_name(f".partial-{path.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
