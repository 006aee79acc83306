"""Every flipped bit of a folder is found, and named on one line."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from surogate import checkpoint, manifest
from surogate.checkpoint import Checkpoint, save
from surogate.cli import main
from surogate.manifest import MANIFEST, Damaged, faults, read_manifest, summary
from surogate.models.files import Facts, Staging, planned

FLIPS = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint with an array of each dtype that a state has, and an empty one."""
    rng = np.random.default_rng(0)
    trained = {
        "layers.0.w": rng.standard_normal((9, 5)).astype(ml_dtypes.bfloat16),
        "é": rng.standard_normal(7).astype(np.float32),
        "none": np.zeros((0, 3), np.float32),
    }
    optimizer = {"step": np.array(3, np.int64), "codes": np.arange(200, dtype=np.uint8)}
    settings = {"lr": 1e-4, "names": ["x", "ß"], "text": 'a\n"b"', "none": None, "deep": {"a": [1]}}
    return save(tmp_path, Checkpoint(3, trained, optimizer, settings, {"rows": "abc"}), keep=1)


def test_every_flipped_bit_is_found(folder):
    """A thousand random bits over all files, each file as often as it has bytes, header and all."""
    rng = random.Random(0)
    files = sorted(folder.iterdir())
    sizes = [file.stat().st_size for file in files]
    assert [file.name for file in files] == [
        "checkpoint.json",
        MANIFEST,
        "optimizer.safetensors",
        "trained.safetensors",
    ]
    assert faults(folder) == []
    for file in rng.choices(files, sizes, k=FLIPS):
        raw = file.read_bytes()
        at, bit = rng.randrange(len(raw)), rng.randrange(8)
        changed = bytearray(raw)
        changed[at] ^= 1 << bit
        file.write_bytes(changed)
        found = faults(folder)
        assert len(found) == 1 and found[0].startswith(f"{file}: "), (file.name, at, bit, found)
        assert "\n" not in found[0]
        file.write_bytes(raw)
    assert faults(folder) == []


@pytest.mark.parametrize("name", ["checkpoint.json", MANIFEST, "trained.safetensors"])
def test_every_bit_of_a_header_and_of_json_is_found(folder, name):
    """Not some of them but all: the seal, the spaces between values, the length of a header."""
    file = folder / name
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little") if file.suffix == ".safetensors" else len(raw)
    for at in range(end):
        changed = bytearray(raw)
        changed[at] ^= 1 << (at % 8)
        file.write_bytes(changed)
        assert len(faults(folder)) == 1, (at, raw[at - 5 : at + 5])


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda f, n: f.unlink(), "no such file or directory"),
        (lambda f, n: os.truncate(f, n - 1), "has {less:,} bytes, was written with {size:,}"),
        (lambda f, n: os.truncate(f, n + 1), "has {more:,} bytes, was written with {size:,}"),
        (lambda f, n: f.write_bytes(b"\xff" * n), "its header is damaged"),
    ],
)
def test_other_damage_is_named(folder, change, message):
    file = folder / "trained.safetensors"
    size = file.stat().st_size
    change(file, size)
    wanted = message.format(size=size, less=size - 1, more=size + 1)
    assert faults(folder) == [f"{file}: {wanted}"]


def test_the_tensor_is_named(folder):
    file = folder / "trained.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert faults(folder) == [f"{file}: tensor é is damaged"]


def test_two_files_changed_for_each_other(folder):
    """Each is whole in itself, and still not what was written there."""
    one, other = folder / "trained.safetensors", folder / "optimizer.safetensors"
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert len(faults(folder)) == 2


def test_hashes_are_those_of_the_bytes(folder):
    """By the library that owns the format, and by hashlib over what it reads."""
    import hashlib

    files = read_manifest(folder)
    for name in ("trained.safetensors", "optimizer.safetensors"):
        tensors = load_file(folder / name)
        facts = files[name]["tensors"]
        assert facts.keys() == tensors.keys()
        for key, array in tensors.items():
            assert facts[key]["sha256"] == hashlib.sha256(array.tobytes()).hexdigest()
            assert facts[key]["shape"] == list(array.shape)
    raw = (folder / "checkpoint.json").read_bytes()
    assert files["checkpoint.json"]["sha256"] == hashlib.sha256(raw).hexdigest()
    assert json.loads((folder / MANIFEST).read_text())["files"] == files


def test_large_tensors_are_hashed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 1000)
    staging = Staging(tmp_path, {})
    staging.tensors("x.safetensors", planned({"a": np.arange(5001, dtype=np.uint8)}))
    manifest.write_manifest(staging)
    assert faults(tmp_path) == []
    raw = bytearray((tmp_path / "x.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "x.safetensors").write_bytes(raw)
    assert faults(tmp_path) == [f"{tmp_path / 'x.safetensors'}: tensor a is damaged"]


def test_weights_that_the_manifest_does_not_know(folder):
    """A loader would take them for part of the model."""
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("mine")
    assert faults(folder) == [
        f"{folder / 'model-00002-of-00002.safetensors'}: is not in {MANIFEST}"
    ]


def test_another_format(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 7)
        manifest.write_manifest(Staging(folder, read_manifest_as_it_is(folder)))
    with pytest.raises(Damaged, match="is of format 7, this version reads format 1"):
        read_manifest(folder)


def read_manifest_as_it_is(folder: Path) -> dict[str, Facts]:
    files: dict[str, Facts] = json.loads((folder / MANIFEST).read_text())["files"]
    return files


def verify(path: Path) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(main, ["verify", str(path)])
    return result.exit_code, result.stdout.splitlines(), result.stderr


def test_verb(folder):
    run = folder.parent
    whole = f"ok: {folder}: {summary(folder)}"
    assert summary(folder).startswith("3 files, 5 tensors, ")
    assert verify(run) == verify(folder) == (0, [whole], "")
    second = save(run, Checkpoint(4, {"w": np.ones(3)}, {}, {}, {}), keep=2)
    file = second / "trained.safetensors"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    (second / "checkpoint.json").unlink()
    status, lines, errors = verify(run)
    assert (status, errors) == (1, f"error: {run}: 2 faults, named above\n")
    assert lines == [
        whole,
        f"{file}: its header is damaged",
        f"{second / 'checkpoint.json'}: no such file or directory",
    ]
    (second / MANIFEST).unlink()  # a checkpoint must have one
    assert verify(run)[1] == [whole, f"{second / MANIFEST}: is missing"]
    result = CliRunner().invoke(main, ["verify", str(run), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout) == {
        "ok": False,
        "folders": [
            {"folder": str(folder), "faults": [], "summary": whole.rpartition(f"{folder}: ")[2]},
            {
                "folder": str(second),
                "faults": [f"{second / MANIFEST}: is missing"],
                "summary": "",
            },
        ],
    }


def test_verb_refuses(tmp_path):
    assert verify(tmp_path / "x")[::2] == (1, f"error: {tmp_path / 'x'}: is not a folder\n")
    message = f"error: {tmp_path}: neither it nor a folder in it has a {MANIFEST}\n"
    assert verify(tmp_path)[::2] == (1, message)


def test_what_may_not_be_read_is_said(folder, monkeypatch):
    real = Path.open

    def opened(path: Path, *rest: Any, **options: Any) -> Any:
        if path.name == checkpoint.TRAINED:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(Path, "open", opened)
    status, lines, _ = verify(folder)
    assert (status, lines) == (1, [f"{folder / checkpoint.TRAINED}: permission denied"])
