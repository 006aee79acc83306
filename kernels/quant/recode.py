"""Stored weights as E4M3 codes at one scale, for products of codes: no bfloat16 matrix in between.

    code = E4M3(bfloat16(value of the stored code) * scale)

These are the bits of ``dequantize`` and then fp8.py's cast with a known scale.
"""

import numpy as np
from jaxtyping import Float32, UInt8

from surogate.kernels.arrays import F32, Array, aligned, describe, on_device, require
from surogate.kernels.fp8 import E4M3, MULTIPLE, encode
from surogate.kernels.nvrtc import THREADS, Source
from surogate.kernels.quant.quantized import check_quantized, dequantize, kind_of
from surogate.kernels.quant.storage import Quantized, blocks_of

TILE, SHARED = 128, 64  # of quant_recode.cu: rows and columns of a block; columns of a table of NF4
_NF4 = ("NF4Plain", "NF4Double")
SOURCE = Source(
    "quant_recode",
    {
        "recode": [
            (kind, share, turned)
            for kind in ("FP8", *_NF4, "NVFP4", "MXFP4")
            for share in (("true", "false") if kind in _NF4 else ("false",))
            for turned in ("true", "false")
        ]
    },
)


def sizes_fit(rows: int, columns: int) -> bool:
    """Whether ``recode`` takes matrices of such a shape."""
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0 and rows * columns < 1 << 32


def recodable(q: Quantized) -> bool:
    """Whether ``recode`` takes it: sizes in multiples of 16, codes from an address of 16 bytes."""
    return sizes_fit(*q.shape) and (not on_device(q.codes) or aligned(q.codes))


def recode(
    q: Quantized,
    scale: Float32[Array, "1"],
    *,
    out: UInt8[Array, "..."],
    turned: bool = False,
) -> None:
    """Writes the codes to ``out`` [outer, inner], or transposed [inner, outer], whose rows may lie
    apart if ``turned``.

    Raises ValueError for arrays that do not fit the format, for one that is not ``recodable``, and
    for an ``out`` of another shape or not at multiples of 16 bytes.
    """
    check_quantized(q, "recode")
    require(recodable(q), f"recode: sizes must be multiples of {MULTIPLE}, got {q.shape}")
    wanted = q.shape[::-1] if turned else q.shape
    pitch = out.strides[0]
    require(
        out.shape == wanted
        and out.dtype == np.uint8
        and out.strides[1] == 1
        and (pitch == wanted[1] or turned),
        f"recode: out must be uint8{wanted} with its columns side by side, got {describe(out)}",
    )
    if not on_device(q.codes):
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite becomes NaN
            codes = encode(dequantize(q).astype(F32) * scale, E4M3)
        out[...] = codes.T if turned else codes
        return
    require(
        aligned(out) and pitch % MULTIPLE == 0,
        f"recode: out must begin at a multiple of {MULTIPLE} bytes, and its rows too",
    )
    _launch(q, scale, out, turned)


def _launch(q: Quantized, scale: Array, out: Array, turned: bool) -> None:
    (rows, columns), nested = q.shape, q.nested
    second, table, offset, nested_block = q.tensor_scale, None, None, 1
    if nested is not None:
        second, table, offset, nested_block = nested
    share = q.format == "nf4" and columns % SHARED == 0 and q.block[1] >= SHARED
    logarithms = [side.bit_length() - 1 for side in (*q.block, nested_block)]
    sizes = [np.uint32(rows), np.uint32(columns), np.int64(out.strides[0])]
    arguments = [out, q.codes, q.scales, second, table, offset, scale, *logarithms, *sizes]
    types = (kind_of(q), "true" if share else "false", "true" if turned else "false")
    tiles = (blocks_of(columns, TILE), blocks_of(rows, TILE))
    SOURCE.launch("recode", types, tiles, THREADS, arguments)
