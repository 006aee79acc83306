"""Keys that this version refuses, or that have no effect: each is one line that says why."""

import pytest

from surogate.config import config_hash, ignored
from surogate.settings import FIELDS
from surogate.unsupported import DATASET_KEYS, KEYS, Ignored, Refused
from tests.surogate.test_config import BASE, ROWS, fails, load, nested


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if isinstance(key, Ignored)])
def test_ignored_key_is_reported(tmp_path, name):
    config = load(tmp_path, BASE | nested(name, 3))
    key = KEYS[name]
    assert isinstance(key, Ignored)
    assert ignored(config) == [f"ignored: {name} = 3: {key.reason}"]
    assert config_hash(config) == config_hash(load(tmp_path, BASE))


@pytest.mark.parametrize("name", DATASET_KEYS)
def test_ignored_key_of_a_data_set_is_reported(tmp_path, name):
    config = load(tmp_path, BASE | {"datasets": [ROWS | {name: "x"}]})
    key = DATASET_KEYS[name]
    assert isinstance(key, Ignored)
    assert ignored(config) == [f"ignored: datasets.0.{name} = 'x': {key.reason}"]


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if isinstance(key, Refused)])
def test_refused_key(tmp_path, name):
    key = KEYS[name]
    assert isinstance(key, Refused)
    assert "use " in key.reason
    for value in key.neutral:
        assert ignored(load(tmp_path, BASE | nested(name, value))) == []
    assert fails(tmp_path, BASE | nested(name, 77)) == (
        f"run.yaml: {name} = 77 is not available in this version: {key.reason}"
    )


@pytest.mark.parametrize(
    "field,value",
    [(f, value) for f in FIELDS.values() for value in f.extra.get("refused", {})],
    ids=str,
)
def test_refused_value(tmp_path, field, value):
    message = fails(tmp_path, BASE | {field.name: value})
    assert message.startswith(f"run.yaml: {field.name} = '{value}' is not available")
    assert "; use " in message


def test_true_is_not_one(tmp_path):
    assert "zero_level = true is not available" in fails(tmp_path, BASE | {"zero_level": True})
    assert "lora_dropout = false is not" in fails(tmp_path, BASE | {"lora_dropout": False})
    assert ignored(load(tmp_path, BASE | {"lora_dropout": 0.0})) == []


@pytest.mark.parametrize(
    "table,name,reason",
    [
        ({"num_epochs": 2, "max_steps": 5}, "num_epochs", "max_steps = 5 decides"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_ratio", "warmup_steps = 3 decides"),
        (
            {"wsd_decay_steps_fraction": 0.2},
            "wsd_decay_steps_fraction",
            "lr_scheduler_type = linear",
        ),
        ({"init_projections_to_zero": True}, "init_projections_to_zero", "from_scratch = false"),
        (
            {"validation_split_ratio": 0.2, "validation_datasets": [ROWS]},
            "validation_split_ratio",
            "validation_datasets decides",
        ),
        (
            {"lmhead_chunks": 4, "auto_lmhead_chunks": True},
            "lmhead_chunks",
            "auto_lmhead_chunks = true decides",
        ),
        ({"max_model_len": 4096}, "max_model_len", "no rope_scaling by name"),
        ({"master_dtype": "fp32"}, "master_dtype", "with lora = true, lora_dtype decides"),
        ({"lora": False, "lora_rank": 4}, "lora_rank", "lora = false"),
        ({"lora": False, "lora_alpha": 4}, "lora_alpha", "lora = false"),
        ({"lora": False, "lora_dtype": "bf16"}, "lora_dtype", "lora = false"),
        ({"lora": False, "lora_target_modules": ["x"]}, "lora_target_modules", "lora = false"),
        ({"lora": False, "merge_adapter": True}, "merge_adapter", "lora = false"),
        ({"eval_max_new_tokens": 8}, "eval_max_new_tokens", "no eval_prompts"),
        ({"eval_recipe": "bf16"}, "eval_recipe", "recipe = bf16"),
        ({"recipe_until": 0.8}, "recipe_until", "recipe = bf16"),
        ({"early_stop_patience": 2}, "early_stop_patience", "early_stop = false"),
        ({"early_stop_threshold": 0.1}, "early_stop_threshold", "early_stop = false"),
        ({"wandb_name": "x"}, "wandb_name", "report_to does not name wandb"),
        ({"aim_repo": "x"}, "aim_repo", "report_to does not name aim"),
        (
            {"datasets": [ROWS | {"text_field": "body"}]},
            "datasets.0.text_field",
            "rows of type conversation do not have it",
        ),
        (
            {"datasets": [{"path": "x", "type": "auto", "system_prompt": "Be kind."}]},
            "datasets.0.system_prompt",
            "system_prompt_type = null",
        ),
    ],
)
def test_key_that_another_leaves_without_effect_is_reported(tmp_path, table, name, reason):
    lines = ignored(load(tmp_path, BASE | table))
    assert len(lines) == 1
    assert lines[0].startswith(f"ignored: {name} = ")
    assert lines[0].endswith(f": {reason}")
