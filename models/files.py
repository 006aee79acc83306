"""Files of a checkpoint directory: safetensors and JSON, opened, written, and moved into place.

A safetensors file is 8 bytes of little-endian header length, a JSON header (name -> dtype, shape,
data_offsets), and the data. ``open_tensors`` reads headers alone; ``write_safetensors`` streams one
tensor at a time. ``staged`` gives a directory to write to whose files are moved into place when all
are on the disk, so that a run which dies while saving leaves the previous checkpoint whole.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from surogate.kernels.arrays import BF16, Array

# safetensors' name of a dtype, and config.json's.
DTYPE_NAMES = {
    BF16: ("BF16", "bfloat16"),
    np.dtype(np.float16): ("F16", "float16"),
    np.dtype(np.float32): ("F32", "float32"),
}
READABLE = frozenset(short for short, _ in DTYPE_NAMES.values())


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line with the file and the tensor."""


class Tensor(NamedTuple):
    """Where a tensor is: its open file, that file's path, and what the header says."""

    handle: Any
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def open_tensors(paths: Iterable[Path]) -> Iterator[dict[str, Tensor]]:
    """The tensors of some safetensors files, whose headers are read and data is not.

    Raises CheckpointError for a file that is missing or truncated, a dtype that is not read, and a
    name that is there twice.
    """
    tensors: dict[str, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                handle = stack.enter_context(safe_open(path, "numpy"))
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing; fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({error}); fetch it again"
                ) from None
            for name in handle.keys():
                header = handle.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if name in tensors:
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {tensors[name].path.name} too"
                    )
                if dtype not in READABLE:
                    raise CheckpointError(
                        f"{path}: tensor {name} has dtype {dtype}, which is not supported; "
                        f"must be one of {', '.join(sorted(READABLE))}"
                    )
                tensors[name] = Tensor(handle, path, name, shape, dtype)
        yield tensors


def equal(one: Tensor, other: Tensor, chunk: int = 4096) -> bool:
    """Whether two tensors of one shape hold the same numbers, compared a few rows at a time."""

    def rows(tensor: Tensor, start: int) -> np.ndarray:
        # A slice that ends past the last row is an error in safetensors.
        stop = min(start + chunk, tensor.shape[0])
        return tensor.handle.get_slice(tensor.name)[start:stop].astype(np.float32)

    return all(
        np.array_equal(rows(one, start), rows(other, start), equal_nan=True)
        for start in range(0, one.shape[0], chunk)
    )


def cast(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Rounds to ``dtype``. float16 is the one with a range that weights may leave: CheckpointError
    that begins with ``where``.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        out = array.astype(dtype)
    if dtype == np.float16 and (np.isinf(out) & np.isfinite(array)).any():
        raise CheckpointError(f"{where}: exceeds the range of float16; use bfloat16 or float32")
    return out


def check_dtype(dtype: np.dtype) -> None:
    """Raises ValueError unless checkpoints may hold ``dtype``."""
    if dtype not in DTYPE_NAMES:
        names = ", ".join(long for _, long in DTYPE_NAMES.values())
        raise ValueError(f"checkpoint dtype must be one of {names}, got {dtype}")


@contextlib.contextmanager
def staged(directory: Path, size: int) -> Iterator[Path]:
    """A fresh directory that becomes ``directory``; inside one that exists, its files move up.

    Either way renames stay within one file system: ``directory`` may be where a disk is mounted.
    Raises CheckpointError for a disk that refuses, and ``size`` bytes for one that is full.
    """
    exists = directory.exists()
    partial = (directory if exists else directory.parent) / f".{directory.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _sync(partial)
        if exists:
            for path in sorted(partial.iterdir()):
                path.replace(directory / path.name)
            _sync(directory)
        else:
            partial.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = f"the disk is full; {size / 1e9:.3g} GB are needed"
        raise CheckpointError(f"{directory}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, blocks: Iterable[Any]) -> None:
    """Writes blocks of bytes and waits for the disk."""
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object as transformers does."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    write_bytes(path, [f"{text}\n".encode()])


def write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: np.dtype) -> None:
    """Writes tensors of the host or the card, rounded to ``dtype``, one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.size * dtype.itemsize
        shape = list(array.shape)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype][0],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def blocks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for name, array in tensors.items():
            host = array if isinstance(array, np.ndarray) else array.get()
            yield np.ascontiguousarray(cast(host, dtype, name)).reshape(-1).view(np.uint8)

    write_bytes(path, blocks())
