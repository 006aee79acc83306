"""Checkpoints that are refused, by the file and the tensor at fault; writes that fail."""

import json
import resource
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from surogate.kernels import tree
from surogate.models.config import from_hf
from surogate.models.hf import INDEX, CheckpointError, read_model, write_model
from surogate.models.init import init_model
from surogate.models.tree import Model
from tests.models.test_config import tiny
from tests.models.test_hf import DTYPES, F32


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Model]:
    """A sharded tiny Qwen3 and its weights."""
    config = from_hf(tiny("qwen3"))
    model = init_model(config, 0, F32)
    write_model(model, config, tmp_path / "m", dtype=F32, max_shard_bytes=20e3)
    return tmp_path / "m", model


def refuses(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_model(directory, from_hf(tiny("qwen3")), F32)
    assert "\n" not in str(error.value)


def edit(directory: Path, change: Any) -> str:
    """Applies ``change`` to the tensors of the last shard and returns its name."""
    file = sorted(directory.glob("model-*.safetensors"))[-1]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file.name


def test_missing_directory_and_files(saved: tuple[Path, Model]) -> None:
    directory, _ = saved
    refuses(directory / "nowhere", "nowhere: is not a directory")
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.rename(directory / "elsewhere")
    refuses(directory, f"{shard.name}: missing; fetch the model again")
    (directory / INDEX).unlink()
    refuses(directory, "has neither model.safetensors nor model.safetensors.index.json$")
    (directory / "pytorch_model.bin").touch()
    refuses(directory, "pytorch_model.bin must be converted to safetensors first")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])  # empty, no length, half a header, half the data
def test_truncated_file(saved: tuple[Path, Model], keep: int) -> None:
    shard = sorted(saved[0].glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:keep])
    refuses(saved[0], f"{shard.name}: truncated or not a safetensors file")


def test_missing_tensor(saved: tuple[Path, Model]) -> None:
    file = edit(saved[0], lambda tensors: tensors.pop("lm_head.weight"))
    refuses(saved[0], f"{file}: has no tensor lm_head.weight, which {INDEX} names")
    index = json.loads((saved[0] / INDEX).read_text())
    index["weight_map"].pop("lm_head.weight")
    (saved[0] / INDEX).write_text(json.dumps(index))
    refuses(saved[0], r"m: no file has tensor lm_head.weight of shape \(128, 32\)$")


def test_unknown_tensor(saved: tuple[Path, Model]) -> None:
    extra = np.zeros(16, np.float32)
    file = edit(saved[0], lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": extra}))
    refuses(saved[0], rf"{file}: tensor model.layers.0.self_attn.q_proj.bias of shape \(16,\) is")


def test_buffers_of_old_checkpoints_are_passed_over(saved: tuple[Path, Model]) -> None:
    directory, model = saved
    buffer = np.zeros(8, np.float32)
    edit(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": buffer}))
    got = read_model(directory, from_hf(tiny("qwen3")), F32)
    tree.map(np.testing.assert_array_equal, got, model)


def test_wrong_shape(saved: tuple[Path, Model]) -> None:
    file = edit(saved[0], lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}))
    refuses(
        saved[0],
        rf"{file}: tensor lm_head.weight has shape \(127, 32\), .* expects \(128, 32\)",
    )


@pytest.mark.parametrize(
    "dtype,short", [(np.float64, "F64"), (np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")]
)
def test_wrong_dtype(saved: tuple[Path, Model], dtype: Any, short: str) -> None:
    file = edit(saved[0], lambda t: t.update({"lm_head.weight": np.ones((128, 32), dtype)}))
    refuses(saved[0], f"{file}: tensor lm_head.weight has dtype {short}, .* BF16, F16, F32")


def test_one_tensor_in_two_files(saved: tuple[Path, Model]) -> None:
    file = edit(saved[0], lambda t: t.update({"model.embed_tokens.weight": np.ones((128, 32))}))
    refuses(saved[0], f"{file}: tensor model.embed_tokens.weight is in model-00001-of-")


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "index.json: cannot be read as JSON"),
        ("[]", "index.json: must hold a JSON object"),
        ("{}", "index.json: has no weight_map"),
        ('{"weight_map": {"x": "../x.safetensors"}}', "'../x.safetensors' is not the name of a"),
    ],
)
def test_bad_index(saved: tuple[Path, Model], text: str, message: str) -> None:
    (saved[0] / INDEX).write_text(text)
    refuses(saved[0], message)


def test_only_checkpoint_dtypes(saved: tuple[Path, Model], tmp_path: Path) -> None:
    config = from_hf(tiny("qwen3"))
    with pytest.raises(ValueError, match="must be one of bfloat16, float16, float32, got float64"):
        read_model(saved[0], config, np.dtype(np.float64))
    with pytest.raises(ValueError, match="must be one of .* got int8"):
        write_model(saved[1], config, tmp_path / "x", dtype=np.dtype(np.int8))


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    config = from_hf(tiny("qwen3"))
    model = init_model(config, 0, F32)
    model.layers[1].w_o[0, 0] = 1e5
    with pytest.raises(CheckpointError, match="layers.1.self_attn.o_proj.weight: exceeds"):
        write_model(model, config, tmp_path / "out", dtype=DTYPES["float16"])
    assert list(tmp_path.iterdir()) == []


def test_config_that_raw_does_not_describe(tmp_path: Path) -> None:
    import dataclasses

    config = from_hf(tiny("qwen3"))
    changed = dataclasses.replace(config, eps=1e-3)
    with pytest.raises(CheckpointError, match="config.raw does not describe config"):
        write_model(init_model(config, 0, F32), changed, tmp_path / "out", dtype=F32)


def test_a_write_that_fails_leaves_the_old_model(saved: tuple[Path, Model]) -> None:
    directory, model = saved
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="m: cannot be written: File too large"):
            write_model(model, from_hf(tiny("qwen3")), directory, dtype=F32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert [path.name for path in directory.parent.iterdir()] == ["m"]


def test_a_full_disk_says_what_is_needed(
    saved: tuple[Path, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="the disk is full; .* GB are needed"):
        write_model(saved[1], from_hf(tiny("qwen3")), saved[0], dtype=F32)
