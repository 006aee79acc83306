"""bf16 products of frozen weights that are stored in a narrow format: quantised as they are read
(QLoRA, arXiv 2305.14314), or left in the codes of a checkpoint that is quantised already. Below
another recipe (``CastRecipe``) they say how its frozen weights are kept.
"""

from typing import Any

import numpy as np

from surogate.kernels.arrays import Array
from surogate.kernels.quant.quantized import Quantized
from surogate.kernels.quantized_linear import QuantizedWeight, Shared
from surogate.models.config import ModelConfig
from surogate.models.lora import LoraSpec
from surogate.models.prequantized import Stack
from surogate.models.recipe import Recipe, Scope, Storage, field_at, ranks_of
from surogate.models.widen import Put


class StoredRecipe(Recipe):
    """bf16 products of frozen weights that stay in codes, as their checkpoint has them.

    Matrices that it has no codes for are plain ones. A stacked matrix (q, k, v; gate, up) of which
    some tensors are quantised and others are not is one of those: it was decoded.
    """

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        self._config = config
        self._paths = {path: field_at(config, path) for path in scope.paths(config)}
        self._shared: dict[str, Shared] = {}
        self._kinds: dict[str, int] = {}  # in words -> matrices that were put

    def facts(self) -> list[str]:
        def number(count: int) -> str:
            total = len(self._paths)
            return f"{count}" if count == total else f"{count} of {total}"

        return [
            f"base weights in {kind}, as stored: {number(count)} matrices"
            for kind, count in self._kinds.items()
        ]

    def stores(self, path: str, leaf: Any) -> bool:
        return path in self._paths and isinstance(leaf, Stack)

    def begin(self) -> None:
        for shared in self._shared.values():
            shared.forget()

    def frozen(self, put: Put, wide: Put, lora: LoraSpec) -> Put:
        def put_stored(path: str, leaf: Any) -> Any:
            if not self.stores(path, leaf):
                return wide(path, leaf)
            pieces = tuple(piece.map(lambda array: put(path, array)) for piece in leaf.pieces)
            kind = in_words(pieces[0])
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
            return self.stacked(path, pieces, lora, like=put(path, np.empty(0, leaf.dtype)))

        return put_stored

    def stacked(
        self, path: str, pieces: tuple[Quantized, ...], lora: LoraSpec, *, like: Array
    ) -> QuantizedWeight:
        """The leaf of a matrix; ``like`` is of the compute type, on the device."""
        field = path.rsplit(".", 1)[-1]
        if field not in self._shared:
            ranks, shape = ranks_of(lora, self._config, path, like), self._paths[path].shape
            self._shared[field] = Shared((shape[0], shape[1]), ranks, like.dtype, like=like)
        return QuantizedWeight.of(pieces, self._shared[field])


class QuantizedRecipe(StoredRecipe):
    """bf16 products of frozen weights that are quantised as they are read (QLoRA)."""

    def __init__(self, config: ModelConfig, scope: Scope, storage: Storage) -> None:
        super().__init__(config, scope)
        self._storage = storage

    def facts(self) -> list[str]:
        form, block, double, four = self._storage
        blocks = f", blocks of {block}" if block else ""
        twice = ", scales quantised too" if double else ""
        better = ", four over six" if four else ""
        return [f"base weights in {form}{blocks}{twice}{better}: {len(self._paths)} matrices"]

    def stores(self, path: str, leaf: Any) -> bool:
        return path in self._paths

    def frozen(self, put: Put, wide: Put, lora: LoraSpec) -> Put:
        def put_quantized(path: str, array: Array) -> Any:
            if not self.stores(path, array):
                return wide(path, array)
            field, leaf = self._paths[path], put(path, array)
            pieces = (field.view(leaf, piece) for piece in field.pieces)
            return self.stacked(path, tuple(map(self._storage.quantized, pieces)), lora, like=leaf)

        return put_quantized


def in_words(q: Quantized) -> str:
    """fp8, blocks of 128 and the like."""
    rows, columns = q.block
    side = f"{rows} x {columns}" if q.format == "fp8" and rows != columns else f"{columns}"
    twice = ", scales quantised too" if q.nested else ""
    return f"{q.format}, blocks of {side}{twice}"
