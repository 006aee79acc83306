"""Whole training steps, each in a process of its own; a peer that has the same step runs next.

pytest bench/test_steps.py -m gpu --benchmark-json steps.json      # -k ours, -k '8B and LoRA'
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.harness import CLOCK
from bench.rows import OURS, ROWS, variants

CASES = {(row.name, variant): row for row in ROWS for variant in variants(row)}


@pytest.mark.gpu
@pytest.mark.benchmark(group="steps", timer=CLOCK.read)
@pytest.mark.parametrize(("shape", "variant"), CASES)
def test_step(shape: str, variant: str, commit: str, benchmark: Any) -> None:
    """The rounds are the steps of the process, which timed them itself."""
    module = ["bench.steps"] if variant == OURS else ["bench.peers", "--variant", variant]
    found = run(*module, *CASES[shape, variant].arguments())
    seconds = iter(found["seconds"])
    benchmark.pedantic(lambda: CLOCK.advance(next(seconds)), rounds=len(found["seconds"]))
    benchmark.extra_info.update(found, variant=variant, commit=commit)


def run(*arguments: str) -> dict[str, Any]:
    """What a module prints on its last line."""
    command = [sys.executable, "-m", *arguments]
    root = Path(__file__).parent.parent
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.fail(f"{' '.join(arguments)}:\n{ended.stderr[-2000:]}", pytrace=False)
    return json.loads(ended.stdout.splitlines()[-1])
