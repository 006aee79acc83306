"""Checkpoints that are quantised already: what stands in a file for the tensors of one weight.

``gathered`` makes one ``Tensor`` of a weight's codes and scales, with the name, the shape and the
type (bfloat16) of what it stands for, so that whoever reads tensors needs not know of them: its
handle, a ``Coded``, decodes. A run whose frozen weights stay in codes takes them from the handle as
they are, a leaf of the tree at a time (``Stack``).

The tensors say what is quantised, and the lists of a configuration (modules_to_not_convert, ignore,
exclude_modules) are read for plans alone: two bytes a number are a plain tensor, one byte or half a
byte are codes that need their scales.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import BFloat16

from surogate.kernels import tree
from surogate.kernels.arrays import Array, empty
from surogate.kernels.quant.checkpoints import LEFT_OUT, Scheme, assemble
from surogate.kernels.quant.quantized import Quantized, dequantize
from surogate.kernels.quantized_linear import decode_, stacked
from surogate.models.config import ModelConfig
from surogate.models.files import RAW, CheckpointError, Tensor
from surogate.models.names import MODEL_NAMES, layout

SMALL = 4096  # bytes: tensors up to here are read to be checked, of others the header is


class Coded:
    """The handle of a quantised weight: reads its codes and scales when they are asked for."""

    def __init__(self, parts: Mapping[str, Tensor], name: str, scheme: Scheme) -> None:
        self._parts, self._name, self._scheme = parts, name, scheme

    def quantized(self) -> Quantized:
        """The weight as it is stored."""
        arrays = {name: part.handle.get_tensor(name) for name, part in self._parts.items()}
        found: Quantized = assemble(arrays, self._scheme)[self._name]
        return found

    def get_tensor(self, name: str) -> BFloat16[np.ndarray, "outer inner"]:
        """The weight, decoded."""
        return dequantize(self.quantized())

    get_slice = get_tensor


class Stack(NamedTuple):
    """A leaf of a tree whose tensors are all quantised: those, in the order of their rows, and the
    dtype that they are to be decoded to.
    """

    pieces: tuple[Quantized, ...]
    dtype: np.dtype

    def decoded(self, put: Callable[[Array], Array] = lambda array: array) -> Array:
        """The leaf, decoded where ``put`` moves its arrays."""
        pieces = tuple(piece.map(put) for piece in self.pieces)
        shape = sum(q.shape[0] for q in pieces), pieces[0].shape[1]
        out = empty(shape, self.dtype, like=pieces[0].codes)
        decode_(stacked(pieces), out)
        return out


def decoded(path: str, leaf: Any) -> Any:
    """The ``put`` of ``read_model`` that leaves nothing in codes, on the host."""
    return leaf.decoded() if isinstance(leaf, Stack) else leaf


def gathered(
    tensors: Mapping[str, Tensor], config: ModelConfig, scheme: Scheme
) -> dict[str, Tensor]:
    """The weights of a checkpoint in place of its tensors, which are those of ``open_tensors``.

    What belongs to no weight of the configuration stays as it is. The scales of activations and of
    the key-value cache are left out. Headers and small tensors are read.

    Raises CheckpointError that names the tensor and the file: one that is missing, unused, or of
    another shape or dtype than the scheme has; or a file without any codes.
    """
    fields = tree.leaves(layout(config))
    weights = {piece.name for field in fields for piece in field.pieces} | {MODEL_NAMES["head"]}
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.endswith(LEFT_OUT):
            groups.setdefault(_owner(name, weights), {})[name] = tensor
    out: dict[str, Tensor] = {}
    for owner, parts in groups.items():
        out |= dict(_gathered(parts, scheme) if owner in weights else parts)
    if not any(isinstance(tensor.handle, Coded) for tensor in out.values()):
        path = next(iter(tensors.values())).path.parent
        raise CheckpointError(
            f"{path}: quantization_config says {scheme.method}, but no tensor is quantised"
        )
    return out


def _owner(name: str, weights: set[str]) -> str:
    """The weight whose module a tensor is of, or the tensor itself."""
    module = name
    while name not in weights and module:
        module = module.rpartition(".")[0]
        if f"{module}.weight" in weights:
            return f"{module}.weight"
    return name


def _gathered(parts: dict[str, Tensor], scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    try:
        found = assemble({name: _stand_in(part) for name, part in parts.items()}, scheme)
    except ValueError as error:
        blamed = str(error).split(":")[0]
        path = parts.get(blamed, next(iter(parts.values()))).path
        raise CheckpointError(f"{path}: {error}") from None
    path = next(iter(parts.values())).path
    for name, x in found.items():
        if isinstance(x, Quantized):
            yield name, Tensor(Coded(parts, name, scheme), path, name, x.shape, "BF16")
        else:
            yield name, parts[name]


def _stand_in(tensor: Tensor) -> np.ndarray:
    """An array of a tensor's shape and dtype, whose memory is not touched where it is large."""
    dtype = RAW[tensor.dtype]
    if math.prod(tensor.shape) * dtype.itemsize <= SMALL:
        return tensor.handle.get_tensor(tensor.name)
    return np.zeros(tensor.shape, dtype)
