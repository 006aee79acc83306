"""Hugging Face checkpoints: model directories and PEFT adapters, read and written.

Reading checks the names and shapes of every tensor in the headers before it reads a byte of data,
then fills one leaf of the tree at a time: peak memory is the model and one leaf. Writing streams
one tensor at a time to a directory beside the wanted one, syncs it, and moves it into place, so
that a run which dies while saving leaves the previous checkpoint whole.

A safetensors file is 8 bytes of little-endian header length, a JSON header (name -> dtype, shape,
data_offsets), and the data. Models and adapters are in one file since they share how files are
opened, staged and refused.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from surogate.kernels import tree
from surogate.kernels.arrays import BF16, Array
from surogate.models.config import ModelConfig, from_hf
from surogate.models.lora import (
    PEFT_PREFIX,
    TARGETS,
    LoraSpec,
    adapter_from_named,
    named_adapter,
)
from surogate.models.names import MODEL_NAMES, Field, build, layout, named
from surogate.models.tree import Adapter, Model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
# safetensors' name of a dtype, and config.json's.
DTYPE_NAMES = {
    BF16: ("BF16", "bfloat16"),
    np.dtype(np.float16): ("F16", "float16"),
    np.dtype(np.float32): ("F32", "float32"),
}
READABLE = frozenset(short for short, _ in DTYPE_NAMES.values())
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    "generation_config.json",
)
# Buffers that old checkpoints carry and that are computed from the configuration.
DERIVED_SUFFIX = "rotary_emb.inv_freq"
# Fields of adapter_config.json that change the computation, unless they are empty.
UNSUPPORTED_LORA = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "bias",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line with the file and the tensor."""


class _Tensor(NamedTuple):
    """Where a tensor is: its open file, that file's path, and what the header says."""

    handle: Any
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


@contextlib.contextmanager
def _open(paths: Iterable[Path]) -> Iterator[dict[str, _Tensor]]:
    """The tensors of some safetensors files, whose headers are read and data is not."""
    tensors: dict[str, _Tensor] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                handle = stack.enter_context(safe_open(path, "numpy"))
            except FileNotFoundError:
                raise CheckpointError(f"{path}: missing; fetch the model again") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file ({error}); fetch it again"
                ) from None
            for name in handle.keys():
                header = handle.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if name in tensors:
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {tensors[name].path.name} too"
                    )
                if dtype not in READABLE:
                    raise CheckpointError(
                        f"{path}: tensor {name} has dtype {dtype}, which is not supported; "
                        f"must be one of {', '.join(sorted(READABLE))}"
                    )
                tensors[name] = _Tensor(handle, path, name, shape, dtype)
        yield tensors


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a model, and its index (tensor -> file), empty for a single file."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is not a directory; give a model directory")
    if (directory / SINGLE).exists():
        return [directory / SINGLE], {}
    index_path = directory / INDEX
    if not index_path.exists():
        other = sorted(path.name for path in directory.glob("*.bin"))
        hint = f"; {other[0]} must be converted to safetensors first" if other else ""
        raise CheckpointError(f"{directory}: has neither {SINGLE} nor {INDEX}{hint}")
    weight_map = _json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map")
    files = sorted(set(weight_map.values()))
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index_path}: {file!r} is not the name of a file beside it")
    return [directory / file for file in files], weight_map


def _check_tensors(
    tensors: Mapping[str, _Tensor], config: ModelConfig, directory: Path, index: Mapping[str, str]
) -> None:
    """Raises CheckpointError for the first tensor that is not what the configuration expects."""
    for name, file in index.items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(f"{directory / file}: has no tensor {name}, which {INDEX} names")
    fields = tree.leaves(layout(config))
    expected = {piece.name: field.shape_of(piece) for field in fields for piece in field.pieces}
    head, embed = MODEL_NAMES["head"], MODEL_NAMES["embed"]
    if config.tied and head in tensors:
        expected[head] = expected[embed]
    missing = [name for name in expected if name not in tensors]
    if missing:
        more = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{directory}: no file has tensor {missing[0]} of shape {expected[missing[0]]}{more}"
        )
    for name, tensor in tensors.items():
        if name.endswith(DERIVED_SUFFIX):
            continue
        if name not in expected:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} of shape {tensor.shape} is not part of "
                f"this {config.architecture} model"
            )
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} has shape {tensor.shape}, "
                f"the configuration expects {expected[name]}"
            )
    if config.tied and head in tensors and not _equal(tensors[head], tensors[embed]):
        raise CheckpointError(
            f"{tensors[head].path}: {head} of shape {tensors[head].shape} differs from {embed}, "
            "but tie_word_embeddings is true in config.json; set it to false"
        )


def _equal(one: _Tensor, other: _Tensor, chunk: int = 4096) -> bool:
    """Whether two tensors of one shape hold the same numbers, compared a few rows at a time."""

    def rows(tensor: _Tensor, start: int) -> np.ndarray:
        # A slice that ends past the last row is an error in safetensors.
        stop = min(start + chunk, tensor.shape[0])
        return tensor.handle.get_slice(tensor.name)[start:stop].astype(np.float32)

    return all(
        np.array_equal(rows(one, start), rows(other, start), equal_nan=True)
        for start in range(0, one.shape[0], chunk)
    )


def _cast(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Rounds to ``dtype``. float16 is the one with a range that weights may leave."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        out = array.astype(dtype)
    if dtype == np.float16 and (np.isinf(out) & np.isfinite(array)).any():
        raise CheckpointError(f"{where}: exceeds the range of float16; use bfloat16 or float32")
    return out


def read_model(
    directory: str | Path,
    config: ModelConfig,
    dtype: np.dtype,
    *,
    put: Callable[[str, Array], Array] = lambda path, array: array,
) -> Model:
    """Reads model.safetensors, or the files that its index names.

    Args:
        dtype: bfloat16, float16 or float32 of the result, whatever the files hold.
        put: receives each leaf's path (layers.0.w_qkv) and array, and returns what the tree holds,
            for instance its copy on the card. The array is not used again.

    Raises:
        CheckpointError: a file that is missing or truncated, a tensor that is missing, unknown, of
            another shape or of a dtype that is not read, or a tied head that is not the embedding.
    """
    directory = Path(directory)
    _check_dtype(dtype)
    paths, index = _weight_files(directory)
    with _open(paths) as tensors:
        _check_tensors(tensors, config, directory, index)

        def make(field: Field) -> Array:
            if len(field.pieces) == 1:
                return put(field.path, load(field.pieces[0].name))
            out = np.empty(field.shape, dtype)
            for piece in field.pieces:
                field.view(out, piece)[...] = load(piece.name)
            return put(field.path, out)

        def load(name: str) -> np.ndarray:
            tensor = tensors[name]
            return _cast(tensor.handle.get_tensor(name), dtype, f"{tensor.path}: {name}")

        return build(config, make)


def _check_dtype(dtype: np.dtype) -> None:
    if dtype not in DTYPE_NAMES:
        names = ", ".join(long for _, long in DTYPE_NAMES.values())
        raise ValueError(f"checkpoint dtype must be one of {names}, got {dtype}")


def write_model(
    model: Model,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: np.dtype,
    max_shard_bytes: float = 5e9,
    source_directory: str | Path | None = None,
) -> None:
    """Writes a model directory that transformers and vLLM load, or ``read_model``.

    Writes the weights (model.safetensors, or shards and their index when they exceed
    ``max_shard_bytes``), config.json with their ``dtype``, and byte-equal copies of the tokenizer
    and generation files of ``source_directory``. Weight files of an earlier model in ``directory``
    are removed, its other files stay.

    Raises:
        CheckpointError: the disk is full or not writable, a weight exceeds float16, or
            ``config.raw`` does not describe ``config``.
    """
    directory = Path(directory).absolute()
    _check_dtype(dtype)
    if from_hf(config.raw) != config:
        raise CheckpointError("config.raw does not describe config; change raw and use from_hf")
    tensors = named(model, config)
    shards = _shards(tensors, dtype, max_shard_bytes)
    total = sum(array.size for array in tensors.values()) * dtype.itemsize
    with _staged(directory, total) as partial:
        for file, names in shards.items():
            _write_safetensors(partial / file, {name: tensors[name] for name in names}, dtype)
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(partial / INDEX, index)
        keys = [key for key in ("torch_dtype", "dtype") if key in config.raw] or ["torch_dtype"]
        _write_json(
            partial / "config.json", config.raw | dict.fromkeys(keys, DTYPE_NAMES[dtype][1])
        )
        for name in COMPANIONS if source_directory is not None else ():
            source = Path(source_directory) / name  # type: ignore[arg-type]
            if source.exists():
                _write_bytes(partial / name, [source.read_bytes()])
        new = {path.name for path in partial.iterdir()}
    for path in directory.iterdir():
        if path.name not in new and WEIGHT_FILE.fullmatch(path.name):
            path.unlink()


def _shards(
    tensors: Mapping[str, Array], dtype: np.dtype, max_bytes: float
) -> dict[str, list[str]]:
    """File -> tensors: in order, a new file whenever the next tensor would exceed ``max_bytes``."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, array in tensors.items():
        size = array.size * dtype.itemsize
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": names for i, names in enumerate(groups, 1)}


@contextlib.contextmanager
def _staged(directory: Path, size: int) -> Iterator[Path]:
    """A fresh directory beside ``directory`` that becomes it, or whose files move into it."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _sync(partial)
        if directory.exists():
            for path in sorted(partial.iterdir()):
                path.replace(directory / path.name)
            _sync(directory)
        else:
            partial.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = f"the disk is full; {size / 1e9:.3g} GB are needed"
        raise CheckpointError(f"{directory}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_bytes(path: Path, blocks: Iterable[Any]) -> None:
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    _write_bytes(path, [f"{text}\n".encode()])


def _write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: np.dtype) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.size * dtype.itemsize
        shape = list(array.shape)
        header[name] = {
            "dtype": DTYPE_NAMES[dtype][0],
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def blocks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for name, array in tensors.items():
            host = array if isinstance(array, np.ndarray) else array.get()
            yield np.ascontiguousarray(_cast(host, dtype, name)).reshape(-1).view(np.uint8)

    _write_bytes(path, blocks())


def write_adapter(
    adapter: Adapter,
    config: ModelConfig,
    spec: LoraSpec,
    directory: str | Path,
    base_model_name: str,
    *,
    dropout: float = 0.0,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json as PEFT and vLLM load them.

    The tensors keep their dtype. Raises CheckpointError when the disk is full or not writable.
    """
    tensors = named_adapter(adapter, config, spec)
    dtype = np.dtype(next(iter(tensors.values())).dtype)
    _check_dtype(dtype)
    settings = {
        "alpha_pattern": {},
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": {},
        "target_modules": [target for target in TARGETS if target in spec.targets],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    size = sum(array.nbytes for array in tensors.values())
    with _staged(Path(directory).absolute(), size) as partial:
        _write_safetensors(partial / ADAPTER, tensors, dtype)
        _write_json(partial / ADAPTER_CONFIG, settings)


def read_adapter(directory: str | Path, config: ModelConfig) -> tuple[Adapter, LoraSpec]:
    """Reads a PEFT LoRA adapter; its arrays keep the dtype of the file.

    The targets are those that the file has tensors for, whether adapter_config.json gives a list of
    names or a pattern.

    Raises:
        CheckpointError: a missing or truncated file, a variant of LoRA that is not supported, or a
            tensor that is missing, unknown or of another shape.
    """
    settings_path = Path(directory) / ADAPTER_CONFIG
    weights_path = Path(directory) / ADAPTER
    settings = _json(settings_path)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"{settings_path}: peft_type {settings.get('peft_type')!r} != LORA")
    for field in UNSUPPORTED_LORA:
        if settings.get(field) not in (None, False, "none", {}, []):
            raise CheckpointError(f"{settings_path}: {field} {settings[field]!r} is not supported")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{settings_path}: r and lora_alpha must be numbers")
    with _open([weights_path]) as tensors:
        targets = set()
        for name in tensors:
            module = name.split(".lora_")[0].rsplit(".", 1)[-1]
            if module not in TARGETS or not name.startswith(PEFT_PREFIX):
                raise CheckpointError(f"{weights_path}: {name} adapts none of {', '.join(TARGETS)}")
            targets.add(module)
        listed = settings.get("target_modules")
        for target in listed if isinstance(listed, list) else ():
            if target.rsplit(".", 1)[-1] not in targets:
                raise CheckpointError(f"{weights_path}: has no tensors for target {target}")
        arrays = {name: tensor.handle.get_tensor(name) for name, tensor in tensors.items()}
    try:
        spec = LoraSpec(rank, alpha, frozenset(targets))
        return adapter_from_named(arrays, config, spec), spec
    except ValueError as error:
        raise CheckpointError(f"{weights_path}: {error}") from None
