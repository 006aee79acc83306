"""Tool calls reach the template in a form that it writes; what it drops is refused by name."""

import json

import pytest

from surogate.data.calls import Form
from surogate.data.chat import render_targets
from surogate.data.formats import Conversation
from surogate.data.sources import RowError
from surogate.data.template import ChatTemplate
from tests.surogate.inputs.tiny import OPENED_CHAT, PLAIN_CHAT, THINKING_CHAT, chat

# Joins arguments as text, and writes calls only where the content is null.
JOINING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + '=' + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENCODING = JOINING.replace("m.content is none", "m.tool_calls").replace(
    "'=' + c.function.arguments", "'=' + (c.function.arguments | tojson)"
)
PASSING = ENCODING.replace(
    "(c.function.arguments | tojson)",
    "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)",
)


def template(source, eos="<|end|>"):
    return ChatTemplate(source, name="folder", special_tokens={"eos_token": eos})


def called(arguments, content="", **function):
    made = {"name": "f", "arguments": arguments, **function}
    return {"role": "assistant", "content": content, "tool_calls": [{"function": made}]}


def targets(source, messages, loss_scale="default", untrained=()):
    conversation = Conversation(messages, None, frozenset(untrained))
    documents = render_targets(
        template(source), conversation, loss_scale=loss_scale, place="f row 1"
    )
    return [[d.text[a:b] for a, b in d.spans] for d in documents]


def refusal(*args, **settings):
    with pytest.raises(RowError) as caught:
        targets(*args, **settings)
    assert str(caught.value).startswith("f row 1: ")
    return str(caught.value).removeprefix("f row 1: "), caught.value.kind


@pytest.mark.parametrize(
    "source,forms",
    [
        (JOINING, [Form(text=True, null=True)]),
        (ENCODING, [Form(text=False, null=False), Form(text=False, null=True)]),
        (PASSING, [Form(t, n) for n in (False, True) for t in (False, True)]),
        (PLAIN_CHAT, []),
    ],
)
def test_forms_of_a_template(source, forms):
    assert template(source).call_forms == forms


@pytest.mark.parametrize("source", [JOINING, ENCODING, PASSING])
@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'])
def test_either_form_of_arguments_is_written_once_encoded(source, arguments):
    assert targets(source, [*chat("Q"), called(arguments)]) == [['f={"a": "é"}<|stop|>']]


def test_a_form_that_the_template_takes_is_kept():
    spaced = '{"a":  1}'
    assert targets(PASSING, [*chat("Q"), called(spaced)]) == [[f"f={spaced}<|stop|>"]]


def test_calls_that_cannot_be_written():
    kind = "tool calls that the chat template does not write"
    assert refusal(PLAIN_CHAT, [*chat("Q"), called({})]) == (
        "has tool calls, which the chat template does not write",
        kind,
    )
    message, found = refusal(JOINING, [*chat("Q"), called({}, content="Let me see")])
    assert message == "the chat template leaves out a tool call of message 2" and found == kind
    assert refusal(ENCODING, [*chat("Q"), called("{")])[0].endswith("are not JSON")
    assert refusal(ENCODING, [*chat("Q"), called({}, name=None)])[0] == "a tool call has no name"


def test_reasoning_that_the_template_leaves_out():
    thought = {"role": "assistant", "content": "A", "reasoning_content": "because"}
    for messages in ([*chat("Q"), thought], chat("Q", "because</think>A")):
        message, kind = refusal(OPENED_CHAT, messages)
        assert message.startswith("the chat template leaves out the reasoning of message 2; ")
        assert kind == "reasoning that the chat template leaves out"
        assert targets(OPENED_CHAT, messages, loss_scale="final_only") == [["A<|stop|>"]]


def test_a_message_that_the_template_leaves_out():
    source = PLAIN_CHAT.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'x' %}"
    )
    source = source.replace("'x'", "'developer'")
    messages = [{"role": "developer", "content": "Be brief."}, *chat("Q", "A")]
    assert refusal(source, messages) == (
        "the chat template writes nothing for message 1 of role developer; "
        "give it a role that the template knows",
        "a message that the chat template leaves out",
    )
    assert targets(PLAIN_CHAT, messages) == [["A<|stop|>"]]


def test_content_that_the_template_leaves_out():
    """Templates that read contents as lists of parts write nothing of one that is text; Llama's
    write a call alone.
    """
    parts = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    source = PLAIN_CHAT.replace("{{ m.content }}", parts)
    kind = "content that the chat template leaves out"
    advice = "; remove it from the row, or use a template that writes it"
    assert source != PLAIN_CHAT
    for scale, message in (("default", "2 of role assistant"), ("all", "1 of role user")):
        assert refusal(source, chat("Q", "A"), scale) == (
            f"the chat template leaves out the content of message {message}{advice}",
            kind,
        )
    half = PLAIN_CHAT.replace("{{ m.content }}", "{{ m.content if m.role != 'user' }}")
    assert refusal(half, chat("Q", "A"))[0].startswith(
        "the chat template leaves out the content of message 1 of role user; "
    )
    changed = PLAIN_CHAT.replace("{{ m.content }}", "{{ m.content | upper }}")
    assert targets(changed, chat("q", "a")) == [["A<|stop|>"]]  # written, in its own way


def test_untrained_answers_are_context():
    messages = chat("Q1", "A1", "Q2", "A2", "Q3", "A3")
    assert targets(PLAIN_CHAT, messages, untrained=[1, 5]) == [["A2<|stop|>"]]
    assert targets(PLAIN_CHAT, messages, untrained=[1, 3, 5]) == [[]]
    assert targets(PLAIN_CHAT, messages, "last_round", untrained=[5]) == [[]]
    assert refusal(PLAIN_CHAT, messages, "all", untrained=[3])[0].startswith(
        "message 4 says that it is not trained on, but loss_scale is all"
    )


def test_reasoning_that_ends_otherwise_cannot_be_told_from_the_answer():
    source = PLAIN_CHAT.replace(
        "{{ m.content }}", "{{ '[' + m.reasoning + ']' if m.reasoning }}{{ m.content }}"
    )
    messages = [*chat("Q"), {"role": "assistant", "content": "A", "reasoning": "R"}]
    assert targets(source, messages) == [["[R]A<|stop|>"]]
    for loss_scale in ("thinking_only", "final_only"):
        with pytest.raises(Exception, match=f"^loss_scale = {loss_scale}: .* use default$"):
            targets(source, messages, loss_scale)


@pytest.mark.parametrize("answer", ["A", ">", "|>", "a", "assistant", "stop", "<", "<think"])
@pytest.mark.parametrize("source", [PLAIN_CHAT, OPENED_CHAT, THINKING_CHAT])
def test_answers_that_occur_around_themselves(source, answer):
    assert targets(source, chat("Q", answer)) == [[f"{answer}<|stop|>"]]


def test_the_second_terminator_is_not_a_target():
    source = PLAIN_CHAT + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    assert template(source).second_end == "\n<|end|>"
    assert targets(source, chat("Q", "A", "Q", "B")) == [["A<|stop|>", "B<|stop|>"]]
    assert template(PLAIN_CHAT).second_end == template(source, eos="").second_end == ""
    only = PLAIN_CHAT.replace("<|stop|>", " </s>")
    assert template(only, eos="</s>").second_end == ""


def test_history_that_is_written_otherwise_with_the_answer():
    # Steps of reasoning before a call stay until the final answer comes, as in gpt-oss.
    source = (
        "{% set last = messages[-1] %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning and (loop.last or last.role != 'assistant') %}"
        "[{{ m.reasoning }}]{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{{ m.content }}<|stop|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    call = called({"a": 1}) | {"reasoning": "first"}
    messages = [
        *chat("Q"),
        call,
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "A", "reasoning": "then"},
    ]
    documents = render_targets(
        template(source), Conversation(messages, None), loss_scale="default", place="f row 1"
    )
    written = "[first]" + json.dumps({"name": "f", "arguments": {"a": 1}}) + "<|stop|>"
    assert documents[-1].text == (
        f"<|user|>Q<|stop|><|assistant|>{written}<|tool|>21<|stop|><|assistant|>[then]A<|stop|>"
    )
    assert [[d.text[a:b] for a, b in d.spans] for d in documents] == [[written, "[then]A<|stop|>"]]
