"""Whole models and steps on a card: bf16 gradients against float32, graphs against eager, twice."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from surogate.device import Device, choose_device
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.batch import Batch, batch_of
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec, init_adapter
from surogate.models.names import named
from surogate.models.registry import lookup
from surogate.models.tree import Model
from surogate.optim.adamw import AdamWConfig, AdamWState
from surogate.step import Feed, StepOptions, TrainStep
from tests.oracle import same_bits, to_host

pytestmark = pytest.mark.gpu
LENGTHS = [200, 1, 57, 254]  # 512 tokens; documents begin inside and on tiles


def four_layers(name: str) -> ModelConfig:
    """A published model's widths with four layers and a small vocabulary."""
    config = lookup(name)
    return dataclasses.replace(config, layers=4, vocab=4096, windows=config.windows[:4])


def tokens_of(config: ModelConfig, seed: int = 0, lengths: list[int] = LENGTHS) -> Batch:
    rng = np.random.default_rng(seed)
    return batch_of(rng.integers(0, config.vocab, sum(lengths), dtype=np.int32), lengths)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b", "qwen2.5-0.5b"])
def test_bf16_gradients_point_where_float32_ones_do(name):
    config = four_layers(name)
    model = init_model(config, 0, BF16)
    batch = tokens_of(config)
    common = dict(settings=Settings(config))
    table = dense.rotary_table(config, 512)
    wide = tree.map(lambda x: x.astype(F32), model)
    want, grads = dense.loss_and_grads(wide, None, batch, table=table, **common)
    device = choose_device("cuda")
    got, card = dense.loss_and_grads(
        device.put(model), None, device.put(batch), table=device.put(table), **common
    )
    assert int(got.count) == int(want.count)
    assert float(got.nll_sum) == pytest.approx(float(want.nll_sum), rel=2e-3)
    found = named(card.model, config)
    for key, grad in named(grads.model, config).items():
        x, y = grad.astype(np.float64).ravel(), to_host(found[key]).astype(np.float64).ravel()
        cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        assert cosine >= 0.999, f"{key}: cosine {cosine:.6f}"
        assert np.linalg.norm(y) == pytest.approx(np.linalg.norm(x), rel=0.01), key


def run(
    device: Device,
    config: ModelConfig,
    *,
    graphs: bool,
    lora: bool,
    recompute: Any,
    renewed: bool = False,
) -> Any:
    """Three steps of two micro-batches; returns losses and the trained arrays. ``renewed``: each of
    a TrainStep of its own, which goes on from the arrays of the one before.
    """
    spec = LoraSpec.of(8, 16, ["all"]) if lora else None
    adapter = device.put(init_adapter(config, spec, 0, BF16)) if spec else None

    def made(model: Model, state: AdamWState | None = None) -> TrainStep:
        return TrainStep(
            device,
            model,
            adapter,
            Settings(config, spec),
            AdamWConfig(master_dtype="float32" if lora else "bfloat16"),
            StepOptions(512, recompute, None, F32 if lora else BF16, 1.0, graphs),
            state=state,
        )

    step, losses = made(device.put(init_model(config, 0, BF16))), []
    for _ in range(3):
        for part in range(2):
            step.micro(tokens_of(config, part))
        losses.append(step.update(1e-3).result())
        if renewed:
            step.settle()
            step = made(step.model, step.state)
    return losses, [to_host(x) for x in tree.leaves(step.trainable)]


@pytest.mark.parametrize("lora", [False, True])
def test_graphs_eager_recomputation_and_repetition_give_the_same_bits(lora):
    import cupy

    device, config = choose_device("cuda"), four_layers("qwen3-0.6b")
    with cupy.cuda.Stream(non_blocking=True):
        losses, weights = run(device, config, graphs=True, lora=lora, recompute="none")
        assert losses[2].loss < losses[0].loss and all(r.applied for r in losses)
        for graphs, recompute, renewed in [
            (True, "none", False),
            (False, "none", False),
            (True, "block", False),
            (True, "selective", False),
            (True, "none", True),
        ]:
            how: Any = {"graphs": graphs, "recompute": recompute, "renewed": renewed}
            again, other = run(device, config, lora=lora, **how)
            assert again == losses, how
            for a, b in zip(weights, other, strict=True):
                same_bits(a, b)


# Documents of 512 tokens: one that fills the row has a graph of its own; others change in number
# and in length, and some are shorter than a tile.
LAYOUTS = [LENGTHS, [512], [1] * 12 + [500], [256, 256], [129, 383]]


def changing(device: Device, config: ModelConfig, *, graphs: bool, said: Any = pytest.fail) -> Any:
    """Ten steps of two micro-batches whose documents change, with evaluations between; then one of
    more micro-batches than the host may run ahead, none of which is waited for.
    """
    options = StepOptions(512, "none", None, BF16, 1.0, graphs)
    model = device.put(init_model(config, 0, BF16))
    step = TrainStep(device, model, None, Settings(config), AdamWConfig(), options, say=said)
    pending, scores = [], []
    for number in range(11):
        for part in range(2 if number < 10 else 3 * Feed.AHEAD):
            lengths = LAYOUTS[(2 * number + part) % len(LAYOUTS)]
            step.micro(tokens_of(config, 100 * number + part, lengths))
        pending.append(step.update(1e-3))
        if number % 3 == 0:
            scores.append(step.logprobs(tokens_of(config, number, LAYOUTS[-1])))
    return [p.result() for p in pending], scores, list(map(to_host, tree.leaves(step.trainable)))


def test_graphs_see_the_documents_of_each_micro_batch():
    import cupy

    device, config = choose_device("cuda"), four_layers("qwen3-0.6b")
    with cupy.cuda.Stream(non_blocking=True):
        eager, recorded = (changing(device, config, graphs=graphs) for graphs in (False, True))
    results, scores, weights = recorded
    assert results == eager[0] and all(result.applied for result in results)
    assert len({result.nll for result in results}) == len(results)
    for a, b in zip([*scores, *weights], [*eager[1], *eager[2]], strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("half", ["_run_micro", "_run_update"])
def test_what_cannot_be_recorded_runs_eagerly_with_one_line(half, monkeypatch):
    import cupy

    device, config = choose_device("cuda"), four_layers("qwen3-0.6b")
    run, said = getattr(TrainStep, half), []

    def synchronises(self: TrainStep, *args: Any) -> None:
        run(self, *args)
        self.device.synchronize()

    with cupy.cuda.Stream(non_blocking=True):
        wanted = changing(device, config, graphs=False)
        monkeypatch.setattr(TrainStep, half, synchronises)
        found = changing(device, config, graphs=True, said=said.append)
    assert len(said) == 1 and "CUDA graphs are off" in said[0] and "recorded" in said[0]
    assert found[0] == wanted[0]
    for a, b in zip([*found[1], *found[2]], [*wanted[1], *wanted[2]], strict=True):
        same_bits(a, b)
