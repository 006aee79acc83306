"""A model with an adapter in its weights, as one tree in memory."""

from typing import Any

from surogate.models.files import planned
from surogate.models.lora import LoraSpec, merge_adapter
from surogate.models.names import from_named, named
from surogate.models.tree import Adapter, Model


def merged_model(model: Model, adapter: Adapter, spec: LoraSpec, config: Any) -> Model:
    """The numbers that ``merge_adapter`` would write, in the type of the model."""
    base = planned(named(model, config))
    tensors = merge_adapter(base, adapter, spec, config, model.embed.dtype).tensors
    return from_named({name: tensor.load() for name, tensor in tensors.items()}, config)
