"""From a configuration to what a run works on: model files, weights, adapters, rows."""

import fcntl
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surogate.choices import check_quantized, recipe_of
from surogate.config import Config
from surogate.data.dataset import load_data
from surogate.data.loader import Loader
from surogate.data.packed import Packed
from surogate.data.sources import counted
from surogate.data.template import EPOCH
from surogate.device import Device
from surogate.errors import UserError, reason
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.linear import RecipeWeight
from surogate.models import dense
from surogate.models.config import (
    ModelConfig,
    count,
    read_config,
    unquantized,
    with_rope_scaling,
)
from surogate.models.error_init import error_adapter, input_squares
from surogate.models.hf import open_model, read_model
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec, init_adapter, matches
from surogate.models.prequantized import Stack
from surogate.models.recipe import Recipe
from surogate.models.tree import Adapter, Model
from surogate.models.widen import making_room
from surogate.schema import one_line

CALIBRATION = 8192  # tokens whose activations weigh what adapters begin as
SAMPLE = 4096  # elements, about, of each array that a fingerprint reads: training changes most
PROGRESS_SECONDS = 5.0

DTYPES = {"bfloat16": BF16, "float16": np.dtype(np.float16), "float32": F32}


class Sources(NamedTuple):
    """What a run trains, on the device."""

    directory: Path
    model_config: ModelConfig
    model: Model
    lora: LoraSpec | None
    adapter: Adapter | None
    recipe: Recipe = Recipe()

    def facts(self) -> list[str]:
        """Lines for the start of a run."""
        trained = sum(x.size for x in tree.leaves(self.adapter or self.model))
        what = "all weights" if self.lora is None else f"LoRA rank {self.lora.rank}"
        return [
            f"{self.model_config.architecture} {self.directory.name}: "
            f"{count(self.model_config):,} parameters, {trained:,} trained ({what}), "
            f"computed in {self.model.embed.dtype}",
            *self._adapted(trained),
            *self.recipe.facts(),
        ]

    def _adapted(self, trained: int) -> list[str]:
        """What the targets of LoRA matched."""
        if self.lora is None:
            return []
        found = matches(self.model_config, self.lora).items()
        modules = ", ".join(f"{number} {target}" for target, number in found)
        share = trained / (count(self.model_config) + trained)
        return [f"adapters on {modules}: {share:.2%} of all parameters"]

    def fingerprints(self) -> dict[str, str]:
        """What a checkpoint takes for granted of these weights: their type, and those it leaves
        out.
        """
        found = {"compute dtype": str(self.model.embed.dtype)}
        if self.adapter is not None:
            digest = hashlib.sha256()
            for leaf in map(stored, tree.leaves(self.model)):
                rows = max(1, SAMPLE * len(leaf) // leaf.size)
                digest.update(_host(leaf[:rows]).tobytes())
            found["frozen weights"] = digest.hexdigest()[:32]
        return found


def stored(leaf: Any) -> Any:
    """The array of a weight: its codes, where it has any."""
    return leaf.stored if isinstance(leaf, RecipeWeight) else leaf


@contextmanager
def reported(what: str = "") -> Iterator[None]:
    """Turns the lower layers' ValueError about files and settings into a line for the user."""
    try:
        with disk(what):
            yield
    except ValueError as error:
        line = one_line(str(error))  # names that files give may hold anything
        raise UserError(f"{what}: {line}" if what else line) from None


@contextmanager
def disk(what: str) -> Iterator[None]:
    """Turns an OSError into a line for the user; ``what`` stands for a file that it does not
    name.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or what}: {reason(error)}") from None


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Makes a run's folder and holds it for this process alone: two runs would mix their files."""
    with disk(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output_dir = {directory}: another run is using it; wait, or set another"
            ) from None
        except OSError as error:
            raise UserError(
                f"output_dir = {directory}: cannot be locked: {reason(error)}"
            ) from None
        yield


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


def locate(config: Config) -> tuple[Path, ModelConfig]:
    """The model's folder and its configuration. UserError when the run would write into the
    folder.
    """
    directory = model_directory(config.model)
    if Path(config.output_dir).resolve() == directory.resolve():
        raise UserError(
            f"output_dir = {config.output_dir}: is the model's own folder, which the result would "
            "replace; set another"
        )
    return directory, model_config_of(config, directory)


def model_config_of(config: Config, directory: Path) -> ModelConfig:
    """The configuration of a model directory with the run's rope scaling."""
    with reported():
        found = read_config(directory)
    return scaled(config, found)


def scaled(config: Config, found: ModelConfig) -> ModelConfig:
    """A model's configuration with the run's rope scaling, and plain weights where they are made
    from scratch; UserError when rows are too long for it or its weights cannot be trained so.
    """
    if config.from_scratch:
        found = unquantized(found)
    check_quantized(config, found)
    with reported():
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


def load_sources(
    config: Config, directory: Path, model_config: ModelConfig, device: Device
) -> Sources:
    """Reads or makes the weights, on the device, and fresh adapters."""
    put, lora = putter(device), lora_of(config)
    recipe = recipe_of(config, model_config, device.library)
    if lora is not None:
        wide = making_room(put, model_config, lora) if device.kind == "cuda" else put
        put = recipe.frozen(put, wide, lora)
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
            model = read_model(directory, model_config, device.compute, put=Reading(put))
    adapter = None
    if lora is not None:
        adapter = device.put(init_adapter(model_config, lora, config.train_seed, device.compute))
    return Sources(directory, model_config, model, lora, adapter, recipe)


def putter(device: Device) -> Callable[[str, Any], Any]:
    """The ``put`` of read_model and init_model: one leaf at a time to the device, and decoded there
    where it is quantised.
    """

    def put(path: str, leaf: Any) -> Any:
        return leaf.decoded(device.put) if isinstance(leaf, Stack) else device.put(leaf)

    return put


def begin_at_error(
    config: Config, sources: Sources, loader: Loader, device: Device
) -> tuple[Sources, str]:
    """The sources with an adapter that makes up for what storing the weights lost, as far as its
    ranks go (models/error_init.py), and a line about it.

    Inputs are looked at in the first micro-batches, about CALIBRATION tokens of them; the weights
    are read a second time.
    """
    model_config, lora = sources.model_config, sources.lora
    assert lora is not None, "config.py refuses it without lora"
    tokens = config.per_device_train_batch_size * config.sequence_len
    count = min(-(-CALIBRATION // tokens), loader.batches_per_epoch)
    table = device.put(dense.rotary_table(model_config, config.sequence_len))
    with reported("lora_init = error"):
        squares = input_squares(
            sources.model,
            model_config,
            map(loader.batch, range(count)),
            table=table,
            begin=sources.recipe.begin,
            put=device.put,
        )
        with open_model(sources.directory, model_config, device.compute) as load:
            adapter, shares = error_adapter(
                sources.model,
                model_config,
                lora,
                squares,
                seed=config.train_seed,
                dtype=device.compute,
                load=load,
                put=device.put,
            )
    share = sum(shares.values()) / len(shares)
    line = (
        f"lora_init = error: adapters take off {share:.0%} of the squared error of stored weights "
        f"(mean of {len(shares)} modules, by the inputs of {count * tokens:,} tokens)"
    )
    return sources._replace(adapter=device.put(adapter)), line


class Rows(NamedTuple):
    """Packed rows of a run."""

    train: Packed
    evaluation: Packed | None

    def facts(self) -> list[str]:
        """Lines for the start of a run."""
        facts = [f"train: {_describe(self.train)}"]
        return [
            *facts,
            f"eval: {'none' if self.evaluation is None else _describe(self.evaluation)}",
        ]

    @property
    def fingerprint(self) -> str:
        """Of the name of the rows' folder, a hash of the data, the tokenizer and how they are read;
        with the date, where the chat template writes it.
        """
        assert isinstance(self.train.tokens, np.memmap)
        name, _, _ = Path(str(self.train.tokens.filename)).parent.parent.name.partition("-")
        date = self.train.report.date
        return f"{name} of {date}" if date else name


def _describe(packed: Packed) -> str:
    r = packed.report
    parts = [
        f"{r.documents:,} documents, {r.tokens:,} tokens ({r.supervised:,} supervised) "
        f"in {r.rows:,} rows, {r.fill:.1%} full"
    ]
    if r.truncated:
        parts.append(f"{r.truncated:,} cut to the row's length")
    if r.unsupervised:
        first = f" (first {r.nothing[0]})" if r.nothing else ""
        parts.append(f"{r.unsupervised:,} left out: nothing to learn in them{first}")
    if r.date:
        parts.append(f"the chat template wrote the date {r.date} (for another, {EPOCH})")
    for name, share in zip(packed.names, r.shares, strict=True):
        if share.skipped:
            parts.append(f"{name}: rows skipped: {counted(share.skipped)}")
        if share.wanted is not None:
            parts.append(
                f"{name}: {share.tokens / r.tokens:.1%} of the tokens, {share.wanted:.1%} wanted"
            )
    return "; ".join(parts) + (" (kept from before)" if packed.reused else "")


def load_rows(config: Config, directory: Path, model_config: ModelConfig) -> Rows:
    """Training and evaluation rows, tokenised and packed once and kept under output_dir/data."""
    cache = Path(config.output_dir) / "data"
    with disk(str(cache)):
        return Rows(
            *load_data(config, directory, None, model_config.vocab, cache, progress=Progress())
        )


class Clock:
    """Says when it is time for another line of progress."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + PROGRESS_SECONDS

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def due(self) -> bool:
        """True once every few seconds."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PROGRESS_SECONDS
        return True


class Progress:
    """Prints how far tokenising has come, every few seconds."""

    def __init__(self) -> None:
        self._clock = Clock()

    def __call__(self, documents: int, tokens: int) -> None:
        if self._clock.due():
            print(f"tokenising: {documents:,} documents, {tokens:,} tokens", flush=True)


class Reading:
    """A ``put`` that prints how far the weights have come, every few seconds."""

    def __init__(self, put: Callable[[str, Any], Any]) -> None:
        self._clock, self._put, self._bytes = Clock(), put, 0

    def __call__(self, path: str, leaf: Any) -> Any:
        self._bytes += sum(x.nbytes for x in (leaf.pieces if isinstance(leaf, Stack) else [leaf]))
        placed = self._put(path, leaf)
        if self._clock.due():
            done = self._bytes / 1e6
            rate = done / self._clock.seconds
            print(f"reading: {done:,.1f} MB of weights, {rate:,.1f} MB/s", flush=True)
        return placed


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()
