"""Whole runs with every recipe and every storage of the base weights, on the CPU."""

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from surogate import checkpoint as checkpoints
from surogate.config import load_config
from surogate.device import choose_device
from surogate.optim.state import named_leaves, state_to_named
from surogate.report import read_log
from surogate.resume import take_
from surogate.setup import load_sources, locate
from surogate.train import train_step
from tests.surogate.runs import invoke, make_model, prepare, steps, train, write_config

FP8: dict[str, Any] = {"recipe": "fp8_hybrid"}
RECIPES: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "fp8 by tensor": FP8 | {"fp8_scaling": "tensor"},
    "fp8 by row": FP8 | {"fp8_scaling": "row"},
    "fp8 in part": FP8
    | {
        "skip_quant_first_layers": 1,
        "skip_quant_modules": ["o_proj"],
        "quantized_products": ["forward", "dgrad"],
        "fp8_fast_sums": [],
        "fp8_amax_algorithm": "most_recent",
        "fp8_margin": 1,
    },
}
NVFP4: dict[str, dict[str, Any]] = {"nvfp4": {"recipe": "nvfp4"}}  # gradients round at random
STORED: dict[str, dict[str, Any]] = {
    "fp8": {"qlora_fp8": True, "qlora_block_size": 64},
    "fp4": {"qlora_fp4": True, "qlora_four_over_six": False},
    "fp4 four over six": {"qlora_fp4": True},
    "nf4": {"qlora_bnb": True},
    "nf4 plain": {"qlora_bnb": True, "qlora_bnb_double_quant": False, "qlora_bnb_block_size": 128},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("recipes"))


@functools.cache
def plain(folder: Path, lora: bool) -> list[float]:
    """Losses of bf16's run."""
    name = str(folder / f"plain-{lora}")
    return steps(train(folder, output_dir=name, lora=lora, learning_rate=0.01))


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out")


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_trains_like_bf16_but_for_rounding(folder: Path, out: str, name: str, lora: bool) -> None:
    given = {"lora": lora, "learning_rate": 0.01}
    want, found = (
        plain(folder, lora),
        steps(train(folder, output_dir=out, **given, **RECIPES[name])),
    )
    assert found != want
    assert np.abs(np.subtract(found, want)).max() < 0.02 * max(want)
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    "settings",
    [
        FP8,
        FP8 | STORED["nf4"] | {"lora": True},
        STORED["nf4"] | {"lora": True},
        STORED["nf4"] | NVFP4["nvfp4"] | {"lora": True},  # whose casts stay for the backward
    ],
    ids=str,
)
def test_recomputation_changes_no_bit(folder: Path, out: str, settings: dict[str, Any]) -> None:
    found = [
        steps(train(folder, output_dir=f"{out}-{policy}", recompute=policy, **settings))
        for policy in ("none", "selective", "block")
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", STORED)
def test_trains_on_stored_weights(folder: Path, out: str, name: str) -> None:
    given = {"lora": True, "learning_rate": 0.01}
    want, found = plain(folder, True), steps(train(folder, output_dir=out, **given, **STORED[name]))
    assert found != want
    assert np.abs(np.subtract(found, want)).max() < 0.03 * max(want)
    assert found[-1] < found[0]
    assert (Path(out) / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    "stored,recipe",
    [("fp8", "fp8 by row"), ("nf4", "fp8 in part"), ("fp4", "nvfp4")],
)
def test_a_recipe_multiplies_stored_weights(
    folder: Path, out: str, stored: str, recipe: str
) -> None:
    settings = STORED[stored] | (RECIPES | NVFP4)[recipe] | {"lora": True, "learning_rate": 0.01}
    want, found = plain(folder, True), steps(train(folder, output_dir=out, **settings))
    alone = settings | {"recipe": "bf16"}
    assert found not in (want, steps(train(folder, output_dir=f"{out}-alone", **alone)))
    assert np.abs(np.subtract(found, want)).max() < 0.04 * max(want)
    assert found[-1] < found[0]


def test_stored_weights_go_on_from_a_checkpoint_with_their_recipe(folder: Path, out: str) -> None:
    settings = FP8 | STORED["nf4"] | {"lora": True, "save_steps": 3, "lora_init": "error"}
    train(folder, output_dir=f"{out}-whole", **settings)
    train(folder, output_dir=out, **settings)
    shutil.rmtree(Path(out) / "step_00000006")
    train(folder, output_dir=out, **settings)
    file = "adapter_model.safetensors"
    assert (Path(out) / file).read_bytes() == (Path(f"{out}-whole") / file).read_bytes()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8 in part", "nvfp4"])
def test_goes_on_from_a_checkpoint_bit_for_bit(
    folder: Path, out: str, name: str, lora: bool
) -> None:
    settings = (RECIPES | NVFP4)[name] | {"lora": lora, "save_steps": 3, "eval_steps": 2}
    train(folder, output_dir=f"{out}-whole", **settings)
    train(folder, output_dir=out, **settings)
    shutil.rmtree(Path(out) / "step_00000006")
    train(folder, output_dir=out, **settings)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (Path(out) / file).read_bytes() == (Path(f"{out}-whole") / file).read_bytes()


ENDING: dict[str, Any] = {"recipe_until": 0.5, "lr_scheduler_type": "constant"}  # after 3 of 6


PROMPTS: dict[str, Any] = {"eval_prompts": ["the cat", "a dog sees"], "eval_max_new_tokens": 3}


def evals(records: list[dict[str, Any]]) -> dict[int, tuple[str, float]]:
    """The recipe and the loss of each evaluation."""
    return {r["step"]: (r["recipe"], r["loss"]) for r in records if r["log"] == "eval"}


def in_bf16(checkpoint: Path, out: str) -> None:
    """The checkpoint of another run, which goes on from the same state in bf16."""
    saved = checkpoints.load(checkpoint)
    settings = saved.settings | {"recipe": "bf16", "recipe_until": 1.0}
    trained = load_file(checkpoint / checkpoints.TRAINED)
    optimizer = load_file(checkpoint / checkpoints.OPTIMIZER)
    made = checkpoints.Checkpoint(saved.step, trained, optimizer, settings, saved.sources)
    checkpoints.save(Path(out), made, keep=1)


@pytest.mark.parametrize(
    "settings",
    [
        FP8,
        FP8 | {"lora": True},
        FP8 | STORED["nf4"] | {"lora": True},  # which keeps no decoded matrix
        NVFP4["nvfp4"] | STORED["nf4"] | {"lora": True},
    ],
    ids=["fp8", "fp8 lora", "fp8 of nf4", "nvfp4 of nf4"],
)
def test_a_recipe_ends_and_a_run_goes_on_around_it(
    folder: Path, out: str, settings: dict[str, Any]
) -> None:
    settings = settings | ENDING
    common: dict[str, Any] = {"save_steps": 1, "save_total_limit": 9, "eval_steps": 3}
    records = train(folder, output_dir=out, **settings, **common)
    texts = [r["text"] for r in records if "text" in r]
    assert "step 3: products in bf16 from here on (recipe_until)" in texts
    # Steps before the end are the recipe's, whatever evaluations look at.
    plainly = {"recipe_until": 1.0, "eval_recipe": "bf16", "eval_steps": 1, **PROMPTS}
    always = train(folder, output_dir=f"{out}-always", **settings | common | plainly)
    same = [a == b for a, b in zip(steps(records), steps(always), strict=True)]
    assert same == [True, True, True, False, False, False]
    at = Path("step_00000002")
    for file in (checkpoints.TRAINED, checkpoints.OPTIMIZER):
        assert (out / at / file).read_bytes() == (f"{out}-always" / at / file).read_bytes()
    assert evals(records)[3] == evals(always)[3] and evals(records)[3][0] == "bf16"
    # Those after it are bf16's from the same state.
    state = load_file(Path(out) / "step_00000003" / checkpoints.OPTIMIZER)
    assert not [name for name in state if name.startswith(("fp8.", "nvfp4."))]
    in_bf16(Path(out) / "step_00000003", f"{out}-bf16")
    plain = settings | {"recipe": "bf16", "recipe_until": 1.0} | common
    after = train(folder, output_dir=f"{out}-bf16", **plain)
    assert steps(after) == steps(records)[3:]
    assert evals(after) == evals(records)
    file = "adapter_model.safetensors" if settings.get("lora") else "model.safetensors"
    want = (Path(out) / file).read_bytes()
    assert (Path(f"{out}-bf16") / file).read_bytes() == want
    some = settings["recipe"] == "nvfp4" or "lora" not in settings
    for last in (2, 3, 5) if some else ():  # before, where it ends, after
        for path in Path(out).glob("step_*"):
            if int(path.name[-8:]) > last:
                shutil.rmtree(path)
        again = train(folder, output_dir=out, **settings, **common)
        assert steps(again)[-1] == steps(records)[-1]
        assert (Path(out) / file).read_bytes() == want


def test_the_best_of_a_recipe_is_taken_over_whole(folder: Path, out: str) -> None:
    """By a step after it, with the moments and masters, which is what is exported."""
    train(folder, output_dir=out, max_steps=2, **FP8)
    saved = checkpoints.load(Path(out) / "step_00000002")
    path = write_config(folder, output_dir=f"{out}-2", recompute="none")
    config, device = load_config(path), choose_device("cpu")
    step = train_step(config, device, load_sources(config, *locate(config), device))
    take_(step, saved)
    found = dict(named_leaves(step.trainable)) | state_to_named(step.state)
    files = [load_file(saved.path / f) for f in (checkpoints.TRAINED, checkpoints.OPTIMIZER)]
    want = {k: v for file in files for k, v in file.items() if not k.startswith("fp8.")}
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name], array)


def test_evaluations_after_a_recipe_are_those_of_the_exported_model(folder: Path, out: str) -> None:
    """Whoever loads it computes without the recipe."""
    short = {"max_steps": 3, "eval_steps": 3, "lr_scheduler_type": "constant", **FP8}
    train(folder, output_dir=f"{out}-short", **short)
    ending = train(folder, output_dir=out, **short | ENDING | {"max_steps": 6})
    still = {"model": f"{out}-short", "learning_rate": 0.0, "max_steps": 1, "recipe": "bf16"}
    exported = train(folder, output_dir=f"{out}-exported", **still)

    in_recipe = train(folder, output_dir=f"{out}-always", **short)
    assert evals(ending)[3] == evals(exported)[1] == ("bf16", evals(exported)[1][1])
    assert evals(in_recipe)[3][1] != evals(ending)[3][1]


@pytest.mark.parametrize("lora", [False, True])
def test_an_evaluation_does_not_touch_the_scales(folder: Path, out: str, lora: bool) -> None:
    settings = FP8 | {"lora": lora}
    often = train(folder, output_dir=out, eval_steps=1, **PROMPTS, **settings)
    rarely = train(folder, output_dir=f"{out}-rarely", eval_steps=100, **settings)
    assert steps(often) == steps(rarely)
    assert evals(often)[6] == evals(rarely)[6] and evals(rarely)[6][0] == "fp8_hybrid"
    assert len([r for r in often if r["log"] == "sample"]) == 12


def test_checkpoints_hold_the_history(folder: Path, out: str) -> None:
    settings = FP8 | {"fp8_amax_history": 4, "recipe_until": 0.9}  # rounded up: all 6 steps
    records = train(folder, output_dir=out, **settings)
    assert evals(train(folder, output_dir=out, **settings)) == evals(records)
    state = load_file(Path(out) / "step_00000006" / "optimizer.safetensors")
    assert state["fp8.history"].shape == (4, 24)
    used = state["fp8.history"] > 0
    assert used[:, 0::3].all() and used[:, 2::3].all()  # inputs and gradients
    assert not used[:, 1::3].any()  # weights are cast by their own amax


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_hybrid", "nvfp4"])
def test_a_matrix_that_products_of_codes_do_not_take_stays_in_bf16(
    folder: Path, out: str, recipe: str, lora: bool
) -> None:
    if not (folder / "odd").exists():
        make_model(folder / "odd", intermediate_size=40)
    settings: dict[str, Any] = {"model": str(folder / "odd"), "lora": lora, "learning_rate": 0.01}
    want = steps(train(folder, output_dir=f"{out}-plain", **settings))
    result = invoke(write_config(folder, output_dir=out, **settings, recipe=recipe))
    assert result.exit_code == 0
    line = "2 matrices in bf16: a size of theirs is no multiple of 16"
    assert result.output.count(line) == 1
    found = steps(read_log(Path(out) / "log.jsonl"))
    assert found != want
    if recipe == "fp8_hybrid":
        assert np.abs(np.divide(found, want) - 1).max() < 0.01


def test_facts_say_what_is_computed_how(folder: Path, out: str) -> None:
    result = invoke(write_config(folder, output_dir=out, max_steps=2, **FP8 | ENDING))
    assert "recipe = fp8_hybrid until step 1, then products in bf16" in result.output
    assert "fp8_hybrid: 8 matrices (forward, dgrad, wgrad), delayed scaling, emulated" in (
        result.output
    )
    stored = {"lora": True, **STORED["nf4"]}
    result = invoke(write_config(folder, output_dir=f"{out}-2", max_steps=1, **stored))
    assert "base weights in nf4, blocks of 64, scales quantised too: 8 matrices" in result.output


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"lora": True, "qlora_bnb": True, "qlora_fp8": True}, "exclude each other; set one"),
        ({"sequence_len": 36, "per_device_train_batch_size": 1, **FP8}, "a multiple of 16 tokens"),
        ({"qlora_block_size": 100, "qlora_fp8": True, "lora": True}, "qlora_block_size"),
    ],
)
def test_refused_by_name(folder: Path, out: str, settings: dict[str, Any], message: str) -> None:
    result = invoke(write_config(folder, output_dir=out, **settings))
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.count("error:") == 1
