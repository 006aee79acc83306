"""Predicted memory of the optimizers against the arrays that a training step really makes."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.batch import STAGED
from surogate.kernels.cublaslt import WORKSPACE_BYTES
from surogate.models.memory import memory_of
from surogate.models.walk import BYTE, CARD, HOST, Work
from surogate.optim.adamw import AdamWConfig
from surogate.optim.normuon import NorMuonConfig
from surogate.optim.rule import Rule
from tests.models import test_memory
from tests.models.test_memory import QWEN2, QWEN3, Tracker, held, step_of, work_of

card = test_memory.card  # the fixture

ADAMW8 = AdamWConfig(moment_dtype="uint8", master_dtype="bfloat16")
MUON = NorMuonConfig(adamw=AdamWConfig(master_dtype="bfloat16"))
MUON16 = NorMuonConfig(adamw=AdamWConfig(moment_dtype="bfloat16", master_dtype="float32"))


def work_with(config: Any, rule: Rule, layout: Any = CARD) -> Work:
    adamw = rule if isinstance(rule, AdamWConfig) else rule.adamw
    moments = {"uint8": BYTE, "float32": F32, "bfloat16": BF16}
    return work_of(config, (), layout, "block", None)._replace(
        moment_dtype=moments[adamw.moment_dtype],
        masters=adamw.master_dtype == "float32" and layout is CARD,
        normuon=isinstance(rule, NorMuonConfig),
    )


@pytest.mark.parametrize("config", [QWEN3, QWEN2], ids=["plain", "biases"])
@pytest.mark.parametrize("rule", [ADAMW8, MUON, MUON16], ids=["8 bits", "normuon", "16 bits"])
def test_what_stays_on_a_card_is_exact(card: Tracker, monkeypatch, rule, config):
    """State, and tables with what an update makes; besides, a few arrays of some numbers."""
    monkeypatch.setattr(test_memory, "AdamWConfig", lambda **_: rule)
    work = work_with(config, rule)
    step = step_of(work)
    memory = memory_of(work, graphs=True, evaluates=False)
    assert memory.optimizer == held(step.state.m, step.state.v, step.state.master)
    plans = [step._plan] if isinstance(rule, AdamWConfig) else [step._plan, step._plan.adamw]
    tables = [table.tensors for plan in plans for table in plan.tables]
    tables += [t for _, t in step._norms.tensors]
    known = held(step._feed._rows, step._table, *[(t.rows, t.chunk_tensor) for t in tables])
    known += STAGED * held(step._feed._rows)  # this step is on the host, which stages nothing
    making = card.most(step._run_update)
    products = memory.temporaries.get("update", 0) + memory.activations
    if rule is ADAMW8:
        known += 8192  # the codebook
        products = 0
    assert abs(memory.workspace - WORKSPACE_BYTES - known - (making - products)) <= 10 * 512


@pytest.mark.parametrize("rule", [ADAMW8, MUON], ids=["8 bits", "normuon"])
def test_an_update_on_the_host(monkeypatch, rule):
    """NumPy's own peak of an update is what the plan says, to a tenth."""
    import gc
    import tracemalloc

    monkeypatch.setattr(test_memory, "AdamWConfig", lambda **_: rule)
    config = test_memory.tiny("Qwen3-0.6B", hidden_size=256, vocab_size=2000)
    work = work_with(config, rule, HOST)
    step = step_of(work)
    step._run_update()
    step._count[...] = 1
    for grad in tree.leaves(step.grads):
        grad[...] = np.float32(1e-3)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        step._run_update()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    memory = memory_of(work, graphs=False, evaluates=False)
    assert memory.temporaries["update"] + memory.activations == pytest.approx(
        peak - before, rel=0.1
    )
