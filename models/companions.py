"""The files beside a model's weights: those of its tokenizer, and the tokens that end a text.

A server stops at the tokens of generation_config.json, or of config.json where there is none. A
base model that learned to end its answers with another token must name that one in both.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surogate.models.files import Staging, read_json

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)
COMPANIONS = (*TOKENIZER_FILES, GENERATION)
EOS = "eos_token_id"  # of config.json and generation_config.json: one, or a list


def copy_files(source: Path, staging: Staging, names: Iterable[str]) -> None:
    """Byte-equal copies of those files that there are."""
    for name in names:
        if (source / name).exists():
            staging.bytes(name, (source / name).read_bytes())


def with_stop_token(settings: Mapping[str, Any], stop_token: int | None) -> dict[str, Any]:
    """config.json with the stop token behind its own, unless it is among them."""
    ids = _eos_ids(settings)
    if stop_token is None or stop_token in ids:
        return dict(settings)
    return {**settings, EOS: [*ids, stop_token]}


def write_generation_config(
    source: Path, staging: Staging, settings: Mapping[str, Any], stop_token: int | None
) -> None:
    """The source's own file, byte for byte where it names the stop token; if there is none, the
    tokens of config.json (``settings``).
    """
    if not (source / GENERATION).exists():
        ids = {key: settings[key] for key in ("bos_token_id", EOS) if settings.get(key) is not None}
        if ids:
            staging.json(GENERATION, ids)
        return
    if stop_token is not None:
        found = read_json(source / GENERATION)
        if stop_token not in _eos_ids(found):
            known = _eos_ids(found) or _eos_ids(settings)
            staging.json(GENERATION, found | {EOS: list(dict.fromkeys([*known, stop_token]))})
            return
    copy_files(source, staging, [GENERATION])


def _eos_ids(settings: Mapping[str, Any]) -> list[int]:
    ids = settings.get(EOS)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
