"""NorMuon for the matrices of a model's layers, and AdamW for everything else.

    state = init(params, config, matrices)
    params, state = update(params, grads, state, config, matrices, lr=lr)  # new arrays
    plan = NorMuonPlan(params, grads, state, config, matrices)  # or in place, as AdamWPlan

``matrices`` is a tree shaped like the parameters: for what NorMuon updates, the ranges of rows
(start, stop) of the matrices that are stacked in it, such as q, k and v; None for what AdamW does,
which must be embeddings, the head, norms and biases at least. Each range is made orthogonal by
itself. ``lr`` is NorMuon's; AdamW's is a constant multiple of it.

The state is an AdamWState: of a matrix, m is its momentum and v has one number a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from surogate.kernels import tree
from surogate.kernels.adamw import adamw_scalars
from surogate.kernels.arrays import Array, namespace, require
from surogate.kernels.normuon import (
    NorMuonLeaf,
    NorMuonSettings,
    normuon_step_,
    normuon_table,
)
from surogate.optim.adamw import AdamWConfig, AdamWPlan, AdamWState, Plan, copied, copy, put_
from surogate.optim.adamw import init as adamw_init


@dataclass(frozen=True, kw_only=True)
class NorMuonConfig:
    """What does not change during a run.

    Attributes:
        adamw: of the other parameters. Its weight_decay, moment_dtype (of the momentum, not uint8),
            master_dtype and seed hold for the matrices too.
        momentum, beta2: decay of the momentum and of the rows' second moment, from 0 to below 1.
        cautious: weight decay only of weights that the step does not grow.
        adamw_lr_ratio: AdamW's learning rate over NorMuon's, at least 0.
    """

    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    momentum: float = 0.95
    beta2: float = 0.95
    cautious: bool = False
    adamw_lr_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("momentum", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"NorMuonConfig: {name} must be from 0 to below 1, got {value}")
        ratio, kind = self.adamw_lr_ratio, self.adamw.moment_dtype
        require(ratio >= 0, f"NorMuonConfig: adamw_lr_ratio must be at least 0, got {ratio}")
        require(
            kind != "uint8",
            "NorMuonConfig: adamw.moment_dtype must be float32 or bfloat16, got uint8",
        )

    @property
    def settings(self) -> NorMuonSettings:
        """The kernels' part."""
        decay = self.adamw.weight_decay
        return NorMuonSettings(self.momentum, self.beta2, decay, self.cautious)


def init(params: Any, config: NorMuonConfig, matrices: Any) -> AdamWState:
    """The state before the first step: zero moments, masters equal to the parameters."""
    state = adamw_init(params, config.adamw)

    def second(param: Array, rows: Any, v: Array) -> Array:
        return v if rows is None else namespace(param).zeros(param.shape[:1], np.float32)

    return state._replace(v=tree.map(second, params, matrices, state.v))


def update(
    params: Any,
    grads: Any,
    state: AdamWState,
    config: NorMuonConfig,
    matrices: Any,
    *,
    lr: float,
    norm: Float32[Array, "3"] | None = None,
) -> tuple[Any, AdamWState]:
    """One step as a pure function: returns the new parameters and the new state; see
    adamw.update.
    """
    params, fresh = tree.map(copy, params), copied(state)
    plan = NorMuonPlan(params, grads, fresh, config, matrices)
    return params, plan.step_(fresh, lr=lr, norm=norm)


class NorMuonPlan(Plan):
    """A plan of NorMuon and, for the other parameters, one of AdamW.

    Both have an array of ``scalars`` that their launches read.
    """

    def __init__(
        self, params: Any, grads: Any, state: AdamWState, config: NorMuonConfig, matrices: Any
    ) -> None:
        leaves: list[NorMuonLeaf] = []
        count = len(tree.leaves(params))  # AdamW's tensors have the numbers below

        def split(param: Array, rows: Any, grad: Array, m: Array, v: Array, master: Any) -> None:
            for at in (slice(start, stop) for start, stop in rows or ()):
                own = None if master is None else master[at]
                number = count + len(leaves)
                leaves.append(NorMuonLeaf(param[at], grad[at], m[at], v[at], own, number))

        tree.map(split, params, matrices, grads, *state[1:])
        require(bool(leaves), "NorMuonPlan: matrices must name at least one")
        self.config = config
        self.tables = tuple(normuon_table(group) for group in _by_dtypes(leaves))
        first = leaves[0].param
        self.scalars = namespace(first).zeros((5,), np.float32)

        def rest(other: Any) -> Any:
            return tree.map(lambda _, rows, x: x if rows is None else None, params, matrices, other)

        adamw_state = AdamWState(state.step, *(rest(part) for part in state[1:]))
        self.adamw = AdamWPlan(rest(params), rest(grads), adamw_state, config.adamw)
        self.write_scalars_(lr=0.0, step=1)

    def write_scalars_(self, *, lr: float, step: int) -> None:
        """Sets NorMuon's learning rate and the number of the step to come, which counts from 1."""
        c = self.config.adamw
        host = adamw_scalars(lr=lr, step=step, beta1=c.beta1, beta2=c.beta2, seed=c.seed)
        put_(self.scalars, host)
        self.adamw.write_scalars_(lr=lr * self.config.adamw_lr_ratio, step=step)

    def launch_(self, norm: Float32[Array, "3"] | None = None, *, zero_grad: bool = False) -> None:
        """Steps with the scalars as they are. Reads nothing back, so it can be captured."""
        for table in self.tables:
            settings = self.config.settings
            normuon_step_(table, self.scalars, norm, settings=settings, zero_grad=zero_grad)
        self.adamw.launch_(norm, zero_grad=zero_grad)


def _by_dtypes(leaves: list[NorMuonLeaf]) -> Iterable[list[NorMuonLeaf]]:
    groups: dict[tuple[Any, ...], list[NorMuonLeaf]] = {}
    for leaf in leaves:
        kind = (leaf.param.dtype, leaf.grad.dtype, leaf.m.dtype, leaf.master is None)
        groups.setdefault(kind, []).append(leaf)
    return groups.values()
