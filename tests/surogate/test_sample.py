"""Generation with a cache equals that without, and transformers'; sampling is what it says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surogate
from surogate.api import LoadedModel
from surogate.kernels import tree
from surogate.kernels.batch import batch_of
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.decode import decode, new_cache, prefill
from surogate.models.lora import LoraSpec, init_adapter
from surogate.sample import choose, sample
from tests.models.tiny import FAMILIES, both, documents
from tests.oracle import close

PROMPTS = documents(1, 5, 14, 9, seed=3)  # shorter and longer than the window of 6
GREEDY: dict[str, Any] = dict(temperature=0.0, top_p=1.0, seed=0)


def with_adapter(model: LoadedModel, targets: Sequence[str] = ("all",)) -> LoadedModel:
    """Random pairs, large enough to change what the model says."""
    spec = LoraSpec.of(4, 16, targets)
    adapter = init_adapter(model.config, spec, 0, np.dtype(np.float32))
    rng = np.random.default_rng(2)
    adapter = tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), adapter)
    return model._replace(adapter=adapter, settings=Settings(model.config, spec))


def recomputed(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the logits of the whole text before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(surogate.logits(model, [tokens])[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_recomputation(tmp_path, family, adapted):
    _, model = both(family, tmp_path)
    plain = model
    if adapted:
        model = with_adapter(model)
    got = sample(model, PROMPTS, max_new_tokens=10, stop=frozenset(), **GREEDY)
    assert got == [recomputed(model, prompt, 10) for prompt in PROMPTS]
    assert len({tuple(text) for text in got}) == len(PROMPTS)
    if adapted:
        assert got != sample(plain, PROMPTS, max_new_tokens=10, stop=frozenset(), **GREEDY)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(tmp_path, family):
    reference, model = both(family, tmp_path)
    got = sample(model, PROMPTS, max_new_tokens=10, stop=frozenset({2}), **GREEDY)
    for prompt, text in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10
            )
        want = whole[0, len(prompt) :].tolist()
        assert text == (want[: want.index(2)] if 2 in want else want)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_window"])
def test_logits_with_the_cache_equal_those_of_the_whole_text(tmp_path, family):
    """Prompts of different lengths in one pass, then four given tokens each."""
    _, model = both(family, tmp_path)
    model = with_adapter(model, ["q_proj", "v_proj", "gate_proj"])
    more = np.array(documents(4, 4, 4, 4, seed=8), np.int32)
    lengths = np.array([len(p) for p in PROMPTS], np.int32)
    common: dict[str, Any] = dict(
        table=dense.rotary_table(model.config, 18), settings=model.settings
    )
    cache = new_cache(model.settings, seqs=4, max_len=18, like=model.params.embed)
    tokens = np.concatenate(PROMPTS).astype(np.int32)
    got = [
        prefill(model.params, model.adapter, batch_of(tokens, lengths.tolist()), cache, **common)
    ]
    for step in range(4):
        got.append(
            decode(
                model.params,
                model.adapter,
                more[:, step].copy(),
                lengths + np.int32(step),
                cache,
                **common,
            )
        )
    for index, prompt in enumerate(PROMPTS):
        text = [*prompt, *more[index].tolist()]
        want = surogate.logits(model, [text])[len(prompt) - 1 :]
        close(np.stack([scores[index] for scores in got]), want, "float32", terms=64, roundings=16)


def test_new_memory_of_a_cache_is_never_read(tmp_path):
    """Positions that no token was written to may hold anything."""
    _, model = both("llama", tmp_path)
    common: dict[str, Any] = dict(
        table=dense.rotary_table(model.config, 12), settings=model.settings
    )
    found = []
    for filler in (0.0, np.nan):
        cache = new_cache(model.settings, seqs=2, max_len=12, like=model.params.embed)
        for array in tree.leaves(cache):
            array.fill(filler)
        tokens = np.array([3, 4, 5, 6, 7], np.int32)
        prefill(model.params, None, batch_of(tokens, [2, 3]), cache, **common)
        lengths = np.array([2, 3], np.int32)
        found.append(
            decode(model.params, None, np.array([8, 9], np.int32), lengths, cache, **common)
        )
    assert found[0].tobytes() == found[1].tobytes()


def test_stops_at_a_stop_token_and_leaves_it_out(tmp_path):
    _, model = both("qwen3", tmp_path)
    plain = sample(model, PROMPTS, max_new_tokens=8, stop=frozenset(), **GREEDY)
    stop = plain[1][2]
    got = sample(model, PROMPTS, max_new_tokens=8, stop=frozenset({stop}), **GREEDY)
    for text, whole in zip(got, plain, strict=True):
        assert text == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(got[1]) <= 2
    every = frozenset(range(128))
    assert sample(model, PROMPTS, max_new_tokens=8, stop=every, **GREEDY) == [[], [], [], []]
    assert [
        len(t) for t in sample(model, PROMPTS, max_new_tokens=1, stop=frozenset(), **GREEDY)
    ] == [1] * 4


def test_seeds_and_neighbours(tmp_path):
    """The same seed, the same text, whatever prompts come after it; other seeds, others."""
    _, model = both("llama_tied", tmp_path)
    warm: dict[str, Any] = dict(max_new_tokens=8, temperature=1.0, top_p=0.95, stop=frozenset())
    first = sample(model, PROMPTS, seed=1, **warm)
    assert sample(model, PROMPTS, seed=1, **warm) == first
    assert sample(model, PROMPTS[:2], seed=1, **warm) == first[:2]
    assert sample(model, PROMPTS, seed=2, **warm) != first
    twins = sample(model, [PROMPTS[0]] * 4, seed=1, **warm)
    assert len({tuple(text) for text in twins}) > 1  # equal prompts differ by their place


SCORES = np.array([2.0, 1.0, 0.0, -1.0, 3.0, -4.0], np.float32)
DRAWS = 4000


def frequencies(temperature: float, top_p: float) -> np.ndarray:
    drawn = [
        choose(SCORES, temperature=temperature, top_p=top_p, key=(0, 0, i)) for i in range(DRAWS)
    ]
    return np.bincount(drawn, minlength=len(SCORES)) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_frequencies(temperature, top_p):
    """Within five standard deviations of the softmax over the smallest set that holds top_p."""
    p = np.exp(SCORES.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    size = 1
    while p[order[:size]].sum() < top_p and size < len(p):
        size += 1
    want = np.zeros_like(p)
    want[order[:size]] = p[order[:size]] / p[order[:size]].sum()
    got = frequencies(temperature, top_p)
    assert (got[want == 0] == 0).all()
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / DRAWS) + 1e-12).all()


def test_limits_of_choice():
    assert choose(SCORES, temperature=0.0, top_p=1.0, key=(1,)) == 4
    ties = np.array([1.0, 5.0, 5.0], np.float32)
    assert choose(ties, temperature=0.0, top_p=1.0, key=(1,)) == 1  # the first of equals
    huge = np.array([1e4, 3e4, -3e4], np.float32)  # no overflow
    assert choose(huge, temperature=0.1, top_p=0.999, key=(1,)) == 1
    assert {choose(SCORES, temperature=9.0, top_p=1e-9, key=(i,)) for i in range(50)} == {4}


def test_generate_from_the_command_line(tmp_path: Path):
    from click.testing import CliRunner

    from surogate.cli import main
    from tests.surogate.runs import make_model

    folder = make_model(tmp_path / "m")
    words = ["generate", str(folder), "--device", "cpu", "--temperature", "0", "--raw"]
    options = ["--prompt", "the cat sees", "--max-new-tokens", "6"]
    first = CliRunner().invoke(main, [*words, *options])
    assert first.exit_code == 0, first.output
    loaded = surogate.load(folder, device="cpu")
    ask: dict[str, Any] = dict(max_new_tokens=6, temperature=0.0)
    [raw] = surogate.generate(loaded, ["the cat sees"], chat=False, **ask)
    [chat] = surogate.generate(loaded, ["the cat sees"], **ask)
    assert first.stdout == raw + "\n" and chat != raw
    piped = CliRunner().invoke(main, [*words, *options[2:]], input="the cat sees\n")
    assert piped.stdout == first.stdout
