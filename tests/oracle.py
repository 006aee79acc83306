"""What tests compare with: references differentiated in float64, and tolerances derived from
roundings.

``oracle`` runs an op's plain reference in torch at float64 with its autodiff, so that no formula of
ours checks itself. ``close`` allows a number of roundings of the dtype, scaled by the size of the
values and by the number of terms that were summed; it never takes a bare tolerance.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from surogate.kernels.arrays import address

# The unit roundoff 2^-p of a format with p significant bits: one rounding to nearest.
ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
}


def to_device(x: Any, device: str) -> Any:
    """A NumPy array on "cuda" as CuPy; on "host" and "emulated" as it is."""
    if device != "cuda":
        return x
    import cupy

    return cupy.asarray(x)


def to_host(x: Any) -> np.ndarray:
    """Any array as NumPy."""
    return x if isinstance(x, np.ndarray) else x.get()


def normal(dtype: str, *shapes: Sequence[int], seed: int = 0, device: str = "host") -> Any:
    """Standard normal arrays of a dtype, one a shape (a single shape gives the array itself)."""
    rng = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    out = [to_device(rng.standard_normal(shape).astype(kind), device) for shape in shapes]
    return out[0] if len(out) == 1 else tuple(out)


def unaligned(x: Any, device: str) -> Any:
    """A copy on the device that begins an element past a multiple of 16 bytes, as ``buffer[1:]``
    does.
    """
    x = to_host(x)
    view = to_device(np.empty(x.size + 1, x.dtype), device)[1:].reshape(x.shape)
    view[...] = to_device(x, device)
    assert address(view) % 16 == x.itemsize
    return view


def oracle(
    reference: Callable[..., Any], arrays: Sequence[Any], *cotangents: Any
) -> tuple[np.ndarray | None, ...]:
    """Outputs of a reference and the gradients of its arrays, in float64 through torch.

    ``arrays`` may hold None, which is passed on. A cotangent may be None for an output that is not
    used. Returns (*outputs, *gradients), with None for the gradient of None.
    """
    import torch

    def leaf(x: Any) -> Any:
        return (
            None if x is None else torch.tensor(to_host(x).astype(np.float64), requires_grad=True)
        )

    leaves = [leaf(x) for x in arrays]
    outputs = reference(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    grads = torch.autograd.grad(
        [y for y, _ in used],
        [x for x in leaves if x is not None],
        [torch.tensor(to_host(c).astype(np.float64)) for _, c in used],
        allow_unused=True,
    )
    found = iter(grads)
    result = [y.detach().numpy() for y in outputs]
    for x in leaves:
        grad = None if x is None else next(found)
        result.append(grad.numpy() if grad is not None else None)
    return tuple(result)


def close(
    got: Any,
    want: Any,
    dtype: str,
    *,
    terms: int = 1,
    roundings: float = 4,
    scale: float | None = None,
) -> None:
    """Fails unless ``got`` is within ``roundings`` roundings of ``dtype`` of ``want``.

    An error is measured against the value plus the root mean square of all values (or ``scale``),
    which is what the summands of a value that cancels were like. A sum of ``terms`` terms, each
    rounded, may drift by the square root of their number in float32, and in the input's dtype
    before.
    """
    got, want = to_host(got).astype(np.float64), to_host(want).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} values are not finite"
    if got.size == 0:
        return
    size = float(np.sqrt(np.mean(want**2))) if scale is None else scale
    allowed = roundings * ROUNDING[dtype] * (np.abs(want) + size) * np.sqrt(terms)
    worst = np.unravel_index(np.argmax(np.abs(got - want) - allowed), got.shape)
    assert (np.abs(got - want) <= allowed).all(), (
        f"at {tuple(int(i) for i in worst)}: got {got[worst]:.8g}, want {want[worst]:.8g}, "
        f"allowed {allowed[worst] if allowed.ndim else allowed:.3g}; "
        f"{np.count_nonzero(np.abs(got - want) > allowed)} of {got.size} differ"
    )


def same_bits(a: Any, b: Any) -> None:
    """Fails unless two arrays hold the same bytes."""
    a, b = np.ascontiguousarray(to_host(a)), np.ascontiguousarray(to_host(b))
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype}{a.shape} and {b.dtype}{b.shape}"
    different = a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)
    assert not different.any(), f"{np.count_nonzero(different)} of {different.size} bytes differ"
