"""Which text of a conversation is a target, found from any chat template without markers.

The target of an assistant turn t is defined by what the model meets when it answers:

    prompt = template(messages before t, with the generation prompt)
    answer = template(messages up to t) without the prompt

The answer runs up to the terminator that the template writes after the content (`<|im_end|>`); the
newline behind the terminator is not a target, and neither is the empty think block that a template
puts before an answer without reasoning. One document holds the conversation up to its last
assistant turn. An earlier turn is a target in it only if the document begins with that turn's
prompt and goes on with its answer, character by character. Where the template writes history
otherwise (reasoning dropped, another terminator), the earlier turn gets a document of its own that
ends with it, so that each turn is learned exactly as it will be asked for. An assistant turn with
nothing before it is context only.

Each check costs two renderings, which makes a long chat quadratic. Where no message has reasoning
or tool calls, one rendering with a mark behind each message's content finds every turn instead,
under two conditions: without the marks it is the same text, and headers and terminators equal the
ones found by the definition above.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from surogate.data.formats import Conversation
from surogate.data.template import ChatTemplate, reasoning_of
from surogate.errors import UserError

LossScale = Literal["default", "last_round", "all", "thinking_only", "final_only"]

_EMPTY_THINKING = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
_MARK = "\ue0f4\uf8d2\ue0f4"  # private characters, which no template looks for


class Rendered(NamedTuple):
    """A document. spans are the (begin, end) of its targets in characters, ascending, disjoint.

    terminated is False when the template writes nothing after the last answer, so that a reader
    of the document must add the end-of-sequence token.
    """

    text: str
    spans: list[tuple[int, int]]
    terminated: bool


class _Answer(NamedTuple):
    """An assistant turn as the last one: rendered[:prompt] is asked, [begin:end] is the target."""

    turn: int
    rendered: str
    prompt: int
    begin: int
    end: int
    tail: str  # what follows the content up to end: the terminator
    terminated: bool

    @property
    def target(self) -> str:
        return self.rendered[self.begin : self.end]


def render_targets(
    template: ChatTemplate, conversation: Conversation, *, loss_scale: LossScale, place: str
) -> list[Rendered]:
    """Documents of one conversation, with their targets.

    loss_scale: `default` every assistant turn; `last_round` the last one; `all` the whole text;
    `thinking_only` and `final_only` every assistant turn, up to the end of `</think>` or from
    there. Raises UserError that begins with place when the template refuses the conversation or
    does not write an answer behind its prompt.
    """
    chat = _Chat(template, conversation, place)
    turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i > 0]
    if loss_scale == "all" or not turns:
        text = chat.render(len(chat.messages))
        terminated = not turns or chat.answer(turns[-1]).terminated
        return [Rendered(text, [(0, len(text))] if loss_scale == "all" else [], terminated)]
    pending = turns[-1:] if loss_scale == "last_round" else turns
    documents = []
    while pending:
        answer = chat.answer(pending[-1])
        found = {**chat.earlier(pending, answer), pending[-1]: (answer.begin, answer.end)}
        pending = [turn for turn in pending if turn not in found]
        spans = [_narrow(answer.rendered, *found[turn], loss_scale) for turn in sorted(found)]
        targets = [span for span in spans if span[0] < span[1]]
        documents.append(Rendered(answer.rendered, targets, answer.terminated))
    return documents[::-1]


def turn_end(template: ChatTemplate) -> str:
    """The terminator that the template writes behind an answer; empty if it writes none.

    Raises UserError when it refuses a plain question with its answer.
    """
    messages = [
        {"role": "user", "content": "What is the answer?"},
        {"role": "assistant", "content": "Forty-two."},
    ]
    answer = _Chat(template, Conversation(messages, None), "").answer(1)
    return answer.tail if answer.terminated else ""


def _narrow(text: str, begin: int, end: int, loss_scale: LossScale) -> tuple[int, int]:
    if loss_scale not in ("thinking_only", "final_only"):
        return begin, end
    mark = text.find("</think>", begin, end)
    middle = begin if mark < 0 else mark + len("</think>")
    return (begin, middle) if loss_scale == "thinking_only" else (middle, end)


def _thinks(message: dict[str, Any]) -> bool:
    return bool(reasoning_of(message)) or "</think>" in message["content"]


class _Chat:
    """One conversation under one template; renderings are cut at a number of messages."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, place: str) -> None:
        self.template = template
        self.messages = conversation.messages
        self.tools = conversation.tools
        self.place = place

    def render(self, count: int, *, prompt: bool = False, **settings: Any) -> str:
        return self.template.render(
            self.messages[:count],
            self.tools,
            add_generation_prompt=prompt,
            place=self.place,
            **settings,
        )

    def answer(self, turn: int) -> _Answer:
        """The turn by the definition: two renderings where the template is well behaved."""
        message = self.messages[turn]
        text = self.render(turn + 1)
        prompt = self._prompt_end(turn, text)
        begin = prompt if _thinks(message) else self._behind_empty_thinking(turn, text, prompt)
        content = message["content"].strip()
        after = max(begin, text.rfind(content) + len(content)) if content else begin
        terminated = bool(text[after:].strip())
        end = len(text.rstrip()) if terminated else len(text)
        return _Answer(turn, text, prompt, begin, max(begin, end), text[after:end], terminated)

    def _prompt_end(self, turn: int, text: str) -> int:
        prompt = self.render(turn, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        silent = self.render(turn, prompt=True, enable_thinking=False)
        if text.startswith(silent):
            return len(silent)
        # A prompt that always opens a think block, before an answer written without one: what the
        # two share is the header of the turn.
        history = self.render(turn)
        if not text.startswith(history):
            raise UserError(
                f"{self.place}: the chat template rewrites earlier messages once message "
                f"{turn + 1} is there, so its answer cannot be told from its prompt; "
                "set loss_scale to all"
            )
        shared = len(history)
        while shared < min(len(prompt), len(text)) and prompt[shared] == text[shared]:
            shared += 1
        content = self.messages[turn]["content"].strip()
        found = text.find(content, len(history)) if content else -1
        return shared if found < 0 else min(shared, found)

    def _behind_empty_thinking(self, turn: int, text: str, prompt: int) -> int:
        empty = _EMPTY_THINKING.match(text, prompt)
        if empty is None:
            return prompt
        silent = self.render(turn, prompt=True, enable_thinking=False)
        return len(silent) if prompt < len(silent) and text.startswith(silent) else empty.end()

    def earlier(self, turns: Sequence[int], last: _Answer) -> dict[int, tuple[int, int]]:
        """Spans of the turns before the last in its rendering, as far as they can be verified."""
        if len(turns) < 2:
            return {}
        ends = self._content_ends(turns[-1], last.rendered)
        headers: dict[str, str] = {}
        spans = {}
        for turn in turns[:-1]:
            role = self.messages[turn - 1]["role"]
            span = None
            if ends is not None and role in headers:
                span = self._by_marks(turn, last, ends, headers[role])
            if span is None:
                answer = self.answer(turn)
                span = _locate(answer, last.rendered)
                if span is not None and ends is not None:
                    header = answer.rendered[ends[turn - 1] : answer.prompt]
                    before = self.messages[turn - 1]["content"]
                    headers[role] = header.removeprefix(_closing(before))
            if span is not None:
                spans[turn] = span
        return spans

    def _content_ends(self, last: int, text: str) -> list[int] | None:
        """Where the content of each message before the last ends in text, if marks can tell."""
        head = self.messages[: last + 1]
        plain = all(
            m["content"].strip() and not _thinks(m) and not m.get("tool_calls") for m in head
        )
        if not plain or _MARK in text:
            return None
        marked = [{**m, "content": _marked(m["content"])} for m in head[:-1]] + [head[-1]]
        pieces = self.template.render(marked, self.tools, place=self.place).split(_MARK)
        if len(pieces) != len(head) or "".join(pieces) != text:
            return None
        ends = []
        total = 0
        for piece in pieces[:-1]:
            total += len(piece)
            ends.append(total)
        return ends

    def _by_marks(
        self, turn: int, last: _Answer, ends: list[int], header: str
    ) -> tuple[int, int] | None:
        text = last.rendered
        content = self.messages[turn]["content"]
        begin = _skip(text, ends[turn - 1], self.messages[turn - 1]["content"], header)
        if not last.terminated or begin is None:
            return None
        if text[begin : ends[turn]].strip() != content.strip():
            return None
        last_content = self.messages[last.turn]["content"]
        end = _skip(text, ends[turn], content, last.tail.removeprefix(_closing(last_content)))
        return None if end is None else (begin, end)


def _closing(content: str) -> str:
    """The spaces that end a content; a template may keep them or cut them off."""
    return content[len(content.rstrip()) :]


def _skip(text: str, at: int, content: str, piece: str) -> int | None:
    """Where piece ends that stands at `at`, behind the closing spaces of content or none."""
    for spaces in (_closing(content), ""):
        if text.startswith(spaces + piece, at):
            return at + len(spaces) + len(piece)
    return None


def _marked(content: str) -> str:
    return content.rstrip() + _MARK + _closing(content)


def _locate(answer: _Answer, text: str) -> tuple[int, int] | None:
    """The answer in a longer rendering of the same conversation: same prompt, same target."""
    if not text.startswith(answer.rendered[: answer.prompt]):
        return None
    for begin in (answer.begin, answer.prompt):  # history may leave the empty think block out
        if text.startswith(answer.rendered[answer.prompt : begin] + answer.target, answer.prompt):
            return begin, begin + len(answer.target)
    return None
