"""Chat templates: Jinja programs that come with a model and write a conversation as one text.

They render as in transformers' `apply_chat_template`: a sandbox without side effects, blocks that
leave no blank lines, `break` and `continue`, `raise_exception`, `strftime_now`, `tojson` that keeps
characters as they are, the special tokens by name, and `{% generation %}` as a plain block. A test
holds the two to the same text.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from surogate.data.calls import Form, forms
from surogate.data.sources import RowError
from surogate.errors import UserError

EPOCH = "SOURCE_DATE_EPOCH"  # reproducible-builds.org
# Other names of the reasoning in a message; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What a template that does not fit a conversation raises, besides Jinja's own errors.
_MISFIT = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` writes its body and nothing else."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:
        for name in dict(*args[1:], **values):
            _refuse_private(name)
        Namespace.__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the private name {name}")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def moment() -> datetime:
    """Now, or what SOURCE_DATE_EPOCH says: a template that writes the date makes other rows on
    another day. Raises UserError for a value that is no number of seconds.
    """
    seconds = os.environ.get(EPOCH)
    try:
        return datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now()
    except (ValueError, OverflowError, OSError):
        raise UserError(f"{EPOCH} = {seconds!r}: must be seconds since 1970") from None


def _now(form: str) -> str:
    return moment().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox without its checks where they always pass, which are half of a template's time:
    keys of a dictionary that name none of its methods, names in a namespace, which are all public,
    and harmless attributes of texts and loops. `format` is checked, because its argument can reach
    into Python.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _METHODS:
            found = obj.get(attribute, _MISSING)
            return self.undefined(obj=obj, name=attribute) if found is _MISSING else found
        if (kind is str and attribute in _PLAIN) or (kind is LoopContext and attribute in _LOOP):
            return getattr(obj, attribute)
        if kind is _PlainNamespace and not attribute.startswith("_"):
            found = getattr(obj, attribute, _MISSING)
            if found is not _MISSING:
                return found
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            if __obj.__name__ in _PLAIN:
                for name in ("_block_vars", "_loop_vars"):  # what a compiled template adds
                    kwargs.pop(name, None)
                return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


_METHODS, _MISSING = frozenset(dir(dict)), object()
_PLAIN = frozenset("startswith endswith split rsplit strip lstrip rstrip replace".split())
_LOOP = frozenset("first last index index0 revindex revindex0 length previtem nextitem".split())


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.globals["namespace"] = _PlainNamespace
    return environment


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """The reasoning that a message carries in a field of its own."""
    return next((message[name] for name in _REASONING if message.get(name) is not None), None)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = reasoning_of(message)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class ChatTemplate:
    """One template, or several by name: `tool_use` when there are tools, else `default`.

    special_tokens are the named ones (bos_token and so on), which the template may write.
    """

    def __init__(
        self, source: str | Mapping[str, str], *, name: str, special_tokens: Mapping[str, str]
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens)
        self._name = name
        self.empty_thinking: str | None = None  # what chat.py finds that a silent prompt adds
        self._compiled: dict[str, Callable[..., str]] = {}

    def __reduce__(self) -> tuple[Any, ...]:  # compiled templates do not pickle
        return (_rebuild, (self.sources, self._name, self.special_tokens))

    @property
    def dated(self) -> bool:
        """Whether it may write the date, so that other days make other rows."""
        return any("strftime_now" in source for source in self.sources.values())

    @cached_property
    def call_forms(self) -> list[Form]:
        """The forms in which the template writes tool calls."""
        return forms(self.render)

    @cached_property
    def second_end(self) -> str:
        """The end-of-sequence token that the template writes behind a terminator of its own, with
        the blanks between; empty where it writes one terminator.
        """
        answer = "Forty-two."
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        eos = self.special_tokens.get("eos_token", "")
        try:
            tail = self.render(messages).rstrip().rpartition(answer)[2]
        except RowError:
            return ""
        first = tail.removesuffix(eos).rstrip()
        return tail[len(first) :] if eos and tail.endswith(eos) and first else ""

    def _renderer(self, tools: object) -> Callable[..., str]:
        key = "tool_use" if tools and "tool_use" in self.sources else "default"
        if key not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise UserError(f"{self._name}: no chat template is named 'default', has: {names}")
        if key not in self._compiled:
            try:
                self._compiled[key] = _environment().from_string(self.sources[key]).render
            except jinja2.TemplateSyntaxError as error:
                raise UserError(
                    f"{self._name}: the chat template is invalid at line {error.lineno}: {error}"
                ) from None
        return self._compiled[key]

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        place: str = "",
        **settings: Any,
    ) -> str:
        """The text of the messages; settings are further variables, such as enable_thinking.

        Raises RowError that begins with place when the template refuses the messages.
        """
        render = self._renderer(tools)
        try:
            return render(
                messages=[_with_reasoning(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **settings},
            )
        except _MISFIT as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RowError(
                f"{place or self._name}: the chat template refuses the conversation: {reason}",
                "a conversation that the chat template refuses",
            ) from None


def _rebuild(sources: dict[str, str], name: str, special_tokens: dict[str, str]) -> ChatTemplate:
    return ChatTemplate(sources, name=name, special_tokens=special_tokens)
