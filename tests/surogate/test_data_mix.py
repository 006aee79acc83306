"""Shares of tokens are those of the weights, and no row is served before its turn comes again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate.config import DatasetConfig, load_config
from surogate.data.dataset import load_data, prepare_split
from surogate.data.mix import mixed
from surogate.data.vocabulary import load_tokenizer
from surogate.errors import UserError
from tests.surogate.inputs.tiny import chat, jsonl, model_folder


@given(
    sizes=st.lists(st.integers(40, 80), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 9), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_shares_and_turns(sizes, weights, seed):
    rng = np.random.default_rng(seed)
    sources = np.repeat(np.arange(len(sizes)), sizes)
    lengths = rng.integers(1, 20, len(sources))
    weights = weights[: len(sizes)]
    chosen = mixed(lengths, sources, weights, seed=seed)
    assert np.array_equal(chosen, mixed(lengths, sources, weights, seed=seed))
    total = lengths.sum()
    for source, weight in enumerate(weights):
        of_source = chosen[sources[chosen] == source]
        wanted = total * weight / sum(weights)
        assert abs(lengths[of_source].sum() - wanted) <= max(10, 20 if wanted < 20 else 10)
        counts = np.bincount(of_source, minlength=len(sources))[sources == source]
        assert counts.max() - counts.min() <= 1


def test_sets_alternate_in_proportion():
    sources = np.repeat([0, 1], [300, 100])
    chosen = mixed(np.ones(400, np.int64), sources, [3.0, 1.0], seed=1)
    parts = sources[chosen].reshape(10, 40).sum(axis=1)
    assert parts.min() >= 9 and parts.max() <= 11


@pytest.fixture
def sets(tmp_path):
    """Settings of two data sets of different sizes."""
    model = model_folder(tmp_path / "model")
    many = [{"messages": chat(f"Q{i}", "word " * (i % 7 + 1))} for i in range(200)]
    few = [{"messages": chat(f"P{i}", "other " * (i % 5 + 1))} for i in range(30)]
    paths = [jsonl(tmp_path / f"{n}.jsonl", rows) for n, rows in (("many", many), ("few", few))]

    def made(*weights, **settings):
        configs = [
            DatasetConfig(path=path, type="auto", weight=weight)
            for path, weight in zip(paths, weights, strict=True)
        ]
        return prepare_split(
            configs,
            load_tokenizer(model),
            sequence_len=128,
            vocab_size=400,
            cache_dir=tmp_path / "cache",
            **settings,
        )

    made.paths, made.model, made.folder = paths, model, tmp_path
    return made


def test_packed_shares_are_the_weights(sets):
    packed, _ = sets(1.0, 3.0)
    tokens = [share.tokens for share in packed.report.shares]
    assert sum(tokens) == packed.report.tokens
    assert [share.wanted for share in packed.report.shares] == [0.25, 0.75]
    assert tokens[1] / sum(tokens) == pytest.approx(0.75, abs=0.01)
    plain, _ = sets(None, None)
    assert packed.report.tokens == pytest.approx(plain.report.tokens, rel=0.02)
    assert sum(share.documents for share in plain.report.shares) == 230
    counted = [
        (packed.sources_of(row) == source).sum() for row in range(packed.rows) for source in (0, 1)
    ]
    assert [sum(counted[::2]), sum(counted[1::2])] == tokens
    supervised = [share.supervised for share in packed.report.shares]
    assert sum(supervised) == packed.supervised


def test_rows_held_for_evaluation_are_not_mixed(sets):
    """Each once, whatever the weights ask of the training rows."""
    (train, held), (_, plain) = sets(1.0, 3.0, ratio=0.2), sets(None, None, ratio=0.2)
    assert [share.wanted for share in train.report.shares] == [0.25, 0.75]
    assert [share.wanted for share in held.report.shares] == [None, None]
    assert held.report == plain.report and held.report.documents == 46
    assert np.array_equal(held.tokens, plain.tokens)


def test_weights_for_all_or_for_none(sets):
    with pytest.raises(UserError, match=r"few.jsonl: has no weight, but other data sets have"):
        sets(1.0, None)


def test_weight_of_a_set_with_nothing_to_learn(sets):
    jsonl(sets.folder / "few.jsonl", [{"messages": chat("never answered")}])
    with pytest.raises(UserError, match=r"few.jsonl: has a weight, but nothing to learn in it"):
        sets(1.0, 1.0)


def test_validation_data_have_no_weights(sets):
    file = sets.folder / "run.yaml"
    file.write_text(
        f"model: {sets.model}\ndatasets: [{{path: {sets.paths[0]}, type: auto}}]\n"
        f"validation_datasets: [{{path: {sets.paths[1]}, type: auto, weight: 2}}]\n"
    )
    with pytest.raises(UserError, match="weight is for training data"):
        load_data(load_config(file), sets.model, None, 400, sets.folder / "cache")
