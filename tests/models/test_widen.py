"""A model whose adapted matrices lie with their adapters: as the plain one, but for rounding."""

import dataclasses

import numpy as np
import pytest

import surogate
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, FROZEN
from surogate.kernels.widened import Widened, plain, room, with_room
from surogate.models import dense
from surogate.models.blocks import Context, Settings
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec
from surogate.models.names import named
from surogate.models.tree import LayerAdapter
from surogate.models.widen import making_room, refresh_of, widened
from tests.models.merged import merged_model
from tests.models.test_dense import with_adapter
from tests.models.tiny import both, documents
from tests.oracle import normal, same_bits, to_device, to_host

MATRICES = ("w_qkv", "w_o", "w_gate_up", "w_down")


def relative(got, want) -> float:
    got, want = to_host(got).astype(np.float64), to_host(want).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def widen(model):
    """The loaded model with its adapter beside its weights, up to date."""
    made = widened(model.params, model.adapter)
    refresh_of(made, model.adapter, model.settings.lora, model.config).launch_()
    return model._replace(params=made)


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "v_proj"], ["up_proj", "o_proj"]])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama_tied"])
def test_loss_and_gradients_equal_the_plain_models(family, targets, tmp_path):
    _, model = both(family, tmp_path)
    model = with_adapter(model, targets)
    batch = surogate.batch(documents(33, 20))
    want = surogate.loss_and_grads(model, batch)
    got = surogate.loss_and_grads(widen(model), batch)
    assert got.nll_sum == pytest.approx(want.nll_sum, rel=1e-6)
    assert relative(got.logprobs, want.logprobs) <= 1e-5
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        assert relative(got.grads[name], grad) <= 1e-5, name


@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_recomputation_changes_no_bit(recompute, tmp_path):
    _, model = both("qwen3", tmp_path)
    model = widen(with_adapter(model, ["all"]))
    batch = surogate.batch(documents(33, 20))
    want = surogate.loss_and_grads(model, batch)
    again = surogate.loss_and_grads(model, batch, recompute=recompute)
    assert want.nll_sum == again.nll_sum
    for name, grad in want.grads.items():
        same_bits(grad, again.grads[name])


def test_gradients_of_everything_equal_the_plain_models(tmp_path):
    """The model's own gradients too, fresh: nobody trains both, but nothing forbids it."""
    _, model = both("qwen3_tied", tmp_path)
    model = with_adapter(model, ["all"])
    batch = surogate.batch(documents(20))
    common = dict(table=dense.rotary_table(model.config, 20), settings=model.settings)
    _, want = dense.loss_and_grads(model.params, model.adapter, batch, **common)
    _, got = dense.loss_and_grads(widen(model).params, model.adapter, batch, **common)
    wanted = named(want.model, model.config)
    for name, grad in named(got.model, model.config).items():
        assert relative(grad, wanted[name]) <= 1e-5, name


def test_a_bf16_layer_equals_the_plain_one(device, tmp_path):
    """With the kernels, which read and write rows that lie apart."""
    _, model = both("qwen3", tmp_path)
    config = dataclasses.replace(model.config, head_dim=64, initializer_range=0.2)
    model = model._replace(params=init_model(config, 0, BF16), settings=Settings(config))
    model = with_adapter(model, ["all"])

    def there(value):
        return tree.map(lambda x: to_device(x, device), value)

    adapter = there(tree.map(lambda x: x.astype(BF16), model.adapter))
    one = adapter._replace(layers=adapter.layers[:1])
    plain_model = there(model.params._replace(layers=model.params.layers[:1]))
    wide = widened(plain_model, one)
    refresh_of(wide, one, model.settings.lora, config).launch_()
    batch = there(surogate.batch(documents(19, 8)))
    context = Context(batch.docs, batch.positions, there(dense.rotary_table(config, 19)))
    x, dy = normal("bfloat16", (27, 32), (27, 32), device=device)
    into = (tree.map(lambda _: FROZEN, plain_model.layers[0]), LayerAdapter(*(None,) * 4))

    def run(layer, dy):
        y, res = dense.layer_fwd(layer, one.layers[0], x, context=context, settings=model.settings)
        dx, (_, grads) = dense.layer_bwd(
            layer, res, dy, settings=model.settings, into=into, below=layer.w_down
        )
        return dx, (y, dx, *tree.leaves(grads))

    roomy = with_room(dy, 32, wide.layers[0].w_down)
    roomy[...] = dy
    _, want = run(plain_model.layers[0], dy)
    dx, got = run(wide.layers[0], roomy)
    assert room(dx, wide.layers[0].w_down.extra) is not None, "for the layer below"
    assert len(got) == len(want) == 10
    for one_got, one_want in zip(got, want, strict=True):
        assert relative(one_got, one_want) <= 2e-2  # roundings of twenty ops, each run's own


def test_names_and_merges_see_the_weights_themselves(tmp_path):
    _, model = both("qwen3", tmp_path)
    model = with_adapter(model, ["q_proj", "down_proj"])
    wide = widen(model)
    kinds = {name: type(getattr(wide.params.layers[0], name)) for name in MATRICES}
    assert [name for name, kind in kinds.items() if kind is Widened] == ["w_qkv", "w_down"]
    for name, array in named(wide.params, model.config).items():
        same_bits(array, named(model.params, model.config)[name])
    spec = model.settings.lora
    merged = [merged_model(m.params, m.adapter, spec, m.config) for m in (wide, model)]
    for got, want in zip(*(tree.leaves(tree.map(plain, m)) for m in merged), strict=True):
        same_bits(got, want)


def test_room_made_while_reading_is_taken_over(tmp_path):
    _, model = both("qwen3", tmp_path)
    model = with_adapter(model, ["q_proj", "v_proj", "down_proj"])
    spec = model.settings.lora
    assert isinstance(spec, LoraSpec)
    put = making_room(lambda path, array: array, model.config, spec)
    read = surogate.models.hf.read_model(tmp_path, model.config, np.dtype(np.float32), put=put)
    for got, want in zip(tree.leaves(read), tree.leaves(model.params), strict=True):
        same_bits(got, want)
    made = widened(read, model.adapter)
    for layer, before in zip(made.layers, read.layers, strict=True):
        assert layer.w_qkv.rows is before.w_qkv.base and layer.w_down.rows is before.w_down.base
        assert layer.w_o is before.w_o
