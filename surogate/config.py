"""Reads a configuration file into a frozen `Config`.

A key of a TOML or YAML file is one of three things:

* supported: a field of `Settings` or `DatasetConfig` in settings.py; it changes the run;
* ignored: listed in unsupported.py; accepted, and reported once with the reason;
* refused: listed in unsupported.py, or in a field's `refused` values; an error when it is set to
  anything but its neutral value, because the run would not be what the file asks for.

Any other key is an error with the nearest known name. `python -m surogate.config` prints
docs/configuration.md, which is made of the same tables.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from surogate.config_notes import Note, notes_on, without_effect
from surogate.errors import UserError
from surogate.schema import (
    Reading,
    Text,
    convert,
    expand,
    merge,
    nearest,
    parse_override,
    plain,
    read_file,
    refuse,
    same,
    show,
    wrong,
)
from surogate.settings import (
    BOOKKEEPING,
    DATASET_FIELDS,
    FIELDS,
    Config,
    DatasetConfig,
)
from surogate.unsupported import DATASET_KEYS, GROUPS, KEYS, Ignored, Refused

__all__ = [
    "Config",
    "DatasetConfig",
    "config_hash",
    "config_to_dict",
    "describe",
    "ignored",
    "load_config",
]

Verb = Literal["sft", "pt", "run"]
ROPE_KINDS = ("linear", "dynamic", "yarn")


def load_config(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    recipe: str | None = None,
    verb: Verb = "sft",
    need_data: bool = True,
) -> Config:
    """Reads a configuration file.

    `overrides` are "key=value" with dotted keys (`datasets.0.path=rows.jsonl`) and win over the
    file; `recipe` wins over both. `verb` "pt" requires rows of text and leaves lora off unless it
    is set; "run" is "pt" when every data set is text, else "sft". Raises UserError on any fault.
    """
    path = Path(path)
    table: dict[str, Any] = expand(read_file(path), str(path))
    origins = dict.fromkeys(_dotted(table), str(path))
    changes = [(parse_override(text), "--set") for text in overrides]
    if recipe is not None:
        changes.append((("recipe", parse_override(f"recipe={recipe}")[1]), "--recipe"))
    for (name, value), origin in changes:
        table = merge(table, name, expand(value, origin))
        origins = {k: v for k, v in origins.items() if not k.startswith(f"{name}.")}
        origins |= dict.fromkeys(_dotted({name: plain(value)}), origin)
    reading = Reading(str(path), origins)
    values, notes = _settings(table, reading)
    if "run_name" not in values:
        values["run_name"], reading.origins["run_name"] = path.stem, "the file's name"
    _choose_lora(values, reading, verb)
    _check_together(values, reading, need_data=need_data)
    config = Config(**values, origins=reading.origins, notes=())
    return msgspec.structs.replace(config, notes=(*notes, *without_effect(config)))


def _settings(table: Mapping[str, Any], reading: Reading) -> tuple[dict[str, Any], list[Note]]:
    values: dict[str, Any] = {}
    notes: list[Note] = []
    for name, value in table.items():
        if name in FIELDS:
            if plain(value) is None:  # null is unset
                reading.origins.pop(name, None)
            elif name in ("datasets", "validation_datasets"):
                values[name] = _datasets(name, value, reading, notes)
            else:
                values[name] = convert(value, FIELDS[name], reading.place(name))
        elif name in GROUPS:
            if not isinstance(value, dict | None):
                raise wrong(reading.place(name), value, "a table")
            for inner, part in (value or {}).items():
                _other(f"{name}.{inner}", part, KEYS, reading, notes)
        else:
            _other(name, value, KEYS, reading, notes)
    if "model" not in values:
        raise UserError(f"{reading.file}: model is missing: the folder or Hub name of a model")
    values["rope_scaling"] = _rope_scaling(values, reading)
    if values.get("auto_lmhead_chunks"):
        values["lmhead_chunks"] = None
    elif values.get("auto_lmhead_chunks") is False and "lmhead_chunks" not in values:
        values["lmhead_chunks"] = 1
        reading.origins["lmhead_chunks"] = "auto_lmhead_chunks = false"
    return values, notes


def _datasets(
    name: str, value: Any, reading: Reading, notes: list[Note]
) -> tuple[DatasetConfig, ...]:
    value = plain(value) if isinstance(value, Text) else value
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise wrong(reading.place(name), value, "a list of tables with path and type")
    made = []
    for index, entry in enumerate(value):
        prefix = f"{name}.{index}."
        values: dict[str, Any] = {}
        for key_name, part in entry.items():
            if key_name not in DATASET_FIELDS:
                _other(key_name, part, DATASET_KEYS, reading, notes, prefix)
            elif plain(part) is not None:
                place = reading.place(prefix + key_name)
                values[key_name] = convert(part, DATASET_FIELDS[key_name], place)
        for needed in ("path", "type"):
            if needed not in values:
                raise UserError(
                    f"{reading.file}: {prefix}{needed} is missing: "
                    f"must be {DATASET_FIELDS[needed].allowed}"
                )
        made.append(_check_dataset(DatasetConfig(**values), prefix, values, reading, notes))
    return tuple(made)


def _check_dataset(
    dataset: DatasetConfig,
    prefix: str,
    given: Mapping[str, Any],
    reading: Reading,
    notes: list[Note],
) -> DatasetConfig:
    if dataset.type == "instruction":
        for needed in ("instruction_field", "output_field"):
            if getattr(dataset, needed) is None:
                raise UserError(
                    f"{reading.file}: {prefix}{needed} is missing: "
                    "rows of type instruction need the name of that column"
                )
    needed_by = {"field": "system_prompt_field", "fixed": "system_prompt"}
    needed = needed_by.get(dataset.system_prompt_type or "", "type")
    if getattr(dataset, needed) is None:
        raise UserError(
            f"{reading.file}: {prefix}{needed} is missing: "
            f"system_prompt_type = '{dataset.system_prompt_type}' needs it"
        )
    for name, value in given.items():
        readers = DATASET_FIELDS[name].extra.get("read_by")
        if readers and dataset.type not in (*readers, "auto"):
            notes.append((prefix + name, value, f"rows of type {dataset.type} do not have it"))
        elif name in needed_by.values() and name != needed:
            kind = show(dataset.system_prompt_type)
            notes.append((prefix + name, value, f"system_prompt_type = {kind}"))
    return dataset


def _other(
    name: str,
    value: Any,
    keys: Mapping[str, Ignored | Refused],
    reading: Reading,
    notes: list[Note],
    prefix: str = "",
) -> None:
    """A key that is not a field: reported, refused or unknown."""
    place = reading.place(prefix + name)
    match keys.get(name):
        case Ignored(reason):
            notes.append((place.name, plain(value), reason))
        case Refused(neutral, reason):
            value = plain(value)
            if not any(same(value, other) for other in neutral):
                raise refuse(place, value, reason)
        case None:
            fields = FIELDS if keys is KEYS else DATASET_FIELDS
            close = nearest(name, (*fields, *keys, *GROUPS))
            hint = f": did you mean '{prefix}{close}'?" if close else ""
            raise UserError(f"unknown key '{place.name}' in {place.origin}{hint}")


def _rope_scaling(values: Mapping[str, Any], reading: Reading) -> dict[str, Any] | str | None:
    given = values.get("rope_scaling")
    if given is None or given in ROPE_KINDS:
        if given is not None and values.get("max_model_len") is None:
            raise UserError(
                f"{reading.place('rope_scaling').origin}: rope_scaling = '{given}': "
                "must come with max_model_len, the context to stretch to"
            )
        return given
    table = given
    if isinstance(given, str):
        try:
            table = msgspec.json.decode(given)
        except msgspec.DecodeError:
            table = None
    if not isinstance(table, dict) or not {"rope_type", "type"} & table.keys():
        allowed = f"one of {', '.join(ROPE_KINDS)} or a table with rope_type"
        raise wrong(reading.place("rope_scaling"), given, allowed)
    return table


def _choose_lora(values: dict[str, Any], reading: Reading, verb: Verb) -> None:
    """Where lora is unset, decides it by the verb; and what the verb asks of the rows."""
    types = [dataset.type for dataset in values.get("datasets", ())]
    if verb == "run":
        verb = "pt" if types and all(kind == "text" for kind in types) else "sft"
    elif verb == "pt":
        for index, kind in enumerate(types):
            if kind not in ("text", "auto"):
                place = reading.place(f"datasets.{index}.type")
                raise wrong(place, kind, "text for the verb pt; use the verb sft")
    scratch = values.get("from_scratch", False)
    if scratch and values.get("lora"):
        raise wrong(reading.place("lora"), True, "false with from_scratch = true")
    if "lora" not in values and (verb == "pt" or scratch):
        values["lora"] = False
        reading.origins["lora"] = "from_scratch" if scratch else "verb pt"


def _check_together(values: Mapping[str, Any], reading: Reading, *, need_data: bool) -> None:
    """Limits that involve two keys, and the data sets that training needs."""
    if values.get("max_steps") == 0:
        raise wrong(reading.place("max_steps"), 0, "-1 or at least 1")
    if need_data and not values.get("datasets"):
        raise UserError(f"{reading.file}: datasets is missing: a list of tables with path and type")
    max_len, row = values.get("max_model_len"), values.get("sequence_len", 1024)
    if max_len is not None and max_len < row:
        raise wrong(reading.place("max_model_len"), max_len, f"at least sequence_len = {row}")
    _check_evaluation(values, reading)
    _check_storage(values, reading)
    _check_optimizer(values, reading)
    steps = values.get("max_steps", -1)
    tails = values.get("warmup_steps", 0) + values.get("cooldown_steps", 0)
    if 0 < steps < tails:
        raise wrong(
            reading.place("max_steps"),
            steps,
            f"at least warmup_steps + cooldown_steps = {tails}",
        )


def _check_storage(values: Mapping[str, Any], reading: Reading) -> None:
    """One format of stored weights, and adapters that begin at what it loses."""
    stored = [name for name in ("qlora_fp8", "qlora_fp4", "qlora_bnb") if values.get(name)]
    if len(stored) > 1:
        raise UserError(f"{reading.file}: {' and '.join(stored)} exclude each other; set one")
    if values.get("lora_init") == "error" and values.get("lora", True) and not stored:
        allowed = "default without qlora_fp8, qlora_fp4 or qlora_bnb: nothing is lost"
        raise wrong(reading.place("lora_init"), "error", allowed)


def _check_optimizer(values: Mapping[str, Any], reading: Reading) -> None:
    """NorMuon makes whole matrices orthogonal, which an adapter's two factors are not."""
    if values.get("optimizer") != "normuon":
        return
    if values.get("lora", True):
        allowed = "adamw or adamw_8bit with lora = true, or set lora = false"
        raise wrong(reading.place("optimizer"), "normuon", allowed)
    if values.get("learning_rate") == 0 and values.get("adamw_learning_rate"):
        allowed = "null with learning_rate = 0, which the schedule scales"
        raise wrong(reading.place("adamw_learning_rate"), values["adamw_learning_rate"], allowed)


def _check_evaluation(values: Mapping[str, Any], reading: Reading) -> None:
    """What reads the evaluation loss needs evaluation rows; a prompt needs text."""
    if not all(prompt.strip() for prompt in values.get("eval_prompts", ())):
        allowed = "a list of texts that are not empty"
        raise wrong(reading.place("eval_prompts"), values["eval_prompts"], allowed)
    if values.get("validation_datasets") or values.get("validation_split_ratio") != 0:
        return
    for name, off in (("early_stop", False), ("best_checkpoint", "none")):
        value = values.get(name, off)
        if value != off:
            allowed = f"{show(off)} without evaluation rows (validation_split_ratio = 0)"
            raise wrong(reading.place(name), value, allowed)


def _dotted(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every key of the file by its dotted name."""
    names = []
    for name, value in table.items():
        names.append(prefix + name)
        if isinstance(value, dict):
            names += _dotted(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, dict):
                    names += _dotted(entry, f"{prefix}{name}.{index}.")
    return names


def ignored(config: Config, kind: str = "") -> list[str]:
    """One line for each key that was accepted and does nothing, for the start of a run."""
    return [
        f"ignored: {name} = {show(value)}: {why}" for name, value, why in notes_on(config, kind)
    ]


def describe(config: Config) -> list[tuple[str, Any, str]]:
    """(key, value, origin) of every setting; the origin is a file, an option or "default"."""
    rows = []
    for name in FIELDS:
        value = getattr(config, name)
        if name in ("datasets", "validation_datasets"):
            for index, dataset in enumerate(value):
                for inner in DATASET_FIELDS:
                    dotted = f"{name}.{index}.{inner}"
                    origin = config.origins.get(dotted, "default")
                    rows.append((dotted, getattr(dataset, inner), origin))
        else:
            rows.append((name, value, config.origins.get(name, "default")))
    return rows


def config_to_dict(config: Config) -> dict[str, Any]:
    """Every setting as plain lists, dicts and scalars; without origins and notes."""
    table = cast(dict[str, Any], msgspec.to_builtins(config))
    return {name: table[name] for name in FIELDS}


def config_hash(config: Config) -> str:
    """Sixteen hex digits that change with every setting but those of BOOKKEEPING."""
    table = {k: v for k, v in config_to_dict(config).items() if k not in BOOKKEEPING}
    return sha256(msgspec.json.encode(table, order="deterministic")).hexdigest()[:16]


if __name__ == "__main__":
    from surogate.config_page import page

    print(page(), end="")
