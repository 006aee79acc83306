"""The tensors of a checkpoint and the fields of a parameter tree: one table per architecture.

A field of a tree is one tensor of a checkpoint or several stacked by rows (q, k, v; gate, up).
``layout`` spells the table out for a configuration, and everything that meets checkpoint names
goes through it: reading and writing files, seeding an initialisation, naming a gradient, and the
names of LoRA adapters. ``named`` and ``from_named`` are inverse to each other.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from surogate.kernels import tree
from surogate.kernels.arrays import Array, namespace
from surogate.kernels.widened import plain
from surogate.models.config import ModelConfig, parameter_shapes
from surogate.models.tree import Layer, Model

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA = {
    "attn_norm": ("input_layernorm.weight",),
    "w_qkv": tuple(f"{module}.weight" for module in _QKV),
    "w_o": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "w_gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "w_down": ("mlp.down_proj.weight",),
}
# Architecture -> field of Layer -> names under model.layers.N, in the order of their rows.
LAYER_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA | {"b_qkv": tuple(f"{module}.bias" for module in _QKV)},
    "qwen3": _LLAMA
    | {"q_norm": ("self_attn.q_norm.weight",), "k_norm": ("self_attn.k_norm.weight",)},
}
MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


class Piece(NamedTuple):
    """One tensor of a checkpoint: rows start to stop of a field."""

    name: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf of a tree: its path in the tree, its shape and the checkpoint tensors it stacks.

    ``path`` reads embed, norm, head or layers.N.w_qkv and the like. A dataclass and not a
    NamedTuple, so that a tree of fields has them for leaves.
    """

    path: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def shape_of(self, piece: Piece) -> tuple[int, ...]:
        """Shape of a piece's tensor in the checkpoint."""
        return (piece.stop - piece.start, *self.shape[1:])

    def view(self, leaf: Array, piece: Piece) -> Array:
        """The rows of a piece in this field's array: the array itself when it is the only one."""
        return leaf if len(self.pieces) == 1 else leaf[piece.start : piece.stop]


def row_counts(config: ModelConfig, field: str) -> tuple[int, ...]:
    """Rows of each part of a stacked field of Layer; () for a field that stacks nothing."""
    if field in ("w_qkv", "b_qkv"):
        return (config.q_rows, config.kv_rows, config.kv_rows)
    return (config.ffn, config.ffn) if field == "w_gate_up" else ()


def _field(
    path: str, shape: tuple[int, ...], names: tuple[str, ...], counts: tuple[int, ...]
) -> Field:
    stops = itertools.accumulate(counts or shape[:1])
    pieces = (
        Piece(name, stop - rows, stop)
        for name, rows, stop in zip(names, counts or shape[:1], stops, strict=True)
    )
    return Field(path, shape, tuple(pieces))


def layer_fields(config: ModelConfig, index: int) -> Layer:
    """One layer's part of ``layout``."""
    names = LAYER_NAMES[config.architecture]
    fields: list[Any] = [
        None
        if shape is None
        else _field(
            f"layers.{index}.{field}",
            shape,
            tuple(f"model.layers.{index}.{name}" for name in names[field]),
            row_counts(config, field),
        )
        for field, shape in parameter_shapes(config).layers[index]._asdict().items()
    ]
    return Layer(*fields)


def layout(config: ModelConfig) -> Model:
    """The tree of a model with a ``Field`` for each leaf that the configuration has."""
    shapes = parameter_shapes(config)

    def top(field: str) -> Any:
        shape = getattr(shapes, field)
        return None if shape is None else _field(field, shape, (MODEL_NAMES[field],), ())

    layers = tuple(layer_fields(config, index) for index in range(config.layers))
    return Model(top("embed"), layers, top("norm"), top("head"))


def hidden_matrices(config: ModelConfig) -> Model:
    """The rows (start, stop) of each matrix that a field of a layer stacks; None for a field that
    is none: embedding, head, norms, biases.
    """

    def ranges(field: Field) -> tuple[tuple[int, int], ...] | None:
        matrix = field.path.startswith("layers.") and len(field.shape) == 2
        return tuple((piece.start, piece.stop) for piece in field.pieces) if matrix else None

    return tree.map(ranges, layout(config))


def build(config: ModelConfig, make: Callable[[Field], Array]) -> Model:
    """A model whose leaves ``make`` gives, called in the order of the tree."""
    return tree.map(make, layout(config))


def named(model: Model, config: ModelConfig) -> dict[str, Array]:
    """A model, or any tree of its shape, under checkpoint names.

    The arrays are views of the tree's leaves: writing to one writes to the tree. Leaves that are
    None, such as gradients of frozen weights, are left out.

    Raises:
        ValueError: a leaf of another shape, or one that the configuration does not have.
    """
    out: dict[str, Array] = {}

    def add(field: Field, leaf: Array | None) -> None:
        if leaf is None:
            return
        if tuple(leaf.shape) != field.shape:
            raise ValueError(f"{field.path}: must have shape {field.shape}, got {leaf.shape}")
        for piece in field.pieces:
            out[piece.name] = field.view(plain(leaf), piece)

    fields = layout(config)
    tree.map(add, fields, model)
    expected = {field.path.split(".")[-1] for field in tree.leaves(fields)}
    nodes: list[Any] = [model, *model.layers]
    for node in nodes:
        for name, leaf in node._asdict().items():
            if leaf is not None and name not in expected | {"layers"}:
                raise ValueError(f"{name}: this {config.architecture} configuration has none")
    return out


def from_named(arrays: Mapping[str, Array], config: ModelConfig) -> Model:
    """The tree that ``named`` came from. Stacked fields are copied, the others are not.

    Raises:
        ValueError: names the first tensor that is missing, of another shape, or not of this model.
    """
    used: set[str] = set()

    def make(field: Field) -> Array:
        parts = []
        for piece in field.pieces:
            if piece.name not in arrays:
                raise ValueError(f"{piece.name}: missing, expected shape {field.shape_of(piece)}")
            part = arrays[piece.name]
            if tuple(part.shape) != field.shape_of(piece):
                raise ValueError(
                    f"{piece.name}: must have shape {field.shape_of(piece)}, got {part.shape}"
                )
            used.add(piece.name)
            parts.append(part)
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concatenate(parts)

    model = build(config, make)
    for name in arrays.keys() - used:
        raise ValueError(f"{name}: not a tensor of this {config.architecture} model")
    return model
