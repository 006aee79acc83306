"""Global gradient norm, and the factor that turns summed gradients into clipped mean gradients.

Gradients G are of the SUM of the losses of all supervised tokens, ``count`` their number over all
micro-batches and ranks. With norm = sqrt(sum of G^2) / count, the norm of the mean gradient:

    out[0] = norm
    out[1] = min(1, max_norm / (norm + 1e-6)) / count     (what AdamW multiplies G by)
    out[2] = 1 when the sum of squares and the loss are finite and count is positive, else 0, and
             then out[1] = 0

The clipping rule is that of torch.nn.utils.clip_grad_norm_. Nothing is read back to the host.
Squares are summed in float32 within a chunk of a tensor and in float64 beyond, in an order that
only the shapes decide. A sharded gradient is done in two steps around a sum over ranks:
grad_sum_squares, then norm_of_sums.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Float64, Shaped

from surogate.kernels.arrays import Array, empty, namespace, on_device, require, upcast
from surogate.kernels.multi_tensor import TensorTable, tensor_table
from surogate.kernels.nvrtc import THREADS, Source, ctype

SOURCE = Source(
    "grad_norm",
    {
        "grad_norm_partial": [("float",), ("bf16",)],
        "grad_norm_finish": [("float",), ("int",)],
    },
)
CHUNK = 32768  # elements of a block
_FINISH_THREADS = 1024
_EPSILON = 1e-6


class GradTable(NamedTuple):
    """Gradients, and on the card where they lie: one table a dtype. Built once, used every step."""

    grads: tuple[Float[Array, "..."], ...]
    tensors: tuple[tuple[str, TensorTable], ...]  # C++ type of the elements, table


def grad_table(grads: Sequence[Float[Array, "..."]], *, chunk: int = CHUNK) -> GradTable:
    """Writes down where C-contiguous gradients lie. Raises ValueError when there are none."""
    require(len(grads) > 0, "grad_table: grads must not be empty")
    for number, grad in enumerate(grads):
        require(
            grad.flags.c_contiguous,
            f"grad_table: grads must be C-contiguous, got shape {grad.shape} with strides "
            f"{grad.strides} at {number}",
        )
    if not on_device(grads[0]):
        return GradTable(tuple(grads), ())
    groups: dict[str, list[tuple[Array]]] = {}
    for grad in grads:
        groups.setdefault(ctype(grad.dtype), []).append((grad,))
    tables = {t: tensor_table(rows, chunk=chunk, like=grads[0]) for t, rows in groups.items()}
    return GradTable(tuple(grads), tuple((t, x) for t, x in tables.items() if x is not None))


def grad_norm(
    table: GradTable,
    count: Shaped[Array, "..."],
    *,
    max_norm: float = math.inf,
    loss: Float32[Array, ""] | None = None,
) -> Float32[Array, "3"]:
    """Returns (norm of the mean gradient, scale for the summed gradient, 1 when it is usable).

    ``count`` is one int32 or float32 beside the gradients; ``max_norm`` infinity clips nothing. A
    ``loss`` that is not finite makes the gradient unusable: where a label's probability is rounded
    to zero, its loss is infinite and the gradient is not.
    """
    _check(count, max_norm)
    if not on_device(count):
        usable = loss is None or math.isfinite(float(loss))
        return _host_norm(_host_sum(table), count, max_norm, usable=usable)
    out = empty((3,), np.float32, like=count)
    _finish(out, None, _partial(table), count, max_norm, loss)
    return out


def grad_sum_squares(table: GradTable) -> Float64[Array, "1"]:
    """Returns the sum of squares of all gradients: the part of one shard."""
    like = table.grads[0]
    if not on_device(like):
        return np.array([_host_sum(table)])
    total = empty((1,), np.float64, like=like)
    _finish(None, total, _partial(table), None, math.inf)
    return total


def norm_of_sums(
    sums: Float64[Array, " shards"], count: Shaped[Array, "..."], *, max_norm: float = math.inf
) -> Float32[Array, "3"]:
    """Returns what grad_norm does, from the sums of squares of all shards."""
    _check(count, max_norm)
    if not on_device(sums):
        return _host_norm(float(sums.sum()), count, max_norm)
    out = empty((3,), np.float32, like=sums)
    _finish(out, None, sums, count, max_norm)
    return out


def grad_norm_ref(
    grads: Sequence[Array], count: float, *, max_norm: float = math.inf
) -> tuple[Array, Array]:
    """Reference of grad_norm: returns (norm of the mean gradient, scale)."""
    norm = sum((g * g).sum() for g in grads) ** 0.5 / count
    xp = namespace(grads[0])
    return norm, xp.minimum(xp.ones_like(norm), max_norm / (norm + _EPSILON)) / count


def _check(count: Array, max_norm: float) -> None:
    require(
        count.size == 1 and str(count.dtype) in ("int32", "float32"),
        f"grad_norm: count must be one int32 or float32, got {count.dtype}{count.shape}",
    )
    require(max_norm > 0, f"grad_norm: max_norm must be positive or infinity, got {max_norm}")


def _partial(table: GradTable) -> Float64[Array, " chunks"]:
    """Sums of squares of all chunks, table by table."""
    chunks = [len(tensors.chunk_tensor) for _, tensors in table.tensors]
    out = empty((sum(chunks),), np.float64, like=table.grads[0])
    begin = 0
    for (kind, tensors), size in zip(table.tensors, chunks, strict=True):
        args = [out[begin : begin + size], tensors.rows, tensors.chunk_tensor, tensors.chunk]
        SOURCE.launch("grad_norm_partial", (kind,), size, THREADS, args)
        begin += size
    return out


def _finish(
    out: Float32[Array, "3"] | None,
    total: Float64[Array, "1"] | None,
    partial: Float64[Array, " sums"],
    count: Shaped[Array, "..."] | None,
    max_norm: float,
    loss: Float32[Array, ""] | None = None,
) -> None:
    kind = "float" if count is None else ctype(count.dtype)
    args = [out, total, partial, count, loss, partial.size, float(max_norm)]
    SOURCE.launch("grad_norm_finish", (kind,), 1, _FINISH_THREADS, args)


def _host_sum(table: GradTable) -> float:
    with np.errstate(over="ignore"):  # an overflow is infinity, which makes the gradient unusable
        return sum(float(np.square(upcast(g)).sum(dtype=np.float64)) for g in table.grads)


def _host_norm(
    total: float, count: Shaped[Array, "..."], max_norm: float, *, usable: bool = True
) -> Float32[Array, "3"]:
    tokens = float(count.reshape(-1)[0])
    norm = math.sqrt(total) / (tokens if tokens > 0 else 1.0)
    if not (usable and math.isfinite(total) and tokens > 0):
        return np.array([norm, 0, 0], np.float32)
    return np.array([norm, min(1.0, max_norm / (norm + _EPSILON)) / tokens, 1], np.float32)
