"""Attention through cuDNN: what attention.py computes, where all documents are equally long rows.

Arrays are read and written where they lie, whatever the distance of their tokens. o and lse are
those of attention.py, so that either's forward goes with either's backward.

The backward is cuDNN's deterministic one. Before cuDNN 9.25 it holds all of dS on Hopper: heads *
tokens * row length * 2 bytes of scratch memory. Where that passes ``scratch_limit``, heads run in
groups, one after the other; where even one group does not fit, ``supported`` says so.

Documents of different lengths are for our own kernels. On an H200, cuDNN took twice their time when
it read documents through tables of offsets, and the numbers were wrong.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels import attention_plans as plans
from surogate.kernels.arrays import BF16, Array, empty, require
from surogate.kernels.attention_plans import Problem, Strides
from surogate.kernels.nvrtc import THREADS, Source

HEAD_DIMS = (64, 128, 256)
OLDEST = 91801  # 9.18.1: earlier ones leave NaN in gradients, or are not deterministic
SCRATCH_BYTES = 2 << 30
SOURCE = Source("attention_cudnn", {"attention_stats": [("true",), ("false",)]})


class Support(NamedTuple):
    """Whether something can run, and the reason why not, or what runs. True or false as a whole."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def available() -> Support:
    """Whether cuDNN can be used here: its version, or what is missing."""
    try:
        cudnn = plans.library()
        version = cudnn.backend_version()
    except ImportError as error:
        return Support(False, str(error))
    except RuntimeError as error:  # the frontend without the library behind it
        reason = f"attention: the cuDNN library does not load ({error}); {plans.INSTALL}"
        return Support(False, reason)
    name = f"cuDNN {_dotted(version)} through its frontend {cudnn.__version__}"
    if version < OLDEST:
        return Support(False, f"attention: {name}; {_dotted(OLDEST)} or newer is needed")
    return Support(True, name)


def supported(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    sinks: Float[Array, " heads"] | None = None,
    *,
    rows: int,
    scale: float,
    window: int | None = None,
    backward: bool = False,
    scratch_limit: int = SCRATCH_BYTES,
) -> Support:
    """Whether ``forward`` (or ``backward``) takes these arrays and settings on the current card.

    ``rows`` is how many documents there are, all equally long. Builds the plan, and so asks cuDNN
    itself. For a backward, do is taken to be contiguous and the gradients to share a buffer, as in
    attention_bwd. Raises what ``forward`` raises, but for what it refuses.
    """
    reason = _why_not(q, sinks)
    if reason:
        return Support(False, reason)
    library = available()
    if not library:
        return library
    arrays = dict(q=q, k=k, v=v)
    plan = plans.plan_of(_problem(arrays, rows, scale, window, scratch_limit, backward))
    if isinstance(plan, str):
        return Support(False, plan)
    groups = f" in {plan.parts} groups of heads" if plan.parts > 1 else ""
    scratch = f"{plan.scratch / 2**20:.0f} MiB of scratch memory"
    return Support(True, f"{library.reason}, {scratch}{groups}")


def forward(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    *,
    rows: int,
    scale: float,
    window: int | None = None,
    scratch_limit: int = SCRATCH_BYTES,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "heads tokens"]]:
    """Returns o and lse, as attention_fwd keeps them.

    Raises ValueError for what ``supported`` refuses and for tokens that do not make ``rows`` equal
    rows, ImportError without cuDNN's frontend, and RuntimeError for a problem or a stream that is
    new while that stream is being captured.
    """
    tokens, heads, _ = q.shape
    reason = _why_not(q, None)
    require(not reason, reason)
    o = empty(q.shape, q.dtype, like=q)
    lse = empty((heads, tokens), np.float32, like=q)
    if tokens == 0:
        return o, lse
    arrays = dict(q=q, k=k, v=v, o=o)
    problem = _problem(arrays, rows, scale, window, scratch_limit, backward=False)
    stats = lse if rows == 1 else empty((heads * tokens,), np.float32, like=q)
    _run(problem, {**arrays, "stats": stats})
    if rows > 1:
        _move_stats(lse, stats, rows, heads, to_cudnn=False)
    return o, lse


def backward(
    res: Any,
    do: Float[Array, "tokens heads head_dim"],
    dq: Float[Array, "tokens heads head_dim"],
    dk: Float[Array, "tokens kv_heads head_dim"],
    dv: Float[Array, "tokens kv_heads head_dim"],
    *,
    rows: int,
    scratch_limit: int = SCRATCH_BYTES,
) -> None:
    """Writes the gradients of q, k and v. ``res`` are AttentionResiduals, from either's forward.

    dq, dk and dv may be views of one buffer. Two runs give the same bits. Raises what ``forward``
    raises.
    """
    reason = _why_not(do, res.sinks)
    require(not reason, reason)
    if len(do) == 0:
        return
    arrays = dict(q=res.q, k=res.k, v=res.v, o=res.o, do=do, dq=dq, dk=dk, dv=dv)
    problem = _problem(arrays, rows, res.scale, res.window, scratch_limit, backward=True)
    stats = res.lse
    if rows > 1:
        stats = empty((res.lse.size,), np.float32, like=do)
        _move_stats(stats, res.lse, rows, do.shape[1], to_cudnn=True)
    _run(problem, {**arrays, "stats": stats})


def _why_not(q: Array, sinks: Array | None) -> str:
    """Why these arrays are not for cuDNN, as far as can be said without it; empty if they are."""
    if sinks is not None:
        return "attention: the cuDNN path has no sinks"
    if q.dtype != BF16:
        return f"attention: the cuDNN path takes bfloat16, got {q.dtype}"
    if q.shape[2] not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"attention: the cuDNN path takes head_dim {sizes}, got {q.shape[2]}"
    return ""


def _problem(
    arrays: dict[str, Array],
    rows: int,
    scale: float,
    window: int | None,
    scratch_limit: int,
    backward: bool,
) -> Problem:
    """The problem of arrays by name."""
    q = arrays["q"]
    tokens, heads, head_dim = q.shape
    require(
        rows >= 1 and tokens % rows == 0,
        f"attention: {tokens} tokens are not {rows} equal rows: leave them to our kernels",
    )
    seq, kv_heads = tokens // rows, arrays["k"].shape[1]
    own, fused = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    strides = Strides(0, 0, 0, o=own)
    if backward:
        strides = strides._replace(do=own, dq=fused, dk=fused, dv=fused)
    strides = strides._replace(**{name: _stride(name, x) for name, x in arrays.items()})
    return Problem(
        device=plans.state.card.device_of(q),
        backward=backward,
        rows=rows,
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        strides=strides,
        scale=float(scale),
        window=None if window is None or window >= seq else window,
        scratch_limit=scratch_limit,
    )


def _run(problem: Problem, arrays: dict[str, Array]) -> None:
    plan = plans.plan_of(problem)
    if isinstance(plan, str):
        raise ValueError(plan)
    plan.run(arrays)


def _stride(name: str, x: Array) -> int:
    """Elements from a token to the next. Its heads must lie together, each token on 16 bytes."""
    size = x.dtype.itemsize
    together = x.strides[2] == size and (x.shape[1] == 1 or x.strides[1] == x.shape[2] * size)
    require(
        together and x.strides[0] % 16 == 0,
        f"attention: the heads of a token of {name} must lie together, tokens at multiples of 16 "
        f"bytes; got strides of {x.strides} bytes for shape {x.shape}: pass a contiguous array",
    )
    return x.strides[0] // size


def _move_stats(
    out: Float32[Array, "..."],
    source: Float32[Array, "..."],
    rows: int,
    heads: int,
    *,
    to_cudnn: bool,
) -> None:
    """Copies statistics from our layout into cuDNN's, or back."""
    tokens = out.size // heads
    SOURCE.launch(
        "attention_stats",
        (str(to_cudnn).lower(),),
        -(-out.size // THREADS),
        THREADS,
        [out, source, tokens, heads, tokens // rows],
    )


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
