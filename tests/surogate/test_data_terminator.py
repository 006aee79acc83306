"""Which token the rows of a run teach to end an answer."""

import pytest

from surogate.config import DatasetConfig
from surogate.data.dataset import prepare
from surogate.data.terminator import trained_terminator
from surogate.data.vocabulary import load_tokenizer
from tests.surogate.inputs.tiny import (
    ENDLESS_CHAT,
    OPENED_CHAT,
    PLAIN_CHAT,
    SPECIAL,
    THINKING_CHAT,
    TWO_ENDS_CHAT,
    chat,
    jsonl,
    model_folder,
)

CHATS = [{"messages": chat("What is the capital of France?", "Paris.")}] * 3
WORDS_CHAT = PLAIN_CHAT.replace("<|stop|>", " over. ")  # ends an answer with words
MARKED_CHAT = PLAIN_CHAT.replace("<|stop|>", " over. <|stop|><|end|>")
STERN_CHAT = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN_CHAT
)


def terminator(folder, template, rows, **settings):
    """The token's text."""
    vocabulary = load_tokenizer(model_folder(folder / "model", template))
    path = jsonl(folder / "rows.jsonl", rows)
    packed = prepare(
        [DatasetConfig(path=path, type="auto")],
        vocabulary,
        sequence_len=64,
        vocab_size=400,
        cache_dir=folder / "cache",
        **settings,
    )
    found = trained_terminator(vocabulary, packed)
    return None if found is None else vocabulary.tokenizer.id_to_token(found)


@pytest.mark.parametrize(
    "template,token",
    [
        (PLAIN_CHAT, "<|stop|>"),
        (THINKING_CHAT, "<|stop|>"),
        (OPENED_CHAT, "<|stop|>"),
        (TWO_ENDS_CHAT, "<|end|>"),
        (ENDLESS_CHAT, "<|end|>"),  # the tokenizer's eos_token, which is put there
        (MARKED_CHAT, "<|stop|>"),
        (WORDS_CHAT, None),
    ],
)
def test_conversations(tmp_path, template, token):
    assert token in (*SPECIAL, None)
    assert terminator(tmp_path, template, CHATS) == token


def test_what_is_not_a_target_is_not_taught(tmp_path):
    rows = [{"messages": chat("Q", "<think>\nR\n</think>\n\nA")}]
    assert terminator(tmp_path, THINKING_CHAT, rows, loss_scale="thinking_only") is None
    assert terminator(tmp_path, THINKING_CHAT, rows, loss_scale="final_only") == "<|stop|>"


def test_raw_text_teaches_what_stands_in_it(tmp_path):
    assert terminator(tmp_path, PLAIN_CHAT, [{"text": "The quick brown fox."}]) is None
    written = [{"text": "<|turn|>assistant\nParis.<|stop|>"}]
    assert terminator(tmp_path, PLAIN_CHAT, written) == "<|stop|>"
    assert terminator(tmp_path, None, written) is None


def test_a_template_that_refuses_a_plain_answer(tmp_path):
    rows = [{"messages": [{"role": "system", "content": "S"}, *chat("Q", "A")]}]
    assert terminator(tmp_path, STERN_CHAT, rows) is None
