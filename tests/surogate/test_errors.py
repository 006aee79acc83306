"""Whatever a person can put right is one line on stderr, exit status 1 and no traceback."""

import errno
import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from surogate.cli import main
from surogate.device import choose_device
from surogate.errors import UserError
from surogate.report import read_log
from tests.surogate.runs import VOCAB, invoke, make_model, prepare, start, steps, write_config


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plot of runs in this process."""
    monkeypatch.setattr("surogate.train.plot", lambda *arguments: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def error_of(result: Result) -> str:
    """The one line of an error, without its first word."""
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


Change = Callable[[Path], Any]


def on_rows(text: bytes) -> Change:
    return lambda folder: (folder / "texts.jsonl").write_bytes(text)


def on_model(name: str, edit: Callable[[bytes], bytes | None]) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model" / name
        new = edit(file.read_bytes())
        if new is None:
            file.unlink()
        else:
            file.write_bytes(new)

    return change


def with_config(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps(json.loads(raw) | changes).encode()


ROW = b'{"text": "the cat sees a dog."}\n'
CASES: dict[str, tuple[Change | None, list[str], str]] = {
    # name: (what is changed in the folder, overrides, the error; {f} is the folder)
    "no model folder": (None, ["model={f}/none"], "model = {f}/none: there is no such folder"),
    "model is a file": (
        None,
        ["model={f}/texts.jsonl"],
        "model = {f}/texts.jsonl: is a file; give the folder that holds config.json",
    ),
    "no config.json": (
        on_model("config.json", lambda raw: None),
        [],
        "{f}/model: has no config.json; give a model directory",
    ),
    "config.json is no JSON": (
        on_model("config.json", lambda raw: raw[:-9]),
        [],
        "{f}/model/config.json: cannot be read as JSON: ",
    ),
    "another architecture": (
        on_model("config.json", with_config(model_type="mamba")),
        [],
        "{f}/model/config.json: model_type 'mamba' is not supported; supported: ",
    ),
    "no weights": (
        on_model("model.safetensors", lambda raw: None),
        [],
        "{f}/model: has neither model.safetensors nor model.safetensors.index.json",
    ),
    "weights cut short": (
        on_model("model.safetensors", lambda raw: raw[:-7]),
        [],
        "{f}/model/model.safetensors: truncated or not a safetensors file (",
    ),
    "weights empty": (
        on_model("model.safetensors", lambda raw: b""),
        [],
        "{f}/model/model.safetensors: truncated or not a safetensors file (",
    ),
    "weights of another size": (
        on_model("config.json", with_config(intermediate_size=64)),
        [],
        "{f}/model/model.safetensors: tensor model.layers.0.mlp.",
    ),
    "no tokenizer": (
        on_model("tokenizer.json", lambda raw: None),
        [],
        "{f}/model/tokenizer.json: no such file; the model folder must have a tokenizer.json",
    ),
    "tokenizer cut short": (
        on_model("tokenizer.json", lambda raw: raw[:-9]),
        [],
        "{f}/model/tokenizer.json: not a tokenizer: ",
    ),
    "no chat template": (
        on_model("tokenizer_config.json", lambda raw: b'{"eos_token": "<|end|>"}'),
        ["datasets.0.path={f}/chats.jsonl", "datasets.0.type=conversation"],
        "{f}/chats.jsonl row 1: a conversation needs a chat template and {f}/model has none",
    ),
    "no data file": (
        None,
        ["datasets.0.path={f}/no.jsonl"],
        "{f}/no.jsonl: no such file or folder",
    ),
    "wrong column": (None, ["datasets.0.text_field=body"], "{f}/texts.jsonl row 1: "),
    "column of another type": (
        on_rows(ROW + b'{"text": 5}\n'),
        [],
        "{f}/texts.jsonl row 2: ",
    ),
    "empty data set": (on_rows(b""), [], "{f}/texts.jsonl: the data set has no rows"),
    "blank lines alone": (on_rows(b"\n\n"), [], "{f}/texts.jsonl: the data set has no rows"),
    "not UTF-8": (
        on_rows(ROW * 2 + b'{"text": "caf\xe9"}\n' + ROW),
        [],
        "{f}/texts.jsonl line 3: not UTF-8; convert the file to UTF-8",
    ),
    "not JSON": (on_rows(ROW + b"{text}\n"), [], "{f}/texts.jsonl line 2: invalid JSON: "),
    "too little data": (
        on_rows(ROW * 3),
        [],
        "the data fill 1 rows of 32 tokens, but one step takes 2 (batch 2, accumulation 1",
    ),
    "unknown key": (None, ["learning_rat=1"], "unknown key 'learning_rat' in --set: did you mean"),
    "negative rate": (None, ["learning_rate=-0.1"], "--set: learning_rate = -0.1: must be "),
    "rate of no number": (None, ["learning_rate=fast"], "--set: learning_rate = 'fast': must be "),
    "no row length": (None, ["sequence_len=0"], "--set: sequence_len = 0: must be "),
    "rows longer than the model": (
        None,
        ["sequence_len=512"],
        "sequence_len = 512: the model is made for 128 positions; use less, or set rope_scaling",
    ),
    "no steps": (None, ["max_steps=0"], "--set: max_steps = 0: must be -1 or at least 1"),
    "unknown target": (
        None,
        ["lora=true", 'lora_target_modules=["q_prj"]'],
        "lora_target_modules: LoRA target 'q_prj' does not exist, did you mean q_proj",
    ),
    "warm-up longer than the run": (
        None,
        ["max_steps=-1", "num_epochs=1", "warmup_steps=100"],
        "learning rate schedule: ",
    ),
    "output over the model": (
        None,
        ["output_dir={f}/model"],
        "output_dir = {f}/model: is the model's own folder, which the result would replace",
    ),
    "output below a file": (
        None,
        ["output_dir={f}/texts.jsonl/out"],
        "{f}/texts.jsonl/out: not a ",
    ),
    "output is a file": (None, ["output_dir={f}/texts.jsonl"], "{f}/texts.jsonl: file exists"),
    "log below a file": (
        None,
        ["log_file={f}/texts.jsonl/log"],
        "{f}/texts.jsonl/log: cannot be written: ",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line(folder, name):
    change, overrides, message = CASES[name]
    if change is not None:
        change(folder)
    overrides = [text.replace("{f}", str(folder)) for text in overrides]
    error = error_of(invoke(write_config(folder), *overrides))
    assert error.startswith(message.replace("{f}", str(folder))), error


def test_tokenizer_of_a_larger_model(folder):
    make_model(folder / "model", vocab=VOCAB - 20)
    error = error_of(invoke(write_config(folder)))
    assert error.startswith(f"{folder}/texts.jsonl row ")
    assert f"is not below the model's vocab_size {VOCAB - 20}; the tokenizer belongs to" in error


def test_a_vocabulary_with_room_to_spare_is_fine(folder):
    make_model(folder / "model", vocab=VOCAB + 7)
    assert invoke(write_config(folder, max_steps=1)).exit_code == 0


def test_nothing_is_a_target(folder):
    rows = [{"messages": [{"role": "user", "content": "the cat"}]}] * 9
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [f"datasets.0.path={folder}/chats.jsonl", "datasets.0.type=conversation"]
    error = error_of(invoke(write_config(folder), *chats))
    assert str(folder / "chats.jsonl") in error and "target" in error
    assert not (folder / "out" / "log.jsonl").exists()  # before the first step


def test_a_process_prints_the_line_and_nothing_else_on_stderr(folder):
    (folder / "model" / "model.safetensors").unlink()
    process = start(write_config(folder))
    output, errors = process.communicate()
    assert process.returncode == 1
    assert errors == (
        f"error: {folder}/model: has neither model.safetensors nor model.safetensors.index.json\n"
    )


# A card that is asked for and not there.


def fake_cupy(count: Any, capability: str = "90") -> types.SimpleNamespace:
    class CUDARuntimeError(RuntimeError):
        pass

    def devices() -> int:
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    runtime = types.SimpleNamespace(getDeviceCount=devices, CUDARuntimeError=CUDARuntimeError)
    device = types.SimpleNamespace(compute_capability=capability)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, Device=lambda: device))


@pytest.mark.parametrize(
    "module,reason",
    [
        (None, "CuPy is not installed: pip install 'surogate[cuda13]' (or cuda12)"),
        (fake_cupy(0), "there is no NVIDIA GPU"),
        (fake_cupy("no driver"), "the NVIDIA driver does not answer (no driver)"),
        (fake_cupy(1, "75"), "the GPU is sm_75; sm_80 (Ampere) or newer is needed"),
    ],
)
def test_no_card(folder, monkeypatch, module, reason):
    monkeypatch.setitem(__import__("sys").modules, "cupy", module)
    error = error_of(invoke(write_config(folder), "device=cuda"))
    assert error == f"device = cuda: {reason}; use device = cpu, or auto"
    device = choose_device("auto")
    assert (device.kind, device.no_card) == ("cpu", reason)
    assert device.fact().endswith(f"({reason})")
    assert choose_device("cpu").no_card == ""


# A disk that is full.


def limited(config: Path, size: int, *overrides: str) -> tuple[int, str]:
    """Exit status and errors of a run whose files may not exceed ``size`` bytes."""
    process = start(config, *overrides, limit=size)
    _, errors = process.communicate()
    return process.returncode, errors


def test_file_too_large_while_tokenising(folder):
    status, errors = limited(write_config(folder), 1000)
    assert status == 1
    [line] = errors.splitlines()
    assert line.startswith(f"error: {folder}/out/data: ")
    assert line.endswith("is the disk full?") or line.endswith("file too large")
    left = [p.name for p in (folder / "out" / "data").iterdir()]
    assert [name for name in left if not name.endswith(".lock")] == []


def test_file_too_large_in_the_log_the_checkpoint_and_the_result(folder):
    config = write_config(folder, max_steps=4, save_steps=2)
    assert CliRunner().invoke(main, ["tokenize", str(config)]).exit_code == 0
    out = folder / "out"
    assert limited(config, 1000) == (
        1,
        f"error: {out}/log.jsonl: cannot be written: File too large; free the disk or set another "
        "output_dir or log_file\n",
    )
    assert limited(config, 50_000) == (
        1,
        f"error: {out}/step_00000002: cannot write the checkpoint: file too large; earlier "
        "checkpoints are whole\n",
    )
    assert not list(out.glob("*step_*"))
    assert invoke(config).exit_code == 0
    for path in (out / "model.safetensors", out / "config.json"):
        path.unlink()
    assert limited(config, 50_000) == (1, f"error: {out}: cannot be written: File too large\n")
    assert not (out / "model.safetensors").exists()
    assert invoke(config).exit_code == 0  # and again, with room
    assert (out / "model.safetensors").exists()


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_space_for_a_checkpoint_leaves_the_one_before(folder, monkeypatch):
    config = write_config(folder, max_steps=4, save_steps=2)
    real, calls = os.fsync, []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 6:  # the second checkpoint
            no_space()
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        error = error_of(invoke(config))
    assert error == (
        f"{folder}/out/step_00000004: cannot write the checkpoint: no space left on device; "
        "earlier checkpoints are whole"
    )
    assert steps(read_log(folder / "out" / "log.jsonl"), "step") == [1, 2, 3, 4]
    result = invoke(config)
    assert result.exit_code == 0 and "resumed after step 2" in result.stdout


@pytest.mark.parametrize(
    "place,message",
    [
        ("surogate.data.dataset.write_packed", "{f}/out/data: no space left on device"),
        ("surogate.data.tokenise.Encoder.encode", "{f}/out/data: no space left on device"),
        ("os.posix_fallocate", "{f}/out/data: no space left on device"),
        ("surogate.card.Card.text", "{f}/out: cannot be written: the disk is full; "),
        ("surogate.setup.fcntl.flock", "output_dir = {f}/out: cannot be locked: no space left"),
    ],
)
def test_no_space(folder, monkeypatch, place, message):
    with monkeypatch.context() as patch:
        patch.setattr(place, no_space)
        error = error_of(invoke(write_config(folder)))
    assert error.startswith(message.replace("{f}", str(folder)))
    assert invoke(write_config(folder)).exit_code == 0


def test_space_is_taken_before_rows_are_written(folder, monkeypatch):
    """For tokens and for labels: a write through a mapping of a full disk kills the process."""
    real, sizes = os.posix_fallocate, []

    def reserve(handle: int, offset: int, size: int) -> None:
        assert os.fstat(handle).st_size == size
        sizes.append(size)
        real(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    config = write_config(folder, validation_split_ratio=0)
    assert CliRunner().invoke(main, ["tokenize", str(config)]).exit_code == 0
    [tokens] = (folder / "out" / "data").glob("*/train/tokens.npy")
    assert sizes == 2 * [tokens.stat().st_size]


def test_a_file_system_that_cannot_reserve_is_written_to_all_the_same(folder, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    config = write_config(folder)
    assert CliRunner().invoke(main, ["tokenize", str(config)]).exit_code == 0


# The other verbs.


@pytest.mark.parametrize(
    "words,message",
    [
        (["none"], "model = none: there is no such folder"),
        (["{f}/model", "--adapter", "{f}/none"], "{f}/none/adapter_config.json: missing"),
        (["{f}/empty"], "{f}/empty: has no config.json; give a model directory"),
        (["{f}/tuned"], "{f}/tuned: is an adapter, not a model; give its base (org/m) with "),
    ],
)
def test_generate(folder, words, message):
    (folder / "empty").mkdir()
    (folder / "tuned").mkdir()
    adapter = folder / "tuned" / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "org/m"}')
    words = [word.replace("{f}", str(folder)) for word in words]
    result = CliRunner().invoke(main, ["generate", *words, "--prompt", "the", "--device", "cpu"])
    assert error_of(result).startswith(message.replace("{f}", str(folder)))


def test_generate_with_a_larger_tokenizer(folder):
    make_model(folder / "model", vocab=VOCAB - 40)
    words = ["generate", str(folder / "model"), "--prompt", "the cat sees", "--device", "cpu"]
    error = error_of(CliRunner().invoke(main, words))
    assert error.startswith(f"{folder}/model: the tokenizer gives token ")
    assert error.endswith(f", the model has {VOCAB - 40}; it belongs to another model")


@pytest.mark.parametrize(
    "error,first",
    [
        (MemoryError("Out of memory allocating 5 bytes."), "Out of memory allocating 5 bytes"),
        (RuntimeError("cudaErrorMemoryAllocation: out of memory"), "cudaErrorMemoryAllocation: "),
        (MemoryError(), "MemoryError; "),
    ],
)
def test_out_of_memory(folder, monkeypatch, error, first):
    """What the run takes by group, and what takes less, each with what would be taken."""

    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr("surogate.train.Run._launch", full)
    result = invoke(write_config(folder, recompute="none"))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    *told, last = result.stderr.splitlines()
    assert last.startswith(f"error: out of memory: {first}")
    assert "from its newest checkpoint" in last
    text = "\n".join(told)
    for group in ("weights, float32 ", "gradients, float32 ", "optimizer, ", "activations kept "):
        assert f"\n{group}" in text
    less = text.partition("\nwhat takes less:\n")[2].splitlines()
    sizes = [float(line.split()[0]) for line in less if line.split()[1] in ("KiB", "MiB", "GiB")]
    total = next(line for line in told if line.startswith("total ")).split()
    assert len(sizes) >= 3 and all(size < float(total[1]) for size in sizes)
    assert "per_device_train_batch_size = 1, gradient_accumulation_steps = 2" in text
    log = read_log(folder / "out" / "log.jsonl")
    assert (log[-1]["log"], log[-1]["status"]) == ("end", "failed")


def test_a_bug_keeps_its_traceback(folder, monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("surogate.train.Run._launch", broken)
    result = invoke(write_config(folder))
    assert isinstance(result.exception, ZeroDivisionError)


def test_user_errors_are_not_value_errors():
    assert not issubclass(UserError, ValueError)  # so that no layer rewrites one
