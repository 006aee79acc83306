"""Words give the ids and masks of the tokenizers library for any text, or leave it to that."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from surogate.data.vocabulary import load_tokenizer
from surogate.data.words import Words, within
from tests.surogate.inputs.tiny import model_folder

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\p{L}\p{N}]+", r"\p{L}\p{M}\p{N}]+")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def split(pattern):
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [part, BYTES]}


KINDS = {
    "gpt2": BYTES | {"use_regex": True},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            BYTES | {"use_regex": True},
        ],
    },
    "qwen": split(QWEN),
    "llama3": split(LLAMA),
    "qwen3.5": split(QWEN_3_5),
    "o200k": split(O200K),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tokenizer and words of each kind."""
    folder = model_folder(tmp_path_factory.mktemp("model"))
    description = json.loads((folder / "tokenizer.json").read_text())
    found = {}
    for name, pre_tokenizer in KINDS.items():
        nfc = {"type": "NFC"} if name.startswith("qwen") else None
        description |= {"pre_tokenizer": pre_tokenizer, "normalizer": nfc}
        tokenizer = Tokenizer.from_str(json.dumps(description))
        words = Words.of(tokenizer, tokenizer.to_str())
        assert words is not None
        found[name] = tokenizer, words
    return found


TEXT = st.lists(
    st.one_of(
        st.text(),
        st.text("aAbZ09 .'\n\r\t-_s", max_size=12),
        st.text("éßſKǅʰ你ا́ं½Ⅷ٣ \u00a0\u2028\u0085\u200b🙂'", max_size=8),
        st.sampled_from(["<|end|>", "<|turn|>", "<think>", "<|en", "'LL", "don't", " quick fox"]),
        st.text(st.characters(codec="utf-8"), max_size=4),
    ),
    max_size=12,
).map("".join)


def check(tokenizer, words, text, cuts):
    borders = sorted({min(cut, len(text)) for cut in cuts})
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    found = words.encode(text, spans)
    if found is None:
        return False
    assert found.ids.tolist() == encoding.ids
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    assert found.inside.tolist() == within(*offsets.T, spans).tolist()
    return True


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None)
@given(text=TEXT, cuts=st.lists(st.integers(0, 60), max_size=6))
@example(text="'ſ x'ſy", cuts=[1, 3])
@example(text="e\u0301<|end|>A", cuts=[1, 2])
@example(text="\x01\x02 a", cuts=[])
@example(text="a \u0085b", cuts=[])
@example(text="", cuts=[0])
def test_ids_and_masks_are_the_librarys(made, name, text, cuts):
    check(*made[name], text, cuts)


@pytest.mark.parametrize("name", KINDS)
def test_plain_text_is_not_left_to_the_library(made, name):
    for text in ("It's 12 o'clock.\n\n  Grüße, 你好！", "def f(x):\n\treturn x[0]", "naïve Ünder"):
        assert check(*made[name], text, [2, 7, 9, 12])


def test_text_that_only_the_library_knows(made):
    _, words = made["qwen"]
    for text in ("e\u0301", "\x01", "\U000e0fff"):  # not NFC, a stand-in, unassigned
        assert words.encode(text, []) is None


def test_the_table_is_emptied_when_it_is_full(made, monkeypatch):
    monkeypatch.setattr("surogate.data.words._LIMIT", 8)
    tokenizer, _ = made["qwen"]
    words = Words.of(tokenizer, tokenizer.to_str())
    assert words is not None
    for i in range(50):
        assert check(tokenizer, words, f"word{i * 'x'} and <|end|> more{i}", [3, 9])
    assert len(words._table) <= 8


def other(**changes):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        other(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        other(pre_tokenizer=pre_tokenizers.Whitespace()),
        other(normalizer=normalizers.Lowercase()),
        other(model=models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_other_tokenizers_have_no_words(tokenizer):
    assert Words.of(tokenizer, tokenizer.to_str()) is None


@pytest.mark.parametrize(
    "pattern", [r"\p{Han}+|.", r"(?<=a)b", r"[\p{L}&&[^a]]+", r"(a)|b", r"\w+"]
)
def test_expressions_that_are_not_plain_have_no_words(tmp_path, pattern):
    folder = model_folder(tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text())
    description["pre_tokenizer"] = split(pattern)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(folder).tokenizer
    assert Words.of(tokenizer, tokenizer.to_str()) is None
