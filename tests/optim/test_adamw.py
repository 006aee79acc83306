"""AdamW over trees: torch's run, what decays, pure and in-place steps, skips, and resuming."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from surogate.kernels import tree
from surogate.kernels.adamw8bit import Moment8, decode
from surogate.kernels.arrays import BF16
from surogate.optim import adamw, clip
from surogate.optim.adamw import AdamWConfig, AdamWPlan, AdamWState
from surogate.optim.state import state_from_named, state_to_named
from tests.oracle import close, normal, same_bits, to_device, to_host


class Layer(NamedTuple):
    weight: Any
    norm: Any
    bias: Any
    experts: Any
    lora: Any


class Model(NamedTuple):
    layers: tuple[Layer, ...]
    head: dict[str, Any]


def model(dtype: str, device: str, *, seed: int = 0) -> Model:
    """Two layers; the second has no bias and no adapter."""
    shapes = ((9, 16), (16,), (9,), (3, 8, 5), (9, 4), (4, 16), (16,), (70, 80), (5, 3))
    x = normal(dtype, *shapes, seed=seed, device=device)
    first = Layer(x[0], x[1], x[2], x[3], {"a": x[5], "b": x[4]})
    second = Layer(x[7], x[6], None, None, None)
    return Model((first, second), {"weight": x[8]})


def same_tree(got: Any, want: Any) -> None:
    assert len(tree.leaves(got)) == len(tree.leaves(want))
    tree.map(same_bits, got, want)


def same_state(got: AdamWState, want: AdamWState) -> None:
    assert got.step == want.step
    for a, b in zip(got[1:], want[1:], strict=True):
        same_tree(a, b)


def counted(value: int, device: str) -> Any:
    return to_device(np.array([value], np.int32), device)


def test_a_clipped_run_of_torch(device):
    """Sums of gradients, clipping and decay of matrices only, as torch does them on means."""
    params = model("float32", device)
    config = AdamWConfig(weight_decay=0.1, beta2=0.95)
    state = adamw.init(params, config)
    twins = [torch.nn.Parameter(torch.tensor(to_host(p))) for p in tree.leaves(params)]
    groups = [
        dict(params=[t for t in twins if t.ndim >= 2], weight_decay=0.1),
        dict(params=[t for t in twins if t.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        grads = model("float32", device, seed=100 + step)
        for twin, grad in zip(twins, tree.leaves(grads), strict=True):
            twin.grad = torch.tensor(to_host(grad)) / 12
        torch.nn.utils.clip_grad_norm_(twins, 0.5)
        optimizer.step()
        norm = clip.grad_norm(grads, counted(12, device), max_grad_norm=0.5)
        params, state = adamw.update(params, grads, state, config, lr=1e-2, norm=norm)
    assert state.step == 5
    for twin, param in zip(twins, tree.leaves(params), strict=True):
        close(param, twin.detach().numpy(), "float32", terms=5)


def test_matrices_decay_and_vectors_do_not():
    params = model("float32", "host")
    config = AdamWConfig(weight_decay=0.5)
    zero = tree.map(lambda p: p * 0, params)
    moved, _ = adamw.update(params, zero, adamw.init(params, config), config, lr=0.5)
    for before, after in zip(tree.leaves(params), tree.leaves(moved), strict=True):
        same_bits(after, before * np.float32(0.75) if before.ndim >= 2 else before)


def test_cautious_decay_spares_weights_that_the_step_grows(device):
    """Weights that step and decay both shrink, that the step grows, and zeros: Adam's first step is
    lr against the gradient's sign.
    """
    start = np.array([[1, -1, 1, -1, 0, 2]], np.float32)
    grad = np.array([[1, -1, -1, 1, 1, 0]], np.float32)
    config = AdamWConfig(weight_decay=0.5, cautious=True, epsilon=1e-30)
    params, grads = to_device(start, device), to_device(grad, device)
    got, _ = adamw.update(params, grads, adamw.init(params, config), config, lr=0.25)
    want = [[0.875 - 0.25, -0.875 + 0.25, 1 + 0.25, -1 - 0.25, -0.25, 1.75]]
    close(got, np.array(want), "float32")


CONFIGS = {
    "float32": ("float32", AdamWConfig(weight_decay=0.1)),
    "master": ("bfloat16", AdamWConfig(weight_decay=0.1)),
    "bfloat16": (
        "bfloat16",
        AdamWConfig(moment_dtype="bfloat16", master_dtype="bfloat16", seed=3),
    ),
    "uint8": ("bfloat16", AdamWConfig(moment_dtype="uint8", weight_decay=0.1, cautious=True)),
}
either = pytest.mark.parametrize("name", CONFIGS)


def run(params: Any, state: AdamWState, config: AdamWConfig, device: str, steps: range) -> Any:
    """Pure steps whose gradients depend on the step alone."""
    dtype = str(tree.leaves(params)[0].dtype)
    for step in steps:
        grads = model(dtype, device, seed=100 + step)
        params, state = adamw.update(params, grads, state, config, lr=1e-2)
    return params, state


@either
def test_state_has_what_the_precision_asks_for(name):
    dtype, config = CONFIGS[name]
    params = model(dtype, "host")
    state = adamw.init(params, config)
    assert state.step == 0
    moments: list[Any] = []
    tree.map(lambda *leaves: moments.append(leaves), params, state.m, state.v)
    for param, m, v in moments:
        if name == "uint8" and param.size >= 4096:
            assert isinstance(m, Moment8) and isinstance(v, Moment8)
            assert m.codes.nbytes + v.codes.nbytes == 2 * param.size
            assert m.scale.nbytes + v.scale.nbytes == 8 * -(-param.size // 256)
            assert not decode(m, "m").any() and not decode(v, "v").any()
            continue
        assert m.dtype == v.dtype == (BF16 if name == "bfloat16" else np.float32)
        assert m.shape == v.shape == param.shape
        assert not m.any() and not v.any()
    masters = tree.leaves(state.master)
    if name in ("master", "uint8"):
        same_tree(tree.map(lambda p: p.astype(np.float32), params), state.master)
    else:
        assert masters == []


@either
def test_pure_and_in_place_steps_are_the_same(name, device):
    dtype, config = CONFIGS[name]
    start = model(dtype, device)
    kept = tree.map(lambda p: p.copy(), start)
    params, state = run(start, adamw.init(start, config), config, device, range(3))
    same_tree(start, kept)

    grads = tree.map(lambda p: p * 0, kept)
    own = adamw.init(kept, config)
    plan = AdamWPlan(kept, grads, own, config)
    for step in range(3):
        for into, grad in zip(
            tree.leaves(grads), tree.leaves(model(dtype, device, seed=100 + step)), strict=True
        ):
            into[...] += grad  # a sum: the step before must have left zeros
        own = plan.step_(own, lr=1e-2, zero_grad=True)
    same_tree(kept, params)
    same_state(own, state)


def test_launch_reads_what_the_host_wrote(device):
    """As in a captured step: one call, whose learning rate and step number change in memory."""
    config = AdamWConfig(master_dtype="bfloat16", seed=9)
    params = model("bfloat16", device)
    grads = model("bfloat16", device, seed=5)
    want, _ = adamw.update(params, grads, adamw.init(params, config), config, lr=3e-3)
    state = adamw.init(params, config)
    plan = AdamWPlan(params, grads, state, config)
    plan.write_scalars_(lr=3e-3, step=state.step + 1)
    plan.launch_()
    same_tree(params, want)


@either
def test_an_unusable_gradient_keeps_everything(name, device):
    """A NaN, or tokens that were not counted: the step number stays as well."""
    dtype, config = CONFIGS[name]
    params, state = model(dtype, device), None
    params, state = run(params, adamw.init(params, config), config, device, range(2))
    broken = model(dtype, "host", seed=7)
    broken.layers[0].weight[0, 0] = np.nan
    broken = tree.map(lambda g: to_device(g, device), broken)
    whole = model(dtype, device, seed=7)
    for grads, tokens in ((broken, 4), (whole, 0)):
        norm = clip.grad_norm(grads, counted(tokens, device), max_grad_norm=1.0)
        got, after = adamw.update(params, grads, state, config, lr=1e-2, norm=norm)
        same_tree(got, params)
        same_state(after, state)
    norm = clip.grad_norm(whole, counted(4, device), max_grad_norm=1.0)
    got, after = adamw.update(params, whole, state, config, lr=1e-2, norm=norm)
    assert after.step == 3
    assert (to_host(got.layers[0].weight) != to_host(params.layers[0].weight)).any()


@either
def test_resumed_run_is_the_uninterrupted_one(name, device):
    """Through bytes, as in a file; a cold start gives something else."""
    dtype, config = CONFIGS[name]
    start = model(dtype, device)
    blank = adamw.init(start, config)
    want, want_state = run(start, blank, config, device, range(6))

    params, state = run(start, blank, config, device, range(3))
    named = {k: to_host(v) for k, v in state_to_named(state).items()}
    stored = {k: (v.tobytes(), v.dtype, v.shape) for k, v in named.items()}
    read = {k: np.frombuffer(b, dtype).reshape(shape) for k, (b, dtype, shape) in stored.items()}
    loaded = state_from_named(read, params, config)
    same_state(loaded, state)
    got, got_state = run(params, loaded, config, device, range(3, 6))
    same_tree(got, want)
    same_state(got_state, want_state)

    cold, _ = run(params, blank, config, device, range(3, 6))
    assert (to_host(cold.layers[0].weight) != to_host(want.layers[0].weight)).any()


def test_names_of_the_state():
    params = Model((Layer(np.ones((2, 2), BF16), None, None, None, None),), {"weight": None})
    named = state_to_named(adamw.init(params, AdamWConfig()))
    assert list(named) == [
        "step",
        "m.layers.0.weight",
        "v.layers.0.weight",
        "master.layers.0.weight",
    ]
    assert named["step"].dtype == np.int64 and named["step"].shape == ()


def test_a_state_that_does_not_fit_is_refused():
    dtype, config = CONFIGS["master"]
    params = model(dtype, "host")
    named = state_to_named(adamw.init(params, config))

    def without(name: str) -> dict[str, Any]:
        return {k: v for k, v in named.items() if k != name}

    for broken, settings, message in (
        (without("step"), config, r"the saved state lacks step \(1 in all\)"),
        (without("v.head.weight"), config, r"lacks v.head.weight \(1 in all\)"),
        ({}, config, "lacks m.head.weight"),
        ({**named, "m.extra": named["m.head.weight"]}, config, "do not use: m.extra"),
        (named, CONFIGS["bfloat16"][1], "do not use: master.head.weight"),
        ({**named, "m.head.weight": np.ones(15, np.float32)}, config, r"must be float32\(5, 3\)"),
        (named, AdamWConfig(moment_dtype="bfloat16"), "must be bfloat16"),
        (named, CONFIGS["uint8"][1], "lacks m.layers.1.weight.codes"),
    ):
        with pytest.raises(ValueError, match=message):
            state_from_named(broken, params, settings)


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(beta1=1.0), "beta1 must be from 0 to below 1"),
        (dict(beta2=-0.1), "beta2 must be from 0 to below 1"),
        (dict(epsilon=-1e-8), "epsilon must be at least 0"),
        (dict(weight_decay=-0.1), "weight_decay must be at least 0"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamWConfig(**settings)


def test_plan_refusals():
    config = AdamWConfig()
    params = model("bfloat16", "host")
    state = adamw.init(params, config)
    with pytest.raises(ValueError, match="does not fit master_dtype bfloat16"):
        AdamWPlan(params, params, state, AdamWConfig(master_dtype="bfloat16"))
    with pytest.raises(ValueError, match="does not match"):
        AdamWPlan(params, params._replace(head=params.head["weight"]), state, config)
    with pytest.raises(ValueError, match="at least one array"):
        AdamWPlan((), (), AdamWState(0, (), (), ()), config)
