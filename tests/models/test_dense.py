"""Whole models: parity with transformers and PEFT, packing, recomputation, and derived
backwards.
"""

import dataclasses

import numpy as np
import peft
import pytest
import torch

import surogate
from surogate.api import LoadedModel
from surogate.kernels import tree
from surogate.kernels.arrays import FROZEN
from surogate.kernels.batch import IGNORED, batch_of
from surogate.models import dense
from surogate.models.blocks import Context, Settings, attention_block_bwd, attention_block_fwd
from surogate.models.config import RopeConfig
from surogate.models.flops import training_flops
from surogate.models.lora import init_adapter
from surogate.models.names import named
from surogate.models.registry import hf_config
from tests.models.tiny import FAMILIES, both, documents, reference_loss
from tests.oracle import same_bits

# transformers sums in another order; measured differences are ten times smaller.
LOSS_RELATIVE, GRADIENT_RELATIVE = 1e-5, 1e-4


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def gradients_of(model) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_transformers(family, tmp_path):
    reference, model = both(family, tmp_path)
    docs = documents(97, 40, 3)  # llama3: longer than the original 64 positions
    want = sum(reference_loss(reference, d) for d in docs)
    want.backward()
    got = surogate.loss_and_grads(model, surogate.batch(docs))
    assert got.count == 96 + 39 + 2
    assert abs(got.nll_sum - want.item()) <= LOSS_RELATIVE * want.item()
    expected = gradients_of(reference)
    assert got.grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert np.linalg.norm(grad) > 0, f"{name}: nothing to compare"
        assert relative(got.grads[name], grad) <= GRADIENT_RELATIVE, name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    reference, model = both(family, tmp_path)
    (tokens,) = documents(100)
    with torch.no_grad():
        want = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    assert relative(surogate.logits(model, [tokens]), want) <= 1e-5


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)


@pytest.mark.parametrize(
    "name,changes",
    [
        ("Llama-3.2-1B", {}),
        ("Llama-3.1-8B", {}),
        ("Qwen3-8B", dict(rope_scaling=YARN, max_position_embeddings=131072)),
    ],
)
def test_logits_beyond_the_trained_length_equal_transformers(name, changes, tmp_path, monkeypatch):
    """A document whose tokens lie at the begin, about the trained length, and at the very end."""
    raw = hf_config(name) | changes
    kept = ("model_type", "head_dim", "max_position_embeddings", "rope_theta", "rope_scaling")
    monkeypatch.setitem(FAMILIES, name, {key: raw[key] for key in kept})
    reference, model = both(name, tmp_path)
    trained, last = model.config.rope.original_max_positions, model.config.max_positions
    starts = (0, trained - 10, last - 20)
    positions = np.concatenate([np.arange(20, dtype=np.int32) + start for start in starts])
    (tokens,) = documents(60)
    with torch.no_grad():
        want = reference(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor(positions[None]).long(),
            attention_mask=torch.ones(1, 60, dtype=torch.long),  # one document all the same
            use_cache=False,
        ).logits[0]

    def difference(rope: RopeConfig) -> float:
        config = dataclasses.replace(model.config, rope=rope)
        table = dense.rotary_table(config, last)
        batch = batch_of(np.array(tokens, np.int32))._replace(positions=positions)
        got = dense.logits(model.params, None, batch, table=table, settings=model.settings)
        return relative(got, want.numpy())

    assert difference(model.config.rope) <= 1e-5
    assert difference(RopeConfig("default", model.config.rope.base)) > 0.1


@pytest.mark.parametrize("family", ["qwen3", "qwen2_window", "llama"])
def test_packed_documents_equal_documents_alone(family, tmp_path):
    _, model = both(family, tmp_path)
    docs = documents(1, 17, 64, 2, 30)
    together = surogate.logits(model, docs)
    alone = np.concatenate([surogate.logits(model, [d]) for d in docs])
    assert np.abs(together - alone).max() <= 1e-5 * np.abs(alone).max()
    packed = surogate.loss_and_grads(model, surogate.batch(docs))
    parts = [surogate.loss_and_grads(model, surogate.batch([d])) for d in docs]
    assert packed.count == sum(p.count for p in parts)
    assert packed.nll_sum == pytest.approx(sum(p.nll_sum for p in parts), rel=1e-6)
    for name, grad in packed.grads.items():
        assert relative(grad, sum(p.grads[name] for p in parts)) <= 1e-5, name


def test_changing_one_document_leaves_the_others_bits_alone(tmp_path):
    _, model = both("qwen3", tmp_path)
    docs = documents(13, 20, 31)
    other = [documents(13, seed=9)[0], *docs[1:]]
    before, after = surogate.logits(model, docs), surogate.logits(model, other)
    assert (before[:13] != after[:13]).any()
    same_bits(before[13:], after[13:])
    first = surogate.loss_and_grads(model, surogate.batch(docs)).logprobs
    second = surogate.loss_and_grads(model, surogate.batch(other)).logprobs
    same_bits(first[13:], second[13:])


def with_adapter(model: LoadedModel, targets: list[str], seed: int = 3) -> LoadedModel:
    from surogate.models.lora import LoraSpec

    spec = LoraSpec.of(4, 8, targets)
    adapter = init_adapter(model.config, spec, seed, np.dtype(np.float32))
    rng = np.random.default_rng(seed)
    adapter = tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(x.dtype), adapter)
    return model._replace(adapter=adapter, settings=Settings(model.config, spec))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # in PEFT itself
@pytest.mark.parametrize("targets", [["all"], ["q_proj", "v_proj"], ["up_proj", "o_proj"]])
def test_adapter_loss_and_gradients_equal_peft(targets, tmp_path):
    from surogate.models.hf import write_adapter

    reference, model = both("qwen3", tmp_path / "base")
    model = with_adapter(model, targets)
    spec = model.settings.lora
    assert spec is not None and model.adapter is not None
    write_adapter(model.adapter, model.config, spec, tmp_path / "adapter", str(tmp_path / "base"))
    tuned = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter", is_trainable=True)
    (tokens,) = documents(50)
    want = reference_loss(tuned, tokens)
    want.backward()
    got = surogate.loss_and_grads(model, surogate.batch([tokens]))
    assert abs(got.nll_sum - want.item()) <= LOSS_RELATIVE * want.item()
    expected = {n.replace(".default", ""): g for n, g in gradients_of(tuned).items()}
    assert got.grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative(got.grads[name], grad) <= GRADIENT_RELATIVE, name


@pytest.mark.parametrize("recompute", ["selective", "block"])
@pytest.mark.parametrize("lora", [False, True])
def test_recomputation_changes_memory_and_no_bit(recompute, lora, tmp_path):
    _, model = both("qwen3", tmp_path)
    if lora:
        model = with_adapter(model, ["all"])
    batch = surogate.batch(documents(33, 20))
    plain = surogate.loss_and_grads(model, batch)
    again = surogate.loss_and_grads(model, batch, recompute=recompute)
    assert plain.nll_sum == again.nll_sum
    for name, grad in plain.grads.items():
        same_bits(grad, again.grads[name])


def test_gradients_add_up_in_the_callers_buffers(tmp_path):
    _, model = both("qwen3_tied", tmp_path)
    rows = [surogate.batch(documents(24, seed=s)) for s in (0, 1)]
    table = dense.rotary_table(model.config, 24)
    buffers = tree.map(np.zeros_like, model.params)
    totals = np.zeros((), np.float32), np.zeros((), np.int32)
    for row in rows:
        dense.loss_and_grads(
            model.params,
            None,
            row,
            table=table,
            settings=model.settings,
            into=dense.Grads(buffers, None),
            totals=totals,
        )
    parts = [surogate.loss_and_grads(model, row) for row in rows]
    assert totals[1] == 46
    assert totals[0] == pytest.approx(sum(p.nll_sum for p in parts), rel=1e-6)
    for name, grad in named(buffers, model.config).items():
        assert relative(grad, sum(p.grads[name] for p in parts)) <= 1e-6, name


def test_frozen_model_has_no_gradient(tmp_path):
    _, model = both("qwen3_tied", tmp_path)
    model = with_adapter(model, ["all"])
    frozen = tree.map(lambda _: FROZEN, model.params)
    buffers = tree.map(np.zeros_like, model.adapter)
    _, grads = dense.loss_and_grads(
        model.params,
        model.adapter,
        surogate.batch(documents(20)),
        table=dense.rotary_table(model.config, 20),
        settings=model.settings,
        into=dense.Grads(frozen, buffers),
    )
    assert tree.leaves(grads.model) == []
    assert all(np.abs(g).max() > 0 for g in tree.leaves(buffers))


def test_nothing_supervised_gives_zero_and_no_nan(tmp_path):
    _, model = both("qwen3", tmp_path)
    batch = surogate.batch(documents(12))
    batch = batch._replace(labels=np.full(12, IGNORED, np.int32))
    got = surogate.loss_and_grads(model, batch)
    assert (got.nll_sum, got.count) == (0.0, 0)
    assert all(not grad.any() for grad in got.grads.values())


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    _, model = both("qwen3", tmp_path)
    with pytest.raises(ValueError, match="tokens must be from 0 to 127, got 128"):
        surogate.logits(model, [[5, 128]])


def test_written_blocks_equal_derived_ones_bit_for_bit(tmp_path):
    """vjp of the layer's forward, in the pairs that the written backward mirrors."""
    from surogate.kernels.pair import vjp
    from tests.models.derived import layer_forward

    _, model = both("qwen3", tmp_path)
    model = with_adapter(model, ["all"])
    assert model.adapter is not None
    layer, adapter = model.params.layers[0], model.adapter.layers[0]
    batch = surogate.batch(documents(19, 8))
    context = Context(batch.docs, batch.positions, dense.rotary_table(model.config, 19))
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 27, 32)).astype(np.float32)
    derived = vjp(layer_forward)
    y, res = derived.fwd(layer, adapter, x, context=context, settings=model.settings)
    d_layer, d_adapter, dx = derived.bwd(res, dy)
    want_y, want_res = dense.layer_fwd(layer, adapter, x, context=context, settings=model.settings)
    want_dx, (want_layer, want_adapter) = dense.layer_bwd(
        layer, want_res, dy, settings=model.settings
    )
    same_bits(y, want_y)
    same_bits(dx, want_dx)
    for got, want in zip(
        tree.leaves((d_layer, d_adapter)), tree.leaves((want_layer, want_adapter)), strict=True
    ):
        same_bits(got, want)


def test_attention_block_alone_equals_derived(tmp_path):
    from surogate.kernels.pair import vjp
    from tests.models.derived import attention_forward

    _, model = both("qwen2_window", tmp_path)
    layer = model.params.layers[1]
    batch = surogate.batch(documents(30))
    context = Context(batch.docs, batch.positions, dense.rotary_table(model.config, 30))
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((2, 30, 32)).astype(np.float32)
    common = dict(context=context, settings=model.settings, window=6)
    y, res = vjp(attention_forward).fwd(x, layer, None, **common)
    want_y, want = attention_block_fwd(x, layer, None, **common)
    same_bits(y, want_y)
    dx, d_layer, _ = vjp(attention_forward).bwd(res, dy)
    want_dx, grads, _ = attention_block_bwd(want, dy, layer=layer, settings=model.settings)
    same_bits(dx, want_dx)
    for name, grad in grads.items():
        if grad is not None:
            same_bits(getattr(d_layer, name), grad)


def test_flops_equal_the_products_really_called(tmp_path):
    from surogate.kernels.matmul import record

    _, model = both("qwen3", tmp_path)
    batch = surogate.batch(documents(32))
    for lora, recompute in ((False, "none"), (False, "block"), (True, "none")):
        subject = with_adapter(model, ["all"]) if lora else model
        calls: list = []
        with record(calls):
            surogate.loss_and_grads(subject, batch, recompute=recompute)
        counted = training_flops(
            model.config,
            tokens=32,
            cells=0,
            lora_rank=4 if lora else None,
            recompute=recompute,
        ).products
        called = sum(call.flops for call in calls)
        if lora:  # the adapters' own products are left out of the count by definition
            assert counted < called < 2 * counted
        else:
            assert called == counted
