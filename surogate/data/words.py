"""Byte-level BPE word by word: the tokenizers library's ids at several times its speed.

A byte-level BPE cuts a text at added tokens, cuts the rest into words by regular expressions, and
merges bytes within a word only. So the ids of a word depend on the word alone, and a table of the
words seen so far (real text repeats its words) replaces most of the work; the library's own model
merges the words that are new.

The library stays the definition. A tokenizer of any other kind has no `Words`. Expressions run in
Python's `re`, fast on ASCII alone, so every other character is replaced by an ASCII one of its kind
while words are cut. A kind is used only after the library has cut the character out of a probe in
the same places; a text with a character that it cuts otherwise, or one that is not NFC where the
tokenizer normalises, goes to the library.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import orjson
from jaxtyping import Bool, Int32, Int64
from tokenizers import Tokenizer

Spans = Sequence[tuple[int, int]]

_LIMIT = 1 << 18  # words in the table; at about 150 bytes each
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SAMPLE = "It's 1234 o'clock,\n\n  don't you'LL think? naïve_CamelCase\tx= {'a':[1]}\r\n   end  "
# What stands for the characters of a Unicode category, and the sets that a category then is.
_STAND_INS = {"Lu": "A", "Ll": "a", "Lt": "\1", "Lm": "\2", "Lo": "\3", "M": "\4", "N": "0"}
_SETS = {
    "L": "A-Za-z\1\2\3",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "\1",
    "Lm": "\2",
    "Lo": "\3",
    "M": "\4",
    "N": "0-9",
    "s": r"\t-\r ",
}
_RESERVED = re.compile("[\1-\4]")
_ESCAPE = re.compile(r"\\p\{(\w+)\}|\\(.)|(\[\^?|\])", re.DOTALL)

# A byte-level BPE writes a byte as a printable character: itself, or one from U+0100 on.
_PRINTED = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_NAMES = {byte: chr(256 + i) for i, byte in enumerate(_HIDDEN)}


class Encoded(NamedTuple):
    """Ids of a text, and which of them lie wholly in one of its spans."""

    ids: Int32[np.ndarray, " tokens"]
    inside: Bool[np.ndarray, " tokens"]


def within(
    begin: Int64[np.ndarray, " pieces"], end: Int64[np.ndarray, " pieces"], spans: Spans
) -> Bool[np.ndarray, " pieces"]:
    """Which pieces of a text lie wholly in one of the ascending, disjoint spans."""
    if not spans:
        return np.zeros(len(begin), np.bool_)
    span_begin, span_end = np.array(spans, np.int64).T
    last = np.searchsorted(span_begin, begin, side="right") - 1
    return (last >= 0) & (begin < span_end[last]) & (end <= span_end[last])


class Words:
    """A byte-level BPE tokenizer with a table of words."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        added: Sequence[dict[str, int]],
        stages: Sequence[re.Pattern[str]],
        *,
        normalises: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._added = added
        self._cuts = [
            re.compile("(" + "|".join(map(re.escape, sorted(t, key=len, reverse=True))) + ")")
            for t in added
        ]
        self._stages = stages
        self._normalises = normalises
        self._kinds: dict[int, str] = {}  # the stand-in of each character met so far
        self._table = _Table(self._merge)

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: str | bytes) -> "Words | None":
        """The table for a tokenizer and its tokenizer.json; None unless it is a byte-level BPE of a
        known form.
        """
        description = orjson.loads(file)
        stages = _stages(description.get("pre_tokenizer"))
        tokens = description.get("added_tokens", [])
        normalizer = description.get("normalizer")
        model = description["model"]
        if (
            stages is None
            or model.get("type") != "BPE"
            or model.get("dropout")
            or model.get("continuing_subword_prefix")
            or model.get("end_of_word_suffix")
            or any(t["single_word"] or t["lstrip"] or t["rstrip"] for t in tokens)
            or not all(t["content"] for t in tokens)
            or normalizer not in (None, {"type": "NFC"})
        ):
            return None
        # The library looks for tokens that are not normalised first, in the text as it is.
        split = [
            {t["content"]: t["id"] for t in tokens if t["normalized"] is n} for n in (False, True)
        ]
        made = cls(tokenizer, [t for t in split if t], stages, normalises=normalizer is not None)
        want = tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
        found = made.encode(_SAMPLE, [])
        return made if found is not None and found.ids.tolist() == want else None

    def encode(self, text: str, spans: Spans) -> Encoded | None:
        """Ids of a text and which are in the ascending, disjoint spans of characters.

        None for a text that only the library can tokenise.
        """
        if not self._understands(text):
            return None
        words: list[str] = []
        ids: list[tuple[int, ...]] = []
        self._append(text, 0, words, ids)
        flat = np.fromiter(chain.from_iterable(ids), np.int32)
        if not spans or not words:
            return Encoded(flat, np.zeros(len(flat), np.bool_))
        return Encoded(flat, self._inside(words, ids, spans))

    def _append(self, text: str, level: int, words: list[str], ids: list[tuple[int, ...]]) -> None:
        """Appends the words of a text and their ids; level counts the kinds of added tokens."""
        if level == len(self._cuts):
            found = self._words(text)
            words += found
            ids += map(self._table.__getitem__, found)
            return
        added = self._added[level]
        for index, piece in enumerate(self._cuts[level].split(text)):
            if index % 2:
                words.append(piece)
                ids.append((added[piece],))
            elif piece:
                self._append(piece, level + 1, words, ids)

    def _words(self, text: str) -> list[str]:
        plain = text if text.isascii() else text.translate(self._kinds)
        words = [plain]
        for stage in self._stages:
            words = [word for piece in words for word in _isolated(stage, piece)]
        if plain is text:
            return words
        ends = list(accumulate(map(len, words)))
        return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _merge(self, word: str) -> tuple[int, ...]:
        return tuple(token.id for token in self._model.tokenize(_bytes_of(word)))

    def _understands(self, text: str) -> bool:
        if _RESERVED.search(text):
            return False
        if text.isascii():
            return True
        if self._normalises and not unicodedata.is_normalized("NFC", text):
            return False
        return all(map(self._learns, set(map(ord, text)) - self._kinds.keys()))

    def _learns(self, code: int) -> bool:
        """Finds the stand-in of a character; False if none is cut as the library cuts it."""
        char = chr(code)
        if code < 128:
            return True
        category = unicodedata.category(char)
        if category in ("Cn", "Cs"):  # a later Unicode may make it a letter
            return False
        kind = _STAND_INS.get(category) or _STAND_INS.get(category[0])
        self._kinds[code] = "\t" if char.isspace() else kind or "."
        probe = f"a{char}a{char}{char} {char}a1{char}1 .{char}. \n{char}\n '{char}'s{char}A{char}b"
        cuts = [end for _, (_, end) in self._tokenizer.pre_tokenizer.pre_tokenize_str(probe)]
        if cuts == list(accumulate(map(len, self._words(probe)))):
            return True
        del self._kinds[code]
        return False

    def _inside(
        self, words: Sequence[str], ids: Sequence[tuple[int, ...]], spans: Spans
    ) -> Bool[np.ndarray, " tokens"]:
        ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
        begins = np.append(0, ends[:-1])
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        mask = np.repeat(within(begins, ends, spans), counts)
        borders = np.unique(np.array(spans, np.int64))
        at = np.minimum(np.searchsorted(ends, borders, side="right"), len(words) - 1)
        starts = np.cumsum(counts) - counts
        for word in np.unique(at[(begins[at] < borders) & (borders < ends[at])]).tolist():
            offsets = begins[word] + np.array(list(self._offsets(words[word])), np.int64)
            begin, end = offsets.T
            mask[starts[word] : starts[word] + counts[word]] = within(begin, end, spans)
        return mask

    def _offsets(self, word: str) -> Iterator[tuple[int, int]]:
        """Begin and end in characters of each token of a word; part of one counts as all of it."""
        if any(word in added for added in self._added):
            yield 0, len(word)
            return
        owner = [i for i, char in enumerate(word) for _ in char.encode()]
        at = 0
        for token in self._model.tokenize(_bytes_of(word)):
            begin, at = at, at + len(token.value)  # a character of it is a byte of the word
            yield owner[begin], owner[at - 1] + 1


class _Table(dict[str, tuple[int, ...]]):
    """Words to ids, filled as they come and emptied when it is full."""

    def __init__(self, make: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _LIMIT:
            self.clear()
        ids = self._make(word)
        if len(word) <= 64:
            self[word] = ids
        return ids


def _bytes_of(word: str) -> str:
    return word.encode().decode("latin-1").translate(_BYTE_NAMES)


def _isolated(pattern: re.Pattern[str], text: str) -> list[str]:
    """The matches and what lies between them, in order; no pattern here has groups."""
    words = pattern.findall(text)
    if sum(map(len, words)) == len(text):
        return words
    words, at = [], 0
    for match in pattern.finditer(text):
        words += [text[at : match.start()], match[0]]
        at = match.end()
    return [word for word in (*words, text[at:]) if word]


def _stages(pre_tokenizer: dict[str, Any] | None) -> list[re.Pattern[str]] | None:
    """The expressions that cut a text into words, one after another; None if not of that kind."""
    parts = [pre_tokenizer or {"type": "none"}]
    if parts[0]["type"] == "Sequence":
        parts = parts[0]["pretokenizers"]
    *splits, last = parts
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    sources: list[str | None] = []
    for part in splits:
        if part["type"] == "Digits":
            sources.append(r"\p{N}" if part["individual_digits"] else r"\p{N}+")
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            sources.append(part["pattern"].get("Regex"))
        else:
            return None
    if last.get("use_regex", True):
        sources.append(_GPT2)
    translated = [None if source is None else _translated(source) for source in sources]
    found = [re.compile(source) for source in translated if source is not None]
    return found if len(found) == len(sources) and not any(p.groups for p in found) else None


def _translated(pattern: str) -> str | None:
    """An expression of the library for ASCII and stand-ins; None where that is not plain."""
    if re.search(r"&&|\[\[|\[:|\(\?<|\\[^prnstS'\"\\.\-/\[\](){}|+*?^$]", pattern):
        return None
    in_set = False

    def replace(match: re.Match[str]) -> str:
        nonlocal in_set
        name, escaped, bracket = match.groups()
        if bracket:
            in_set = bracket != "]"
            return str(match[0])
        if name is None and escaped not in "sS":
            return str(match[0])
        if escaped == "S" and in_set:
            raise KeyError(escaped)
        members = _SETS[name or "s"]
        return members if in_set else f"[{'^' if escaped == 'S' else ''}{members}]"

    try:
        made = _ESCAPE.sub(replace, pattern)
        re.compile(made)
    except (KeyError, re.error):
        return None
    return made
