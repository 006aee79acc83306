"""The first rows that a run will train on, as text with what is learned set apart.

Rows are those of the packed data, in the order of the first epoch, so what is shown is what the
model meets: documents as they share rows, the cuts, and each target behind what precedes it.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from surogate.config import Config
from surogate.data.loader import permutation
from surogate.data.packed import Packed
from surogate.data.sources import counted
from surogate.data.vocabulary import load_tokenizer
from surogate.kernels.batch import IGNORED
from surogate.setup import disk, load_rows, locate

_GROUP = 8  # tokens that may share a character


class Piece(NamedTuple):
    """Tokens that make whole characters. position is the first one's place in its document."""

    text: str
    ids: tuple[int, ...]
    position: int
    target: bool
    special: bool


class Document(NamedTuple):
    """A document of a row."""

    source: str
    pieces: list[Piece]
    tokens: int
    supervised: int


class Row(NamedTuple):
    """A packed row: its number in the data, its documents, and the tokens of padding behind."""

    number: int
    documents: list[Document]
    padding: int


class Preview(NamedTuple):
    """What is shown: facts by name, a line a data set under headings, and rows."""

    title: str
    facts: list[tuple[str, str]]
    headings: tuple[str, ...]
    shares: list[tuple[str, ...]]
    rows: list[Row]
    sequence_len: int


def preview_command(config: Config, *, rows: int, html: str | None) -> None:
    """Prepares the rows of a run, prints the first ones, and writes a page of them if asked to."""
    directory, model_config = locate(config)
    packed = load_rows(config, directory, model_config).train
    seen = preview(packed, load_tokenizer(directory), rows=rows, config=config)
    if html is None:
        show(seen, Console(file=sys.stdout, highlight=False, soft_wrap=True))
        return
    from surogate.preview_page import page

    with disk(html):
        Path(html).write_text(page(seen), encoding="utf-8")
    print(f"page: {html}")


def preview(packed: Packed, vocabulary: Any, *, rows: int, config: Config) -> Preview:
    """Reads the first rows of the first epoch."""
    order = permutation(packed.rows, seed=config.train_seed, epoch=0)[:rows]
    special = set(vocabulary.tokenizer.get_added_tokens_decoder())
    read = [_row(packed, int(index), vocabulary.tokenizer, special) for index in order]
    shares = [] if len(packed.names) < 2 and not _skips(packed) else _shares(packed)
    headings = ("data set", "documents", "tokens", "share", "wanted", "supervised", "skipped rows")
    return Preview(config.run_name, _facts(packed), headings, shares, read, packed.sequence_len)


def _skips(packed: Packed) -> bool:
    return any(share.skipped for share in packed.report.shares)


def _facts(packed: Packed) -> list[tuple[str, str]]:
    r = packed.report
    facts = [
        ("documents", f"{r.documents:,}"),
        ("tokens", f"{r.tokens:,}"),
        ("supervised", f"{r.supervised:,} ({r.supervised / max(1, r.tokens):.1%})"),
        ("rows", f"{r.rows:,} of {packed.sequence_len:,} tokens"),
        ("fill", f"{r.fill:.1%} ({r.packing})"),
        ("cut to a row", f"{r.truncated:,} documents"),
        ("nothing to learn", f"{r.unsupervised:,} documents"),
    ]
    if r.nothing:
        facts.append(("left out first", ", ".join(r.nothing)))
    return facts


def _shares(packed: Packed) -> list[tuple[str, ...]]:
    total = max(1, packed.report.tokens)
    return [
        (
            name,
            f"{share.documents:,}",
            f"{share.tokens:,}",
            f"{share.tokens / total:.1%}",
            "" if share.wanted is None else f"{share.wanted:.1%}",
            f"{share.supervised:,}",
            counted(share.skipped),
        )
        for name, share in zip(packed.names, packed.report.shares, strict=True)
    ]


def _row(packed: Packed, index: int, tokenizer: Any, special: set[int]) -> Row:
    tokens, labels, lengths = packed.row(index)
    sources = packed.sources_of(index)
    documents, padding, begin = [], 0, 0
    for length in lengths.tolist():
        end = begin + length
        if sources[begin] < 0:
            padding += length
        else:
            target = np.append(False, labels[begin : end - 1] != IGNORED)
            pieces = list(_pieces(tokens[begin:end].tolist(), target.tolist(), tokenizer, special))
            name = packed.names[int(sources[begin])]
            documents.append(Document(name, pieces, length, int(target.sum())))
        begin = end
    return Row(index, documents, padding)


def _pieces(
    tokens: Sequence[int], target: Sequence[bool], tokenizer: Any, special: set[int]
) -> Iterator[Piece]:
    """Cuts a document into tokens, and into groups where a character takes several."""
    begin = 0
    for at, token in enumerate(tokens, 1):
        text = tokenizer.decode(tokens[begin:at], skip_special_tokens=False)
        whole = not text.endswith("\ufffd") or at - begin == _GROUP
        if whole or at == len(tokens) or target[at] != target[begin]:
            ids = tuple(tokens[begin:at])
            yield Piece(text, ids, begin, target[begin], token in special and len(ids) == 1)
            begin = at


def show(seen: Preview, console: Console) -> None:
    """Prints a preview. Targets are green; without colours they stand in ⟦ ⟧."""
    for name, value in seen.facts:
        console.print(Text(f"{name}: ", "dim").append(value, "not dim"))
    if seen.shares:
        table = Table(*seen.headings, box=None, pad_edge=False)
        for share in seen.shares:
            table.add_row(*(Text(cell) for cell in share))
        console.print(table)
    plain = console.color_system is None
    for row in seen.rows:
        title = f"row {row.number}: {len(row.documents)} documents, {row.padding:,} of padding"
        console.print()
        console.rule(Text(title, "bold"), align="left")
        for document in row.documents:
            learned = f"{document.tokens:,} tokens, {document.supervised:,} supervised"
            console.print(Text(f"{document.source}: {learned}", "dim italic"))
            console.print(_coloured(document, plain=plain))


def _coloured(document: Document, *, plain: bool) -> Text:
    text, inside = Text(), False
    for piece in document.pieces:
        if plain and piece.target != inside:
            text.append("⟦" if piece.target else "⟧")
        inside = piece.target
        style = "green" if piece.target else ""
        text.append(_visible(piece.text), f"{style} bold" if piece.special else style)
    return text.append("⟧" if plain and inside else "")


def _visible(text: str) -> str:
    """Control characters as pictures, so that no text can steer a terminal."""
    return "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c != "\n" else "␡" if c == "\x7f" else c
        for c in text.replace("\t", "⇥")
    )
