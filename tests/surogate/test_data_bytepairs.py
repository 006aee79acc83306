"""Byte pairs have the ids and masks of the tokenizers library for any text, or leave it to that."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from surogate.data.bytepairs import BytePairs, within
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
    """Tokenizer and pairs of each kind."""
    folder = model_folder(tmp_path_factory.mktemp("model"))
    description = json.loads((folder / "tokenizer.json").read_text())
    found = {}
    for name, pre_tokenizer in KINDS.items():
        nfc = {"type": "NFC"} if name.startswith("qwen") else None
        description |= {"pre_tokenizer": pre_tokenizer, "normalizer": nfc}
        tokenizer = Tokenizer.from_str(json.dumps(description))
        pairs = BytePairs.of(tokenizer)
        assert pairs is not None
        found[name] = tokenizer, pairs
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


def check(tokenizer, pairs, text, cuts):
    borders = sorted({min(cut, len(text)) for cut in cuts})
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    before, found, after = pairs.encode([("é🙂", [(1, 2)]), (text, spans), ("ab", [(0, 2)])])
    assert before.inside[-1] and after.inside.all()
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
@example(text="a \u0085b", cuts=[])
@example(text="", cuts=[0])
def test_ids_and_masks_are_the_librarys(made, name, text, cuts):
    check(*made[name], text, cuts)


@pytest.mark.parametrize("name", KINDS)
def test_plain_text_is_not_left_to_the_library(made, name):
    for text in ("It's 12 o'clock.\n\n  Grüße, 你好！", "def f(x):\n\treturn x[0]", "naïve Ünder"):
        assert check(*made[name], text, [2, 7, 9, 12])


def test_text_that_only_the_library_knows(made):
    _, pairs = made["qwen"]
    for text in ("e\u0301", "\ud800", "\U000e0fff"):  # not NFC, half a character, unassigned
        (found,) = pairs.encode([(text, [])])
        assert found is None


def test_a_character_that_the_two_cut_differently_is_left_to_the_library(made, monkeypatch):
    tokenizer, _ = made["llama3"]
    pairs = BytePairs.of(tokenizer)
    agrees = BytePairs._agrees
    monkeypatch.setattr(BytePairs, "_agrees", lambda *a: "ß" not in a[1] and agrees(*a))
    weiss, weise = pairs.encode([("weiß", []), ("weise", [])])
    assert weiss is None and weise.ids.tolist() == tokenizer.encode("weise").ids


def test_tokens_that_are_not_the_bytes_of_the_text_are_left_to_the_library(tmp_path):
    """A token whose name in the vocabulary is one byte and as an added token two."""
    folder = model_folder(tmp_path)
    description = json.loads((folder / "tokenizer.json").read_text())
    token = {"id": description["model"]["vocab"]["é"], "content": "é", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    description["added_tokens"].append(token | flags)
    tokenizer = Tokenizer.from_str(json.dumps(description))
    pairs = BytePairs.of(tokenizer)
    byte, added = pairs.encode([("驪", []), ("é", [])])
    assert byte is None and added.ids.tolist() == tokenizer.encode("é").ids


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
def test_other_tokenizers_have_no_pairs(tokenizer):
    assert BytePairs.of(tokenizer) is None


@pytest.mark.parametrize("seed", range(4))
def test_merges_of_any_order_and_words_that_are_tokens_of_their_own(tmp_path, seed):
    """The two merge alike whatever the table, also where no training would give that table."""
    generator = np.random.default_rng(seed)
    description = json.loads((model_folder(tmp_path) / "tokenizer.json").read_text())
    model = description["model"]
    kept = generator.permutation(len(model["merges"]))[seed * 20 :]
    model["merges"] = [model["merges"][i] for i in kept]
    model["ignore_merges"] = bool(seed % 2)
    tokenizer = Tokenizer.from_str(json.dumps(description))
    pairs = BytePairs.of(tokenizer)
    pieces = sorted(model["vocab"], key=len)[-60:]
    for _ in range(200):
        text = "".join(generator.choice(pieces, 6)).replace("Ġ", " ")
        assert check(tokenizer, pairs, text, generator.integers(0, len(text), 4).tolist())


def test_a_part_that_fastokens_does_not_have(tmp_path):
    description = json.loads((model_folder(tmp_path) / "tokenizer.json").read_text())
    parts = [{"type": "Punctuation", "behavior": "Isolated"}, BYTES]
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    assert BytePairs.of(Tokenizer.from_str(json.dumps(description))) is None
