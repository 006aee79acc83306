"""Random initial weights: normal matrices, ones for norms, zeros for biases.

Every checkpoint tensor has its own stream of random numbers, keyed by the seed and its name. So a
tensor comes out the same whether it is made alone, on one rank of many, or in another order, and
a model with one layer more begins with the same layers.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from surogate.kernels.arrays import Array
from surogate.models.config import ModelConfig
from surogate.models.names import Field, build
from surogate.models.tree import Model


def generator(seed: int, name: str) -> np.random.Generator:
    """The stream of random numbers of a tensor: Philox (Salmon et al. 2011) with a hashed key."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def init_model(
    config: ModelConfig,
    seed: int,
    dtype: np.dtype,
    *,
    zero_projections: bool = False,
    put: Callable[[str, Array], Array] = lambda path, array: array,
) -> Model:
    """A model with normal(0, initializer_range) matrices of ``dtype``.

    Args:
        zero_projections: the matrices that write to the residual stream (w_o and w_down) start at
            zero, so that every layer starts as the identity.
        put: receives each leaf's path (layers.0.w_qkv) and array, and returns what the tree holds,
            for instance its copy on the card.
    """

    def make(field: Field) -> Array:
        kind = field.path.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            return put(field.path, np.ones(field.shape, dtype))
        out = np.zeros(field.shape, dtype)
        if kind != "b_qkv" and not (zero_projections and kind in ("w_o", "w_down")):
            for piece in field.pieces:
                random = generator(seed, piece.name)
                draw = random.standard_normal(field.shape_of(piece), np.float32)
                draw *= np.float32(config.initializer_range)
                field.view(out, piece)[...] = draw.astype(dtype, copy=False)
        return put(field.path, out)

    return build(config, make)
