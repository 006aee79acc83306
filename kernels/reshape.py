"""The same elements under another shape, as a pair, so that a traced forward can regroup its
columns.
"""

from jaxtyping import Float

from surogate.kernels.arrays import Array, require
from surogate.kernels.pair import Pair


def reshape_fwd(
    x: Float[Array, "..."], *, shape: tuple[int, ...]
) -> tuple[Float[Array, "..."], tuple]:
    """Returns a view of ``x`` with ``shape``. ``x`` must be C-contiguous."""
    require(
        x.flags.c_contiguous, "reshape_fwd: x must be C-contiguous, or the view would be a copy"
    )
    return x.reshape(shape), x.shape


def reshape_bwd(res: tuple, dy: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns dx, a view of dy where dy is contiguous."""
    return dy.reshape(res)


reshape = Pair(reshape_fwd, reshape_bwd)
