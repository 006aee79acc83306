"""NorMuon of many matrices: momentum, made orthogonal, with every row given the same size.

Li et al., "NorMuon: making Muon more efficient and scalable", 2025. For a matrix [rows, columns],
whose rows are the output neurons, with g the gradient times the scale that grad_norm found:

    m = momentum * m + (1 - momentum) * g
    O = polar(m)                                          (below)
    v = beta2 * v + (1 - beta2) * mean over columns(O^2)     one number a row
    O = O / (sqrt(v) + 1e-10)
    p = p - lr * weight_decay * p
    p = p - lr * 0.2 * sqrt(rows * columns) / |O| * O

The last factor gives a step the root mean square 0.2 * lr, that of AdamW, so that AdamW's learning
rates fit; it also undoes whatever norm O had, and the bias that v has in the first steps. With
``cautious``, only weights decay that the rest of the step does not grow, O * p >= 0.

polar(m) is the orthogonal matrix nearest to m, U V^T of its singular value decomposition, as nearly
as five products of Polar Express give it (Amsel et al., "The Polar Express", 2025): from
X = m / (1.02 |m|), five times X = a X + b (X X^T) X + c (X X^T)^2 X, which take singular values of
0.01 and above to within 0.85 and 1.15. The products are bfloat16 with sums in float32. Beyond 1.022
the polynomials diverge, so the norm is summed in float32 and float64 from what is stored. A
momentum whose norm is below 1e-15, where squares vanish, counts as zero; a zero matrix makes no
step.

The matrices must be whole: of q, k and v in one array, or of a shard, the orthogonal matrix is
another. What changes from step to step is read from memory as in adamw.py, and bfloat16 parameters
and momentum are rounded as there. The momentum is the host's to the bit; the rest differs by the
order of sums.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import BFloat16, Float, Float32

from surogate.kernels import rounding
from surogate.kernels.adamw import check_arrays, decayed, store_param_, store_unbiased_, usable
from surogate.kernels.arrays import (
    BF16,
    Array,
    aligned,
    empty,
    on_device,
    require,
    upcast,
)
from surogate.kernels.matmul import matmul
from surogate.kernels.multi_tensor import CHUNK, TensorTable, tensor_table
from surogate.kernels.nvrtc import THREADS, Source, ctype

# a, b, c of each product, for singular values from 1e-3 on, with a safety factor of 1.02.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
SAFETY, LEAST_NORM = 1.02, 1e-15
RMS, EPSILON = 0.2, 1e-10

_MOMENTS = ("float", "bf16")
SOURCE = Source(
    "normuon",
    {
        "normuon_momentum": [(grad, moment) for grad in ("float", "bf16") for moment in _MOMENTS],
        "normuon_inverse": [()],
        "normuon_scale": [(moment,) for moment in _MOMENTS],
        "normuon_rows": [()],
        "normuon_factor": [()],
        "normuon_apply": [("float", "false"), ("bf16", "true"), ("bf16", "false")],
    },
)


class NorMuonLeaf(NamedTuple):
    """One whole matrix, its gradient and its optimizer state: C-contiguous.

    param is float32 or bfloat16, grad and m likewise. ``tensor`` is its number in the random bits.
    """

    param: Float[Array, "rows columns"]
    grad: Float[Array, "rows columns"]
    m: Float[Array, "rows columns"]
    v: Float32[Array, " rows"]
    master: Float32[Array, "rows columns"] | None = None
    tensor: int = 0

    @property
    def first(self) -> int:
        """As in AdamWLeaf; a matrix is whole."""
        return 0


class NorMuonTable(NamedTuple):
    """Leaves of one combination of dtypes, and on the card where they lie. Built once."""

    leaves: tuple[NorMuonLeaf, ...]
    tensors: TensorTable | None


class NorMuonSettings(NamedTuple):
    """What does not change from step to step."""

    momentum: float = 0.95
    beta2: float = 0.95
    weight_decay: float = 0.0
    cautious: bool = False


def normuon_table(leaves: Sequence[NorMuonLeaf]) -> NorMuonTable:
    """Checks the leaves and, on the card, writes down their addresses.

    Raises ValueError when shapes or dtypes disagree within a leaf, or dtypes between leaves.
    """
    require(len(leaves) > 0, "normuon_table: leaves must not be empty")
    for leaf in leaves:
        check_arrays("normuon_table", leaf, ("param", "grad", "m", "master"))
        require(
            leaf.param.size > 0 and leaf.v.shape == leaf.param.shape[:1],
            f"normuon_table: v must have a number for each row of param, which is not empty, got "
            f"{leaf.v.shape} and {leaf.param.shape}",
        )
        require(
            _dtypes(leaf) == _dtypes(leaves[0]),
            f"normuon_table: leaves must have one combination of dtypes, got {_dtypes(leaf)} after "
            f"{_dtypes(leaves[0])}; build a table for each",
        )
    if not on_device(leaves[0].param):
        return NorMuonTable(tuple(leaves), None)
    rows = [(x.m, x.grad, x.tensor & 0xFFFFFFFF) for x in leaves]
    return NorMuonTable(tuple(leaves), tensor_table(rows, chunk=CHUNK, like=leaves[0].param))


def normuon_step_(
    table: NorMuonTable,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None = None,
    *,
    settings: NorMuonSettings,
    zero_grad: bool = False,
) -> None:
    """Updates parameters, momentum, row moments and masters of the table in place.

    ``scalars`` is what adamw_scalars gives, of which this reads the learning rate and the bits of
    seed and step; ``norm`` and ``zero_grad`` are as in adamw_step_.
    """
    if table.tensors is None:
        for leaf in table.leaves:
            _host_step_(leaf, scalars, norm, settings, zero_grad)
        return
    inverse = _momentum_(table, table.tensors, scalars, norm, settings, zero_grad)
    for matrix, leaf in enumerate(table.leaves):
        _apply_(leaf, polar_express_(_scaled(leaf, inverse, matrix)), scalars, norm, settings)


def polar_express_(x: BFloat16[Array, "rows columns"]) -> BFloat16[Array, "rows columns"]:
    """Returns nearly the orthogonal matrix nearest to x, whose norm is at most 1; x is scratch."""
    rows, columns = x.shape
    wide = rows <= columns
    gram = square = spare = None
    for a, b, c in POLAR_EXPRESS:
        gram = matmul(x, x, transpose_a=not wide, transpose_b=wide, out=gram)
        square = matmul(gram, gram, c=gram, alpha=c, beta=b, out=square)
        left, right = (square, x) if wide else (x, square)
        x, spare = matmul(left, right, c=x, beta=a, out=spare), x
    return x


def _momentum_(
    table: NorMuonTable,
    tensors: TensorTable,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: NorMuonSettings,
    zero_grad: bool,
) -> Float32[Array, " matrices"]:
    """Updates all momenta; returns what makes each a matrix of norm 1 / 1.02."""
    leaf, chunks = table.leaves[0], len(tensors.chunk_tensor)
    partial = empty((chunks,), np.float64, like=leaf.param)
    SOURCE.launch(
        "normuon_momentum",
        (ctype(leaf.grad.dtype), ctype(leaf.m.dtype)),
        chunks,
        THREADS,
        [partial, tensors.rows, tensors.chunk_tensor, scalars, norm, tensors.chunk,
         float(settings.momentum), 1.0 - settings.momentum, zero_grad],
    )  # fmt: skip
    inverse = empty((len(table.leaves),), np.float32, like=leaf.param)
    args = [inverse, partial, tensors.rows, tensors.chunk, SAFETY, LEAST_NORM]
    SOURCE.launch("normuon_inverse", (), len(table.leaves), THREADS, args)
    return inverse


def _blocks(elements: int, each: int = rounding.GROUP) -> int:
    return -(-elements // (THREADS * each))


def _scaled(
    leaf: NorMuonLeaf, inverse: Float32[Array, " matrices"], matrix: int
) -> BFloat16[Array, "rows columns"]:
    """The momentum as polar_express_ takes it."""
    x = empty(leaf.m.shape, BF16, like=leaf.m)
    args = [x, leaf.m, inverse, matrix, np.int64(x.size), aligned(x, leaf.m)]
    SOURCE.launch("normuon_scale", (ctype(leaf.m.dtype),), _blocks(x.size), THREADS, args)
    return x


def _apply_(
    leaf: NorMuonLeaf,
    o: BFloat16[Array, "rows columns"],
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: NorMuonSettings,
) -> None:
    """What comes after the products."""
    (rows, columns), size = o.shape, np.int64(o.size)
    gain, square = (empty((rows,), np.float32, like=o) for _ in range(2))
    factor = empty((1,), np.float32, like=o)
    vectors = columns % rounding.GROUP == 0 and aligned(o)
    SOURCE.launch(
        "normuon_rows",
        (),
        _blocks(rows * 32, 1),
        THREADS,
        [gain, square, leaf.v, o, norm, rows, columns, float(settings.beta2),
         1.0 - settings.beta2, EPSILON, vectors],
    )  # fmt: skip
    SOURCE.launch("normuon_factor", (), 1, 1024, [factor, square, scalars, rows, size, RMS])
    mastered = "true" if leaf.master is not None else "false"
    SOURCE.launch(
        "normuon_apply",
        (ctype(leaf.param.dtype), mastered),
        _blocks(o.size),
        THREADS,
        [leaf.param, leaf.master, o, gain, factor, scalars, norm, size, columns,
         float(settings.weight_decay), settings.cautious, np.uint32(leaf.tensor & 0xFFFFFFFF),
         aligned(leaf.param, leaf.master, o)],
    )  # fmt: skip


def _dtypes(leaf: NorMuonLeaf) -> tuple[str, ...]:
    arrays = (leaf.param, leaf.grad, leaf.m)
    return (*(str(a.dtype) for a in arrays), "no master" if leaf.master is None else "master")


def _host_step_(
    leaf: NorMuonLeaf,
    scalars: Float32[Array, "5"],
    norm: Float32[Array, "3"] | None,
    settings: NorMuonSettings,
    zero_grad: bool,
) -> None:
    if usable(norm):
        beta, beta2, lr = (np.float32(x) for x in (settings.momentum, settings.beta2, scalars[0]))
        g = upcast(leaf.grad) * np.float32(1 if norm is None else norm[1])
        m = beta * upcast(leaf.m) + np.float32(1 - settings.momentum) * g
        store_unbiased_(leaf.m, m, leaf, scalars, rounding.FIRST_MOMENT)
        o = upcast(polar_express_(normalised(leaf.m)))
        mean = np.square(o).mean(1)
        leaf.v[...] = beta2 * leaf.v + np.float32(1 - settings.beta2) * mean
        step = o / (np.sqrt(leaf.v) + np.float32(EPSILON))[:, None]
        length = np.sqrt(np.square(step).sum())
        step *= lr * np.float32(RMS * math.sqrt(o.size)) / length if length > 0 else np.float32(0)
        p = upcast(leaf.param if leaf.master is None else leaf.master)
        p = decayed(p, lr * np.float32(settings.weight_decay), step if settings.cautious else None)
        store_param_(leaf, p - step, scalars)
    if zero_grad:
        leaf.grad[...] = 0


def normalised(m: Float[Array, "rows columns"]) -> BFloat16[Array, "rows columns"]:
    """Host version: m / (1.02 |m|), and zeros for a matrix that counts as zero."""
    length = math.sqrt(np.square(upcast(m)).sum(dtype=np.float64))
    inverse = 1 / (SAFETY * length) if length >= LEAST_NORM else 0.0
    return (upcast(m) * np.float32(inverse)).astype(BF16)


def normuon_ref(
    param: Any, grad: Any, m: Any, v: Any, polar: Any, *, lr: float, settings: NorMuonSettings
) -> tuple[Any, Any, Any]:
    """Reference of a step without caution, ``polar`` being polar(m): returns (param, m, v)."""
    m = settings.momentum * m + (1 - settings.momentum) * grad
    o = polar(m)
    v = settings.beta2 * v + (1 - settings.beta2) * (o * o).mean(-1)
    o = o / (v**0.5 + EPSILON)[:, None]
    size = (param.shape[0] * param.shape[1]) ** 0.5
    step = lr * RMS * size / (o * o).sum() ** 0.5 * o
    return param - lr * settings.weight_decay * param - step, m, v
