"""The card of a result: README.md with what Hugging Face reads in its head, and the facts of the
run for people.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from surogate import __version__
from surogate.choices import storage_of
from surogate.config import Config, describe
from surogate.models.lora import LoraSpec, MergeReport
from surogate.report import read_log
from surogate.schema import show
from surogate.settings import DATASET_FIELDS, FIELDS

CARD = "README.md"
PEFT_BLOCK = 64  # elements of an NF4 block when transformers quantises


class Card(NamedTuple):
    """What a card tells of a run."""

    config: Config
    facts: Sequence[tuple[str, str]]

    def text(self, *, adapter: bool) -> str:
        """The whole file."""
        config = self.config
        head: dict[str, Any] = {
            "base_model": config.model,
            "library_name": "peft" if adapter else "transformers",
            "pipeline_tag": "text-generation",
            "tags": ["surogate", "lora" if config.lora else "full-training"],
        }
        public = [d.path for d in config.datasets if not Path(d.path).exists()]
        if public:
            head["datasets"] = sorted(set(public))
        what = "LoRA adapter" if adapter else "model"
        note = f" {base_note(config)}." if adapter and base_note(config) else ""
        rows = "\n".join(f"| {name} | {value} |" for name, value in self.facts)
        chosen = [
            f"{key} = {show(value)}"
            for key, value, _ in describe(config)
            if value != (FIELDS.get(key) or DATASET_FIELDS[key.rpartition(".")[2]]).default
        ]
        return (
            f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n"
            f"# {config.run_name}\n\n"
            f"A {what} trained from `{config.model}` with surogate {__version__}.{note}\n\n"
            f"| | |\n|---|---|\n{rows}\n\n"
            "## Settings that are not the defaults\n\n```\n" + "\n".join(chosen) + "\n```\n"
        )


def merged_card(adapter: Path, base: str, spec: LoraSpec, report: MergeReport) -> str:
    """The card of a model that an adapter was merged into, with the adapter's own below."""
    head = {
        "base_model": base,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["surogate", "lora", "merged"],
    }
    text = (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n"
        f"`{base}` with a LoRA adapter of rank {spec.rank} and alpha {spec.alpha} added to its "
        f"weights by surogate {__version__}: {report.changed:,} of {report.weights:,} adapted "
        "weights changed.\n"
    )
    try:
        own = (adapter / CARD).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return text
    if own.startswith("---\n"):
        own = own.removeprefix("---\n").partition("\n---\n")[2]
    return f"{text}\nOf the adapter:\n\n{own.strip()}\n"


def base_note(config: Config) -> str:
    """What an adapter needs for its base where that is not the plain model; empty where it is."""
    storage = storage_of(config)
    if storage is None or config.lora_init == "default":
        return ""
    how = ""
    if storage.format == "nf4" and storage.block == PEFT_BLOCK:
        double = str(storage.double_quant).lower()
        how = f" (PEFT: load_in_4bit, nf4, bnb_4bit_use_double_quant = {double})"
    return (
        f"The adapter makes up for what its base lost in {storage.format}: use it with the base "
        f"quantised so{how}, or merge it first (surogate merge), never with the plain base"
    )


def card_of(config: Config, *, log: Path, steps: int, trained: str, device: str) -> Card:
    """The card of a run after ``steps`` updates, with the last losses of its log."""
    records = read_log(log) if log.exists() else []
    facts = [
        ("Base model", f"`{config.model}`"),
        ("Trained", trained),
        ("Data", ", ".join(f"`{d.path}`" for d in config.datasets)),
        ("Steps", f"{steps:,} of {config.per_device_train_batch_size} x "
         f"{config.gradient_accumulation_steps} rows of {config.sequence_len} tokens"),
        ("Tokens seen", f"{sum(r['tokens'] for r in records if r['log'] == 'step'):,}"),
        ("Training loss", _last(records, "step")),
        ("Evaluation loss", _last(records, "eval")),
        ("Device", device),
    ]  # fmt: skip
    return Card(config, facts)


def _last(records: Sequence[Mapping[str, Any]], kind: str) -> str:
    """The last loss of a kind, in nats per token."""
    found = [(r["step"], r["loss"]) for r in records if r["log"] == kind and r["loss"] is not None]
    if not found or not math.isfinite(found[-1][1]):
        return "none"
    step, loss = found[-1]
    return f"{loss:.4f} nats per token (step {step:,})"
