"""AdamW of many tensors in one launch.

Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.

With g the gradient times the scale that grad_norm found (clipping over token count), and t from 1:

    p = p - lr * weight_decay * p                     (only tensors with decay, and before the rest)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)

which is torch.optim.AdamW in its order of operations. With ``cautious``, only weights decay that
the rest of the step does not grow, m * p >= 0 (Chen et al., "Cautious weight decay", 2025).

Arithmetic is float32 without fused multiply-adds, so host and card agree to the bit. A bfloat16
parameter is either rounded to nearest from a float32 master, or has no master and is rounded at
random (rounding.py). Bfloat16 moments are always rounded at random: to nearest, v could not move by
1 - beta2 = 0.001 of itself, which is less than half a unit in the last place.

What changes from step to step is read from memory, so that a captured launch can be replayed:
``scalars``, which the host writes, and ``norm``, which grad_norm leaves on the card. When norm says
that the gradient cannot be used, parameters, moments and masters keep their bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels import rounding
from surogate.kernels.arrays import (
    BF16,
    F32,
    Array,
    compute_dtype,
    namespace,
    on_device,
    require,
    upcast,
)
from surogate.kernels.multi_tensor import CHUNK, TensorTable, tensor_table
from surogate.kernels.nvrtc import THREADS, Source, ctype

_PARAMS = (("float", "false"), ("bf16", "true"), ("bf16", "false"))  # type, mastered
SOURCE = Source(
    "adamw",
    {
        "adamw_step": [
            (param, grad, moment, mastered)
            for param, mastered in _PARAMS
            for grad in ("float", "bf16")
            for moment in ("float", "bf16")
        ]
    },
)


# Fewer elements in all are cut finer, so that the last blocks end together.
FEW_ELEMENTS, FINE_CHUNK = 1 << 26, CHUNK // 4


class AdamWLeaf(NamedTuple):
    """One tensor, its gradient and its optimizer state: C-contiguous arrays of one shape.

    param is float32 or bfloat16, grad and the moments (both of one dtype) likewise; on the host
    float64 is computed in float64. ``tensor`` is its number in the random bits. A shard gives the
    index of its first element in the whole tensor, a multiple of 8, as ``first``: then it draws
    what the whole would.
    """

    param: Float[Array, "*shape"]
    grad: Float[Array, "*shape"]
    m: Float[Array, "*shape"]
    v: Float[Array, "*shape"]
    master: Float32[Array, "*shape"] | None = None
    decay: bool = False
    tensor: int = 0
    first: int = 0


class AdamWSettings(NamedTuple):
    """What does not change from step to step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    cautious: bool = False


class AdamWTable(NamedTuple):
    """Leaves of one combination of dtypes, and on the card where they lie. Built once."""

    leaves: tuple[AdamWLeaf, ...]
    tensors: TensorTable | None


def adamw_scalars(
    *, lr: float, step: int, beta1: float, beta2: float, seed: int = 0
) -> Float32[Array, "5"]:
    """The host's part of a step: lr, 1 - beta1^step, 1 - beta2^step, and the bits of seed and step.

    ``step`` counts updates from 1; ``seed`` and ``step`` are taken modulo 2^32.
    """
    require(step >= 1, f"adamw_scalars: step counts from 1, got {step}")
    out = np.empty(5, np.float32)
    out[:3] = lr, 1 - beta1**step, 1 - beta2**step
    out[3:].view(np.uint32)[:] = seed & 0xFFFFFFFF, step & 0xFFFFFFFF
    return out


def adamw_table(leaves: Sequence[AdamWLeaf], *, chunk: int | None = None) -> AdamWTable:
    """Checks the leaves and, on the card, writes down their addresses.

    ``chunk`` is how many elements a block takes, without effect on the result. Raises ValueError
    when shapes or dtypes disagree within a leaf, or dtypes between leaves.
    """
    require(len(leaves) > 0, "adamw_table: leaves must not be empty")
    for leaf in leaves:
        _check(leaf)
        require(
            _dtypes(leaf) == _dtypes(leaves[0]),
            f"adamw_table: leaves must have one combination of dtypes, got {_dtypes(leaf)} after "
            f"{_dtypes(leaves[0])}; build a table for each",
        )
    if not on_device(leaves[0].param):
        return AdamWTable(tuple(leaves), None)
    if chunk is None:
        chunk = FINE_CHUNK if sum(x.param.size for x in leaves) < FEW_ELEMENTS else CHUNK
    rows = [
        (x.param, x.grad, x.m, x.v, x.master, int(x.decay), x.tensor & 0xFFFFFFFF, x.first)
        for x in leaves
    ]
    return AdamWTable(tuple(leaves), tensor_table(rows, chunk=chunk, like=leaves[0].param))


def adamw_step_(
    table: AdamWTable,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None = None,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    cautious: bool = False,
    zero_grad: bool = False,
) -> None:
    """Updates parameters, moments and masters of the table in place.

    ``scalars`` is what adamw_scalars gives and ``norm`` what grad_norm gives, both beside the
    tensors; without ``norm`` the gradient is used as it is. ``zero_grad`` also sets the gradients
    to zero, whether or not the step was applied.
    """
    leaf = table.leaves[0]
    settings = AdamWSettings(beta1, beta2, epsilon, weight_decay, cautious)
    if not on_device(leaf.param):
        for each in table.leaves:
            _host_step_(each, scalars, norm, settings, zero_grad)
        return
    if table.tensors is None:
        return
    types = (ctype(leaf.param.dtype), ctype(leaf.grad.dtype), ctype(leaf.m.dtype))
    SOURCE.launch(
        "adamw_step",
        (*types, "true" if leaf.master is not None else "false"),
        len(table.tensors.chunk_tensor),
        THREADS,
        [
            table.tensors.rows,
            table.tensors.chunk_tensor,
            *step_arguments(table.tensors, scalars, norm, settings, zero_grad),
        ],
    )


def step_arguments(
    tensors: TensorTable,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: AdamWSettings,
    zero_grad: bool,
) -> list[Any]:
    """What the kernels take after their tables."""
    beta1, beta2, epsilon, weight_decay, cautious = settings
    rates = [float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, float(epsilon)]
    return [scalars, norm, tensors.chunk, *rates, float(weight_decay), cautious, zero_grad]


def adamw_step(
    leaf: AdamWLeaf,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None = None,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    cautious: bool = False,
) -> AdamWLeaf:
    """One tensor as a pure function: returns the leaf with new param, m, v and master."""
    fresh = leaf._replace(
        param=leaf.param.copy(),
        m=leaf.m.copy(),
        v=leaf.v.copy(),
        master=None if leaf.master is None else leaf.master.copy(),
    )
    adamw_step_(
        adamw_table([fresh]),
        scalars,
        norm,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        cautious=cautious,
    )
    return fresh


def _dtypes(leaf: AdamWLeaf) -> tuple[str, ...]:
    arrays = (leaf.param, leaf.grad, leaf.m, leaf.v)
    return (*(str(a.dtype) for a in arrays), "no master" if leaf.master is None else "master")


def _check(leaf: AdamWLeaf) -> None:
    check_arrays("adamw_table", leaf, ("param", "grad", "m", "v", "master"))
    require(
        leaf.m.dtype == leaf.v.dtype,
        f"adamw_table: m and v must have one dtype, got {leaf.m.dtype} and {leaf.v.dtype}",
    )
    require(
        leaf.first >= 0 and leaf.first % rounding.GROUP == 0,
        f"adamw_table: first must be a multiple of {rounding.GROUP}, got {leaf.first}",
    )


def check_arrays(caller: str, leaf: Any, names: Sequence[str]) -> None:
    """Raises ValueError unless a leaf's arrays lie alike, and a master is where it can be."""
    for name in names:
        array = getattr(leaf, name)
        require(
            array is None or (array.shape == leaf.param.shape and array.flags.c_contiguous),
            f"{caller}: {name} must be C-contiguous of param's shape {leaf.param.shape}, got "
            f"{None if array is None else (array.shape, array.strides)}",
        )
    require(
        leaf.master is None or (leaf.master.dtype == F32 and leaf.param.dtype == BF16),
        f"{caller}: a float32 master belongs to a bfloat16 param, got {leaf.param.dtype} and "
        f"{None if leaf.master is None else leaf.master.dtype}",
    )


def usable(norm: Float32[Array, "3"] | None) -> bool:
    """Host versions: whether grad_norm lets the step be taken."""
    return norm is None or bool(norm[2] != 0)


def _host_step_(
    leaf: AdamWLeaf,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: AdamWSettings,
    zero_grad: bool,
) -> None:
    if usable(norm):
        p, m, v = host_update(leaf, upcast(leaf.m), upcast(leaf.v), scalars, norm, settings)
        store_param_(leaf, p, scalars)
        store_unbiased_(leaf.m, m, leaf, scalars, rounding.FIRST_MOMENT)
        store_unbiased_(leaf.v, v, leaf, scalars, rounding.SECOND_MOMENT)
    if zero_grad:
        leaf.grad[...] = 0


def host_update(
    leaf: Any,
    m: Float[Array, "*shape"],
    v: Float[Array, "*shape"],
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: AdamWSettings,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Returns the new parameter and moments of a leaf with moments m and v, not rounded yet."""
    old = leaf.param if leaf.master is None else leaf.master
    real = compute_dtype(old).type
    beta1, beta2, epsilon, weight_decay = (real(x) for x in settings[:4])
    lr, correction1, correction2 = (real(x) for x in scalars[:3])
    g = upcast(leaf.grad) * real(1 if norm is None else norm[1])
    m = beta1 * m + real(1 - settings.beta1) * g
    v = beta2 * v + real(1 - settings.beta2) * (g * g)
    direction = m / (np.sqrt(v) * (real(1) / np.sqrt(correction2)) + epsilon)
    p = upcast(old)
    if leaf.decay:
        p = decayed(p, lr * weight_decay, direction if settings.cautious else None)
    return p - lr / correction1 * direction, m, v


def decayed(
    p: Float[Array, "*shape"], rate: Any, step: Float[Array, "*shape"] | None
) -> Float[Array, "*shape"]:
    """Host versions: p - rate * p, where ``step``, which will be subtracted, agrees in sign."""
    less = p - rate * p
    if step is None:
        return less
    with np.errstate(over="ignore", invalid="ignore"):  # only the sign counts
        return np.where(step * p >= 0, less, p)


def store_param_(leaf: Any, p: Float[Array, "*shape"], scalars: Float32[Array, "5"]) -> None:
    """Host versions: rounds a new parameter to nearest from its master, or at random."""
    if leaf.master is None:
        store_unbiased_(leaf.param, p, leaf, scalars, rounding.PARAM)
    else:
        leaf.master[...] = p
        leaf.param[...] = p.astype(leaf.param.dtype)


def store_unbiased_(
    out: Float[Array, "*shape"],
    value: Float[Array, "*shape"],
    leaf: Any,
    scalars: Float32[Array, "5"],
    role: int,
) -> None:
    """Host versions: stores ``value``, rounded at random where ``out`` is bfloat16."""
    if out.dtype != BF16:
        out[...] = value
        return
    seed, step = (int(word) for word in scalars[3:].view(np.uint32))
    bits = rounding.random_bits(
        value.size, seed=seed, step=step, tensor=leaf.tensor, role=role, first=leaf.first
    )
    out[...] = rounding.stochastic_round(value, bits.reshape(value.shape))


def adamw_ref(
    param: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    lr: float,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    scale: float = 1.0,
) -> tuple[Any, Any, Any]:
    """Reference of adamw_step for a tensor that decays: returns (param, m, v)."""
    xp = namespace(param)
    g = grad * scale
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return param * (1 - lr * weight_decay) - lr * m_hat / (xp.sqrt(v_hat) + epsilon), m, v
