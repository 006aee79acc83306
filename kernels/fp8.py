"""Casts to 8-bit floats with a scale (Micikevicius et al. 2022, arXiv 2209.05433).

    code = cast(x * scale)    x ~ code * inverse    scale = limit / amax    inverse = 1 / scale

E4M3 (largest 448) is for weights and activations, E5M2 (57344) for gradients; ``limit`` is the
largest over 2^margin. amax is one of:

    delayed   the largest |x| of the last steps: known beforehand, so that x is read once, or not at
              all where the op that makes it also makes its codes (``Cast``)
    tensor    the largest |x| of this x: read twice
    row       the largest |x| of each row: read twice, and the scale of a row is its own

A value beyond the scale's range saturates. Infinity and NaN become NaN, so that the step's check of
its gradient sees them, and an amax that is not finite never enters a scale. An amax of zero means
scale 1.

``Fp8State`` holds what delayed scaling remembers, for all tensors of a model in a few arrays. An
amax is taken while a step runs and enters the history when the step ends (``update_``), so every
cast of a step uses the same scale, also the casts of a recomputation. Before the first step there
is no history: ``calibrating`` casts each tensor by its own amax, and remembers it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, UInt8

from surogate.kernels.arrays import (
    BF16,
    Array,
    aligned,
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
from surogate.kernels.nvrtc import THREADS, Source

Scaling = Literal["delayed", "tensor", "row"]
MULTIPLE = 16  # of both sizes of a matrix: what the products of codes take
TILE = (128, 64)  # rows and columns that a block of the transposing cast takes
CAST_PACKS = 2  # of 16 values that a thread of fp8_cast takes, as in fp8.cu
AMAX_BLOCKS = 1024
_SMALLEST_INVERSE = np.float32(np.finfo(np.float32).max)

_FORMS: list[tuple[str, ...]] = [("E4M3",), ("E5M2",)]
SOURCE = Source(
    "fp8",
    {
        "fp8_cast": _FORMS,
        "fp8_cast_transposed": _FORMS,
        "fp8_cast_rows": _FORMS,
        "fp8_decode": _FORMS,
        "fp8_amax": [()],
        "fp8_scale": [()],
        "fp8_update": [()],
    },
)


class Form(NamedTuple):
    """One of the two formats. Codes are uint8 on the host and on cards."""

    name: str
    dtype: np.dtype
    largest: float

    @property
    def types(self) -> tuple[str, ...]:
        """The template argument of the kernels."""
        return ("E4M3" if self == E4M3 else "E5M2",)


E4M3 = Form("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), 448.0)
E5M2 = Form("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), 57344.0)


class Codes(NamedTuple):
    """A matrix in 8 bits: as it is, transposed, or both; and what a code is multiplied by.

    ``inverse`` is [1], or one number for each row with row scaling.
    """

    form: Form
    rows: UInt8[Array, "rows columns"] | None
    turned: UInt8[Array, "columns rows"] | None
    inverse: Float32[Array, " scales"]


class Fp8State:
    """Scales and amax histories of ``limits``' tensors, one limit each.

    ``history`` holds the last ``length`` finite amaxes of each tensor, ``position`` where the next
    goes; with "most_recent" the last alone decides. Those two are the state of a run.
    """

    def __init__(
        self,
        limits: Float32[np.ndarray, " tensors"],
        *,
        length: int,
        algorithm: Literal["max", "most_recent"],
        scaling: Scaling,
        library: Any = np,
    ) -> None:
        tensors = len(limits)
        self.scaling, self._recent = scaling, algorithm == "most_recent"
        self.history = library.zeros((length, tensors), np.float32)
        self.position = library.zeros(tensors, np.int32)
        self._limits = library.asarray(limits)
        self._host_limits = limits
        # A product takes an inverse at an address of 16 bytes.
        self._scale = library.ones((tensors, 4), np.float32)
        self._inverse = library.ones((tensors, 4), np.float32)
        self._amax = library.zeros(tensors, np.float32)
        self._calibrating, self._recording = False, True

    def slot(self, index: int, form: Form) -> "Slot":
        """One tensor's share."""
        return Slot(self, index, form)

    @property
    def calibrated(self) -> bool:
        """Whether any tensor has a history. Waits for the card."""
        return bool((self.history > 0).any())

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Casts use the amax of what they cast, which is remembered as a step's."""
        self._calibrating = True
        try:
            yield
        finally:
            self._calibrating = False

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Casts leave no trace: for an evaluation, and for runs that do not count."""
        recording, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = recording

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The amaxes taken so far are as before when the block ends."""
        kept = self._amax.copy()
        try:
            yield
        finally:
            self._amax[...] = kept

    def update_(self) -> None:
        """Ends a step: its amaxes enter the history, which gives the next step's scales."""
        if self.scaling == "delayed":
            self._update()

    def load_(self, history: Any, position: Any) -> None:
        """Takes over a saved state, and the scales that follow from it."""
        self.history[...], self.position[...] = history, position
        self._amax.fill(0)
        if self._recent:
            last = namespace(position).arange(len(self.position))
            self._amax[...] = self.history[(self.position - 1) % len(self.history), last]
            self.position[...] = (self.position - 1) % len(self.history)
        self._update()
        self.history[...], self.position[...] = history, position

    def _update(self) -> None:
        length, tensors = self.history.shape
        if on_device(self._amax):
            arguments = [self._scale, self._inverse, self._amax, self.history, self.position]
            sizes = [self._limits, tensors, length, self._recent]
            SOURCE.launch("fp8_update", (), -(-tensors * 32 // THREADS), THREADS, arguments + sizes)
            return
        last = self._amax
        seen = (last > 0) & np.isfinite(last)
        index = np.flatnonzero(seen)
        self.history[self.position[index], index] = last[index]
        self.position[index] = (self.position[index] + 1) % length
        most = np.where(seen, last, 0) if self._recent else self.history.max(axis=0)
        for tensor in np.flatnonzero(most > 0):
            self.put_scale(int(tensor), scale_of(most[tensor], self._host_limits[tensor]))
        last.fill(0)

    def put_scale(self, index: int, scale: np.float32) -> None:
        """The scale of one tensor, and its inverse (host)."""
        self._scale[index, 0], self._inverse[index, 0] = scale, np.float32(1) / scale


class Slot(NamedTuple):
    """One tensor of a state, and the format that it is cast to."""

    state: Fp8State
    index: int  # type: ignore[assignment]  # tuples have a method index
    form: Form

    @property
    def limit(self) -> float:
        """What its amax is scaled to."""
        return float(self.state._host_limits[self.index])

    @property
    def scale(self) -> Any:
        """[1]"""
        return self.state._scale[self.index, :1]

    @property
    def inverse(self) -> Any:
        """[1]"""
        return self.state._inverse[self.index, :1]

    @property
    def amax(self) -> Any:
        """[1]: the largest |x| of the step so far."""
        return self.state._amax[self.index : self.index + 1]

    @property
    def record(self) -> Any:
        """amax, where casts leave a trace; else None."""
        return self.amax if self.state._recording else None


class Cast(NamedTuple):
    """Codes that the op which makes x writes beside it: those of fp8_cast, without its read of x.

    ``begin`` makes room for them, the op takes the ``Cast`` as a setting, and then ``codes`` hold x
    as the op rounded it.
    """

    slot: Slot
    codes: Codes  # as x lies, not transposed

    @classmethod
    def begin(cls, slot: Slot, shape: tuple[int, int], *, like: Any) -> "Cast | None":
        """A cast of an x of this shape, beside ``like``; None where the scale is not known before x
        is: then fp8_cast has to look at x.
        """
        if slot.state.scaling != "delayed" or slot.state._calibrating:
            return None
        _check_sizes("Cast.begin", shape)
        return cls(slot, Codes(slot.form, empty(shape, np.uint8, like=like), None, slot.inverse))

    def on_host(self, x: Any) -> None:
        """The host version of an op casts its x afterwards."""
        fp8_cast(x, self.slot, out=self.codes)


def kernel_cast(cast: Cast | None, name: str, x: Any, *, fits: bool) -> tuple[str, Any, Any, Any]:
    """(template argument, codes, amax, scale) for a kernel that makes x: Cast in cuda/fp8.cuh.

    ``fits``: the kernel moves x, and what it is made of, in packs of 16 bytes.
    """
    if cast is None:
        return "void", None, None, None
    codes, slot = cast.codes.rows, cast.slot
    assert codes is not None
    require(
        fits and x.dtype == BF16 and x.shape == codes.shape,
        f"{name}: takes a cast of bfloat16{codes.shape} beside rows at multiples of 16 bytes, "
        f"got {describe(x)}",
    )
    return slot.form.types[0], codes, slot.record, slot.scale


def limit_of(form: Form, margin: int) -> float:
    """The largest code over 2^margin."""
    return math.ldexp(form.largest, -margin)


def scale_of(amax: Any, limit: Any) -> np.float32:
    """limit / amax; 1 for an amax that is zero or not finite."""
    amax = np.float32(amax)
    if not (amax > 0 and np.isfinite(amax)):
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.float32(min(np.float32(limit) / amax, _SMALLEST_INVERSE))


def fp8_cast(
    x: Any,
    slot: Slot,
    *,
    rows: bool = True,
    turned: bool = False,
    scaling: Scaling | Literal["known"] | None = None,
    out: Codes | None = None,
) -> Codes:
    """Codes of bfloat16 (host: also float32) x [rows, columns], both multiples of 16.

    ``turned`` asks for the transposed codes, ``rows`` for the others. ``scaling`` stands for the
    state's own; "known" takes the scale that the slot has, and leaves no trace. With row scaling,
    ``turned`` codes have a scale for each column of x. ``out`` are codes of an earlier cast alike,
    which are written over.
    """
    state = slot.state
    scaling = scaling or state.scaling
    _check_sizes("fp8_cast", x.shape)
    if scaling == "row":
        require(rows != turned, "fp8_cast: with row scaling, ask for rows or for turned")
        return _cast_rows(x, slot, turned, out)
    if scaling == "tensor" or (state._calibrating and scaling != "known"):
        _scale_now(x, slot, keep=state._calibrating)
    record = slot.record if scaling == "delayed" else None
    if on_device(x):
        return _launch(x, slot, rows, turned, record, out)
    value = upcast(x)
    if record is not None:
        np.maximum(record, np.abs(value).max(), out=record)
    with np.errstate(invalid="ignore", over="ignore"):  # not finite: NaN, as on cards
        codes = encode(value * slot.scale, slot.form)
    return Codes(
        slot.form,
        placed(codes, out and out.rows) if rows else None,
        placed(np.ascontiguousarray(codes.T), out and out.turned) if turned else None,
        slot.inverse,
    )


def _check_sizes(name: str, shape: tuple[int, ...]) -> None:
    require(
        len(shape) == 2 and not any(size % MULTIPLE for size in shape),
        f"{name}: both sizes must be multiples of {MULTIPLE}, got {shape}",
    )


def encode(x: Any, form: Form) -> UInt8[np.ndarray, "..."]:
    """Codes of a NumPy array, without a scale: finite values saturate, others become NaN."""
    bounded = np.clip(x, -form.largest, form.largest).astype(np.float32)
    codes = bounded.astype(form.dtype).view(np.uint8)
    return np.where(np.isfinite(x), codes, codes | np.uint8(0x7F))


def decode(codes: Any, form: Form) -> Any:
    """The values of codes, which bfloat16 holds exactly: float32 from NumPy, bfloat16 on cards."""
    if not on_device(codes):
        return codes.view(form.dtype).astype(np.float32)
    require(codes.flags.c_contiguous and codes.size % 16 == 0, "fp8 decode: must be contiguous")
    out = empty(codes.shape, BF16, like=codes)
    packs = codes.size // 16
    grid = -(-packs // THREADS)
    SOURCE.launch("fp8_decode", form.types, grid, THREADS, [out, codes, np.int64(packs)])
    return out


def _launch(x: Any, slot: Slot, rows: bool, turned: bool, record: Any, out: Codes | None) -> Codes:
    size, columns = x.shape
    stride = _stride(x)
    if out is None:
        code = empty((size, columns), np.uint8, like=x) if rows else None
        other = empty((columns, size), np.uint8, like=x) if turned else None
    else:
        code, other = out.rows if rows else None, out.turned
    if not turned:
        grid = -(-(size * columns // 16) // (THREADS * CAST_PACKS))
        arguments = [code, record, x, slot.scale, columns, stride, size, columns]
        SOURCE.launch("fp8_cast", slot.form.types, grid, THREADS, arguments)
        return Codes(slot.form, code, None, slot.inverse)
    tiles = (-(-size // TILE[0]), -(-columns // TILE[1]))
    arguments = [other, code, record, x, slot.scale, stride, size, columns]
    SOURCE.launch("fp8_cast_transposed", slot.form.types, tiles, THREADS, arguments)
    return Codes(slot.form, code, other, slot.inverse)


def scale_by(x: Float[Array, "rows columns"], slot: Slot) -> None:
    """Sets the slot's scale by the amax of x, and leaves no other trace."""
    _check_sizes("scale_by", x.shape)
    _scale_now(x, slot, keep=False)


def _scale_now(x: Any, slot: Slot, *, keep: bool) -> None:
    """Sets the slot's scale by the amax of x, which is kept for the step's end, or cleared."""
    if not on_device(x):
        amax = np.abs(upcast(x)).max(initial=0)
        slot.state.put_scale(slot.index, scale_of(amax, slot.limit))
        return
    packs = x.size // 16
    grid = min(AMAX_BLOCKS, -(-packs // THREADS))
    SOURCE.launch("fp8_amax", (), grid, THREADS, [slot.amax, x, _stride(x), *x.shape])
    SOURCE.launch("fp8_scale", (), 1, 1, [slot.scale, slot.inverse, slot.amax, slot.limit, keep])


def _cast_rows(x: Any, slot: Slot, turned: bool, out: Codes | None) -> Codes:
    if turned:
        x, lying = empty(x.shape[::-1], x.dtype, like=x), x
        x[...] = lying.T
    size, columns = x.shape
    if out is None:
        code, inverse = empty((size, columns), np.uint8, like=x), empty(size, "float32", like=x)
    else:
        code, inverse = out.turned if turned else out.rows, out.inverse
    if on_device(x):
        arguments = [code, inverse, x, slot.limit, _stride(x), columns]
        SOURCE.launch("fp8_cast_rows", slot.form.types, size, THREADS, arguments)
    else:
        value = upcast(x)
        scale = np.array([scale_of(a, slot.limit) for a in np.abs(value).max(axis=1)], np.float32)
        code[...], inverse[...] = encode(value * scale[:, None], slot.form), np.float32(1) / scale
    rows, other = (None, code) if turned else (code, None)
    return Codes(slot.form, rows, other, inverse)


def _stride(x: Any) -> int:
    require(
        x.dtype == BF16 and rows_aligned(x) and aligned(x),
        f"fp8_cast: takes bfloat16 rows at multiples of 16 bytes, got {describe(x)}",
    )
    return row_stride("fp8_cast", x)
