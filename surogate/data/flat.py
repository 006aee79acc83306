"""All documents of a build one after another on disk, written as they are tokenised.

A build that was killed goes on where it stopped: after each batch the journal gets a line with how
far the files are, and a checksum of what the batch added to them. What is behind the last line that
holds is cut off.
"""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np
from jaxtyping import Int32, Int64

from surogate.data.formats import Layout
from surogate.data.sources import Row
from surogate.data.tokenise import Chunk, Job, batches
from surogate.kernels.batch import IGNORED

Progress = Callable[[int, int], None]  # documents and tokens so far

_FILES = {"tokens": np.int32, "labels": np.int32} | {
    name: np.int64 for name in ("lengths", "first_target", "rows")
}


class Flat(NamedTuple):
    """Documents one after another, and what packing must know of each.

    rows are the indices of the rows that they came from, and sources those of their data sets.
    """

    tokens: Int32[np.ndarray, " stream"]
    labels: Int32[np.ndarray, " stream"]
    lengths: Int64[np.ndarray, " documents"]
    first_target: Int64[np.ndarray, " documents"]  # its first position with a label, or its length
    rows: Int64[np.ndarray, " documents"]
    sources: Int64[np.ndarray, " documents"]


class Places:
    """Where the rows of a build stand: runs of rows that follow each other in one file."""

    def __init__(self) -> None:
        self._begins: list[int] = []  # index of the first row of each run
        self._first: list[Row] = []
        self._sources: list[int] = []

    def note(self, source: int, index: int, row: Row) -> None:
        """Takes the next row."""
        if self._first and self._sources[-1] == source:
            begin, first = self._begins[-1], self._first[-1]
            if row.path == first.path and row.number - first.number == index - begin:
                return
        self._begins.append(index)
        self._first.append(row._replace(data={}))
        self._sources.append(source)

    def name(self, index: int) -> str:
        """File and number of a row."""
        run = int(np.searchsorted(self._begins, index, side="right")) - 1
        first = self._first[run]
        return first._replace(number=first.number + index - self._begins[run]).place

    def sources(self, rows: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        """The data set of each row."""
        runs = np.searchsorted(self._begins, rows, side="right") - 1
        return np.array(self._sources, np.int64)[runs]


def jobs_of(opened: Sequence[tuple[Layout, Iterator[Row]]], places: Places) -> Iterator[Job]:
    """Batches of the numbered rows of all data sets."""
    count = 0
    for layout, rows in opened:
        for batch in batches(enumerate(rows, count)):
            count = batch[-1][0] + 1
            for index, row in batch:
                places.note(layout.source, index, row)
            yield layout, batch


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """The journal after a batch: sizes of the files in items, and a checksum of the new ones."""

    tokens: int
    documents: int
    checksum: int
    source: int
    skipped: dict[str, int]

    def items(self, file: str) -> int:
        return self.tokens if file in ("tokens", "labels") else self.documents


def write_flat(
    folder: Path,
    jobs: Iterator[Job],
    places: Places,
    tokenise: Callable[[Iterator[Job]], Iterator[Chunk]],
    skipped: Sequence[Counter[str]],
    progress: Progress | None,
) -> Flat:
    """Tokenises the jobs into files of the folder, except those that stand there already.

    places knows the rows of the jobs once they were taken. skipped counts the rows that were left
    out, by data set and kind.
    """
    lines = _recovered(folder)
    for line in lines:
        skipped[line.source].update(line.skipped)
    for _ in islice(jobs, len(lines)):  # places are noted as they pass
        pass
    tokens, documents = (lines[-1].tokens, lines[-1].documents) if lines else (0, 0)
    with ExitStack() as stack:
        journal = stack.enter_context((folder / "journal.jsonl").open("ab"))
        files = {name: stack.enter_context((folder / f"{name}.bin").open("ab")) for name in _FILES}
        for chunk in tokenise(jobs):
            checksum = 0
            for name, array in _arrays(chunk).items():
                files[name].write(array.data)
                files[name].flush()
                checksum = crc32(array.data, checksum)
            tokens += len(chunk.tokens)
            documents += len(chunk.lengths)
            skipped[chunk.source].update(chunk.skipped)
            line = _Line(
                tokens=tokens,
                documents=documents,
                checksum=checksum,
                source=chunk.source,
                skipped=chunk.skipped,
            )
            journal.write(msgspec.json.encode(line) + b"\n")
            journal.flush()
            if progress is not None:
                progress(documents, tokens)
    arrays = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in _FILES.items()}
    return Flat(**arrays, sources=places.sources(arrays["rows"]))


def remove_flat(folder: Path) -> None:
    """Deletes what write_flat wrote."""
    for name in _FILES:
        (folder / f"{name}.bin").unlink()
    (folder / "journal.jsonl").unlink()


def _arrays(chunk: Chunk) -> dict[str, np.ndarray]:
    labels, first = shifted_labels(chunk)
    arrays = (chunk.tokens, labels, chunk.lengths, first, chunk.rows)
    return dict(zip(_FILES, map(np.ascontiguousarray, arrays), strict=True))


def _mapped(file: Path, kind: type) -> np.ndarray:
    if file.stat().st_size == 0:  # cannot be mapped
        return np.empty(0, kind)
    return np.asarray(np.memmap(file, kind, mode="r"))


def _recovered(folder: Path) -> list[_Line]:
    """The lines of the journal that the files bear out; files and journal are cut to them."""
    journal = folder / "journal.jsonl"
    raw = journal.read_bytes() if journal.is_file() else b""
    lines: list[_Line] = []
    with ExitStack() as stack:
        streams = {
            name: stack.enter_context((folder / f"{name}.bin").open("a+b")) for name in _FILES
        }
        for stream in streams.values():
            stream.seek(0)
        for text in raw.splitlines(keepends=True):
            try:
                line = msgspec.json.decode(text, type=_Line)
            except msgspec.MsgspecError:
                break
            if not text.endswith(b"\n") or not _holds(line, lines[-1] if lines else None, streams):
                break
            lines.append(line)
        for name, stream in streams.items():
            items = lines[-1].items(name) if lines else 0
            stream.truncate(items * np.dtype(_FILES[name]).itemsize)
    journal.write_bytes(b"".join(raw.splitlines(keepends=True)[: len(lines)]))
    return lines


def _holds(line: _Line, before: _Line | None, streams: dict[str, io.BufferedRandom]) -> bool:
    checksum = 0
    for name, stream in streams.items():
        items = line.items(name) - (before.items(name) if before else 0)
        added = stream.read(items * np.dtype(_FILES[name]).itemsize) if items >= 0 else b""
        if items < 0 or len(added) != items * np.dtype(_FILES[name]).itemsize:
            return False
        checksum = crc32(added, checksum)
    return checksum == line.checksum


def shifted_labels(
    chunk: Chunk,
) -> tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]:
    """Shifted labels, and in each document the first position that has one (or its length)."""
    labels = np.full(len(chunk.tokens), IGNORED, np.int32)
    labels[:-1] = np.where(chunk.supervised[1:], chunk.tokens[1:], IGNORED)
    ends = np.cumsum(chunk.lengths)
    labels[ends[chunk.lengths > 0] - 1] = IGNORED
    begins = ends - chunk.lengths
    targets = np.append(np.flatnonzero(labels != IGNORED), len(labels))
    first = targets[np.searchsorted(targets, begins)] - begins
    return labels, np.minimum(first, chunk.lengths)
