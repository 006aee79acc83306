"""The tokenizer of a model folder: tokenizer.json, its special tokens and its chat template.

The end-of-sequence token is the first that is named by tokenizer_config.json (`eos_token`),
generation_config.json or config.json (`eos_token_id`). The chat template is chat_template.jinja,
else chat_template.json, else `chat_template` of tokenizer_config.json (a string, or a list of named
templates).
"""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from surogate.data.template import ChatTemplate
from surogate.errors import UserError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Vocabulary(NamedTuple):
    """What turns text into tokens.

    eos_ids are all ids that end a sequence, in order of precedence; eos is the first of them.
    prefix is what the tokenizer puts before a text of its own accord (begin-of-sequence), and
    fingerprint changes with anything here.
    """

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    bos: int | None
    special_tokens: dict[str, str]
    prefix: tuple[int, ...]
    template: ChatTemplate | None
    folder: Path
    file: Path
    fingerprint: str

    @property
    def eos(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None


def load_tokenizer(model_dir: str | Path, tokenizer_file: str | Path | None = None) -> Vocabulary:
    """Reads the tokenizer of a model folder; tokenizer_file, if not model_dir/tokenizer.json.

    Raises UserError for a missing or invalid file.
    """
    folder = Path(model_dir)
    file = Path(tokenizer_file) if tokenizer_file is not None else folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{file}: no such file; the model folder must have a tokenizer.json")
    raw = file.read_bytes()
    tokenizer = _build(file, raw)
    settings = _json(folder / "tokenizer_config.json")
    special = _special_tokens({**_json(folder / "special_tokens_map.json"), **settings})
    template = _template(folder, settings)
    eos_ids = _eos_ids(folder, special, tokenizer)
    known = (sha256(raw).hexdigest(), template, sorted(special.items()), eos_ids)
    return Vocabulary(
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        bos=tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        special_tokens=special,
        prefix=_prefix(tokenizer),
        template=None
        if template is None
        else ChatTemplate(template, name=str(folder), special_tokens=special),
        folder=folder,
        file=file,
        fingerprint=sha256(json.dumps(known).encode()).hexdigest(),
    )


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: must hold an object")
    return value


def _build(file: Path, raw: bytes) -> Tokenizer:
    """The tokenizer without truncation and padding, and with offsets that keep leading spaces."""
    try:
        text = raw.decode("utf-8")
        if re.search(r'"trim_offsets"\s*:\s*true', text):
            description = json.loads(text)
            _keep_spaces(description)
            text = json.dumps(description)
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the tokenizer library raises no narrower class
        raise UserError(f"{file}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _keep_spaces(value: Any) -> None:
    """Turns off trim_offsets, which changes no id: with it, a token of spaces has no place."""
    if isinstance(value, dict):
        if value.get("trim_offsets") is True:
            value["trim_offsets"] = False
        for key in ("post_processor", "pre_tokenizer", "processors", "pretokenizers"):
            _keep_spaces(value.get(key))
    elif isinstance(value, list):
        for item in value:
            _keep_spaces(item)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in (*_NAMED, "mask_token"):
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _eos_ids(folder: Path, special: Mapping[str, str], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids: list[int] = []
    if "eos_token" in special:
        eos = tokenizer.token_to_id(special["eos_token"])
        if eos is None:
            raise UserError(
                f"{folder}: the eos_token {special['eos_token']!r} is not in tokenizer.json"
            )
        ids.append(eos)
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    starts = range(len(full) - len(bare) + 1)
    return tuple(full[: next(i for i in starts if full[i : i + len(bare)] == bare)])


def _template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {
            extra.stem: extra.read_text(encoding="utf-8")
            for extra in sorted((folder / "additional_chat_templates").glob("*.jinja"))
        }
        text = file.read_text(encoding="utf-8")
        return {"default": text, **named} if named else text
    value = _json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if value is None or isinstance(value, str):
        return value
    items = value if isinstance(value, list) else []
    named = {
        item["name"]: item["template"]
        for item in items
        if isinstance(item, dict) and {"name", "template"} <= set(item)
    }
    if named and all(isinstance(part, str) for pair in named.items() for part in pair):
        return named
    raise UserError(f"{folder}: chat_template must be a text or a list of name and template")
