"""AdamW over parameter trees: the state, a step as a pure function, and a plan to step in place.

    state = init(params, config)
    params, state = update(params, grads, state, config, lr=lr)  # new arrays
    plan = AdamWPlan(params, grads, state, config)  # or, in a training loop:
    state = plan.step_(state, lr=lr, norm=norm, zero_grad=True)  # the same arrays

Weights of two or more axes decay, LoRA factors among them; norms' gains, biases and other vectors
do not. A plan looks up addresses once. A captured step records ``plan.launch_``; before each replay
the host writes what changed with ``plan.write_scalars_``.

With moments in 8 bits (kernels/adamw8bit.py), parameters below 4096 elements keep theirs in
float32: norms and biases, which cost nothing. Embeddings are not excepted. Where they are, it is
because a v stored as zero makes a step explode, which cannot happen here; and as a block of 256
elements lies within a row or two, frequent tokens do not coarsen rare ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32

from surogate.kernels import tree
from surogate.kernels.adamw import AdamWLeaf, AdamWTable, adamw_scalars, adamw_step_, adamw_table
from surogate.kernels.adamw8bit import (
    LEAST_ELEMENTS,
    AdamW8Leaf,
    Moment8,
    adamw8bit_step_,
    adamw8bit_table,
    zero_moment,
)
from surogate.kernels.arrays import BF16, Array, namespace, require

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """What does not change during a run.

    Attributes:
        beta1, beta2: decay of the moments, from 0 to less than 1. epsilon: added to the root of the
        second moment, at least 0. weight_decay: decoupled, a share of the weight per unit of
        learning rate; cautious: only of weights that the step does not grow. moment_dtype: of both
        moments; bfloat16 is rounded at random, uint8 is 8-bit codes in blocks. master_dtype:
        float32 keeps a master of each bfloat16 parameter; bfloat16 keeps none and rounds
            the parameter at random. Float32 parameters need no master.
        seed: of random rounding, 32 bits.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    cautious: bool = False
    moment_dtype: Literal["float32", "bfloat16", "uint8"] = "float32"
    master_dtype: Precision = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"AdamWConfig: {name} must be from 0 to below 1, got {value}")
        for name in ("epsilon", "weight_decay"):
            value = getattr(self, name)
            require(value >= 0, f"AdamWConfig: {name} must be at least 0, got {value}")


class AdamWState(NamedTuple):
    """Number of updates made and, shaped like the parameters, moments and masters.

    A master is None where the parameter needs none. This is all that a resumed run needs: random
    rounding depends on the seed and the step alone.
    """

    step: int
    m: Any
    v: Any
    master: Any


def decays(param: Array) -> bool:
    """Whether weight decay applies to a parameter."""
    return param.ndim >= 2


def needs_master(param: Array, config: AdamWConfig) -> bool:
    """Whether a parameter is rounded from a float32 copy."""
    return param.dtype == BF16 and config.master_dtype == "float32"


def init(params: Any, config: AdamWConfig) -> AdamWState:
    """The state before the first step: zero moments, masters equal to the parameters."""
    m, v = (tree.map(partial(_zero, config, which), params) for which in ("m", "v"))
    return AdamWState(0, m, v, tree.map(partial(master_of, config), params))


def _zero(config: AdamWConfig, which: str, param: Array) -> Array | Moment8:
    if in_8bit(param.size, config):
        return zero_moment(param.shape, which, like=param)
    moment = BF16 if config.moment_dtype == "bfloat16" else np.dtype(np.float32)
    wide = param.dtype == np.float64
    return namespace(param).zeros(param.shape, param.dtype if wide else moment)


def in_8bit(size: int, config: AdamWConfig) -> bool:
    """Whether a parameter of ``size`` elements has 8-bit moments."""
    return config.moment_dtype == "uint8" and size >= LEAST_ELEMENTS


def master_of(config: AdamWConfig, param: Array) -> Array | None:
    """The float32 copy that a parameter starts with, if it needs one."""
    return param.astype(np.float32) if needs_master(param, config) else None


def update(
    params: Any,
    grads: Any,
    state: AdamWState,
    config: AdamWConfig,
    *,
    lr: float,
    norm: Float32[Array, "3"] | None = None,
) -> tuple[Any, AdamWState]:
    """One step as a pure function: returns the new parameters and the new state.

    ``norm`` is what clip.grad_norm returns; when it says that the gradient cannot be used,
    everything comes back as it was, the step number too (that reads one number from the card).
    """

    params, fresh = tree.map(copy, params), copied(state)
    return params, AdamWPlan(params, grads, fresh, config).step_(fresh, lr=lr, norm=norm)


def copy(x: Array) -> Array:
    """An array of its own with the same values."""
    return x.copy()


def copied(state: AdamWState) -> AdamWState:
    """A state that shares no array with this one."""
    return AdamWState(state.step, *(tree.map(copy, t) for t in state[1:]))


class Plan(ABC):
    """Parameters, gradients and state that stay where they are, ready to be stepped in place."""

    @abstractmethod
    def write_scalars_(self, *, lr: float, step: int) -> None:
        """Sets the learning rate and the number of the step to come, which counts from 1."""

    @abstractmethod
    def launch_(self, norm: Float32[Array, "3"] | None = None, *, zero_grad: bool = False) -> None:
        """Steps with the scalars as they are. Reads nothing back, so it can be captured."""

    def step_(
        self,
        state: AdamWState,
        *,
        lr: float,
        norm: Float32[Array, "3"] | None = None,
        zero_grad: bool = False,
    ) -> AdamWState:
        """One step in place; returns ``state`` with the step counted if it was applied."""
        self.write_scalars_(lr=lr, step=state.step + 1)
        self.launch_(norm, zero_grad=zero_grad)
        return state._replace(step=state.step + applied(norm))


class AdamWPlan(Plan):
    """A plan of AdamW: one launch for each combination of dtypes.

    ``scalars`` is the array that every launch reads its learning rate and step number from.
    """

    def __init__(self, params: Any, grads: Any, state: AdamWState, config: AdamWConfig) -> None:
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for leaf in _leaves(params, grads, state, config):
            kind = (type(leaf), leaf.param.dtype, leaf.grad.dtype, leaf.master is None)
            groups.setdefault(kind, []).append(leaf)
        require(bool(groups), "AdamWPlan: params must hold at least one array")
        self.config = config
        self.tables = tuple(
            adamw_table(group) if kind[0] is AdamWLeaf else adamw8bit_table(group)
            for kind, group in groups.items()
        )
        first = self.tables[0].leaves[0].param
        self.scalars = namespace(first).zeros((5,), np.float32)
        self.write_scalars_(lr=0.0, step=1)

    def write_scalars_(self, *, lr: float, step: int) -> None:
        """Sets the learning rate and the number of the step to come, which counts from 1."""
        c = self.config
        host = adamw_scalars(lr=lr, step=step, beta1=c.beta1, beta2=c.beta2, seed=c.seed)
        put_(self.scalars, host)

    def launch_(self, norm: Float32[Array, "3"] | None = None, *, zero_grad: bool = False) -> None:
        """Steps with the scalars as they are. Reads nothing back, so it can be captured."""
        c = self.config
        for table in self.tables:
            step_: Any = adamw_step_ if isinstance(table, AdamWTable) else adamw8bit_step_
            step_(
                table,
                self.scalars,
                norm,
                beta1=c.beta1,
                beta2=c.beta2,
                epsilon=c.epsilon,
                weight_decay=c.weight_decay,
                cautious=c.cautious,
                zero_grad=zero_grad,
            )


def put_(array: Array, host: np.ndarray) -> None:
    """Writes an array of the host into one at a fixed place."""
    if isinstance(array, np.ndarray):
        array[...] = host
    else:
        array.set(host)


def applied(norm: Float32[Array, "3"] | None) -> int:
    """1 when a step with this norm changed the parameters, else 0. Reads a number from the card."""
    return 1 if norm is None else int(norm[2])


def _leaves(params: Any, grads: Any, state: AdamWState, config: AdamWConfig) -> Iterator[Any]:
    found: list[tuple[Any, ...]] = []
    tree.map(lambda *leaves: found.append(leaves), params, grads, *state[1:])
    for index, (param, grad, m, v, master) in enumerate(found):
        require(
            (master is not None) == needs_master(param, config),
            f"AdamWPlan: master of parameter {index} ({param.dtype}) does not fit master_dtype "
            f"{config.master_dtype}: make the state by init with the same config",
        )
        kind = AdamW8Leaf if isinstance(m, Moment8) else AdamWLeaf
        yield kind(param, grad, m, v, master, decays(param), index)
