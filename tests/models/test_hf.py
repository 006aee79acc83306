"""Checkpoints: bit-equal round trips through transformers; names of tensors, and fresh weights."""

import errno
import itertools
import json
import os
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from surogate.kernels import tree
from surogate.kernels.arrays import BF16
from surogate.models.companions import COMPANIONS
from surogate.models.config import from_hf, read_config
from surogate.models.files import open_tensors
from surogate.models.hf import INDEX, SINGLE, CheckpointError, read_model, write_model
from surogate.models.init import init_model
from surogate.models.names import from_named, layout, named
from tests.models.test_config import hf_config, tiny

# A checkout has a folder called kernels: transformers must not take it for the package kernels.
sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]

ARCHITECTURES = ["llama", "qwen2", "qwen3"]
DTYPES = {
    "bfloat16": BF16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
F32 = DTYPES["float32"]


def torch_model(raw: dict[str, Any], dtype: str) -> Any:
    """A transformers model whose every parameter is random, norms and biases too."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(raw))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(getattr(torch, dtype))


def bits(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors of torch or NumPy as comparable bytes with dtype and shape."""
    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            (tensor if isinstance(tensor, np.ndarray) else tensor.view(_bytes()).numpy()).tobytes(),
        )
        for name, tensor in state.items()
    }


def _bytes() -> Any:
    import torch

    return torch.uint8


def parameters(model: Any) -> dict[str, Any]:
    return bits({name: value.detach() for name, value in model.named_parameters()})


def reload(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")


@pytest.mark.parametrize("shards", ["single", "sharded"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_round_trip(architecture: str, dtype: str, shards: str, tmp_path: Path) -> None:
    theirs = torch_model(tiny(architecture), dtype)
    theirs.save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB" if shards != "single" else 1e9
    )
    assert (tmp_path / "theirs" / INDEX).exists() == (shards == "sharded")
    config = read_config(tmp_path / "theirs")
    assert config.torch_dtype == dtype

    model = read_model(tmp_path / "theirs", config, DTYPES[dtype])
    assert bits(named(model, config)) == parameters(theirs)

    limit = 20e3 if shards == "sharded" else 5e9
    ours = tmp_path / "ours"
    write_model(model, config, ours, dtype=DTYPES[dtype], max_shard_bytes=limit)
    assert (ours / INDEX).exists() == (shards == "sharded")
    back = reload(ours)
    assert parameters(back) == parameters(theirs)
    assert bits(named(read_model(ours, read_config(ours), DTYPES[dtype]), config)) == parameters(
        theirs
    )


@pytest.mark.parametrize("wanted", list(DTYPES))
@pytest.mark.parametrize("stored", list(DTYPES))
def test_dtypes_convert_once(stored: str, wanted: str, tmp_path: Path) -> None:
    import torch

    theirs = torch_model(tiny("qwen2"), stored)
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    model = read_model(tmp_path / "theirs", config, DTYPES[wanted])
    expected = parameters(theirs.to(getattr(torch, wanted)))
    assert bits(named(model, config)) == expected
    # The same conversion while writing, from what was stored.
    source = read_model(tmp_path / "theirs", config, DTYPES[stored])
    write_model(source, config, tmp_path / "ours", dtype=DTYPES[wanted])
    assert parameters(reload(tmp_path / "ours")) == expected
    assert read_config(tmp_path / "ours").torch_dtype == wanted


def test_shards_are_full_and_in_order(tmp_path: Path) -> None:
    config = from_hf(tiny("qwen3"))
    model = init_model(config, 0, F32)
    write_model(model, config, tmp_path / "out", dtype=F32, max_shard_bytes=20e3)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in tree.leaves(model))
    assert list(index["weight_map"]) == list(named(model, config))
    files = sorted(set(index["weight_map"].values()))
    sizes = [
        sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / file).values())
        for file in files
    ]
    assert max(sizes) <= 20e3
    assert all(one + other > 20e3 for one, other in itertools.pairwise(sizes))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    with safe_open(tmp_path / "out" / files[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_peak_memory_is_the_model_and_one_leaf(tmp_path: Path) -> None:
    config = from_hf(tiny("qwen3", num_hidden_layers=8, intermediate_size=4096))
    write_model(init_model(config, 0, F32), config, tmp_path / "out", dtype=F32)
    tracemalloc.start()
    try:
        model = read_model(tmp_path / "out", config, BF16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    leaves = [leaf.nbytes for leaf in tree.leaves(model)]
    # The largest leaf once more in its own dtype and in the file's, and headers.
    assert peak < sum(leaves) + 3 * max(leaves) + 200_000 < 2 * sum(leaves)


@pytest.mark.parametrize("raw", [False, True])  # as the library reads, and codes that it does not
def test_files_are_mapped_and_only_read(raw: bool, tmp_path: Path) -> None:
    """Through the page cache, as any file system gives them: a network's, or one that is mounted
    for reading alone.
    """
    config = from_hf(tiny("qwen3"))
    write_model(init_model(config, 0, F32), config, tmp_path / "out", dtype=F32)
    file = tmp_path / "out" / SINGLE
    before = file.stat().st_mtime_ns, file.parent.stat().st_mtime_ns
    with open_tensors([file], raw=raw) as tensors:
        for name, tensor in tensors.items():
            assert tensor.handle.get_tensor(name).shape == tensor.shape
        mapped = Path("/proc/self/maps").read_text().splitlines()
        opened = [
            p.name for p in Path("/proc/self/fd").iterdir() if p.exists() and p.samefile(file)
        ]
        flags = [Path(f"/proc/self/fdinfo/{number}").read_text().split()[3] for number in opened]
    rights = {line.split()[1][:3] for line in mapped if line.endswith(str(file))}
    assert rights == {"r--"}
    assert not [line for line in mapped if re.search("cufile|kvikio|fastsafetensors", line)]
    assert not any(int(octal, 8) & (os.O_ACCMODE | os.O_DIRECT) for octal in flags)
    assert (file.stat().st_mtime_ns, file.parent.stat().st_mtime_ns) == before


def test_put_sees_every_leaf_in_order(tmp_path: Path) -> None:
    config = from_hf(tiny("qwen2"))
    model = init_model(config, 0, F32)
    write_model(model, config, tmp_path / "out", dtype=F32)
    seen: list[str] = []

    def put(path: str, array: np.ndarray) -> np.ndarray:
        seen.append(path)
        assert array.flags.writeable and array.flags.c_contiguous
        return 2 * array

    got = read_model(tmp_path / "out", config, F32, put=put)
    assert seen == [field.path for field in tree.leaves(layout(config))]
    assert seen[:3] == ["embed", "layers.0.attn_norm", "layers.0.w_qkv"]
    tree.map(lambda one, other: np.testing.assert_array_equal(one, 2 * other), got, model)


def test_tied_head_in_the_file(tmp_path: Path) -> None:
    config = from_hf(tiny("qwen2", vocab_size=5000))  # compared in chunks of 4096 rows
    model = init_model(config, 0, F32)
    write_model(model, config, tmp_path / "out", dtype=F32)
    path = tmp_path / "out" / SINGLE
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path)
    assert read_model(tmp_path / "out", config, F32).head is None
    changed = tensors["model.embed_tokens.weight"].copy()
    changed[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": changed}, path)
    with pytest.raises(CheckpointError, match="lm_head.weight .* differs from model.embed_tokens"):
        read_model(tmp_path / "out", config, F32)


def test_companions_are_copied_byte_equal(tmp_path: Path) -> None:
    config = from_hf(tiny("qwen3"))
    source = tmp_path / "source"
    source.mkdir()
    for i, name in enumerate(COMPANIONS):
        (source / name).write_bytes(bytes([i, 0xFF, 13, 10]))
    (source / "README.md").write_text("not copied")
    model = init_model(config, 0, F32)
    write_model(model, config, tmp_path / "out", dtype=F32, source_directory=source)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {*COMPANIONS, "config.json", SINGLE}
    for name in COMPANIONS:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    "config_ids,generation_ids,config_after,generation_after",
    [
        (5, 5, [5, 7], [5, 7]),
        ([5, 6], [6], [5, 6, 7], [6, 7]),
        (None, None, [7], [7]),
        (5, None, [5, 7], [5, 7]),  # what transformers takes from config.json then
        (7, 5, 7, [5, 7]),
        (7, None, 7, [7]),
        ([5, 7], 7, [5, 7], 7),
    ],
)
def test_stop_token(
    config_ids: Any, generation_ids: Any, config_after: Any, generation_after: Any, tmp_path: Path
) -> None:
    config = from_hf(tiny("llama", eos_token_id=config_ids))
    text = json.dumps({"top_k": 3} | ({"eos_token_id": generation_ids} if generation_ids else {}))
    (tmp_path / "generation_config.json").write_text(text)
    model, out = init_model(config, 0, F32), tmp_path / "out"
    write_model(model, config, out, dtype=F32, source_directory=tmp_path, stop_token=7)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == config_after
    written = (out / "generation_config.json").read_text()
    assert json.loads(written) == {"top_k": 3, "eos_token_id": generation_after}
    assert (written == text) == (generation_ids == 7)
    write_model(model, config, tmp_path / "bare", dtype=F32, stop_token=7)
    assert not (tmp_path / "bare" / "generation_config.json").exists()


def test_config_is_kept(tmp_path: Path) -> None:
    raw = tiny("llama", use_cache=False, torch_dtype="float16")
    config = from_hf(raw)
    write_model(init_model(config, 0, F32), config, tmp_path / "out", dtype=BF16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == raw | {"torch_dtype": "bfloat16"}


def test_writes_over_an_earlier_model(tmp_path: Path) -> None:
    """Weight files of the earlier model go, everything else in the directory stays."""
    config = from_hf(tiny("llama"))
    out = tmp_path / "out"
    write_model(init_model(config, 0, F32), config, out, dtype=F32, max_shard_bytes=20e3)
    (out / "model-notes.txt").write_text("mine")
    new = init_model(config, 1, F32)
    write_model(new, config, out, dtype=F32)
    assert {path.name for path in out.iterdir()} == {SINGLE, "config.json", "model-notes.txt"}
    assert bits(named(read_model(out, config, F32), config)) == bits(named(new, config))
    write_model(new, config, out, dtype=F32, max_shard_bytes=20e3)
    assert not (out / SINGLE).exists()
    assert bits(named(read_model(out, config, F32), config)) == bits(named(new, config))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_renames_stay_within_a_directory_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be where a disk is mounted: nothing can be renamed into it from beside it."""
    config, out = from_hf(tiny("llama")), tmp_path / "out"
    out.mkdir()

    def within(real: Any) -> Any:
        def rename(self: Path, target: Path) -> Path:
            if out not in self.parents:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            return real(self, target)

        return rename

    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, within(getattr(Path, name)))
    for seed in range(2):
        model = init_model(config, seed, F32)
        write_model(model, config, out, dtype=F32)
        assert bits(named(read_model(out, config, F32), config)) == bits(named(model, config))
    assert {path.name for path in out.iterdir()} == {SINGLE, "config.json"}


def test_named_is_reversible_and_made_of_views() -> None:
    for architecture in ARCHITECTURES:
        config = from_hf(tiny(architecture))
        model = init_model(config, 0, BF16)
        arrays = named(model, config)
        tree.map(np.testing.assert_array_equal, from_named(arrays, config), model)
        for array in arrays.values():
            array[...] = 0
        assert all((leaf == 0).all() for leaf in tree.leaves(model))


def test_named_leaves_out_what_has_no_gradient() -> None:
    config = from_hf(tiny("qwen3"))
    model = init_model(config, 0, F32)
    frozen = model.layers[0]._replace(w_qkv=None, q_norm=None)
    partial = model._replace(embed=None, layers=(frozen, model.layers[1]))
    left_out = named(model, config).keys() - named(partial, config).keys()
    assert {name.removeprefix("model.layers.0.self_attn.") for name in left_out} == {
        "model.embed_tokens.weight",
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "q_norm.weight",
    }
    with pytest.raises(ValueError, match=r"norm: must have shape \(32,\), got \(31,\)"):
        named(model._replace(norm=model.norm[:-1]), config)
    tied = from_hf(tiny("qwen3", tie_word_embeddings=True))
    with pytest.raises(ValueError, match="head: this qwen3 configuration has none"):
        named(model, tied)
    biased = model.layers[1]._replace(b_qkv=np.zeros(128, np.float32))
    with pytest.raises(ValueError, match="b_qkv: this qwen3 configuration has none"):
        named(model._replace(layers=(model.layers[0], biased)), config)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop("lm_head.weight"), r"lm_head.weight: missing, expected shape \(128, 32\)"),
        (lambda t: t.update({"x": t["lm_head.weight"]}), "x: not a tensor of this qwen3 model"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": t["model.norm.weight"]}),
            r"layers.1.mlp.up_proj.weight: must have shape \(48, 32\), got \(32,\)",
        ),
    ],
)
def test_from_named_refuses(change: Any, message: str) -> None:
    config = from_hf(tiny("qwen3"))
    arrays = named(init_model(config, 0, F32), config)
    change(arrays)
    with pytest.raises(ValueError, match=message):
        from_named(arrays, config)


def test_init_statistics_and_exact_leaves() -> None:
    config = from_hf(tiny("qwen2", hidden_size=128, intermediate_size=256, initializer_range=0.05))
    model = init_model(config, 0, F32)
    layer = model.layers[0]
    assert layer.b_qkv is not None and not layer.b_qkv.any()
    assert (layer.attn_norm == 1).all() and (model.norm == 1).all()
    for weight in (model.embed, layer.w_qkv, layer.w_gate_up, layer.w_o, layer.w_down):
        # Six standard errors of the mean and of the standard deviation.
        assert abs(weight.mean()) < 6 * 0.05 / weight.size**0.5
        assert abs(weight.std() / 0.05 - 1) < 6 / (2 * weight.size) ** 0.5


def test_init_depends_on_seed_and_name_only() -> None:
    small, large = (from_hf(tiny("llama", num_hidden_layers=layers)) for layers in (1, 3))
    one, other = (named(init_model(config, 7, F32), config) for config in (small, large))
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
    different = named(init_model(small, 8, F32), small)
    random = [name for name in one if "norm" not in name]
    assert not any(np.array_equal(one[name], different[name]) for name in random)
    distinct = {other[name].tobytes() for name in other if "norm" not in name}
    assert len(distinct) == len([name for name in other if "norm" not in name])
    rounded = named(init_model(small, 7, BF16), small)
    for name, array in one.items():
        np.testing.assert_array_equal(array.astype(BF16), rounded[name])


def test_init_with_zero_projections() -> None:
    config = from_hf(tiny("qwen3"))
    plain, zero = init_model(config, 0, F32), init_model(config, 0, F32, zero_projections=True)
    for one, other in zip(plain.layers, zero.layers, strict=True):
        assert not other.w_o.any() and not other.w_down.any()
        np.testing.assert_array_equal(one.w_qkv, other.w_qkv)
    paths: list[str] = []
    init_model(config, 0, F32, put=lambda path, array: paths.append(path) or array)
    assert paths == [field.path for field in tree.leaves(layout(config))]
