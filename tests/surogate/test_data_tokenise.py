"""Labels by offsets, special ids by the model's files, faults by row, the same from any worker."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from surogate.config import DatasetConfig
from surogate.data import tokenise as module
from surogate.data.formats import layout_of
from surogate.data.sources import Row
from surogate.data.tokenise import Encoder, batches, tokenise
from surogate.data.vocabulary import load_tokenizer
from surogate.errors import UserError
from tests.surogate.inputs.tiny import ENDLESS_CHAT, PLAIN_CHAT, WORDS, chat, model_folder

CONFIG = DatasetConfig(path="f.jsonl", type="auto")


def _rows(*data):
    return [(i, Row("f.jsonl", i + 1, value)) for i, value in enumerate(data)]


def _encode(folder, *data, loss_scale="default", vocab_size=400):
    vocabulary = load_tokenizer(folder)
    encoder = Encoder(vocabulary, vocab_size=vocab_size, loss_scale=loss_scale, threads=True)
    rows = _rows(*data)
    chunk = encoder.encode(layout_of(CONFIG, rows[0][1]), rows)
    return vocabulary, chunk


def _documents(chunk):
    ends = np.cumsum(chunk.lengths)[:-1]
    pairs = zip(np.split(chunk.tokens, ends), np.split(chunk.supervised, ends), strict=True)
    return list(pairs)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_supervised_tokens_decode_to_the_answer(tmp_path, trim_offsets):
    answers = [" Paris. ", "Grüße 你好 🙂", "\n\nOn its own line"]
    data = [{"messages": chat("What is the capital?", answer, "And?", "!")} for answer in answers]
    folder = model_folder(tmp_path, PLAIN_CHAT, trim_offsets=trim_offsets)
    vocabulary, chunk = _encode(folder, *data)
    for answer, (tokens, mask) in zip(answers, _documents(chunk), strict=True):
        text = vocabulary.tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=False)
        assert text == f"{answer}<|stop|>!<|stop|>"
        bare = vocabulary.tokenizer.encode(answer + "<|stop|>!<|stop|>").ids
        assert len(bare) == mask.sum()


def test_a_token_across_the_border_is_not_a_target(tmp_path):
    # "me" is one token of this vocabulary; the header ends within it.
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'm' if add_generation_prompt }}"
    vocabulary, chunk = _encode(model_folder(tmp_path, source), {"messages": chat("Q\n", "me fox")})
    ((tokens, mask),) = _documents(chunk)
    assert vocabulary.tokenizer.token_to_id("me") in tokens
    text = vocabulary.tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=False)
    assert text == " fox<|end|>"


def test_text_ends_with_a_learned_end_of_sequence(tmp_path):
    vocabulary, chunk = _encode(model_folder(tmp_path), {"text": "one two"}, {"text": "<|end|>"})
    first, second = _documents(chunk)
    assert vocabulary.eos == 0 and first[0][-1] == 0
    assert first[1].all() and second[0].tolist() == [0, 0]
    assert chunk.rows.tolist() == [0, 1]


def test_empty_text_is_an_empty_document(tmp_path):
    _, chunk = _encode(model_folder(tmp_path), {"text": ""}, {"text": "a"})
    assert chunk.lengths.tolist() == [0, 2]


def test_chat_without_terminator_ends_with_the_end_of_sequence(tmp_path):
    vocabulary, chunk = _encode(model_folder(tmp_path, ENDLESS_CHAT), {"messages": chat("Q", "A")})
    ((tokens, mask),) = _documents(chunk)
    assert tokens[-1] == vocabulary.eos and mask[-1]
    assert vocabulary.tokenizer.decode(tokens[mask].tolist()[:-1]) == "A\n"


def test_begin_of_sequence_stands_before_text_only(tmp_path):
    folder = model_folder(tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text())
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|turn|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<|turn|>": {"id": "<|turn|>", "ids": [1], "tokens": ["<|turn|>"]}},
    }
    description["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(description))
    vocabulary, chunk = _encode(folder, {"text": "quick brown fox jumps"})
    assert vocabulary.prefix == (1,) and chunk.tokens[0] == 1
    assert vocabulary.tokenizer.decode(chunk.tokens.tolist()) == "quick brown fox jumps"
    _, chunk = _encode(folder, {"messages": chat("Q", "A")})
    assert chunk.tokens.tolist().count(1) == 2  # the template's own headers


def test_eos_comes_from_the_first_file_that_names_it(tmp_path):
    folder = model_folder(tmp_path, eos=None)
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    assert load_tokenizer(folder).eos_ids == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert load_tokenizer(folder).eos_ids == (2, 3)
    settings = {"eos_token": {"content": "<|turn|>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = load_tokenizer(folder)
    assert vocabulary.eos_ids == (1, 2, 3) and vocabulary.eos == 1
    assert vocabulary.special_tokens == {"eos_token": "<|turn|>"}


def test_template_files_in_their_order(tmp_path):
    named = [{"name": "default", "template": "C"}, {"name": "tool_use", "template": "T"}]
    folder = model_folder(tmp_path, named)
    assert load_tokenizer(folder).template.sources == {"default": "C", "tool_use": "T"}
    (folder / "chat_template.json").write_text('{"chat_template": "B"}')
    assert load_tokenizer(folder).template.sources == {"default": "B"}
    (folder / "chat_template.jinja").write_text("A")
    assert load_tokenizer(folder).template.sources == {"default": "A"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    assert load_tokenizer(folder).template.sources == {"default": "A", "tool_use": "U"}
    assert load_tokenizer(model_folder(tmp_path / "base", None)).template is None


def test_faults_of_the_model_folder(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json: no such file"):
        load_tokenizer(tmp_path)
    folder = model_folder(tmp_path, eos="<|nope|>")
    with pytest.raises(UserError, match="eos_token '<|nope|>' is not in tokenizer.json"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(UserError, match="chat_template must be a text or a list"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json: invalid JSON"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(folder)


def test_faults_of_rows(tmp_path):
    with pytest.raises(UserError, match=r"f.jsonl row 2: token id \d+ is not below the model's"):
        _encode(model_folder(tmp_path), {"text": "a"}, {"text": "Ü你"}, vocab_size=100)
    with pytest.raises(UserError, match="f.jsonl row 1: a conversation needs a chat template"):
        _encode(model_folder(tmp_path, None), {"messages": chat("Q", "A")})
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        _encode(model_folder(tmp_path, eos=None), {"text": "a"})
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        _encode(model_folder(tmp_path, ENDLESS_CHAT, eos=None), {"messages": chat("Q", "A")})


def test_id_equal_to_the_last_row_of_the_embedding_is_accepted(tmp_path):
    vocabulary, chunk = _encode(model_folder(tmp_path), {"text": "abc"})
    _encode(tmp_path, {"text": "abc"}, vocab_size=int(chunk.tokens.max()) + 1)
    with pytest.raises(UserError, match="is not below"):
        _encode(tmp_path, {"text": "abc"}, vocab_size=int(chunk.tokens.max()))


def test_long_text_in_pieces_has_the_same_tokens(tmp_path, monkeypatch):
    text = "\n".join(f"Line {i}, therefore  {'quick ' * (i % 7)}\n\n fox" for i in range(200))
    folder = model_folder(tmp_path)
    _, whole = _encode(folder, {"text": text})
    monkeypatch.setattr(module, "_PIECE", 100)
    vocabulary, pieces = _encode(folder, {"text": text}, {"text": "short"})
    assert len(list(module._pieces(text, vocabulary.tokenizer))) > 50
    assert np.array_equal(whole.tokens, pieces.tokens[: len(whole.tokens)])
    assert pieces.lengths[1] == len(vocabulary.tokenizer.encode("short").ids) + 1


def test_batches_are_bounded_by_rows_and_by_text():
    short = [(i, Row("f", i, {"text": "x"})) for i in range(1300)]
    assert [len(batch) for batch in batches(short)] == [512, 512, 276]
    long = [(i, Row("f", i, {"messages": [{"content": "x" * 600_000}]})) for i in range(5)]
    assert [len(batch) for batch in batches(long)] == [2, 2, 1]
    lengths = range(0, 100_000, 100)  # sorted: no batch has all the long ones
    growing = [(i, Row("f", i, {"text": "x" * length})) for i, length in enumerate(lengths)]
    found = list(batches(growing))
    assert [item for batch in found for item in batch] == growing
    sizes = [sum(len(row.data["text"]) for _, row in batch) for batch in found]
    assert max(sizes) < (1 << 20) + lengths[-1] and min(sizes[1:-1]) >= 1 << 20


@pytest.mark.parametrize("threads", [False, True])
def test_the_last_of_sorted_rows_are_tokenised_as_fast_as_the_first(tmp_path, threads):
    """Tokens a second of CPU time: chats of 2 turns at the begin, of 80 at the end."""
    turns = sorted(2 * (1 + i % 40) for i in range(400))
    data = [{"messages": chat(*[" ".join(WORDS)] * count)} for count in turns]
    rows = [(i, Row("f.jsonl", i + 1, value)) for i, value in enumerate(data)]
    layout, vocabulary = layout_of(CONFIG, rows[0][1]), load_tokenizer(model_folder(tmp_path))
    encoder = Encoder(vocabulary, vocab_size=400, loss_scale="default", threads=threads)

    def rate(tenth):
        begin = time.process_time()
        chunk = encoder.encode(layout, rows[40 * tenth :][:40])
        return len(chunk.tokens) / (time.process_time() - begin)

    rate(0)  # opens what is opened once
    assert rate(9) >= 0.7 * rate(0)


def _jobs(count, broken=None):
    for i in range(count):
        data = {"messages": chat(f"Q{i}", f"A{i}")} if i != broken else {"messages": []}
        row = (i, Row("f.jsonl", i + 1, data))
        first = Row("f.jsonl", 1, {"messages": chat("Q", "A")})
        yield layout_of(CONFIG, first), [row]


def test_workers_give_the_same_in_order_and_pass_faults_on(tmp_path):
    vocabulary = load_tokenizer(model_folder(tmp_path))
    settings = {"vocab_size": 400, "loss_scale": "default"}
    alone = list(tokenise(vocabulary, _jobs(9), workers=1, **settings))
    shared = list(tokenise(vocabulary, _jobs(9), workers=2, **settings))
    for one, other in zip(alone, shared, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a, b)
    with pytest.raises(UserError, match="f.jsonl row 8: column 'messages' has no messages"):
        list(tokenise(vocabulary, _jobs(9, broken=7), workers=2, **settings))


def wait_for_work(folder):
    """Of a process of its own: two workers that wait, whose ids it prints."""
    settings = {"vocab_size": 400, "loss_scale": "default", "workers": 2}
    chunks = tokenise(load_tokenizer(folder), _jobs(99), **settings)
    next(chunks)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    time.sleep(60)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_do_not_outlive_a_run_that_was_killed(tmp_path):
    code = f"from {__name__} import wait_for_work as w; w({str(model_folder(tmp_path))!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        workers = run.stdout.readline().split()
        run.kill()

    def living(worker):
        stat = Path("/proc", worker, "stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    assert len(workers) == 2
    end = time.monotonic() + 20
    while any(map(living, workers)):
        assert time.monotonic() < end, "a worker is left"
        time.sleep(0.05)
