"""Whole runs through the command line on the CPU: what each setting does to them, and what not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import surogate
from surogate.data.packed import open_packed
from surogate.optim.schedule import Schedule
from tests.oracle import close, same_bits
from tests.surogate.results import (
    CHATS,
    alike,
    assert_same_bits,
    chats,
    near,
    scores,
    transformer,
    weights,
)
from tests.surogate.runs import prepare, steps, train


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot, which has tests of its own and takes longer than a run."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.mark.parametrize("lora", [False, True])
def test_any_split_of_the_same_rows_is_the_same_run(folder, lora):
    """4 rows an update as 4 x 1, 2 x 2 and 1 x 4: the same rows, losses, norms and weights."""
    found = []
    for rows, accumulation in ((4, 1), (2, 2), (1, 4)):
        out = folder / f"out{rows}"
        options = dict(CHATS, datasets=chats(folder)) if lora else {}
        records = train(
            folder,
            **options,
            output_dir=str(out),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=4,
            adamw_epsilon=1e-3,  # so that an update does not magnify a small gradient's rounding
        )
        found.append((records, weights(out)))
    whole, arrays = found[0]
    for records, others in found[1:]:
        for name in ("loss", "norm"):
            near(steps(records, name), steps(whole, name))
        assert steps(records, "epoch") == steps(whole, "epoch")
        assert steps(records, "tokens") == steps(whole, "tokens")
        for name, array in arrays.items():
            close(others[name], array, "float32", terms=64, roundings=16)  # of four updates


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_recomputation_changes_no_bit(folder, recompute, lora):
    options: dict[str, Any] = dict(CHATS, datasets=chats(folder)) if lora else {}
    for value in ("none", recompute):
        train(folder, **options, recompute=value, output_dir=str(folder / value), max_steps=3)
    assert_same_bits(folder / "none", folder / recompute)


def test_chunks_of_the_head_change_rounding_alone(folder):
    one = train(folder, lmhead_chunks=1, output_dir=str(folder / "one"))
    for chunks in (3, 64):  # ragged: 64 tokens in pieces of 22; a token each
        many = train(folder, lmhead_chunks=chunks, output_dir=str(folder / f"{chunks}"))
        for name in ("loss", "norm"):
            near(steps(many, name), steps(one, name))


def test_clipping(folder):
    """The norm in the log is the one before clipping; the first moment is of the clipped one."""
    free = train(folder, max_grad_norm=0, output_dir=str(folder / "free"), max_steps=1)
    held = train(folder, max_grad_norm=0.01, output_dir=str(folder / "held"), max_steps=1)
    assert steps(free, "norm") == steps(held, "norm")
    [norm] = steps(free, "norm")
    assert norm > 1
    first, second = weights(folder / "free"), weights(folder / "held")
    for name in first:
        if name.startswith("m."):
            close(second[name], first[name] * (0.01 / norm), "float32", roundings=16)


def test_weight_decay_is_decoupled_and_spares_norms(folder):
    options = {"max_steps": 1, "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    train(folder, **options, weight_decay=0.0, output_dir=str(folder / "a"))
    train(folder, **options, weight_decay=0.5, output_dir=str(folder / "b"))
    start = load_file(folder / "model" / "model.safetensors")
    plain, decayed = (load_file(folder / x / "model.safetensors") for x in "ab")
    for name, array in start.items():
        if array.ndim == 1:
            same_bits(plain[name], decayed[name])
        else:
            close(plain[name] - decayed[name], 0.005 * array, "float32", scale=1)


@pytest.mark.parametrize(
    "settings,expected",
    [
        ({"lr_scheduler_type": "linear"}, Schedule(0.01, 10, "linear")),
        (
            {"lr_scheduler_type": "cosine", "warmup_steps": 3, "final_lr_fraction": 0.1},
            Schedule(0.01, 10, "cosine", warmup_steps=3, final_fraction=0.1),
        ),
        (
            {"lr_scheduler_type": "constant", "warmup_ratio": 0.11, "cooldown_steps": 2},
            Schedule(0.01, 10, "constant", warmup_steps=2, cooldown_steps=2),
        ),
        (
            {"lr_scheduler_type": "wsd", "wsd_decay_steps_fraction": 0.3},
            Schedule(0.01, 10, "wsd", wsd_decay_fraction=0.3),
        ),
    ],
)
def test_schedules(folder, settings, expected):
    records = train(folder, **settings, max_steps=10, learning_rate=0.01)
    assert steps(records, "lr") == [expected.at(step) for step in range(1, 11)]


def test_rate_zero_changes_nothing(folder):
    train(folder, learning_rate=0.0, weight_decay=0.1)
    start = load_file(folder / "model" / "model.safetensors")
    for name, array in load_file(folder / "out" / "model.safetensors").items():
        same_bits(array, start[name])


def test_packing_uses_less_rows_and_off_uses_one_a_document(folder):
    found = {}
    for packing in (True, False):
        out = folder / str(packing)
        records = train(
            folder,
            datasets=chats(folder),
            sequence_len=128,
            sample_packing=packing,
            output_dir=str(out),
            max_steps=-1,
            num_epochs=1,
        )
        [data] = [path for path in (out / "data").iterdir() if path.is_dir()]
        found[packing] = (len(steps(records)), open_packed(data / "train", reused=True).rows)
    assert found[False] == (27, 54)
    assert found[True][1] < 27 and found[True][0] == found[True][1] // 2


def test_packed_rows_give_the_loss_of_their_documents_alone(folder):
    """At rate 0 an evaluation of packed rows is that of each document alone in transformers."""
    options = {"datasets": chats(folder), "learning_rate": 0.0, "max_steps": 1}
    for packing in (True, False):
        records = train(
            folder,
            **options,
            sequence_len=128,
            sample_packing=packing,
            output_dir=str(folder / str(packing)),
        )
        [evaluation] = [r for r in records if r["log"] == "eval"]
        [data] = [p for p in (folder / str(packing) / "data").iterdir() if p.is_dir()]
        total, count = reference_loss(transformer(folder / "model"), data / "evaluation")
        assert evaluation["tokens"] == count
        assert evaluation["loss"] == pytest.approx(total / count, rel=1e-5)


def reference_loss(model: Any, rows: Path) -> tuple[float, int]:
    packed, total, count = open_packed(rows, reused=True), 0.0, 0
    for index in range(packed.rows):
        tokens, labels, lengths = packed.row(index)
        begin = 0
        for length in lengths.tolist():
            part = slice(begin, begin + length)
            begin += length
            target = torch.tensor(labels[part].astype(np.int64))
            if (target >= 0).any():
                logits = torch.tensor(scores(model, tokens[part].tolist()))
                total += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
                count += int((target >= 0).sum())
    return total, count


def test_evaluates_when_due_and_at_the_end(folder):
    records = train(folder, eval_steps=3, max_steps=7, save_steps=2, save_total_limit=2)
    kinds = [(r["log"], r["step"]) for r in records if r["log"] in ("step", "eval")]
    assert [step for log, step in kinds if log == "eval"] == [3, 6, 7]
    assert kinds.index(("eval", 3)) == kinds.index(("step", 3)) + 1
    assert sorted(p.name for p in (folder / "out").glob("step_*")) == [
        "step_00000006",
        "step_00000007",
    ]


def test_evaluation_rows_of_their_own_and_none(folder):
    own = [{"path": str(folder / "chats.jsonl"), "type": "conversation", "samples": 5}]
    records = train(folder, validation_datasets=own, output_dir=str(folder / "own"))
    assert [r["step"] for r in records if r["log"] == "eval"] == [6]
    records = train(folder, validation_split_ratio=0.0, output_dir=str(folder / "none"))
    assert not [r for r in records if r["log"] == "eval"]


def test_epochs_decide_the_number_of_steps(folder):
    records = train(folder, max_steps=-1, num_epochs=2, gradient_accumulation_steps=2)
    count = len(steps(records))
    rows = 27  # of 54 texts, see the first line of the run
    assert count == 2 * (rows // 4)
    assert steps(records, "epoch") == pytest.approx([2 * (i + 1) / count for i in range(count)])


def test_one_document_short_rows_and_other_lengths(folder):
    """Rows that do not divide evenly: accumulation, evaluation padding and a last short epoch."""
    records = train(
        folder,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=2,
        sequence_len=17,
        max_steps=-1,
        num_epochs=3,
    )
    assert all(np.isfinite(steps(records)))


def test_rope_scaling_reaches_the_output(folder):
    train(folder, rope_scaling="yarn", max_model_len=256, sequence_len=64, max_steps=2)
    tokens = [3 + i % 300 for i in range(200)]
    mine = surogate.load(folder / "out", device="cpu")
    assert mine.config.rope.kind == "yarn"
    alike(scores(transformer(folder / "out"), tokens), surogate.logits(mine, [tokens]))
