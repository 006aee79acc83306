"""SwiGLU (Shazeer 2020, arXiv 2002.05202): the gated activation of an MLP, between its products.

    y = silu(gate) * up    silu(g) = g * s(g)    s(g) = 1 / (1 + exp(-g))

gate and up are the halves of one row, as one product makes them. Backward:

    d_gate = dy * up * (s + silu * (1 - s))    d_up = dy * silu

Computed in float32 and rounded once; transformers rounds silu(gate) to the storage dtype before the
product. Forward keeps only gate_up, so the backward can give y once more for the weight gradient of
the down projection. A ``cast`` of y, or of d_gate_up, is done in the pass that makes it (fp8.py).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from surogate.kernels.arrays import (
    Array,
    describe,
    empty,
    namespace,
    on_device,
    placed,
    require,
    row_stride,
    rows_aligned,
    upcast,
)
from surogate.kernels.fp8 import Cast, kernel_cast
from surogate.kernels.nvrtc import THREADS, Source, ctype, vector_width
from surogate.kernels.pair import Pair

_PLAIN: list[tuple[str, ...]] = [
    *(("float", width, "void") for width in "41"),
    *(("bf16", width, "void") for width in "81"),
]
SOURCE = Source(
    "swiglu",
    {
        "swiglu_fwd": [*_PLAIN, ("bf16", "8", "E4M3")],
        "swiglu_bwd": [*_PLAIN, ("bf16", "8", "E5M2")],
    },
)


class SwiGLUResiduals(NamedTuple):
    gate_up: Float[Array, "tokens both"]


def swiglu_fwd(
    gate_up: Float[Array, "tokens both"],
    *,
    out: Float[Array, "tokens ffn"] | None = None,
    cast: Cast | None = None,
) -> tuple[Float[Array, "tokens ffn"], SwiGLUResiduals]:
    """Returns y [tokens, ffn] of gate_up [tokens, 2 * ffn] (gate columns first), and residuals.

    y is written to ``out`` where given, whose rows may be farther apart than they are long, and its
    E4M3 codes to ``cast``.
    """
    tokens, ffn = _sizes(gate_up)
    _check_out("swiglu_fwd", out, (tokens, ffn), gate_up)
    if on_device(gate_up):
        y = empty((tokens, ffn), gate_up.dtype, like=gate_up) if out is None else out
        _launch("swiglu_fwd", [y], [gate_up], {"out": y}, gate_up, cast)
    else:
        gate, up = upcast(gate_up[:, :ffn]), upcast(gate_up[:, ffn:])
        y = placed((gate * _sigmoid(gate) * up).astype(gate_up.dtype, copy=False), out)
        if cast is not None:
            cast.on_host(y)
    return y, SwiGLUResiduals(gate_up)


def swiglu_bwd(
    res: SwiGLUResiduals,
    dy: Float[Array, "tokens ffn"],
    *,
    recompute: bool = False,
    out: Float[Array, "tokens both"] | None = None,
    cast: Cast | None = None,
) -> Float[Array, "tokens both"] | tuple[Float[Array, "tokens both"], Float[Array, "tokens ffn"]]:
    """Returns d_gate_up, or (d_gate_up, y) with ``recompute``.

    d_gate_up is written to ``out`` where given, and its E5M2 codes to ``cast``. The rows of ``out``
    and ``dy`` may be farther apart than they are long.
    """
    shape, dtype = res.gate_up.shape, res.gate_up.dtype
    _check_out("swiglu_bwd", out, shape, res.gate_up)
    d_gate_up = empty(shape, dtype, like=dy) if out is None else out
    y = _backward(res.gate_up, dy, d_gate_up, recompute, cast)
    return d_gate_up if y is None else (d_gate_up, y)


def swiglu_bwd_(
    res: SwiGLUResiduals, dy: Float[Array, "tokens ffn"], *, recompute: bool = False
) -> Float[Array, "tokens both"] | tuple[Float[Array, "tokens both"], Float[Array, "tokens ffn"]]:
    """swiglu_bwd that writes d_gate_up over ``res.gate_up``."""
    y = _backward(res.gate_up, dy, res.gate_up, recompute, None)
    return res.gate_up if y is None else (res.gate_up, y)


def _backward(
    gate_up: Array, dy: Array, d_gate_up: Array, recompute: bool, cast: Cast | None
) -> Array | None:
    """Writes d_gate_up, which may be gate_up itself; returns y if asked."""
    tokens, ffn = _sizes(gate_up)
    require(
        dy.shape == (tokens, ffn) and dy.dtype == gate_up.dtype,
        f"swiglu_bwd: dy must be {gate_up.dtype}{(tokens, ffn)}, got {describe(dy)}",
    )
    y = empty(dy.shape, dy.dtype, like=dy) if recompute else None
    if on_device(dy):
        source = None if d_gate_up is gate_up else gate_up
        apart = {"out": d_gate_up, "dy": dy}
        _launch("swiglu_bwd", [d_gate_up, y], [dy, source], apart, gate_up, cast)
        return y
    gate, up, grad = upcast(gate_up[:, :ffn]), upcast(gate_up[:, ffn:]), upcast(dy)
    s = _sigmoid(gate)
    silu = gate * s
    d_gate, d_up, out = grad * up * (s + silu * (1 - s)), grad * silu, silu * up
    d_gate_up[:, :ffn], d_gate_up[:, ffn:] = d_gate.astype(dy.dtype), d_up.astype(dy.dtype)
    if cast is not None:
        cast.on_host(d_gate_up)
    if y is not None:
        y[...] = out.astype(dy.dtype)
    return y


def _sizes(gate_up: Array) -> tuple[int, int]:
    tokens, both = gate_up.shape
    require(both % 2 == 0, f"swiglu: gate_up must have an even number of columns, got {both}")
    return tokens, both // 2


def _check_out(name: str, out: Array | None, shape: tuple[int, ...], like: Array) -> None:
    require(
        out is None or (out.shape == shape and out.dtype == like.dtype),
        f"{name}: out must be {like.dtype}{shape}, got {describe(out)}",
    )


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) with an exponent that cannot overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def _launch(
    kernel: str,
    outputs: list[Array | None],
    inputs: list[Array | None],
    apart: dict[str, Array],
    gate_up: Array,
    cast: Cast | None,
) -> None:
    """``apart`` names those arrays whose rows may lie apart; ``cast`` is of the first output."""
    require(gate_up.flags.c_contiguous, f"{kernel}: gate_up must be C-contiguous")
    tokens, ffn = _sizes(gate_up)
    strides = [row_stride(f"{kernel}: {name}", array) for name, array in apart.items()]
    width = vector_width(gate_up.dtype)
    if ffn % width or not rows_aligned(gate_up, *apart.values()):
        width = 1
    form, codes, amax, scale = kernel_cast(cast, kernel, apart["out"], fits=width > 1)
    packs = tokens * ffn // width
    require(packs < 1 << 32, f"{kernel}: takes less than 2^32 packs of {width}, got {packs}")
    if packs:
        types = (ctype(gate_up.dtype), str(width), form)
        arrays = [*outputs, codes, amax, *inputs, scale]
        SOURCE.launch(
            kernel, types, -(-packs // THREADS), THREADS, [*arrays, *strides, tokens, ffn]
        )


def swiglu_ref(gate_up: Array) -> Array:
    """Reference of swiglu_fwd."""
    xp = namespace(gate_up)
    ffn = gate_up.shape[1] // 2
    gate, up = gate_up[:, :ffn], gate_up[:, ffn:]
    return gate / (1 + xp.exp(-gate)) * up


swiglu = Pair(swiglu_fwd, swiglu_bwd)
