"""Packed rows in a folder: two arrays of rows, the lengths of their documents, and a report.

tokens.npy and labels.npy are memory-mapped, so the rows need not fit into memory.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int32, Int64

from surogate.data.flat import Flat
from surogate.data.pack import Packing, Plan, fill_rows
from surogate.kernels.batch import IGNORED


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one data set gave, in the order of the data sets; repeats count."""

    documents: int
    tokens: int
    supervised: int
    wanted: float | None  # share of the tokens that its weight asks for
    skipped: dict[str, int] = {}  # malformed rows by kind, of all parts


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What packing found. tokens counts those in the rows, padding left out."""

    documents: int
    tokens: int
    supervised: int
    rows: int
    truncated: int  # documents longer than a row that lost their end
    unsupervised: int  # documents left out because no token of them is a target
    packing: Packing
    fill: float  # share of the positions that hold tokens
    nothing: list[str] = []  # the first rows with a document that was left out
    shares: list[Share] = []
    date: str = ""  # that the chat template was asked to write, if it writes one


class Packed(NamedTuple):
    """Rows of sequence_len tokens. labels are shifted; lengths[bounds[i]:bounds[i+1]] are row i's.

    sources has the data set of each length, an index into names, or -1 for padding. reused tells
    that the rows were found on disk.
    """

    tokens: Int32[np.ndarray, "rows sequence_len"]
    labels: Int32[np.ndarray, "rows sequence_len"]
    lengths: Int32[np.ndarray, " lengths"]
    bounds: Int64[np.ndarray, " bounds"]
    report: Report
    reused: bool
    sources: Int32[np.ndarray, " lengths"]
    names: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.report.rows

    @property
    def sequence_len(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def supervised(self) -> int:
        return self.report.supervised

    @property
    def fill(self) -> float:
        return self.report.fill

    def row(
        self, index: int
    ) -> tuple[
        Int32[np.ndarray, " sequence_len"],
        Int32[np.ndarray, " sequence_len"],
        Int32[np.ndarray, " documents"],
    ]:
        """Tokens, labels and the lengths of the documents of a row; lengths sum to the row's."""
        return self.tokens[index], self.labels[index], self.lengths[self._pieces(index)]

    def sources_of(self, index: int) -> Int32[np.ndarray, " sequence_len"]:
        """The data set of each token of a row, an index into names; -1 of padding."""
        pieces = self._pieces(index)
        return np.repeat(self.sources[pieces], self.lengths[pieces])

    def _pieces(self, index: int) -> slice:
        return slice(int(self.bounds[index]), int(self.bounds[index + 1]))


def write_packed(
    folder: Path,
    flat: Flat,
    plan: Plan,
    chosen: Int64[np.ndarray, " chosen"],
    report: Report,
    sequence_len: int,
) -> None:
    """Fills the planned rows and saves them.

    The plan counts documents within chosen, which are indices into flat. The report comes without
    what the rows hold. Raises OSError when the disk is full.
    """
    folder.mkdir()
    shape = (plan.rows, sequence_len)
    tokens, labels = (_mapped(folder / f"{name}.npy", shape) for name in ("tokens", "labels"))
    ends = np.cumsum(flat.lengths)
    begins = ends - flat.lengths
    lengths, bounds = fill_rows(
        plan, flat.tokens, flat.labels, begins[chosen], ends[chosen], tokens, labels
    )
    np.save(folder / "lengths.npy", lengths)
    np.save(folder / "bounds.npy", bounds)
    of_pieces = flat.sources[chosen[plan.document]]
    np.save(folder / "sources.npy", _with_padding(of_pieces, plan, bounds))
    held = int(plan.length.sum())
    report = msgspec.structs.replace(
        report,
        documents=len(np.unique(plan.document)),
        tokens=held,
        supervised=sum(
            int((labels[i : i + 1024] != IGNORED).sum()) for i in range(0, plan.rows, 1024)
        ),
        rows=plan.rows,
        truncated=plan.truncated,
        fill=held / (plan.rows * sequence_len),
    )
    tokens.flush()
    labels.flush()
    (folder / "report.json").write_bytes(msgspec.json.encode(report))


def _with_padding(
    of_pieces: Int64[np.ndarray, " pieces"], plan: Plan, bounds: Int64[np.ndarray, " bounds"]
) -> Int32[np.ndarray, " lengths"]:
    """The values of a plan's pieces, with a -1 at the end of each row that is padded."""
    padded = np.diff(bounds) > np.bincount(plan.row, minlength=plan.rows)
    found = np.full(int(bounds[-1]), -1, np.int32)
    is_piece = np.ones(len(found), np.bool_)
    is_piece[bounds[1:][padded] - 1] = False
    found[is_piece] = of_pieces
    return found


def _mapped(file: Path, shape: tuple[int, int]) -> Int32[np.memmap, "rows sequence_len"]:
    """A fresh array on the disk, whose space is taken at once: on a disk that is full, a write
    through the mapping would kill the process.
    """
    array = np.lib.format.open_memmap(file, "w+", np.int32, shape)
    if hasattr(os, "posix_fallocate"):
        with file.open("r+b") as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of some file systems
                    raise
    return array


def open_packed(folder: Path, *, reused: bool, names: tuple[str, ...] = ("",)) -> Packed:
    """Maps rows that write_packed saved, of data sets with these names."""
    return Packed(
        np.load(folder / "tokens.npy", mmap_mode="r"),
        np.load(folder / "labels.npy", mmap_mode="r"),
        np.load(folder / "lengths.npy"),
        np.load(folder / "bounds.npy"),
        msgspec.json.decode((folder / "report.json").read_bytes(), type=Report),
        reused,
        np.load(folder / "sources.npy"),
        names,
    )
