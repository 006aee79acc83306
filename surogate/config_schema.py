"""The JSON schema of a configuration file, for editors that complete and check as one types.

Made of the tables that the reader of files uses, so the two cannot differ: a file that the schema
takes is read, but for what involves two keys. ``surogate config --schema > surogate.schema.json``,
then as the first line of a file, in YAML and in TOML:

    # yaml-language-server: $schema=surogate.schema.json
    #:schema ./surogate.schema.json
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from surogate.schema import Field
from surogate.settings import DATASET_FIELDS, FIELDS, DatasetConfig, Settings
from surogate.unsupported import DATASET_KEYS, KEYS, Ignored, Refused

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What may stand for any value: null, which is the default, or a text with an environment variable.
_UNSET = {"anyOf": [{"type": "null"}, {"type": "string", "pattern": r"\$\{[A-Za-z_]\w*\}"}]}


def config_schema() -> dict[str, Any]:
    """The schema as plain dicts and lists (draft 2020-12)."""
    definitions = msgspec.json.schema(Settings)["$defs"]
    return {
        "$schema": _DIALECT,
        "title": "Surogate configuration",
        **_object(definitions[Settings.__name__], FIELDS, KEYS),
        "$defs": {
            DatasetConfig.__name__: _object(
                definitions[DatasetConfig.__name__], DATASET_FIELDS, DATASET_KEYS
            ),
            "unset": _UNSET,
        },
    }


def _object(
    made: Mapping[str, Any], fields: Mapping[str, Field], others: Mapping[str, Ignored | Refused]
) -> dict[str, Any]:
    properties = {
        name: _property(made["properties"][name], field, required=name in made["required"])
        for name, field in fields.items()
    }
    for name, other in others.items():
        group, _, inner = name.partition(".")
        if inner:
            table = properties.setdefault(
                group, {"type": ["object", "null"], "additionalProperties": False, "properties": {}}
            )
            table["properties"][inner] = _other(other)
        else:
            properties[name] = _other(other)
    return {
        "type": "object",
        "properties": properties,
        "required": made["required"],
        "additionalProperties": False,
    }


def _property(made: Mapping[str, Any], field: Field, *, required: bool) -> dict[str, Any]:
    """A key of ours: msgspec's schema, other spellings, and what leaves the key unset."""
    made = msgspec.to_builtins(made)  # tuples become lists
    about = {name: made[name] for name in ("description", "default") if name in made}
    core = {name: part for name, part in made.items() if name not in about}
    if "only" in field.extra:
        core = {"const": field.extra["only"]}
    choices = [core]
    if also := list(field.extra.get("also", {})):
        choices.append({"enum": also})
    if required:  # null is not enough
        return {**about, "anyOf": choices} if len(choices) > 1 else {**about, **core}
    return {**about, "anyOf": [*choices, {"$ref": "#/$defs/unset"}]}


def _other(key: Ignored | Refused) -> dict[str, Any]:
    """A key that has no effect, or that must keep its neutral value."""
    if isinstance(key, Ignored):
        return {"description": f"Ignored: {key.reason}", "deprecated": True}
    return {
        "description": f"Not available in this version: {key.reason}",
        "deprecated": True,
        "enum": list(key.neutral),
    }
