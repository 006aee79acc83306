"""The suites of bench/ end to end without a card: pytest writes a file, the report reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import generated, tables_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
SOME = "grad_norm or rope-rope_fwd or (Qwen3-0.6B and qkv) or (test_step and 0.6B and LoRA)"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file of a run over some cases of each suite, and the run."""
    path = tmp_path_factory.mktemp("bench") / "sitting.json"
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-m", "gpu", "-k", SOME]
    command += ["-p", "tests.bench.fake_card", "-p", "no:cacheprovider", "--commit", "abc1234"]
    command += ["--benchmark-quiet", "--benchmark-json", str(path)]
    # A worker of pytest-xdist says so in its environment, where pytest-benchmark measures nothing.
    env = {key: os.environ[key] for key in os.environ if not key.startswith("PYTEST_XDIST")}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr  # rope, and it alone
    return path, ended.stdout


def test_an_op_whose_tests_fail_is_not_measured(written):
    path, printed = written
    ops = {b["extra_info"].get("op") for b in json.loads(path.read_text())["benchmarks"]}
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert ops == {None, "grad_norm", "matmul"}
    assert failed and all("test_op[rope-" in line for line in failed)
    assert "tests/kernels/test_rope.py fails on this card" in printed


def test_steps_come_first(written):
    groups = [each["group"] for each in json.loads(written[0].read_text())["benchmarks"]]
    assert groups == sorted(groups, key=lambda group: group != "steps")
    assert set(groups) == {"steps", "gemm", "ops"}


def test_times_are_those_of_the_card(written):
    for each in json.loads(written[0].read_text())["benchmarks"]:
        wanted = each["extra_info"].get("seconds", [0.002, 0.001, 0.003])
        assert each["stats"]["median"] == pytest.approx(sorted(wanted)[1])


def test_shares_are_of_the_ceilings_of_the_sitting(written):
    found = {
        each["extra_info"]["case"]: each["extra_info"]
        for each in json.loads(written[0].read_text())["benchmarks"]
        if each["group"] != "steps"
    }
    norm = found["grad_norm 0.6B, bf16"]
    assert norm["share"] == pytest.approx(norm["bytes"] / 0.002 / 4e12)
    assert norm["equal_copy"] == 0  # above EQUAL
    product = found["4096 x 1024 x 4096, Qwen3-0.6B qkv y"]
    assert product["flops"] == 2 * 4096 * 1024 * 4096
    assert product["share"] == pytest.approx(product["flops"] / 0.002 / 8e14)
    assert "equal_copy" not in product


def test_the_report_reads_what_the_suites_write(written):
    text = generated(*tables_of([written[0]]))
    assert "commit abc1234" in text and "copy 4.00 TB/s, products 800 TFLOP/s" in text
    for title in ("### Training steps", "### Ops", "### Matrix products"):
        assert title in text
    assert "| Qwen3-0.6B LoRA, 2 x 2048 x 4 | 81,920 |" in text and "2.00 x |" in text
