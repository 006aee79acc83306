"""Reading typed settings: files, ${ENV}, dotted overrides, and one-line errors.

The types are msgspec annotations on a Struct; this module turns a value that a person wrote into
one of that type, or into an error that says where it stands, what it is and what is allowed.
Nothing here knows a key's name.
"""

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from surogate.errors import UserError

MOST_VALUES = 100_000  # of a file: aliases of aliases would make trees without end

_ENV = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Text(str):
    """Text whose type the key decides: the value of an override or of a ${NAME}."""


class Field(NamedTuple):
    """A key: its annotation, its default (msgspec.NODEFAULT if required) and its help."""

    name: str
    hint: Any
    default: Any
    help: str
    extra: Mapping[str, Any]

    @property
    def allowed(self) -> str:
        """What may be written, in words."""
        also = [show(k) for k in self.extra.get("also", {}) if isinstance(k, bool)]
        return _allowed(self.hint) + (f", {' or '.join(also)}" if also else "")


class Place(NamedTuple):
    """Where a value was written: what errors and `describe` print, and the dotted key."""

    origin: str
    name: str


class Reading(NamedTuple):
    """The file that is read, and where each dotted key was set last."""

    file: str
    origins: dict[str, str]

    def place(self, name: str) -> Place:
        """Where that key was set: itself, or the longest part of it that has an origin."""
        part = name
        while part and part not in self.origins:
            part = part.rpartition(".")[0]
        return Place(self.origins.get(part, self.file), one_line(name))


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 2e-4 as a number and refuses a key that is written twice."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A node's value; what PyYAML trips over, such as a date without a day, has its place."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, ValueError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"cannot be read as {kind}", node.start_mark
            ) from None


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    found: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        name = loader.construct_object(key_node, deep=True)
        if not isinstance(name, str):
            name = key_node.value
        if name in found:
            raise yaml.constructor.ConstructorError(
                None, None, f"key '{one_line(name)}' is written twice", key_node.start_mark
            )
        found[name] = loader.construct_object(value_node, deep=True)
    return found


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    """A text; JSON writes a character beyond U+FFFF as two escapes, which YAML leaves apart."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise yaml.constructor.ConstructorError(
            None, None, "an escape is half a character", node.start_mark
        ) from None


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG, _text)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_file(path: Path) -> dict[str, Any]:
    """The table in a .toml, .yaml, .yml or .json file. Any fault is a UserError of one line."""
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml", ".json"):
        raise UserError(f"{path}: a configuration must be a .toml, .yaml, .yml or .json file")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text in UTF-8") from None
    try:
        # A JSON file is YAML too.
        table = tomllib.loads(text) if suffix == ".toml" else yaml.load(text, _Loader)
        count = _count(table, {})
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{path}: is not TOML: {e}") from None
    except yaml.YAMLError as e:
        raise UserError(f"{path}: is not YAML: {_yaml_fault(e)}") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deeply") from None
    except ValueError as e:  # a whole number of thousands of digits
        raise UserError(f"{path}: holds a value that cannot be read: {e}") from None
    if count > MOST_VALUES:
        raise UserError(f"{path}: has more than {MOST_VALUES:,} values")
    if not isinstance(table, dict):
        raise UserError(f"{path}: must hold keys and values, got {show(table)}")
    return table


def _count(value: Any, known: dict[int, int]) -> int:
    """Values in a tree; what YAML's aliases repeat counts each time, and is looked at once."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    return known[id(value)]


def _yaml_fault(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    mark = getattr(error, "problem_mark", None)
    return f"{problem} (at line {mark.line + 1}, column {mark.column + 1})" if mark else problem


def expand(value: Any, origin: str) -> Any:
    """Replaces each ${NAME} in every text of a tree by that environment variable."""
    if isinstance(value, dict):
        return {name: expand(part, origin) for name, part in value.items()}
    if isinstance(value, list):
        return [expand(part, origin) for part in value]
    if not isinstance(value, str) or not _ENV.search(value):
        return value

    def look_up(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise UserError(f"{origin}: ${{{name}}}: there is no environment variable {name}")
        return os.environ[name]

    return Text(_ENV.sub(look_up, value))


def parse_override(text: str) -> tuple[str, Text]:
    """Splits "key=value"; the value's type is the key's. Quotes about a text may stay, as it stands
    in a file.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set {one_line(text)}: must be key=value")
    value = value.strip()
    if value[:1] in ("'", '"') and value[-1:] == value[0]:
        inner = _yaml_value(value)
        value = inner if isinstance(inner, str) and _yaml_value(inner) is not None else value
    return name.strip(), Text(value)


def merge(table: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy of the table with a dotted key set; an index one past a list's end appends."""

    def put(node: Any, parts: list[str]) -> Any:
        if not parts:
            return value
        head, *rest = parts
        if head.isdecimal():
            items = list(node) if isinstance(node, list | tuple) else []
            if int(head) > len(items):
                raise UserError(f"--set {name}: there are {len(items)} entries before .{head}")
            old = items[int(head)] if int(head) < len(items) else None
            return [*items[: int(head)], put(old, rest), *items[int(head) + 1 :]]
        return (
            {**node, head: put(node.get(head), rest)}
            if isinstance(node, dict)
            else {head: put(None, rest)}
        )

    merged: dict[str, Any] = put(table, name.split("."))
    return merged


def one_line(name: str) -> str:
    """A name that a file gave, with escapes for what a terminal would act on."""
    return name if name.isprintable() else repr(name)[1:-1]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that a person most likely meant, or None."""
    found = get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """Every field of a Struct by its name, in order."""
    hints = get_type_hints(struct, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(struct):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        metas = getattr(hints[field.name], "__metadata__", ())
        text = next((m.description for m in metas if m.description), "")
        extra: dict[str, Any] = next((m.extra for m in metas if m.extra), {})
        found[field.name] = Field(field.name, hints[field.name], default, text, extra)
    return found


def convert(value: Any, field: Field, place: Place) -> Any:
    """The value as the field's type, or a UserError: wrong type, out of bounds, or refused."""
    value = plain(_typed(value, field) if isinstance(value, Text) else value)
    for other, meaning in field.extra.get("also", {}).items():
        if same(value, other):
            value = meaning
    for refused, reason in field.extra.get("refused", {}).items():
        if value == refused:
            raise refuse(place, value, reason)
    try:
        made = msgspec.convert(value, field.hint)
    except msgspec.ValidationError:
        raise wrong(place, value, field.allowed) from None
    if isinstance(made, float) and not math.isfinite(made):
        raise wrong(place, value, field.allowed)
    if "only" in field.extra and made != field.extra["only"]:
        raise refuse(place, value, field.extra["why"])
    return made


def same(value: Any, other: Any) -> bool:
    """Equality under which true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def plain(value: Any) -> Any:
    """A tree without Text: a lone Text becomes what it reads as, one inside a tree a str."""
    if isinstance(value, Text):
        return _yaml_value(value)

    def strip(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: strip(inner) for name, inner in part.items()}
        if isinstance(part, list):
            return [strip(inner) for inner in part]
        return str(part) if isinstance(part, Text) else part

    return strip(value)


def _yaml_value(text: str) -> Any:
    try:
        return yaml.load(str(text), _Loader)
    except (yaml.YAMLError, RecursionError):
        return str(text)


def _typed(text: Text, field: Field) -> Any:
    """What a text without a type stands for, given the types that the key takes."""
    value = _yaml_value(text)
    takes_text = str in _members(field.hint)
    return str(text) if takes_text and not isinstance(value, dict | NoneType) else value


def wrong(place: Place, value: Any, allowed: str) -> UserError:
    """The error of a value that is not allowed."""
    return UserError(f"{place.origin}: {place.name} = {show(value)}: must be {allowed}")


def refuse(place: Place, value: Any, reason: str) -> UserError:
    """The error of a value that asks for a feature that is not there."""
    return UserError(
        f"{place.origin}: {place.name} = {show(value)} is not available in this version: {reason}"
    )


def show(value: Any) -> str:
    """A value as it stands in a file, on one line and at most 80 characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = repr(str(value))
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(show(part) for part in value)}]"
    elif isinstance(value, dict):
        parts = (f"{one_line(str(name))}: {show(part)}" for name, part in value.items())
        text = "{" + ", ".join(parts) + "}"
    else:
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _members(hint: Any) -> tuple[Any, ...]:
    """The plain types of a union, without Annotated."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for part in get_args(hint) for member in _members(part))
    return (hint,)


def _allowed(hint: Any, metas: tuple[msgspec.Meta, ...] = ()) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _allowed(parts[0], (*metas, *hint.__metadata__))
    if origin in (Union, UnionType):
        return " or ".join(_allowed(part, metas) for part in parts)
    if origin is Literal:
        names = [str(part) for part in parts]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if origin is tuple:
        if get_origin(parts[0]) is Literal:
            return f"a list of {', '.join(get_args(parts[0]))}"
        return f"a list of {'text' if parts[0] is str else 'tables'}"
    if hint is int or hint is float:
        noun = "a whole number" if hint is int else "a number"
        return noun + _bounds(metas)
    words = {bool: "true or false", str: "text", NoneType: "null"}
    return words.get(hint, "a table")


def _bounds(metas: tuple[msgspec.Meta, ...]) -> str:
    limits = {
        name: getattr(meta, name)
        for meta in metas
        for name in ("ge", "gt", "le", "lt")
        if getattr(meta, name) is not None
    }
    low = f" from {limits['ge']}" if "ge" in limits else ""
    low = f" above {limits['gt']}" if "gt" in limits else low
    high = f" to {limits['le']}" if "le" in limits else ""
    high = f" to less than {limits['lt']}" if "lt" in limits else high
    if low.startswith(" from") and not high:
        return f" of at least {limits['ge']}"
    return low + high
