"""Adapters that begin as the low-rank part of what storing their base in few bits lost.

A stored matrix decodes to D = W - E. With s_j the root mean square of input feature j, the product
of rank r that takes most of E off the outputs,

    minimise  sum over columns j of  s_j^2 |(E - scale B A)_j|^2

is, by Eckart and Young (1936), made of the first r singular vectors U S V^T of E diag(s):

    scale B A  =  U S V^T diag(1 / s)  =  U U^T E

The second form divides by nothing, so features that are never on do no harm. Where features are
uncorrelated it leaves the least error to be expected of the outputs (QERA, arXiv 2410.06040, whose
approximate form it is). LQER (arXiv 2402.02446) weighs by magnitudes, LoftQ (arXiv 2310.08659) not
at all. Each row of A gets the root mean square that ``init_adapter`` draws, and B the rest, so that
learning rates mean what they do for adapters that begin at zero.

U comes from randomised subspace iteration (Halko, Martinsson and Tropp 2011, arXiv 0909.4061).
Its bases are made orthonormal through their Gram matrices (Stathopoulos and Wu 2002), whose
eigenvectors the host finds in float64, so that a card computes nothing but products.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from surogate.kernels import tree
from surogate.kernels.arrays import F32, Array, namespace, require, zeros
from surogate.kernels.batch import IGNORED, Batch
from surogate.kernels.linear import RecipeWeight, linear_bwd, linear_fwd
from surogate.kernels.pair import Pair
from surogate.kernels.quant.quantized import dequantize
from surogate.kernels.quantized_linear import QuantizedWeight
from surogate.kernels.rope import RopeTable
from surogate.kernels.stored_linear import source_of
from surogate.kernels.widened import Blocks
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig
from surogate.models.init import generator
from surogate.models.lora import MATRICES, LoraSpec, adapted, init_adapter, on_host
from surogate.models.names import Field, layer_fields, layout
from surogate.models.tree import Adapter, Model

OVERSAMPLING = 16  # directions that are iterated beside those that are kept
ITERATIONS = 4
LEAST = 1e-10  # of a Gram matrix's largest eigenvalue: what is below is rounding of float32

Squares = Mapping[str, Float32[Array, " inner"]]


@dataclass(frozen=True, eq=False)
class Observed(RecipeWeight):
    """A weight whose inputs are looked at: each forward adds the squares of x to ``squares``, of
    the tokens whose ``counted`` is 1 and not 0.
    """

    shape: tuple[int, int]
    weight: QuantizedWeight
    squares: Float32[Array, " inner"]
    counted: Float32[Array, " tokens"]
    blocks: Blocks | None = None

    @property
    def stored(self) -> Array:
        return self.weight.stored


def _observed_fwd(x: Array, weight: Observed, *arrays: Any, **settings: Any) -> tuple[Any, Any]:
    inputs = x.astype(F32)
    weight.squares[...] += weight.counted @ (inputs * inputs)
    return linear_fwd(x, weight.weight, *arrays, **settings)


Observed.linear = Pair(_observed_fwd, linear_bwd)


def input_squares(
    model: Model,
    config: ModelConfig,
    batches: Iterable[Batch],
    *,
    table: RopeTable,
    begin: Callable[[], None],
    put: Callable[[Any], Any],
) -> Squares:
    """Sums over tokens of the squares of the inputs of each stored matrix, by its path.

    The passes are of the model without an adapter. ``batches`` are on the host; documents of which
    nothing is supervised, such as padding, do not count. ``begin`` is called before each pass,
    ``put`` moves arrays to the device.
    """
    fields = layout(config)
    squares = {
        field.path: zeros(leaf.shape[1:], F32, like=leaf.stored)
        for field, leaf in zip(tree.leaves(fields), tree.leaves(model), strict=True)
        if source_of(leaf)
    }
    for batch in batches:
        watched = _watched(model, fields, squares, put(_counted(batch)))
        begin()
        dense.hidden(watched, None, put(batch), table=table, settings=Settings(config))
    return squares


def _watched(
    model: Model, fields: Model, squares: Squares, counted: Float32[Array, " tokens"]
) -> Model:
    def watch(field: Field, leaf: Any) -> Any:
        found = squares.get(field.path)
        source = source_of(leaf)
        if found is None or source is None:
            return leaf
        return Observed(leaf.shape, source, found, counted)

    watched: Model = tree.map(watch, fields, model)
    return watched


def _counted(batch: Batch) -> Float32[np.ndarray, " tokens"]:
    """1 for the tokens of documents with a supervised token."""
    seen = np.concatenate([[0], np.cumsum(batch.labels != IGNORED)])
    return (seen[batch.docs.end] > seen[batch.docs.start]).astype(F32)


class Begun(NamedTuple):
    """An adapter, and for each of its modules the share of E's squared error on the outputs that
    it takes off.
    """

    adapter: Adapter
    shares: dict[str, float]


def error_adapter(
    model: Model,
    config: ModelConfig,
    spec: LoraSpec,
    squares: Squares,
    *,
    seed: int,
    dtype: np.dtype,
    load: Callable[[Field], Any],
    put: Callable[[Any], Any],
) -> Begun:
    """The adapter of ``init_adapter`` with the product that makes up for what the matrices of
    ``model``, of which every adapted one is stored, have lost.

    ``load`` gives a field's matrix as it was quantised, on the host, and is called for one after
    another. Ranks beyond those of the error keep the A that was drawn. Raises ValueError for inputs
    or weights that are not finite.
    """
    adapter, shares = init_adapter(config, spec, seed, dtype), dict[str, float]()
    for index, (layer, pairs) in enumerate(zip(model.layers, adapter.layers, strict=True)):
        for name, matrix in MATRICES.items():
            pair, weight = getattr(pairs, name), source_of(getattr(layer, matrix))
            if pair is None:
                continue
            assert weight is not None, "every adapted matrix is stored"
            field = getattr(layer_fields(config, index), matrix)
            whole, sizes = load(field), namespace(squares[field.path]).sqrt(squares[field.path])
            codes = {piece.start: piece.quantized for piece in weight.pieces}
            for part in adapted(spec, field):
                error = put(whole[slice(*part.rows)]).astype(F32)
                error -= dequantize(codes[part.rows[0]]).astype(F32)
                found = factors(error, sizes, spec.rank, seed, part.module)
                first, ranks = part.a_rows[0], len(found.a)
                norms = math.sqrt(3) * np.linalg.norm(found.a, axis=1)  # over those of drawn rows
                pair.a[first : first + ranks] = found.a / norms[:, None]
                pair.b[slice(*part.b_rows), :ranks] = found.b * (norms / spec.scale)
                shares[part.module] = found.share
    return Begun(adapter, shares)


class Factors(NamedTuple):
    """b a = U U^T E, and the share of |E diag(s)|^2 that it takes off; on the host."""

    a: Float32[np.ndarray, "ranks inner"]
    b: Float32[np.ndarray, "outer ranks"]
    share: float


def factors(
    error: Float32[Array, "outer inner"],
    sizes: Float32[Array, " inner"],
    rank: int,
    seed: int,
    name: str,
) -> Factors:
    """The best product of ``rank``, or of as many as there are, for E and s; see the module.

    ``seed`` and ``name`` say where the iteration starts. Raises ValueError, with the name, unless
    all numbers are finite.
    """
    xp, (outer, inner) = namespace(error), error.shape
    total = float((error * error).sum(0) @ (sizes * sizes))
    require(math.isfinite(total), f"{name}: its weights or their inputs are not finite")
    column = sizes[:, None]

    def onto_rows(x: Float32[Array, "inner some"]) -> Float32[Array, "outer some"]:
        return error @ (column * x)

    def onto_columns(y: Float32[Array, "outer some"]) -> Float32[Array, "inner some"]:
        return column * (error.T @ y)

    width = min(rank + OVERSAMPLING, outer, inner)
    draw = generator(seed, f"{name}.error").standard_normal((inner, width), np.float32)
    basis = orthonormal(onto_rows(xp.asarray(draw)))
    for _ in range(ITERATIONS):
        basis = orthonormal(onto_rows(orthonormal(onto_columns(basis))))
    values, vectors = gram(onto_columns(basis))
    u = basis @ xp.asarray(vectors[:, :rank].astype(np.float32))
    share = float(values[:rank].sum() / total) if total else 0.0
    return Factors(on_host(u.T @ error), on_host(u), share)


def orthonormal(x: Float32[Array, "rows some"]) -> Float32[Array, "rows found"]:
    """A basis of the columns of x, those left out that are nearly sums of others."""
    values, vectors = gram(x)
    return x @ namespace(x).asarray((vectors / np.sqrt(values)).astype(np.float32))


def gram(
    x: Float32[Array, "rows some"],
) -> tuple[Float64[np.ndarray, " found"], Float64[np.ndarray, "some found"]]:
    """Eigenvalues of x^T x that are more than rounding, the largest first, and their vectors: the
    squares of the singular values of x and its right singular vectors. On the host.
    """
    wide = x.astype(np.float64)
    values, vectors = np.linalg.eigh(on_host(wide.T @ wide))
    values, vectors = values[::-1], vectors[:, ::-1]
    found = values > LEAST * values[:1]
    return values[found], vectors[:, found]
