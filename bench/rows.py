"""The training steps that are measured, and what is said of each whoever ran it.

A row is one step: a model, what of it is trained, and the shape of its micro-batches. Each is run
in a process of its own, by ``bench.steps`` (ours) or ``bench.peers``, which take the same
arguments.
"""

import argparse
import dataclasses
import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bench.ceiling import ideal_seconds
from bench.inputs import packed_lengths
from surogate.models.config import ModelConfig
from surogate.models.registry import lookup
from surogate.models.stack import Recompute

OURS = "ours"
RECIPES = (
    "bf16", "fp8", "fp8_tensor", "fp8_row", "nvfp4", "nf4", "fp8_blocks", "nvfp4_blocks", "fp8_nf4",
    "fp8_fp8_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured step.

    Attributes:
        rows, length, accumulation: a micro-batch is ``rows`` of ``length`` tokens, a step so many
            micro-batches.
        documents: mean length of the documents that rows are packed from; None: whole rows.
        chunk: tokens whose logits exist at a time; None: the default.
        moments: dtype of AdamW's moments.
        recipe: of the layers' products (bf16, fp8, nvfp4), or storage of the base weights, which
            bf16 products multiply (nf4, fp8_blocks, nvfp4_blocks) or fp8's (fp8_nf4,
            fp8_fp8_blocks).
        steps: measured, after two that warm up.
    """

    model: str
    mode: Literal["lora", "full"]
    rows: int = 2
    accumulation: int = 4
    length: int = 2048
    documents: int | None = None
    recompute: Recompute = "none"
    chunk: int | None = None
    rank: int = 16
    moments: Literal["float32", "bfloat16"] = "float32"
    steps: int = 8
    recipe: str = "bf16"

    @property
    def name(self) -> str:
        """Such as "Qwen3-0.6B LoRA, 2 x 2048 x 4, recompute block"."""
        notes = [f"{self.rows} x {self.length} x {self.accumulation}"]
        if self.documents:
            notes.append(f"packed from documents of {self.documents}")
        if self.recipe != "bf16":
            notes.append(self.recipe)
        if self.recompute != "none":
            notes.append(f"recompute {self.recompute}")
        return f"{self.model} {'LoRA' if self.mode == 'lora' else 'full'}, {', '.join(notes)}"

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length * self.accumulation

    def arguments(self) -> list[str]:
        """The command line that ``parser`` reads back."""
        options = dataclasses.asdict(self)
        given = [options.pop("model"), options.pop("mode")]
        for name, value in options.items():
            given += [f"--{name}", str(value)] if value is not None else []
        return given

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Row":
        """The row that a command line asks for."""
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    def lengths(self, number: int) -> list[int]:
        """Lengths of the documents of a micro-batch."""
        if self.documents is None:
            return [self.length] * self.rows
        rng = np.random.default_rng(number)
        return [
            each
            for _ in range(self.rows)
            for each in packed_lengths(self.length, self.documents, rng)
        ]

    def speed(self, seconds: Sequence[float]) -> dict[str, Any]:
        """What the times of its steps mean; ``ceiling`` is the share of bench/ceiling.py's."""
        config, median = lookup(self.model), statistics.median(seconds)
        return {
            "shape": self.name,
            "seconds": list(seconds),
            "tokens_per_second": self.tokens / median,
            "ceiling": self.ideal_seconds(config) / median,
        }

    def ideal_seconds(self, config: ModelConfig) -> float:
        """Of the step, at the stated rates."""
        lengths = [each for number in range(self.accumulation) for each in self.lengths(number)]
        return ideal_seconds(
            config,
            lora=self.mode == "lora",
            keys=sum(n * n for n in lengths) / 2 / self.tokens,
            tokens=self.rows * self.length,
            accumulation=self.accumulation,
            recompute=self.recompute == "block",
            fp8=self.recipe.startswith("fp8") and self.recipe != "fp8_blocks",
        )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Takes the fields of a row."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model")
    made.add_argument("mode", choices=["lora", "full"])
    for name in ("rows", "accumulation", "length", "rank", "steps"):
        made.add_argument(f"--{name}", type=int, default=getattr(Row, name))
    made.add_argument("--documents", type=int, help="mean document length; whole rows if unset")
    made.add_argument("--recompute", default="none", choices=["none", "selective", "block"])
    made.add_argument("--chunk", type=int)
    made.add_argument("--recipe", default="bf16", choices=RECIPES)
    made.add_argument("--moments", default="float32", choices=["float32", "bfloat16"])
    return made


ROWS = (
    Row("Qwen3-0.6B", "lora"),
    Row("Qwen3-0.6B", "lora", documents=256),
    Row("Qwen3-0.6B", "lora", recompute="block"),
    Row("Qwen3-0.6B", "full", rows=8, accumulation=1),
    Row("Qwen3-1.7B", "lora"),
    Row("Qwen3-8B", "lora", steps=5),
    Row("Qwen3-8B", "lora", recompute="block", steps=5),
    Row("Qwen3-8B", "full", moments="bfloat16", steps=5),
    Row("Qwen3-8B", "lora", recipe="fp8", steps=3),
    Row("Qwen3-8B", "lora", recompute="block", recipe="fp8", steps=3),
    Row("Qwen3-8B", "full", moments="bfloat16", recipe="fp8", steps=3),
    Row("Qwen3-8B", "lora", recipe="nf4", steps=3),
    Row("Qwen3-8B", "lora", recipe="fp8_blocks", steps=3),
    Row("Qwen3-8B", "lora", recipe="fp8_nf4", steps=3),
    Row("Qwen3-8B", "lora", recipe="fp8_fp8_blocks", steps=3),
    Row("Qwen3-8B", "lora", rows=1, accumulation=1, recompute="block", recipe="nf4", steps=3),
    Row("Qwen2.5-0.5B", "full", rows=32, length=1024, accumulation=16, moments="bfloat16", steps=3),
    Row("Qwen2.5-1.5B", "full", rows=32, length=1024, accumulation=16, moments="bfloat16", steps=2),
)


def variants(row: Row) -> list[str]:
    """Who runs a row: us, and the peers that have the same step.

    transformers has no packed rows without a mask of the square, and without recomputation does not
    fit 32 x 1024 tokens of the Qwen2.5 models and their logits beside them. Peers are measured in
    bf16 alone.
    """
    if row.recipe != "bf16" or row.documents or row.model.startswith("Qwen2.5"):
        return [OURS]
    liger = ["liger"] if importlib.util.find_spec("liger_kernel") else []
    return [OURS, "eager", "compile", *liger]
