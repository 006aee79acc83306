"""The report: a recorded file gives a recorded page, and what a file lacks is said in one line."""

import copy
import json
import sys
from pathlib import Path

import pytest

from bench import report
from bench.report import BEGIN, END, generated, tables_of, write
from surogate.errors import UserError

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
PAGE = f"# Results\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"
CSV = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void rmsnorm_fwd<bf16>(T1 *)","gpu__time_duration.sum","us","250"
"1","nvjet_hsh(Params)","gpu__time_duration.sum","us","750"
"""


def text_of(*paths):
    return generated(*tables_of(paths))


def changed(tmp_path, change, name="changed.json"):
    """The recorded file after ``change`` of its contents."""
    raw = json.loads(RECORDED.read_text())
    change(raw)
    path = tmp_path / name
    path.write_text(json.dumps(raw))
    return path


def of_group(raw, group):
    return next(each for each in raw["benchmarks"] if each["group"] == group)


def test_the_recorded_file_gives_the_recorded_page():
    assert text_of(RECORDED) + "\n" == (HERE / "recorded.md").read_text()


def test_a_page_keeps_its_notes_and_is_written_the_same_again(tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text(PAGE)
    write(page, text_of(RECORDED))
    once = page.read_text()
    assert once.startswith(f"# Results\n\nBefore.\n\n{BEGIN}\n\n- `recorded.json`: Test card")
    assert once.endswith(f"|\n\n{END}\n\nAfter.\n") and "old" not in once
    write(page, text_of(RECORDED))
    assert page.read_text() == once


def test_the_command_prints_and_writes(tmp_path, monkeypatch, capsys):
    page, profile = tmp_path / "RESULTS.md", tmp_path / "step.csv"
    page.write_text(PAGE)
    profile.write_text(CSV)
    monkeypatch.setattr(
        sys, "argv", ["report", str(RECORDED), str(profile), "--results", str(page)]
    )
    report.main()
    printed = capsys.readouterr().out
    assert "Training steps" in printed and "Profile of step by kind" in printed
    assert "| products | 750 us | 1 | 75.0 % |" in page.read_text()
    assert "| `rmsnorm_fwd<bf16>` | 250 us | 1 | 25.0 % |" in page.read_text()


def test_of_two_results_of_a_case_the_later_counts(tmp_path):
    def faster(raw):
        raw["benchmarks"] = [of_group(raw, "steps")]
        raw["benchmarks"][0]["extra_info"]["tokens_per_second"] = 123456

    again = changed(tmp_path, faster)
    assert "123,456" in text_of(RECORDED, again) and "123,456" not in text_of(again, RECORDED)
    assert text_of(RECORDED, again).count("| Qwen3-0.6B LoRA, 2 x 2048 x 4 |") == 1


def test_a_peer_without_us_has_no_ratio(tmp_path):
    def only_peers(raw):
        raw["benchmarks"] = [
            each for each in raw["benchmarks"] if each["extra_info"].get("variant") == "compile"
        ]

    text = text_of(changed(tmp_path, only_peers))
    assert " x |\n" not in text and "| 40,960, 8.0 GiB |" in text


@pytest.mark.parametrize(
    ("group", "key"),
    [("steps", key) for key in ("shape", "variant", "tokens_per_second", "ceiling", "memory_gib")]
    + [
        ("steps", key)
        for key in ("speed_of_light", "planned_gib", "host_ms", "card", "commit", "versions")
    ]
    + [("ops", key) for key in ("case", "rate", "share", "card", "commit", "versions")]
    + [("ops", "equal_copy")]
    + [("gemm", key) for key in ("shape", "product", "rate", "share", "ceilings")],
)
def test_a_missing_key_is_an_error_in_one_line(group, key, tmp_path, monkeypatch):
    def drop(raw):
        del of_group(raw, group)["extra_info"][key]

    path = changed(tmp_path, drop)
    monkeypatch.setattr(sys, "argv", ["report", str(path), "--results", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as error:
        report.main()
    message = str(error.value)
    assert message.startswith(f"error: {path}: bench/test_{group}.py::") and "\n" not in message
    assert f"has no extra_info.{key}" in message


def mixed(raw):
    raw["benchmarks"][1]["extra_info"]["commit"] = "other"


def strange(raw):
    raw["benchmarks"].append(copy.deepcopy(raw["benchmarks"][0]) | {"group": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(benchmarks=[]), "holds no benchmarks"),
        (mixed, "mixes sittings (Test card, abc1234, other)"),
        (strange, "is of no suite of bench/"),
    ],
)
def test_files_that_are_refused(change, message, tmp_path):
    with pytest.raises(UserError, match="changed.json: ") as error:
        text_of(changed(tmp_path, change))
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (broken, tmp_path / "missing.json", tmp_path / "missing.csv"):
        with pytest.raises(UserError, match=f"{path.name}: cannot be read"):
            text_of(path)


@pytest.mark.parametrize("page", ["no markers", f"{END}\n{BEGIN}", PAGE + BEGIN])
def test_a_page_without_its_markers_is_left_alone(page, tmp_path):
    path = tmp_path / "RESULTS.md"
    path.write_text(page)
    with pytest.raises(UserError, match="must hold"):
        write(path, "text")
    assert path.read_text() == page


def test_the_page_of_the_repository_has_its_markers():
    page = report.RESULTS.read_text()
    assert page.count(BEGIN) == page.count(END) == 1 and page.index(BEGIN) < page.index(END)
