"""Tool calls in the form that a chat template can write.

Rows give the arguments of a call as an object or as JSON text, and the content beside it as text
or null. Templates differ in what they take: one writes JSON text twice encoded, another joins
arguments to a string, another writes calls only beside a content that is null. So each template is
tried once on a call of each form. A row keeps its form where the template writes it, and is turned
into the first form that it does write otherwise.
"""

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from surogate.data.sources import RowError

_NAME, _KEY, _VALUE = "look_up_weather", "town_name", "Reykjavik"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks up the weather.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]


class Form(NamedTuple):
    """How a call is given: its arguments as JSON text, its content as null."""

    text: bool
    null: bool


def forms(render: Render) -> list[Form]:
    """The forms in which a template writes a call. render raises RowError where it refuses."""
    found = []
    for form in (Form(text, null) for null, text in product((False, True), repeat=2)):
        arguments: Any = {_KEY: _VALUE}
        function = {"name": _NAME, "arguments": json.dumps(arguments) if form.text else arguments}
        call = {"type": "function", "id": "call00001", "function": function}
        question = {"role": "user", "content": "How is it there?"}
        answer = {
            "role": "assistant",
            "content": None if form.null else "",
            "tool_calls": [call],
        }
        try:
            written = render([question, answer], [_TOOL])[len(render([question], [_TOOL])) :]
        except RowError:
            continue
        if _NAME in written and _VALUE in written and "\\" not in written:
            found.append(form)
    return found


def fitted(
    messages: Sequence[dict[str, Any]], allowed: Sequence[Form], place: str
) -> list[dict[str, Any]]:
    """The messages, some with calls, in a form that the template writes: one of those allowed."""
    if not allowed:
        raise RowError(
            f"{place}: has tool calls, which the chat template does not write",
            "tool calls that the chat template does not write",
        )
    return [_fit(m, allowed, place) if m.get("tool_calls") else m for m in messages]


def _fit(message: dict[str, Any], allowed: Sequence[Form], place: str) -> dict[str, Any]:
    calls = message["tool_calls"]
    functions = [call["function"] if "function" in call else call for call in calls]
    if not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
        raise RowError(f"{place}: a tool call has no name", "malformed tool calls")
    text = any(isinstance(function.get("arguments"), str) for function in functions)
    form = min(allowed, key=lambda form: (form.text != text, form.null))
    made = [
        {**f, "arguments": _converted(f.get("arguments", {}), form.text, place)} for f in functions
    ]
    wrapped = [
        {**call, "function": function} if "function" in call else function
        for call, function in zip(calls, made, strict=True)
    ]
    content = None if form.null and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": wrapped}


def _converted(arguments: Any, text: bool, place: str) -> Any:
    if isinstance(arguments, str) == text:
        return arguments
    if text:
        return json.dumps(arguments, ensure_ascii=False)
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        raise RowError(
            f"{place}: the arguments of a tool call are not JSON", "malformed tool calls"
        ) from None
