"""AdamW whose moments take 8 bits an element, of many tensors in one launch.

Dettmers et al., "8-bit optimizers via block-wise quantization", 2022. Formulas, rounding of
parameters and what is read from memory are those of adamw.py; only what is kept of m and v differs:
of each block of 256 consecutive elements, the last one perhaps shorter, the largest magnitude and a
code for each element's share of that. Both moments are decoded, updated in float32, used, and
encoded again, so a parameter never sees what the new codes round away.

The codes stand for the dynamic map of bitsandbytes. With n = 2^d values in the decade d = 0..6,

    10^(d - 6) * (0.1 + 0.9 * (k + 1/2) / n)    k = 0..n - 1

are the magnitudes of m's map, which has both signs, 0 and 1; v's has 2n in a decade, 0 and 1. So a
large moment is known to 0.7 or 0.4 % of the largest, and one a millionth of it is still told from
zero. Where this departs from bitsandbytes:

* A moment that is not zero never gets the code of zero, nor does v where m is not zero. There, v
  below 1.6e-7 of its block's largest is stored as 0, and the next step, which divides by what the
  new gradient adds alone, is up to 1 / sqrt(1 - beta2) = 31 times too long. Here it is stored as
  3.25e-7 of the largest, and the step is too short. There, negative m alone keep their sign.
* An element whose gradient is infinite or NaN (or so large that its square is) keeps its parameter
  and its moments, the latter encoded anew with their block. There, the moments become zero.
* Of two codes at one distance the smaller magnitude is taken; there, it depends on a binary search.

A block whose largest magnitude is below 2^-126 is stored as zeros: the root of such a v is nothing
beside epsilon. Host and card agree to the bit.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8, UInt32

from surogate.kernels.adamw import (
    FEW_ELEMENTS,
    FINE_CHUNK,
    AdamWSettings,
    check_arrays,
    host_update,
    step_arguments,
    store_param_,
    usable,
)
from surogate.kernels.arrays import Array, namespace, on_device, require
from surogate.kernels.multi_tensor import CHUNK, TensorTable, tensor_table
from surogate.kernels.nvrtc import THREADS, Source, ctype

BLOCK = 256  # elements that share a scale
LEAST_ELEMENTS = 4096  # of a tensor for which 8 bits are worth it
HOST_PART = 1 << 20  # elements that the host version updates at a time, a multiple of BLOCK
ZERO = {"m": 127, "v": 0}  # the codes of zero
_DECADES = 7
_LEAST_SCALE = np.float32(2.0**-126)
_FIRST_CELL = 0x34000000  # the bits of 2^-23, below which there is no bound
_CELLS = {"m": (17, 1536), "v": (16, 3072)}  # bits of a float that a cell leaves open, and cells

SOURCE = Source(
    "adamw8bit",
    {
        "adamw8bit_step": [
            (param, grad, mastered)
            for param, mastered in (("float", "false"), ("bf16", "true"), ("bf16", "false"))
            for grad in ("float", "bf16")
        ]
    },
)


class Moment8(NamedTuple):
    """A moment of a tensor: a code an element, and the largest magnitude of each block."""

    codes: UInt8[Array, "*shape"]
    scale: Float32[Array, " blocks"]


class AdamW8Leaf(NamedTuple):
    """One tensor, its gradient and its optimizer state: C-contiguous arrays of one shape.

    param is float32 or bfloat16, grad likewise. ``tensor`` is its number in the random bits. A
    shard gives the index of its first element in the whole tensor, a multiple of 256, as ``first``.
    """

    param: Float[Array, "*shape"]
    grad: Float[Array, "*shape"]
    m: Moment8
    v: Moment8
    master: Float32[Array, "*shape"] | None = None
    decay: bool = False
    tensor: int = 0
    first: int = 0


class AdamW8Table(NamedTuple):
    """Leaves of one combination of dtypes, and on the card where they lie. Built once."""

    leaves: tuple[AdamW8Leaf, ...]
    tensors: TensorTable | None
    codebook: UInt32[Array, " words"] | None


def zero_moment(shape: tuple[int, ...], which: str, *, like: Any) -> Moment8:
    """A moment of zeros, beside ``like``. ``which`` is "m" or "v"."""
    size = int(np.prod(shape, dtype=np.int64))
    library = namespace(like)
    scale = library.zeros((-(-size // BLOCK),), np.float32)
    return Moment8(library.full(shape, ZERO[which], np.uint8), scale)


@functools.cache
def magnitudes(which: str) -> Float32[Array, " magnitudes"]:
    """What the codes of a moment stand for, without signs, ascending from 0 to 1."""
    found = [0.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (which == "v"))
        fraction = 0.1 + 0.9 * (np.arange(count) + 0.5) / count
        found += list(10.0 ** (decade - _DECADES + 1) * fraction)
    return np.array([*found, 1.0], np.float32)


@functools.cache
def values(which: str) -> Float32[Array, "256"]:
    """What each code stands for, ascending. m has no -1: its largest negative is -0.99."""
    sizes = magnitudes(which)
    return sizes if which == "v" else np.concatenate([-sizes[-2:0:-1], sizes])


@functools.cache
def bounds(which: str) -> Float32[Array, " bounds"]:
    """The largest float32 that is nearest to each magnitude, but for the last.

    Halfway between neighbours, rounded down: so a float32 is above a bound just when it is nearer
    to the magnitude that follows.
    """
    sizes = magnitudes(which).astype(np.float64)
    exact = (sizes[1:] + sizes[:-1]) / 2
    rounded = exact.astype(np.float32)
    return np.where(rounded > exact, np.nextafter(rounded, np.float32(0)), rounded)


def _cell_starts(which: str) -> UInt8[Array, " cells"]:
    """The number of bounds below each cell of floats with equal leading bits, from 2^-23 to 1."""
    shift, count = _CELLS[which]
    edges = np.uint32(_FIRST_CELL) + (np.arange(count, dtype=np.uint32) << np.uint32(shift))
    below = np.searchsorted(bounds(which), edges.view(np.float32), side="left")
    return np.minimum(below, len(bounds(which)) - 1).astype(np.uint8)


@functools.cache
def codebook() -> UInt32[Array, " words"]:
    """The struct Codebook of cuda/adamw8bit.cu."""
    parts = [values("m"), values("v"), bounds("m"), np.append(bounds("v"), np.float32(np.inf))]
    parts += [_cell_starts("m"), _cell_starts("v")]
    return np.concatenate([part.view(np.uint8) for part in parts]).view(np.uint32)


def adamw8bit_table(leaves: Sequence[AdamW8Leaf], *, chunk: int | None = None) -> AdamW8Table:
    """Checks the leaves and, on the card, writes down their addresses.

    ``chunk`` is how many elements a block of threads takes, a multiple of 256 without effect on the
    result. Raises ValueError when shapes or dtypes disagree within a leaf, or dtypes between
    leaves.
    """
    require(len(leaves) > 0, "adamw8bit_table: leaves must not be empty")
    for leaf in leaves:
        _check(leaf)
        require(
            _dtypes(leaf) == _dtypes(leaves[0]),
            f"adamw8bit_table: leaves must have one combination of dtypes, got {_dtypes(leaf)} "
            f"after {_dtypes(leaves[0])}; build a table for each",
        )
    like = leaves[0].param
    if not on_device(like):
        return AdamW8Table(tuple(leaves), None, None)
    if chunk is None:
        chunk = FINE_CHUNK if sum(x.param.size for x in leaves) < FEW_ELEMENTS else CHUNK
    require(
        chunk % BLOCK == 0, f"adamw8bit_table: chunk must be a multiple of {BLOCK}, got {chunk}"
    )
    rows = [
        (x.param, x.grad, x.m.codes, x.v.codes, x.master, int(x.decay), x.tensor & 0xFFFFFFFF,
         x.first, x.m.scale, x.v.scale)
        for x in leaves
    ]  # fmt: skip
    tensors = tensor_table(rows, chunk=chunk, like=like)
    return AdamW8Table(tuple(leaves), tensors, namespace(like).asarray(codebook()))


def adamw8bit_step_(
    table: AdamW8Table,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None = None,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    cautious: bool = False,
    zero_grad: bool = False,
) -> None:
    """Updates parameters, moments and masters of the table in place; see adamw_step_."""
    leaf, settings = table.leaves[0], AdamWSettings(beta1, beta2, epsilon, weight_decay, cautious)
    if not on_device(leaf.param):
        for each in table.leaves:
            _host_step_(each, scalars, norm, settings, zero_grad)
        return
    if table.tensors is None:
        return
    mastered = "true" if leaf.master is not None else "false"
    SOURCE.launch(
        "adamw8bit_step",
        (ctype(leaf.param.dtype), ctype(leaf.grad.dtype), mastered),
        len(table.tensors.chunk_tensor),
        THREADS,
        [
            table.tensors.rows,
            table.tensors.chunk_tensor,
            table.codebook,
            *step_arguments(table.tensors, scalars, norm, settings, zero_grad),
        ],
    )


def encode(m: Float32[Array, "*shape"], v: Float32[Array, "*shape"]) -> tuple[Moment8, Moment8]:
    """The codes of two moments: the host version of what the kernel stores. v is at least 0."""
    (m_share, m_scale), (v_share, v_scale) = (_shares(x.reshape(-1)) for x in (m, v))
    m_size = np.searchsorted(bounds("m"), np.abs(m_share), side="left")
    v_code = np.searchsorted(bounds("v"), v_share, side="left")
    m, v, shape = m.reshape(-1), v.reshape(-1), m.shape
    m_size = np.maximum(m_size, m != 0)
    v_code = np.maximum(v_code, (m != 0) | (v != 0))
    m_code = np.where(m < 0, ZERO["m"] - np.minimum(m_size, ZERO["m"]), ZERO["m"] + m_size)
    codes = (code.astype(np.uint8).reshape(shape) for code in (m_code, v_code))
    return Moment8(next(codes), m_scale), Moment8(next(codes), v_scale)


def decode(moment: Moment8, which: str) -> Float32[Array, "*shape"]:
    """What the codes stand for, on the host."""
    codes = moment.codes.reshape(-1)
    scale = np.repeat(moment.scale, BLOCK)[: codes.size]
    return (values(which)[codes] * scale).reshape(moment.codes.shape)


def _shares(
    x: Float32[Array, " size"],
) -> tuple[Float32[Array, " size"], Float32[Array, " blocks"]]:
    """Each element over the largest magnitude of its block, and those."""
    blocks = np.pad(np.abs(x), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scale = blocks.max(1, initial=0)
    scale = np.where(scale < _LEAST_SCALE, np.float32(0), scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return x * np.repeat(inverse, BLOCK)[: x.size], scale


def _host_step_(
    leaf: AdamW8Leaf,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: AdamWSettings,
    zero_grad: bool,
) -> None:
    if usable(norm):
        for part in _parts(leaf):
            _host_part_(part, scalars, norm, settings)
    if zero_grad:
        leaf.grad[...] = 0


def _parts(leaf: AdamW8Leaf) -> Iterator[AdamW8Leaf]:
    """Views of a leaf in pieces of HOST_PART elements, which bound the memory of a step."""
    flat = {name: getattr(leaf, name) for name in ("param", "grad", "master")}
    for start in range(0, leaf.param.size, HOST_PART):
        here, blocks = (np.s_[start // n : (start + HOST_PART) // n] for n in (1, BLOCK))
        m, v = (Moment8(x.codes.reshape(-1)[here], x.scale[blocks]) for x in (leaf.m, leaf.v))
        arrays: dict[str, Any] = {
            k: None if x is None else x.reshape(-1)[here] for k, x in flat.items()
        }
        yield leaf._replace(**arrays, m=m, v=v, first=leaf.first + start)


def _host_part_(
    leaf: AdamW8Leaf,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: AdamWSettings,
) -> None:
    old = leaf.param if leaf.master is None else leaf.master
    old_m, old_v = decode(leaf.m, "m"), decode(leaf.v, "v")
    with np.errstate(over="ignore", invalid="ignore"):  # elements to which it happens stay
        p, m, v = host_update(leaf, old_m, old_v, scalars, norm, settings)
    stays = ~np.isfinite(v)
    p, m, v = (
        np.where(stays, before, after).astype(np.float32)
        for before, after in ((old, p), (old_m, m), (old_v, v))
    )
    store_param_(leaf, p, scalars)
    for moment, new in zip((leaf.m, leaf.v), encode(m, v), strict=True):
        moment.codes[...], moment.scale[...] = new


def _dtypes(leaf: AdamW8Leaf) -> tuple[str, str, str]:
    master = "no master" if leaf.master is None else "master"
    return str(leaf.param.dtype), str(leaf.grad.dtype), master


def _check(leaf: AdamW8Leaf) -> None:
    check_arrays("adamw8bit_table", leaf, ("param", "grad", "master"))
    for name in ("m", "v"):
        codes, scale = getattr(leaf, name)
        require(
            codes.shape == leaf.param.shape
            and scale.shape == (-(-codes.size // BLOCK),)
            and codes.flags.c_contiguous
            and scale.flags.c_contiguous,
            f"adamw8bit_table: {name} must be C-contiguous codes of param's shape "
            f"{leaf.param.shape} with a scale for each {BLOCK} of them, got {codes.shape} and "
            f"{scale.shape}",
        )
    require(
        leaf.first >= 0 and leaf.first % BLOCK == 0,
        f"adamw8bit_table: first must be a multiple of {BLOCK}, got {leaf.first}",
    )
