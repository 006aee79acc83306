"""Rows to tokens, in order and in bounded memory, on all cores.

Rows are taken in batches of about a megabyte of text, so that no worker gets all the long ones. A
batch is read, rendered and tokenised by an `Encoder`. The first batches stay in this process, where
the tokenizer library spreads them over its threads; more of them go to worker processes, because
rendering chat templates is Python, and through fastokens (see bytepairs.py). At most two batches a
worker wait, and results come back in the order of the rows.

A document of raw text is everything a target: its tokens and the end-of-sequence token behind them.
In a conversation a token is a target if it lies wholly in a target span of characters.
"""

import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from surogate.data.bytepairs import BytePairs, Encoded, within
from surogate.data.chat import LossScale, render_targets
from surogate.data.formats import Conversation, Layout, Text, read_row
from surogate.data.sources import Row, RowError
from surogate.data.vocabulary import Vocabulary, load_tokenizer
from surogate.errors import UserError

PARENT_SECONDS = 0.5  # between looks at whether the parent is there
_BATCH_ROWS = 512
_BATCH_CHARS = 1 << 20
_PIECE = 1 << 19  # characters of a long text that are tokenised at a time
_CUT = re.compile(r"(?<=\S)\n(?=\w)")


class Chunk(NamedTuple):
    """Tokenised documents of one data set, one after another; the rows skipped, by kind."""

    tokens: Int32[np.ndarray, " tokens"]
    supervised: Bool[np.ndarray, " tokens"]  # this token is a target of the one before it
    lengths: Int64[np.ndarray, " documents"]
    rows: Int64[np.ndarray, " documents"]  # which row of the whole stream each came from
    source: int
    skipped: dict[str, int]


class _Document(NamedTuple):
    text: str
    spans: list[tuple[int, int]] | None  # None: raw text
    append_eos: bool
    row: int


class Encoder:
    """Reads, renders and tokenises batches of rows of one model's data.

    vocab_size is the number of embedding rows; an id beyond it raises UserError with the row.
    threads is for few rows: the library tokenises them on its threads, which takes less than to
    open fastokens.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, vocab_size: int, loss_scale: LossScale, threads: bool
    ) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = vocab_size
        self.loss_scale: LossScale = loss_scale
        self.threads = threads
        self.pairs = None if threads else BytePairs.of(vocabulary.tokenizer)

    def encode(self, layout: Layout, rows: Sequence[tuple[int, Row]]) -> Chunk:
        """Tokenises rows, each with its index in the stream. One row may give several documents.

        A row at fault raises RowError, or is counted if its data set skips malformed rows.
        """
        documents: list[_Document] = []
        skipped: Counter[str] = Counter()
        for index, row in rows:
            try:
                documents += self._documents(index, row, read_row(layout, row))
            except RowError as error:
                if layout.config.malformed == "stop":
                    raise
                skipped[error.kind] += 1
        encoded = self._tokenise(documents)
        tokens = np.concatenate([*(ids for ids, _ in encoded), np.empty(0, np.int32)])
        lengths = np.array([len(ids) for ids, _ in encoded], np.int64)
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            document = documents[int(np.searchsorted(np.cumsum(lengths), at, side="right"))]
            place = next(row.place for index, row in rows if index == document.row)
            raise UserError(
                f"{place}: token id {tokens[at]} is not below the model's vocab_size "
                f"{self.vocab_size}; the tokenizer belongs to another model"
            )
        return Chunk(
            tokens,
            np.concatenate([*(mask for _, mask in encoded), np.empty(0, np.bool_)]),
            lengths,
            np.array([document.row for document in documents], np.int64),
            layout.source,
            dict(skipped),
        )

    def _documents(self, index: int, row: Row, record: Text | Conversation) -> list[_Document]:
        vocabulary = self.vocabulary
        if isinstance(record, Text):
            # An empty text is a document of no tokens, which packing counts as left out.
            return [_Document(record.text, None if record.text else [], bool(record.text), index)]
        if vocabulary.template is None:
            raise UserError(
                f"{row.place}: a conversation needs a chat template and {vocabulary.folder} has "
                "none; add chat_template.jinja there, or train on type text"
            )
        rendered = render_targets(
            vocabulary.template, record, loss_scale=self.loss_scale, place=row.place
        )
        return [_Document(r.text, r.spans, not r.terminated, index) for r in rendered]

    def _tokenise(self, documents: Sequence[_Document]) -> list[Encoded]:
        vocabulary = self.vocabulary
        if vocabulary.eos is None and any(document.append_eos for document in documents):
            raise UserError(
                f"{vocabulary.folder}: names no end-of-sequence token, so the model would never "
                "learn to stop; set eos_token in tokenizer_config.json"
            )
        found: Sequence[Encoded | None] = [None] * len(documents)
        if self.pairs:
            found = self.pairs.encode([(d.text, d.spans or []) for d in documents])
        left = [d for d, encoded in zip(documents, found, strict=True) if encoded is None]
        chats = iter(self._chats([d for d in left if d.spans is not None]))
        raw = iter(self._texts([d.text for d in left if d.spans is None]))
        made = []
        for document, encoded in zip(documents, found, strict=True):
            if document.spans is None:
                ids = encoded.ids if encoded else next(raw)
                tokens = np.concatenate([np.array(vocabulary.prefix, np.int32), ids])
                mask = np.ones(len(tokens), np.bool_)
            else:
                tokens, mask = encoded or next(chats)
            if document.append_eos:
                learned = document.spans is None or bool(document.spans)
                tokens = np.append(tokens, np.array([vocabulary.eos], np.int32))
                mask = np.append(mask, np.array([learned]))
            made.append(Encoded(tokens, mask))
        return made

    def _chats(self, documents: Sequence[_Document]) -> Iterator[Encoded]:
        """By the library: on its threads, or one by one."""
        tokenizer = self.vocabulary.tokenizer
        texts = [document.text for document in documents]
        encodings = (
            tokenizer.encode_batch(texts, add_special_tokens=False)
            if self.threads
            else (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        )
        for document, encoding in zip(documents, encodings, strict=True):
            begin, end = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            ids = np.array(encoding.ids, np.int32)
            yield Encoded(ids, within(begin, end, document.spans or []))

    def _texts(self, texts: Sequence[str]) -> Iterator[Int32[np.ndarray, " tokens"]]:
        """Ids by the library; a long text goes through in pieces, so that memory stays bounded."""
        tokenizer = self.vocabulary.tokenizer
        short = [text for text in texts if len(text) <= _PIECE] if self.threads else []
        done = iter(tokenizer.encode_batch_fast(short, add_special_tokens=False))
        for text in texts:
            if self.threads and len(text) <= _PIECE:
                yield np.array(next(done).ids, np.int32)
            else:
                pieces = [self._ids(piece) for piece in _pieces(text, tokenizer)]
                yield np.concatenate(pieces)

    def _ids(self, text: str) -> Int32[np.ndarray, " tokens"]:
        (encoding,) = self.vocabulary.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)


def _pieces(text: str, tokenizer: Any) -> Iterator[str]:
    """Cuts a long text at ends of lines where the cut provably changes no token around it."""
    begin = 0
    for match in _CUT.finditer(text):
        end = match.end()
        if end - begin < _PIECE:
            continue
        left, right = text[max(begin, end - 512) : end], text[end : end + 512]
        whole, before, after = (
            tokenizer.encode(part, add_special_tokens=False).ids
            for part in (left + right, left, right)
        )
        if whole == before + after:
            yield text[begin:end]
            begin = end
    yield text[begin:]


class EncoderSettings(NamedTuple):
    """What a worker process needs to make its own Encoder."""

    folder: Path
    tokenizer_file: Path
    vocab_size: int
    loss_scale: LossScale


_worker: Encoder | None = None


def _start_worker(settings: EncoderSettings) -> None:
    global _worker
    os.environ["FASTOKENS_BPE_THREADS"] = "1"  # the workers are its threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_outlive_nobody, args=(parent.pid,), daemon=True).start()
    _worker = Encoder(
        load_tokenizer(settings.folder, settings.tokenizer_file),
        vocab_size=settings.vocab_size,
        loss_scale=settings.loss_scale,
        threads=False,
    )


def _outlive_nobody(parent: int | None) -> None:
    """Ends this process once its parent is gone. A worker waits for work at a pipe that its
    siblings hold open too, so that one whose parent was killed would wait for ever.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def _work(layout: Layout, rows: Sequence[tuple[int, Row]]) -> Chunk:
    assert _worker is not None
    return _worker.encode(layout, rows)


Job = tuple[Layout, list[tuple[int, Row]]]


def tokenise(
    vocabulary: Vocabulary,
    jobs: Iterable[Job],
    *,
    vocab_size: int,
    loss_scale: LossScale,
    workers: int,
    in_process: int = 4,
) -> Iterator[Chunk]:
    """Tokenises batches of rows in their order.

    workers processes take over when there are more than one of them and more than in_process
    batches. Raises the UserError of the first bad row.
    """
    jobs = iter(jobs)
    first = list(islice(jobs, in_process + 1))
    few = len(first) <= in_process
    if workers > 1 and not few:
        settings = EncoderSettings(vocabulary.folder, vocabulary.file, vocab_size, loss_scale)
        yield from _in_workers(settings, chain(first, jobs), workers)
        return
    encoder = Encoder(vocabulary, vocab_size=vocab_size, loss_scale=loss_scale, threads=few)
    for layout, rows in chain(first, jobs):
        yield encoder.encode(layout, rows)


def _in_workers(settings: EncoderSettings, jobs: Iterator[Job], workers: int) -> Iterator[Chunk]:
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(settings,),
    )
    waiting: deque[Future[Chunk]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(_work, *job))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenising process died, most likely for lack of memory; "
            "lower dataloader_num_workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def batches(rows: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    """Groups numbered rows by count and by size of text."""
    batch: list[tuple[int, Row]] = []
    size = 0
    for item in rows:
        batch.append(item)
        size += _size(item[1].data)
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 1
