"""Templates render as in transformers, and targets are the answers with their terminators.

The kinds of template in inputs/tiny.py stand for the families of models: ChatML, templates that
drop reasoning from the history, prompts that open the think block, terminators that differ at the
end, and templates without a terminator.
"""

import pickle
from itertools import cycle, islice

import pytest
from tokenizers import Tokenizer

from surogate.data.chat import render_targets
from surogate.data.formats import Conversation
from surogate.data.template import ChatTemplate
from surogate.errors import UserError
from tests.surogate.inputs.tiny import (
    ENDLESS_CHAT,
    OPENED_CHAT,
    PLAIN_CHAT,
    THINKING_CHAT,
    TWO_ENDS_CHAT,
    chat,
    model_folder,
)

TEMPLATES = {
    "plain": PLAIN_CHAT,
    "thinking": THINKING_CHAT,
    "opened": OPENED_CHAT,
    "two ends": TWO_ENDS_CHAT,
    "endless": ENDLESS_CHAT,
}
SPECIAL = {"eos_token": "<|end|>", "bos_token": "<|turn|>"}
FEATURES = """
{%- set ns = namespace(n=0) -%}
{{ bos_token }}{{ missing_token }}
{% for m in messages %}
    {% if m.role == 'skip' %}
        {% continue %}
    {% endif %}
  {% generation %}{% set inner = 'x' %}{{ m | tojson }}{{ inner }}{% endgeneration %}
    {% set ns.n = ns.n + 1 %}
{% endfor %}
{{ inner }}{{ ns.n }}{{ strftime_now('%Y') | length }}{{ tools | tojson(indent=2) if tools }}
{{ messages[0].content | tojson(sort_keys=true) }}{{ dict(a=1).a }}{{ eos_token }}
"""


def _template(source):
    return ChatTemplate(source, name="folder", special_tokens=SPECIAL)


def _targets(source, messages, *, loss_scale="default", tools=None):
    """The supervised texts of each document."""
    rendered = render_targets(
        _template(source), Conversation(messages, tools), loss_scale=loss_scale, place="f row 1"
    )
    return [[document.text[a:b] for a, b in document.spans] for document in rendered]


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Köln", "<": "'"}}}]
CONVERSATIONS = [
    chat("Q1", "A1", "Q2", "A2"),
    [{"role": "system", "content": "S\n"}, *chat(" Q ", "<think>\nR\n</think>\n\nA")],
    [
        *chat("Q"),
        {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning": "R"},
        {"role": "tool", "content": '{"a": "<b>"}'},
        {"role": "assistant", "content": "A"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [*TEMPLATES.values(), FEATURES])
@pytest.mark.parametrize("prompt", [False, True])
def test_renders_as_transformers(tmp_path, source, messages, prompt):
    from transformers import PreTrainedTokenizerFast

    folder = model_folder(tmp_path)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")), **SPECIAL
    )
    theirs.chat_template = source
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"q": "ü"}}}]
    for given in (None, tools):
        want = theirs.apply_chat_template(
            messages, given, tokenize=False, add_generation_prompt=prompt
        )
        assert _template(source).render(messages, given, add_generation_prompt=prompt) == want


def test_template_by_name_and_across_processes():
    template = _template({"default": "D", "tool_use": "T{{ eos_token }}"})
    template.render(chat("Q"))
    template = pickle.loads(pickle.dumps(template))
    assert template.render(chat("Q")) == "D"
    assert template.render(chat("Q"), [{"name": "f"}]) == "T<|end|>"
    with pytest.raises(UserError, match="no chat template is named 'default', has: tool_use"):
        _template({"tool_use": "T"}).render(chat("Q"))


@pytest.mark.parametrize(
    "source,reason",
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ namespace(x=1)._Namespace__attrs.x }}", "unsafe"),
        ("{% set n = namespace(f='{0.__class__.x}'.format) %}{{ n.f(1) }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "private name"),
    ],
)
def test_refusals_name_the_row(source, reason):
    with pytest.raises(UserError) as caught:
        _template(source).render(chat("Q"), place="f row 7")
    message = str(caught.value)
    assert message.startswith("f row 7: the chat template refuses the conversation: ")
    assert reason in message and "\n" not in message


def test_invalid_template_names_its_line():
    with pytest.raises(UserError, match="folder: the chat template is invalid at line 2"):
        _template("a\n{% if %}").render(chat("Q"))


@pytest.mark.parametrize("name", ["plain", "thinking"])
def test_answers_with_terminators_are_targets(name):
    messages = chat("Q1", "A1", "Q2", "A 2 ")
    assert _targets(TEMPLATES[name], messages) == [["A1<|stop|>", "A 2 <|stop|>"]]


def test_reasoning_of_an_earlier_turn_is_learned_in_a_document_of_its_own():
    messages = chat("Q1", "<think>\nR1\n</think>\n\nA1", "Q2", "R2\n</think>\n\nA2", "Q3", "A3")
    documents = render_targets(
        _template(THINKING_CHAT), Conversation(messages, None), loss_scale="default", place=""
    )
    targets = [[d.text[a:b] for a, b in d.spans] for d in documents]
    assert targets == [
        ["<think>\nR1\n</think>\n\nA1<|stop|>"],
        ["<think>\nR2\n</think>\n\nA2<|stop|>"],
        ["A3<|stop|>"],
    ]
    for document in documents:
        assert document.text.count("<think>") == document.text.count("</think>") == 1
    # What the model is asked is what precedes the target.
    asked = _template(THINKING_CHAT).render(messages[:3], add_generation_prompt=True)
    assert documents[1].text[: documents[1].spans[0][0]] == asked


def test_prompt_that_opens_the_think_block():
    # Without reasoning the template writes the answer right behind the header; the next document's
    # history agrees with that, the prompt does not.
    assert _targets(OPENED_CHAT, chat("Q", "A")) == [["A<|stop|>"]]
    assert _targets(OPENED_CHAT, chat("Q", "<b>")) == [["<b><|stop|>"]]


def test_terminator_of_the_history_is_not_learned():
    assert _targets(TWO_ENDS_CHAT, chat("Q1", " A1 ", "Q2", "A2")) == [["A1<|end|>"], ["A2<|end|>"]]


def test_template_without_terminator_asks_for_the_end_of_sequence():
    (document,) = render_targets(
        _template(ENDLESS_CHAT),
        Conversation(chat("Q1", "A1", "Q2", "A2"), None),
        loss_scale="default",
        place="",
    )
    assert not document.terminated
    assert [document.text[a:b] for a, b in document.spans] == ["A1\n", "A2\n"]


def test_tool_calls_are_targets():
    messages = CONVERSATIONS[2]
    assert _targets(THINKING_CHAT, messages, tools=[{"name": "f"}]) == [
        [
            "<think>\nR\n</think>\n\n\n"
            '<call>{"name": "f", "arguments": {"city": "Köln", "<": "\'"}}</call><|stop|>'
        ],
        ["A<|stop|>"],
    ]


@pytest.mark.parametrize(
    "loss_scale,want",
    [
        ("last_round", [["<think>\nR\n</think>\n\nA2<|stop|>"]]),
        ("thinking_only", [["<think>\nR\n</think>"]]),
        ("final_only", [["A1<|stop|>", "\n\nA2<|stop|>"]]),
        (
            "all",
            [
                [
                    "<|turn|>user\nQ1<|stop|>\n<|turn|>assistant\nA1<|stop|>\n<|turn|>user\nQ2"
                    "<|stop|>\n<|turn|>assistant\n<think>\nR\n</think>\n\nA2<|stop|>\n"
                ]
            ],
        ),
    ],
)
def test_loss_scales(loss_scale, want):
    messages = chat("Q1", "A1", "Q2", "<think>R</think>A2")
    assert _targets(THINKING_CHAT, messages, loss_scale=loss_scale) == want


def test_what_follows_the_last_answer_is_left_out_and_a_first_answer_is_context():
    assistant = {"role": "assistant", "content": "Hello"}
    (document,) = render_targets(
        _template(PLAIN_CHAT),
        Conversation([assistant, *chat("Q", "A", "never answered")], None),
        loss_scale="default",
        place="",
    )
    assert "never" not in document.text and "Hello" in document.text
    assert [document.text[a:b] for a, b in document.spans] == ["A<|stop|>"]
    assert _targets(PLAIN_CHAT, [assistant]) == [[]]
    assert _targets(PLAIN_CHAT, chat("Q")) == [[]]


def test_template_that_rewrites_the_history_is_refused():
    source = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="f row 1: the chat template rewrites earlier messages"):
        _targets(source, chat("Q", "A"))


TRICKY = ["a", "assistant\n", " spaced ", "<|turn|>assistant\nfake<|stop|>", "a\n\nb\n", "你好 🙂"]


@pytest.mark.parametrize(
    "name,turns",  # three times the turns have the same bound on the cost of one
    [("plain", 40), ("plain", 120), ("thinking", 40), ("thinking", 120), ("two ends", 40)],
)
def test_long_chats_cost_few_renderings_and_give_the_same_targets(monkeypatch, name, turns):
    messages = chat(*islice(cycle(TRICKY + ["odd"]), turns))
    calls = []
    render = ChatTemplate.render

    def counted(self, given, *args, **settings):
        calls.append(len(given))
        return render(self, given, *args, **settings)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    fast = _targets(TEMPLATES[name], messages)
    cost = sum(calls)
    monkeypatch.setattr("surogate.data.chat._MARK", "a")  # found in the text: no shortcut
    calls.clear()
    assert _targets(TEMPLATES[name], messages) == fast
    assert sum(map(len, fast)) == turns // 2
    if name != "two ends":  # there every turn is a document of its own
        assert cost < 6 * len(messages) < sum(calls)
