"""The command line: what reaches the modules behind it, its errors, and how fast help is."""

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from surogate import __version__
from surogate.cli import main, run
from surogate.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(monkeypatch):
    """Stands in for the modules behind the verbs and keeps what they were called with."""
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for module, names in {
        "surogate.train": ("train", "tokenize"),
        "surogate.plan": ("plan_command",),
        "surogate.sample": ("generate_command",),
        "surogate.info": ("info_command",),
    }.items():
        fake = ModuleType(module)
        for name in names:
            setattr(fake, name, lambda *a, _name=name, **k: seen.append((_name, a, k)))
        monkeypatch.setitem(sys.modules, module, fake)
    return seen


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\ndatasets:\n  - {path: rows.jsonl, type: text}\n")
    return str(path)


@pytest.mark.parametrize(
    "verb,called,lora",
    [
        ("sft", "train", True),
        ("pt", "train", False),
        ("tokenize", "tokenize", False),
        ("plan", "plan_command", False),
    ],
)
def test_verb_hands_over_the_configuration(calls, config, verb, called, lora):
    options = ["--set", "lora_rank=4", "--set", "save_steps=9", "--recipe", "bf16"]
    result = CliRunner().invoke(main, [verb, config, *options])
    assert result.exit_code == 0, result.output
    [(name, (loaded,), _)] = calls
    assert name == called
    assert (loaded.lora, loaded.lora_rank, loaded.save_steps) == (lora, 4, 9)
    assert loaded.origins["recipe"] == "--recipe"


@pytest.mark.parametrize("kind,lora", [("text", False), ("conversation", True)])
def test_run_chooses_the_verb(calls, config, kind, lora):
    result = CliRunner().invoke(run, [config, "--set", f"datasets.0.type={kind}"])
    assert result.exit_code == 0, result.output
    [(name, (loaded,), _)] = calls
    assert (name, loaded.lora) == ("train", lora)


def test_plan_needs_no_data(calls, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: tiny\n")
    assert CliRunner().invoke(main, ["plan", str(path)]).exit_code == 0
    assert CliRunner().invoke(main, ["sft", str(path)]).exit_code == 1


def test_generate(calls):
    options = "--adapter a --max-new-tokens 3 --temperature 0 --top-p 1 --seed 5 --device cpu --raw"
    result = CliRunner().invoke(main, ["generate", "m", "--prompt", "Hi", *options.split()])
    assert result.exit_code == 0, result.output
    assert calls.pop() == (
        "generate_command",
        (),
        {
            "model": "m",
            "prompt": "Hi",
            "adapter": "a",
            "max_new_tokens": 3,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 5,
            "device": "cpu",
            "raw": True,
        },
    )


def test_generate_reads_stdin_and_has_defaults(calls):
    result = CliRunner().invoke(main, ["generate", "m"], input="Hi\nthere\n")
    assert result.exit_code == 0, result.output
    assert calls.pop()[2] == {
        "model": "m",
        "prompt": "Hi\nthere",
        "adapter": None,
        "max_new_tokens": 128,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 0,
        "device": "auto",
        "raw": False,
    }
    empty = CliRunner().invoke(main, ["generate", "m"], input="\n")
    assert empty.exit_code == 1
    assert empty.stderr == "error: --prompt: is empty; give the text there or on stdin\n"


def test_info(calls):
    assert CliRunner().invoke(main, ["info"]).exit_code == 0
    assert calls == [("info_command", (), {})]


def test_user_error_is_one_line(calls, config):
    result = CliRunner().invoke(main, ["sft", config, "--set", "lora_rnk=4"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == ("error: unknown key 'lora_rnk' in --set: did you mean 'lora_rank'?\n")
    assert calls == []


def test_user_error_of_the_trainer(calls, config, monkeypatch):
    def train(config: Any) -> None:
        raise UserError("no GPU")

    monkeypatch.setattr(sys.modules["surogate.train"], "train", train)
    result = CliRunner().invoke(run, [config])
    assert (result.exit_code, result.stderr) == (1, "error: no GPU\n")


def test_other_exceptions_keep_their_traceback(calls, config, monkeypatch):
    def train(config: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["surogate.train"], "train", train)
    result = CliRunner().invoke(main, ["sft", config])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("words", [["sft"], ["nothing"], ["sft", "a", "--no-such"], ["info", "x"]])
def test_wrong_command_line(words):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_version():
    for command in (main, run):
        assert __version__ in CliRunner().invoke(command, ["--version"]).stdout


def test_process_reports_a_user_error(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "surogate.cli", "sft", "none.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "error: none.yaml: cannot be read: No such file or directory\n"


@pytest.mark.parametrize("words", [["--help"], ["sft", "--help"]])
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\n"
        "from surogate.cli import main\n"
        f"main({words!r}, standalone_mode=False)\n"
        "heavy = 'numpy cupy torch matplotlib rich datasets jaxtyping msgspec yaml'.split()\n"
        "sys.exit(' '.join(name for name in heavy if name in sys.modules) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "Usage: " in done.stdout


def test_help_is_fast():
    def seconds() -> float:
        begin = time.perf_counter()
        words = [sys.executable, "-m", "surogate.cli", "--help"]
        subprocess.run(words, capture_output=True, check=True, cwd=ROOT)
        return time.perf_counter() - begin

    # The best of three: another load on the machine is not ours to fail for.
    assert min(seconds() for _ in range(3)) < 0.3


def test_an_interrupt_before_a_run_takes_signals_ends_it_with_its_status(config, monkeypatch):
    def interrupted(*args: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("surogate.config.load_config", interrupted)
    result = CliRunner().invoke(run, [config])
    assert (result.exit_code, result.output) == (130, "")
