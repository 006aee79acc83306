"""Recipes: in which number formats a model's matrix products are computed.

A recipe turns the weights of the layers' four matrices into what ``linear`` multiplies with, and
keeps what it has to remember from step to step (scales, histories, seeds) in arrays that go into
checkpoints. ``Recipe`` itself is bf16: it changes nothing and remembers nothing.

Embeddings, norms, the output head, attention and the what ``Scope`` leaves out stay in the
compute type.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels import tree
from surogate.kernels.arrays import Array, on_device
from surogate.kernels.fp8 import E4M3, E5M2, Fp8State, Scaling, limit_of
from surogate.kernels.fp8_linear import FAST, Fp8Weight, Slots
from surogate.kernels.fp8_matmul import emulated as fp8_emulated
from surogate.kernels.linear import Products
from surogate.kernels.nvfp4_linear import Nvfp4Options, Nvfp4Weight
from surogate.kernels.nvfp4_matmul import emulated as nvfp4_emulated
from surogate.kernels.quant.checkpoints import Scheme
from surogate.kernels.quant.quantized import Quantized, quantize
from surogate.kernels.stored_linear import StoredCast
from surogate.models.config import ModelConfig
from surogate.models.lora import MATRICES, LoraSpec
from surogate.models.names import Field, layer_fields, layout
from surogate.models.tree import Model
from surogate.models.widen import Put

WEIGHTS = tuple(MATRICES.values())
STATE_OF_RECIPES = ("fp8.", "nvfp4.")  # how the names begin of what a checkpoint keeps of them


class Scope(NamedTuple):
    """Where a recipe applies: to the matrices of all layers but the ``first`` and the ``last``,
    but ``skipped`` (fields of Layer), and but those with a size that is no ``multiple``; there, to
    ``products``.
    """

    first: int = 0
    last: int = 0
    skipped: frozenset[str] = frozenset()
    products: Products = Products()
    multiple: int = 1

    def covers(self, config: ModelConfig, path: str) -> bool:
        """Whether the leaf at a path of the tree is such a matrix."""
        root, _, rest = path.partition(".")
        if root != "layers":
            return False
        index, _, field = rest.partition(".")
        inside = self.first <= int(index) < config.layers - self.last
        chosen = inside and field in WEIGHTS and field not in self.skipped
        return chosen and not any(x % self.multiple for x in field_at(config, path).shape)

    def products_in_words(self) -> str:
        """forward, dgrad and so on."""
        return ", ".join(name for name in Products._fields if getattr(self.products, name))

    def paths(self, config: ModelConfig) -> list[str]:
        """Paths of all those matrices, in the order of the tree."""
        found = [field.path for field in tree.leaves(layout(config))]
        return [path for path in found if self.covers(config, path)]

    def misfits(self, config: ModelConfig) -> list[str]:
        """A line about the matrices that are left out for their sizes, if there are any."""
        count = len(self._replace(multiple=1).paths(config)) - len(self.paths(config))
        if not count:
            return []
        return [f"{count} matrices in bf16: a size of theirs is no multiple of {self.multiple}"]


class Recipe:
    """bf16, and what every recipe answers."""

    name = "bf16"  # of the products that it computes

    def facts(self) -> list[str]:
        """Lines for the start of a run."""
        return []

    def frozen(self, put: Put, wide: Put, lora: LoraSpec) -> Put:
        """A ``put`` that turns frozen weights into what is multiplied with, as they are read.

        ``put`` moves an array to the device, ``wide`` with room for an adapter.
        """
        return wide

    def stores(self, path: str, leaf: Any) -> bool:
        """Whether ``frozen``'s put keeps a leaf in codes."""
        return False

    def trained(self, model: Model) -> Model:
        """The tree that the passes read of weights that are trained; it shares their memory."""
        return model

    def plain(self, model: Model) -> Model:
        """``frozen``'s tree as passes read it for bf16 products of the same weights."""
        return model

    def begin(self) -> None:
        """Before the passes of a micro-batch, or of an evaluation's, and after an evaluation's."""

    def draw_(self) -> None:
        """Before the passes of a micro-batch that is trained on: what rounds at random draws
        anew.
        """

    @property
    def calibrated(self) -> bool:
        """Whether the first micro-batch can count; if not, it is run once inside
        ``calibrating``.
        """
        return True

    def calibrating(self) -> AbstractContextManager[None]:
        """Passes inside learn what the recipe has to know before the first step."""
        return nullcontext()

    def unrecorded(self) -> AbstractContextManager[None]:
        """Passes inside are not remembered: evaluations."""
        return nullcontext()

    def restored(self) -> AbstractContextManager[None]:
        """What passes inside leave on the device is undone: trial runs of a recording."""
        return nullcontext()

    def update_(self) -> None:
        """After the weights have changed, at the end of a step."""

    def named(self) -> Mapping[str, Array]:
        """What a checkpoint keeps."""
        return {}

    def loaded_(self) -> None:
        """After ``named``'s arrays were written to."""


PLAIN = Recipe()


class CastRecipe(Recipe):
    """A recipe whose weights are casts, brought up to date after each update. Frozen ones may lie
    in the codes of another recipe, ``storing``; with ``keep``, others are kept beside their casts,
    for ``plain``.
    """

    def __init__(
        self, config: ModelConfig, scope: Scope, library: Any, storing: Recipe, keep: bool
    ) -> None:
        self._config, self._scope, self._library = config, scope, library
        self._storing, self._keep = storing, keep
        self._paths = {path: i for i, path in enumerate(scope.paths(config))}
        self._weights: list[Any] = []  # that are trained
        self._kept: dict[str, Array] = {}  # frozen weights beside their casts
        self._shared: dict[str, Any] = {}  # by field: casts that stored weights take turns in

    def _weight(
        self, path: str, leaf: Array, *, trained: bool, ranks: int = 0, **turns: Any
    ) -> Any:
        """The cast of the matrix at a path, with room for an adapter of so many ranks. ``turns``:
        in memory that casts of a shape take turns in, which is that of ``out`` (a cast or None).
        """
        raise AssertionError("each recipe has its own")

    def frozen(self, put: Put, wide: Put, lora: LoraSpec) -> Put:
        below = self._storing.frozen(put, wide, lora)

        def put_casts(path: str, array: Array) -> Any:
            if path not in self._paths:
                return below(path, array)
            if self._storing.stores(path, array):
                return self._stored(path, below(path, array))
            leaf = put(path, array)
            if self._keep:
                self._kept[path] = wide(path, array)
            ranks = ranks_of(lora, self._config, path, leaf)
            return self._weight(path, leaf, trained=False, ranks=ranks)

        return put_casts

    def plain(self, model: Model) -> Model:
        def unwrap(field: Field, leaf: Any) -> Any:
            if isinstance(leaf, StoredCast):
                return leaf.source
            return self._kept[field.path] if field.path in self._paths else leaf

        unwrapped: Model = tree.map(unwrap, layout(self._config), model)
        return unwrapped

    def _stored(self, path: str, source: Any) -> StoredCast:
        """A cast of what the recipe below made, a QuantizedWeight."""
        field = path.rsplit(".", 1)[-1]
        settings: Any = {"trained": False, "turns": True, "out": self._shared.get(field)}
        cast = self._weight(path, source.plain(), **settings)
        self._shared[field] = cast
        stored = StoredCast.of(source, cast)
        if not stored.decodes:
            source.shared.release()
        return stored

    def begin(self) -> None:
        self._storing.begin()

    def trained(self, model: Model) -> Model:
        def wrap(field: Field, leaf: Array) -> Any:
            if field.path not in self._paths:
                return leaf
            weight = self._weight(field.path, leaf, trained=True)
            self._weights.append(weight)
            return weight

        wrapped: Model = tree.map(wrap, layout(self._config), model)
        return wrapped

    def update_(self) -> None:
        for weight in self._weights:
            weight.recast_()

    def loaded_(self) -> None:
        self.update_()


class Fp8Options(NamedTuple):
    """Of the fp8 recipe; see kernels/fp8.py."""

    scope: Scope = Scope()
    scaling: Scaling = "delayed"
    history: int = 16
    algorithm: Any = "max"
    margin: int = 0
    fast: Products = FAST
    storage: "Storage | Scheme | None" = None  # of frozen weights


class Fp8Recipe(CastRecipe):
    """Weights and activations in E4M3, gradients in E5M2 (kernels/fp8_linear.py)."""

    name = "fp8_hybrid"

    def __init__(
        self,
        config: ModelConfig,
        options: Fp8Options,
        library: Any = np,
        storing: Recipe = PLAIN,
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(config, options.scope, library, storing, keep)
        self._options = options
        limits = [limit_of(form, options.margin) for form in (E4M3, E4M3, E5M2)]
        self.state = Fp8State(
            np.array(limits * len(self._paths), np.float32),
            length=options.history,
            algorithm=options.algorithm,
            scaling=options.scaling,
            library=library,
        )

    def facts(self) -> list[str]:
        scope, scaling = self._options.scope, self._options.scaling
        how = "in FP8"
        if fp8_emulated(device_of(self._library)):
            how = "emulated: this device has no FP8 products, so the same numbers take longer"
        which = f"{len(self._paths)} matrices ({scope.products_in_words()})"
        line = f"fp8_hybrid: {which}, {scaling} scaling, {how}"
        return [*self._storing.facts(), line, *scope.misfits(self._config)]

    def _slots(self, path: str) -> Slots:
        first = 3 * self._paths[path]
        forms = (E4M3, E4M3, E5M2)
        return Slots(*(self.state.slot(first + i, form) for i, form in enumerate(forms)))

    def _weight(
        self, path: str, leaf: Array, *, trained: bool, ranks: int = 0, **turns: Any
    ) -> Fp8Weight:
        return Fp8Weight.of(
            leaf,
            self._slots(path),
            trained=trained,
            ranks=ranks,
            products=self._options.scope.products,
            fast=self._options.fast,
            **turns,
        )

    @property
    def calibrated(self) -> bool:
        return self._options.scaling != "delayed" or self.state.calibrated

    def calibrating(self) -> AbstractContextManager[None]:
        return self.state.calibrating()

    def unrecorded(self) -> AbstractContextManager[None]:
        return self.state.unrecorded()

    def restored(self) -> AbstractContextManager[None]:
        return self.state.restored()

    def update_(self) -> None:
        super().update_()
        self.state.update_()

    def named(self) -> Mapping[str, Array]:
        if self._options.scaling != "delayed":
            return {}
        return {"fp8.history": self.state.history, "fp8.position": self.state.position}

    def loaded_(self) -> None:
        super().update_()
        if self._options.scaling == "delayed":
            self.state.load_(self.state.history.copy(), self.state.position.copy())


class Nvfp4Settings(NamedTuple):
    """Of the nvfp4 recipe; see kernels/nvfp4_linear.py."""

    scope: Scope = Scope()
    options: Nvfp4Options = Nvfp4Options()
    seed: int = 0
    storage: "Storage | Scheme | None" = None  # of frozen weights


class Nvfp4Recipe(CastRecipe):
    """Products of 4-bit numbers in blocks of 16 (kernels/nvfp4_linear.py).

    ``key`` is the seed and the number of micro-batches so far, from which gradients' casts draw.
    """

    name = "nvfp4"

    def __init__(
        self,
        config: ModelConfig,
        settings: Nvfp4Settings,
        library: Any = np,
        storing: Recipe = PLAIN,
        *,
        keep: bool = False,
    ) -> None:
        super().__init__(config, settings.scope, library, storing, keep)
        self._settings = settings
        self._key = library.asarray(np.array([settings.seed & 0xFFFFFFFF, 0], np.uint32))

    def facts(self) -> list[str]:
        scope, options = self._settings.scope, self._settings.options
        how = "in NVFP4"
        if nvfp4_emulated(device_of(self._library)):
            how = (
                "emulated in bf16: this device has no FP4 products, so the same numbers take longer"
            )
        parts = [
            f"{len(self._paths)} matrices ({scope.products_in_words()})",
            *([] if options.square else ["weights in blocks of 1 x 16"]),
            *(["four over six"] if options.four_over_six else []),
            *(["Hadamard transform"] if options.signs is not None else []),
            *(["stochastic rounding of gradients"] if options.stochastic else []),
            how,
        ]
        line = f"nvfp4: {', '.join(parts)}"
        return [*self._storing.facts(), line, *scope.misfits(self._config)]

    def _weight(
        self, path: str, leaf: Array, *, trained: bool, ranks: int = 0, **turns: Any
    ) -> Nvfp4Weight:
        return Nvfp4Weight.of(
            leaf,
            self._key,
            trained=trained,
            tensor=self._paths[path],
            ranks=ranks,
            options=self._settings.options,
            products=self._settings.scope.products,
            **turns,
        )

    def draw_(self) -> None:
        self._key[1:] += np.uint32(1)

    @contextmanager
    def restored(self) -> Iterator[None]:
        kept = self._key.copy()
        try:
            yield
        finally:
            self._key[...] = kept

    def named(self) -> Mapping[str, Array]:
        return {"nvfp4.key": self._key}


class Storage(NamedTuple):
    """How frozen weights are stored; see kernels/quant/quantized.py."""

    format: str  # fp8, nf4 or nvfp4
    block: int | None = None
    double_quant: bool = False
    four_over_six: bool = False

    def quantized(self, matrix: Array) -> Quantized:
        """A matrix in this format.

        Nothing multiplies by a frozen weight's transpose in codes, so in NVFP4 16 values of a row
        have a scale of their own, as in published checkpoints.
        """
        form, block, double, four = self
        return quantize(
            matrix, form, block=block, double_quant=double, four_over_six=four, square=False
        )


Precision = Fp8Options | Nvfp4Settings | Storage | Scheme  # Scheme: as the files store them


def stored_as(precision: Precision | None, field: Field) -> Storage | Scheme | None:
    """How a matrix of a layer is stored, as far as the configuration tells; None: plainly."""
    if isinstance(precision, Fp8Options | Nvfp4Settings):
        precision = precision.storage
    if isinstance(precision, Scheme):
        modules = (piece.name.removesuffix(".weight") for piece in field.pieces)
        return None if any(map(precision.leaves, modules)) else precision
    return precision if isinstance(precision, Storage) else None


def device_of(library: Any) -> int | None:
    """The current card; None for NumPy."""
    return None if library is np else int(library.cuda.runtime.getDevice())


def ranks_of(lora: LoraSpec, config: ModelConfig, path: str, leaf: Array) -> int:
    """Ranks of a matrix's adapter that want blocks; none on the host, whose products take the
    adapter's own arrays.
    """
    if not on_device(leaf):
        return 0
    return len(lora.parts(config, path.rsplit(".", 1)[-1])) * lora.rank


def field_at(config: ModelConfig, path: str) -> Field:
    """The field of a layer at a path of the tree."""
    _, index, name = path.split(".")
    found: Field = getattr(layer_fields(config, int(index)), name)
    return found
