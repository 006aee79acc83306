"""The result of a run: a model directory or an adapter, a card that says how it came about, and
proof that what was written is what was trained.

Before the files take their place, the folder that holds them is read back against its manifest,
then loaded by our own reader, a layer at a time, and its logits on the first tokens of the training
rows are compared with the live model's. Nothing takes its place if they differ by more than
rounding can explain.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from surogate.card import CARD, Card, base_note
from surogate.choices import storage_of
from surogate.config import Config
from surogate.data.terminator import trained_terminator
from surogate.data.vocabulary import load_tokenizer
from surogate.device import Device
from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.batch import Batch, batch_of
from surogate.merge import Origin, base_tensors, merge_line, sealed, through, unchanged
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig, read_config
from surogate.models.files import Staging, write_bytes
from surogate.models.hf import open_model, read_adapter, write_adapter, write_model, write_weights
from surogate.models.lora import LoraSpec, merge_adapter
from surogate.models.names import Field, layer_fields, layout
from surogate.models.tree import Adapter, LayerAdapter, Model
from surogate.optim.state import named_leaves
from surogate.setup import DTYPES, Rows, Sources, disk, putter, reported
from surogate.step import TrainStep

TOKENS = 64  # of the row that logits are compared on
# Relative error of one rounding, with the sum of a product's terms in it.
ROUNDING = {BF16: 2.0**-8, np.dtype(np.float16): 2.0**-11, F32: 2.0**-20}
FROZEN_ROUNDING = {"fp8_hybrid": 2.0**-5, "nvfp4": 2.0**-3}  # of a recipe's frozen weights
MOST = 0.5  # unrelated logits differ by sqrt(2)


class Export(NamedTuple):
    """What is written: by whom it was trained, from what, and what the card says."""

    config: Config
    sources: Sources
    rows: Rows
    step: TrainStep
    card: Card

    def write(self, directory: Path) -> list[str]:
        """Writes the result and returns lines that say what is where and how it was verified.

        Full training gives a model directory; LoRA an adapter, or with merge_adapter a model
        directory with the adapter beside it. A model that learned to end its answers with another
        token than its eos tokens names that one as well. Raises UserError when the disk refuses or
        what was written is not what was trained; what was there before then stays.
        """
        with reported(), disk(str(directory)):
            if self.sources.lora is None:
                return self._write_model(directory)
            if not self.config.merge_adapter:
                return self._write_adapter(directory)
            return [*self._write_adapter(directory / "adapter"), *self._write_merged(directory)]

    def _write_model(self, directory: Path) -> list[str]:
        sources, dtype = self.sources, _stored_dtype(self.config, self.sources)
        model = masters(self.step) if dtype == F32 else self.step.model
        lines: list[str] = []
        write_model(
            model,
            sources.model_config,
            directory,
            dtype=dtype,
            source_directory=sources.directory,
            stop_token=self._stop_token(),
            finish=self._finish(directory, lines, dtype, None),
        )
        return [f"model: {directory}", *lines]

    def _write_merged(self, directory: Path) -> list[str]:
        sources, dtype = self.sources, _stored_dtype(self.config, self.sources)
        assert sources.lora is not None
        lines: list[str] = []
        with base_tensors(
            sources.directory, sources.model_config, self.step.device.compute, self._change()
        ) as base:
            adapter = masters(self.step)
            merged = merge_adapter(base, adapter, sources.lora, sources.model_config, dtype)
            write_weights(
                merged.tensors,
                sources.model_config,
                directory,
                dtype=dtype,
                source_directory=sources.directory,
                stop_token=self._stop_token(),
                finish=self._finish(directory, lines, dtype, None),
            )
        return [merge_line(merged.report), f"model: {directory}", *lines]

    def _write_adapter(self, directory: Path) -> list[str]:
        sources = self.sources
        assert sources.lora is not None
        adapter = masters(self.step)
        lines: list[str] = []
        write_adapter(
            adapter,
            sources.model_config,
            sources.lora,
            directory,
            _base_name(self.config, sources),
            source_directory=sources.directory,
            finish=self._finish(directory, lines, tree.leaves(adapter)[0].dtype, sources.directory),
        )
        note = base_note(self.config)
        return [f"adapter: {directory}", *([f"note: {note}"] if note else []), *lines]

    def _stop_token(self) -> int | None:
        return trained_terminator(load_tokenizer(self.sources.directory), self.rows.train)

    def _change(self) -> Any:
        """What the run's storage makes of each frozen tensor."""
        device = self.step.device
        return through(storage_of(self.config), self.sources.model_config, device)

    def _finish(
        self, directory: Path, lines: list[str], dtype: np.dtype, base: Path | None
    ) -> Callable[[Staging], None]:
        """What is done with the written files before they take their place. The card is not in the
        manifest: people edit it.
        """

        def finish(staging: Staging) -> None:
            if base is not None:
                Origin(storage_of(self.config), self._stop_token()).write(staging)
            sealed(staging)
            card = self.card.text(adapter=base is not None)
            write_bytes(staging.path / CARD, [card.encode()])
            if self.config.verify_export:
                agreed, line = self._compare(staging.path, dtype, base)
                if not agreed:
                    raise UserError(f"{directory}: the result was not put in place: {line}")
                lines.append(f"verified: {line}")

        return finish

    def _compare(self, folder: Path, dtype: np.dtype, base: Path | None) -> tuple[bool, str]:
        """Whether the logits are near enough, and how near they are."""
        sources, device = self.sources, self.step.device
        batch = first_tokens(self.rows)
        want = self.step.logits(batch)
        got = reloaded_logits(
            folder,
            batch,
            device,
            length=self.config.sequence_len,
            base=base,
            config=None if base is None else sources.model_config,
            change=unchanged if base is None else self._change(),
        )
        error, limit = distance(got, want), self._limit(dtype)
        if not error <= limit:
            return False, (
                f"loaded again, its logits differ by {error:.2g} of their size from the trained "
                f"model's, rounding explains {limit:.2g}; the checkpoints are whole "
                "(verify_export = false writes it all the same)"
            )
        agree = float((got.argmax(-1) == want.argmax(-1)).mean())
        return True, (
            f"loaded again, logits over {len(want)} tokens differ by {error:.2g} of their size "
            f"(at most {limit:.2g}), the likeliest token is the same in {agree:.0%}"
        )

    def _limit(self, dtype: np.dtype) -> float:
        """Relative error that rounding explains: four roundings in each of the 2 * layers branches,
        which add up like a random walk.
        """
        rounding = max(ROUNDING[np.dtype(dtype)], ROUNDING[np.dtype(self.step.device.compute)])
        if self.config.lora:
            rounding = max(rounding, FROZEN_ROUNDING.get(self.config.recipe, 0.0))
        return min(MOST, 4 * rounding * math.sqrt(2 * self.sources.model_config.layers))


def masters(step: TrainStep) -> Any:
    """The trained weights in the precision that the optimizer keeps."""
    kept = dict(named_leaves(step.state.master))
    found = [kept.get(name, leaf) for name, leaf in named_leaves(step.trainable)]
    return tree.flatten(step.trainable)[1](found)


def first_tokens(rows: Rows) -> Batch:
    """The beginning of the first training row, as one document."""
    tokens = np.array(rows.train.tokens[0][:TOKENS])
    return batch_of(tokens, [len(tokens)])


def distance(
    got: Float32[np.ndarray, "tokens vocab"], want: Float32[np.ndarray, "tokens vocab"]
) -> float:
    """Root mean square of the difference over that of ``want``, means over the vocabulary left out:
    they change no probability.
    """
    one, other = (x - x.mean(-1, keepdims=True, dtype=np.float64) for x in (got, want))
    difference, size = np.linalg.norm(one - other), np.linalg.norm(other)
    return float(difference / size) if difference else 0.0


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A source of layers (models/stack.py) that reads each from the disk when its turn comes."""

    config: ModelConfig
    load: Callable[[Field], Any]
    adapters: tuple[LayerAdapter | None, ...]

    def layer(self, index: int) -> Any:
        """The weights of a layer and its adapter."""
        return tree.map(self.load, layer_fields(self.config, index)), self.adapters[index]

    def __len__(self) -> int:
        return self.config.layers


def reloaded_logits(
    folder: Path,
    batch: Batch,
    device: Device,
    *,
    length: int,
    base: Path | None = None,
    config: ModelConfig | None = None,
    change: Callable[[str, np.ndarray], np.ndarray] = unchanged,
) -> Float32[np.ndarray, "tokens vocab"]:
    """Logits of the model directory ``folder``, or of the adapter there on ``base``.

    One layer is in memory at a time, beside embedding and head. ``length`` is what the rotary table
    is made for, ``config`` the base's, ``change`` that of ``open_model``.
    """
    config = config or read_config(folder)
    pair: Adapter | None = None
    lora: LoraSpec | None = None
    if base is not None:
        pair, lora = read_adapter(folder, config)
        pair = device.put(tree.map(lambda x: x.astype(device.compute), pair))
    with open_model(base or folder, config, device.compute, change=change) as read:
        put = putter(device)

        def load(field: Field) -> Any:
            return put(field.path, read(field))

        fields: Any = layout(config)  # a Model whose leaves are Fields
        head = None if fields.head is None else load(fields.head)
        found = dense.logits(
            Model(load(fields.embed), (), load(fields.norm), head),
            None,
            device.put(batch),
            table=device.put(dense.rotary_table(config, length)),
            settings=Settings(config, lora),
            source=Streamed(config, load, pair.layers if pair else (None,) * config.layers),
        )
    return found if isinstance(found, np.ndarray) else found.get()


def _base_name(config: Config, sources: Sources) -> str:
    """What an adapter says it belongs to: the model's name on the Hub, or its folder."""
    local = Path(config.model).expanduser().is_dir()
    return str(sources.directory.resolve()) if local else config.model


def _stored_dtype(config: Config, sources: Sources) -> np.dtype:
    """torch_dtype, or what the model was stored in; float32 where neither is known."""
    wanted = (
        config.torch_dtype if config.torch_dtype != "auto" else sources.model_config.torch_dtype
    )
    return DTYPES.get(wanted or "", F32)
