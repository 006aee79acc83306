"""The walk over a model's layers, and the two interfaces that say where weights and gradients live.

The stack asks a ``LayerSource`` for each layer's parameters and hands each layer's gradients to a
``GradientSink`` as soon as they exist. Resident weights and accumulated gradients are one
implementation; weights streamed from the host or gathered from shards, and gradients reduced over
ranks, are others.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from surogate.kernels.arrays import Array

Recompute = Literal["none", "selective", "block"]


@runtime_checkable
class LayerSource(Protocol):
    """Where a layer's parameters come from."""

    def layer(self, index: int) -> Any:
        """The parameters of one layer, ready on the compute stream."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class GradientSink(Protocol):
    """Where a layer's gradients go."""

    def into(self, index: int) -> Any:
        """The tree of destinations for one layer: arrays to add to, FROZEN leaves, or None for
        fresh.
        """
        ...

    def put(self, index: int, grads: Any) -> None:
        """Takes one layer's gradients; called in the order of the backward pass."""
        ...


class Resident:
    """All layers on the device."""

    def __init__(self, layers: tuple[Any, ...]) -> None:
        self._layers = layers

    def layer(self, index: int) -> Any:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)


class Collected:
    """Keeps every layer's gradients: fresh ones, or the caller's buffers that were added to."""

    def __init__(self, buffers: tuple[Any, ...] | None, layers: int) -> None:
        self._buffers = buffers
        self.grads: list[Any] = [None] * layers

    def into(self, index: int) -> Any:
        return None if self._buffers is None else self._buffers[index]

    def put(self, index: int, grads: Any) -> None:
        self.grads[index] = grads


class LayerPair(NamedTuple):
    """Forward ``(params, x, index, keep, need_y) -> (y, residuals)`` and backward
    ``(params, residuals, dy, index, into) -> (dx, grads)`` of layer ``index``.

    ``keep`` says whether residuals hold what is cheap to compute again (norm and activation
    outputs), ``need_y`` whether y is wanted: a layer that is computed again need not end with its
    last product.
    """

    fwd: Callable[..., Any]
    bwd: Callable[..., Any]


def stack_fwd(
    source: LayerSource, x: Array, pair: LayerPair, *, recompute: Recompute
) -> tuple[Array, list[Any]]:
    """Runs all layers. Residuals are one entry a layer: the layer's own, or its input under
    "block".
    """
    residuals: list[Any] = []
    for index in range(len(source)):
        y, res = pair.fwd(source.layer(index), x, index, recompute == "none", True)
        residuals.append(x if recompute == "block" else res)
        x = y
        del res
    return x, residuals


def stack_apply(source: LayerSource, x: Array, pair: LayerPair) -> Array:
    """Runs all layers and keeps nothing."""
    for index in range(len(source)):
        x = pair.fwd(source.layer(index), x, index, False, True)[0]
    return x


def stack_bwd(
    source: LayerSource,
    residuals: list[Any],
    dy: Array,
    sink: GradientSink,
    pair: LayerPair,
    *,
    recompute: Recompute,
) -> Array:
    """Walks back, handing each layer's gradients to the sink. Consumes ``residuals``: each is freed
    as soon as its layer is done."""
    for index in reversed(range(len(source))):
        params, res = source.layer(index), residuals.pop()
        if recompute == "block":
            _, res = pair.fwd(params, res, index, True, False)
        dy, grads = pair.bwd(params, res, dy, index, sink.into(index))
        sink.put(index, grads)
        del res
    return dy
