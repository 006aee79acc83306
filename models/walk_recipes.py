"""The arrays of linear under a recipe, as models/walk.py walks through them."""

from typing import TYPE_CHECKING

import numpy as np

from surogate.kernels.arrays import F32
from surogate.kernels.nvfp4 import TOKENS
from surogate.kernels.quant.recode import sizes_fit
from surogate.models.recipe import Fp8Options, Nvfp4Settings

if TYPE_CHECKING:
    from surogate.models.walk import Ledger, Matrix, Walk

BYTE = np.dtype(np.uint8)


def decodes(w: "Matrix") -> bool:
    """Whether a product multiplies with, or casts, the decoded matrix: see StoredCast."""
    fp8 = w.fp8
    if w.stored is None or fp8 is None:
        return w.stored is not None
    fits = fp8.scaling != "row" and all(sizes_fit(rows, w.inner) for rows in w.pieces)
    return not (fits and fp8.scope.products.forward and fp8.scope.products.dgrad)


def stored_cast(ledger: "Ledger", w: "Matrix", *, backward: bool) -> None:
    """What it takes to cast a weight that was decoded, beside the memory that such casts share: row
    scaling turns it round first.
    """
    fp8 = w.fp8
    if w.stored and backward and fp8 and fp8.scaling == "row" and fp8.scope.products.dgrad:
        ledger.scratch(w.inner, w.outer)


def fp8_linear_fwd(
    walk: "Walk", w: "Matrix", fp8: Fp8Options, y: str | None, at: str, keep: bool
) -> None:
    """Codes of x, and what an adapter makes; the codes of the rows go when y is there."""
    ledger = walk.ledger
    turned, rows = w.turned and keep, fp8.scope.products.forward and y is not None
    if y is None and w.rank:
        ledger.make(f"{at}.t", walk.tokens, w.extra or w.rank)
    fp8_cast(ledger, at, walk.tokens, w.inner, fp8, rows, turned)
    if y is None:
        return
    _adapter_fwd(walk, w, at)
    ledger.make(y, walk.tokens, w.outer)
    ledger.host_scratch(walk.tokens, w.outer)
    ledger.drop_all("spread")
    for name in (f"{at}.rows", f"{at}.inverse"):
        ledger.drop_all(name)


def fp8_cast(
    ledger: "Ledger", name: str, rows: int, columns: int, fp8: Fp8Options, plain: bool, turned: bool
) -> None:
    """Codes of a matrix: as it is, transposed, or both; some may be there, made with the matrix."""
    if plain and f"{name}.rows" not in ledger.arrays:
        ledger.make(f"{name}.rows", rows, columns, dtype=BYTE)
    if turned:
        ledger.make(f"{name}.turned", columns, rows, dtype=BYTE)
    if plain and fp8.scaling == "row":
        ledger.make(f"{name}.inverse", rows, dtype=F32)


def nvfp4_linear_fwd(
    walk: "Walk", w: "Matrix", nvfp4: Nvfp4Settings, y: str | None, at: str
) -> None:
    """Emulated: values in the compute type. An adapter's share of y comes first."""
    ledger = walk.ledger
    if w.rank:
        _adapter_fwd(walk, w, at)
        if y is not None:
            ledger.make(y, walk.tokens, w.outer)
        ledger.drop_all("spread")
    if y is None:
        return
    if nvfp4.scope.products.forward:
        ledger.make("cast.amax", 1, dtype=F32)
        ledger.make("cast.values", walk.tokens, w.inner)
        ledger.make("cast.alpha", 1, dtype=F32)
    if not w.rank:
        ledger.make(y, walk.tokens, w.outer)
    ledger.host_scratch(walk.tokens, w.outer)
    ledger.drop_all("cast.")


def nvfp4_linear_bwd(walk: "Walk", w: "Matrix", nvfp4: Nvfp4Settings, dx: str) -> None:
    """Casts of dy for dx, then of x and dy along tokens for dW."""
    ledger, tokens, products = walk.ledger, walk.tokens, nvfp4.scope.products
    wgrad = w.trained and products.wgrad
    if products.dgrad or wgrad:
        both = wgrad and nvfp4.options.signs is not None
        ledger.make("dy.amax", 2 if both else 1, dtype=F32)
    if w.rank:
        if w.spread and not w.extra:
            ledger.make("spread", w.outer, w.rank)
        ledger.make("dt", tokens, w.extra or w.rank)
        ledger.drop_all("spread")
        ledger.make(dx, tokens, w.inner)
    if products.dgrad:
        ledger.make("cast.values", tokens, w.outer)
        ledger.make("cast.alpha", 1, dtype=F32)
    if not w.rank:
        ledger.make(dx, tokens, w.inner)
    ledger.host_scratch(tokens, w.inner)
    ledger.drop_all("cast.")
    if wgrad:
        padded = -(-tokens // TOKENS) * TOKENS
        ledger.make("cast.amax", 1 if nvfp4.options.signs is None else 2, dtype=F32)
        ledger.make("cast.x", padded, w.inner)
        ledger.make("cast.dy", padded, w.outer)
        ledger.make("cast.alpha", 1, dtype=F32)
        ledger.drop_all("cast.")
    walk.bias_bwd(w)
    if w.extra and w.parts > 1:
        ledger.scratch(w.outer, w.extra, dtype=F32)
    ledger.drop_all("dt")
    ledger.drop_all("dy.")


def _adapter_fwd(walk: "Walk", w: "Matrix", at: str) -> None:
    """t, and D spread over all rows where it is not kept so."""
    if not w.rank:
        return
    walk.ledger.make(f"{at}.t", walk.tokens, w.extra or w.rank)
    if w.spread and not w.extra:
        walk.ledger.make("spread", w.outer, w.rank)
