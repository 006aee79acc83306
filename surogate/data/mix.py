"""Mixing data sets by shares of tokens.

With weights w, an epoch holds as many tokens as all data sets together, and set i has the share
w[i] / sum(w) of them. A set with fewer tokens than its share is repeated, one with more is left out
in part: documents come in an order drawn from the seed, a new one each time round, and a set stops
where it comes closest to its share. Documents of the sets alternate in proportion.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64


def mixed(
    lengths: Int64[np.ndarray, " documents"],
    sources: Int64[np.ndarray, " documents"],
    weights: Sequence[float],
    *,
    seed: int,
) -> Int64[np.ndarray, " chosen"]:
    """Indices of the documents of an epoch, some more than once.

    lengths are in tokens and positive, and every data set with a weight must have a document.
    """
    total = int(lengths.sum())
    chosen, places = [], []
    for source, weight in enumerate(weights):
        documents = np.flatnonzero(sources == source)
        wanted = total * weight / sum(weights)
        order = _drawn(documents, lengths, wanted, key=[seed, source])
        chosen.append(order)
        places.append((np.arange(len(order)) + 0.5) / max(1, len(order)))
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(chosen)[order]


def _drawn(
    documents: Int64[np.ndarray, " documents"],
    lengths: Int64[np.ndarray, " all"],
    wanted: float,
    *,
    key: Sequence[int],
) -> Int64[np.ndarray, " chosen"]:
    """Documents of one data set, round after round, whose tokens come closest to those wanted."""
    has = int(lengths[documents].sum())
    rounds = int(wanted // has) + 1
    bits = np.random.Philox(key=np.array(key, np.uint64))
    orders = [
        documents[np.argsort(bits.random_raw(len(documents)), kind="stable")] for _ in range(rounds)
    ]
    order = np.concatenate(orders)
    sums = np.concatenate([[0], np.cumsum(lengths[order])])
    count = int(np.abs(sums - wanted).argmin())
    return order[: max(1, count)]
