"""``Quantized``: a weight matrix as codes of a narrow format and the scales of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

from surogate.kernels.arrays import BF16, Array, require


class Nested(NamedTuple):
    """Scales that are codes themselves: scale = table[code] * scales[code's block] + offset.

    The blocks are of ``block`` neighbouring codes.
    """

    scales: Float32[Array, " nested_blocks"]
    table: Float32[Array, "256"]
    offset: Float32[Array, "1"]
    block: int


@dataclass(frozen=True, eq=False, slots=True)
class Quantized:
    """A leaf of a tree of weights that stands for a bfloat16 matrix [outer, inner].

    ``format`` is "fp8", "nf4", "nvfp4" or "mxfp4"; the modules fp8, nf4 and fp4 say what its arrays
    hold. ``block`` is the rows and columns that share a scale.
    """

    format: str
    shape: tuple[int, int]
    block: tuple[int, int]
    codes: UInt8[Array, "..."]
    scales: Float32[Array, "..."] | UInt8[Array, "..."]
    tensor_scale: Float32[Array, "1"] | None = None
    nested: Nested | None = None

    @property
    def dtype(self) -> Any:
        """Of what it stands for."""
        return BF16

    @property
    def ndim(self) -> int:
        """Of what it stands for."""
        return 2

    @property
    def size(self) -> int:
        """Elements of what it stands for."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what the matrix takes as it is stored."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, Array]:
        """The arrays by name, those that are there."""
        named = {field.name: getattr(self, field.name) for field in fields(self)[3:6]}
        if self.nested is not None:
            named |= {f"nested_{name}": x for name, x in self.nested._asdict().items()}
            del named["nested_block"]
        return {name: x for name, x in named.items() if x is not None}

    def map(self, f: Callable[[Array], Array]) -> "Quantized":
        """The same matrix with ``f`` of each array: another place, or a copy."""
        nested = self.nested
        if nested is not None:
            nested = Nested(f(nested.scales), f(nested.table), f(nested.offset), nested.block)
        scale = self.tensor_scale
        return replace(
            self,
            codes=f(self.codes),
            scales=f(self.scales),
            tensor_scale=None if scale is None else f(scale),
            nested=nested,
        )


def blocks_of(length: int, block: int) -> int:
    """Blocks that cover a length, the last one ragged."""
    return -(-length // block)


def check(name: str, x: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises ValueError unless an array is C-contiguous and of this shape and dtype."""
    require(
        x.shape == shape and x.dtype == dtype and x.flags.c_contiguous,
        f"{name} must be a contiguous {np.dtype(dtype)}{shape}, got {x.dtype}{x.shape}",
    )


def check_power(name: str, value: int, least: int, most: int) -> None:
    """Raises ValueError unless a block's side is a power of two in a range."""
    require(
        least <= value <= most and value & (value - 1) == 0,
        f"{name} must be a power of two from {least} to {most}, got {value}",
    )
