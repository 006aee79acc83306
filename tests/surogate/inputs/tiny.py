"""A model folder's tokenizer made on the spot, and chat templates of the kinds that models have.

Everything here is written for these tests.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|end|>", "<|turn|>", "<|stop|>", "<think>", "</think>"]
WORDS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris.",
    "user assistant system tool message answer question reasoning because therefore 0123456789",
    'Grüße aus Köln, 你好世界, naïve café — {"name": "look_up", "arguments": {"city": "Rome"}}',
]

# ChatML's shape: each turn has a header, a terminator and a newline.
PLAIN_CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

# History loses its reasoning; the last answer always has a think block, empty if need be.
THINKING_CHAT = """
{%- if tools %}<|turn|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|stop|>
{% endif %}
{%- for m in messages %}
    {%- set ns = namespace(reason='', text=m.content) %}
    {%- if '</think>' in m.content %}
        {%- set ns.reason = m.content.split('</think>')[0].split('<think>')[-1].strip() %}
        {%- set ns.text = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- elif m.reasoning_content %}
        {%- set ns.reason = m.reasoning_content %}
    {%- endif %}
    {{- '<|turn|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.last %}
        {{- '<think>\n' + ns.reason + '\n</think>\n\n' }}
    {%- endif %}
    {{- ns.text }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<call>' + (call.function | tojson) + '</call>' }}
    {%- endfor %}
    {{- '<|stop|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

# The prompt opens the think block; answers of the history are written without one.
OPENED_CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].strip() }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n<think>\n{% endif %}"
)

# The last answer ends with another terminator than those of the history.
TWO_ENDS_CHAT = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}"
    "{% if loop.last and m.role == 'assistant' %}<|end|>{% else %}<|stop|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

# Nothing says that an answer is over.
ENDLESS_CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def model_folder(
    folder: Path,
    template: str | list[dict[str, str]] | None = PLAIN_CHAT,
    *,
    eos: str | None = "<|end|>",
    trim_offsets: bool = False,
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json of a byte-level BPE of about 400 ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    description = json.loads(tokenizer.to_str())
    if trim_offsets:
        description["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    settings: dict[str, Any] = {"eos_token": eos, "pad_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def jsonl(file: Path, rows: Sequence[Any]) -> str:
    """Writes one JSON value a line and returns the path."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def chat(*contents: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(contents)
    ]
