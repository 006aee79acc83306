"""The JSON schema for editors against the reader of files: they take and refuse the same keys."""

from typing import Any

import jsonschema
import msgspec
import pytest

from surogate.config import load_config
from surogate.config_schema import config_schema
from surogate.errors import UserError
from surogate.settings import DATASET_FIELDS, FIELDS
from surogate.unsupported import KEYS, Ignored, Refused
from tests.surogate.test_config import BASE, IMPOSSIBLE, ONE_VALUE, OTHER, ROWS, nested, write

VALIDATOR = jsonschema.Draft202012Validator(config_schema())


def takes(table: dict[str, Any]) -> bool:
    return VALIDATOR.is_valid(table)


def test_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(config_schema())


@pytest.mark.parametrize("name", OTHER)
def test_takes_what_the_reader_takes(name):
    value, needs = OTHER[name]
    assert takes(BASE)
    VALIDATOR.validate(BASE | needs | {name: value})


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"model"}))
def test_takes_null_and_environment_variables(name):
    assert takes(BASE | {name: None})
    assert takes(BASE | {name: "${NAME}"})


@pytest.mark.parametrize("name,value", ONE_VALUE.items())
def test_key_of_one_value(name, value):
    assert takes(BASE | {name: value})
    assert not takes(BASE | {name: 77})


# What the schema leaves to the reader: it rests on another key or on what a text says.
RESTS_ON_OTHERS = [
    ("max_steps", 0),
    ("rope_scaling", "ntk"),
    ("max_model_len", 16),
    ("eval_prompts", ["Hello", " "]),
    ("optimizer", "normuon"),
]


@pytest.mark.parametrize("name,value,allowed", IMPOSSIBLE)
def test_refuses_what_the_reader_refuses(name, value, allowed):
    if value == {"factor": 2} or value == float("inf"):  # JSON has no such number
        return
    assert takes(BASE | {name: value}) == ((name, value) in RESTS_ON_OTHERS)


def test_unknown_and_missing_keys():
    assert not takes(BASE | {"learning_rat": 1})
    assert not takes({"datasets": [ROWS]})
    assert not takes(BASE | {"model": None})
    assert not takes(BASE | {"datasets": [{"path": "x"}]})
    assert not takes(BASE | {"datasets": [ROWS | {"sample": 3}]})
    assert not takes(BASE | {"datasets": [ROWS | {"type": "preference"}]})


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_other_versions(name, tmp_path):
    key = KEYS[name]
    for value in (3, "x", *(key.neutral if isinstance(key, Refused) else ())):
        table = BASE | nested(name, value)
        try:
            load_config(write(tmp_path, table))
            read = True
        except UserError:
            read = False
        assert takes(table) == read
    group, _, inner = name.partition(".")
    entry = config_schema()["properties"][group]
    reason = (entry["properties"][inner] if inner else entry)["description"]
    assert reason.endswith(key.reason)
    assert reason.startswith("Ignored: ") == isinstance(key, Ignored)


def test_describes_every_key_with_its_default():
    schema = config_schema()
    tables = ((schema, FIELDS), (schema["$defs"]["DatasetConfig"], DATASET_FIELDS))
    for table, fields in tables:
        assert set(fields) <= table["properties"].keys()
        for name, field in fields.items():
            entry = table["properties"][name]
            assert entry["description"] == field.help
            if name not in table["required"]:
                assert entry["default"] == msgspec.to_builtins(field.default)
