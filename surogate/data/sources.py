"""Rows of a data set, one at a time, each with the file and number that an error can name.

Files: .jsonl (and .json that holds one object a line), .json (an array of objects), .parquet, .csv,
and .txt (one document a file). A folder gives its files in the order of their names; its .txt files
count only if it has no other kind. A folder made by `datasets.save_to_disk`, and a name that is no
local path, go through the `datasets` library, which is imported only then.

A row that cannot be read is a RowError of some kind. `rows(skipped)` counts it under its kind and
goes on; `rows()` raises it. What spoils a whole file (another encoding, a broken archive) is never
skipped.
"""

import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from surogate.errors import UserError

_METADATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One row as it stands in its file; number counts from 1."""

    path: str
    number: int
    data: dict[str, Any]

    @property
    def place(self) -> str:
        """What an error begins with."""
        return f"{self.path} row {self.number}"


class RowError(UserError):
    """One row is at fault, for a reason of a kind that can be counted."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class Source:
    """A data set that can be read again and again.

    fingerprint() changes when the content does.
    """

    def __init__(
        self,
        name: str,
        fingerprint: Callable[[], str],
        read: Callable[[], Iterator[Row | RowError]],
        samples: int | None,
    ) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._read = read
        self._samples = samples

    def rows(self, skipped: Counter[str] | None = None) -> Iterator[Row]:
        """The rows, `samples` of them at most.

        Faulty ones are counted by kind in skipped, or raised when that is None. Raises UserError
        when there is no row at all.
        """
        row = None
        for row in islice(self._sound(skipped), self._samples):
            yield row
        if row is None:
            why = f" that can be read: {counted(skipped)}" if skipped else ""
            raise UserError(f"{self.name}: the data set has no rows{why}")

    def _sound(self, skipped: Counter[str] | None) -> Iterator[Row]:
        for row in self._read():
            if isinstance(row, Row):
                yield row
            elif skipped is None:
                raise row
            else:
                skipped[row.kind] += 1


def counted(kinds: Mapping[str, int]) -> str:
    """Counts by kind in one line, the most frequent first."""
    return ", ".join(f"{n:,} x {kind}" for kind, n in sorted(kinds.items(), key=lambda k: -k[1]))


def listed(names: Iterable[str]) -> str:
    """Names that came with the data, in one line of bounded length."""
    shown = [name if name.isprintable() and name else repr(name) for name in names]
    line = ", ".join(shown)
    return line if len(line) <= 300 else f"{line[:300]}..."


def open_source(
    path: str,
    *,
    subset: str | None = None,
    split: str = "train",
    samples: int | None = None,
    text_field: str = "text",
) -> Source:
    """Finds the data set; nothing is read yet except by the `datasets` library.

    samples caps the rows; text_field is the column that the content of a .txt file gets. Raises
    UserError for a path that does not exist and for a subset or split that the path does not have.
    """
    place = Path(path).expanduser()
    if place.is_dir() and not _saved_by_datasets(place):
        files = _files_of(place, subset, split)
    elif place.is_file():
        if subset is not None or split != "train":
            raise UserError(f"{path}: a single file has no subset or split; leave them out")
        files = [place]
    else:
        return _library_source(path, place, subset, split, samples)
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise UserError(f"{file}: cannot read {file.suffix or 'this'}; use {_known()}")
    return Source(
        path,
        lambda: _hash_files(files),
        lambda: _rows_of(files, text_field),
        samples,
    )


def _known() -> str:
    return ", ".join(sorted(_READERS))


def _hash_files(files: Sequence[Path]) -> str:
    total = sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(f"{file.name}\n{file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _saved_by_datasets(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _files_of(folder: Path, subset: str | None, split: str) -> list[Path]:
    """Data files below a folder: those of the split where names tell splits apart, else all."""
    root = folder / subset if subset else folder
    if not root.is_dir():
        raise UserError(f"{folder}: has no folder '{subset}' for the subset of that name")
    try:
        found = [
            file
            for file in sorted(root.rglob("*"))
            if file.is_file()
            and file.suffix.lower() in _READERS
            and file.name not in _METADATA
            and not any(part.startswith(".") for part in file.relative_to(root).parts)
        ]
    except OSError as error:
        raise UserError(f"{error.filename or root}: cannot be read: {error.strerror}") from None
    files = [file for file in found if file.suffix.lower() != ".txt"] or found
    if not files:
        raise UserError(f"{root}: the folder has no data files ({_known()})")
    word = re.compile(rf"(?:^|[-_./]){re.escape(split)}(?:[-_./]|$)")
    chosen = [file for file in files if word.search(file.relative_to(root).as_posix())]
    if not chosen and split != "train":
        raise UserError(f"{root}: no file or folder name holds the split '{split}'")
    return chosen or files


def _rows_of(files: Sequence[Path], text_field: str) -> Iterator[Row | RowError]:
    for file in files:
        yield from _READERS[file.suffix.lower()](file, text_field)


def _invalid(file: Path, first_line: int, raw: bytes, error: orjson.JSONDecodeError) -> RowError:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        line = first_line + raw.count(b"\n", 0, wrong.start)
        return RowError(f"{file} line {line}: not UTF-8; convert the file to UTF-8", "not UTF-8")
    line = first_line + error.lineno - 1
    what = f"{file} line {line}: invalid JSON: {error.msg} (column {error.colno})"
    return RowError(what, "invalid JSON")


def _object(path: str, number: int, data: Any) -> Row | RowError:
    if isinstance(data, dict):
        return Row(path, number, data)
    kind = type(data).__name__
    return RowError(
        f"{path} row {number}: a row must be an object with columns, got {kind}", "not an object"
    )


def _read_jsonl(file: Path, _text_field: str) -> Iterator[Row | RowError]:
    number = 0
    with file.open("rb") as stream:
        for line_number, line in enumerate(stream, 1):
            raw = line.removeprefix(_BOM).strip() if line_number == 1 else line.strip()
            if not raw:
                continue
            number += 1
            try:
                data = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                yield _invalid(file, line_number, raw, error)
                continue
            yield _object(str(file), number, data)


def _read_json(file: Path, text_field: str) -> Iterator[Row | RowError]:
    with file.open("rb") as stream:
        first = next((line for line in stream if line.removeprefix(_BOM).strip()), b"")
    first = first.removeprefix(_BOM).strip()
    if first.startswith(b"{") and (first.endswith(b"}") or not _is_json(file)):
        yield from _read_jsonl(file, text_field)
        return
    raw = file.read_bytes().removeprefix(_BOM)
    if not raw.strip():
        return
    try:
        rows = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UserError(str(_invalid(file, 1, raw, error))) from None
    if isinstance(rows, dict):  # one object over several lines
        rows = [rows]
    if not isinstance(rows, list):
        raise UserError(f"{file}: a JSON file must hold an array of objects, or one object a line")
    for number, data in enumerate(rows, 1):
        yield _object(str(file), number, data)


def _is_json(file: Path) -> bool:
    try:
        orjson.loads(file.read_bytes().removeprefix(_BOM))
    except orjson.JSONDecodeError:
        return False
    return True


def _read_parquet(file: Path, _text_field: str) -> Iterator[Row | RowError]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for data in batch.to_pylist():
                    number += 1
                    yield Row(str(file), number, data)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file: {_line(error)}") from None


def _read_csv(file: Path, _text_field: str) -> Iterator[Row | RowError]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the module's own limit is 128 KiB a cell
    number = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            # strict: a quote that is never closed is a fault, not a cell to the end of the file
            table = csv.reader(stream, strict=True)
            header = next((cells for cells in table if cells), [])
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                raise UserError(f"{file}: the header names {listed(repeated)} more than once")
            for cells in table:
                if not cells:
                    continue
                number += 1
                if len(cells) == len(header):
                    yield Row(str(file), number, dict(zip(header, cells, strict=True)))
                else:
                    what = f"has {len(cells)} cells, the header has {len(header)}"
                    yield RowError(f"{file} row {number}: {what}", "another number of cells")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start + 1}); convert it") from None
    except csv.Error as error:
        raise UserError(f"{file} row {number + 1}: invalid CSV: {_line(error)}") from None


def _read_text(file: Path, text_field: str) -> Iterator[Row | RowError]:
    raw = file.read_bytes().removeprefix(_BOM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file} line {line}: not UTF-8; convert the file to UTF-8") from None
    if text.strip():
        yield Row(str(file), 1, {text_field: text})


_READERS: dict[str, Callable[[Path, str], Iterator[Row | RowError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".txt": _read_text,
}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _library_source(
    path: str, place: Path, subset: str | None, split: str, samples: int | None
) -> Source:
    local = place.is_dir()
    looks_local = place.suffix.lower() in _READERS or path.startswith((".", "/", "~"))
    if not local and (looks_local or not _HUB_NAME.fullmatch(path)):
        raise UserError(f"{path}: no such file or folder")
    table = _load_saved(path, place, split) if local else _load_hub(path, subset, split)

    def rows() -> Iterator[Row]:
        for number, data in enumerate(table, 1):
            yield Row(path, number, dict(data))

    return Source(path, lambda: str(table._fingerprint), rows, samples)


def _load_saved(path: str, place: Path, split: str) -> Any:
    import datasets

    try:
        saved = datasets.load_from_disk(str(place))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot load the saved data set: {_line(error)}") from None
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise UserError(f"{path}: has no split '{split}', has: {', '.join(saved)}; set split")
        return saved[split]
    if split != "train":
        raise UserError(f"{path}: the saved data set has no splits; leave split out")
    return saved


def _load_hub(path: str, subset: str | None, split: str) -> Any:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
        raise UserError(
            f"{path}: no such file or folder, and the Hub does not give it: {_line(error)}"
        ) from None
