"""What every op needs to know about its arrays: where they live, how to make more, and how to
refuse them.

NumPy arrays run the host version of an op, CuPy arrays its kernel. Nothing here imports CuPy until
an array on the card appears.
"""

import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray
else:
    Array = Any

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


class Frozen:
    """Destination of a gradient that nobody wants: the backward leaves it out and returns None."""

    def __repr__(self) -> str:
        return "FROZEN"


FROZEN = Frozen()


class Backend:
    """Two switches that tests turn, and nothing else does.

    ``launch`` takes kernel launches in place of the card, so that the CUDA sources run on the host;
    ``poison`` fills fresh memory with 0xFF.
    """

    launch: Callable[..., None] | None = None
    poison = False


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless the caller kept the contract."""
    if not condition:
        raise ValueError(message)


def describe(x: Any) -> str:
    """An array for an error message: dtype and shape, never its values (they may be on a card)."""
    return f"{x.dtype}{x.shape}" if hasattr(x, "dtype") else str(x)


def on_device(x: Any) -> bool:
    """True when an op on ``x`` must launch a kernel, False when it runs on the host."""
    if isinstance(x, np.ndarray):
        return Backend.launch is not None
    return type(x).__module__.startswith("cupy")


def namespace(x: Any) -> types.ModuleType:
    """The array library of ``x``: numpy, cupy or (references under test) torch."""
    return sys.modules[type(x).__module__.split(".")[0]]


def _filled(shape: Any, dtype: Any, like: Any) -> Any:
    out = namespace(like).empty(shape, dtype)
    if Backend.poison and out.size:
        out.reshape(-1).view(np.uint8).fill(0xFF)
    return out


def empty(shape: Any, dtype: Any, *, like: Any) -> Any:
    """Fresh memory beside ``like``. Under test it is filled with 0xFF bytes: NaN in every
    format.
    """
    return _filled(shape, dtype, like)


def zeros(shape: Any, dtype: Any, *, like: Any) -> Any:
    """Zeros beside ``like``."""
    return namespace(like).zeros(shape, dtype)


def address(x: Any) -> int:
    """Where the first element lies."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def row_stride(name: str, x: Any) -> int:
    """Elements between the starts of neighbouring rows of a matrix.

    Raises ValueError unless each row's own elements are neighbours.
    """
    rows, columns = x.shape
    require(
        columns == 1 or rows == 0 or x.strides[1] == x.itemsize,
        f"{name}: the elements of a row must be neighbours, got strides {x.strides} for "
        f"{describe(x)}",
    )
    return columns if rows <= 1 else x.strides[0] // x.itemsize


def aligned(*arrays: Any) -> bool:
    """Whether all arrays begin at multiples of 16 bytes."""
    return not any(address(x) % 16 for x in arrays if x is not None)


def rows_aligned(*matrices: Any) -> bool:
    """Whether all rows (what the first axis counts) begin at multiples of 16 bytes, so that vector
    accesses fit them.
    """
    return not any((address(x) | x.strides[0]) % 16 for x in matrices if x is not None)


def placed(value: Any, out: Any) -> Any:
    """Host versions: ``value``, in the caller's memory where there is some."""
    if out is None:
        return value
    out[...] = value
    return out


def empty_like(x: Any) -> Any:
    """Fresh C-contiguous memory of the shape and dtype of ``x``."""
    return empty(x.shape, x.dtype, like=x)


def compute_dtype(x: Any) -> np.dtype:
    """The dtype that a host version computes in: float64 stays, all else is float32."""
    return np.dtype(np.float64) if x.dtype == np.float64 else F32


def upcast(x: Any) -> Any:
    """``x`` in the dtype that host versions compute in (no copy when it is there already)."""
    return x.astype(compute_dtype(x), copy=False)


def destination(into: Any, shape: tuple[int, ...], dtype: Any, *, like: Any) -> tuple[Any, bool]:
    """Resolves ``into`` of a backward: (array to write, whether to add to what it holds)."""
    if into is None:
        return empty(shape, dtype, like=like), False
    require(
        into.shape == shape,
        f"into: a gradient of shape {shape} cannot be added to a buffer of shape {into.shape}",
    )
    require(
        into.dtype in (dtype, F32),
        f"into: a gradient of {dtype} accumulates in {dtype} or float32, got {into.dtype}",
    )
    return into, True


def store(value: Any, into: Any, dtype: Any) -> Any:
    """Host versions: returns ``value`` as a fresh gradient of ``dtype``, or adds it into
    ``into``.
    """
    if into is None:
        return value.astype(dtype, copy=False)
    out, _ = destination(into, value.shape, dtype, like=value)
    out[...] = (upcast(out) + value).astype(out.dtype)
    return out
