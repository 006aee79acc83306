"""Every optimizer in whole runs: what it learns of real text, how it resumes, what it ignores."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from surogate import checkpoint
from surogate.api import batch
from surogate.config import ignored, load_config
from surogate.device import choose_device
from surogate.kernels import tree
from surogate.kernels.arrays import F32
from surogate.kernels.batch import Batch
from surogate.models.blocks import Settings
from surogate.models.config import from_hf
from surogate.models.init import init_model
from surogate.models.names import hidden_matrices, layout
from surogate.models.registry import hf_config
from surogate.optim.adamw import AdamWConfig
from surogate.optim.normuon import NorMuonConfig
from surogate.optim.rule import Rule
from surogate.step import StepOptions, TrainStep
from tests.oracle import close, same_bits
from tests.surogate.runs import ROOT, prepare, train, write_config

PLAYS = ROOT / "examples/shakespeare/plays.jsonl"
ROW, ROWS, STEPS = 64, 4, 500
# A Qwen3 over bytes, whose matrices all have 4096 elements or more.
MODEL = from_hf(
    hf_config("Qwen3-0.6B")
    | dict(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
)


def train_step(rule: Rule) -> TrainStep:
    """A step over random weights, the same for every rule."""
    model = init_model(MODEL, 0, np.dtype(F32))
    options = StepOptions(
        tokens=ROW * ROWS,
        recompute="none",
        chunk=None,
        gradient_dtype=np.dtype(F32),
        max_grad_norm=1.0,
        graphs=False,
    )
    return TrainStep(choose_device("cpu"), model, None, Settings(MODEL, None), rule, options)


def text() -> np.ndarray:
    """The plays as bytes."""
    rows = PLAYS.read_text().splitlines()
    return np.frombuffer("\n".join(json.loads(row)["text"] for row in rows).encode(), np.uint8)


def rows_at(data: np.ndarray, starts: Any) -> Batch:
    return batch([data[start : start + ROW].tolist() for start in starts])


def learned(rule: Rule, steps: int, *, peak: float) -> float:
    """Loss in nats a byte on text that was left out, after steps with a linear decay."""
    data = text()
    seen, left_out = data[:-40000], data[-40000:]
    random, step = np.random.default_rng(0), train_step(rule)
    for number in range(steps):
        step.micro(rows_at(seen, random.integers(0, len(seen) - ROW, ROWS)))
        step.update(peak * min(1.0, (number + 1) / 20) * (1 - number / steps))
    nll, count = 0.0, 0
    for begin in range(0, 20000, 1000):
        rows = rows_at(left_out, range(begin, begin + ROW * ROWS, ROW))
        nll -= float(step.logprobs(rows).sum())
        count += int((rows.labels >= 0).sum())
    return nll / count


@pytest.fixture(scope="module")
def fp32() -> float:
    """What AdamW with float32 moments learns."""
    return learned(AdamWConfig(beta2=0.99), STEPS, peak=2e-3)


@pytest.mark.slow
def test_eight_bits_learn_what_float32_does(fp32):
    """Within 1 % of the loss after 500 steps, all of whose matrices have 8-bit moments."""
    rule = AdamWConfig(beta2=0.99, moment_dtype="uint8")
    got = learned(rule, STEPS, peak=2e-3)
    assert fp32 < 2.4  # from 5.5: there was something to learn
    assert abs(got - fp32) < 0.01 * fp32


@pytest.mark.slow
def test_normuon_learns_as_much_in_fewer_steps(fp32):
    """The point of it: 60 % of the steps, the matrices at twice AdamW's learning rate."""
    rule = NorMuonConfig(adamw=AdamWConfig(beta2=0.99), adamw_lr_ratio=0.5)
    assert learned(rule, STEPS * 6 // 10, peak=4e-3) < fp32


def test_hidden_matrices_are_those_of_the_layers():
    """As tensors of a checkpoint: q, k and v apart, gate and up apart."""
    found = []

    def look(field: Any, rows: Any) -> None:
        if rows is not None:
            found.extend(piece.name for piece in field.pieces)
            assert rows == tuple((piece.start, piece.stop) for piece in field.pieces)

    tree.map(look, layout(MODEL), hidden_matrices(MODEL))
    layer = [f"self_attn.{x}_proj" for x in "qkvo"] + [
        f"mlp.{x}_proj" for x in ("gate", "up", "down")
    ]
    assert found == [f"model.layers.0.{name}.weight" for name in layer]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"adamw_cautious_wd": True, "weight_decay": 0.1},
    "adamw_8bit": {"weight_decay": 0.1},
    "normuon": {"adamw_learning_rate": 0.001, "weight_decay": 0.1, "moment_dtype": "bf16"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)
    return prepare(tmp_path)


def final(output: Path) -> dict[str, np.ndarray]:
    path = checkpoint.newest(output)
    assert path is not None
    return load_file(path / checkpoint.TRAINED) | load_file(path / checkpoint.OPTIMIZER)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_resumes_with_the_same_bits(folder, name):
    """Weights and state after six steps, the last three of them from a checkpoint."""
    settings = {"optimizer": name, "save_steps": 3, **OPTIMIZERS[name]}
    train(folder, **settings, output_dir=str(folder / "plain"))
    whole = final(folder / "plain")
    shutil.copytree(folder / "plain", folder / "again")
    shutil.rmtree(folder / "again" / "step_00000006")
    train(folder, **settings, output_dir=str(folder / "again"))
    again = final(folder / "again")
    assert again.keys() == whole.keys()
    for key, array in whole.items():
        same_bits(again[key], array)
    kinds = {key.rsplit(".", 1)[-1] for key in whole}
    assert ("codes" in kinds and "scale" in kinds) == (name == "adamw_8bit")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_how_rows_are_split_changes_nothing_but_roundings(folder, name):
    """Four rows at once, or in four micro-batches. Moments in 8 or 16 bits may round elsewhere."""
    settings = {"optimizer": name, "max_steps": 3, **OPTIMIZERS[name], "moment_dtype": "fp32"}
    losses = []
    for rows, pieces in ((4, 1), (1, 4)):
        split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": pieces}
        out = folder / f"out{rows}"
        records = train(folder, **settings, **split, output_dir=str(out))
        losses.append([r["loss"] for r in records if r["log"] == "step"])
    close(np.array(losses[1]), np.array(losses[0]), "float32" if name == "adamw" else "bfloat16")


@pytest.mark.parametrize(
    "settings,lines",
    [
        (
            {"optimizer": "adamw_8bit", "moment_dtype": "bf16"},
            ["moment_dtype = 'bf16': optimizer = adamw_8bit"],
        ),
        (
            {"normuon_momentum": 0.9, "normuon_beta2": 0.9, "adamw_learning_rate": 1e-3},
            [
                "adamw_learning_rate = 0.001: optimizer = adamw",
                "normuon_momentum = 0.9: optimizer = adamw",
                "normuon_beta2 = 0.9: optimizer = adamw",
            ],
        ),
        (
            {"optimizer": "normuon", "normuon_cautious_wd": True, "adamw_cautious_wd": True},
            [
                "adamw_cautious_wd = true: weight_decay = 0",
                "normuon_cautious_wd = true: weight_decay = 0",
            ],
        ),
    ],
)
def test_keys_without_effect_are_reported(folder, settings, lines):
    config = load_config(write_config(folder, **settings))
    assert ignored(config) == [f"ignored: {line}" for line in lines]
