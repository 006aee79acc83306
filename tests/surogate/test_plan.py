"""surogate plan: decisions shared with the run, what fits, where models are found, the output."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from surogate import plan as plans
from surogate.choices import options_of
from surogate.cli import main
from surogate.config import Config, load_config
from surogate.device import Device, choose_device
from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.arrays import BF16
from surogate.kernels.widened import Widened
from surogate.models.config import from_hf
from surogate.models.hf import write_model
from surogate.models.init import init_model
from surogate.models.lora import init_adapter
from surogate.models.memory import CONTEXT_BYTES, memory_of, parameter_counts
from surogate.models.registry import hf_config
from surogate.models.widen import making_room
from surogate.plan import SPARE, Place, cheapest_policy, find_model, in_words, predict, remedies
from surogate.report import read_log
from surogate.setup import Sources, lora_of, putter
from surogate.train import train_step
from tests.surogate.runs import start, write_texts, write_tokenizer

GIB = 1 << 30
TINY = hf_config("Qwen3-0.6B") | dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)


FOUR_LAYERS = hf_config("Qwen3-8B") | dict(num_hidden_layers=4)  # an 8B model's widths


@pytest.fixture
def make(tmp_path):
    """Reads a configuration of these settings; without a model, of a tiny one without weights.

    The model "four layers" is Qwen3-8B with as many: a plan of all 36 takes nine times as long.
    """
    for name, settings in {"tiny": TINY, "four layers": FOUR_LAYERS}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings))

    def build(**settings: Any) -> Config:
        path, model = tmp_path / "run.yaml", settings.get("model", "tiny")
        if (tmp_path / model).is_dir():
            settings["model"] = str(tmp_path / model)
        path.write_text(json.dumps(dict(sequence_len=64) | settings))
        return load_config(path, need_data=False)

    return build


def show(config: Config, capsys) -> str:
    plans.plan_command(config)
    return capsys.readouterr().out


def test_a_recipe_that_ends_has_room_for_both_kinds_of_steps(make):
    def total(**settings: Any) -> int:
        config = make(model="four layers", recompute="none", **settings)
        return predict(config, find_model(config)[0], "cuda").memory.total

    for settings in (
        {"recipe": "nvfp4"},
        {"lora": True, "qlora_bnb": True, "recipe": "fp8_hybrid"},
    ):
        before, after = total(**settings), total(**settings | {"recipe": "bf16"})
        assert before != after
        assert total(**settings, recipe_until=0.5) == max(before, after)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora_dtype": "bf16", "gradient_dtype": "bf16"},
        {"lora": False},
        {"lora": False, "master_dtype": "fp32", "gradient_dtype": "fp32"},
        {"lora": False, "master_dtype": "fp32", "optimizer": "adamw_8bit"},
        {"lora": False, "moment_dtype": "bf16", "optimizer": "normuon"},
    ],
)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_stays_is_what_the_run_makes(make, monkeypatch, settings, kind):
    def options(*arguments: Any) -> Any:
        return options_of(*arguments)._replace(widen=kind == "cuda")

    monkeypatch.setattr("surogate.train.options_of", options)
    config = make(use_cuda_graphs=False, recompute="block", **settings)
    model_config, _ = find_model(config)
    plan = predict(config, model_config, kind)
    device = Device("cpu", "here", np, plan.work.layout.compute)
    lora = lora_of(config)
    adapter = None if lora is None else init_adapter(model_config, lora, 0, device.compute)
    model = init_model(model_config, 0, device.compute)
    step = train_step(config, device, Sources(Path("."), model_config, model, lora, adapter))

    def held(*trees: Any) -> int:
        unit = plan.work.layout.unit
        return sum(-(-leaf.nbytes // unit) * unit for leaf in tree.leaves(trees))

    leaves = tree.leaves(step._read)
    assert plan.memory.weights == held([x.rows if isinstance(x, Widened) else x for x in leaves])
    assert plan.memory.adapter == held(step.adapter)
    assert plan.memory.gradients == held(step.grads)
    assert plan.memory.optimizer == held(step.state.m, step.state.v, step.state.master)
    assert plan.counts.trained == sum(leaf.size for leaf in tree.leaves(step.trainable))


def test_evaluation_is_counted_where_there_is_some(make):
    model, _ = find_model(make())
    assert predict(make(), model, "cuda").memory.evaluation > 0
    without = make(validation_split_ratio=0.0)
    assert predict(without, model, "cuda").memory.evaluation == 0


def test_weights_that_bf16_evaluations_need_are_counted(make):
    """Those of which the recipe keeps casts alone."""

    def taken(**settings: Any) -> tuple[int, int]:
        config = make(model="four layers", recompute="none", **settings)
        memory = predict(config, find_model(config)[0], "cuda").memory
        return memory.weights, memory.evaluation

    plain = {"eval_recipe": "bf16"}
    for recipe in ("fp8_hybrid", "nvfp4"):
        full = {"recipe": recipe, "lora": False}
        assert taken(**full, **plain)[0] == taken(**full)[0]
        lora = {"recipe": recipe, "lora": True, "lora_rank": 1}
        counts = parameter_counts(find_model(make(model="four layers"))[0], None)
        more = taken(**lora, **plain)[0] - taken(**lora)[0]
        matrices = 2 * (counts.attention + counts.mlp)
        assert matrices < more < 1.05 * matrices  # widened by 64 columns and more
        assert taken(**lora, **plain, validation_split_ratio=0.0)[0] == taken(**lora)[0]
        stored = lora | {"qlora_bnb": True}
        assert taken(**stored, **plain)[0] == taken(**stored)[0]
    decoded = {"recipe": "fp8_hybrid", "lora": True, "qlora_bnb": True}  # for evaluations alone
    assert taken(**decoded, **plain)[1] > taken(**decoded)[1]


def test_cheapest_policy_is_the_fastest_that_fits(make):
    config = make(model="four layers", sequence_len=2048, per_device_train_batch_size=16)
    model, _ = find_model(config)
    totals = {}
    for policy in plans.POLICIES:
        changed = msgspec.structs.replace(config, recompute=policy)
        totals[policy] = predict(changed, model, "cuda").memory.total
    assert totals["none"] > totals["selective"] > totals["block"]
    for policy, total in totals.items():
        enough = int(total / (1 - SPARE)) + 1
        assert cheapest_policy(config, model, "cuda", enough) == policy
        assert predict(config, model, "cuda", enough).free == enough
    assert cheapest_policy(config, model, "cuda", 1) == "block"


def test_a_plan_fits_with_some_to_spare(make):
    config = make()
    model, _ = find_model(config)
    total = predict(config, model, "cuda").memory.total
    assert not predict(config, model, "cuda", total).fits
    assert predict(config, model, "cuda", int(total / (1 - SPARE)) + 1).fits
    assert predict(config, model, "cuda").fits


def test_cudas_own_memory_is_counted_once(make, monkeypatch):
    """What this process has of it when it asks for the free memory is free for the run."""
    config = make()
    model, _ = find_model(config)
    plan = predict(config, model, "cuda")
    assert (
        plan.memory.context == CONTEXT_BYTES and predict(config, model, "cpu").memory.context == 0
    )
    for own, others in ((CONTEXT_BYTES - 5, 0), (CONTEXT_BYTES, GIB)):
        taken = own + others
        runtime = SimpleNamespace(memGetInfo=lambda taken=taken: (8 * GIB - taken, 8 * GIB))
        library = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
        card = Device("cuda", "a card", library, BF16)
        monkeypatch.setattr(plans, "choose_device", lambda wanted, card=card: card)
        assert plans.place_of(config).free == 8 * GIB - others


@pytest.mark.parametrize(("there", "takes", "may"), [(0, 1, True), (1, 0, True), (1, 1, False)])
def test_cudnn_is_counted_where_it_may_run(monkeypatch, there, takes, may):
    card = Device("cuda" if there else "cpu", "a card", np, BF16)
    monkeypatch.setattr(plans, "choose_device", lambda wanted: card)
    monkeypatch.setattr(plans.attention_hopper, "takes", lambda head_dim: bool(takes))
    assert plans.may_use_cudnn.__wrapped__(128) is may


def of_8b(make, *, model: str = "Qwen3-8B", **settings: Any) -> Config:
    return make(
        model=model,
        lora=False,
        sequence_len=2048,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        **settings,
    )


def test_remedies_that_are_enough_alone(make):
    config = of_8b(make, recompute="none", master_dtype="fp32")
    model, _ = find_model(config)
    plan = predict(config, model, "cuda", 160 * GIB)
    found = remedies(config, model, plan)
    texts = [remedy.text for remedy in found]
    assert texts == [
        "recompute = 'selective'",
        "recompute = 'block'",
        "per_device_train_batch_size = 2, gradient_accumulation_steps = 8",
        "master_dtype = 'bf16'",
        "optimizer = 'adamw_8bit'",
        "lora = true",
    ]
    assert [remedy.plan.fits for remedy in found] == [False, True, True, False, False, True]
    assert all(remedy.plan.memory.total < plan.memory.total for remedy in found)


def test_remedies_together(make):
    config = of_8b(make, recompute="none", master_dtype="fp32", from_scratch=True)
    model, _ = find_model(config)
    *alone, together = remedies(config, model, predict(config, model, "cuda", 120 * GIB))
    assert together.text == (
        "recompute = 'block', per_device_train_batch_size = 1, gradient_accumulation_steps = 16, "
        "master_dtype = 'bf16'"
    )
    assert together.plan.fits
    assert not any(remedy.plan.fits for remedy in alone)


def test_fixed_chunks_of_the_head_are_a_remedy(make):
    config = of_8b(make, model="four layers", lmhead_chunks=1)
    model, _ = find_model(config)
    found = remedies(config, model, predict(config, model, "cuda", GIB))
    assert "auto_lmhead_chunks = true" in [remedy.text for remedy in found]


def test_model_from_a_folder_without_weights(make, capsys):
    text = show(make(device="cpu"), capsys)
    assert "qwen3" in text and "fits" in text and "float32" in text


def test_model_from_the_registry_needs_no_network(make, capsys, monkeypatch):
    monkeypatch.delattr(plans, "_from_hub")
    text = show(make(model="Qwen/Qwen3-8B", device="cuda"), capsys)
    assert "no such folder here: sizes from the built-in registry" in text
    assert "8,190,735,360" in text


@pytest.mark.parametrize(
    "name,message",
    [
        ("Qwen3-9B", "did you mean"),
        ("./nowhere", "there is no such folder"),
        ("Qwen/Qwen3-9000B", "the Hub says"),
    ],
)
def test_a_model_that_is_nowhere(make, name, message):
    with pytest.raises(UserError, match=message) as error:
        find_model(make(model=name))
    assert "\n" not in str(error.value)


def test_rows_longer_than_the_model(make):
    with pytest.raises(UserError, match="sequence_len = 50000"):
        find_model(make(model="Qwen3-8B", sequence_len=50000))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("settings", [{}, {"lora": False, "recompute": "none"}])
@pytest.mark.parametrize("free", [None, GIB, 2000 * GIB])
def test_everything_fits_80_columns(make, monkeypatch, capsys, kind, settings, free):
    monkeypatch.setattr(plans, "place_of", lambda config: Place(kind, "NVIDIA H200", free))
    text = show(make(model="meta-llama/Llama-3.2-1B", **settings), capsys)
    assert max(len(line) for line in text.splitlines()) <= 80
    for title in ("parameters", "memory", "activations kept for backward", "total"):
        assert title in text


def test_what_fits_says_what_is_faster(make, monkeypatch, capsys):
    monkeypatch.setattr(plans, "place_of", lambda config: Place("cuda", "NVIDIA H200", 140 * GIB))
    text = show(make(model="Qwen3-0.6B", recompute="block"), capsys)
    assert "recompute = none fits too, and is faster" in text
    assert "faster" not in show(make(model="Qwen3-0.6B", recompute="none"), capsys)


def test_what_does_not_fit_says_so(make, monkeypatch, capsys):
    monkeypatch.setattr(plans, "place_of", lambda config: Place("cuda", "a small card", GIB))
    config = make(model="four layers")
    text = show(config, capsys)
    assert "does not fit" in text and "none of it is enough" in text
    model, _ = find_model(config)
    plan = predict(config, model, "cuda", GIB)
    found = [f"{in_words(r.plan.memory.total)} {r.text}" for r in remedies(config, model, plan)]
    told = " ".join(text.partition("What takes less:")[2].split())  # long ones take two lines
    assert len(found) >= 3 and told.startswith(" ".join(found))


def test_command_line(tmp_path, make):
    make()
    result = CliRunner().invoke(
        main, ["plan", str(tmp_path / "run.yaml"), "--set", "device=cpu", "--set", "lora=false"]
    )
    assert result.exit_code == 0, result.output
    assert "all weights" in result.output
    result = CliRunner().invoke(main, ["plan", str(tmp_path / "run.yaml"), "--set", "model=x"])
    assert result.exit_code == 1
    assert result.output.startswith("error: model = x: ")


def test_sizes_in_words():
    assert in_words(3 * GIB // 2) == "1.50 GiB"
    assert in_words(5 << 20) == "5.00 MiB"
    assert in_words(2000 * GIB) == "2,000.00 GiB"
    assert in_words(512) == "0.50 KiB"


WIDE = hf_config("Qwen3-0.6B") | dict(vocab_size=32000, num_hidden_layers=4)
ON_A_CARD = pytest.mark.parametrize(
    "settings",
    [{"lora": False, "recompute": "block"}, {"recompute": "block"}, {"recompute": "none"}],
)


@pytest.mark.gpu
@ON_A_CARD
def test_groups_on_a_card_are_within_5_percent(make, tmp_path, settings):
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    config = make(model=str(tmp_path), sequence_len=2048, per_device_train_batch_size=4, **settings)
    device = choose_device("cuda")
    model_config, _ = find_model(config)
    lora = lora_of(config)
    pool = device.library.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    with device.library.cuda.Stream(non_blocking=True):
        put = putter(device)
        if lora is not None:
            put = making_room(put, model_config, lora)
        model = init_model(model_config, 0, BF16, put=put)
        adapter = None if lora is None else device.put(init_adapter(model_config, lora, 0, BF16))
        sources = Sources(Path("."), model_config, model, lora, adapter)
        step = train_step(config, device, sources)
        step._record_micro(None)
    plan = predict(config, model_config, "cuda")
    own = memory_of(plan.work, graphs=True, evaluates=False)
    static = own.weights + own.adapter + own.gradients + own.optimizer
    assert pool.used_bytes() - before == pytest.approx(static, rel=0.05)
    assert step._pool.total_bytes() == pytest.approx(own.peak + own.gaps, rel=0.05)


@pytest.mark.gpu
@ON_A_CARD
def test_a_process_takes_what_is_planned_within_5_percent(make, tmp_path, settings):
    """All that a run adds to what is taken of a card, with nothing else at work there. It is the
    second one: the first chooses implementations, which takes memory for those that lose.
    """
    sizes, folder = from_hf(WIDE), tmp_path / "wide"
    write_model(init_model(sizes, 0, BF16), sizes, folder, dtype=BF16)
    write_tokenizer(folder)
    config = make(
        model=str(folder),
        output_dir=str(tmp_path / "out"),
        datasets=[{"path": str(write_texts(tmp_path / "texts.jsonl", 2000)), "type": "text"}],
        sequence_len=2048,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=3,
        validation_split_ratio=0.0,
        device="cuda",
        **settings,
    )
    before = choose_device("cuda").used_memory()
    for _ in range(2):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        run = start(tmp_path / "run.yaml")
        _, errors = run.communicate()
        assert run.returncode == 0, errors
    *_, last = (r for r in read_log(tmp_path / "out" / "log.jsonl") if r["log"] == "step")
    planned = predict(config, find_model(config)[0], "cuda").memory
    assert last["memory"] - before == pytest.approx(planned.total, rel=0.05)
