"""Every accepted key does something: a run with another value of it is another run, or says that
the key is ignored and why.

A run is seen from outside: its losses and rates, the bytes of its files, what it prints, the
calls of its trackers; and, for keys that move memory or time alone, what they hand to the step,
the saver and the tokeniser. The configuration that the log records does not count. Values and what
must come with them are those of test_config.py, but for the keys of RUNS, which need more to show
in three steps of a tiny model.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

import surogate
from surogate.device import choose_device
from surogate.models.hf import write_model
from surogate.settings import DATASET_FIELDS, FIELDS
from tests.surogate.runs import ROOT, TEMPLATE, prepare, write_chats, write_texts
from tests.surogate.test_config import ONE_VALUE, OTHER

BASE: dict[str, Any] = {
    "output_dir": "out",
    "max_steps": 3,
    "save_steps": 2,
    "eval_steps": 2,
    "sequence_len": 64,
    "lora_rank": 2,
    "learning_rate": 0.01,
    "lora": True,
}
STALLED = {"eval_steps": 1, "max_steps": 4, "learning_rate": 0.0, "early_stop": True}

# Another value, and what must come with it, where that of test_config.py does not show here.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_epochs": (2, {"max_steps": -1, "num_epochs": 1}),
    "max_steps": (2, {}),
    "save_steps": (1, {}),
    "save_total_limit": (1, {}),
    "eval_steps": (1, {}),
    "device": ("auto" if choose_device("auto").kind == "cuda" else "cuda", {}),
    "from_scratch": (True, {"lora": False}),
    "init_projections_to_zero": (True, {"lora": False, "from_scratch": True}),
    "torch_dtype": ("float16", {"lora": False}),
    "sequence_len": (48, {}),
    "model": ("other", {}),
    "max_model_len": (512, {"rope_scaling": "linear", "max_model_len": 256}),
    "warmup_ratio": (0.6, {}),
    "warmup_steps": (2, {}),
    "cooldown_steps": (2, {}),
    "wsd_decay_steps_fraction": (0.9, {"lr_scheduler_type": "wsd"}),
    "max_grad_norm": (1e-4, {}),
    "max_skipped_steps": (1, {"model": "broken"}),
    "optimizer": ("adamw_8bit", {"lora": False}),
    "datasets": ([{"path": "texts.jsonl", "type": "text"}], {}),
    "validation_datasets": ([{"path": "texts.jsonl", "type": "text"}], {}),
    "validation_split_ratio": (0.4, {}),
    "dataloader_num_workers": (2, {}),
    "early_stop": (True, STALLED | {"early_stop": False, "early_stop_patience": 1}),
    "early_stop_patience": (2, STALLED | {"early_stop_patience": 1}),
    "early_stop_threshold": (9.0, STALLED | {"early_stop_patience": 1, "learning_rate": 0.01}),
    "eval_max_new_tokens": (3, {"eval_prompts": ["the"], "eval_max_new_tokens": 2}),
    "wandb_mode": ("online", {"report_to": "wandb"}),
    "aim_repo": ("elsewhere", {"report_to": "aim"}),
}

CHATS = {"path": "chats.jsonl", "type": "conversation"}
TURNS = {"path": "turns.jsonl", "type": "conversation"}
PAIRS = {
    **{"path": "pairs.jsonl", "type": "instruction"},
    **{"instruction_field": "question", "output_field": "answer"},
}
# Another value of each key of a data set, and the rest of the entry.
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "path": ("more.jsonl", CHATS),
    "split": ("test", {"path": "split", "type": "text"}),
    "subset": ("second", {"path": "subsets", "type": "text", "subset": "first"}),
    "samples": (20, CHATS),
    "weight": (2.0, CHATS),
    "malformed": ("stop", CHATS | {"path": "faulty.jsonl", "malformed": "skip"}),
    "type": ("text", {"path": "both.jsonl", "type": "conversation"}),
    "text_field": ("other", {"path": "pairs.jsonl", "type": "text", "text_field": "question"}),
    "instruction_field": ("other", PAIRS),
    "output_field": ("other", PAIRS),
    "input_field": ("other", PAIRS),
    "system_prompt_type": ("fixed", PAIRS | {"system_prompt": "Be kind."}),
    "system_prompt_field": (
        "other",
        PAIRS | {"system_prompt_type": "field", "system_prompt_field": "question"},
    ),
    "system_prompt": ("cat", PAIRS | {"system_prompt_type": "fixed", "system_prompt": "dog"}),
    "prompt_format": ("{input} {instruction}", PAIRS | {"input_field": "other"}),
    "prompt_format_no_input": ("the {instruction}", PAIRS),
    "messages_field": ("turns", TURNS | {"messages_field": "messages"}),
    "system_field": ("question", TURNS),
    "tools_field": ("kit", TURNS),
    "completion_field": ("question", TURNS),
    "message_property_mappings": ({"content": "other"}, TURNS),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and rows that all runs read."""
    folder = prepare(tmp_path_factory.mktemp("keys"))
    settings = folder / "model" / "tokenizer_config.json"
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    changed = orjson.loads(settings.read_bytes()) | {"chat_template": tools + TEMPLATE}
    settings.write_bytes(orjson.dumps(changed))
    prepare(folder / "second", family="llama")
    (folder / "second" / "model").rename(folder / "other")
    prepare(folder / "third")
    broken(folder / "third" / "model", folder / "broken")
    write_chats(folder / "more.jsonl", 50, seed=9)
    (folder / "faulty.jsonl").write_bytes((folder / "more.jsonl").read_bytes() + b"[]\n")
    (folder / "split").mkdir()
    write_texts(folder / "split" / "train.jsonl")
    write_texts(folder / "split" / "test.jsonl", 40, seed=5)
    for name, seed in (("first", 5), ("second", 6)):
        (folder / "subsets" / name).mkdir(parents=True)
        write_texts(folder / "subsets" / name / "train.jsonl", 40, seed=seed)
    write_lines(folder / "pairs.jsonl", lambda i: {"question": f"the cat {i}", "answer": f"a {i}"})
    write_lines(folder / "turns.jsonl", turn)
    write_lines(folder / "both.jsonl", lambda i: turn(i) | {"text": f"the red bird {i}"})
    return folder


def broken(source: Path, target: Path) -> None:
    """A model with a weight that is not finite."""
    model = surogate.load(source, device="cpu")
    model.params.layers[0].w_o[0, 0] = np.nan
    source.rename(target)
    write_model(model.params, model.config, target, dtype=np.dtype(np.float32))


def turn(index: int) -> dict[str, Any]:
    """A conversation with everything that a key can point at."""
    ask = {"role": "user", "content": f"the cat {index}", "other": "a bird"}
    reply = {"role": "assistant", "content": f"a dog {index}", "other": "sees"}
    tool = {"type": "function", "function": {"name": "see", "parameters": {}}}
    return {
        **{"messages": [ask, reply], "turns": [ask, reply | {"content": "the house"}]},
        **{"question": f"find {index}", "kit": [tool]},
    }


def write_lines(file: Path, row: Callable[[int], dict[str, Any]]) -> None:
    extra = {"other": "the small house"}
    file.write_bytes(b"".join(orjson.dumps({**extra, **row(i)}) + b"\n" for i in range(40)))


class Observer:
    """The process of observe.py; a run that was asked for before is not made again."""

    def __init__(self, place: Path, scratch: Path) -> None:
        self.place, self.scratch, self.known = place, scratch, dict[bytes, Any]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.surogate.observe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )

    def see(self, settings: dict[str, Any], folder: str | None = None) -> Any:
        """What can be seen of a run with these settings over BASE, in a new or a named folder."""
        settings = {"model": "model", "datasets": [CHATS], **BASE, **settings}
        known = orjson.dumps([folder, len(self.known) if folder else 0, settings])
        if known not in self.known:
            where = self.scratch / (folder or str(len(self.known)))
            where.mkdir(exist_ok=True)
            asked = {"place": str(self.place), "folder": str(where), "settings": settings}
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(orjson.dumps(asked) + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            assert answer, f"a run with {settings} broke: see stderr"
            self.known[known] = orjson.loads(answer)
        return self.known[known]

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observer]:
    observer = Observer(place, tmp_path_factory.mktemp("runs"))
    yield observer
    observer.close()


def changed(one: Any, other: Any) -> list[str]:
    """What is not the same in two runs."""
    return [name for name in one if one[name] != other[name]]


CASES = {
    name: RUNS.get(name, OTHER.get(name)) for name in FIELDS if name != "resume_from_checkpoint"
}


def test_every_key_has_a_case():
    assert {name for name, case in CASES.items() if case is None} == ONE_VALUE.keys()
    assert ROWS.keys() == DATASET_FIELDS.keys()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case is not None])
def test_key_changes_the_run_or_is_reported(runs, name):
    case = CASES[name]
    assert case is not None
    value, needs = case
    before, after = runs.see(needs), runs.see(needs | {name: value})
    assert before["status"] == 0 or "broken" in needs.values(), before["text"]
    assert changed(before, after) or f"ignored: {name} = " in after["text"], after["text"]


@pytest.mark.parametrize("name", ROWS)
def test_key_of_a_data_set_changes_the_run(runs, name):
    value, entry = ROWS[name]
    before, after = (
        runs.see({"datasets": [part], "sequence_len": 128})
        for part in (entry, entry | {name: value})
    )
    assert before["status"] == 0, before["text"]
    assert changed(before, after) or f"ignored: datasets.0.{name} = " in after["text"]


def test_the_same_run_twice_is_the_same(runs):
    """So what differs above differs by the key."""
    options = {"report_to": ["wandb", "aim", "tensorboard"], "eval_prompts": ["the"]}
    one, other = (runs.see(options, folder=name) for name in ("one", "other"))
    assert one["status"] == 0 and one == other


def test_resuming(runs):
    for name in ("kept", "anew"):
        runs.see({"max_steps": 2}, folder=name)
    going_on = runs.see({}, folder="kept")
    assert changed(going_on, runs.see({"resume_from_checkpoint": False}, folder="anew"))
