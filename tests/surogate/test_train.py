"""Whole runs through the command line on the CPU: their results, and what they tell."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import transformers
from safetensors.numpy import load_file

import surogate
from surogate.models.flops import training_flops
from surogate.report import read_log
from surogate.train import versions
from tests.oracle import same_bits
from tests.surogate.results import (
    CHATS,
    alike,
    assert_same_bits,
    chats,
    scores,
    transformer,
    weights,
)
from tests.surogate.runs import (
    VOCAB,
    invoke,
    make_model,
    prepare,
    sentences,
    steps,
    train,
    write_config,
)


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot, which has tests of its own and takes longer than a run."""
    if request.function is not test_log_and_files_of_a_run:
        monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def falls(records: list[dict[str, Any]], by: float) -> None:
    losses = steps(records)
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - by, losses


@pytest.mark.parametrize(
    "family,stored", [("qwen3", "float32"), ("llama", "bfloat16"), ("qwen2", "bfloat16")]
)
def test_full_training_makes_a_model_for_transformers(tmp_path, family, stored):
    prepare(tmp_path, family=family, stored=stored)
    records = train(tmp_path, max_steps=20, learning_rate=0.01)
    falls(records, by=0.5)
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == stored
    saved = load_file(out / "model.safetensors")
    assert {str(array.dtype) for array in saved.values()} == {stored}
    # The stored weights are the trained ones, rounded once.
    trained = weights(out)
    want = trained["embed"].astype(saved["model.embed_tokens.weight"].dtype)
    same_bits(saved["model.embed_tokens.weight"], want)
    tokens = list(range(7, 40))
    mine = surogate.load(out, device="cpu")
    got = surogate.logits(mine, [tokens])
    alike(scores(transformer(out), tokens), got)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("the cat sees").input_ids) == "the cat sees"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_from_scratch(folder):
    config = folder / "model"
    (config / "model.safetensors").unlink()  # only config.json and the tokenizer are needed
    records = train(folder, from_scratch=True, max_steps=20, learning_rate=0.01)
    assert steps(records)[0] == pytest.approx(math.log(VOCAB), abs=0.6)
    falls(records, by=0.5)
    assert transformer(folder / "out").config.vocab_size == VOCAB


def test_from_scratch_with_zero_projections(folder):
    train(folder, from_scratch=True, init_projections_to_zero=True, max_steps=1, learning_rate=0.0)
    for name, array in load_file(folder / "out" / "model.safetensors").items():
        assert array.any() == ("o_proj" not in name and "down_proj" not in name), name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT's own
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_adapter_loads_in_peft(tmp_path, stored):
    folder = prepare(tmp_path, stored=stored)
    records = train(folder, **CHATS, datasets=chats(folder), max_steps=20, learning_rate=0.02)
    falls(records, by=0.3)
    out = folder / "out"
    assert not (out / "model.safetensors").exists()
    tokens = list(range(7, 40))
    reference = peft.PeftModel.from_pretrained(transformer(folder / "model"), out)
    mine = surogate.load(folder / "model", adapter=out, device="cpu")
    got = surogate.logits(mine, [tokens])
    alike(scores(reference, tokens), got)
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str((folder / "model").resolve())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    # The adapter's file is the trained one, bit for bit.
    trained = weights(out)
    saved = load_file(out / "adapter_model.safetensors")
    same_bits(
        trained["layers.1.o.a"],
        saved["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"],
    )


def test_merged_model_equals_the_adapter_on_its_base(folder):
    options = dict(CHATS, datasets=chats(folder), max_steps=12, learning_rate=0.02)
    train(folder, **options, merge_adapter=True)
    out, tokens = folder / "out", list(range(7, 40))
    apart = surogate.load(folder / "model", adapter=out / "adapter", device="cpu")
    want = surogate.logits(apart, [tokens])
    before = surogate.logits(surogate.load(folder / "model", device="cpu"), [tokens])
    assert np.abs(want - before).max() > 0.1
    alike(surogate.logits(surogate.load(out, device="cpu"), [tokens]), want)
    alike(scores(transformer(out), tokens), want)


def base_model(folder: Path) -> Path:
    """Takes the token that ends an answer, <|end|> of id 0, off the model's eos tokens."""
    model = folder / "model"
    for name, changes in (
        ("config.json", {"eos_token_id": 3}),
        ("tokenizer_config.json", {"eos_token": "<|system|>"}),
    ):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(settings | changes))
    (model / "generation_config.json").write_text('{"eos_token_id":[3, 2],"temperature":0.6}')
    return model


@pytest.mark.parametrize("lora", [False, True])
def test_a_base_model_that_learned_to_answer_names_the_end_of_an_answer(folder, lora):
    model, out = base_model(folder), folder / "out"
    train(
        folder,
        **CHATS | {"lora": lora, "merge_adapter": lora, "max_steps": 1},
        datasets=chats(folder),
    )
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [3, 0]
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [3, 2, 0], "temperature": 0.6}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert transformer(out).generation_config.eos_token_id == [3, 2, 0]


def test_other_exports_keep_the_eos_tokens_that_they_have(folder):
    """Raw texts end with the model's own token; a chat model names the end of an answer already."""
    model = base_model(folder)
    train(folder, output_dir=str(folder / "texts"), max_steps=1)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"eos_token_id": [3, 0]}))
    generation = (model / "generation_config.json").read_bytes()
    assert (folder / "texts" / "generation_config.json").read_bytes() == generation
    assert json.loads((folder / "texts" / "config.json").read_text())["eos_token_id"] == 3
    (model / "generation_config.json").write_text('{"eos_token_id" :0}')
    train(folder, max_steps=1, sequence_len=64, datasets=chats(folder))
    assert (folder / "out" / "generation_config.json").read_text() == '{"eos_token_id" :0}'
    assert json.loads((folder / "out" / "config.json").read_text())["eos_token_id"] == [3, 0]


def test_merged_model_in_bfloat16_is_rounded_once(tmp_path):
    folder = prepare(tmp_path, stored="bfloat16")
    options = dict(CHATS, datasets=chats(folder), max_steps=4, learning_rate=0.02)
    train(folder, **options, merge_adapter=True, lora_target_modules=["o_proj"])
    out = folder / "out"
    stem = "model.layers.0.self_attn.o_proj"
    base = load_file(folder / "model" / "model.safetensors")[f"{stem}.weight"].astype(np.float64)
    adapter = load_file(out / "adapter" / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{stem}.lora_{x}.weight"] for x in "AB")
    merged = load_file(out / "model.safetensors")
    exact = base + 2.0 * (b.astype(np.float64) @ a)
    error = np.abs(merged[f"{stem}.weight"].astype(np.float64) - exact)
    assert (error <= np.abs(exact) * 2.0**-8 * 1.0001).all()  # half a unit in the last of 8 bits
    other = "model.layers.0.mlp.up_proj.weight"
    same_bits(merged[other], load_file(folder / "model" / "model.safetensors")[other])


def test_log_and_files_of_a_run(folder):
    result = invoke(write_config(folder, max_steps=3))
    assert result.exit_code == 0
    records = read_log(folder / "out" / "log.jsonl")
    assert [r["log"] for r in records] == [
        *("run", "step", "step", "step", "eval", "message", "message", "message", "end")
    ]
    run = records[0]
    assert run["config"]["learning_rate"] == 0.003 and run["versions"] == versions()
    assert steps(records, "step") == [1, 2, 3]
    for record in records[1:4]:
        assert record["tokens"] == 64
        assert 0 < record["sol"] < 100
        assert record["tokens_per_second"] == pytest.approx(64e3 / record["duration_ms"])
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {
        *(".lock", "config.json", "data", "log.jsonl", "model.safetensors", "step_00000003"),
        *("tokenizer.json", "tokenizer_config.json", "training_plot.png"),
        *("generation_config.json", "manifest.json", "README.md"),
    }


def test_what_a_person_sees_first(folder):
    result = invoke(write_config(folder, max_steps=2, model_type="x", device="auto"))
    lines = result.stdout.splitlines()
    assert lines[0].startswith("surogate 0.")
    assert lines[1] == "ignored: model_type = 'x': the model's config.json decides"
    assert lines.pop(2).startswith("recompute = none, the fastest that fits ")
    assert lines[2].startswith("train: 54 documents, 856 tokens")
    assert lines[3].startswith("eval: 6 documents")
    assert "31,968 parameters, 31,968 trained (all weights), computed in float32" in lines[4]
    assert lines[5] == f"2 steps of 2 x 1 rows of 32 tokens (0.15 epochs), to {folder / 'out'}"
    assert lines[6].startswith("speed of light: ") and lines[6].endswith("measured now")
    assert lines[7].startswith("step    1/2  loss 5.")
    assert lines[-3] == f"model: {folder / 'out'}" and lines[-1] == "done: 2 steps"
    assert lines[-2].startswith("verified: loaded again, logits over 32 tokens differ by 0 of ")


def test_what_the_targets_of_lora_matched_is_said(folder):
    settings = {"lora": True, "lora_rank": 4, "lora_target_modules": ["v_proj", "q_proj"]}
    result = invoke(write_config(folder, max_steps=1, **settings))
    trained = 4 * 2 * ((32 + 64) + (32 + 32))  # rank, layers, in + out of q and of v
    share = 100 * trained / (31968 + trained)
    assert f"31,968 parameters, {trained:,} trained (LoRA rank 4)" in result.stdout
    assert f"adapters on 2 q_proj, 2 v_proj: {share:.2f}% of all parameters" in result.stdout


def test_how_fast_weights_are_read_is_said(folder, monkeypatch):
    """Where it takes long: here, all of it does."""
    monkeypatch.setattr("surogate.setup.PROGRESS_SECONDS", 0.0)
    result = invoke(write_config(folder, max_steps=1))
    told = re.findall(r"^reading: (\S+) MB of weights, (\S+) MB/s$", result.stdout, re.MULTILINE)
    assert len(told) == 2 * 8 + 2  # the leaves of two layers, the embedding and the last norm
    size = (folder / "model" / "model.safetensors").stat().st_size
    assert float(told[-1][0]) == pytest.approx(size / 1e6, abs=0.06)
    assert all(float(rate.replace(",", "")) > 0 for _, rate in told)
    monkeypatch.setattr("surogate.setup.PROGRESS_SECONDS", 60.0)
    assert "reading: " not in invoke(write_config(folder, max_steps=1)).stdout


def test_operations_of_a_step_by_hand(folder):
    """Of 2 layers of width 32: each product is 2 operations a weight and token, three times."""
    config = surogate.load(folder / "model", device="cpu").config
    layer = 32 * (64 + 2 * 32) + 64 * 32 + 3 * 32 * 48
    tokens, cells = 100, 1000
    flops = training_flops(config, tokens=tokens, cells=cells, lora_rank=None, recompute="none")
    assert flops.products == 3 * 2 * tokens * (2 * layer + 320 * 32)
    assert flops.attention == 2 * 7 * 2 * 4 * 16 * cells  # layers, products, 2, heads, head_dim


def test_two_runs_are_bit_equal(folder):
    for name in ("a", "b"):
        train(folder, output_dir=str(folder / name))
    assert_same_bits(folder / "a", folder / "b")
    train(folder, output_dir=str(folder / "c"), train_seed=5)
    other, first = weights(folder / "c"), weights(folder / "a")
    assert not np.array_equal(other["embed"], first["embed"])


def test_a_new_run_replaces_an_old_one(folder):
    """Without resuming, the checkpoints of a longer run before must not be taken up later."""
    train(folder, max_steps=8, save_steps=4)
    records = train(folder, max_steps=3, resume_from_checkpoint=False)
    assert steps(records, "step") == [1, 2, 3]
    assert [p.name for p in (folder / "out").glob("step_*")] == ["step_00000003"]


def test_stops_when_nothing_can_be_used(folder, monkeypatch):
    """Weights that are not finite: twenty updates are left out, then one line says so."""
    from surogate.models.hf import read_model, write_model

    model = surogate.load(folder / "model", device="cpu")
    model.params.layers[0].w_o[0, 0] = np.nan
    write_model(model.params, model.config, folder / "model", dtype=np.dtype(np.float32))
    assert np.isnan(read_model(folder / "model", model.config, np.dtype("f4")).layers[0].w_o[0, 0])
    with np.errstate(all="ignore"):
        result = invoke(write_config(folder, max_steps=50))
    assert result.exit_code == 1
    assert result.stderr == (
        "error: step 20: 20 updates in a row could not be used; lower learning_rate, or look at "
        "the data; earlier checkpoints are whole\n"
    )
    records = read_log(folder / "out" / "log.jsonl")
    notes = [r["text"] for r in records if r["log"] == "message"]
    assert notes[0].startswith("step 1: a loss that is not finite: the update was left out (")
    assert len(notes) == 20 and steps(records) == [None] * 20


def test_tokenize_prepares_the_rows_of_a_run(folder):
    from click.testing import CliRunner

    from surogate.cli import main

    config = write_config(folder)
    result = CliRunner().invoke(main, ["tokenize", str(config)])
    assert result.exit_code == 0 and result.stdout.startswith("train: 54 documents")
    assert "(kept from before)" in invoke(config).stdout


def test_sentences_are_the_same_each_time():
    """The numbers of rows above rest on it."""
    assert sentences(1)[0] == sentences(2)[0]


def test_model_maker_is_what_transformers_loads(tmp_path):
    folder = make_model(tmp_path / "m", family="qwen2", stored="bfloat16")
    assert transformer(folder).config.vocab_size == VOCAB
