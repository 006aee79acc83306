"""Attention through cuDNN: what attention.py computes, for whole rows or for tables of documents.

Two kinds of plans. ``Rows``: every document is a whole row, all rows are as long. Tables
(documents.py): documents of any length, read through offsets that lie on the card, so that one
captured graph serves every batch. Arrays are read and written where they lie, whatever the distance
of their tokens. o and lse are those of attention.py, so that either's forward goes with either's
backward.

The backward is cuDNN's deterministic one. Before cuDNN 9.25 it holds all of dS on Hopper: batch *
heads * longest^2 * 2 bytes of scratch memory, where batch counts a table's rows, empty or not.
Where that passes ``scratch_limit``, heads run in groups, one after the other; where even one group
does not fit, ``supported`` says so. ``size_classes`` bounds it for tables.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from surogate.kernels import attention_plans as plans
from surogate.kernels.arrays import BF16, Array, empty, require
from surogate.kernels.attention_plans import Problem, Strides
from surogate.kernels.documents import DocumentTable
from surogate.kernels.nvrtc import THREADS, Source

HEAD_DIMS = (64, 128, 256)
OLDEST = 91801  # 9.18.1: earlier ones leave NaN in gradients of documents, or are not deterministic
SCRATCH_BYTES = 2 << 30
SOURCE = Source("attention_cudnn", {"attention_stats": [("true",), ("false",)]})


class Rows(NamedTuple):
    """Every document is a whole row; ``rows`` of them, equally long."""

    rows: int


Documents = Rows | tuple[DocumentTable, ...]


class Support(NamedTuple):
    """Whether something can run, and the reason why not, or what runs. True or false as a whole."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def token_strides(heads: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """The strides that a table needs for attention in a model's layer.

    q and k are in one buffer and v in the fused projection; o and do are on their own; dq, dk and
    dv share a buffer as large as the projection; and the statistics have an element a head.
    """
    widths = (heads + kv_heads, heads + 2 * kv_heads, heads)
    return tuple(dict.fromkeys((*(width * head_dim for width in widths), heads)))


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
    documents: Documents,
    scale: float,
    window: int | None = None,
    backward: bool = False,
    deterministic: bool = True,
    scratch_limit: int = SCRATCH_BYTES,
) -> Support:
    """Whether ``forward`` (or ``backward``) takes these arrays and settings on the current card.

    Builds the plan, and so asks cuDNN itself. For a backward, do is taken to be contiguous and the
    gradients to share a buffer, as in attention_bwd. Raises what ``forward`` raises, but for what
    it refuses.
    """
    reason = _why_not(q, sinks)
    if reason:
        return Support(False, reason)
    library = available()
    if not library:
        return library
    arrays = dict(q=q, k=k, v=v)
    problem = _problem(arrays, scale, window, scratch_limit, backward, deterministic)
    scratch, parts = 0, 1
    for each, _ in _split(problem, documents):
        plan = plans.plan_of(each)
        if isinstance(plan, str):
            return Support(False, plan)
        scratch, parts = max(scratch, plan.scratch), max(parts, plan.parts)
    groups = f" in {parts} groups of heads" if parts > 1 else ""
    return Support(True, f"{library.reason}, {scratch / 2**20:.0f} MiB of scratch memory{groups}")


def forward(
    q: Float[Array, "tokens heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    *,
    documents: Documents,
    scale: float,
    window: int | None = None,
    scratch_limit: int = SCRATCH_BYTES,
) -> tuple[Float[Array, "tokens heads head_dim"], Float32[Array, "heads tokens"]]:
    """Returns o and lse, as attention_fwd keeps them.

    Raises ValueError for what ``supported`` refuses and for arrays that do not fit ``documents``,
    ImportError without cuDNN's frontend, and RuntimeError for a problem or a stream that is new
    while that stream is being captured.
    """
    tokens, heads, _ = q.shape
    reason = _why_not(q, None)
    require(not reason, reason)
    o = empty(q.shape, q.dtype, like=q)
    lse = empty((heads, tokens), np.float32, like=q)
    if tokens == 0:
        return o, lse
    arrays = dict(q=q, k=k, v=v, o=o)
    work = _split(_problem(arrays, scale, window, scratch_limit, False, True), documents)
    first = work[0][0]
    stats = lse if _is_ours(first) else empty((heads * tokens,), np.float32, like=q)
    _run(work, {**arrays, "stats": stats})
    if stats is not lse:
        _move_stats(lse, stats, first, to_cudnn=False)
    return o, lse


def backward(
    res: Any,
    do: Float[Array, "tokens heads head_dim"],
    dq: Float[Array, "tokens heads head_dim"],
    dk: Float[Array, "tokens kv_heads head_dim"],
    dv: Float[Array, "tokens kv_heads head_dim"],
    *,
    documents: Documents,
    deterministic: bool = True,
    scratch_limit: int = SCRATCH_BYTES,
) -> None:
    """Writes the gradients of q, k and v. ``res`` are AttentionResiduals, from either's forward.

    dq, dk and dv may be views of one buffer. Without ``deterministic``, sums are in the order of
    arrival, and two runs differ. Raises what ``forward`` raises.
    """
    reason = _why_not(do, res.sinks)
    require(not reason, reason)
    if len(do) == 0:
        return
    arrays = dict(q=res.q, k=res.k, v=res.v, o=res.o, do=do, dq=dq, dk=dk, dv=dv)
    problem = _problem(arrays, res.scale, res.window, scratch_limit, True, deterministic)
    work = _split(problem, documents)
    first, stats = work[0][0], res.lse
    if not _is_ours(first):
        stats = empty((res.lse.size,), np.float32, like=do)
        _move_stats(stats, res.lse, first, to_cudnn=True)
    _run(work, {**arrays, "stats": stats})


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
    scale: float,
    window: int | None,
    scratch_limit: int,
    backward: bool,
    deterministic: bool,
) -> Problem:
    """The problem of arrays by name, before it is known how documents lie in them."""
    q = arrays["q"]
    tokens, heads, head_dim = q.shape
    kv_heads = arrays["k"].shape[1]
    own, fused = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    strides = Strides(0, 0, 0, o=own)
    if backward:
        strides = strides._replace(do=own, dq=fused, dk=fused, dv=fused)
    strides = strides._replace(**{name: _stride(name, x) for name, x in arrays.items()})
    return Problem(
        device=plans.state.card.device_of(q),
        backward=backward,
        deterministic=deterministic,
        ragged=False,
        batch=1,
        seq=tokens,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        strides=strides,
        scale=float(scale),
        window=window,
        scratch_limit=scratch_limit,
    )


def _split(problem: Problem, documents: Documents) -> list[tuple[Problem, DocumentTable | None]]:
    """One problem for rows, one for each table."""
    tokens, window = problem.tokens, problem.window
    work: list[tuple[Problem, DocumentTable | None]] = []
    if isinstance(documents, Rows):
        rows = documents.rows
        require(
            rows >= 1 and tokens % rows == 0,
            f"attention: {tokens} tokens are not {rows} equal rows: pass tables of documents",
        )
        work = [(problem._replace(batch=rows, seq=tokens // rows), None)]
    else:
        require(
            len(documents) > 0 and all(table.tokens == tokens for table in documents),
            f"attention: needs tables of {tokens} tokens, got {[t.tokens for t in documents]}",
        )
        for table in documents:
            # cuDNN takes no sequences of one token at most; a longer bound changes nothing.
            seq = max(2, min(table.size.longest, tokens))
            batch = table.size.max_documents
            work.append((problem._replace(ragged=True, batch=batch, seq=seq), table))
    return [
        (each._replace(window=None if window is None or window >= each.seq else window), table)
        for each, table in work
    ]


def _run(work: list[tuple[Problem, DocumentTable | None]], arrays: dict[str, Array]) -> None:
    for problem, table in work:
        plan = plans.plan_of(problem)
        if isinstance(plan, str):
            raise ValueError(plan)
        plan.run(arrays, table)


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


def _is_ours(problem: Problem) -> bool:
    """Whether cuDNN's statistics lie as attention.py's."""
    return not problem.ragged and problem.batch == 1


def _move_stats(out: Array, source: Array, problem: Problem, *, to_cudnn: bool) -> None:
    row_tokens = problem.tokens if problem.ragged else problem.seq
    SOURCE.launch(
        "attention_stats",
        (str(to_cudnn).lower(),),
        -(-problem.tokens * problem.heads // THREADS),
        THREADS,
        [out, source, problem.tokens, problem.heads, row_tokens, problem.ragged],
    )


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
