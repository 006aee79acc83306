"""Evaluation: one loss whatever the batch, its parts, early stopping, the best weights."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import surogate
from surogate import checkpoint
from surogate.data.packed import open_packed
from surogate.evaluate import evaluate, history, lowest, stalled
from surogate.kernels.batch import IGNORED
from surogate.report import read_log
from tests.oracle import same_bits
from tests.surogate.runs import invoke, prepare, sentences, steps, train, write_config, write_texts

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot and the measurement of the machine's rate."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)
    monkeypatch.setattr("surogate.light.product_rate", lambda device: 1e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def evals(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["log"] == "eval"]


def two_sources(folder: Path) -> list[dict[str, Any]]:
    """Texts and a few chats."""
    return [
        {"path": str(write_texts(folder / "held.jsonl", 9, seed=8)), "type": "text"},
        {"path": str(folder / "chats.jsonl"), "type": "conversation", "samples": 5},
    ]


@pytest.mark.parametrize("rows", [1, 2, 8])  # one, a part and more than all of them
def test_loss_is_that_of_all_tokens_whatever_the_batch(folder, rows):
    """7 rows of mixed length against a plain sum in float64 over a torch cross entropy."""
    write_texts(folder / "held.jsonl", 7, seed=3)
    records = train(
        folder,
        validation_datasets=[{"path": str(folder / "held.jsonl"), "type": "text"}],
        sample_packing=False,
        sequence_len=128,
        per_device_train_batch_size=rows,
        max_steps=1,
        learning_rate=0.0,
    )
    [record] = evals(records)
    total, count = by_hand(folder / "model", sentences(7, seed=3))
    assert record["tokens"] == count
    assert record["loss"] == pytest.approx(total / count, rel=1e-6)
    assert record["sources"] == {}


def by_hand(model: Path, texts: list[str]) -> tuple[float, int]:
    loaded = surogate.load(model, device="cpu")
    from surogate.data.vocabulary import load_tokenizer

    vocabulary = load_tokenizer(model)
    total, count = 0.0, 0
    for text in texts:
        tokens = [*vocabulary.tokenizer.encode(text).ids, *sorted(vocabulary.eos_ids)]
        scores = torch.tensor(surogate.logits(loaded, [tokens]), dtype=torch.float64)
        target = torch.tensor(tokens[1:])
        total += float(torch.nn.functional.cross_entropy(scores[:-1], target, reduction="sum"))
        count += len(target)
    return total, count


def test_sources_make_the_whole(folder):
    own = two_sources(folder)
    options = {"max_steps": 1, "sequence_len": 64, "sample_packing": False}
    [both] = evals(train(folder, validation_datasets=own, **options))
    assert both["sources"].keys() == {"held.jsonl", "chats.jsonl"}
    parts = both["sources"].values()
    assert sum(part["tokens"] for part in parts) == both["tokens"]
    total = sum(part["loss"] * part["tokens"] for part in parts)
    assert total / both["tokens"] == pytest.approx(both["loss"], rel=1e-12)
    for index, part in enumerate(parts):
        alone = {"validation_datasets": own[index : index + 1], "output_dir": str(folder / "x")}
        [record] = evals(train(folder, **alone, **options))
        shutil.rmtree(folder / "x")
        assert record["tokens"] == part["tokens"]
        assert record["loss"] == pytest.approx(part["loss"], rel=1e-6)


def test_source_of_every_token(folder):
    """Packed rows of both sources and padding: each token is of the data set it came from."""
    train(folder, validation_datasets=two_sources(folder), max_steps=1, sequence_len=64)
    folders = (folder / "out" / "data").glob("*/train")
    found = [open_packed(path, reused=True, names=("a", "b")) for path in folders]
    [packed] = [rows for rows in found if rows.sources.max() == 1]
    user, both = 1, 0  # the token that begins a chat's first message
    for index in range(packed.rows):
        tokens, labels, lengths = packed.row(index)
        source = packed.sources_of(index)
        assert len(source) == 64
        assert (labels[source == -1] == IGNORED).all() and (tokens[source == -1] == 0).all()
        begins = np.cumsum(lengths) - lengths
        for begin in begins[source[begins] >= 0].tolist():
            assert (tokens[begin] == user) == (source[begin] == 1)
        both += {0, 1} <= set(source.tolist())
    assert both


def test_data_sets_of_one_name_are_told_apart(folder):
    (folder / "more").mkdir()
    write_texts(folder / "more" / "texts.jsonl", 4, seed=5)
    own = [{"path": str(folder / p / "texts.jsonl"), "type": "text"} for p in (".", "more")]
    [record] = evals(train(folder, validation_datasets=own, max_steps=1))
    assert record["sources"].keys() == {"texts.jsonl #0", "texts.jsonl #1"}


def test_gives_up_when_asked(folder):
    train(folder, max_steps=1)
    [path] = (folder / "out" / "data").glob("*/evaluation")
    rows, seen = open_packed(path, reused=True), []

    def logprobs(batch: Any) -> np.ndarray:
        seen.append(batch)
        return np.full(batch.labels.shape, -2.0, np.float32)

    found = evaluate(rows, logprobs, rows_per_batch=1, asked=lambda: False)
    assert found is not None and found.loss == 2 and len(seen) == rows.rows
    assert evaluate(rows, logprobs, rows_per_batch=1, asked=lambda: True) is None
    assert len(seen) == rows.rows


@pytest.mark.parametrize(
    "losses,patience,threshold,stops",
    [
        ([], 1, 0.0, False),
        ([3.0], 1, 0.0, False),
        ([3.0, 3.0], 1, 0.0, True),  # as low is not lower
        ([3.0, 2.9], 1, 0.0, False),
        ([3.0, 3.1, 3.2], 3, 0.0, False),
        ([3.0, 3.1, 3.2, 3.05], 3, 0.0, True),
        ([3.0, 3.1, 2.9, 3.2, 3.0], 3, 0.0, False),  # counted from the lowest
        ([3.0, 2.95, 2.91], 2, 0.1, True),  # falls, but by less than the threshold
        ([3.0, 2.95, 2.89], 2, 0.1, False),  # small steps add up
        ([NAN, NAN], 2, 0.0, True),
        ([NAN, 3.0, INF], 2, 0.0, False),
    ],
)
def test_when_to_stop(losses, patience, threshold, stops):
    assert stalled(losses, patience=patience, threshold=threshold) == stops


def test_lowest():
    assert lowest([]) is None and lowest([(1, NAN), (2, INF)]) is None
    assert lowest([(1, NAN), (2, 3.0), (3, 2.0), (4, 2.0)]) == (3, 2.0)


RISING = {
    # A rate that is far too high: the loss on other rows falls once and then rises.
    **{"learning_rate": 0.1, "max_steps": 40, "eval_steps": 2, "lr_scheduler_type": "constant"},
}


def test_stops_early_and_says_so(folder):
    records = train(folder, **RISING, early_stop=True, early_stop_patience=2)
    found = [(r["step"], r["loss"]) for r in evals(records)]
    last = found[-1][0]
    assert last < 40 and steps(records, "step") == list(range(1, last + 1))
    losses = [loss for _, loss in found]
    assert stalled(losses, patience=2, threshold=0.0)
    assert not stalled(losses[:-1], patience=2, threshold=0.0)  # not an evaluation later
    texts = [r["text"] for r in records if r["log"] == "message"]
    assert texts[0] == (
        f"stopping early after step {last}: the evaluation loss has not fallen for 2 evaluations "
        "(early_stop)"
    )
    assert texts[-1] == f"done: {last} steps"
    assert (folder / "out" / f"step_{last:08d}").is_dir()
    # The same command does not train on, but without early_stop it does.
    config = write_config(folder, **RISING)
    again = invoke(config, "early_stop=true", "early_stop_patience=2")
    assert again.exit_code == 0 and f"done: {last} steps" in again.stdout
    assert invoke(config).exit_code == 0
    assert steps(read_log(folder / "out" / "log.jsonl"), "step") == list(range(1, 41))


def test_early_stopping_counts_over_an_interruption(folder):
    whole = train(folder, **RISING, early_stop=True, early_stop_patience=2)
    last = evals(whole)[-1]["step"]
    config = write_config(folder, **RISING, early_stop=True, early_stop_patience=2)
    out = folder / "out"
    for path in out.glob("step_*"):
        shutil.rmtree(path)
    # As a run that was killed after the save of the step before the last evaluation.
    early = invoke(config, f"output_dir={folder / 'early'}", f"save_steps={last - 1}")
    assert early.exit_code == 0
    shutil.rmtree(folder / "early" / f"step_{last:08d}")
    again = invoke(config, f"output_dir={folder / 'early'}")
    assert f"resumed after step {last - 1}" in again.stdout
    records = read_log(folder / "early" / "log.jsonl")
    assert [(r["step"], r["loss"]) for r in evals(records)] == [
        (r["step"], r["loss"]) for r in evals(whole)
    ]


@pytest.mark.parametrize("lora", [False, True])
def test_best_weights_are_kept_and_exported(folder, lora):
    options = RISING | {"max_steps": 20, "save_total_limit": 1, "lora": lora, "lora_rank": 4}
    records = train(folder, **options, best_checkpoint="export")
    found = [(r["step"], r["loss"]) for r in evals(records)]
    best = lowest(found)
    assert best is not None and best[0] < 20
    out = folder / "out"
    assert [path.name for path in out.glob("step_*")] == ["step_00000020"]
    [kept] = (out / "best").iterdir()
    assert kept.name == f"step_{best[0]:08d}" and checkpoint.load(kept).step == best[0]
    assert f"the weights of step {best[0]}, the best, are exported" in [
        r.get("text") for r in records
    ]
    # The exported weights give the loss of that evaluation again.
    model = folder / "model" if lora else out
    base = {"model": str(model), "learning_rate": 0.0, "max_steps": 1, "lora": False}
    if lora:
        merged = options | {"merge_adapter": True, "output_dir": str(folder / "merged")}
        train(folder, **merged, best_checkpoint="export")
        base["model"] = str(folder / "merged")
    [record] = evals(train(folder, **base, output_dir=str(folder / "again")))
    assert record["loss"] == pytest.approx(best[1], rel=1e-5)


def test_best_is_kept_but_the_last_exported(folder):
    train(folder, **RISING | {"max_steps": 20}, best_checkpoint="keep")
    plain = train(folder, **RISING | {"max_steps": 20}, output_dir=str(folder / "plain"))
    for name, array in load_file(folder / "plain" / "model.safetensors").items():
        same_bits(load_file(folder / "out" / "model.safetensors")[name], array)
    [kept] = (folder / "out" / "best").iterdir()
    assert kept.name == f"step_{min(evals(plain), key=lambda r: r['loss'])['step']:08d}"
    assert not (folder / "plain" / "best").exists()


def test_a_new_run_drops_an_earlier_best(folder):
    """A longer run before had a lower loss at a later step."""
    options = {"eval_steps": 1, "best_checkpoint": "keep", "resume_from_checkpoint": False}
    for count in (9, 3):
        records = train(folder, **options, max_steps=count)
        assert steps(records, "step") == list(range(1, count + 1))
        [kept] = (folder / "out" / "best").iterdir()
        assert kept.name == f"step_{count:08d}"


def test_needs_rows(folder):
    def message(*overrides: str) -> str:
        result = invoke(write_config(folder, max_steps=1), *overrides)
        assert result.exit_code == 1
        return result.stderr

    assert "early_stop = true: must be false without evaluation rows" in message(
        "early_stop=true", "validation_split_ratio=0"
    )
    assert "best_checkpoint = 'keep': must be 'none' without evaluation rows" in message(
        "best_checkpoint=keep", "validation_split_ratio=0"
    )


def test_log_that_keeps_nothing(tmp_path):
    import os

    os.mkfifo(tmp_path / "log")
    assert history(tmp_path / "log", 5, needed=False) == []
    with pytest.raises(surogate.errors.UserError, match="log: must be a file with early_stop or"):
        history(tmp_path / "log", 0, needed=True)


def test_history_ends_at_the_step_that_a_run_goes_on_from(tmp_path):
    lines = [{"log": "eval", "step": 2, "loss": 3.0}, {"log": "eval", "step": 4, "loss": None}]
    lines += [{"log": "step", "step": 4}, {"log": "eval", "step": 6, "loss": 2.0}]
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert str(history(tmp_path / "log", 5, needed=True)) == "[(2, 3.0), (4, nan)]"
    assert history(tmp_path / "log", 0, needed=True) == []


@pytest.mark.parametrize("lora", [False, True])
def test_samples_are_what_generate_writes(folder, lora):
    prompts = ["the cat", "a dog sees"]
    options = {"max_steps": 4, "eval_steps": 2, "learning_rate": 0.02, "lora": lora}
    records = train(folder, **options, eval_prompts=prompts, eval_max_new_tokens=6)
    samples = [r for r in records if r["log"] == "sample"]
    assert [(r["step"], r["prompt"]) for r in samples] == [(s, p) for s in (2, 4) for p in prompts]
    place = {"adapter": folder / "out"} if lora else {}
    model = surogate.load(folder / "model" if lora else folder / "out", device="cpu", **place)
    assert [r["text"] for r in samples[2:]] == surogate.generate(
        model, prompts, max_new_tokens=6, temperature=0.0
    )


def test_samples_need_no_evaluation_rows_and_change_nothing(folder):
    options = {"max_steps": 4, "eval_steps": 2, "validation_split_ratio": 0.0}
    plain = train(folder, **options, output_dir=str(folder / "plain"))
    records = train(folder, **options, eval_prompts=["the"], eval_max_new_tokens=3)
    assert [r["step"] for r in records if r["log"] == "sample"] == [2, 4]
    assert not evals(records)
    assert steps(records) == steps(plain)
