"""Sampling: nucleus sampling (Holtzman et al. 2020, arXiv 1904.09751) over a cache of keys and
values.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from surogate.kernels.batch import batch_of
from surogate.models import dense
from surogate.models.decode import decode, new_cache, prefill

if TYPE_CHECKING:
    from surogate.api import LoadedModel


def sample(
    model: "LoadedModel",
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: frozenset[int],
) -> list[list[int]]:
    """Token lists that continue the prompts, without the stop token that ended each.

    Temperature 0 is the likeliest token. Random numbers are keyed by (seed, sequence, position).
    """
    lengths = np.array([len(p) for p in prompts], np.int32)
    longest = int(lengths.max()) + max_new_tokens
    put, settings = model.device.put, model.settings
    table = put(dense.rotary_table(model.config, longest))
    tokens = np.concatenate([np.asarray(p, np.int32) for p in prompts])
    cache = new_cache(settings, seqs=len(prompts), max_len=longest, like=model.params.embed)
    common = {"table": table, "settings": settings}
    batch = put(batch_of(tokens, lengths.tolist()))
    scores = prefill(model.params, model.adapter, batch, cache, **common)
    written: list[list[int]] = [[] for _ in prompts]
    going = np.ones(len(prompts), bool)
    for step in range(max_new_tokens):
        rows = scores if isinstance(scores, np.ndarray) else scores.get()
        chosen = np.array(
            [
                choose(row, temperature=temperature, top_p=top_p, key=(seed, index, step))
                for index, row in enumerate(rows)
            ],
            np.int32,
        )
        for index, token in enumerate(chosen.tolist()):
            going[index] &= token not in stop
            if going[index]:
                written[index].append(token)
        if not going.any() or step == max_new_tokens - 1:
            break
        scores = decode(model.params, model.adapter, put(chosen), put(lengths), cache, **common)
        lengths = lengths + np.int32(1)
    return written


def choose(
    scores: Float[np.ndarray, " vocab"], *, temperature: float, top_p: float, key: tuple[int, ...]
) -> int:
    """A token: the likeliest at temperature 0, else one of the likeliest that hold ``top_p``."""
    if temperature == 0:
        return int(scores.argmax())
    z = scores.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    cumulative = np.cumsum(p[order])
    kept = order[: int(np.searchsorted(cumulative, top_p)) + 1]
    weights = p[kept] / p[kept].sum()
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return int(random.choice(kept, p=weights))


def generate_command(
    *,
    model: str,
    prompt: str,
    adapter: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: str,
    raw: bool,
) -> None:
    """surogate generate."""
    from surogate.api import generate, load

    loaded = load(model, adapter=adapter, device=device)
    texts = generate(
        loaded,
        [prompt],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        chat=False if raw else None,
    )
    print(texts[0])
