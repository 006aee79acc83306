"""What a run has left, and how it is compared: its arrays, and its model in transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from tests.oracle import close, same_bits

CHATS = {"sequence_len": 64, "lora_rank": 4, "lora_alpha": 8, "lora": True}


def chats(folder: Path) -> list[dict[str, str]]:
    return [{"path": str(folder / "chats.jsonl"), "type": "conversation"}]


def weights(output: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint: weights, moments and the count of updates."""
    newest = sorted(output.glob("step_*"))[-1]
    return load_file(newest / "trained.safetensors") | load_file(newest / "optimizer.safetensors")


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, array in first.items():
        same_bits(array, second[name])


def scores(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()


def transformer(folder: Path) -> Any:
    """The model of a folder in transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def alike(got: np.ndarray, want: np.ndarray) -> None:
    """The same logits but for rounding: some ten products of 32 to 64 terms, one behind another."""
    close(got, want, "float32", terms=64, roundings=16)


def near(got: list[float], want: list[float]) -> None:
    """The same numbers but for the order of sums of some 64 terms in float32."""
    close(np.array(got), np.array(want), "float32", terms=64)
