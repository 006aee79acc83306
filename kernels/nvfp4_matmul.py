"""Products of NVFP4 casts: out = alpha a b^T + bias, plus c or what out held.

alpha = amax_a amax_b / (range_a range_b) is read from the device. Both operands lie along the sum.

Cards from compute capability 10.0 on (sm_100, 103, 120, 121) multiply the codes: through cuBLASLt,
or on request by our instance of CUTLASS (kernels/cutlass.py). Older ones, and the host, multiply
the casts' ``values``, which bfloat16 holds exactly, as it does their products in float32: the same
recipe, slower. ``emulated`` says which; a cast is made for one of the two.
"""

import functools
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels import cublaslt, cutlass
from surogate.kernels.arrays import BF16, F32, Array, describe, empty, on_device, require
from surogate.kernels.matmul import matmul, note_product
from surogate.kernels.nvfp4 import SOURCE, Nvfp4, nvfp4_decode

HARDWARE = 100  # compute capability, times ten
MULTIPLE = 32  # of the sum's length: 16 bytes of codes


@functools.cache
def emulated(device: int | None) -> bool:
    """Whether products on a card (None: the host) are made of bfloat16 ones."""
    if device is None:
        return True
    import cupy

    return int(cupy.cuda.Device(device).compute_capability) < HARDWARE


def emulated_for(x: Array) -> bool:
    """The same of the device of an array."""
    return emulated(None if isinstance(x, np.ndarray) else x.data.device_id)


def nvfp4_matmul(
    a: Nvfp4,
    b: Nvfp4,
    *,
    c: Float[Array, "rows columns"] | None = None,
    bias: Float[Array, " columns"] | None = None,
    out: Float[Array, "rows columns"] | None = None,
    accumulate: bool = False,
    dtype: Any = BF16,
    library: Literal["cublaslt", "cutlass"] = "cublaslt",
) -> Float[Array, "rows columns"]:
    """Returns out [rows, columns] of a [rows, inner] and b [columns, inner].

    c, bias and out are bfloat16, or all float32. ``library`` computes products of codes; CUTLASS
    takes bfloat16 without bias. Raises ValueError when sizes disagree, when one cast has codes and
    the other values, and for codes of an inner size that is no multiple of 32.
    """
    require(
        a.inner == b.inner and (a.codes is None) == (b.codes is None),
        f"nvfp4_matmul: takes two casts of one inner size, both of codes or both of values, got "
        f"{_words(a)} and {_words(b)}",
    )
    alpha = nvfp4_alpha(a, b)
    if a.codes is None:
        assert a.values is not None and b.values is not None
        return matmul(
            a.values,
            b.values,
            transpose_a=a.transposed,
            transpose_b=not b.transposed,
            c=c,
            bias=bias,
            out=out,
            accumulate=accumulate,
            alpha=alpha,
            dtype=dtype,
        )
    shape = (a.rows, b.rows)
    if out is None:
        require(not accumulate, "nvfp4_matmul: accumulate adds to out: pass out")
        out = empty(shape, dtype, like=a.codes)
    require(c is None or not accumulate, "nvfp4_matmul: c and accumulate exclude each other")
    require(
        out.shape == shape and out.dtype in (BF16, F32) and a.inner % MULTIPLE == 0,
        f"nvfp4_matmul: codes take an inner size in multiples of {MULTIPLE} and out {shape} of "
        f"bfloat16 or float32, got {a.inner} and {describe(out)}",
    )
    note_product(*shape, a.inner, cublaslt.FOUR_BITS)
    added = out if accumulate else c
    if isinstance(a.codes, np.ndarray):
        total = nvfp4_decode(a) @ nvfp4_decode(b).T
        for term in (bias, added):
            total = total if term is None else total + term.astype(F32)
        out[...] = total.astype(out.dtype)
    elif library == "cutlass":
        require(bias is None, "nvfp4_matmul: CUTLASS takes no bias")
        cutlass.product(out, a.codes, b.codes, a.scales, b.scales, alpha, added)
    else:
        kind = cublaslt.FOUR_BITS
        scaling = cublaslt.Scaling(kind, kind, a.scales, b.scales, False)
        call = cublaslt.Call(a.codes, b.codes, added, bias, out, False, True, scaling, True)
        key = call.key()
        plan = cublaslt.plans.get(key) or cublaslt.add_plan(key, call, alpha)
        plan.run(call, alpha)
    return out


def nvfp4_alpha(a: Nvfp4, b: Nvfp4) -> Float32[Array, "1"]:
    """What the product of two casts without their tensor scales is multiplied by."""
    if not on_device(a.amax):
        with np.errstate(invalid="ignore"):  # infinity times zero: NaN is passed on
            return (a.amax * F32.type(1 / a.range)) * (b.amax * F32.type(1 / b.range))
    alpha = empty((1,), F32, like=a.amax)
    SOURCE.launch("nvfp4_alpha", (), 1, 32, [alpha, a.amax, b.amax, 1 / a.range, 1 / b.range])
    return alpha


def _words(cast: Nvfp4) -> str:
    kind = "values" if cast.codes is None else "codes"
    return f"{kind} of [{cast.rows}, {cast.inner}]"
