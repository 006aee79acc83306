"""What a row says: raw text, or a conversation. Every other layout becomes one of the two.

Layouts: `text` (one column), `instruction` (instruction, input, output: a conversation of one
round) and `conversation` (a list of messages, with role/content or ShareGPT's from/value). `auto`
looks at the first row: a list of messages, else a pair of columns that is known for instructions
and answers, else the text column. Nothing is ever turned into text silently: a null, a number or an
object where text belongs is a RowError that names file, row and column.

A message may say whether it is trained on: `train` (true or false) or `weight` (1 or 0).
"""

import re
from typing import Any, Literal, NamedTuple

import orjson

from surogate.config import DatasetConfig
from surogate.data.sources import Row, RowError, listed
from surogate.errors import UserError

_MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
# (instruction, output) columns; `input` is the third one of the first layout only.
_PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("query", "response"),
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("input", "output"),
)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SWITCHES = ("train", "weight")  # keys of a message that say if it is a target
_PLACEHOLDER = re.compile(r"\{(instruction|input)\}")


class Text(NamedTuple):
    """A document of raw text: every token of it is a target."""

    text: str


class Conversation(NamedTuple):
    """Messages as a chat template takes them, and the tools that the model may call.

    untrained are the indices of messages that say that they are no targets.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    untrained: frozenset[int] = frozenset()


class Layout(NamedTuple):
    """How the rows of one data set are read: its settings and the columns they resolve to."""

    config: DatasetConfig
    kind: Literal["text", "instruction", "conversation"]
    instruction: str = ""
    input: str | None = None
    output: str = ""
    messages: str = ""
    source: int = 0  # which data set of the run it is


def layout_of(config: DatasetConfig, first: Row) -> Layout:
    """Resolves the settings of a data set by its first row.

    Raises UserError when the type is `auto` and the columns tell nothing.
    """
    if config.type == "text":
        return Layout(config, "text")
    if config.type == "conversation":
        return Layout(config, "conversation", messages=_messages_column(config, first) or "")
    if config.type == "instruction":
        return _instruction_layout(config, first) or Layout(
            config,
            "instruction",
            config.instruction_field or "instruction",
            config.input_field,
            config.output_field or "output",
        )
    messages = _messages_column(config, first)
    if messages in first.data:
        return Layout(config, "conversation", messages=messages or "")
    layout = _instruction_layout(config, first)
    if layout is not None:
        return layout
    if config.text_field in first.data:
        return Layout(config, "text")
    raise UserError(
        f"{first.place}: type auto does not know the columns {_columns(first)}; "
        "set type and the names of its columns"
    )


def _messages_column(config: DatasetConfig, row: Row) -> str | None:
    if config.messages_field != "messages":
        return config.messages_field
    return next((name for name in _MESSAGE_COLUMNS if name in row.data), config.messages_field)


def _instruction_layout(config: DatasetConfig, row: Row) -> Layout | None:
    if config.instruction_field is None and config.output_field is None:
        pairs: tuple[tuple[str, str], ...] = _PAIRS
    else:
        pairs = ((config.instruction_field or "instruction", config.output_field or "output"),)
    for instruction, output in pairs:
        if instruction in row.data and output in row.data:
            extra = config.input_field
            if extra is None and instruction == "instruction" and "input" in row.data:
                extra = "input"
            return Layout(config, "instruction", instruction, extra, output)
    return None


def read_row(layout: Layout, row: Row) -> Text | Conversation:
    """Reads one row. Raises RowError that names file, row and column."""
    if layout.kind == "text":
        return Text(_text(row, layout.config.text_field, "text_field"))
    if layout.kind == "instruction":
        return _instruction(layout, row)
    return _conversation(layout, row)


def _columns(row: Row) -> str:
    return listed(row.data) or "none"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", type(None): "null", str: "text"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "another type")


def _column(row: Row, column: str, setting: str) -> Any:
    if column not in row.data:
        raise RowError(
            f"{row.place}: needs column '{column}', has: {_columns(row)}; set {setting}",
            f"no column '{column}'",
        )
    return row.data[column]


def _text(row: Row, column: str, setting: str) -> str:
    value = _column(row, column, setting)
    if not isinstance(value, str):
        raise RowError(
            f"{row.place}: column '{column}' must be text, got {_kind(value)}",
            f"column '{column}' is not text",
        )
    return value


def _optional_text(row: Row, column: str | None, setting: str) -> str:
    """The text of a column that may be null; the column itself must be there once it is named."""
    if column is None or _column(row, column, setting) is None:
        return ""
    return _text(row, column, setting)


def _instruction(layout: Layout, row: Row) -> Conversation:
    config = layout.config
    values = {
        "instruction": _text(row, layout.instruction, "instruction_field"),
        "input": _optional_text(row, layout.input, "input_field"),
    }
    answer = _text(row, layout.output, "output_field")
    form = config.prompt_format if values["input"] else config.prompt_format_no_input
    prompt = _PLACEHOLDER.sub(lambda match: values[match[1]], form)
    system = ""
    if config.system_prompt_type == "field":
        if config.system_prompt_field is None:
            raise UserError(f"{config.path}: system_prompt_type field needs system_prompt_field")
        system = _optional_text(row, config.system_prompt_field, "system_prompt_field")
    elif config.system_prompt_type == "fixed":
        if config.system_prompt is None:
            raise UserError(f"{config.path}: system_prompt_type fixed needs system_prompt")
        system = config.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Conversation(messages, None)


def _conversation(layout: Layout, row: Row) -> Conversation:
    config = layout.config
    raw = _column(row, layout.messages, "messages_field")
    if not isinstance(raw, list):
        raise RowError(
            f"{row.place}: column '{layout.messages}' must be a list, got {_kind(raw)}",
            f"column '{layout.messages}' is not a list",
        )
    if not raw:
        raise RowError(f"{row.place}: column '{layout.messages}' has no messages", "no messages")
    names = config.message_property_mappings
    read = [_message(value, f"{row.place} message {i}", names) for i, value in enumerate(raw, 1)]
    messages = [message for message, _ in read]
    untrained = frozenset(i for i, (_, trained) in enumerate(read) if not trained)
    system = _optional_text(row, config.system_field, "system_field")
    if system:
        if messages[0]["role"] == "system":
            raise RowError(
                f"{row.place}: has a system message and column '{config.system_field}'; keep one",
                "two system messages",
            )
        messages.insert(0, {"role": "system", "content": system})
        untrained = frozenset(i + 1 for i in untrained)
    if config.completion_field is not None:
        answer = _text(row, config.completion_field, "completion_field")
        messages.append({"role": "assistant", "content": answer})
    column = config.tools_field or ("tools" if "tools" in row.data else None)
    return Conversation(messages, _tools(row, column), untrained)


def _message(value: Any, place: str, names: dict[str, str]) -> tuple[dict[str, Any], bool]:
    """A message with role and content first, without keys that hold null; and if it may be a
    target.
    """
    if not isinstance(value, dict):
        raise RowError(
            f"{place}: must be an object, got {_kind(value)}", "a message that is not an object"
        )
    role_key = names.get("role") or ("from" if "role" not in value and "from" in value else "role")
    content_key = names.get("content") or (
        "value" if "content" not in value and "value" in value else "content"
    )
    calls_key = names.get("tool_calls", "tool_calls")
    if role_key not in value:
        raise _lacks(place, role_key, value)
    given = value[role_key]
    role = _ROLES.get(given, given) if isinstance(given, str) else ""
    if role not in _KNOWN_ROLES:
        known = ", ".join((*_KNOWN_ROLES, *_ROLES))
        raise RowError(
            f"{place}: unknown role {repr(given)[:40]}; known: {known}", "an unknown role"
        )
    calls = value.get(calls_key)
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RowError(
            f"{place}: '{calls_key}' must be a list of objects, got {_kind(calls)}",
            "malformed tool calls",
        )
    trained = _trained(value, names, place)
    if trained and role != "assistant":
        raise _misled(f"{place}: only what the assistant says can be trained on, this is {role}")
    used = {role_key, content_key, calls_key, *(names.get(key, key) for key in _SWITCHES)}
    extra = {key: item for key, item in value.items() if key not in used and item is not None}
    content = _content(value, content_key, place, may_lack=bool(calls))
    message = {"role": role, "content": content, **extra}
    if calls:
        message["tool_calls"] = calls
    return message, trained is not False


def _lacks(place: str, key: str, message: dict[str, Any]) -> RowError:
    return RowError(
        f"{place}: needs '{key}', has: {listed(message)}; set message_property_mappings",
        f"a message without '{key}'",
    )


def _misled(message: str) -> RowError:
    return RowError(message, "a train or weight that cannot be followed")


def _trained(value: dict[str, Any], names: dict[str, str], place: str) -> bool | None:
    """What a message says of being a target; None if it says nothing."""
    said = set()
    for name in _SWITCHES:
        key = names.get(name, name)
        switch = value.get(key)
        if switch is not None:
            if switch not in (0, 1) or (name == "train" and not isinstance(switch, bool)):
                takes = "true or false" if name == "train" else "0 or 1 (shares are not there yet)"
                raise _misled(f"{place}: '{key}' must be {takes}, got {repr(switch)[:40]}")
            said.add(bool(switch))
    if len(said) > 1:
        raise _misled(f"{place}: train and weight contradict each other; keep one")
    return said.pop() if said else None


def _content(value: dict[str, Any], key: str, place: str, *, may_lack: bool) -> str:
    content = value.get(key)
    if content is None and may_lack:  # calls.py finds out if the template wants a null
        return ""
    if key not in value:
        raise _lacks(place, key, value)
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
        raise RowError(
            f"{place}: '{key}' has parts that are not text; only text is supported",
            "a message with parts that are not text",
        )
    if not isinstance(content, str):
        raise RowError(
            f"{place}: '{key}' must be text, got {_kind(content)}",
            f"a message whose '{key}' is not text",
        )
    return content


def _tools(row: Row, column: str | None) -> list[dict[str, Any]] | None:
    if column is None:
        return None
    value = _column(row, column, "tools_field")
    if isinstance(value, str) and value.strip():
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise RowError(
                f"{row.place}: column '{column}' is invalid JSON: {error.msg}", "malformed tools"
            ) from None
    if not value:
        return None
    if not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise RowError(
            f"{row.place}: column '{column}' must be a list of objects", "malformed tools"
        )
    return value
