"""Optimizer state as named arrays, for checkpoints, and back.

    step: int64, number of updates made    m.<name>, v.<name>, master.<name>: one array a parameter

where <name> is the path in the parameter tree, as in "m.layers.0.w_qkv". An 8-bit moment is two
arrays, <name>.codes and <name>.scale.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from surogate.kernels.arrays import Array, namespace, require
from surogate.optim.adamw import AdamWState
from surogate.optim.rule import Rule, init

STEP = "step"


def named_leaves(params: Any, prefix: str = "") -> Iterator[tuple[str, Array]]:
    """(path, array) of every leaf, in the order of tree.leaves; paths are joined by dots."""
    if params is None:
        return
    if isinstance(params, dict):
        items = [(str(key), value) for key, value in params.items()]
    elif isinstance(params, tuple) and (fields := getattr(params, "_fields", None)):
        items = list(zip(fields, params, strict=True))
    elif isinstance(params, (tuple, list)):
        items = [(str(index), value) for index, value in enumerate(params)]
    else:
        yield prefix, params
        return
    for name, value in items:
        yield from named_leaves(value, f"{prefix}.{name}" if prefix else name)


def state_to_named(state: AdamWState) -> dict[str, Array]:
    """The state as a flat dict; arrays stay where they are, and are not copied."""
    named: dict[str, Array] = {STEP: np.array(state.step, np.int64)}
    for part in ("m", "v", "master"):
        named.update(named_leaves(getattr(state, part), part))
    return named


def state_from_named(
    named: Mapping[str, Any], params: Any, rule: Rule, matrices: Any = None
) -> AdamWState:
    """The state of ``params`` under ``rule``, with the arrays copied beside the parameters.

    Raises ValueError that names the arrays when one is missing, not wanted, or of another shape or
    dtype: a state that does not fit is never replaced by a fresh one.
    """
    blank = init(params, rule, matrices)
    wanted = state_to_named(blank)
    for text, names in (
        ("lacks", wanted.keys() - named.keys()),
        ("has what these settings do not use:", named.keys() - wanted.keys()),
    ):
        listed = f"{', '.join(sorted(names)[:5])} ({len(names)} in all)"
        require(not names, f"state_from_named: the saved state {text} {listed}")
    for name, array in wanted.items():
        got = named[name]
        require(
            got.shape == array.shape and got.dtype == array.dtype,
            f"state_from_named: {name} must be {array.dtype}{array.shape}, "
            f"got {got.dtype}{got.shape}",
        )
        if name != STEP:
            array[...] = namespace(array).asarray(got)
    return blank._replace(step=int(named[STEP]))
