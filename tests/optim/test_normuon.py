"""NorMuon over trees: what it updates and what AdamW does, stacked matrices, resuming, refusals."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from surogate.kernels import tree
from surogate.kernels.arrays import BF16
from surogate.kernels.normuon import NorMuonSettings
from surogate.optim import adamw, normuon
from surogate.optim.adamw import AdamWConfig, AdamWPlan, AdamWState
from surogate.optim.normuon import NorMuonConfig, NorMuonPlan
from surogate.optim.rule import adamw_of, init, plan_of
from surogate.optim.state import state_from_named, state_to_named
from tests.oracle import normal, same_bits, to_device, to_host


class Layer(NamedTuple):
    qkv: Any
    norm: Any
    down: Any


class Model(NamedTuple):
    embed: Any
    layers: tuple[Layer, ...]


Q, KV = 16, 8
STACKED = ((0, Q), (Q, Q + KV), (Q + KV, Q + 2 * KV))
LAYER = Layer(STACKED, None, ((0, 24),))
MATRICES = Model(None, (LAYER, LAYER))
ADAMW = AdamWConfig(weight_decay=0.1, beta2=0.95, cautious=True)
CONFIGS = {
    "float32": ("float32", NorMuonConfig(adamw=ADAMW, adamw_lr_ratio=0.5)),
    "master": ("bfloat16", NorMuonConfig(adamw=ADAMW, cautious=True)),
    "bfloat16": (
        "bfloat16",
        NorMuonConfig(
            adamw=AdamWConfig(moment_dtype="bfloat16", master_dtype="bfloat16", seed=3),
        ),
    ),
}
either = pytest.mark.parametrize("name", CONFIGS)


def model(dtype: str, device: str, *, seed: int = 0) -> Model:
    x = normal(dtype, (40, 24), *[(Q + 2 * KV, 24), (24,), (24, 48)] * 2, seed=seed, device=device)
    return Model(x[0], (Layer(*x[1:4]), Layer(*x[4:7])))


def same_tree(got: Any, want: Any) -> None:
    assert len(tree.leaves(got)) == len(tree.leaves(want))
    tree.map(same_bits, got, want)


def run(params: Any, state: AdamWState, config: NorMuonConfig, device: str, steps: range) -> Any:
    """Pure steps whose gradients depend on the step alone."""
    dtype = str(tree.leaves(params)[0].dtype)
    for step in steps:
        grads = model(dtype, device, seed=100 + step)
        params, state = normuon.update(params, grads, state, config, MATRICES, lr=1e-2)
    return params, state


@either
def test_state_has_what_the_precision_asks_for(name):
    dtype, config = CONFIGS[name]
    params = model(dtype, "host")
    state = normuon.init(params, config, MATRICES)
    moment = BF16 if name == "bfloat16" else np.float32
    assert state.m.layers[0].qkv.dtype == moment
    assert state.m.layers[0].qkv.shape == params.layers[0].qkv.shape
    for layer in state.v.layers:
        assert layer.qkv.shape == (Q + 2 * KV,) and layer.down.shape == (24,)
        assert layer.qkv.dtype == np.float32 and layer.norm.dtype == moment
    assert state.v.embed.shape == params.embed.shape
    assert len(tree.leaves(state.master)) == (7 if name == "master" else 0)
    assert list(state_to_named(state))[:3] == ["step", "m.embed", "m.layers.0.qkv"]


@either
def test_everything_else_is_adamw(name, device):
    """With its own learning rate, and the bits that it would have alone."""
    dtype, config = CONFIGS[name]
    params, grads = model(dtype, device), model(dtype, device, seed=9)
    got, _ = run(params, normuon.init(params, config, MATRICES), config, device, range(2))

    def rest(m: Model) -> Any:
        return m._replace(layers=tuple(x._replace(qkv=None, down=None) for x in m.layers))

    want, state = rest(params), adamw.init(rest(params), config.adamw)
    for step in range(2):
        grads = rest(model(dtype, device, seed=100 + step))
        lr = 1e-2 * config.adamw_lr_ratio
        want, state = adamw.update(want, grads, state, config.adamw, lr=lr)
    same_tree(rest(got), want)
    for layer, before in zip(got.layers, params.layers, strict=True):
        assert (to_host(layer.qkv) != to_host(before.qkv)).any()
        assert (to_host(layer.down) != to_host(before.down)).any()


def test_stacked_matrices_are_split(device):
    """Each of q, k and v gets the step that it would get as an array of its own; all of them in one
    would be another matrix.
    """
    config = NorMuonConfig()
    params, grads = model("float32", device), model("float32", device, seed=9)

    def alone(part: slice, rows: Any) -> np.ndarray:
        weight = {"w": params.layers[0].qkv[part].copy(), "n": params.layers[0].norm}
        grad = {"w": grads.layers[0].qkv[part].copy(), "n": grads.layers[0].norm}
        ranges = {"w": rows, "n": None}
        state = normuon.init(weight, config, ranges)
        moved, _ = normuon.update(weight, grad, state, config, ranges, lr=1e-2)
        return to_host(moved["w"])

    state = normuon.init(params, config, MATRICES)
    got, _ = normuon.update(params, grads, state, config, MATRICES, lr=1e-2)
    whole = to_host(got.layers[0].qkv)
    for start, stop in STACKED:
        same_bits(whole[start:stop], alone(slice(start, stop), ((0, stop - start),)))
        step = whole[start:stop] - to_host(params.layers[0].qkv)[start:stop]
        np.testing.assert_allclose(np.sqrt((step.astype(float) ** 2).mean()), 0.2e-2, rtol=1e-3)
    together = alone(slice(None), ((0, Q + 2 * KV),))
    assert np.abs(together - whole).max() > 1e-3


@either
def test_pure_and_in_place_steps_are_the_same(name, device):
    dtype, config = CONFIGS[name]
    start = model(dtype, device)
    kept = tree.map(lambda p: p.copy(), start)
    params, state = run(start, init(start, config, MATRICES), config, device, range(3))
    same_tree(start, kept)
    grads = tree.map(lambda p: p * 0, kept)
    own = init(kept, config, MATRICES)
    plan = plan_of(kept, grads, own, config, MATRICES)
    for step in range(3):
        new = tree.leaves(model(dtype, device, seed=100 + step))
        for into, grad in zip(tree.leaves(grads), new, strict=True):
            into[...] += grad  # a sum: the step before must have left zeros
        own = plan.step_(own, lr=1e-2, zero_grad=True)
    same_tree(kept, params)
    assert own.step == state.step == 3
    same_tree(own[1:], state[1:])


def test_launch_reads_what_the_host_wrote(device):
    """As in a captured step: one call, whose learning rate and step number change in memory."""
    dtype, config = CONFIGS["bfloat16"]
    params, grads = model(dtype, device), model(dtype, device, seed=5)
    state = init(params, config, MATRICES)
    want, _ = normuon.update(params, grads, state, config, MATRICES, lr=3e-3)
    plan = plan_of(params, grads, state, config, MATRICES)
    plan.write_scalars_(lr=3e-3, step=1)
    plan.launch_()
    same_tree(params, want)


def test_an_unusable_gradient_keeps_everything(device):
    dtype, config = CONFIGS["master"]
    params = model(dtype, device)
    params, state = run(params, init(params, config, MATRICES), config, device, range(2))
    broken = to_device(np.array([np.nan, 0, 0], np.float32), device)
    grads = tree.map(lambda p: p * np.nan, params)
    got, after = normuon.update(params, grads, state, config, MATRICES, lr=1e-2, norm=broken)
    same_tree(got, params)
    assert after.step == state.step == 2
    same_tree(after[1:], state[1:])


@either
def test_resumed_run_is_the_uninterrupted_one(name, device):
    """Through bytes, as in a file; a cold start gives something else."""
    dtype, config = CONFIGS[name]
    start = model(dtype, device)
    blank = init(start, config, MATRICES)
    want, want_state = run(start, blank, config, device, range(6))
    params, state = run(start, blank, config, device, range(3))
    named = {k: to_host(v).copy() for k, v in state_to_named(state).items()}
    loaded = state_from_named(named, params, config, MATRICES)
    got, got_state = run(params, loaded, config, device, range(3, 6))
    same_tree(got, want)
    same_tree(got_state[1:], want_state[1:])
    cold, _ = run(params, blank, config, device, range(3, 6))
    assert (to_host(cold.layers[0].qkv) != to_host(want.layers[0].qkv)).any()


def test_rules():
    """What the training loop asks for by a configuration alone."""
    params = model("float32", "host")
    muon = CONFIGS["float32"][1]
    assert adamw_of(ADAMW) is ADAMW and adamw_of(muon) is ADAMW
    for rule, kind in ((ADAMW, AdamWPlan), (muon, NorMuonPlan)):
        state = init(params, rule, MATRICES)
        assert type(plan_of(params, params, state, rule, MATRICES)) is kind
    assert muon.settings == NorMuonSettings(0.95, 0.95, 0.1, False)


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(momentum=1.0), "momentum must be from 0 to below 1"),
        (dict(beta2=-0.1), "beta2 must be from 0 to below 1"),
        (dict(adamw_lr_ratio=-1.0), "adamw_lr_ratio must be at least 0"),
        (dict(adamw=AdamWConfig(moment_dtype="uint8")), "must be float32 or bfloat16, got uint8"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        NorMuonConfig(**settings)


def test_refuses_a_model_without_matrices():
    params = model("float32", "host")
    nothing = tree.map(lambda p: None, params)
    blank = Model(None, (Layer(None, None, None), Layer(None, None, None)))
    assert len(tree.leaves(nothing)) == 0
    config = NorMuonConfig()
    state = normuon.init(params, config, blank)
    with pytest.raises(ValueError, match="matrices must name at least one"):
        NorMuonPlan(params, params, state, config, blank)
