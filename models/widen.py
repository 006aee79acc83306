"""A model whose adapted matrices lie in one array each with their adapters (kernels/widened.py).

Trees of such a model hold a ``Widened`` where a plain one holds an array. They are for the passes:
whatever saves, exports or compares weights takes ``tree.map(plain, model)``, whose leaves are views
of the same memory.
"""

from collections.abc import Callable
from typing import Any

from surogate.kernels.arrays import Array
from surogate.kernels.linear import RecipeWeight
from surogate.kernels.widened import Adapted, Refresh, Widened
from surogate.models.config import ModelConfig
from surogate.models.lora import MATRICES, LoraSpec
from surogate.models.tree import Adapter, Layer, LayerAdapter, Model

Put = Callable[[str, Array], Array]


def making_room(put: Put, config: ModelConfig, spec: LoraSpec) -> Put:
    """A ``put`` for ``read_model`` and ``init_model`` that gives each adapted matrix its room.

    Its leaves are plain views, which ``widened`` takes over without a copy. While a leaf is put,
    it lies there twice.
    """

    def put_with_room(path: str, array: Array) -> Array:
        leaf = put(path, array)
        field = path.rsplit(".", 1)[-1]
        parts = spec.parts(config, field) if field in MATRICES.values() else ()
        return Widened.of(leaf, len(parts) * spec.rank).weight if parts else leaf

    return put_with_room


def widened(model: Model, adapter: Adapter) -> Model:
    """The model with each adapted matrix widened; refresh it before it is read.

    Matrices that ``making_room`` put are shared. Others are copied, beside which the caller's tree
    still holds the originals.
    """
    pairs = zip(model.layers, adapter.layers, strict=True)
    return model._replace(layers=tuple(_widened_layer(layer, pair) for layer, pair in pairs))


def _widened_layer(layer: Layer, adapter: LayerAdapter) -> Layer:
    found: dict[str, Any] = {}
    for name, matrix in MATRICES.items():
        pair = getattr(adapter, name)
        if pair is not None and not isinstance(getattr(layer, matrix), RecipeWeight):
            found[matrix] = Widened.of(getattr(layer, matrix), len(pair.a))
    return layer._replace(**found)


def refresh_of(model: Model, adapter: Adapter, spec: LoraSpec, config: ModelConfig) -> Refresh:
    """What brings a widened model up to date with its adapter, in one launch."""
    adapted = []
    for layer, pairs in zip(model.layers, adapter.layers, strict=True):
        for name, matrix in MATRICES.items():
            pair = getattr(pairs, name)
            if pair is not None:
                weight = getattr(layer, matrix)
                blocks = weight.blocks if isinstance(weight, RecipeWeight) else weight
                assert blocks is not None, f"{matrix}: has no blocks for its adapter"
                adapted.append(Adapted(blocks, pair.a, pair.b, spec.parts(config, matrix)))
    return Refresh(adapted, spec.scale)
