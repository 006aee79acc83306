"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the scalings of its frequencies.

The first ``rotary`` columns of a head are rotated in pairs (i, i + rotary / 2), others pass:

    y_i = x_i cos - x_j sin    y_j = x_j cos + x_i sin    j = i + rotary / 2

with cos and sin of position * inv_freq_i, times the attention factor of the scaling. The backward
is the rotation by the opposite angle.

cos and sin are float32 from a table, and the result is rounded once. transformers rounds cos and
sin to the dtype of the activations first, so in bfloat16 its results differ by about 2^-9 of each
term.

``rope_frequencies`` gives the frequencies of transformers' ``rope_type`` of the same name, in the
same order of float32 operations: at position 100,000 one unit in the last place of a frequency is
already an angle of 0.006. With n the length before the scaling:

    linear    inv_freq / factor
    dynamic   base * (factor * length / n - (factor - 1)) ^ (rotary / (rotary - 2)) as base
    yarn      inv_freq / factor for slow pairs, inv_freq for fast ones, a ramp between; the pair
              that turns r times in n positions is rotary * ln(n / (2 pi r)) / (2 ln base)
              (Peng et al. 2023, arXiv 2309.00071)
    llama3    inv_freq / factor for wavelengths above n / low_freq_factor, inv_freq below
              n / high_freq_factor, a ramp in the reciprocal wavelength between
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int32

from surogate.kernels.arrays import (
    F32,
    Array,
    aligned,
    empty,
    namespace,
    on_device,
    require,
    rows_aligned,
    upcast,
)
from surogate.kernels.nvrtc import THREADS, Source, ctype, vector_width
from surogate.kernels.pair import Pair

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
SOURCE = Source(
    "rope", {"rope_fwd": [("float", "4"), ("float", "1"), ("bf16", "8"), ("bf16", "1")]}
)


class RopeTable(NamedTuple):
    """cos and sin of each position, the attention factor included."""

    cos: Float32[Array, "max_positions half"]
    sin: Float32[Array, "max_positions half"]


class RopeResiduals(NamedTuple):
    table: RopeTable
    positions: Int32[Array, " tokens"]


def rope_frequencies(
    head_dim: int,
    *,
    base: float,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_positions: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    partial_rotary_factor: float = 1.0,
    sequence_len: int = 0,
) -> tuple[Float32[Array, " half"], float]:
    """Returns (inv_freq, attention_factor): radians a position of each pair, factor of cos and sin.

    ``original_max_positions`` is the length before the scaling (for dynamic, the model's maximum);
    dynamic scales for ``sequence_len`` where that is longer. ``attention_factor`` of yarn follows
    from ``factor`` (and both ``mscale`` options where given) unless set; the others' is 1.
    """
    require(kind in KINDS, f"rope_frequencies: kind must be one of {KINDS}, got {kind!r}")
    rotary = int(head_dim * partial_rotary_factor)
    require(
        0 < rotary <= head_dim and rotary % 2 == 0,
        f"rope_frequencies: head_dim * partial_rotary_factor must be even, got {rotary}",
    )
    require(
        original_max_positions > 0 or kind in ("default", "linear"),
        f"rope_frequencies: {kind} needs original_max_positions, got {original_max_positions}",
    )
    if kind == "yarn":
        if attention_factor is None:
            attention_factor = _yarn_attention_factor(factor, mscale, mscale_all_dim)
        low, high = (
            rotary * math.log(original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (beta_fast, beta_slow)
        )
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(float(low), 0.0), min(float(high), rotary - 1.0)
        return _yarn(_powers(base, rotary), factor, low, high), attention_factor
    if kind == "dynamic":
        length = max(sequence_len, original_max_positions)
        growth = factor * length / original_max_positions - (factor - 1)
        base = base * growth ** (rotary / (rotary - 2))
    inv_freq = 1 / _powers(base, rotary)
    if kind == "linear":
        inv_freq /= np.float32(factor)
    if kind == "llama3":
        inv_freq = _llama3(
            inv_freq, factor, original_max_positions, low_freq_factor, high_freq_factor
        )
    return inv_freq, 1.0


def rope_table(
    inv_freq: Float32[Array, " half"], attention_factor: float = 1.0, *, positions: int
) -> RopeTable:
    """The table of the first ``positions`` positions, on the host."""
    angle = np.arange(positions, dtype=np.float32)[:, None] * inv_freq
    scale = np.float32(attention_factor)
    return RopeTable(np.cos(angle) * scale, np.sin(angle) * scale)


def rope_fwd(
    x: Float[Array, "tokens heads head_dim"],
    *,
    table: RopeTable,
    positions: Int32[Array, " tokens"],
) -> tuple[Float[Array, "tokens heads head_dim"], RopeResiduals]:
    """Returns x rotated (rows of x may lie apart), and what rope_bwd needs.

    Positions must be below the table's; the kernel cannot check that.
    """
    return _rotate("rope_fwd", x, table, positions, 1.0), RopeResiduals(table, positions)


def rope_bwd(
    res: RopeResiduals, dy: Float[Array, "tokens heads head_dim"]
) -> Float[Array, "tokens heads head_dim"]:
    """Returns dx."""
    return _rotate("rope_bwd", dy, res.table, res.positions, -1.0)


def check_table(name: str, table: RopeTable, head_dim: int) -> int:
    """Returns half of the rotary columns, after a look at whether the table fits the head."""
    half = table.cos.shape[1]
    require(
        table.cos.shape == table.sin.shape and 0 < 2 * half <= head_dim,
        f"{name}: the table's cos and sin must both be [positions, at most {head_dim // 2}], "
        f"got {table.cos.shape} and {table.sin.shape}",
    )
    return half


def rotate_host(x: Array, cos: Array, sin: Array, sign: float) -> Array:
    """``x`` [tokens, heads, head_dim] turned by the angles [tokens, half] of its tokens."""
    half = cos.shape[1]
    c, s = (a[:, None].astype(x.dtype, copy=False) for a in (cos, sign * sin))
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([low * c - high * s, high * c + low * s, rest], axis=-1)


def _rotate(name: str, x: Array, table: RopeTable, positions: Array, sign: float) -> Array:
    tokens, heads, head_dim = x.shape
    half = check_table(name, table, head_dim)
    require(
        len(positions) == tokens,
        f"{name}: positions must be ({tokens},), got {positions.shape}",
    )
    if not on_device(x):
        cos, sin = table.cos[positions], table.sin[positions]
        return rotate_host(upcast(x), cos, sin, sign).astype(x.dtype, copy=False)
    require(head_dim % 2 == 0, f"{name}: head_dim must be even, got {head_dim}")
    y = empty(x.shape, x.dtype, like=x)
    width = vector_width(x.dtype)
    divides = half % width == 0 and head_dim % (2 * width) == 0
    if not (divides and rows_aligned(x) and aligned(*table)):
        width = 1
    slots = x.size // (2 * width)
    require(slots < 1 << 32, f"{name}: takes less than 2^32 slots of {2 * width}, got {slots}")
    stride = token_stride(name, x)
    if slots:
        arguments = [y, x, table.cos, table.sin, positions, np.int64(stride)]
        arguments += [tokens, heads, head_dim, half, sign]
        types = (ctype(x.dtype), str(width))
        SOURCE.launch("rope_fwd", types, -(-slots // THREADS), THREADS, arguments)
    return y


def token_stride(name: str, x: Array) -> int:
    """Elements between two tokens of [tokens, heads, head_dim], whose heads must lie packed."""
    _, heads, head_dim = x.shape
    item = x.dtype.itemsize
    packed = x.strides[2] == item and (heads == 1 or x.strides[1] == head_dim * item)
    require(
        packed or x.size == 0,
        f"{name}: the heads of a token must lie packed, got strides {x.strides}",
    )
    return x.strides[0] // item


def _powers(base: float, rotary: int) -> Float32[Array, " half"]:
    """base ^ (2 i / rotary): the exponent is rounded to float32, then the power."""
    exponent = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    return np.power(float(base), exponent.astype(np.float64)).astype(F32)


def _yarn_attention_factor(factor: float, mscale: float | None, all_dim: float | None) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _yarn(
    powers: Float32[Array, " half"], factor: float, low: float, high: float
) -> Float32[Array, " half"]:
    high += 0.001 if low == high else 0.0  # no division by zero
    ramp = (np.arange(len(powers), dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    return 1 / (np.float32(factor) * powers) * (1 - kept) + 1 / powers * kept


def _llama3(
    inv_freq: Float32[Array, " half"], factor: float, length: int, low: float, high: float
) -> Float32[Array, " half"]:
    wavelength = np.float32(2 * math.pi) / inv_freq
    slow = np.where(wavelength > length / low, inv_freq / np.float32(factor), inv_freq)
    part = (np.float32(length) / wavelength - np.float32(low)) / np.float32(high - low)
    mixed = (1 - part) * slow / np.float32(factor) + part * slow
    between = (wavelength >= length / high) & (wavelength <= length / low)
    return np.where(between, mixed, slow)


def rope_ref(x: Array, *, table: RopeTable, positions: Array) -> Array:
    """Reference of rope_fwd: the table is in the array library of x."""
    xp = namespace(x)
    half = table.cos.shape[1]
    cos, sin = table.cos[positions][:, None], table.sin[positions][:, None]
    low, high = x[..., :half], x[..., half : 2 * half]
    turned = (low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :])
    return xp.concatenate(turned, axis=-1)


rope = Pair(rope_fwd, rope_bwd)
