"""``surogate config``: what a run will use, where each value comes from, and what it means.

The origin of a value is one word:

    file      the configuration file
    --set     the command line, as is --recipe
    derived   chosen from other keys or from this machine; the reason is printed beside it
    default   nothing was said
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from surogate.config import Config, config_hash, describe
from surogate.config_notes import Note, notes_on
from surogate.device import Device, choose_device
from surogate.schema import show
from surogate.settings import DATASET_FIELDS, FIELDS, SECTIONS

WIDE = 160  # columns where there is no terminal
_STYLES = {"default": "dim", "derived": "cyan"}


class Line(NamedTuple):
    """A key: the value that the run will use, the word for its origin, and from where exactly."""

    name: str
    value: Any
    origin: str
    source: str  # the file, the option or the reason; empty for a default
    help: str


def explain(config: Config, file: Path, device: Device) -> list[Line]:
    """Every setting of a configuration that was read from ``file``, in the order of the docs."""
    derived = _derived(config, device)
    lines = []
    for name, value, source in describe(config):
        group, _, inner = name.partition(".")
        field = DATASET_FIELDS[inner.partition(".")[2]] if inner else FIELDS[group]
        if name in derived:
            lines.append(Line(name, *derived[name], help=field.help))
            continue
        origin = "derived"
        if source == str(file):
            origin = "file"
        elif source == "default" or source.startswith("--"):
            origin = source
        lines.append(Line(name, value, origin, "" if source == "default" else source, field.help))
    return lines


def _derived(config: Config, device: Device) -> dict[str, tuple[Any, str, str]]:
    """(value, origin, reason) of keys that were left to us: null, auto or a share of something."""
    found: dict[str, tuple[Any, str]] = {}
    if config.device == "auto":
        found["device"] = device.kind, device.fact()
    if config.log_file is None:
        found["log_file"] = str(Path(config.output_dir) / "log.jsonl"), "output_dir"
    if config.dataloader_num_workers is None:
        cores = os.cpu_count() or 1
        found["dataloader_num_workers"] = min(cores, 8), f"{cores} cores"
    if device.kind == "cpu":
        found["gradient_dtype"] = "fp32", "the CPU computes in float32"
    elif config.gradient_dtype is None:
        found["gradient_dtype"] = ("fp32", "lora") if config.lora else ("bf16", "as the weights")
    if config.warmup_ratio and not config.warmup_steps and config.max_steps > 0:
        reason = "warmup_ratio of max_steps"
        found["warmup_steps"] = -int(-config.warmup_ratio * config.max_steps // 1), reason
    if config.wandb_name is None:
        found["wandb_name"] = config.run_name, "run_name"
    if config.aim_name is None:
        found["aim_name"] = config.run_name, "run_name"
    if config.aim_repo is None:
        found["aim_repo"] = config.output_dir, "output_dir"
    return {name: (value, "derived", reason) for name, (value, reason) in found.items()}


def explain_command(config: Config, file: Path, *, everything: bool, as_json: bool) -> None:
    """surogate config: every setting, or those that are not defaults."""
    device = choose_device(config.device)
    lines = explain(config, file, device)
    if not everything:
        lines = [line for line in lines if line.name in config.origins]
    notes = notes_on(config, device.kind)
    if as_json:
        print(json.dumps(_document(config, lines, notes), indent=1, default=str))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(_table(lines))
    for name, value, reason in notes:
        console.print(f"ignored: {name} = {show(value)}: {reason}", markup=False, highlight=False)
    console.print(f"hash of what decides the result: {config_hash(config)}", highlight=False)


def _document(config: Config, lines: list[Line], notes: list[Note]) -> dict[str, Any]:
    return {
        "settings": [line._asdict() for line in lines],
        "ignored": [dict(zip(("name", "value", "reason"), note, strict=True)) for note in notes],
        "hash": config_hash(config),
    }


def _table(lines: list[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, ratio in (("Key", 3), ("Value", 3), ("Origin", 3), ("Meaning", 5)):
        table.add_column(head, overflow="fold", ratio=ratio)
    starts = {first: title for title, first in SECTIONS.items()}
    names = list(FIELDS)
    section = ""
    for line in lines:
        index = names.index(line.name.partition(".")[0])
        title = next(starts[name] for name in reversed(names[: index + 1]) if name in starts)
        if title != section:
            section = title
            table.add_row()
            table.add_row(Text(title, style="bold"))
        style = _STYLES.get(line.origin, "")
        origin = line.origin
        if line.origin == "derived":
            origin = f"derived: {line.source}"
        elif line.origin == "file":
            origin = line.source
        cells = (line.name, show(line.value), origin, line.help)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table
