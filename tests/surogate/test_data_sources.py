"""Rows come out of every kind of file with their numbers, and faults name file and line."""

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from surogate.data.sources import Row, RowError, counted, open_source
from surogate.errors import UserError

ROWS = [{"a": "eins", "b": 1}, {"a": "zwei 你好", "b": 2}, {"a": "drei", "b": 3}]


def _write(folder: Path, suffix: str) -> Path:
    file = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        file.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    elif suffix == ".json":
        file.write_text(json.dumps(ROWS, indent=2))
    elif suffix == ".csv":
        file.write_text("a,b\n" + "".join(f'"{row["a"]}",{row["b"]}\n' for row in ROWS))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    return file


def _error(path: str | Path, **settings: object) -> str:
    with pytest.raises(UserError) as caught:
        list(open_source(str(path), **settings).rows())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_reads_rows_with_numbers(tmp_path, suffix):
    file = _write(tmp_path, suffix)
    rows = list(open_source(str(file)).rows())
    assert [row.number for row in rows] == [1, 2, 3]
    assert {row.path for row in rows} == {str(file)}
    assert [row.data["a"] for row in rows] == [row["a"] for row in ROWS]
    assert [int(row.data["b"]) for row in rows] == [1, 2, 3]


def test_samples_caps_rows_and_reading_again_starts_over(tmp_path):
    source = open_source(str(_write(tmp_path, ".jsonl")), samples=2)
    assert [row.number for row in source.rows()] == [1, 2]
    assert [row.number for row in source.rows()] == [1, 2]


def test_json_of_one_object_a_line_and_byte_order_mark(tmp_path):
    file = tmp_path / "rows.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\n{"a": 2}\n')
    assert [row.data for row in open_source(str(file)).rows()] == [{"a": 1}, {"a": 2}]


def test_text_file_is_one_document(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    rows = list(open_source(str(file), text_field="body").rows())
    assert rows == [Row(str(file), 1, {"body": "one\n\ntwo\n"})]


def test_folder_reads_files_in_order_of_names(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "LICENSE.txt").write_text("not data")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.jsonl").write_text('{"n": 3}\n')
    assert [row.data["n"] for row in open_source(str(tmp_path)).rows()] == [1, 2]


def test_folder_with_splits_and_subsets(tmp_path):
    for split, n in (("train", 1), ("test", 2)):
        (tmp_path / "main").mkdir(exist_ok=True)
        (tmp_path / "main" / f"{split}-00000-of-00001.jsonl").write_text(f'{{"n": {n}}}\n')

    def numbers(**settings):
        return [row.data["n"] for row in open_source(str(tmp_path), **settings).rows()]

    assert numbers() == [1]
    assert numbers(split="test") == [2]
    assert numbers(subset="main", split="test") == [2]
    assert "no file or folder name holds the split 'dev'" in _error(tmp_path, split="dev")
    assert "has no folder 'other'" in _error(tmp_path, subset="other")


def test_folder_of_the_datasets_library(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "two"))
    source = open_source(str(tmp_path / "one"), samples=2)
    assert [(row.number, row.data) for row in source.rows()] == [(1, ROWS[0]), (2, ROWS[1])]
    assert source.fingerprint() == open_source(str(tmp_path / "one")).fingerprint()
    assert len(list(open_source(str(tmp_path / "two"), split="test").rows())) == 3
    assert "has no split 'train', has: test" in _error(tmp_path / "two")


def test_fingerprint_follows_the_bytes(tmp_path):
    file = _write(tmp_path, ".jsonl")
    before = open_source(str(file)).fingerprint()
    assert open_source(str(file)).fingerprint() == before
    file.write_text(file.read_text().replace("drei", "vier"))
    assert open_source(str(file)).fingerprint() != before


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl line 2: invalid JSON"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "x.jsonl line 2: not UTF-8"),
        ("x.jsonl", b'{"a": 1}\n\n[1]\n', "x.jsonl row 2: a row must be an object"),
        ("x.jsonl", b"\n\n", "x.jsonl: the data set has no rows"),
        ("x.json", b"", "x.json: the data set has no rows"),
        ("x.json", b'[{"a": 1},\n{"a": }]', "x.json line 2: invalid JSON"),
        ("x.json", b'[{"a": 1},\n{"a": "\xff"}]', "x.json line 2: not UTF-8"),
        ("x.json", b"3", "x.json: a JSON file must hold an array of objects"),
        ("x.txt", b"one\ntwo \xff", "x.txt line 2: not UTF-8"),
        ("x.txt", b" \n", "x.txt: the data set has no rows"),
        ("x.csv", b"a,b\n1\n", "x.csv row 1: has 1 cells, the header has 2"),
        ("x.csv", b"a,b\n1,\xff\n", "x.csv: not UTF-8"),
        ("x.parquet", b"PAR1 no", "x.parquet: not a readable parquet file"),
        ("x.xml", b"<a/>", "x.xml: cannot read .xml; use .csv, .json"),
    ],
)
def test_faults_of_files(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    assert _error(file).startswith(f"{tmp_path}/{message}")


def test_faults_of_paths(tmp_path):
    assert _error(tmp_path / "no.jsonl") == f"{tmp_path}/no.jsonl: no such file or folder"
    assert "no such file or folder" in _error("rows.jsonl")
    assert "the folder has no data files" in _error(tmp_path)
    file = _write(tmp_path, ".jsonl")
    assert "a single file has no subset or split" in _error(file, split="test")


def test_name_that_the_hub_does_not_give(monkeypatch):
    import datasets

    def refuse(path, subset, *, split):
        raise datasets.exceptions.DatasetNotFoundError(f"no {path}\nat all: {subset} {split}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    message = _error("someone/thing", subset="main")
    assert message.startswith("someone/thing: no such file or folder, and the Hub does not give it")
    assert message.endswith("no someone/thing at all: main train")


def test_name_that_the_hub_gives(monkeypatch):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, *, split: table)
    rows = list(open_source("someone/thing", samples=1).rows())
    assert rows == [Row("someone/thing", 1, ROWS[0])]


def test_faulty_rows_are_counted_by_kind_where_they_may_be_skipped(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\n\xff\n{"a": 2}\n"x"\n')
    skipped: Counter[str] = Counter()
    rows = list(open_source(str(file)).rows(skipped))
    assert [(row.number, row.data["a"]) for row in rows] == [(1, 1), (5, 2)]
    assert skipped == {"not an object": 2, "invalid JSON": 1, "not UTF-8": 1}
    assert counted(skipped) == "2 x not an object, 1 x invalid JSON, 1 x not UTF-8"
    assert _error(file).startswith(f"{file} line 2: invalid JSON")


def test_no_row_left_says_why(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1\n2,3,4\n")
    with pytest.raises(UserError, match=r"no rows that can be read: 2 x another number of cells"):
        list(open_source(str(file)).rows(Counter()))


def test_row_error_crosses_processes():
    error = pickle.loads(pickle.dumps(RowError("f row 1: no", "a kind")))
    assert (str(error), error.kind) == ("f row 1: no", "a kind")


def test_csv_cells_of_any_size_and_quotes_that_never_close(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(f'a,b\n"{"x" * 300_000}","one\ntwo"\n\n')
    (row,) = open_source(str(file)).rows()
    assert len(row.data["a"]) == 300_000 and row.data["b"] == "one\ntwo"
    file.write_text('a,b\n1,"2\n3,4\n')
    assert _error(file).startswith(f"{file} row 1: invalid CSV: unexpected end of data")
    file.write_text("a,b,a\n1,2,3\n")
    assert _error(file) == f"{file}: the header names a more than once"


def test_json_of_one_object_over_several_lines(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"a": {"b": 1}}, indent=2))
    assert [row.data for row in open_source(str(file)).rows()] == [{"a": {"b": 1}}]
    file.write_text('{"a": 1}\n{"a": \n')
    assert _error(file).startswith(f"{file} line 2: invalid JSON")
