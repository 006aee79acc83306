"""Byte-level BPE at speed: the ids of fastokens, and masks by the bytes of each token.

fastokens gives the ids of the tokenizers library ten and more times as fast, without offsets. A
token of a byte-level BPE stands for a number of bytes that is known beforehand, so the places of
the tokens in a text are a running sum.

The library stays the definition. A tokenizer of any other kind has no `BytePairs`. A character is
trusted once both have cut it out of a probe in the same way; a text with one that they cut
differently, one that is not NFC where the tokenizer normalises (its places are those of another
text), or one whose tokens do not add up to its bytes goes to the library.
"""

import unicodedata
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import fastokens
import numpy as np
import orjson
from jaxtyping import Bool, Int32, Int64
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

Spans = Sequence[tuple[int, int]]

_SAMPLE = "It's 1234 o'clock,\n\n  don't you'LL think? naïve_CamelCase\tx= {'a':[1]}\r\n   end  "
_PROBE = "a*a** * 1*.*\n*'*s*A"  # with each new character for the star


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


class BytePairs:
    """A byte-level BPE tokenizer in two implementations that are held to the same ids.

    sizes are the bytes that each token stands for, by its id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fast: fastokens.Tokenizer,
        sizes: Int64[np.ndarray, " vocab"],
        *,
        normalises: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._fast = fast
        self._sizes = sizes
        self._normalises = normalises
        self._met: set[str] = set()
        self._trusted = set(map(chr, range(128)))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "BytePairs | None":
        """None unless the tokenizer is a byte-level BPE that fastokens knows."""
        file = tokenizer.to_str()
        description = orjson.loads(file)
        model, normalizer = description["model"], description["normalizer"]
        added = description["added_tokens"]
        if (
            model["type"] != "BPE"
            or model["dropout"]
            or model["continuing_subword_prefix"]
            or model["end_of_word_suffix"]
            or not model["vocab"].keys() >= set(ByteLevel.alphabet())
            or not _ends_in_bytes(description["pre_tokenizer"])
            or normalizer not in (None, {"type": "NFC"})
            or any(t["single_word"] or t["lstrip"] or t["rstrip"] for t in added)
        ):
            return None
        try:
            fast = fastokens.Tokenizer.from_json_str(file)
        except ValueError:  # an expression or a part that it does not have
            return None
        vocabulary = model["vocab"]  # where a character is a byte
        sizes = np.zeros(1 + max([*vocabulary.values(), *(t["id"] for t in added)]), np.int64)
        sizes[list(vocabulary.values())] = list(map(len, vocabulary))
        for token in added:
            sizes[token["id"]] = len(token["content"].encode())
        made = cls(tokenizer, fast, sizes, normalises=normalizer is not None)
        return made if made._agrees(_SAMPLE) else None

    def encode(self, documents: Sequence[tuple[str, Spans]]) -> list[Encoded | None]:
        """Ids of texts, and which are in the ascending, disjoint spans of characters of each.

        None for a text that only the library can tokenise.
        """
        new = set[str]().union(*(text for text, _ in documents if not text.isascii())) - self._met
        self._met |= new
        # An unassigned one may be a letter in a later Unicode, and surrogates are no characters.
        self._meet([char for char in new if unicodedata.category(char) not in ("Cn", "Cs")])
        texts = [text if self._understands(text) else None for text, _ in documents]
        flat, borders = self._fast.encode_batch_flat([text or "" for text in texts])
        ids = np.frombuffer(flat, np.uint32).astype(np.int32)
        cuts = np.frombuffer(borders, np.uint64).astype(np.int64)
        places = np.append(0, np.cumsum(self._sizes[ids]))  # in bytes of all texts in a row
        begins = places[cuts].tolist()
        whole = [
            text is not None and len(text.encode()) == end - begin
            for text, (begin, end) in zip(texts, pairwise(begins), strict=True)
        ]
        spans = [
            (at + begin, at + end)
            for (text, in_chars), at, good in zip(documents, begins, whole, strict=False)
            for begin, end in (_in_bytes(text, in_chars) if good else ())
        ]
        inside = within(places[:-1], places[1:], spans)
        return [
            Encoded(ids[begin:end], inside[begin:end]) if good else None
            for good, (begin, end) in zip(whole, pairwise(cuts.tolist()), strict=True)
        ]

    def _understands(self, text: str) -> bool:
        if text.isascii():
            return True
        if self._normalises and not unicodedata.is_normalized("NFC", text):
            return False
        return self._trusted.issuperset(text)

    def _meet(self, chars: Sequence[str]) -> None:
        """Trusts those characters that both cut out of a probe in the same way."""
        if self._agrees("".join(_PROBE.replace("*", char) for char in chars)):
            self._trusted.update(chars)
        elif len(chars) > 1:
            middle = len(chars) // 2
            self._meet(chars[:middle])
            self._meet(chars[middle:])

    def _agrees(self, text: str) -> bool:
        want = self._tokenizer.encode(text, add_special_tokens=False).ids
        return list(self._fast.encode(text).ids) == want


def _in_bytes(text: str, spans: Spans) -> Spans:
    if text.isascii():
        return spans
    borders = pairwise(chain([0], chain.from_iterable(spans)))
    ends = list(accumulate(len(text[begin:end].encode()) for begin, end in borders))
    return list(zip(ends[::2], ends[1::2], strict=True))


def _ends_in_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether the last step writes each byte as a character and puts no space before a text."""
    last = pre_tokenizer or {"type": "none"}
    if last["type"] == "Sequence":
        last = last["pretokenizers"][-1]
    return last["type"] == "ByteLevel" and not last["add_prefix_space"]
