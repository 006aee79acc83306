"""LoRA adapters of a model: which rows they adapt, their first values, their names, their merge.

An adapted matrix computes y = x W^T + scale * (x A^T) B^T with scale = alpha / rank (Hu et al.
2021). Stacked matrices (q, k, v; gate, up) have one pair whose A and B stack those of the adapted
parts, see ``LayerAdapter``; a checkpoint has one pair for each part, under PEFT's names.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from surogate.kernels.arrays import Array, namespace
from surogate.kernels.linear import LoRA
from surogate.models.config import ModelConfig, nearest
from surogate.models.files import Planned, cast
from surogate.models.init import generator
from surogate.models.names import Field, layer_fields
from surogate.models.tree import Adapter, LayerAdapter

# Field of LayerAdapter -> field of Layer.
MATRICES = {"qkv": "w_qkv", "o": "w_o", "gate_up": "w_gate_up", "down": "w_down"}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Rank, alpha and target projections of an adapter.

    Raises:
        ValueError: a target that is none of ``TARGETS``, no target at all, or a rank below 1.
    """

    rank: int
    alpha: float | int
    targets: frozenset[str]

    def __post_init__(self) -> None:
        for target in sorted(self.targets):
            if target not in TARGETS:
                raise ValueError(f"LoRA target {target!r} does not exist{nearest(target, TARGETS)}")
        if not self.targets:
            raise ValueError(f"LoRA needs targets: some of {', '.join(TARGETS)}, or all")
        if self.rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {self.rank}")

    @classmethod
    def of(cls, rank: int, alpha: float | int, names: Iterable[str]) -> "LoraSpec":
        """A spec from target names; "all" (or PEFT's "all-linear") is every projection."""
        names = frozenset(names)
        everything = names & {"all", "all-linear"}
        return cls(rank, alpha, names - everything | (set(TARGETS) if everything else set()))

    @property
    def scale(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / self.rank

    def parts(self, config: ModelConfig, field: str) -> tuple[tuple[int, int], ...]:
        """Row ranges (start, stop) of a field of Layer that are adapted, in order; () when none."""
        return tuple(part.rows for part in adapted(self, getattr(layer_fields(config, 0), field)))


class Part(NamedTuple):
    """One adapted module: its checkpoint name, its rows in the weight, in ``a`` and in ``b``."""

    module: str
    rows: tuple[int, int]
    a_rows: tuple[int, int]
    b_rows: tuple[int, int]


def adapted(spec: LoraSpec, field: Field) -> list[Part]:
    """The parts of a weight that ``spec`` adapts, in the order of their rows."""
    parts: list[Part] = []
    b_row = 0
    for piece in field.pieces:
        module = piece.name.removesuffix(".weight")
        if module.rsplit(".", 1)[1] not in spec.targets:
            continue
        a_row, b_stop = len(parts) * spec.rank, b_row + piece.stop - piece.start
        rows = (piece.start, piece.stop)
        parts.append(Part(module, rows, (a_row, a_row + spec.rank), (b_row, b_stop)))
        b_row = b_stop
    return parts


def matches(config: ModelConfig, spec: LoraSpec) -> dict[str, int]:
    """How many modules of each target there are in a model, in the order of TARGETS."""
    modules = [
        part.module.rsplit(".", 1)[1]
        for index in range(config.layers)
        for matrix in MATRICES.values()
        for part in adapted(spec, getattr(layer_fields(config, index), matrix))
    ]
    return {target: modules.count(target) for target in TARGETS if target in spec.targets}


def build_adapter(
    config: ModelConfig, spec: LoraSpec, make: Callable[[int, list[Part]], LoRA]
) -> Adapter:
    """An adapter whose pairs ``make(columns of a, parts)`` gives, in the order of the tree."""

    def layer(index: int) -> LayerAdapter:
        fields = layer_fields(config, index)
        pairs: dict[str, LoRA | None] = {}
        for name, matrix in MATRICES.items():
            field = getattr(fields, matrix)
            parts = adapted(spec, field)
            pairs[name] = make(field.shape[1], parts) if parts else None
        return LayerAdapter(**pairs)

    return Adapter(tuple(layer(index) for index in range(config.layers)))


def init_adapter(config: ModelConfig, spec: LoraSpec, seed: int, dtype: np.dtype) -> Adapter:
    """A fresh adapter: B is zero, A uniform in +-1/sqrt(in).

    That is PEFT's start (Kaiming uniform with a = sqrt(5)), whose variance is 1 / (3 * in). Each
    module has a stream of random numbers of its own, so that targets do not affect each other.
    """

    def make(columns: int, parts: list[Part]) -> LoRA:
        a = np.empty((len(parts) * spec.rank, columns), dtype)
        for part in parts:
            random = generator(seed, f"{part.module}.lora_A.weight")
            draw = 2 * random.random((spec.rank, columns), np.float32) - 1
            a[slice(*part.a_rows)] = (draw / np.float32(math.sqrt(columns))).astype(dtype)
        return LoRA(a, np.zeros((parts[-1].b_rows[1], spec.rank), dtype))

    return build_adapter(config, spec, make)


def named_adapter(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> dict[str, Array]:
    """An adapter, or its gradient, under PEFT's names; the arrays are views of its leaves."""
    out: dict[str, Array] = {}
    for index, layer in enumerate(adapter.layers):
        fields = layer_fields(config, index)
        for name, matrix in MATRICES.items():
            pair = getattr(layer, name)
            if pair is None:
                continue
            for part in adapted(spec, getattr(fields, matrix)):
                out[f"{PEFT_PREFIX}{part.module}.lora_A.weight"] = pair.a[slice(*part.a_rows)]
                out[f"{PEFT_PREFIX}{part.module}.lora_B.weight"] = pair.b[slice(*part.b_rows)]
    return out


def adapter_from_named(arrays: Mapping[str, Array], config: ModelConfig, spec: LoraSpec) -> Adapter:
    """The adapter that ``named_adapter`` came from, with copies of the arrays.

    Raises:
        ValueError: names the first tensor that is missing, of another shape, or not adapted by
            ``spec``.
    """
    used: set[str] = set()

    def take(name: str, shape: tuple[int, ...]) -> Array:
        if name not in arrays:
            raise ValueError(f"{name}: missing, expected shape {shape}")
        if tuple(arrays[name].shape) != shape:
            raise ValueError(f"{name}: must have shape {shape}, got {arrays[name].shape}")
        used.add(name)
        return arrays[name]

    def make(columns: int, parts: list[Part]) -> LoRA:
        a, b = [], []
        for part in parts:
            stem = f"{PEFT_PREFIX}{part.module}"
            rows = part.rows[1] - part.rows[0]
            a.append(take(f"{stem}.lora_A.weight", (spec.rank, columns)))
            b.append(take(f"{stem}.lora_B.weight", (rows, spec.rank)))
        xp = namespace(a[0])
        return LoRA(xp.concatenate(a), xp.concatenate(b))

    adapter = build_adapter(config, spec, make)
    for name in sorted(arrays.keys() - used):
        raise ValueError(f"{name}: not an adapter tensor of this {config.architecture} model")
    return adapter


class Merged(NamedTuple):
    """The tensors of a checkpoint with an adapter in them, and what that did to those written."""

    tensors: dict[str, Planned]
    report: "MergeReport"


@dataclasses.dataclass
class MergeReport:
    """Of the adapted tensors that were written so far: their numbers, and how many of those differ
    from what the weight alone is rounded to.
    """

    weights: int = 0
    changed: int = 0


def merge_adapter(
    base: Mapping[str, Planned],
    adapter: Adapter,
    spec: LoraSpec,
    config: ModelConfig,
    dtype: np.dtype,
) -> Merged:
    """W + scale * B A for each adapted W, added in float32 and rounded once, to ``dtype``.

    ``base`` has the tensors under checkpoint names. Nothing is computed before a tensor is written,
    so that no more than one of them is in memory.
    """
    pairs = named_adapter(adapter, config, spec)
    report = MergeReport()

    def add(name: str, weight: Planned) -> Planned:
        stem = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in pairs:
            return weight._replace(dtype=dtype)
        a, b = (on_host(pairs[f"{stem}.lora_{x}.weight"]).astype(np.float32) for x in "AB")

        def load() -> np.ndarray:
            before = on_host(weight.load())
            delta = b @ a
            delta *= np.float32(spec.scale)
            delta += before
            after = cast(delta, dtype, name)
            report.weights += after.size
            report.changed += int((after != cast(before, dtype, name)).sum())
            return after

        return Planned(weight.shape, dtype, load)

    return Merged({name: add(name, weight) for name, weight in base.items()}, report)


def on_host(x: Array) -> np.ndarray:
    """An array of the card or the host, on the host."""
    return x if isinstance(x, np.ndarray) else x.get()
