"""From files to packed rows: targets, counts, the cache, and the division for evaluation."""

import threading

import numpy as np
import pytest

from surogate.config import DatasetConfig, load_config
from surogate.data import dataset as module
from surogate.data.dataset import load_data, prepare, prepare_split
from surogate.data.vocabulary import load_tokenizer
from surogate.errors import UserError
from tests.surogate.inputs.tiny import PLAIN_CHAT, THINKING_CHAT, chat, jsonl, model_folder


@pytest.fixture
def world(tmp_path):
    """Builds with one call; .built counts the builds that were not found in the cache."""
    return World(tmp_path)


class World:
    def __init__(self, folder):
        self.folder = folder
        self.model = model_folder(folder / "model")

    def configs(self, rows, **settings):
        path = jsonl(self.folder / "rows.jsonl", rows)
        return [DatasetConfig(path=path, **{"type": "auto", **settings})]

    def split(self, rows, *, dataset=None, **settings):
        return prepare_split(
            self.configs(rows, **(dataset or {})),
            load_tokenizer(self.model),
            **{
                "sequence_len": 32,
                "vocab_size": 400,
                "cache_dir": self.folder / "cache",
                **settings,
            },
        )

    def prepare(self, rows, **settings):
        return self.split(rows, **settings)[0]

    def text(self, ids):
        kept = [int(i) for i in ids if i >= 0]
        tokenizer = load_tokenizer(self.model).tokenizer
        return tokenizer.decode(kept, skip_special_tokens=False)


def _documents(packed):
    for index in range(packed.rows):
        tokens, labels, lengths = packed.row(index)
        assert lengths.sum() == packed.sequence_len == len(tokens)
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            yield tokens[end - length : end], labels[end - length : end]


CHATS = [{"messages": chat(f"Q{i}", "Paris " * (i % 4 + 1))} for i in range(20)]
TEXTS = [{"text": "The quick brown fox. " * (i % 5 + 1)} for i in range(20)]


def test_chats_are_packed_whole_with_shifted_labels(world):
    packed = world.prepare(CHATS, sequence_len=96)
    assert packed.report.packing == "fit"
    answers = []
    for tokens, labels in _documents(packed):
        assert labels[-1] == -100
        inside = labels[:-1] != -100
        assert (labels[:-1][inside] == tokens[1:][inside]).all()
        if inside.any():
            answers.append(world.text(labels))
    assert sorted(answers) == sorted(f"{c['messages'][1]['content']}<|stop|>" for c in CHATS)
    report = packed.report
    assert report.documents == 20 and report.truncated == report.unsupervised == 0
    assert report.supervised == packed.supervised == (packed.labels != -100).sum()
    assert report.tokens == sum(len(t) for t, _ in _documents(packed) if t.any())
    assert packed.fill == report.tokens / (packed.rows * 96) > 0.8


def test_exactly_one_end_is_learned_per_row_though_it_is_the_padding_token(world):
    # eos and pad are id 0 here, and so is the padding of rows: labels come from lengths alone.
    packed = world.prepare(TEXTS, packing="single", sequence_len=64)
    assert load_tokenizer(world.model).eos == 0
    assert packed.rows == 20
    assert [(packed.row(i)[1] == 0).sum() for i in range(20)] == [1] * 20


def test_text_is_split_and_every_token_kept(world):
    packed = world.prepare(TEXTS)
    assert packed.report.packing == "split"
    tokens = np.concatenate([t for t, _ in _documents(packed)])
    assert world.text(tokens[: packed.report.tokens]) == "".join(
        row["text"] + "<|end|>" for row in TEXTS
    )
    assert packed.supervised == packed.report.tokens - 20
    assert packed.rows == -(-packed.report.tokens // 32)


def test_counts_what_is_truncated_and_left_out(world):
    rows = [
        {"messages": chat("Q", "word " * 200)},  # truncated, part of the answer stays
        {"messages": chat("word " * 200, "A")},  # truncated before the answer: left out
        {"messages": chat("Q")},  # no answer: left out
        {"messages": chat("Q", "A")},
    ]
    report = world.prepare(rows).report
    assert (report.documents, report.truncated, report.unsupervised) == (2, 1, 2)


def test_rows_about_the_limit(world):
    """A row shorter than the limit by one token, one of its length, and one whose terminator does
    not fit: none is invented in its place. A prompt that fills the row is left out and counted.
    """
    rows = [{"messages": chat("Q", "Paris " * 9)}]
    ((tokens, _),) = [d for d in _documents(world.prepare(rows, sequence_len=96)) if d[0].any()]
    stop = load_tokenizer(world.model).tokenizer.token_to_id("<|stop|>")
    whole, before = len(tokens), int(np.flatnonzero(tokens == stop)[-1])
    for limit, cut in ((whole + 1, 0), (whole, 0), (before, 1)):
        packed = world.prepare(rows, sequence_len=limit)
        assert packed.report.truncated == cut and packed.tokens.shape == (1, limit)
        assert (packed.labels == stop).sum() == 1 - cut
    long = {"messages": chat("Q " * 40, "A")}
    report = world.prepare([*rows, long], sequence_len=before).report
    assert (report.documents, report.truncated, report.unsupervised) == (1, 1, 1)


def test_empty_texts_are_left_out(world):
    report = world.prepare([{"text": ""}, *TEXTS, {"text": ""}]).report
    assert (report.documents, report.unsupervised) == (20, 2)


@pytest.mark.parametrize("rows", [[{"messages": chat("Q")}], [{"text": ""}]])
def test_nothing_to_learn_is_an_error(world, rows):
    with pytest.raises(UserError, match="rows.jsonl: no token is a target in any of 1 documents"):
        world.prepare(rows)
    assert not [path for path in (world.folder / "cache").iterdir() if path.is_dir()]


def test_rows_of_another_shape_are_skipped_where_they_may_be_and_counted(world):
    settings = {"malformed": "skip", "type": "conversation"}
    bad = [{"messages": []}, {"text": "a"}, {"messages": []}, {"messages": [{"role": "user"}]}]
    reasons = {"no messages": 2, "no column 'messages'": 1, "a message without 'content'": 1}
    report = world.prepare([*CHATS, *bad], dataset=settings).report
    assert report.documents == 20 and report.shares[0].skipped == reasons
    with pytest.raises(UserError, match="rows.jsonl: every row was skipped: 2 x no messages, 1 x "):
        world.prepare(bad, dataset=settings)


def test_faults_leave_nothing_behind_and_name_the_row(world):
    with pytest.raises(UserError, match="rows.jsonl row 21: column 'messages' has no messages"):
        world.prepare([*CHATS, {"messages": []}])
    assert not [path for path in (world.folder / "cache").iterdir() if path.is_dir()]


def test_second_run_tokenises_nothing(world, monkeypatch):
    first = world.prepare(CHATS)
    assert not first.reused

    def refuse(*_args, **_settings):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(module, "tokenise", refuse)
    again = world.prepare(CHATS)
    assert again.reused and again.report == first.report
    for a, b in zip(first[:4], again[:4], strict=True):
        assert np.array_equal(a, b)
    assert isinstance(again.tokens, np.memmap)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_len": 40},
        {"packing": "single"},
        {"loss_scale": "all"},
        {"vocab_size": 500},
        {"ratio": 0.2},
        {"dataset": {"samples": 5}},
        {"dataset": {"type": "conversation", "system_field": None}},
    ],
)
def test_every_setting_makes_other_rows(world, change):
    world.prepare(CHATS)
    assert not world.prepare(CHATS, **change).reused
    assert world.prepare(CHATS, **change).reused
    assert world.prepare(CHATS).reused


def test_edited_row_tokenizer_and_template_make_other_rows(world):
    world.prepare(CHATS)
    assert not world.prepare([*CHATS[:-1], {"messages": chat("Q", "other")}]).reused
    model_folder(world.model, PLAIN_CHAT.replace("<|turn|>", "## "))
    assert not world.prepare(CHATS).reused
    model_folder(world.model, PLAIN_CHAT, eos="<|stop|>")
    assert not world.prepare(CHATS).reused
    model_folder(world.model, PLAIN_CHAT, trim_offsets=True)  # tokenizer.json alone
    assert not world.prepare(CHATS).reused
    model_folder(world.model, PLAIN_CHAT)
    assert world.prepare(CHATS).reused


class Killed(BaseException):
    """Ends a build as a signal would."""


def _killed_after(count, monkeypatch):
    """tokenise ends the build behind its first `count` batches; returns the batches it is given."""
    given, real = [], module.tokenise

    def tokenise(vocabulary, jobs, **settings):
        def noted():
            for job in jobs:
                given.append(job)
                yield job

        for done, chunk in enumerate(real(vocabulary, noted(), **settings)):
            if done == count:
                raise Killed
            yield chunk

    monkeypatch.setattr(module, "tokenise", tokenise)
    return given


@pytest.mark.parametrize("spoilt", ["", "tokens.bin", "rows.bin", "journal.jsonl"])
def test_a_killed_build_goes_on_where_it_stopped(world, monkeypatch, spoilt):
    monkeypatch.setattr("surogate.data.tokenise._BATCH_ROWS", 2)
    bad = {"messages": []}
    rows = [*CHATS[:7], bad, *CHATS[7:]]
    whole = world.split(rows, dataset={"malformed": "skip"}, cache_dir=world.folder / "other")[0]
    _killed_after(6, monkeypatch)
    with pytest.raises(Killed):
        world.split(rows, dataset={"malformed": "skip"})
    (part,) = (world.folder / "cache").glob("*.part")
    if spoilt:  # the last batch did not reach the disk whole
        (part / spoilt).write_bytes((part / spoilt).read_bytes()[:-3])
    given = _killed_after(100, monkeypatch)
    packed = world.split(rows, dataset={"malformed": "skip"})[0]
    assert len(given) == 11 - 6 + bool(spoilt)
    assert packed.report == whole.report and not packed.reused
    assert packed.report.shares[0].skipped == {"no messages": 1}
    for a, b in zip(packed[:4], whole[:4], strict=True):
        assert np.array_equal(a, b)
    folders = [path for path in (world.folder / "cache").iterdir() if path.is_dir()]
    assert [sorted(p.name for p in folder.iterdir()) for folder in folders] == [["train"]]


def test_two_builders_share_one_build(world, monkeypatch):
    results = []
    configs = world.configs(CHATS)
    # The rows are written once: a builder must not meet a file that another is writing.
    monkeypatch.setattr(world, "configs", lambda rows, **settings: configs)
    threads = [
        threading.Thread(target=lambda: results.append(world.prepare(CHATS))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(packed.reused for packed in results) == [False, True, True]


def _answers(world, packed):
    return [world.text(labels) for _, labels in _documents(packed) if (labels != -100).any()]


def test_evaluation_takes_whole_rows_of_the_data(world):
    # Two documents a row: the earlier turn's reasoning makes one of its own.
    world.model = model_folder(world.folder / "thinking", THINKING_CHAT)
    rows = [{"messages": chat("Q", f"<think>x</think>{i}a", "Q", f"{i}b")} for i in range(10, 30)]
    train, evaluation = world.split(rows, ratio=0.1, sequence_len=64)
    parts = [{a.split("<|stop|>")[0][-3:] for a in _answers(world, p)} for p in (train, evaluation)]
    assert len(parts[0]) == 36 and len(parts[1]) == 4
    assert not {a[:2] for a in parts[0]} & {a[:2] for a in parts[1]}
    other = world.split(rows, ratio=0.1, sequence_len=64, seed=5)[1]
    assert _answers(world, other) != _answers(world, evaluation)


def test_evaluation_of_one_document_takes_its_last_rows(world):
    rows = [{"text": "The quick brown fox jumps over the lazy dog. " * 60}]
    whole = world.prepare(rows)
    train, evaluation = world.split(rows, ratio=0.1)
    assert evaluation.rows == round(0.1 * whole.rows)
    joined = np.concatenate([train.tokens, evaluation.tokens])
    assert np.array_equal(joined, whole.tokens)
    assert train.report.tokens + evaluation.report.tokens == whole.report.tokens


def test_too_little_for_an_evaluation(world):
    assert world.split([{"text": "a b"}], ratio=0.5)[1] is None
    assert world.split(TEXTS, ratio=0.0)[1] is None
    train, evaluation = world.split(TEXTS[:2], ratio=0.9)
    assert train.report.documents == evaluation.report.documents == 1


def test_several_data_sets_and_progress(world):
    seen = []
    configs = [
        *world.configs(CHATS),
        DatasetConfig(path=jsonl(world.folder / "text.jsonl", TEXTS), type="text", samples=3),
    ]
    packed = prepare(
        configs,
        load_tokenizer(world.model),
        sequence_len=128,
        vocab_size=400,
        cache_dir=world.folder / "cache",
        progress=lambda documents, tokens: seen.append((documents, tokens)),
    )
    assert packed.report.documents == 23 and packed.report.packing == "fit"
    assert seen[-1] == (23, packed.report.tokens)


def test_load_data_reads_the_run_settings(world):
    rows = jsonl(world.folder / "rows.jsonl", CHATS)
    other = jsonl(world.folder / "other.jsonl", CHATS[:5])
    file = world.folder / "run.yaml"
    file.write_text(
        f"model: {world.model}\nsequence_len: 64\ndataloader_num_workers: 1\n"
        f"datasets: [{{path: {rows}, type: conversation}}]\n"
    )

    def load(*overrides):
        config = load_config(file, overrides=overrides)
        return load_data(config, world.model, None, 400, world.folder / "cache")

    train, evaluation = load()
    assert (train.report.documents, evaluation.report.documents) == (18, 2)
    assert train.sequence_len == 64 and train.report.packing == "fit"
    assert load("validation_split_ratio=0")[1] is None
    train, _ = load("sample_packing=false", "loss_scale=all")
    assert train.report.packing == "single" and train.supervised == train.report.tokens - 18
    train, evaluation = load(f"validation_datasets=[{{path: {other}, type: auto}}]")
    assert (train.report.documents, evaluation.report.documents) == (20, 5)
