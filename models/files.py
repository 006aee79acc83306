"""Files of a checkpoint directory: safetensors and JSON, opened, written, and moved into place.

A safetensors file is 8 bytes of little-endian header length, a JSON header (name -> dtype, shape,
data_offsets), and the data. ``open_tensors`` reads headers alone; ``write_safetensors`` streams one
tensor at a time. ``staged`` gives a directory to write to whose files are moved into place when all
are on the disk, so that a run which dies while saving leaves the previous checkpoint whole.

Whatever is written is hashed (SHA-256) on its way from memory to the disk, and the writers return
these *facts*, so that a manifest made of them tells what was meant rather than what arrived:

    of any file               bytes, sha256
    of a safetensors file     bytes, header (the hash of the length and the header), and tensors:
                              name -> dtype, shape, sha256 of the data
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
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
# What the files of a quantised model have, codes and scales included.
RAW = {short: dtype for dtype, (short, _) in DTYPE_NAMES.items()} | {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# safetensors' name of every dtype that is written: those, and what an optimizer's state has.
WRITABLE = {dtype: short for dtype, (short, _) in DTYPE_NAMES.items()} | {
    np.dtype(np.float64): "F64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int64): "I64",
}
Facts = dict[str, Any]  # of a file, see above


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line with the file and the tensor."""


class Tensor(NamedTuple):
    """Where a tensor is: its open file, that file's path, and what the header says."""

    handle: Any
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class RawFile:
    """The handle of a safetensors file whose tensors are read by their offsets: the library gives
    NumPy no 8-bit floats.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._start = 8 + int.from_bytes(self._bytes[:8].tobytes(), "little")
        self._header = json.loads(self._bytes[8 : self._start].tobytes())

    def get_slice(self, name: str) -> np.ndarray:
        """A tensor as it lies in the file: what is not looked at is not read."""
        entry = self._header[name]
        start, stop = (self._start + offset for offset in entry["data_offsets"])
        return self._bytes[start:stop].view(RAW[entry["dtype"]]).reshape(entry["shape"])

    def get_tensor(self, name: str) -> np.ndarray:
        """A copy of a tensor."""
        return np.array(self.get_slice(name))


class Planned(NamedTuple):
    """A tensor to be written: ``load`` gives its numbers when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], Array]  # of the host or the card; rounded to ``dtype`` as it is written

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def planned(tensors: Mapping[str, Array], dtype: np.dtype | None = None) -> dict[str, Planned]:
    """Arrays to be written, rounded to ``dtype`` or each in its own."""

    def plan(array: Array) -> Planned:
        return Planned(tuple(array.shape), dtype or np.dtype(array.dtype), lambda: array)

    return {name: plan(array) for name, array in tensors.items()}


class Staging(NamedTuple):
    """A directory whose files wait for their place, and the facts of those written so far."""

    path: Path
    facts: dict[str, Facts]

    def bytes(self, name: str, data: bytes) -> None:
        """Writes a file."""
        self.facts[name] = _write_whole(self.path / name, data)

    def json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes an object."""
        self.facts[name] = write_json(self.path / name, value)

    def tensors(self, name: str, tensors: Mapping[str, Planned]) -> None:
        """Writes a safetensors file."""
        self.facts[name] = write_safetensors(self.path / name, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises CheckpointError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def open_tensors(paths: Iterable[Path], *, raw: bool = False) -> Iterator[dict[str, Tensor]]:
    """The tensors of some safetensors files, whose headers are read and data is not.

    ``raw``: codes of 8 bits are read too, see ``RawFile``.

    Raises CheckpointError for a file that is missing or truncated, a dtype that is not read, and a
    name that is there twice.
    """
    tensors: dict[str, Tensor] = {}
    readable = RAW.keys() if raw else READABLE
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
            source = RawFile(path) if raw else handle
            for name in handle.keys():
                header = handle.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if name in tensors:
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {tensors[name].path.name} too"
                    )
                if dtype not in readable:
                    raise CheckpointError(
                        f"{path}: tensor {name} has dtype {dtype}, which is not supported; "
                        f"must be one of {', '.join(sorted(readable))}"
                    )
                tensors[name] = Tensor(source, path, name, shape, dtype)
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
def staged(directory: Path, size: int) -> Iterator[Staging]:
    """A fresh directory that becomes ``directory``; inside one that exists, its files move up.

    Either way renames stay within one file system: ``directory`` may be where a disk is mounted.
    Raises CheckpointError for a disk that refuses, and ``size`` bytes for one that is full.
    """
    exists = directory.exists()
    partial = (directory if exists else directory.parent) / f".{directory.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield Staging(partial, {})
        sync_directory(partial)
        if exists:
            for path in sorted(partial.iterdir()):
                path.replace(directory / path.name)
            sync_directory(directory)
        else:
            partial.rename(directory)
        sync_directory(directory.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = f"the disk is full; {size / 1e9:.3g} GB are needed"
        raise CheckpointError(f"{directory}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Waits until the disk has a directory's names."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, blocks: Iterable[Any]) -> int:
    """Writes blocks of bytes, waits for the disk, and returns their size."""
    with path.open("wb") as file:
        size = sum(file.write(block) for block in blocks)
        file.flush()
        os.fsync(file.fileno())
    return size


def write_json(path: Path, value: Mapping[str, Any]) -> Facts:
    """Writes an object as transformers does."""
    return _write_whole(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())


def _write_whole(path: Path, data: bytes) -> Facts:
    return {"bytes": write_bytes(path, [data]), "sha256": hashlib.sha256(data).hexdigest()}


def write_safetensors(path: Path, tensors: Mapping[str, Planned]) -> Facts:
    """Writes tensors one after another, each in the dtype of its plan."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    facts: dict[str, Facts] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        facts[name] = {"dtype": WRITABLE[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = facts[name] | {"data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def blocks() -> Iterator[Any]:
        yield head
        for name, tensor in tensors.items():
            array = tensor.load()
            host = cast(array if isinstance(array, np.ndarray) else array.get(), tensor.dtype, name)
            block: Any = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
            assert block.nbytes == tensor.nbytes, f"{name}: {host.shape} is not what was planned"
            facts[name]["sha256"] = hashlib.sha256(block).hexdigest()
            yield block

    size = write_bytes(path, blocks())
    return {"bytes": size, "header": hashlib.sha256(head).hexdigest(), "tensors": facts}
