"""python -m bench.data MODEL_DIR FILE ...: rows per second of preparing conversations, per core.

Compares, on the same JSONL files of messages and in one process with one thread:

- usual: `datasets.map` over rows with the transformers tokenizer: `apply_chat_template` and
  tokenising, and, for the masks, the prompt of each answer tokenised again, which is how trainers
  find the answers of a template without markers;
- unmasked: the same without masks (every token is a target), in batches of a thousand rows;
- ours: `surogate.data` from the file to ids and masks, as a worker process does it.

Seconds are processor time from the open tokenizer and the closed file to ids and masks; opening
the tokenizer, about a second for theirs and three for ours, is left out. The rows come over again
until there are at least --rows of them, with a number in each so that no row repeats; words that
fastokens remembers are the only thing that is met again. The tail is ours: tokens per second in the
last tenth of the rows over those in the first, with the rows in the order of their lengths.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
modules: dict[str, Any] = sys.modules
modules.setdefault("kernels", None)  # from a checkout, transformers would take ours for another

import datasets  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from surogate.config import DatasetConfig  # noqa: E402
from surogate.data.formats import layout_of  # noqa: E402
from surogate.data.sources import open_source  # noqa: E402
from surogate.data.tokenise import Encoder, batches  # noqa: E402
from surogate.data.vocabulary import load_tokenizer  # noqa: E402


def encoder_of(model: Path) -> Encoder:
    """What a worker process has."""
    vocabulary = load_tokenizer(model)
    return Encoder(vocabulary, vocab_size=1 << 30, loss_scale="default", threads=False)


def ours(encoder: Encoder, file: Path) -> tuple[int, int]:
    """Tokens and supervised tokens of a file."""
    config = DatasetConfig(path=str(file), type="conversation")
    layout = None
    tokens = supervised = 0
    for batch in batches(enumerate(open_source(str(file)).rows())):
        layout = layout or layout_of(config, batch[0][1])
        chunk = encoder.encode(layout, batch)
        tokens += len(chunk.tokens)
        supervised += int(chunk.supervised.sum())
    return tokens, supervised


def usual(tokenizer: Any, file: Path, *, masks: bool) -> tuple[int, int]:
    """The same by datasets.map and transformers."""

    def ids(messages: list[Any], *, prompt: bool = False) -> list[Any]:
        return tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )

    def masked(row: dict[str, Any]) -> dict[str, list[int]]:
        messages = row["messages"]
        whole = ids(messages)
        labels = [-100] * len(whole)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = len(ids(messages[:turn], prompt=True))
                end = len(ids(messages[: turn + 1]))
                labels[begin:end] = whole[begin:end]
        return {"input_ids": whole, "labels": labels}

    def unmasked(rows: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        whole = ids(rows["messages"])
        return {"input_ids": whole, "labels": whole}

    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        encode = masked if masks else unmasked
        made = rows.map(
            encode,
            batched=not masks,
            remove_columns=rows.column_names,
            new_fingerprint="bench",  # else seconds go into hashing the tokenizer
        )
        tokens = sum(map(len, made["input_ids"]))
        return tokens, sum(label != -100 for labels in made["labels"] for label in labels)


def repeated(file: Path, count: int, folder: Path, *, by_length: bool = False) -> Path:
    """A file of at least count rows, each with a number in its first message."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if by_length:
        rows.sort(key=lambda row: len(str(row["messages"])))

    def numbered() -> Iterator[str]:
        for index in range(-(-count // len(rows)) * len(rows)):
            row = rows[index % len(rows)]
            first, *rest = row["messages"]
            messages = [{**first, "content": f"{index}. {first['content']}"}, *rest]
            yield json.dumps({"messages": messages}, ensure_ascii=False) + "\n"

    made = folder / f"{file.stem}{'-sorted' if by_length else ''}.jsonl"
    made.write_text("".join(numbered()), encoding="utf-8")
    return made


def seconds(run: Callable[[], tuple[int, int]]) -> tuple[float, int, int]:
    """Processor seconds of a run, and what it returns."""
    begin = time.process_time()
    tokens, supervised = run()
    return time.process_time() - begin, tokens, supervised


def tail(encoder: Encoder, file: Path) -> float:
    """Tokens per second in the last tenth of a file over those in the first tenth."""
    rows = list(enumerate(open_source(str(file)).rows()))
    layout = layout_of(DatasetConfig(path=str(file), type="conversation"), rows[0][1])
    encoder.encode(layout, rows[len(rows) // 3 : len(rows) // 2])  # meets the words
    tenth = len(rows) // 10
    rates = []
    for part in (rows[:tenth], rows[-tenth:]):
        begin = time.process_time()
        chunk = encoder.encode(layout, part)
        rates.append(len(chunk.tokens) / (time.process_time() - begin))
    return rates[1] / rates[0]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=4000)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    table = Table("file", "rows", "tokens", "usual s", "unmasked s", "ours s", "ratio", "tail")
    with tempfile.TemporaryDirectory() as folder:
        for file in options.files:
            made = repeated(file, options.rows, Path(folder))
            count = sum(1 for _ in made.open())
            encoder = encoder_of(options.model)  # which remembers no words yet
            masked, tokens, _ = seconds(partial(usual, tokenizer, made, masks=True))
            plain, _, _ = seconds(partial(usual, tokenizer, made, masks=False))
            mine, found, _ = seconds(partial(ours, encoder, made))
            by_length = repeated(file, 1000, Path(folder), by_length=True)
            table.add_row(
                *(file.stem, f"{count:,}", f"{found:,}", f"{masked:.2f}", f"{plain:.2f}"),
                *(f"{mine:.2f}", f"{masked / mine:.1f} / {plain / mine:.1f}"),
                f"{tail(encoder, by_length):.2f}",
            )
            print(f"{file.stem}: tokens {tokens:,} (usual), {found:,} (ours)", file=sys.stderr)
    Console().print(table)


if __name__ == "__main__":
    main()
