"""What is trained on, for stock templates and thirty shapes of conversations.

The other derivation shares no code with ours: transformers renders the conversation up to each
answer, and the literals of inputs/families.py, read off the templates by eye, cut the answer out.
An answer must be learned behind exactly the text that it was cut from. A conversation that a
template refuses, or whose system message, content, reasoning or calls it drops, must be refused by
name.

inputs/masks.txt shows the supervised tokens, decoded. Look at its difference after
`python -m tests.surogate.test_masks`, which writes it anew.
"""

import json
from collections.abc import Iterator
from functools import cache
from os.path import commonprefix
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jinja2
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from surogate.config import DatasetConfig
from surogate.data.chat import render_targets
from surogate.data.formats import Conversation, layout_of, read_row
from surogate.data.sources import Row, RowError
from surogate.data.template import ChatTemplate
from surogate.data.tokenise import Encoder
from surogate.data.vocabulary import load_tokenizer
from tests.surogate.inputs.families import FAMILIES, MARKERS, SPECIAL, Family, stock_template
from tests.surogate.inputs.shapes import SHAPES, TOOLS
from tests.surogate.inputs.tiny import model_folder

SNAPSHOT = Path(__file__).parent / "inputs" / "masks.txt"
CONFIG = DatasetConfig(path="rows.jsonl", type="conversation")


def row_of(shape: str) -> Row:
    messages = SHAPES[shape]
    calls = any("tool_calls" in m for m in messages)
    return Row("rows.jsonl", 1, {"messages": messages} | ({"tools": TOOLS} if calls else {}))


def conversation_of(shape: str) -> Conversation:
    row = row_of(shape)
    record = read_row(layout_of(CONFIG, row), row)
    assert isinstance(record, Conversation)
    return record


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(stock_template(name), name=name, special_tokens=SPECIAL[name])


def theirs(name: str, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
    """transformers' rendering."""
    (text,), _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=stock_template(name),
        add_generation_prompt=prompt,
        **SPECIAL[name],
    )
    return str(text)


def as_taken(family: Family, message: dict[str, Any]) -> dict[str, Any]:
    """The message in the form that a family's users give it in."""
    made = {k: v for k, v in message.items() if k not in ("train", "weight", "reasoning_content")}
    if "reasoning_content" in message and family.reasoning:
        made[family.reasoning] = message["reasoning_content"]
    if "tool_calls" in message and family.calls == "text":
        made["content"] = message["content"] or None
        made["tool_calls"] = [
            c | {"function": c["function"] | {"arguments": json.dumps(c["function"]["arguments"])}}
            for c in message["tool_calls"]
        ]
    return made


class Dropped(Exception):
    """The template leaves out what the row wants to be learned or seen."""


def cut_out(name: str, shape: str) -> Iterator[tuple[str, str]]:
    """What is asked and what is answered, of each trained answer."""
    family, given = FAMILIES[name], SHAPES[shape]
    taken = [as_taken(family, message) for message in given]
    tools = row_of(shape).data.get("tools")
    for turn, message in enumerate(given):
        if message["role"] != "assistant" or turn == 0 or message.get("train") is False:
            continue
        text = theirs(name, taken[: turn + 1], tools)
        for m in given[:turn]:
            if m["role"] != "assistant" and m["content"].strip() not in text:
                raise Dropped("message")
        history = theirs(name, taken[:turn], tools)
        same = len(commonprefix([history, text]))
        after = turn and given[turn - 1]["role"] == "tool" and family.after_result
        header = after or family.header
        asked = None
        if len(history.rstrip().removesuffix(family.second.strip()).rstrip()) > same:
            # The history is written otherwise with the answer than when it is asked for.
            asked = theirs(name, taken[:turn], tools, prompt=True)
            same = text.index(given[turn - 1]["content"])
        if header not in text[same - len(header) :]:
            raise Dropped("header")
        begin = text.index(header, same - len(header)) + len(header)
        ends = (family.call_end or family.end) if "tool_calls" in message else family.end
        body = text.rstrip() if ends else text
        body = body.removesuffix(family.second)
        thought = message.get("reasoning_content", "I know." if "I know.\n" in body[begin:] else "")
        skipped = family.opened if thought else family.empty
        if body.startswith(skipped, begin):
            begin += len(skipped)
        target = body[begin:]
        said = json.dumps(message.get("tool_calls", ""))
        if thought not in target or ("weather" in said and "weather" not in target):
            raise Dropped("reasoning or call")
        if "</think>" in message["content"] and "I know." not in target:
            raise Dropped("reasoning")
        if message["content"].split("</think>")[-1].strip() not in target:
            raise Dropped("content")
        assert target.endswith(ends)
        yield asked or text[:begin], target


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_those_that_literals_cut_out(name, shape):
    template = template_of(name)
    conversation = conversation_of(shape)
    try:
        wanted = list(cut_out(name, shape))
    except (jinja2.TemplateError, TypeError, Dropped):
        with pytest.raises(RowError, match="row 1"):
            render_targets(template, conversation, loss_scale="default", place="row 1")
        return
    documents = render_targets(template, conversation, loss_scale="default", place="row 1")
    found = [(d.text[:a], d.text[a:b]) for d in documents for a, b in d.spans]
    # History may stand without the empty think block that the prompt had.
    empty = FAMILIES[name].empty
    assert sorted((asked.removesuffix(empty), said) for asked, said in found) == sorted(
        (asked.removesuffix(empty), said) for asked, said in wanted
    )
    assert all(document.terminated == bool(FAMILIES[name].end) for document in documents)


@cache
def tokenizer_file() -> str:
    """A byte-level tokenizer that knows the markers of all families."""
    with TemporaryDirectory() as folder:
        file = model_folder(Path(folder)) / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.add_special_tokens([AddedToken(m, normalized=False) for m in MARKERS])
        return tokenizer.to_str()


def encoder_of(name: str, folder: Path) -> Encoder:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_file(), encoding="utf-8")
    settings = {**SPECIAL[name], "chat_template": stock_template(name)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    vocabulary = load_tokenizer(folder)
    return Encoder(vocabulary, vocab_size=1000, loss_scale="default", threads=False)


def supervised(encoder: Encoder, shape: str) -> list[list[str]]:
    """The decoded runs of supervised tokens, of each document."""
    row = row_of(shape)
    chunk = encoder.encode(layout_of(CONFIG, row), [(0, row)])
    found = []
    for end, length in zip(np.cumsum(chunk.lengths), chunk.lengths, strict=True):
        tokens, mask = (x[end - length : end] for x in (chunk.tokens, chunk.supervised))
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
        decode = encoder.vocabulary.tokenizer.decode
        found.append([decode(tokens[a:b].tolist(), skip_special_tokens=False) for a, b in edges])
    return found


def snapshot(folder: Path) -> str:
    """The text of masks.txt: for each template and shape a line per run of supervised tokens."""
    lines = ["Supervised text by chat template and shape of conversation; a dash a document.\n"]
    for name in FAMILIES:
        encoder = encoder_of(name, folder / name)
        lines.append(f"\n== {name} ==\n")
        for shape in SHAPES:
            lines.append(f"{shape}\n")
            try:
                documents = supervised(encoder, shape)
            except RowError as error:
                lines.append(f"  refused: {str(error).removeprefix('rows.jsonl row 1: ')}\n")
                continue
            for runs in documents:
                for i, run in enumerate(runs):
                    lines.append(f"  {' ' if i else '-'} {json.dumps(run, ensure_ascii=False)}\n")
    return "".join(lines)


def test_decoded_targets_are_those_of_the_snapshot(tmp_path):
    assert snapshot(tmp_path) == SNAPSHOT.read_text(encoding="utf-8")


def test_there_are_enough():
    assert len(FAMILIES) >= 10 and len(SHAPES) == 30


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        SNAPSHOT.write_text(snapshot(Path(made)), encoding="utf-8")
