"""From a configuration to what a run works on: model files, weights, adapters, rows; and back to files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surogate.config import Config
from surogate.data.dataset import Packed, load_data
from surogate.device import Device
from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32
from surogate.models.config import ModelConfig, count, read_config, with_rope_scaling
from surogate.models.hf import read_adapter, read_model, write_adapter, write_model
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec, init_adapter, merge_adapter
from surogate.models.tree import Adapter, Model

DTYPES = {"bfloat16": BF16, "float16": np.dtype(np.float16), "float32": F32}


class Sources(NamedTuple):
    """What a run trains, on the device."""

    directory: Path
    model_config: ModelConfig
    model: Model
    lora: LoraSpec | None
    adapter: Adapter | None

    def facts(self) -> list[str]:
        """Lines for the start of a run."""
        trained = sum(x.size for x in tree.leaves(self.adapter or self.model))
        what = "all weights" if self.lora is None else f"LoRA rank {self.lora.rank}"
        return [
            f"{self.model_config.architecture} {self.directory.name}: "
            f"{count(self.model_config):,} parameters, {trained:,} trained ({what}), "
            f"computed in {self.model.embed.dtype}"
        ]


@contextmanager
def reported(what: str = "") -> Iterator[None]:
    """Turns the lower layers' ValueError about files and settings into a line for the user."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{what}: {error}" if what else str(error)) from None
    except OSError as error:
        raise UserError(f"{error.filename or what}: {str(error.strerror).lower()}") from None


def model_directory(name: str) -> Path:
    """The folder of a model: a local one, or the snapshot of a name on the Hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"model = {name}: is a file; give the folder that holds config.json")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"model = {name}: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"model = {name}: no such folder, and the Hub says: {first}") from None


def model_config_of(config: Config, directory: Path) -> ModelConfig:
    """The model's configuration with the run's rope scaling."""
    with reported():
        found = read_config(directory)
        if config.rope_scaling is not None:
            found = with_rope_scaling(found, config.rope_scaling, config.max_model_len)
    if config.sequence_len > found.max_positions and found.rope.kind != "dynamic":
        raise UserError(
            f"sequence_len = {config.sequence_len}: the model is made for {found.max_positions} "
            "positions; use less, or set rope_scaling and max_model_len"
        )
    return found


def lora_of(config: Config) -> LoraSpec | None:
    """The adapters that a run trains, if it trains adapters."""
    if not config.lora:
        return None
    with reported("lora_target_modules"):
        return LoraSpec.of(config.lora_rank, config.lora_alpha, config.lora_target_modules)


def load_sources(config: Config, device: Device) -> Sources:
    """Reads or makes the weights, on the device, and fresh adapters."""
    directory = model_directory(config.model)
    model_config = model_config_of(config, directory)
    put = putter(device)
    with reported():
        if config.from_scratch:
            model = init_model(
                model_config,
                config.train_seed,
                device.compute,
                zero_projections=config.init_projections_to_zero,
                put=put,
            )
        else:
            model = read_model(directory, model_config, device.compute, put=put)
    lora = lora_of(config)
    adapter = None
    if lora is not None:
        adapter = device.put(init_adapter(model_config, lora, config.train_seed, device.compute))
    return Sources(directory, model_config, model, lora, adapter)


def putter(device: Device) -> Callable[[str, Any], Any]:
    """The ``put`` of read_model and init_model: one leaf at a time to the device."""
    return lambda path, array: device.put(array)


class Rows(NamedTuple):
    """Packed rows of a run."""

    train: Packed
    evaluation: Packed | None

    def facts(self) -> list[str]:
        """Lines for the start of a run."""
        facts = [f"train: {_describe(self.train)}"]
        return [*facts, f"eval: {'none' if self.evaluation is None else _describe(self.evaluation)}"]


def _describe(packed: Packed) -> str:
    r = packed.report
    parts = [
        f"{r.documents:,} documents, {r.tokens:,} tokens ({r.supervised:,} supervised) "
        f"in {r.rows:,} rows, {r.fill:.1%} full"
    ]
    if r.truncated:
        parts.append(f"{r.truncated:,} cut to the row's length")
    if r.unsupervised:
        parts.append(f"{r.unsupervised:,} left out: nothing to learn in them")
    return "; ".join(parts) + (" (kept from before)" if packed.reused else "")


def load_rows(config: Config) -> Rows:
    """Training and evaluation rows, tokenised and packed once and kept under output_dir/data."""
    directory = model_directory(config.model)
    vocab = model_config_of(config, directory).vocab
    return Rows(*load_data(config, directory, None, vocab, Path(config.output_dir) / "data"))


def export(config: Config, sources: Sources, step: Any, directory: Path) -> list[str]:
    """Writes the result of a run. Returns lines that say what is where.

    Full training gives a model directory; LoRA an adapter, or with merge_adapter a model directory with
    the adapter beside it.
    """
    model_config, lora = sources.model_config, sources.lora
    dtype = _stored_dtype(config, sources)
    lines = []
    with reported(str(directory)):
        if lora is not None:
            target = directory / "adapter" if config.merge_adapter else directory
            adapter = tree.map(_host, adapter_masters(step))
            write_adapter(adapter, model_config, lora, target, str(sources.directory))
            lines.append(f"adapter: {target}")
            if not config.merge_adapter:
                return lines
            model = merge_adapter(tree.map(_host, step.model), adapter, lora, model_config)
        else:
            model = tree.map(_host, step.model)
        write_model(
            model, model_config, directory, dtype=dtype, source_directory=sources.directory
        )
    return [*lines, f"model: {directory}"]


def adapter_masters(step: Any) -> Adapter:
    """The adapter in the precision that the optimizer keeps."""
    masters = tree.leaves(step.state.master)
    if not masters:
        return step.adapter
    return tree.flatten(step.adapter)[1](masters)


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def _stored_dtype(config: Config, sources: Sources) -> np.dtype:
    """torch_dtype, or what the model was stored in; float32 where neither is known."""
    wanted = config.torch_dtype if config.torch_dtype != "auto" else sources.model_config.torch_dtype
    return DTYPES.get(wanted or "", F32)

