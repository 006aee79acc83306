"""Hugging Face checkpoints: model directories and PEFT adapters, read and written.

Reading checks the names and shapes of every tensor in the headers before it reads a byte of data,
then fills one leaf of the tree at a time: peak memory is the model and one leaf. Writing streams
one tensor at a time and replaces the previous checkpoint when all files are whole (files.py).
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surogate.kernels import tree
from surogate.kernels.arrays import Array
from surogate.models.config import ModelConfig, from_hf
from surogate.models.files import (
    DTYPE_NAMES,
    CheckpointError,
    Tensor,
    cast,
    check_dtype,
    equal,
    open_tensors,
    read_json,
    staged,
    write_bytes,
    write_json,
    write_safetensors,
)
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
GENERATION = "generation_config.json"
EOS = "eos_token_id"  # of config.json and generation_config.json: one, or a list
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
    GENERATION,
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
    files = sorted(set(weight_map.values()))
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index_path}: {file!r} is not the name of a file beside it")
    return [directory / file for file in files], weight_map


def _check_tensors(
    tensors: Mapping[str, Tensor], config: ModelConfig, directory: Path, index: Mapping[str, str]
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
    check_dtype(dtype)
    paths, index = _weight_files(directory)
    with open_tensors(paths) as tensors:
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
            return cast(tensor.handle.get_tensor(name), dtype, f"{tensor.path}: {name}")

        return build(config, make)


def write_model(
    model: Model,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: np.dtype,
    max_shard_bytes: float = 5e9,
    source_directory: str | Path | None = None,
    stop_token: int | None = None,
) -> None:
    """Writes a model directory that transformers and vLLM load, or ``read_model``.

    Writes the weights (model.safetensors, or shards and their index when they exceed
    ``max_shard_bytes``), config.json with their ``dtype``, and byte-equal copies of the tokenizer
    and generation files of ``source_directory``. Weight files of an earlier model in ``directory``
    are removed, its other files stay. ``stop_token`` is put behind the eos_token_id of config.json
    and generation_config.json, which servers stop at, where they lack it.

    Raises:
        CheckpointError: the disk is full or not writable, a weight exceeds float16, or
            ``config.raw`` does not describe ``config``.
    """
    directory = Path(directory).absolute()
    check_dtype(dtype)
    if from_hf(config.raw) != config:
        raise CheckpointError("config.raw does not describe config; change raw and use from_hf")
    tensors = named(model, config)
    shards = _shards(tensors, dtype, max_shard_bytes)
    total = sum(array.size for array in tensors.values()) * dtype.itemsize
    with staged(directory, total) as partial:
        for file, names in shards.items():
            write_safetensors(partial / file, {name: tensors[name] for name in names}, dtype)
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(partial / INDEX, index)
        keys = [key for key in ("torch_dtype", "dtype") if key in config.raw] or ["torch_dtype"]
        settings = config.raw | dict.fromkeys(keys, DTYPE_NAMES[dtype][1])
        if stop_token is not None and stop_token not in _eos_ids(settings):
            settings[EOS] = [*_eos_ids(settings), stop_token]
        write_json(partial / "config.json", settings)
        if source_directory is not None:
            _copy_companions(Path(source_directory), partial, config.raw, stop_token)
        new = {path.name for path in partial.iterdir()}
    for path in directory.iterdir():
        if path.name not in new and WEIGHT_FILE.fullmatch(path.name):
            path.unlink()


def _copy_companions(
    source: Path, to: Path, config: Mapping[str, Any], stop_token: int | None
) -> None:
    for name in COMPANIONS:
        if (source / name).exists():
            write_bytes(to / name, [(source / name).read_bytes()])
    if stop_token is None or not (to / GENERATION).exists():
        return
    settings = read_json(to / GENERATION)
    if stop_token not in _eos_ids(settings):
        ids = _eos_ids(settings) or _eos_ids(config)
        write_json(to / GENERATION, settings | {EOS: list(dict.fromkeys([*ids, stop_token]))})


def _eos_ids(settings: Mapping[str, Any]) -> list[int]:
    ids = settings.get(EOS)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


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
    with staged(Path(directory).absolute(), size) as partial:
        write_safetensors(partial / ADAPTER, tensors, dtype)
        write_json(partial / ADAPTER_CONFIG, settings)


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
            if target.rsplit(".", 1)[-1] not in targets:
                raise CheckpointError(f"{weights_path}: has no tensors for target {target}")
        arrays = {name: tensor.handle.get_tensor(name) for name, tensor in tensors.items()}
    try:
        spec = LoraSpec(rank, alpha, frozenset(targets))
        return adapter_from_named(arrays, config, spec), spec
    except ValueError as error:
        raise CheckpointError(f"{weights_path}: {error}") from None
