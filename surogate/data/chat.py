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
nothing before it is context only, and so is one that says that it is not trained on.

Each check costs two renderings, which makes a long chat quadratic. Where no message has reasoning
or tool calls, one rendering with a mark behind each message's content finds every turn instead,
under two conditions: without the marks it is the same text, and headers and terminators equal the
ones found by the definition above.
"""

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from surogate.data.calls import fitted
from surogate.data.formats import Conversation
from surogate.data.sources import RowError
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
    there. Raises RowError that begins with place when the template refuses the conversation,
    leaves out one of its messages, or does not write an answer behind its prompt.
    """
    chat = _Chat(template, conversation, place)
    answers = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i > 0]
    asked = answers[-1:] if loss_scale == "last_round" else answers
    turns = [turn for turn in asked if turn not in conversation.untrained]
    if loss_scale == "all" or not turns:
        return [chat.whole(answers, supervised=loss_scale == "all")]
    pending = turns
    documents = []
    while pending:
        answer = chat.answer(pending[-1])
        found = {**chat.earlier(pending, answer), pending[-1]: (answer.begin, answer.end)}
        pending = [turn for turn in pending if turn not in found]
        spans = [
            chat.narrowed(turn, answer.rendered, found[turn], loss_scale) for turn in sorted(found)
        ]
        targets = [span for span in spans if span[0] < span[1]]
        documents.append(Rendered(answer.rendered, targets, answer.terminated))
    chat.check_nothing_left_out(documents[0].text, turns[-1] + 1)
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


def _content(message: dict[str, Any]) -> str:
    return message["content"] or ""


def _thinking(message: dict[str, Any]) -> str:
    """The reasoning of a message, in a field of its own or before `</think>` in its content."""
    before, mark, _ = _content(message).rpartition("</think>")
    inside = before.rpartition("<think>")[2] if mark else ""
    return (reasoning_of(message) or inside).strip()


def _thinks(message: dict[str, Any]) -> bool:
    return bool(reasoning_of(message)) or "</think>" in _content(message)


class _Chat:
    """One conversation under one template; renderings are cut at a number of messages."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, place: str) -> None:
        self.template = template
        self.messages = conversation.messages
        if any(message.get("tool_calls") for message in self.messages):
            self.messages = fitted(self.messages, template.call_forms, place)
        self.tools = conversation.tools
        self.untrained = conversation.untrained
        self.place = place

    def render(self, count: int, *, prompt: bool = False, **settings: Any) -> str:
        return self.template.render(
            self.messages[:count],
            self.tools,
            add_generation_prompt=prompt,
            place=self.place,
            **settings,
        )

    def whole(self, answers: Sequence[int], *, supervised: bool) -> Rendered:
        """One document of all messages: nothing in it is a target, or everything."""
        if supervised and self.untrained:
            raise RowError(
                f"{self.place}: message {min(self.untrained) + 1} says that it is not trained on, "
                "but loss_scale is all; use default",
                "train or weight beside loss_scale all",
            )
        text = self.render(len(self.messages))
        self.check_nothing_left_out(text, len(self.messages))
        terminated = not answers or self.answer(answers[-1]).terminated
        return Rendered(text, [(0, len(text))] if supervised else [], terminated)

    def check_nothing_left_out(self, text: str, count: int) -> None:
        """Raises RowError for a message that makes no difference to the text of the first count."""
        for index, message in enumerate(self.messages[:count]):
            content = _content(message).strip()
            if content and message["role"] != "assistant" and content not in text:
                others = self.messages[:index] + self.messages[index + 1 : count]
                if self._same_without(others, text):
                    raise RowError(
                        f"{self.place}: the chat template writes nothing for message {index + 1} "
                        f"of role {message['role']}; give it a role that the template knows",
                        "a message that the chat template leaves out",
                    )
                if self._ignored(index, count):
                    raise self._unsaid(index)

    def _ignored(self, index: int, count: int) -> bool:
        """Whether the text of the first count messages has nothing of one's content."""
        marked = {**self.messages[index], "content": _MARK}
        messages = [*self.messages[:index], marked, *self.messages[index + 1 : count]]
        try:
            return _MARK not in self.template.render(messages, self.tools, place=self.place)
        except UserError:  # the content does matter
            return False

    def _unsaid(self, index: int) -> RowError:
        role = self.messages[index]["role"]
        beside = " beside its tool calls" if self.messages[index].get("tool_calls") else ""
        return RowError(
            f"{self.place}: the chat template leaves out the content of message {index + 1} of "
            f"role {role}{beside}; remove it from the row, or use a template that writes it",
            "content that the chat template leaves out",
        )

    def _same_without(self, others: Sequence[dict[str, Any]], text: str) -> bool:
        try:
            return self.template.render(others, self.tools, place=self.place) == text
        except UserError:  # the others alone are no conversation: the message does matter
            return False

    def narrowed(
        self, turn: int, text: str, span: tuple[int, int], loss_scale: LossScale
    ) -> tuple[int, int]:
        """The part of an answer that loss_scale asks for.

        Raises RowError where the template leaves reasoning or tool calls of the answer out.
        """
        begin, end = span
        self._check_written(turn, text[begin:end], loss_scale)
        if loss_scale not in ("thinking_only", "final_only"):
            return begin, end
        mark = text.find("</think>", begin, end)
        reasoning = _thinking(self.messages[turn])
        if mark < 0 and reasoning and reasoning in text[begin:end]:
            raise UserError(
                f"loss_scale = {loss_scale}: the chat template does not close reasoning with "
                "</think>, so it cannot be told from the answer; use default"
            )
        middle = begin if mark < 0 else mark + len("</think>")
        return (begin, middle) if loss_scale == "thinking_only" else (middle, end)

    def _check_written(self, turn: int, target: str, loss_scale: LossScale) -> None:
        message = self.messages[turn]
        if loss_scale != "final_only" and _thinking(message) not in target:
            raise RowError(
                f"{self.place}: the chat template leaves out the reasoning of message {turn + 1}; "
                "remove it from the row, or set loss_scale to final_only",
                "reasoning that the chat template leaves out",
            )
        said = _content(message).rpartition("</think>")[2].strip()
        if loss_scale != "thinking_only" and said not in target and self._ignored(turn, turn + 1):
            raise self._unsaid(turn)
        for call in message.get("tool_calls", ()):
            if call.get("function", call)["name"] not in target:
                raise RowError(
                    f"{self.place}: the chat template leaves out a tool call of message {turn + 1}",
                    "tool calls that the chat template does not write",
                )

    def answer(self, turn: int) -> _Answer:
        """The turn by the definition: two renderings where the template is well behaved."""
        message = self.messages[turn]
        text, prompt = self._asked(turn)
        begin = prompt if _thinks(message) else self._behind_empty_thinking(turn, text, prompt)
        content = _content(message).strip()
        found = text.find(content, begin)
        if content and found >= 0 and not _thinks(message) and not message.get("tool_calls"):
            after = found + len(content)
            terminated = bool(text[after:].strip())
        else:  # what is said is not one piece of the text
            after = begin
            terminated = bool(self._probe(turn).rpartition(_MARK)[2].strip())
        end = len(text.rstrip().removesuffix(self.template.second_end)) if terminated else len(text)
        return _Answer(turn, text, prompt, begin, max(begin, end), text[after:end], terminated)

    def _asked(self, turn: int) -> tuple[str, int]:
        """A text that ends with the turn, and how much of it is what the model is asked."""
        text = self.render(turn + 1)
        prompt = self.render(turn, prompt=True)
        if text.startswith(prompt):
            return text, len(prompt)
        silent = self.render(turn, prompt=True, enable_thinking=False)
        if text.startswith(silent):
            return text, len(silent)
        history, probe = self.render(turn), self._probe(turn)
        if text.startswith(history):
            # A prompt that always opens a think block, before an answer written without one: the
            # header of the turn is what the prompt shares with an answer that begins otherwise.
            shared = len(commonprefix([prompt, probe]))
            kept = shared if text.startswith(prompt[:shared]) else len(commonprefix([prompt, text]))
            return text, kept
        # Messages before the turn are written otherwise once it is answered: the answer is put
        # behind the prompt that the model will meet.
        header = prompt[len(history) :] if prompt.startswith(history) else ""
        at = text.rfind(header, 0, len(commonprefix([text, probe]))) if header.strip() else -1
        if at < 0:
            raise RowError(
                f"{self.place}: the chat template rewrites earlier messages once message "
                f"{turn + 1} is there, so its answer cannot be told from its prompt; "
                "set loss_scale to all",
                "a prompt that the chat template rewrites",
            )
        return prompt + text[at + len(header) :], len(prompt)

    def _probe(self, turn: int) -> str:
        """The turn with a mark for an answer."""
        messages = [*self.messages[:turn], {"role": "assistant", "content": _MARK}]
        return self.template.render(messages, self.tools, place=self.place)

    def _behind_empty_thinking(self, turn: int, text: str, prompt: int) -> int:
        known = self.template.empty_thinking
        if known and text.startswith(known, prompt):
            return prompt + len(known)
        empty = _EMPTY_THINKING.match(text, prompt)
        if empty is None:
            return prompt
        silent = self.render(turn, prompt=True, enable_thinking=False)
        if prompt < len(silent) and text.startswith(silent):
            self.template.empty_thinking = silent[prompt:]
            return len(silent)
        return empty.end()

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
            _content(m).strip() and not _thinks(m) and not m.get("tool_calls") for m in head
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
