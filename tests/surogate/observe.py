"""Runs seen from outside, for test_every_key.py: a process that reads settings and answers with all
that can be seen of the run, one JSON object a line each way.

It is a process of its own because the checks of shapes, which the tests turn on everywhere else,
cost ten times what these runs do.
"""

import hashlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import orjson

from surogate import light
from surogate import train as training
from surogate.data import dataset
from tests.surogate.runs import invoke, write_config

PACKAGES = ("tensorboard", "wandb", "aim")
INNER = ("compat", "compat.proto", "summary", "summary.writer", "summary.writer.event_file_writer")
# Of a log: what does not decide the result, and the settings, which would differ by themselves.
FLEETING = {"time", "duration_ms", "tokens_per_second", "sol", "memory", "config"}


def spies() -> dict[str, Any]:
    """What runs hand to their parts, written down; the packages of trackers are stand-ins."""
    seen: dict[str, Any] = {}

    def spy(owner: Any, name: str, note: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            seen[name] = note(*arguments, **options)
            return real(*arguments, **options)

        setattr(owner, name, noted)

    spy(training, "TrainStep", lambda *a, **k: re.sub(r" at 0x\w+", "", repr(a[4:])))
    spy(training, "Saver", lambda device, **k: k["background"])
    real = dataset.tokenise

    def tokenise(*arguments: Any, workers: int, **options: Any) -> Any:
        seen["workers"] = workers
        return real(*arguments, workers=1, **options)

    modules: Any = {training: {"plot": lambda log, folder, title: seen.update(plot=title)}}
    modules |= {light: {"product_rate": lambda device: 1e9}, dataset: {"tokenise": tokenise}}
    for module, changes in modules.items():
        for name, value in changes.items():
            setattr(module, name, value)
    for name in PACKAGES:
        package = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
        package.init.return_value.id = package.Run.return_value.hash = "name"
        sys.modules[name] = seen[name] = package
    for name in INNER:
        sys.modules[f"tensorboard.{name}"] = seen["tensorboard"]
    return seen


def observe(place: Path, folder: Path, calls: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Runs in a folder that has everything of ``place``."""
    for path in place.iterdir():
        if not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    before = {path.name for path in folder.iterdir()}
    os.chdir(folder)
    for name in PACKAGES:
        calls[name].reset_mock()
    result = invoke(write_config(folder, **settings))
    if result.exit_code not in (0, 1):
        raise RuntimeError(f"{settings}: {result.exception!r}")
    text = result.output.replace(str(folder), "")
    text = re.sub(
        r"[\d.]+k? tok/s|eta .*|in [\d.]+ s|sol [\d.]+ %|[\d.]+ ([A-Z]?FLOP/s|GiB)", "", text
    )
    seen = {name: value for name, value in calls.items() if name not in PACKAGES}
    seen["wandb"] = opening(calls["wandb"].init.call_args)
    seen["aim"] = opening(calls["aim"].Run.call_args) + repr(calls["aim"].Run.return_value.name)
    seen["tensorboard"] = len(calls["tensorboard"].mock_calls) > 0
    made = [path for path in folder.iterdir() if path.name not in before | {"run.toml"}]
    files = {str(p.relative_to(folder)): digest(p) for top in made for p in walk(top)}
    return {"status": result.exit_code, "text": text, "calls": seen, "files": files}


def opening(call: Any) -> str:
    """The arguments of a tracker's opening, without the configuration."""
    shown = call.kwargs.items() if call else ()
    return repr({k: v for k, v in shown if k not in ("config", "settings")})


def walk(top: Path) -> Iterator[Path]:
    """The files of a run, but for its rows, whose folder is named by everything they depend on."""
    if top.is_file():
        yield top
    for path in sorted(top.rglob("*")) if top.is_dir() else ():
        if path.is_file() and path.relative_to(top).parts[0] != "data":
            yield path


def digest(path: Path) -> Any:
    """The bytes of a file; of a log, its records; of what holds settings, that it is there."""
    content = path.read_bytes()
    if content.startswith(b'{"log":"run"'):
        records = [orjson.loads(line) for line in content.splitlines()]
        return [{k: v for k, v in record.items() if k not in FLEETING} for record in records]
    if path.suffix in (".json", ".lock", ".md"):
        return ""
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    """Answers until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")  # runs print where they like
    os.dup2(2, 1)
    calls = spies()
    for line in sys.stdin.buffer:
        asked = orjson.loads(line)
        seen = observe(Path(asked["place"]), Path(asked["folder"]), calls, asked["settings"])
        answers.write(orjson.dumps(seen) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
