"""docs/configuration.md, printed from the tables that the reader of files uses.

Run `python -m surogate.config > docs/configuration.md` after a change of a key; a test compares.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from surogate.schema import Field, show
from surogate.settings import DATASET_FIELDS, FIELDS, SECTIONS
from surogate.unsupported import DATASET_KEYS, KEYS, Ignored, Refused

T = TypeVar("T", Ignored, Refused)

_HEAD = """\
# Configuration

<!-- Made by `python -m surogate.config > docs/configuration.md`. Change the tables in
surogate/settings.py and surogate/unsupported.py, not this page. -->

A configuration is one TOML or YAML file:

```yaml
model: Qwen/Qwen3-0.6B
sequence_len: 2048
learning_rate: 2e-4
datasets:
  - path: rows.jsonl
    type: conversation
```

```
surogate sft run.yaml --set learning_rate=1e-4 --set datasets.0.path=other.jsonl
```

- `${NAME}` in any text is replaced by that environment variable; one that is not set is an error.
- `--set key=value` wins over the file; dots reach into tables and lists.
- A key that is `null` or absent has its default.
- An unknown key, a wrong type and a value out of bounds are errors, before anything is loaded.
- Paths are relative to the folder that the command runs in.
- At the start, a run names every key that has no effect, with the reason.

`surogate config run.yaml` checks a file and shows what it sets; with `--explain` every value that
a run would use and where it comes from, with `--json` for machines. Editors complete and check a
file by the schema that `surogate config --schema > surogate.schema.json` writes, when its first
line is `# yaml-language-server: $schema=surogate.schema.json`, or in TOML
`#:schema ./surogate.schema.json`.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [_HEAD]
    names = list(FIELDS)
    starts = [names.index(first) for first in SECTIONS.values()]
    for title, start, end in zip(SECTIONS, starts, [*starts[1:], len(names)], strict=True):
        parts.append(f"\n## {title}\n\n" + _fields(FIELDS[name] for name in names[start:end]))
    parts.append(
        "\n### A data set\n\nEach entry of `datasets` and `validation_datasets`:\n\n"
        + _fields(DATASET_FIELDS.values())
    )
    parts.append(
        "\n## Not available in this version\n\n"
        "Keys of other versions' files that ask for a feature that is not there. "
        "A value other than the neutral one is an error.\n\n" + _refused()
    )
    parts.append(
        "\n## Ignored\n\n"
        "Keys of other versions' files that cannot change the result here. "
        "A run that sets one says so and goes on.\n\n" + _ignored()
    )
    return "".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _fields(fields: Iterable[Field]) -> str:
    rows = []
    for field in fields:
        default = "required" if field.default is msgspec.NODEFAULT else _code(field.default)
        text = field.help
        if readers := field.extra.get("read_by"):
            text += f" (rows of type {', '.join(readers)})"
        rows.append((f"`{field.name}`", field.allowed, default, text))
    return _table(("Key", "Value", "Default", "Meaning"), rows)


def _code(value: object) -> str:
    return f"`{show(value)}`"


def _refused() -> str:
    rows = [
        (f"`{field.name}`", _code(value), reason)
        for field in (*FIELDS.values(), *DATASET_FIELDS.values())
        for value, reason in field.extra.get("refused", {}).items()
    ]
    rows += [
        (f"`{field.name}`", f"other than {_code(field.extra['only'])}", field.extra["why"])
        for field in FIELDS.values()
        if "only" in field.extra
    ]
    for name, key in _both(Refused):
        neutral = " or ".join(_code(value) for value in key.neutral if value is not None)
        rows.append((f"`{name}`", f"other than {neutral}" if neutral else "any", key.reason))
    return _table(("Key", "Refused value", "Why, and what to use"), rows)


def _ignored() -> str:
    return _table(
        ("Key", "Why it has no effect"),
        [(f"`{name}`", key.reason) for name, key in _both(Ignored)],
    )


def _both(kind: type[T]) -> Iterable[tuple[str, T]]:
    tables: tuple[tuple[str, Mapping[str, Ignored | Refused]], ...] = (
        ("", KEYS),
        ("datasets.*.", DATASET_KEYS),
    )
    for prefix, table in tables:
        for name, key in table.items():
            if isinstance(key, kind):
                yield prefix + name, key
