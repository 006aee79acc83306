"""Reading a configuration: overrides, environment variables, TOML and YAML, files that are none."""

from itertools import pairwise

import pytest

from surogate.config import DatasetConfig, config_to_dict, describe, load_config
from surogate.errors import UserError
from tests.surogate.test_config import BASE, fails, load


def test_overrides_win_and_are_typed_by_the_key(tmp_path):
    config = load(
        tmp_path,
        BASE | {"learning_rate": 1e-3},
        overrides=[
            "learning_rate=2e-5",
            "run_name=007",
            "wandb_name='a b'",
            "recompute=none",
            "lora_target_modules=[q_proj, v_proj]",
            "datasets.0.samples=5",
            "datasets.1.path=more.jsonl",
            "datasets.1.type=auto",
            "save_steps=null",
            "rope_scaling={rope_type: linear, factor: 2.0}",
        ],
        recipe="bf16",
    )
    assert config.learning_rate == 2e-5
    assert config.run_name == "007" and config.wandb_name == "a b"  # quoted as in a file
    assert config.recompute == "none"
    assert config.lora_target_modules == ("q_proj", "v_proj")
    assert config.datasets[0].samples == 5
    assert config.datasets[1] == DatasetConfig(path="more.jsonl", type="auto")
    assert config.save_steps == 50
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    rows = {name: (value, origin) for name, value, origin in describe(config)}
    assert rows["learning_rate"] == (2e-5, "--set")
    assert rows["recipe"] == ("bf16", "--recipe")
    assert rows["datasets.0.path"] == ("rows.jsonl", str(tmp_path / "run.yaml"))
    assert rows["datasets.0.samples"] == (5, "--set")
    assert rows["save_steps"] == (50, "default")
    assert type(config.run_name) is str and type(config.datasets[1].path) is str


def test_override_of_a_whole_list(tmp_path):
    config = load(tmp_path, BASE, overrides=["datasets=[{path: a, type: text}]"])
    assert config.datasets == (DatasetConfig(path="a", type="text"),)
    assert ("datasets.0.path", "a", "--set") in describe(config)


def test_errors_of_overrides(tmp_path):
    def message(text: str) -> str:
        return fails(tmp_path, BASE, overrides=[text])

    assert message("learning_rate") == "--set learning_rate: must be key=value"
    assert message("=1") == "--set =1: must be key=value"
    assert message("lora_rank=x") == (
        "--set: lora_rank = 'x': must be a whole number of at least 1"
    )
    assert message("lora_rnk=4") == "unknown key 'lora_rnk' in --set: did you mean 'lora_rank'?"
    assert message("datasets.3.path=x") == ("--set datasets.3.path: there are 1 entries before .3")
    assert fails(tmp_path, BASE, recipe="int3").startswith("--recipe: recipe = 'int3': must be ")


def test_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.setenv("RANK", "8")
    table = BASE | {
        "model": "${MODELS}/tiny",
        "lora_rank": "${RANK}",
        "lora_target_modules": ["${RANK}"],
    }
    config = load(tmp_path, table)
    assert config.model == "/models/tiny"
    assert config.lora_rank == 8
    assert config.lora_target_modules == ("8",)
    assert fails(tmp_path, BASE | {"model": "${NOT_SET_HERE}"}) == (
        "run.yaml: ${NOT_SET_HERE}: there is no environment variable NOT_SET_HERE"
    )


def test_toml_is_the_same(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "tiny"\nlearning_rate = 2e-5\n[[datasets]]\npath = "rows.jsonl"\n'
        'type = "conversation"\n[distributed]\nnum_nodes = 1\n'
    )
    config = load_config(path)
    same = load(tmp_path, BASE | {"learning_rate": 2e-5})
    assert config_to_dict(config) == config_to_dict(same)


def test_yaml_numbers_without_a_dot(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\nlearning_rate: 2e-4\nadamw_epsilon: 1E-9\n")
    config = load_config(path, need_data=False)
    assert (config.learning_rate, config.adamw_epsilon) == (2e-4, 1e-9)


@pytest.mark.parametrize(
    "name,text,message",
    [
        ("a.ini", "", "a.ini: a configuration must be a .toml, .yaml, .yml or .json file"),
        ("a.yaml", "", "a.yaml: must hold keys and values, got null"),
        ("a.yaml", "- 1", "a.yaml: must hold keys and values, got [1]"),
        (
            "a.yaml",
            "model: a\nmodel: b\n",
            "a.yaml: is not YAML: key 'model' is written twice (at line 2, column 1)",
        ),
        (
            "a.yaml",
            "model: a\n\tlora: b\n",
            "a.yaml: is not YAML: found character '\\t' that cannot start any token "
            "(at line 2, column 1)",
        ),
        (
            "a.yaml",
            "model: 2024-99-99\n",
            "a.yaml: is not YAML: cannot be read as timestamp (at line 1, column 8)",
        ),
        (
            "a.yaml",
            "? [a]\n: b\n",
            "a.yaml: is not YAML: cannot be read as map (at line 1, column 1)",
        ),
        ("a.json", '{"a":' * 900, "a.json: is nested too deeply"),
        (
            "a.yaml",
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 10)}]\n" for x, y in pairwise("abcdef")),
            "a.yaml: has more than 100,000 values",
        ),
        ("a.toml", "model = ", "a.toml: is not TOML: Invalid value (at end of document)"),
    ],
)
def test_file_that_is_no_configuration(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert str(error.value) == f"{tmp_path}/{message}"


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="none.yaml: cannot be read: No such file or directory$"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"model: \xff\n")
    with pytest.raises(UserError, match="bytes.yaml: is not text in UTF-8$"):
        load_config(path)


def test_yaml_runs_no_code(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(UserError, match="is not YAML"):
        load_config(path)
