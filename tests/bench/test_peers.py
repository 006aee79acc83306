"""The peers' step on the host: a small model of each kind that a row asks for."""

from typing import Any

import numpy as np
import pytest

from bench import peers
from bench import rows as rows_module
from bench.rows import OURS, Row
from surogate.models.config import from_hf
from surogate.models.registry import hf_config

TINY = (
    hf_config("Qwen3-0.6B")
    | dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
)
pytestmark = [  # within transformers, PEFT and torch
    pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


def test_peers_run_in_bf16_alone(monkeypatch, capsys):
    assert rows_module.variants(Row("tiny", "lora")) != [OURS]
    fp8 = Row("tiny", "lora", recipe="fp8")
    assert rows_module.variants(fp8) == [OURS]
    monkeypatch.setattr("sys.argv", ["peers", *fp8.arguments()])
    with pytest.raises(SystemExit):
        peers.main()
    assert "--recipe fp8" in capsys.readouterr().err


def row(mode: Any, recompute: Any = "none") -> Row:
    return Row("tiny", mode, rows=2, accumulation=2, length=8, steps=2, rank=2, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_peers_take_the_same_step(mode, recompute, monkeypatch):
    monkeypatch.setattr(rows_module, "lookup", lambda name: from_hf(TINY))
    found = peers.measure(TINY, row(mode, recompute), "eager", device="cpu")
    assert len(found["seconds"]) == 2 and found["shape"] == row(mode, recompute).name
    assert found["loss"][0] == pytest.approx(np.log(96), abs=1)


def test_what_is_trained():
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in peers.build(TINY, row("lora"), "eager", "cpu").named_parameters()
        if parameter.requires_grad
    }
    assert len(shapes) == 2 * 7 * 2 and all(2 in shape for shape in shapes.values())
    full = peers.build(TINY, row("full"), "eager", "cpu")
    assert all(parameter.requires_grad for parameter in full.parameters())
    assert {str(parameter.dtype) for parameter in full.parameters()} == {"torch.bfloat16"}


def test_compile_compiles_every_layer():
    model = peers.build(TINY, row("full"), "compile", "cpu")
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
