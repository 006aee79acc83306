"""Configuration: every key does what its table says, and every mistake is one line."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from surogate.config import (
    Config,
    DatasetConfig,
    config_hash,
    config_to_dict,
    describe,
    ignored,
    load_config,
)
from surogate.config_page import page
from surogate.errors import UserError
from surogate.settings import BOOKKEEPING, DATASET_FIELDS, FIELDS, SECTIONS
from surogate.unsupported import DATASET_KEYS, GROUPS, KEYS

ROWS: dict[str, Any] = {"path": "rows.jsonl", "type": "conversation"}
BASE: dict[str, Any] = {"model": "tiny", "datasets": [ROWS]}

# A value other than the default for each supported key, with what must come with it.
FP8 = {"recipe": "fp8_hybrid"}
NORMUON = {"optimizer": "normuon", "lora": False}
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "run_name": ("mine", {}),
    "num_epochs": (7, {}),
    "max_steps": (20, {}),
    "output_dir": ("elsewhere", {}),
    "resume_from_checkpoint": (False, {}),
    "save_steps": (7, {}),
    "save_total_limit": (2, {}),
    "async_save": (False, {}),
    "verify_export": (False, {}),
    "max_skipped_steps": (3, {}),
    "eval_steps": (9, {}),
    "logging_steps": (3, {}),
    "from_scratch": (True, {}),
    "log_file": ("log.txt", {}),
    "train_seed": (5, {}),
    "eval_seed": (6, {}),
    "device": ("cpu", {}),
    "model": ("other", {}),
    "torch_dtype": ("float32", {}),
    "sequence_len": (64, {}),
    "max_model_len": (4096, {"rope_scaling": "linear", "max_model_len": 2048}),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, {}),
    "init_projections_to_zero": (True, {"from_scratch": True}),
    "per_device_train_batch_size": (1, {}),
    "gradient_accumulation_steps": (2, {}),
    "optimizer": ("adamw_8bit", {}),
    "learning_rate": (1e-3, {}),
    "adamw_learning_rate": (1e-3, NORMUON),
    "lr_scheduler_type": ("cosine", {}),
    "warmup_ratio": (0.1, {}),
    "warmup_steps": (3, {}),
    "cooldown_steps": (3, {}),
    "wsd_decay_steps_fraction": (0.2, {"lr_scheduler_type": "wsd"}),
    "final_lr_fraction": (0.1, {}),
    "weight_decay": (0.1, {}),
    "max_grad_norm": (0.0, {}),
    "adamw_beta1": (0.8, {}),
    "adamw_beta2": (0.95, {}),
    "adamw_epsilon": (1e-6, {}),
    "adamw_cautious_wd": (True, {"weight_decay": 0.1}),
    "normuon_momentum": (0.9, NORMUON),
    "normuon_beta2": (0.9, NORMUON),
    "normuon_cautious_wd": (False, NORMUON | {"weight_decay": 0.1}),
    "loss_scale": ("all", {}),
    "sample_packing": (False, {}),
    "use_cuda_graphs": (False, {}),
    "recompute": ("selective", {}),
    "lmhead_chunks": (4, {}),
    "auto_lmhead_chunks": (False, {}),
    "recipe": ("fp8_hybrid", {}),
    "recipe_until": (0.5, FP8),
    "skip_quant_first_layers": (1, FP8),
    "skip_quant_last_layers": (1, FP8),
    "skip_quant_modules": (["o_proj"], FP8),
    "quantized_products": (["forward"], FP8),
    "fp8_scaling": ("tensor", FP8),
    "fp8_amax_history": (1, FP8),
    "fp8_amax_algorithm": ("most_recent", FP8),
    "fp8_fast_sums": ([], FP8),
    "fp8_margin": (8, FP8),
    "fp4_four_over_six": (False, {"recipe": "nvfp4"}),
    "fp4_hadamard": (False, {"recipe": "nvfp4", "lora": False}),
    "fp4_square_blocks": (False, {"recipe": "nvfp4"}),
    "fp4_stochastic_rounding": (False, {"recipe": "nvfp4"}),
    "gradient_dtype": ("fp32", {}),
    "master_dtype": ("fp32", {"lora": False}),
    "moment_dtype": ("bf16", {}),
    "lora": (False, {}),
    "lora_rank": (4, {}),
    "lora_alpha": (8, {}),
    "lora_dtype": ("bf16", {}),
    "lora_target_modules": (["q_proj"], {}),
    "lora_init": ("error", {"qlora_bnb": True}),
    "qlora_fp8": (True, {}),
    "qlora_fp4": (True, {}),
    "qlora_four_over_six": (False, {"qlora_fp4": True}),
    "qlora_bnb": (True, {}),
    "qlora_block_size": (64, {"qlora_fp8": True}),
    "qlora_bnb_block_size": (128, {"qlora_bnb": True}),
    "qlora_bnb_double_quant": (False, {"qlora_bnb": True}),
    "merge_adapter": (True, {}),
    "datasets": ([{"path": "a.jsonl", "type": "text"}], {}),
    "validation_datasets": ([ROWS], {}),
    "validation_split_ratio": (0.2, {}),
    "dataloader_num_workers": (3, {}),
    "eval_prompts": (["Hello"], {}),
    "eval_max_new_tokens": (8, {"eval_prompts": ["Hello"]}),
    "eval_recipe": ("bf16", FP8),
    "early_stop": (True, {}),
    "early_stop_patience": (2, {"early_stop": True}),
    "early_stop_threshold": (0.1, {"early_stop": True}),
    "best_checkpoint": ("export", {}),
    "report_to": (["wandb"], {}),
    "wandb_project": ("mine", {"report_to": "wandb"}),
    "wandb_name": ("mine", {"report_to": "wandb"}),
    "wandb_mode": ("offline", {"report_to": "wandb"}),
    "aim_experiment": ("mine", {"report_to": ["aim"]}),
    "aim_repo": ("elsewhere", {"report_to": "aim"}),
    "aim_name": ("mine", {"report_to": "aim"}),
}

# Keys that have one value in this version: setting them is allowed and says nothing new.
ONE_VALUE = {"gpus": 1}

# Values that no run can have.
IMPOSSIBLE = [
    ("num_epochs", 0, "a whole number of at least 1"),
    ("num_epochs", 2.5, "a whole number of at least 1"),
    ("num_epochs", True, "a whole number of at least 1"),
    ("max_steps", -2, "a whole number of at least -1"),
    ("max_steps", 0, "-1 or at least 1"),
    ("sequence_len", 0, "a whole number of at least 2"),
    ("learning_rate", -1e-4, "a number of at least 0"),
    ("learning_rate", "fast", "a number of at least 0"),
    ("learning_rate", float("inf"), "a number of at least 0"),
    ("warmup_ratio", 1.5, "a number from 0 to 1"),
    ("validation_split_ratio", 1, "a number from 0 to less than 1"),
    ("adamw_beta2", 1.0, "a number from 0 to less than 1"),
    ("adamw_epsilon", 0, "a number above 0"),
    ("lr_scheduler_type", "step", "one of linear, cosine, constant, wsd"),
    ("device", "tpu", "one of auto, cpu, cuda"),
    ("recompute", "some", "one of auto, none, block, selective, true or false"),
    ("recompute", 1, "one of auto, none, block, selective, true or false"),
    ("optimizer", "sgd", "one of adamw, adamw_8bit, normuon"),
    ("optimizer", "normuon", "adamw or adamw_8bit with lora = true, or set lora = false"),
    ("normuon_momentum", 1, "a number from 0 to less than 1"),
    ("lora", "maybe", "true or false"),
    ("lora_target_modules", "q_proj", "a list of text"),
    ("run_name", 7, "text"),
    ("lmhead_chunks", 0, "a whole number of at least 1 or null"),
    ("datasets", "rows.jsonl", "a list of tables with path and type"),
    ("rope_scaling", "ntk", "one of linear, dynamic, yarn or a table with rope_type"),
    ("rope_scaling", {"factor": 2}, "one of linear, dynamic, yarn or a table with rope_type"),
    ("max_model_len", 16, "at least sequence_len = 1024"),
    ("distributed", 3, "a table"),
    ("report_to", "comet", "a list of tensorboard, wandb, aim, surogate"),
    ("report_to", ["wandb", "comet"], "a list of tensorboard, wandb, aim, surogate"),
    ("early_stop_patience", 0, "a whole number of at least 1"),
    ("eval_prompts", ["Hello", " "], "a list of texts that are not empty"),
    ("best_checkpoint", True, "one of none, keep, export"),
]


def write(folder: Path, table: dict[str, Any], name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(table))
    return path


def load(folder: Path, table: dict[str, Any], **options: Any) -> Config:
    return load_config(write(folder, table), **options)


def fails(folder: Path, table: dict[str, Any], **options: Any) -> str:
    """The error without the folder's name."""
    with pytest.raises(UserError) as error:
        load(folder, table, **options)
    message = str(error.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def nested(name: str, value: Any) -> dict[str, Any]:
    group, _, inner = name.partition(".")
    return {group: {inner: value}} if inner else {name: value}


def test_every_supported_key_is_covered():
    assert OTHER.keys() | ONE_VALUE.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", OTHER)
def test_supported_key_changes_the_run(tmp_path, name):
    value, needs = OTHER[name]
    before = load(tmp_path, BASE | needs)
    config = load(tmp_path, BASE | needs | {name: value})
    plain = config_to_dict(config)
    if name == "datasets":
        assert config.datasets == (DatasetConfig(path="a.jsonl", type="text"),)
    elif name == "validation_datasets":
        assert config.validation_datasets == (DatasetConfig(**ROWS),)
    else:
        assert (list(plain[name]) if isinstance(plain[name], tuple) else plain[name]) == value
    assert plain != config_to_dict(before)
    assert (config_hash(config) == config_hash(before)) == (name in BOOKKEEPING)
    assert ignored(config) == []


@pytest.mark.parametrize("name", ONE_VALUE)
def test_key_of_one_value(tmp_path, name):
    config = load(tmp_path, BASE | {name: ONE_VALUE[name]})
    assert getattr(config, name) == ONE_VALUE[name]


def test_defaults(tmp_path):
    config = load(tmp_path, BASE)
    for field in FIELDS.values():
        if field.name not in ("model", "datasets", "run_name"):
            assert getattr(config, field.name) == field.default
    assert config.run_name == "run"  # the file's name
    assert config == Config(
        model="tiny",
        datasets=(DatasetConfig(**ROWS),),
        origins=config.origins,
    )


@pytest.mark.parametrize("name,value,allowed", IMPOSSIBLE)
def test_impossible_value(tmp_path, name, value, allowed):
    message = fails(tmp_path, BASE | {name: value})
    assert message.startswith(f"run.yaml: {name} = ")
    assert message.endswith(f": must be {allowed}")


def test_errors_word_by_word(tmp_path):
    def message(**table: Any) -> str:
        return fails(tmp_path, BASE | table)

    assert message(learning_rat=1e-4) == (
        "unknown key 'learning_rat' in run.yaml: did you mean 'learning_rate'?"
    )
    assert message(zzz=1) == "unknown key 'zzz' in run.yaml"
    assert message(distributed={"num_node": 2}) == (
        "unknown key 'distributed.num_node' in run.yaml: did you mean 'distributed.num_nodes'?"
    )
    assert message(datasets=[ROWS | {"sample": 3}]) == (
        "unknown key 'datasets.0.sample' in run.yaml: did you mean 'datasets.0.samples'?"
    )
    assert message(learning_rate=-1) == (
        "run.yaml: learning_rate = -1: must be a number of at least 0"
    )
    rates = {"learning_rate": 0, "adamw_learning_rate": 0.1}
    assert message(**NORMUON, **rates) == (
        "run.yaml: adamw_learning_rate = 0.1: must be null with learning_rate = 0, which the "
        "schedule scales"
    )
    assert message(recipe="fp16") == (
        "run.yaml: recipe = 'fp16': must be one of bf16, fp8_hybrid, nvfp4"
    )
    assert message(gpus=0) == (
        "run.yaml: gpus = 0 is not available in this version: training uses one GPU; use gpus = 1"
    )
    assert message(model=None) == ("run.yaml: model is missing: the folder or Hub name of a model")
    assert message(datasets=[]) == (
        "run.yaml: datasets is missing: a list of tables with path and type"
    )
    assert message(datasets=[{"path": "x"}]) == (
        "run.yaml: datasets.0.type is missing: must be one of text, instruction, conversation, auto"
    )
    assert message(datasets=[{"path": "x", "type": "preference"}]) == (
        "run.yaml: datasets.0.type = 'preference' is not available in this version: "
        "preference training (DPO) is not there yet; use conversation"
    )
    assert message(datasets=[{"path": "x", "type": "instruction"}]) == (
        "run.yaml: datasets.0.instruction_field is missing: "
        "rows of type instruction need the name of that column"
    )
    instruction = {
        "path": "x",
        "type": "instruction",
        "instruction_field": "q",
        "output_field": "a",
        "system_prompt_type": "fixed",
    }
    assert message(datasets=[instruction]) == (
        "run.yaml: datasets.0.system_prompt is missing: system_prompt_type = 'fixed' needs it"
    )
    assert message(rope_scaling="yarn") == (
        "run.yaml: rope_scaling = 'yarn': must come with max_model_len, the context to stretch to"
    )
    assert message(lora=True, from_scratch=True) == (
        "run.yaml: lora = true: must be false with from_scratch = true"
    )
    assert message(max_steps=5, warmup_steps=4, cooldown_steps=4) == (
        "run.yaml: max_steps = 5: must be at least warmup_steps + cooldown_steps = 8"
    )


@pytest.mark.parametrize("name", [n for n, f in DATASET_FIELDS.items() if f.name != "path"])
def test_data_set_key(tmp_path, name):
    row: dict[str, Any] = {"path": "x", "type": "auto"}
    value: Any = {
        "samples": 5,
        "weight": 2.5,
        "malformed": "skip",
        "type": "text",
        "system_prompt_type": "fixed",
        "message_property_mappings": {"role": "from"},
    }.get(name, "other")
    if name == "system_prompt_type":
        row["system_prompt"] = "Be kind."
    if name == "system_prompt":
        row["system_prompt_type"] = "fixed"
    if name == "system_prompt_field":
        row["system_prompt_type"] = "field"
    if name in ("system_prompt", "system_prompt_field"):
        before = row | {name: "some"}
    else:
        before = {k: v for k, v in row.items() if k != "system_prompt"}
    made = load(tmp_path, BASE | {"datasets": [row | {name: value}]})
    assert getattr(made.datasets[0], name) == value
    assert config_hash(made) != config_hash(load(tmp_path, BASE | {"datasets": [before]}))
    assert ignored(made) == []


def test_recompute_takes_booleans(tmp_path):
    assert load(tmp_path, BASE | {"recompute": True}).recompute == "block"
    assert load(tmp_path, BASE | {"recompute": False}).recompute == "none"


def test_lmhead_chunks(tmp_path):
    def chunks(**table: Any) -> int | None:
        return load(tmp_path, BASE | table).lmhead_chunks

    assert chunks() is None
    assert chunks(auto_lmhead_chunks=False) == 1
    assert chunks(auto_lmhead_chunks=False, lmhead_chunks=4) == 4
    assert chunks(auto_lmhead_chunks=True, lmhead_chunks=4) is None


def test_rope_scaling_in_json(tmp_path):
    text = '{"rope_type": "yarn", "factor": 4.0}'
    assert load(tmp_path, BASE | {"rope_scaling": text}).rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
    }


def test_lora_by_verb(tmp_path):
    text = BASE | {"datasets": [{"path": "x", "type": "text"}]}

    def lora(table: dict[str, Any], verb: Any) -> bool:
        return load(tmp_path, table, verb=verb).lora

    assert lora(text, "sft") is True
    assert lora(text, "pt") is False
    assert lora(text | {"lora": True}, "pt") is True
    assert lora(text, "run") is False
    assert lora(BASE, "run") is True
    assert lora(BASE | {"from_scratch": True}, "sft") is False
    assert ("lora", False, "verb pt") in describe(load(tmp_path, text, verb="pt"))
    assert fails(tmp_path, BASE, verb="pt") == (
        "run.yaml: datasets.0.type = 'conversation': must be text for the verb pt; use the verb sft"
    )


def test_configuration_goes_through_json(tmp_path):
    plain = config_to_dict(load(tmp_path, BASE))
    assert list(plain) == list(FIELDS)
    back = msgspec.convert(msgspec.json.decode(msgspec.json.encode(plain)), Config)
    assert config_to_dict(back) == plain


def test_tables_do_not_overlap():
    assert not FIELDS.keys() & KEYS.keys()
    assert not DATASET_FIELDS.keys() & DATASET_KEYS.keys()
    assert {name.split(".")[0] for name in KEYS if "." in name} == set(GROUPS)
    assert set(SECTIONS.values()) <= FIELDS.keys()
    assert BOOKKEEPING <= FIELDS.keys()
    for field in (*FIELDS.values(), *DATASET_FIELDS.values()):
        assert field.help


def test_page_is_up_to_date():
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "-m", "surogate.config"],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    assert made.stdout == page()
    assert (root / "docs/configuration.md").read_text() == page()
