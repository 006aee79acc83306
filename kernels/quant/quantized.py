"""Weights in a narrow format: ``quantize`` a matrix, ``dequantize`` it to bfloat16.

    format  blocks that share a scale       bits a weight           module
    fp8     64, 128 or 256 square           8 + 32 / block^2        fp8.py
    nf4     64 to 512 of the flat matrix    4 + 32 / block          nf4.py
            with double quantisation        4 + 8 / block + 32 / (256 block)
    nvfp4   1 x 16, or 16 x 16              4.5                     fp4.py
    mxfp4   1 x 32 (read only)              4.25                    fp4.py

A value is computed in float32 as a code's value times its scale, and rounded once to bfloat16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import BFloat16, Float

from surogate.kernels.arrays import (
    BF16,
    F32,
    Array,
    address,
    describe,
    empty,
    on_device,
    placed,
    require,
    row_stride,
    rows_aligned,
)
from surogate.kernels.nvrtc import THREADS, Source
from surogate.kernels.quant.fp4 import (
    MXFP4_COLUMNS,
    NVFP4_COLUMNS,
    quantize_nvfp4,
    values_fp4,
)
from surogate.kernels.quant.fp8 import quantize_fp8, values_fp8
from surogate.kernels.quant.nf4 import quantize_nf4, values_nf4
from surogate.kernels.quant.storage import Nested, Quantized, blocks_of, check, check_power

__all__ = ["FORMATS", "Nested", "Quantized", "check_quantized", "dequantize", "quantize"]

FORMATS = ("fp8", "nf4", "nvfp4", "mxfp4")
COLUMNS, ROWS = 8, 4  # of a thread of quant_dequantize.cu
_SCALES = ("FP8", "NF4Plain", "NF4Double", "NVFP4", "MXFP4")
SOURCE = Source(
    "quant_dequantize",
    {"dequantize": [(kind, whole) for kind in _SCALES for whole in ("true", "false")]},
)
_VALUES: dict[str, Callable[[Quantized], Any]] = {
    "fp8": values_fp8,
    "nf4": values_nf4,
    "nvfp4": values_fp4,
    "mxfp4": values_fp4,
}


def quantize(
    weight: Float[Array, "outer inner"],
    format: str,
    *,
    block: int | None = None,
    double_quant: bool = False,
    square: bool = True,
    four_over_six: bool = False,
) -> Quantized:
    """Codes and scales of a C-contiguous float32 or bfloat16 matrix.

    ``block`` is the side of an fp8 block (128 if None) or the elements of an nf4 block (64);
    nvfp4's are 16 columns of 16 rows, or of one row without ``square``, and with ``four_over_six``
    take the better of two scales. ``double_quant`` stores nf4's scales in 8 bits.

    Raises ValueError for another format or block; mxfp4 is only read.
    """
    require(
        format in FORMATS and format != "mxfp4",
        f"quantize: format must be fp8, nf4 or nvfp4, got {format}",
    )
    require(
        format == "nf4" or not double_quant, f"quantize: double_quant is of nf4, not of {format}"
    )
    require(
        format == "nvfp4" or not four_over_six,
        f"quantize: four_over_six is of nvfp4, not of {format}",
    )
    if format == "nf4":
        return quantize_nf4(weight, block=block or 64, double_quant=double_quant)
    if format == "fp8":
        side = block or 128
        return quantize_fp8(weight, block=(side, side))
    require(block in (None, 16), f"quantize: nvfp4 has blocks of 16 columns, got {block}")
    return quantize_nvfp4(weight, block=(16 if square else 1, 16), four_over_six=four_over_six)


def dequantize(
    q: Quantized, *, out: BFloat16[Array, "outer inner"] | None = None
) -> BFloat16[Array, "outer inner"]:
    """The matrix in bfloat16, in ``out`` where given, whose rows may lie apart.

    Raises ValueError for arrays that do not fit the format, and for an ``out`` of another shape or
    dtype.
    """
    check_quantized(q)
    require(
        out is None or (out.shape == q.shape and out.dtype == BF16),
        f"dequantize: out must be bfloat16{q.shape}, got {describe(out)}",
    )
    if not on_device(q.codes):
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is passed on
            return placed(_VALUES[q.format](q).astype(BF16), out)
    result = empty(q.shape, BF16, like=q.codes) if out is None else out
    if q.size:
        _launch(q, result)
    return result


def _launch(q: Quantized, out: Array) -> None:
    (rows, columns), nested = q.shape, q.nested
    require(q.size < 1 << 32, f"dequantize: takes less than 2^32 elements, got {q.size}")
    stride = row_stride("dequantize: out", out)
    whole = columns % COLUMNS == 0 and rows_aligned(out) and address(q.codes) % COLUMNS == 0
    second, table, offset, nested_block = q.tensor_scale, None, None, 1
    if nested is not None:
        second, table, offset, nested_block = nested
    across = 32
    while across < THREADS and across * COLUMNS < columns:
        across *= 2
    down = THREADS // across
    grid = blocks_of(rows, down * ROWS), blocks_of(columns, across * COLUMNS)
    logarithms = [side.bit_length() - 1 for side in (*q.block, nested_block)]
    sizes = [np.int64(stride), np.uint32(rows), np.uint32(columns)]
    arguments = [out, q.codes, q.scales, second, table, offset, *logarithms, *sizes]
    types = (kind_of(q), "true" if whole else "false")
    SOURCE.launch("dequantize", types, grid, (across, down), arguments)


def kind_of(q: Quantized) -> str:
    """The template argument of the kernels: how factors are found."""
    if q.format == "nf4":
        return "NF4Double" if q.nested else "NF4Plain"
    return q.format.upper()


def check_quantized(q: Quantized, name: str = "dequantize") -> None:
    """Raises ValueError, beginning with ``name``, unless the arrays are those of the format."""
    require(q.format in FORMATS, f"{name}: format must be one of {FORMATS}, got {q.format}")
    (outer, inner), (rows, columns) = q.shape, q.block
    if q.format == "nf4":
        check_power(f"{name}: an nf4 block", columns, 32, 4096)
        count = blocks_of(q.size, columns)
        check(f"{name}: codes", q.codes, (blocks_of(q.size, 2),), np.uint8)
        check(f"{name}: scales", q.scales, (count,), np.uint8 if q.nested else F32)
        if q.nested is not None:
            check_power(f"{name}: a block of nested scales", q.nested.block, 1, 1 << 20)
            blocks = (blocks_of(count, q.nested.block),)
            check(f"{name}: nested scales", q.nested.scales, blocks, F32)
            check(f"{name}: nested table", q.nested.table, (256,), F32)
            check(f"{name}: nested offset", q.nested.offset, (1,), F32)
    elif q.format == "fp8":
        check_power(f"{name}: rows of an fp8 block", rows, 1, 1 << 20)
        check_power(f"{name}: columns of an fp8 block", columns, 8, 1 << 20)
        check(f"{name}: codes", q.codes, q.shape, np.uint8)
        grid = blocks_of(outer, rows), blocks_of(inner, columns)
        check(f"{name}: scales", q.scales, grid, F32)
    else:
        side = NVFP4_COLUMNS if q.format == "nvfp4" else MXFP4_COLUMNS
        require(inner % side == 0, f"{name}: {q.format} needs columns in multiples of {side}")
        check(f"{name}: codes", q.codes, (outer, inner // 2), np.uint8)
        check(f"{name}: scales", q.scales, (outer, inner // side), np.uint8)
    if q.format == "nvfp4":
        if q.tensor_scale is None:
            raise ValueError(f"{name}: nvfp4 needs a tensor_scale")
        check(f"{name}: tensor_scale", q.tensor_scale, (1,), F32)
