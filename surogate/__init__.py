"""Surogate: train and fine-tune language models on NVIDIA GPUs at close to the speed of light.

From Python: ``load``, ``batch``, ``logits``, ``loss_and_grads`` and ``generate`` (surogate.api),
every op of ``surogate.kernels`` and every block of ``surogate.models``.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LoadedModel", "LossAndGrads", "batch", "generate", "load", "logits", "loss_and_grads"]

if TYPE_CHECKING:
    from surogate.api import (
        LoadedModel,
        LossAndGrads,
        batch,
        generate,
        load,
        logits,
        loss_and_grads,
    )


def __getattr__(name: str) -> Any:
    # Loaded when asked for, so that the command line answers before NumPy is imported.
    if name in __all__:
        from surogate import api

        return getattr(api, name)
    raise AttributeError(f"module 'surogate' has no attribute {name!r}")
