"""Every layout becomes text or a conversation; what does not fit is named by file, row, column."""

import pytest

from surogate.config import DatasetConfig
from surogate.data.formats import Conversation, Text, layout_of, read_row
from surogate.data.sources import Row, RowError
from surogate.errors import UserError


def _read(data, *, number=3, **settings):
    config = DatasetConfig(path="f.jsonl", **{"type": "auto", **settings})
    row = Row("f.jsonl", number, data)
    return read_row(layout_of(config, row), row)


def _error(data, **settings):
    with pytest.raises(UserError) as caught:
        _read(data, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _said(record):
    assert isinstance(record, Conversation)
    return [(m["role"], m["content"]) for m in record.messages]


MESSAGES = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
ROUND = [("user", "Q"), ("assistant", "A")]


@pytest.mark.parametrize(
    "data",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "input": "", "output": "A", "text": "all of it"},
        {"instruction": "Q", "input": None, "output": "A"},
        {"query": "Q", "response": "A"},
        {"question": "Q", "answer": "A"},
        {"prompt": "Q", "completion": "A"},
    ],
)
def test_auto_finds_the_round(data):
    assert _said(_read(data)) == ROUND


def test_auto_finds_text_and_gives_up_by_name():
    assert _read({"text": "words"}) == Text("words")
    assert _read({"body": "words"}, text_field="body") == Text("words")
    assert _error({"x": 1, "y": 2}) == (
        "f.jsonl row 3: type auto does not know the columns x, y; "
        "set type and the names of its columns"
    )


def test_instruction_settings():
    data = {"ask": "{input} of {x}", "more": "{instruction}", "say": "A", "sys": "S"}
    fields = {"instruction_field": "ask", "input_field": "more", "output_field": "say"}
    record = _read(
        data,
        type="instruction",
        **fields,
        prompt_format="<{instruction}|{input}>",
        system_prompt_type="field",
        system_prompt_field="sys",
    )
    # Placeholders are filled once: braces in the data stay as they are.
    assert _said(record) == [
        ("system", "S"),
        ("user", "<{input} of {x}|{instruction}>"),
        ("assistant", "A"),
    ]
    fixed = {"system_prompt_type": "fixed", "system_prompt": "F"}
    no_input = {"prompt_format_no_input": "[{instruction}]"}
    record = _read({**data, "more": ""}, type="instruction", **fields, **fixed, **no_input)
    assert _said(record)[:2] == [("system", "F"), ("user", "[{input} of {x}]")]


def test_conversation_settings():
    data = {
        "turns": [{"who": "user", "what": "Q", "acts": None}],
        "sys": "S",
        "done": "A",
        "functions": '[{"name": "f"}]',
    }
    record = _read(
        data,
        type="conversation",
        messages_field="turns",
        system_field="sys",
        completion_field="done",
        tools_field="functions",
        message_property_mappings={"role": "who", "content": "what", "tool_calls": "acts"},
    )
    assert _said(record) == [("system", "S"), *ROUND]
    assert record.tools == [{"name": "f"}]


def test_messages_keep_what_templates_read():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "R"},
        {"role": "tool", "content": "2", "name": "f", "tool_calls": None},
    ]
    record = _read({"messages": messages, "tools": [{"name": "f"}]})
    assert record.messages == [
        {"role": "user", "content": "Q!"},
        {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "content": "2", "name": "f"},
    ]
    assert record.tools == [{"name": "f"}]


INSTRUCTION = {"type": "instruction"}
CHAT = {"type": "conversation"}


@pytest.mark.parametrize(
    "data,settings,message",
    [
        (
            {"Instruction": "Q", "output": "A"},
            INSTRUCTION,
            "needs column 'instruction', has: Instruction, output; set instruction_field",
        ),
        ({"instruction": "Q"}, INSTRUCTION, "needs column 'output', has: instruction"),
        (
            {"instruction": "Q", "output": {"a": 1}},
            INSTRUCTION,
            "column 'output' must be text, got an object",
        ),
        (
            {"instruction": "Q", "output": None},
            INSTRUCTION,
            "column 'output' must be text",
        ),
        (
            {"instruction": 7, "output": "A"},
            INSTRUCTION,
            "column 'instruction' must be text",
        ),
        (
            {"instruction": "Q", "output": "A"},
            INSTRUCTION | {"input_field": "in"},
            "needs column 'in",
        ),
        ({"body": "t"}, {"type": "text"}, "needs column 'text', has: body; set text_field"),
        ({"text": ["t"]}, {"type": "text"}, "column 'text' must be text, got a list"),
        ({"messages": []}, CHAT, "column 'messages' has no messages"),
        ({"messages": "Q"}, CHAT, "column 'messages' must be a list, got text"),
        ({"text": "t"}, CHAT, "needs column 'messages', has: text; set messages_field"),
        ({"messages": ["Q"]}, CHAT, "message 1: must be an object, got text"),
        ({"messages": [{"content": "Q"}]}, CHAT, "message 1: needs 'role', has: content; set"),
        ({"messages": [{"role": "user"}]}, CHAT, "message 1: needs 'content', has: role; set"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": None}]},
            CHAT,
            "message 3: 'content' must be text, got null",
        ),
        (
            {"messages": [{"role": "user", "content": {}}]},
            CHAT,
            "message 1: 'content' must be text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            CHAT,
            "message 1: 'content' has parts that are not text",
        ),
        ({"messages": [{"role": "owl", "content": "Q"}]}, CHAT, "message 1: unknown role 'owl'"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": ["f"]}]},
            CHAT,
            "message 1: 'tool_calls' must be a list of objects",
        ),
        ({"messages": MESSAGES, "tools": "[x"}, CHAT, "column 'tools' is invalid JSON"),
        ({"messages": MESSAGES, "tools": "7"}, CHAT, "column 'tools' must be a list of objects"),
        (
            {"messages": [{"role": "system", "content": "S"}, *MESSAGES], "sys": "T"},
            CHAT | {"system_field": "sys"},
            "has a system message and column 'sys'; keep one",
        ),
    ],
)
def test_faults_name_row_and_column(data, settings, message):
    place, got = _error(data, **settings).split(message, 1)[0], _error(data, **settings)
    assert message in got and place in ("f.jsonl row 3 ", "f.jsonl row 3: ")


def _untrained(*switches, **settings):
    messages = [m | s for m, s in zip(MESSAGES * 2, switches, strict=True)]
    record = _read({"messages": messages}, **settings)
    assert isinstance(record, Conversation)
    assert not any({"train", "weight"} & message.keys() for message in record.messages)
    return record.untrained


def test_messages_say_if_they_are_trained_on():
    assert _untrained({}, {}, {}, {}) == frozenset()
    assert _untrained({"train": False}, {"train": False}, {}, {"train": True}) == {0, 1}
    assert _untrained({}, {"weight": 0}, {"weight": None}, {"weight": 1.0}) == {1}
    assert _untrained({}, {"weight": 0, "train": False}, {}, {}) == {1}
    named = {"message_property_mappings": {"train": "learn"}}
    record = _read({"messages": [MESSAGES[0], MESSAGES[1] | {"learn": False}]}, **named)
    assert record == Conversation(MESSAGES, None, frozenset({1}))


def test_a_system_column_moves_the_untrained():
    data = {"messages": [MESSAGES[0], MESSAGES[1] | {"train": False}], "sys": "S"}
    assert _read(data, system_field="sys").untrained == {2}


@pytest.mark.parametrize(
    "index,switch,reason",
    [
        (1, {"train": 1}, "'train' must be true or false, got 1"),
        (1, {"train": "yes"}, "'train' must be true or false, got 'yes'"),
        (1, {"weight": 0.5}, "'weight' must be 0 or 1 (shares are not there yet), got 0.5"),
        (1, {"weight": 1, "train": False}, "train and weight contradict each other; keep one"),
        (0, {"train": True}, "only what the assistant says can be trained on, this is user"),
    ],
)
def test_switches_that_mean_nothing(index, switch, reason):
    messages = [*MESSAGES]
    messages[index] = messages[index] | switch
    assert _error({"messages": messages}) == f"f.jsonl row 3 message {index + 1}: {reason}"


def test_faults_are_of_kinds():
    for data, kind in (
        ({"messages": []}, "no messages"),
        ({"messages": ["Hi"]}, "a message that is not an object"),
        ({"messages": [{"content": "Hi"}]}, "a message without 'role'"),
        ({"messages": [{"role": "user"}]}, "a message without 'content'"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "a message whose 'content' is not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "a message with parts that are not text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            "malformed tool calls",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "weight": 0.5}]},
            "a train or weight that cannot be followed",
        ),
        ({"messages": [{"role": [], "content": ""}]}, "an unknown role"),
        ({"instruction": "Q", "output": None}, "column 'output' is not text"),
        ({"messages": MESSAGES, "tools": "["}, "malformed tools"),
    ):
        with pytest.raises(RowError) as caught:
            _read(data)
        assert caught.value.kind == kind
