"""Whatever is wrong with the files of a model, an adapter or a checkpoint, the answer is the bytes
that the header says or one line that names a file: no traceback, no hang.

    pytest tests/models/test_files_fuzz.py --hypothesis-profile thorough

tries 20,000 inputs a test instead of a hundred.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from surogate.checkpoint import Checkpoint, newest_whole, save
from surogate.cli import main
from surogate.errors import UserError
from surogate.kernels.arrays import BF16
from surogate.models.config import from_hf, read_config
from surogate.models.files import open_tensors
from surogate.models.hf import read_adapter, read_model, write_adapter, write_model
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec, init_adapter
from surogate.models.names import named
from surogate.setup import reported
from tests.models.quantized_files import KINDS, quantise

FUZZ = settings(deadline=20_000, suppress_health_check=[HealthCheck.too_slow])
F32 = np.dtype(np.float32)
RAW = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "layer_types": ["full_attention"],
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
DTYPES = "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F4 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64 C64 X"
NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([1024, 2**31, 2**32 + 1, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, -1e300]),
)
VALUES = st.one_of(
    NUMBERS,
    st.none(),
    st.booleans(),
    st.lists(NUMBERS, max_size=3),
    st.text(max_size=4),
    st.sampled_from(DTYPES.split()),
    st.sampled_from([{}, "..", "../x", "a\nb", "\x00", "\ud800", "model.safetensors", "qwen2"]),
    st.sampled_from(["fp8", "modelopt", "bitsandbytes", "nf4", "yarn", "sliding_attention"]),
)
# A fault in a JSON tree: a place, what is done there, and a value.
PLACED = st.tuples(
    st.integers(0, 2**16), st.sampled_from(["put", "put", "drop", "name", "copy", "twice"]), VALUES
)
# A fault in bytes: a place (a share of them), what is done there, and other bytes.
BYTES = st.tuples(
    st.floats(0, 1),
    st.sampled_from(["cut", "insert", "overwrite", "overwrite", "length"]),
    st.one_of(
        st.binary(min_size=1, max_size=9),
        st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"[" * 5000, b'{"a":' * 2000, b"9" * 5000]),
    ),
)
FAULTS = st.one_of(
    st.tuples(st.lists(PLACED, min_size=1, max_size=3), st.just([])),
    st.tuples(st.just([]), st.lists(BYTES, max_size=2)),
)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a JSON tree: the dict or list and the key or index."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def misplaced(text: bytes, faults: list[tuple[int, str, Any]]) -> bytes:
    """JSON with faults in its tree."""
    tree, again = json.loads(text), []
    for pick, action, value in faults:
        found = list(places(tree))
        if not found:
            break
        node, key = found[pick % len(found)]
        other, at = found[pick * 7919 % len(found)]
        if action == "put":
            node[key] = value
        elif action == "copy":
            node[key] = json.loads(json.dumps(other[at]))
        elif action == "twice" and node is tree:
            again.append((key, other[at]))
        elif action == "name" and isinstance(node, dict):
            node[str(value)] = node.pop(key)
        elif action == "drop":
            del node[key]
    made = json.dumps(tree)
    for key, value in again:
        rest = made[1:] if made == "{}" else f", {made[1:]}"
        made = f"{{{json.dumps(key)}: {json.dumps(value)}{rest}"
    return made.encode()


def damaged(raw: bytes, faults: list[tuple[float, str, bytes]]) -> bytes:
    for share, action, other in faults:
        at = int(share * len(raw))
        if action == "cut":
            raw = raw[:at]
        elif action == "insert":
            raw = raw[:at] + other + raw[at:]
        elif action == "overwrite":
            raw = raw[:at] + other + raw[at + len(other) :]
        else:
            raw = other[:8].ljust(8, b"\0") + raw[8:]
    return raw


def spoil(path: Path, faults: tuple[list[Any], list[Any]]) -> None:
    """Writes a file anew with faults in its JSON, or in its bytes."""
    in_tree, in_bytes = faults
    raw = path.read_bytes()
    if in_tree and path.suffix == ".safetensors":
        start = 8 + int.from_bytes(raw[:8], "little")
        header = misplaced(raw[8:start], in_tree)
        raw = len(header).to_bytes(8, "little") + header + raw[start:]
    elif in_tree:
        raw = misplaced(raw, in_tree)
    path.write_bytes(damaged(raw, in_bytes))


def answered(run: Callable[[], Any], folder: str) -> Any:
    """What ``run`` returns; None when it raises a UserError of one line that names a file."""
    try:
        with reported():
            return run()
    except UserError as error:
        [line] = str(error).splitlines()
        assert folder in line
        return None


def slices(path: Path) -> dict[str, bytes]:
    """The bytes of each tensor, by the definition of the format."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    ends = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: raw[start + a : start + b] for name, (a, b) in ends.items()}


_KEPT: list[TemporaryDirectory[str]] = []


@cache
def made(kind: str) -> Path:
    """A folder of a model, an adapter, a checkpoint or a file of every dtype; it lasts as long as
    the process.
    """
    _KEPT.append(TemporaryDirectory())
    folder = Path(_KEPT[-1].name) / "folder"
    config = from_hf(RAW)
    if kind == "dtypes":
        folder.mkdir()
        dtypes = [BF16, np.float16, np.float32, np.uint8, ml_dtypes.float8_e4m3fn]
        arrays = {f"a{i}": np.arange(6).reshape(2, 3).astype(d) for i, d in enumerate(dtypes)}
        arrays |= {"none": np.zeros((0, 3), np.float32), "one": np.array(7, np.float32)}
        save_file(arrays, folder / "x.safetensors")
    elif kind == "checkpoint":
        moments = {"step": np.array(3, np.int64), "m.w": np.ones((2, 3), np.float32)}
        state = Checkpoint(3, {"w": np.ones((2, 3), np.float32)}, moments, {"lr": 1e-4}, {})
        folder = save(folder, state, keep=1)
    elif kind == "adapter":
        spec = LoraSpec(2, 4, frozenset({"q_proj", "v_proj", "down_proj"}))
        write_adapter(init_adapter(config, spec, 0, F32), config, spec, folder, "base")
    else:
        size = 12e3 if kind == "shards" else 5e9
        write_model(init_model(config, 0, F32), config, folder, dtype=F32, max_shard_bytes=size)
        if kind in KINDS:
            quantise(folder, KINDS[kind])
    return folder


def spoiled(kind: str, within: str, pick: int, faults: Any) -> Path:
    """A copy of a folder with one of its files spoilt."""
    folder = Path(within) / "folder"
    shutil.copytree(made(kind), folder)
    files = sorted(folder.iterdir())
    spoil(files[pick % len(files)], faults)
    return folder


@FUZZ
@given(faults=FAULTS, raw=st.booleans())
def test_a_file_of_tensors(faults, raw):
    with TemporaryDirectory() as within:
        folder = spoiled("dtypes", within, 0, faults)
        path = folder / "x.safetensors"

        def read() -> dict[str, bytes]:
            with open_tensors([path], raw=raw) as tensors:
                for tensor in tensors.values():
                    assert tensor.handle.get_slice(tensor.name)[...].shape == tensor.shape
                return {k: t.handle.get_tensor(k).tobytes() for k, t in tensors.items()}

        found = answered(read, str(path))
        assert found is None or found == slices(path)


@pytest.mark.parametrize("kind", ["whole", "shards", *KINDS])
@FUZZ
@given(pick=st.integers(0, 2**8), faults=FAULTS)
@example(0, ([(4, "put", 2**31 - 1)], []))  # layers
@example(0, ([(1, "put", 10**30)], []))  # rows of the embedding
@example(76, ([(3, "put", "\ud800")], []))  # of shards, the name of one
def test_a_model_s_folder(kind, pick, faults):
    with TemporaryDirectory() as within:
        folder = spoiled(kind, within, pick, faults)

        def read() -> Any:
            config = read_config(folder)
            return config, read_model(folder, config, F32)

        found = answered(read, str(folder))
        if found is None or kind in KINDS:
            return
        config, model = found
        index = folder / "model.safetensors.index.json"
        files = [folder / "model.safetensors"]
        if index.exists():
            files = [folder / f for f in set(json.loads(index.read_bytes())["weight_map"].values())]
        want = {name: data for file in files for name, data in slices(file).items()}
        got = {name: array.tobytes() for name, array in named(model, config).items()}
        assert got == {name: want[name] for name in got}


@FUZZ
@given(pick=st.integers(0, 1), faults=FAULTS)
def test_an_adapter_s_folder(pick, faults):
    with TemporaryDirectory() as within:
        folder = spoiled("adapter", within, pick, faults)
        found = answered(lambda: read_adapter(folder, from_hf(RAW)), str(folder))
        if found is not None:
            adapter, spec = found
            assert spec.rank == 2 and all(
                pair.a.shape[1] == 32 for pair in adapter.layers[0] if pair
            )


@FUZZ
@given(pick=st.integers(0, 3), faults=FAULTS)
@example(1, ([], [(0.0, "insert", b"[" * 100_000)]))
def test_a_checkpoint_s_folder(pick, faults):
    """Whatever byte of it changed, it is found, and a run does not go on from it."""
    with TemporaryDirectory() as within:
        folder = Path(within) / "step_00000003"
        shutil.copytree(made("checkpoint"), folder)
        file = sorted(folder.iterdir())[pick]
        before = file.read_bytes()
        spoil(file, faults)
        same = file.read_bytes() == before
        result = CliRunner().invoke(main, ["verify", str(folder)])
        lines = result.stdout.splitlines()
        assert result.exit_code == (0 if same else 1), (lines, result.exception)
        assert len(lines) == 1 and (same or lines[0].startswith(f"{file}: "))
        saved = answered(lambda: newest_whole(Path(within), say=print), str(folder))
        assert (saved is not None) == same
