"""Whole runs in miniature: a model, a tokenizer and rows made on the spot, and the command line.

A model has 2 layers of width 32 and 320 tokens; a run of ten steps takes a second.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from surogate.cli import run
from surogate.models.config import from_hf
from surogate.models.hf import write_model
from surogate.models.init import init_model
from surogate.report import read_log

ROOT = Path(__file__).parents[2]
VOCAB = 320
EOS = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "the a one small red old cat dog bird house sees finds likes eats runs and then".split()
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
}


def sentences(count: int, *, seed: int = 0) -> list[str]:
    """Random sentences of a few words, 4 to 24 of them."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(4, 25))) + "." for _ in range(count)]


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with the tokens and the template of a chat."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [EOS, "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(100), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(
    folder: Path,
    *,
    family: str = "qwen3",
    stored: str = "float32",
    vocab: int = VOCAB,
    **settings: Any,
) -> Path:
    """A model folder with random weights of a dtype, and its tokenizer. ``settings`` go over those
    of config.json.
    """
    raw = {
        "architectures": [{"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}[family]],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "initializer_range": 0.1,
        "vocab_size": vocab,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": stored,
        **FAMILIES[family],
        **settings,
    }
    raw["architectures"][0] += "ForCausalLM"
    config = from_hf(raw)
    dtype = np.dtype(np.float32)
    write_model(init_model(config, 0, dtype), config, folder, dtype=dtype)
    if stored != "float32":
        from surogate.setup import DTYPES

        write_model(init_model(config, 0, dtype), config, folder, dtype=DTYPES[stored])
    write_tokenizer(folder)
    return folder


def write_texts(file: Path, count: int = 60, *, seed: int = 1) -> Path:
    """Rows of raw text."""
    lines = [json.dumps({"text": text}) for text in sentences(count, seed=seed)]
    file.write_text("\n".join(lines) + "\n")
    return file


def write_chats(file: Path, count: int = 60, *, seed: int = 1) -> Path:
    """Rows of one question and one answer."""
    texts = sentences(2 * count, seed=seed)
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in zip(texts[::2], texts[1::2], strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_config(folder: Path, **settings: Any) -> Path:
    """run.toml of a short full training on texts.jsonl, with settings over that."""
    table: dict[str, Any] = {
        "model": str(folder / "model"),
        "output_dir": str(folder / "out"),
        "device": "cpu",
        "max_steps": 6,
        "sequence_len": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.003,
        "lora": False,
        "dataloader_num_workers": 1,
        "datasets": [{"path": str(folder / "texts.jsonl"), "type": "text"}],
    } | settings
    lines = [f"{k} = {json.dumps(v)}" for k, v in table.items() if not _is_tables(v)]
    for key, entries in table.items():
        for entry in entries if _is_tables(entries) else ():
            lines += ["", f"[[{key}]]", *(f"{k} = {json.dumps(v)}" for k, v in entry.items())]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def prepare(folder: Path, *, family: str = "qwen3", stored: str = "float32") -> Path:
    """A folder with model/, texts.jsonl and chats.jsonl."""
    make_model(folder / "model", family=family, stored=stored)
    write_texts(folder / "texts.jsonl")
    write_chats(folder / "chats.jsonl")
    return folder


def invoke(config: Path, *overrides: str) -> Result:
    """surogate-run in this process."""
    options = [part for text in overrides for part in ("--set", text)]
    return CliRunner().invoke(run, [str(config), *options])


def train(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Runs a configuration that must succeed; returns the records of its log."""
    result = invoke(write_config(folder, **settings))
    assert result.exit_code == 0, result.output + repr(result.exception)
    return read_log(Path(settings.get("output_dir", folder / "out")) / "log.jsonl")


def start(
    config: Path,
    *overrides: str,
    limit: int | None = None,
    before: Callable[[], None] | None = None,
    first: str = "",
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[str]":
    """Starts surogate-run as a process on one thread, with its output in pipes.

    ``limit`` is the number of bytes that a file may have, as on a disk that is full; ``before``
    is called in the process before Python is there, and the code ``first`` after. ``environment``
    is set beside the variables of this process.
    """
    code = f"{first}\nfrom surogate.cli import run; run()"
    if limit is not None:
        code = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({limit}, {limit})); {code}"
    options = [part for text in overrides for part in ("--set", text)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(config), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | threads | {"PYTHONPATH": path} | dict(environment or {}),
        cwd=config.parent,
        preexec_fn=before,
    )


def steps(records: list[dict[str, Any]], name: str = "loss") -> list[Any]:
    """One column of the step records."""
    return [record[name] for record in records if record["log"] == "step"]
