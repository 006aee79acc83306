"""A checkpoint is whole at every moment, and a damaged one is refused by name."""

import errno
import os
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from surogate import checkpoint, manifest
from surogate.checkpoint import (
    FACTS,
    OPTIMIZER,
    TRAINED,
    Checkpoint,
    changes,
    clean,
    discard,
    fill_,
    is_finite,
    load,
    newest,
    newest_whole,
    save,
)
from surogate.errors import UserError
from surogate.manifest import MANIFEST, faults
from surogate.models import files
from tests.oracle import same_bits


def made(step: int, *, size: int = 7) -> Checkpoint:
    """A checkpoint whose numbers tell its step."""
    rng = np.random.default_rng(step)
    weight = rng.standard_normal((size, 3)).astype(np.float32)
    trained = {"a": weight.astype(ml_dtypes.bfloat16), "layers.0.b": weight}
    moments = {"step": np.array(step, np.int64), "m.a": weight[::2], "v.a": weight.T}
    return Checkpoint(step, trained, moments, {"lr": 0.1, "names": ["x"]}, {"rows": "abc"})


def read(path: Path, like: Checkpoint) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, through load and fill_."""
    load(path)
    found: dict[str, np.ndarray] = {}
    for file, arrays in ((TRAINED, like.trained), (OPTIMIZER, like.optimizer)):
        blank = {name: np.zeros_like(array) for name, array in arrays.items()}
        fill_(path / file, blank, put=lambda array: array)
        found |= blank
    return found


def assert_whole(directory: Path, step: int) -> None:
    """The newest checkpoint is that of a step, and every number of it is right."""
    path = newest(directory)
    assert path is not None and path.name == f"step_{step:08d}"
    like = made(step)
    assert faults(path) == []
    for name, array in read(path, like).items():
        same_bits(array, {**like.trained, **like.optimizer}[name])
    clean(directory)
    assert not list(directory.glob(".partial*"))


def test_round_trip(tmp_path):
    path = save(tmp_path / "new" / "folder", made(12), keep=3)
    saved = load(path)
    assert (saved.path, saved.step) == (path, 12)
    assert saved.settings == {"lr": 0.1, "names": ["x"]}
    assert saved.sources == {"rows": "abc"}
    assert_whole(path.parent, 12)


def test_files_are_what_safetensors_reads(tmp_path):
    like = made(3)
    path = save(tmp_path, like, keep=1)
    for file, arrays in ((TRAINED, like.trained), (OPTIMIZER, like.optimizer)):
        found = load_file(path / file)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            same_bits(found[name], array)


def test_keeps_the_newest(tmp_path):
    for step in (2, 10, 99_999_999, 100_000_000):  # the last has one digit more
        save(tmp_path, made(step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_100000000", "step_99999999"]
    assert_whole(tmp_path, 100_000_000)


def test_other_folders_are_left_alone(tmp_path):
    for name in ("step_final", "data", "step_"):
        (tmp_path / name).mkdir()
    save(tmp_path, made(1), keep=1)
    discard(tmp_path)
    assert newest(tmp_path) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "step_", "step_final"]


def test_no_folder_has_no_checkpoint(tmp_path):
    assert newest(tmp_path / "none") is None


CODE = {module.__file__ for module in (checkpoint, files, manifest)}


class Killed(BaseException):
    """What ends a process here: nothing in the code under test catches it."""


def executed_lines(directory: Path, *, kill_at: int | None = None) -> list[tuple[str, int]]:
    """Saves step 2; returns our lines that ran, or raises Killed before number ``kill_at``."""
    seen: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in CODE:
            return None
        if event == "line":
            if len(seen) == kill_at:
                raise Killed
            seen.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save(directory, made(2), keep=1)
    finally:
        sys.settrace(before)
    return seen


# A process that dies closes no file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_killed_before_any_line_of_a_save(tmp_path):
    """Whatever line the process dies at, the first or the last time that it comes there, there is
    one whole checkpoint: the one before or this.
    """
    first = tmp_path / "first"
    save(first, made(1), keep=1)
    shutil.copytree(first, tmp_path / "all")
    lines = executed_lines(tmp_path / "all")
    places = {lines.index(line) for line in lines}
    places |= {len(lines) - 1 - lines[::-1].index(line) for line in lines}
    assert len(places) > 100
    reached = []
    for number in sorted(places):
        directory = tmp_path / "run"
        shutil.copytree(first, directory)
        with pytest.raises(Killed):
            executed_lines(directory, kill_at=number)
        path = newest(directory)
        assert path is not None
        step = int(path.name[5:])
        assert_whole(directory, step)
        reached.append(step)
        save(directory, made(2), keep=1)  # and the next run can save
        assert_whole(directory, 2)
        shutil.rmtree(directory)
    assert reached == sorted(reached)  # first the old one, from some line on the new one
    assert {1, 2} == set(reached)


class Failing:
    """Lets a number of calls through, then raises ENOSPC for ever."""

    def __init__(self, call: Any, allowed: int) -> None:
        self.call, self.allowed, self.failed = call, allowed, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.allowed == 0:
            self.failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.allowed -= 1
        return self.call(*args, **kwargs)


@pytest.mark.parametrize("where", ["mkdir", "open", "write", "fsync", "replace", "os.open"])
def test_the_disk_refuses_at_any_call(tmp_path, monkeypatch, where):
    """Every write, sync or rename of a save fails in turn; the checkpoint before stays whole."""
    save(tmp_path, made(1), keep=1)
    refused = 0
    while True:
        with monkeypatch.context() as patch:
            failing = refuse(patch, where, refused)
            try:
                save(tmp_path, made(2), keep=5)
            except UserError as error:
                assert failing.failed
                assert "step_00000002: cannot write the checkpoint: no space left" in str(error)
                assert str(error).endswith("; earlier checkpoints are whole")
            else:
                assert not failing.failed
                break
        path = newest(tmp_path)
        if (
            path is not None and path.name != "step_00000002"
        ):  # the rename is the point of no return
            assert_whole(tmp_path, 1)
        else:
            assert_whole(tmp_path, 2)
            discard(tmp_path)
            save(tmp_path, made(1), keep=1)
        refused += 1
    assert refused >= 1


def refuse(patch: pytest.MonkeyPatch, where: str, allowed: int) -> Failing:
    """Makes one kind of call fail after ``allowed`` that go through."""
    if where == "write":
        failing = Failing(lambda write, block: write(block), allowed)
        real_open = Path.open

        class File:
            def __init__(self, file: Any) -> None:
                self.file = file

            def __enter__(self) -> "File":
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

            def write(self, block: Any) -> int:
                return failing(self.file.write, block)

        def opened(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
            file = real_open(path, mode, *rest, **options)
            return File(file) if "w" in mode else file

        patch.setattr(Path, "open", opened)
        return failing
    owner, name = {
        "mkdir": (Path, "mkdir"),
        "open": (Path, "open"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace"),
        "os.open": (os, "open"),
    }[where]
    real = getattr(owner, name)
    failing = Failing(real, allowed)
    patch.setattr(owner, name, lambda *a, **k: failing(*a, **k))
    return failing


def damage(file: Path, kind: str) -> None:
    raw = bytearray(file.read_bytes())
    match kind:
        case "missing":
            file.unlink()
            return
        case "truncated":
            raw = raw[:-5]
        case "flipped":
            raw[len(raw) // 2] ^= 1
        case "empty":
            raw = bytearray()
    file.write_bytes(raw)


@pytest.mark.parametrize("name", [TRAINED, OPTIMIZER, FACTS, MANIFEST])
@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "empty"])
def test_a_damaged_newest_gives_way_to_the_one_before(tmp_path, name, kind):
    save(tmp_path, made(1), keep=3)
    whole = save(tmp_path, made(2), keep=3)
    damaged = [save(tmp_path, made(step), keep=4) for step in (3, 4)]
    for path in damaged:
        damage(path / name, kind)
    said: list[str] = []
    saved = newest_whole(tmp_path, say=said.append)
    assert saved is not None and saved.path == whole
    assert [line.startswith(f"{p / name}: ") for line, p in zip(said, damaged[::-1], strict=True)]
    assert said[0].endswith(
        ": going on from step_00000002, step_00000004 is now step_00000004.damaged"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000001",
        "step_00000002",
        "step_00000003.damaged",
        "step_00000004.damaged",
    ]
    assert_whole(tmp_path, 2)
    said.clear()
    assert newest_whole(tmp_path, say=said.append) == saved and said == []


def test_no_whole_checkpoint_is_an_error_and_nothing_is_moved(tmp_path):
    paths = [save(tmp_path, made(step), keep=2) for step in (1, 2)]
    for path in paths:
        damage(path / TRAINED, "flipped")
    with pytest.raises(UserError) as error:
        newest_whole(tmp_path, say=pytest.fail)
    message = str(error.value)
    assert message.startswith(f"{paths[1] / TRAINED}: ") and "\n" not in message
    assert "no checkpoint before it is whole; put it back from a copy" in message
    assert sorted(tmp_path.iterdir()) == paths
    assert newest_whole(tmp_path / "none", say=pytest.fail) is None


def test_a_checkpoint_that_may_not_be_read_is_not_a_damaged_one(tmp_path, monkeypatch):
    path = save(tmp_path, made(1), keep=1)

    def refused(folder: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / TRAINED))

    monkeypatch.setattr(checkpoint, "faults", refused)
    with pytest.raises(UserError, match=f"{path / TRAINED}: permission denied"):
        newest_whole(tmp_path, say=pytest.fail)
    assert list(tmp_path.iterdir()) == [path]


def test_rotation_looks_at_steps_up_to_the_one_saved(tmp_path):
    """A damaged later one that still lies there takes no place among those that are kept."""
    for step in (1, 2, 9):
        save(tmp_path, made(step), keep=3)
    damage(tmp_path / "step_00000009" / TRAINED, "flipped")
    save(tmp_path, made(3), keep=2)
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "step_00000002",
        "step_00000003",
        "step_00000009",
    ]


def test_other_format(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 99)
        path = save(tmp_path, made(1), keep=1)
    with pytest.raises(UserError, match="is of format 99, this version reads format 2"):
        load(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["trained", "optimizer"])
def test_what_is_not_finite_is_never_saved(tmp_path, dtype, value, where):
    good = save(tmp_path, made(1), keep=1)
    array = np.full((300, 700), 3e38, dtype)  # more than a chunk, and near the end of the range
    save(tmp_path / "near", made(2)._replace(trained={"w": array}), keep=1)
    array[299, 1] = value
    with pytest.raises(UserError, match="w holds values that are not finite: the checkpoint is"):
        save(tmp_path, made(2)._replace(**{where: {"w": array}}), keep=1)
    assert_whole(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["near", good.name]


def test_whole_numbers_are_finite():
    assert is_finite(np.array(7, np.int64)) and is_finite(np.zeros((0, 3), np.float32))


def test_room_is_looked_at_before_a_byte_is_written(tmp_path, monkeypatch):
    save(tmp_path, made(1), keep=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(checkpoint.Staging, "tensors", lambda *a: pytest.fail("wrote"))
    with pytest.raises(UserError, match="device: 1,048,842 bytes are needed, 1,000 are free"):
        save(tmp_path, made(2), keep=1)
    assert_whole(tmp_path, 1)


@pytest.mark.parametrize(
    "arrays,message",
    [
        ({"a": np.zeros((7, 3), ml_dtypes.bfloat16)}, r"layers.0.b is on one side alone \(1 such"),
        (
            {"a": np.zeros((7, 3), np.float32), "layers.0.b": np.zeros((7, 3), np.float32)},
            r"a is bfloat16\[7, 3\], this run has float32\[7, 3\]",
        ),
        (
            {"a": np.zeros((7, 4), ml_dtypes.bfloat16), "layers.0.b": np.zeros((7, 3), np.float32)},
            r"a is bfloat16\[7, 3\], this run has bfloat16\[7, 4\]",
        ),
    ],
)
def test_arrays_of_another_run(tmp_path, arrays, message):
    path = save(tmp_path, made(1), keep=1)
    with pytest.raises(UserError, match=message):
        fill_(path / TRAINED, arrays, put=lambda array: array)


def test_changes_name_each_setting():
    saved = {"lr": 0.1, "rank": 4, "names": ["a"]}
    assert changes(saved, {"lr": 0.1, "rank": 4, "names": ("a",)}) == {}
    assert changes(saved, {"lr": 0.2, "names": ["a"], "new": True}) == {
        "lr": "lr: 0.1 in the checkpoint, 0.2 now",
        "new": "new: None in the checkpoint, True now",
        "rank": "rank: 4 in the checkpoint, None now",
    }
    rows = {"path": "a.jsonl", "type": "text"}
    assert changes({"datasets": [rows]}, {"datasets": [rows | {"type": "auto"}, rows]}) == {
        "datasets.0.type": "datasets.0.type: 'text' in the checkpoint, 'auto' now",
        "datasets.1.path": "datasets.1.path: None in the checkpoint, 'a.jsonl' now",
        "datasets.1.type": "datasets.1.type: None in the checkpoint, 'text' now",
    }


def test_saving_takes_no_memory_but_one_array(tmp_path):
    import tracemalloc

    large = {f"w{i}": np.ones((256, 1024), np.float32) for i in range(16)}  # 1 MiB each
    tracemalloc.start()
    try:
        path = save(tmp_path, Checkpoint(1, large, {}, {}, {}), keep=1)
        fill_(path / TRAINED, large, put=lambda array: array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20
