"""Hugging Face checkpoints: model directories and PEFT adapters, read and written.

Reading checks the names and shapes of every tensor in the headers before it reads a byte of data,
then fills one leaf of the tree at a time: peak memory is the model and one leaf. Writing streams
one tensor at a time and replaces the previous checkpoint when all files are whole (files.py) and
``finish``, which sees them before, has raised nothing.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surogate.kernels import tree
from surogate.models.companions import (
    TOKENIZER_FILES,
    copy_files,
    with_stop_token,
    write_generation_config,
)
from surogate.models.config import QUANTIZED, ModelConfig, from_hf, unquantized
from surogate.models.files import (
    DTYPE_NAMES,
    CheckpointError,
    Planned,
    Staging,
    Tensor,
    cast,
    check_dtype,
    equal,
    open_tensors,
    planned,
    read_json,
    staged,
)
from surogate.models.lora import (
    PEFT_PREFIX,
    TARGETS,
    LoraSpec,
    adapter_from_named,
    named_adapter,
)
from surogate.models.names import MODEL_NAMES, Field, build, layout, named
from surogate.models.prequantized import Coded, Stack, decoded, gathered
from surogate.models.tree import Adapter, Model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
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
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
            raise CheckpointError(f"{index_path}: {file!r} is not the name of a file beside it")
    return [directory / file for file in sorted(set(weight_map.values()))], weight_map


def _check_index(tensors: Mapping[str, Tensor], directory: Path, index: Mapping[str, str]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(f"{directory / file}: has no tensor {name}, which {INDEX} names")


def _check_tensors(tensors: Mapping[str, Tensor], config: ModelConfig, directory: Path) -> None:
    """Raises CheckpointError for the first tensor that is not what the configuration expects."""
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
    if config.tied and head in tensors and not equal(tensors[head], tensors[embed]):
        raise CheckpointError(
            f"{tensors[head].path}: {head} of shape {tensors[head].shape} differs from {embed}, "
            "but tie_word_embeddings is true in config.json; set it to false"
        )


def read_model(
    directory: str | Path,
    config: ModelConfig,
    dtype: np.dtype,
    *,
    put: Callable[[str, Any], Any] = decoded,
) -> Model:
    """Reads model.safetensors, or the files that its index names.

    Args:
        dtype: bfloat16, float16 or float32 of the result, whatever the files hold.
        put: receives each leaf's path (layers.0.w_qkv) and array, and returns what the tree holds,
            for instance its copy on the card. The array is not used again. A leaf that is quantised
            in the files comes as a ``Stack``.

    Raises:
        CheckpointError: a file that is missing or truncated, a tensor that is missing, unknown, of
            another shape or of a dtype that is not read, or a tied head that is not the embedding.
    """
    with open_model(directory, config, dtype) as load:
        return build(config, lambda field: put(field.path, load(field)))


@contextlib.contextmanager
def open_model(
    directory: str | Path,
    config: ModelConfig,
    dtype: np.dtype,
    *,
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, array: array,
) -> Iterator[Callable[[Field], np.ndarray | Stack]]:
    """Gives a function that reads one leaf, for whom a whole model is too large.

    ``change`` receives each tensor's name and array, in ``dtype``. A leaf whose tensors are all
    quantised comes as a ``Stack``; where some of q, k and v, or one of gate and up, are, they are
    decoded and the leaf is like any other. Raises CheckpointError as ``read_model`` does.
    """
    check_dtype(dtype)
    with open_weights(directory, config) as tensors:

        def load(name: str) -> np.ndarray:
            tensor = tensors[name]
            array = cast(tensor.handle.get_tensor(name), dtype, f"{tensor.path}: {name}")
            return change(name, array)

        def leaf(field: Field) -> np.ndarray | Stack:
            handles = [tensors[piece.name].handle for piece in field.pieces]
            if all(isinstance(handle, Coded) for handle in handles):
                return Stack(tuple(handle.quantized() for handle in handles), dtype)
            if len(field.pieces) == 1:
                return load(field.pieces[0].name)
            out = np.empty(field.shape, dtype)
            for piece in field.pieces:
                field.view(out, piece)[...] = load(piece.name)
            return out

        yield leaf


@contextlib.contextmanager
def open_weights(directory: str | Path, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """The tensors of a model directory, whose names and shapes are the configuration's.

    Of a quantised one they are the weights, whose handles decode.
    """
    directory, scheme = Path(directory), config.quantized
    paths, index = _weight_files(directory)
    with open_tensors(paths, raw=scheme is not None) as tensors:
        _check_index(tensors, directory, index)
        weights = tensors if scheme is None else gathered(tensors, config, scheme)
        _check_tensors(weights, config, directory)
        yield weights


def no_finish(staging: Staging) -> None:
    """The ``finish`` of a write that nothing is added to."""


def write_model(
    model: Model,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: np.dtype,
    max_shard_bytes: float = 5e9,
    source_directory: str | Path | None = None,
    stop_token: int | None = None,
    finish: Callable[[Staging], None] = no_finish,
) -> None:
    """Writes a model directory that transformers and vLLM load, or ``read_model``.

    Writes the weights (model.safetensors, or shards and their index when they exceed
    ``max_shard_bytes``), config.json with their ``dtype``, and byte-equal copies of the tokenizer
    and generation files of ``source_directory``. Weight files of an earlier model in ``directory``
    are removed, its other files stay. ``stop_token`` is put behind the eos_token_id of config.json
    and generation_config.json, which servers stop at, where they lack it; a source that has no
    generation_config.json gets one. ``finish`` is called when all files are on the disk but not yet
    in their place, and may write more of them; what it raises leaves ``directory`` as it was.

    Raises:
        CheckpointError: the disk is full or not writable, a weight exceeds float16, or
            ``config.raw`` does not describe ``config``.
    """
    write_weights(
        planned(named(model, config), dtype),
        config,
        directory,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        source_directory=source_directory,
        stop_token=stop_token,
        finish=finish,
    )


def write_weights(
    tensors: Mapping[str, Planned],
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: np.dtype,
    max_shard_bytes: float = 5e9,
    source_directory: str | Path | None = None,
    stop_token: int | None = None,
    finish: Callable[[Staging], None] = no_finish,
) -> None:
    """``write_model`` of tensors that need not exist before their turn to be written comes.

    They are plain, so the config.json of a quantised model loses its quantization_config.
    """
    directory = Path(directory).absolute()
    check_dtype(dtype)
    if from_hf(config.raw) != config:
        raise CheckpointError("config.raw does not describe config; change raw and use from_hf")
    config = unquantized(config)
    shards = _shards(tensors, max_shard_bytes)
    total = sum(tensor.nbytes for tensor in tensors.values())
    with staged(directory, total) as staging:
        for file, names in shards.items():
            staging.tensors(file, {name: tensors[name] for name in names})
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            staging.json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        keys = [key for key in ("torch_dtype", "dtype") if key in config.raw] or ["torch_dtype"]
        settings = config.raw | dict.fromkeys(keys, DTYPE_NAMES[dtype][1])
        settings = with_stop_token(settings, stop_token)
        staging.json("config.json", settings)
        if source_directory is not None:
            copy_files(Path(source_directory), staging, TOKENIZER_FILES)
            write_generation_config(Path(source_directory), staging, settings, stop_token)
        finish(staging)
        new = {path.name for path in staging.path.iterdir()}
    for path in directory.iterdir():
        if path.name not in new and (WEIGHT_FILE.fullmatch(path.name) or path.name == QUANTIZED):
            path.unlink()


def _shards(tensors: Mapping[str, Planned], max_bytes: float) -> dict[str, list[str]]:
    """File -> tensors: in order, a new file whenever the next tensor would exceed ``max_bytes``."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if groups[-1] and used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": names for i, names in enumerate(groups, 1)}


def write_adapter(
    adapter: Adapter,
    config: ModelConfig,
    spec: LoraSpec,
    directory: str | Path,
    base_model_name: str,
    *,
    dropout: float = 0.0,
    source_directory: str | Path | None = None,
    finish: Callable[[Staging], None] = no_finish,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json as PEFT and vLLM load them.

    The tensors keep their dtype. The tokenizer's files of ``source_directory`` are copied;
    ``finish`` is that of ``write_model``. Raises CheckpointError when the disk is full or not
    writable.
    """
    tensors = named_adapter(adapter, config, spec)
    dtype = np.dtype(next(iter(tensors.values())).dtype)
    check_dtype(dtype)
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
    with staged(Path(directory).absolute(), size) as staging:
        staging.tensors(ADAPTER, planned(tensors))
        staging.json(ADAPTER_CONFIG, settings)
        if source_directory is not None:
            copy_files(Path(source_directory), staging, TOKENIZER_FILES)
        finish(staging)


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
    settings = read_json(settings_path)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"{settings_path}: peft_type {settings.get('peft_type')!r} != LORA")
    for field in UNSUPPORTED_LORA:
        if settings.get(field) not in (None, False, "none", {}, []):
            raise CheckpointError(f"{settings_path}: {field} {settings[field]!r} is not supported")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{settings_path}: r and lora_alpha must be numbers")
    with open_tensors([weights_path]) as tensors:
        targets = set()
        for name in tensors:
            module = name.split(".lora_")[0].rsplit(".", 1)[-1]
            if module not in TARGETS or not name.startswith(PEFT_PREFIX):
                raise CheckpointError(f"{weights_path}: {name} adapts none of {', '.join(TARGETS)}")
            targets.add(module)
        listed = settings.get("target_modules")
        for target in listed if isinstance(listed, list) else ():
            if str(target).rsplit(".", 1)[-1] not in targets:
                raise CheckpointError(f"{weights_path}: has no tensors for target {target}")
        arrays = {name: tensor.handle.get_tensor(name) for name, tensor in tensors.items()}
    try:
        spec = LoraSpec(rank, alpha, frozenset(targets))
        return adapter_from_named(arrays, config, spec), spec
    except ValueError as error:
        raise CheckpointError(f"{weights_path}: {error}") from None
