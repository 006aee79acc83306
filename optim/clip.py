"""Gradient clipping by global norm over trees; kernels/grad_norm.py has the formulas."""

import math
from typing import Any

from jaxtyping import Float32, Shaped

from surogate.kernels import grad_norm as op
from surogate.kernels import tree
from surogate.kernels.arrays import Array, require


def limit(max_grad_norm: float | None) -> float:
    """The largest norm that stays as it is: infinity for None or 0, which turn clipping off."""
    require(
        max_grad_norm is None or max_grad_norm >= 0,
        f"limit: max_grad_norm must be at least 0, got {max_grad_norm}",
    )
    return max_grad_norm or math.inf


def grad_norm(
    grads: Any, count: Shaped[Array, "..."], *, max_grad_norm: float | None = None
) -> Float32[Array, "3"]:
    """Returns (norm of the mean gradient, scale for the summed gradient, 1 when it is usable).

    ``grads`` is a tree of gradients of summed losses, ``count`` the number of summands beside them.
    A loop that keeps its gradients in place builds kernels.grad_norm.grad_table once instead.
    """
    table = op.grad_table(tree.leaves(grads))
    return op.grad_norm(table, count, max_norm=limit(max_grad_norm))
