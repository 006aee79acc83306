"""Which attention runs on a card: our mma kernels, our Hopper kernels, or cuDNN.

The mma kernels take everything that attention.py takes. The Hopper ones need sm_90 and a head_dim
of theirs; cuDNN must know that documents are equally long rows. Of those that can run a problem the
fastest is measured at its first use, forward and backward apart, and kept on disk (choice.py).
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from surogate.kernels import attention_cudnn, attention_hopper, attention_mma
from surogate.kernels.arrays import Array, Backend
from surogate.kernels.attention_plans import borrowed_scratch
from surogate.kernels.batch import Docs
from surogate.kernels.choice import choose
from surogate.kernels.nvrtc import cuda_directory


def forward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    docs: Docs,
    scale: float,
    window: int | None,
    rows: int | None,
) -> tuple[Array, Array]:
    """Returns o and lse [heads, tokens] of attention_fwd's arguments."""
    arguments = (q, k, v, sinks, docs, scale, window)
    if Backend.launch is not None:
        return attention_mma.forward(*arguments)
    candidates: dict[str, Callable[[], tuple[Array, Array]]] = {
        "mma": lambda: attention_mma.forward(*arguments)
    }
    if attention_hopper.supported(q):
        candidates["hopper"] = lambda: attention_hopper.forward(*arguments)
    if rows is not None:
        common: Any = {"rows": rows, "scale": scale, "window": window}
        if attention_cudnn.supported(q, k, v, sinks, **common):
            candidates["cudnn"] = lambda: attention_cudnn.forward(q, k, v, **common)
    return candidates[_choice("forward", candidates, q, k, v, sinks, window, rows)]()


def backward(res: Any, do: Array, dq: Array, dk: Array, dv: Array, into: Any) -> Array | None:
    """Writes dq, dk and dv; returns d_sinks. ``res`` are AttentionResiduals."""
    grads = (dq, dk, dv)
    if Backend.launch is not None:
        return attention_mma.sinks_gradient(res, attention_mma.backward(res, do, *grads), into)
    # Each returns what the gradient of the sinks is made from, but cuDNN, which takes no sinks.
    candidates: dict[str, Callable[[], Any]] = {
        "mma": lambda: attention_mma.backward(res, do, *grads)
    }
    if attention_hopper.supported(do):
        candidates["hopper"] = lambda: attention_hopper.backward(res, do, *grads)
    if res.rows is not None:
        common: Any = {"rows": res.rows, "scale": res.scale, "window": res.window}
        arrays = (res.q, res.k, res.v, res.sinks)
        if attention_cudnn.supported(*arrays, backward=True, **common):
            candidates["cudnn"] = lambda: attention_cudnn.backward(res, do, *grads, rows=res.rows)
    name = _choice("backward", candidates, *arrays_of(res), res.window, res.rows)
    stats = candidates[name]()
    return None if res.sinks is None else attention_mma.sinks_gradient(res, stats, into)


def arrays_of(res: Any) -> tuple[Array, Array, Array, Array | None]:
    """The arrays of AttentionResiduals that make a problem."""
    return res.q, res.k, res.v, res.sinks


def _choice(
    what: str,
    candidates: dict[str, Callable[[], Any]],
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    window: int | None,
    rows: int | None,
) -> str:
    strides = tuple(x.strides[0] for x in (q, k, v))
    key = (*q.shape, k.shape[1], strides, sinks is not None, window, rows, tuple(candidates))
    with borrowed_scratch():
        return choose(f"attention_{what}", candidates, key=key, versions=_versions())


@functools.cache
def _versions() -> str:
    """Changes when cuDNN or a kernel does."""
    digest = hashlib.sha256()
    for path in sorted(cuda_directory().glob("*.cu*")):
        if path.name.startswith(("attention", "hopper", "common")):
            digest.update(path.read_bytes())
    support = attention_cudnn.available()
    return f"{support.reason if support else 'no cuDNN'}; kernels {digest.hexdigest()[:12]}"
