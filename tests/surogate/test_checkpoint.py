"""A checkpoint is whole at every moment, and a damaged one is refused by name."""

import errno
import json
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

from surogate import checkpoint
from surogate.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    TRAINED,
    Checkpoint,
    changes,
    discard,
    fill_,
    load,
    newest,
    save,
)
from surogate.errors import UserError
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
    for name, array in read(path, like).items():
        same_bits(array, {**like.trained, **like.optimizer}[name])
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


class Killed(BaseException):
    """What ends a process here: nothing in the code under test catches it."""


def executed_lines(directory: Path, *, kill_at: int | None = None) -> int:
    """Saves step 2, counting lines of checkpoint.py; raises Killed before line ``kill_at``."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != checkpoint.__file__:
            return None
        if event == "line":
            count += 1
            if count == kill_at:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save(directory, made(2), keep=1)
    finally:
        sys.settrace(before)
    return count


# A process that dies closes no file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_killed_before_any_line_of_a_save(tmp_path):
    """Whatever line the process dies at, there is one whole checkpoint: the one before or this."""
    first = tmp_path / "first"
    save(first, made(1), keep=1)
    shutil.copytree(first, tmp_path / "all")
    lines = executed_lines(tmp_path / "all")
    assert lines > 60
    seen = []
    for number in range(1, lines + 1):
        directory = tmp_path / "run"
        shutil.copytree(first, directory)
        with pytest.raises(Killed):
            executed_lines(directory, kill_at=number)
        path = newest(directory)
        assert path is not None
        step = int(path.name[5:])
        assert_whole(directory, step)
        seen.append(step)
        save(directory, made(2), keep=1)  # and the next run can save
        assert_whole(directory, 2)
        shutil.rmtree(directory)
    assert seen == sorted(seen)  # first the old one, from some line on the new one
    assert {1, 2} == set(seen)


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
        if newest(tmp_path).name != "step_00000002":  # the rename is the point of no return
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


@pytest.mark.parametrize("name", [TRAINED, OPTIMIZER, MANIFEST])
@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped", "empty"])
def test_damage_is_named(tmp_path, name, kind):
    save(tmp_path, made(1), keep=2)
    path = save(tmp_path, made(2), keep=2)
    damage(path / name, kind)
    with pytest.raises(UserError) as error:
        read(newest(tmp_path), made(2))
    assert str(path / name) in str(error.value)
    assert "\n" not in str(error.value)
    assert f"remove {path} to go on from the checkpoint before it" in str(error.value)


def test_other_format(tmp_path):
    path = save(tmp_path, made(1), keep=1)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="is of format 99, this version reads format 1"):
        load(path)


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
    assert changes(saved, {"lr": 0.1, "rank": 4, "names": ("a",)}) == []
    assert changes(saved, {"lr": 0.2, "names": ["a"], "new": True}) == [
        "lr: 0.1 in the checkpoint, 0.2 now",
        "new: None in the checkpoint, True now",
        "rank: 4 in the checkpoint, None now",
    ]


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


def test_any_flipped_byte_of_the_manifest_is_noticed(tmp_path):
    path = save(tmp_path, made(1), keep=1)
    raw = (path / MANIFEST).read_bytes()
    for index in range(0, len(raw), 5):
        changed = bytearray(raw)
        changed[index] ^= 1
        (path / MANIFEST).write_bytes(changed)
        try:
            same = json.loads(changed) == json.loads(raw)
        except ValueError:
            same = False
        if not same:
            with pytest.raises(UserError):
                load(path)
