"""What users of other trainers reported: USER_REPORTS.md names the tests that hold each report's
right behaviour. Here are those that belong to no one part, and the check of that table.
"""

import ast
import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from surogate.config import load_config
from surogate.errors import UserError
from surogate.kernels.lm_head import default_chunk
from surogate.models.companions import with_stop_token
from surogate.models.config import from_hf, read_config
from surogate.models.hf import CheckpointError, read_model
from surogate.models.registry import hf_config
from surogate.report import read_log
from tests.surogate.runs import invoke, make_model, prepare, steps, train, write_config

TESTS = Path(__file__).parent
ROW = re.compile(r"\| (P\d\d) \|.*\| (.*) \|")
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def functions(file: str) -> frozenset[str]:
    """Every function of a test file."""
    parsed = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in parsed.body if isinstance(node, ast.FunctionDef))


def table() -> list[tuple[str, str]]:
    """(report, what holds it) of each line of the table."""
    lines = (TESTS / "USER_REPORTS.md").read_text(encoding="utf-8").splitlines()
    found = [ROW.fullmatch(line) for line in lines if line.startswith("| P")]
    assert all(found)
    return [(match[1], match[2]) for match in found if match]


def test_every_report_stands_once_in_the_table():
    reports = [report for report, _ in table()]
    assert reports == sorted(set(reports)) and len(reports) == 60


@pytest.mark.parametrize("report,held", table())
def test_named_tests_exist(report, held):
    named = NAMED.findall(held)
    assert named or held.startswith("not yet: "), report
    for file, name in named:
        assert name in functions(file), f"{report}: {file} has no {name}"


@pytest.mark.parametrize(
    "model_type",
    "qwen3_5 qwen3_5_moe qwen3_next qwen3_moe qwen3_vl gpt_oss nemotron_h gemma3 mixtral".split(),
)
def test_models_that_are_not_there_yet_are_refused(model_type):
    """P11, P37 to P39, P42, P44 to P46, P48, P49, P63, P74: by name, before anything is loaded."""
    with pytest.raises(ValueError, match=rf"^model_type '{model_type}' is not supported; supp"):
        from_hf(hf_config("Qwen3-0.6B") | {"model_type": model_type})


def test_several_gpus_are_refused(tmp_path):
    """P19, P21, P61."""
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ngpus: 2\n")
    with pytest.raises(UserError, match="gpus = 2 is not available in .*; use gpus = 1"):
        load_config(path, need_data=False)


@pytest.mark.parametrize(
    "name,ids,taught",
    [("Llama-3.1-8B", 128001, 128009), ("Qwen2.5-7B", 151643, 151645)],
)
def test_servers_stop_at_the_terminator_that_a_base_model_was_taught(name, ids, taught):
    """P12: which token that is, data/terminator.py finds in the rows."""
    settings = hf_config(name)
    assert settings["eos_token_id"] == ids
    assert with_stop_token(settings, taught)["eos_token_id"] == [ids, taught]


def test_logits_of_a_chunk():
    """P16: 8,192 tokens of 151,936 logits are 4.64 GiB in float32."""
    assert 8192 * 151936 * 4 / 2**30 == pytest.approx(4.64, abs=0.005)
    assert default_chunk(8192, 151936, 2) * 151936 * 2 / 2**30 == pytest.approx(0.58, abs=0.005)


def test_how_often_things_are_told_changes_nothing(tmp_path):
    """P24: nor does a second run; the weights are equal to the bit."""
    folder, found = prepare(tmp_path), []
    for often in (1, 1, 3):
        out = tmp_path / f"out{len(found)}"
        options = {"train_seed": 7, "max_steps": 8, "adamw_epsilon": 1e-8, "output_dir": str(out)}
        records = train(folder, **options, logging_steps=often, eval_steps=2 * often)
        found.append(((out / "model.safetensors").read_bytes(), steps(records)))
    first, again, rarely = found
    assert first == again
    assert first[0] == rarely[0]


def test_a_shard_of_an_older_save_is_not_read(tmp_path):
    """P32: files that the index does not name may hold anything."""
    model = make_model(tmp_path / "model")
    config, f32 = read_config(model), np.dtype(np.float32)
    want = read_model(model, config, f32)
    shutil.move(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    names = _names(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-00004-of-00005.safetensors").write_bytes(b"of an older save")
    assert (read_model(model, config, f32).embed == want.embed).all()
    index["weight_map"][names[0]] = "model-00004-of-00005.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00004-of-00005.safetensors: truncated or not"):
        read_model(model, config, f32)


def _names(file: Path) -> list[str]:
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def test_float16_is_how_a_result_is_stored_and_not_computed(tmp_path):
    """P74: no step is skipped, and the first lines say what is computed in."""
    folder = prepare(tmp_path)
    result = invoke(write_config(folder, torch_dtype="float16", max_steps=2))
    assert result.exit_code == 0 and "all weights), computed in float32\n" in result.stdout
    assert np.isfinite(steps(read_log(folder / "out" / "log.jsonl"), "norm")).all()
    assert read_config(folder / "out").torch_dtype == "float16"
