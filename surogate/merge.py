"""surogate merge: an adapter into the weights that it was trained on, a tensor at a time.

W + scale * B A is added in float32 and rounded once. Where a run kept its frozen weights in a
narrow format (QLoRA), or its checkpoint does, W is what that format decodes to, since that is what
the adapter corrects; the result is never quantised again. A change below half a unit in the last
place of a weight is lost in rounding: the share of weights that changed is reported, and none at
all is a warning.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from surogate.card import CARD, merged_card
from surogate.device import Device, choose_device
from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.quant.quantized import dequantize
from surogate.manifest import faults, write_manifest
from surogate.models.config import ModelConfig, read_config
from surogate.models.files import DTYPE_NAMES, Planned, Staging, Tensor, read_json, write_bytes
from surogate.models.hf import ADAPTER_CONFIG, open_weights, read_adapter, write_weights
from surogate.models.lora import MergeReport, merge_adapter
from surogate.models.names import layout
from surogate.models.recipe import Scope, Storage, field_at
from surogate.setup import disk, model_directory, reported

ORIGIN = "surogate.json"  # beside an adapter, see Origin
Change = Callable[[str, np.ndarray], np.ndarray]
DTYPES = {short: dtype for dtype, (short, _) in DTYPE_NAMES.items()}


class Origin(NamedTuple):
    """What an adapter of ours takes for granted beside its base."""

    storage: Storage | None  # narrow format in which the frozen weights were kept
    stop_token: int | None  # that it was taught to end an answer with

    def write(self, staging: Staging) -> None:
        """Writes ORIGIN."""
        storage = None if self.storage is None else self.storage._asdict()
        staging.json(ORIGIN, {"storage": storage, "stop_token": self.stop_token})

    @classmethod
    def beside(cls, adapter: Path) -> "Origin":
        """That of an adapter's folder; of one that is not ours, nothing is known."""
        if not (adapter / ORIGIN).exists():
            return cls(None, None)
        found = read_json(adapter / ORIGIN)
        storage = found.get("storage")
        return cls(None if storage is None else Storage(**storage), found.get("stop_token"))


def unchanged(name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of weights that are multiplied with as they are stored."""
    return array


def through(storage: Storage | None, config: ModelConfig, device: Device) -> Change:
    """What becomes of each tensor of the frozen weights: those that a run stored in a narrow format
    are quantised and decoded, on the device, from the type that the run read them in.
    """
    if storage is None:
        return unchanged
    paths = Scope().paths(config)
    stored = {piece.name for path in paths for piece in field_at(config, path).pieces}

    def change(name: str, array: np.ndarray) -> np.ndarray:
        if name not in stored:
            return array
        there = device.put(array.astype(device.compute, copy=False))
        found = dequantize(storage.quantized(there))
        return (found if isinstance(found, np.ndarray) else found.get()).astype(array.dtype)

    return change


@contextmanager
def base_tensors(
    directory: Path, config: ModelConfig, dtype: np.dtype | None, change: Change
) -> Iterator[dict[str, Planned]]:
    """The tensors of a model directory in ``dtype`` (None: as stored), read when they are asked
    for. What else is in the files, such as a copy of a tied head, is left out.
    """
    fields = tree.leaves(layout(config))
    names = [piece.name for field in fields for piece in field.pieces]
    with open_weights(directory, config) as tensors:
        yield {name: _planned(name, tensors[name], dtype, change) for name in names}


def _planned(name: str, tensor: Tensor, dtype: np.dtype | None, change: Change) -> Planned:
    kind = dtype or DTYPES[tensor.dtype]

    def load() -> np.ndarray:
        return change(name, tensor.handle.get_tensor(name).astype(kind, copy=False))

    return Planned(tensor.shape, kind, load)


def merge_line(report: MergeReport) -> str:
    """What a merge did, in words."""
    share = report.changed / max(1, report.weights)
    line = f"merged: {report.changed:,} of {report.weights:,} adapted weights changed ({share:.1%})"
    if report.changed:
        return line
    return f"warning: {line}: all changes were lost in rounding; keep the adapter, or use float32"


def sealed(staging: Staging) -> None:
    """Writes the manifest and reads everything back. Raises UserError for a disk that is not
    sound.
    """
    write_manifest(staging)
    found = faults(staging.path)
    if found:
        raise UserError(f"{found[0]}: does not read back as it was written; is the disk sound?")


def adapter_directory(path: Path) -> Path:
    """The adapter in a folder: its own, or that of the run whose output_dir it is."""
    for folder in (path, path / "adapter"):
        if (folder / ADAPTER_CONFIG).exists():
            return folder
    raise UserError(
        f"{path}: holds no adapter ({ADAPTER_CONFIG}); "
        f"surogate export {path} writes that of an unfinished run"
    )


def merge(adapter: Path, output: Path, *, base: str | None, device: Device) -> list[str]:
    """Writes the model of an adapter and its base to ``output``; returns lines about it.

    ``base`` None: the one that the adapter names. The weights keep the type of the base's files,
    or of what is plain in those of a quantised base.
    """
    adapter = adapter_directory(adapter)
    with reported(), disk(str(output)):
        name = base or read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not name:
            raise UserError(f"{adapter / ADAPTER_CONFIG}: names no base model; give --base")
        source = model_directory(name)
        if output.resolve() in (source.resolve(), adapter.resolve()):
            raise UserError(f"--output {output}: would replace what is merged; give another folder")
        config = read_config(source)
        pair, spec = read_adapter(adapter, config)
        origin = Origin.beside(adapter)
        change = through(origin.storage, config, device)
        with base_tensors(source, config, None, change) as tensors:
            dtype = next(iter(tensors.values())).dtype
            merged = merge_adapter(tensors, pair, spec, config, dtype)

            def finish(staging: Staging) -> None:
                sealed(staging)
                card = merged_card(adapter, name, spec, merged.report)
                write_bytes(staging.path / CARD, [card.encode()])

            write_weights(
                merged.tensors,
                config,
                output,
                dtype=dtype,
                source_directory=source,
                stop_token=origin.stop_token,
                finish=finish,
            )
    return [merge_line(merged.report), f"model: {output}"]


def merge_command(adapter: str, output: str, base: str | None, device: str) -> None:
    """surogate merge."""
    for line in merge(Path(adapter), Path(output), base=base, device=choose_device(device)):
        print(line)
