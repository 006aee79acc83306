"""AdamW of many tensors: torch's steps, the host's bits on the card, random rounding, skips."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from surogate.kernels.adamw import (
    AdamWLeaf,
    adamw_ref,
    adamw_scalars,
    adamw_step,
    adamw_step_,
    adamw_table,
)
from surogate.kernels.arrays import BF16, Backend, on_device
from tests.oracle import close, normal, same_bits, to_device, to_host

BETAS: dict[str, Any] = dict(beta1=0.9, beta2=0.999)
SETTINGS: dict[str, Any] = dict(**BETAS, epsilon=1e-8, weight_decay=0.1)
SHAPES = [(1,), (7,), (1003,), (4099,), (0,), (33, 64)]  # least, ragged, a tail, empty, a matrix
ARRAYS = ("param", "grad", "m", "v", "master")
# What a run may hold: dtype of parameter, gradient, moments; whether there is a master.
KINDS = [
    ("float32", "float32", "float32", False),
    ("float32", "bfloat16", "bfloat16", False),
    ("bfloat16", "float32", "float32", True),
    ("bfloat16", "bfloat16", "bfloat16", True),
    ("bfloat16", "bfloat16", "float32", False),
    ("bfloat16", "float32", "bfloat16", False),
]


def make(shape: tuple[int, ...], kind: tuple, *, index: int = 0, seed: int = 0) -> AdamWLeaf:
    """A leaf on the host in the middle of a run: nothing is zero."""
    param_dtype, grad_dtype, moment_dtype, mastered = kind
    param, grad, m = normal("float32", shape, shape, shape, seed=seed + 10 * index)
    moment = BF16 if moment_dtype == "bfloat16" else np.float32
    return AdamWLeaf(
        param.astype(BF16 if param_dtype == "bfloat16" else np.float32),
        grad.astype(BF16 if grad_dtype == "bfloat16" else np.float32),
        m.astype(moment),
        (m * m + np.float32(0.1)).astype(moment),
        param if mastered else None,
        decay=index % 2 == 0,
        tensor=index,
    )


def moved(leaf: AdamWLeaf, device: str) -> AdamWLeaf:
    """A copy of the leaf on a device."""
    arrays = {n: getattr(leaf, n) for n in ARRAYS}
    return leaf._replace(
        **{n: to_device(a.copy(), device) for n, a in arrays.items() if a is not None}
    )


def host_step(leaf: AdamWLeaf, scalars: Any, norm: Any = None, **settings: Any) -> AdamWLeaf:
    """The host version, under emulation too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "launch", None)
        return adamw_step(leaf, scalars, norm, **settings)


def same_leaf(got: AdamWLeaf, want: AdamWLeaf, names: Sequence[str] = ARRAYS) -> None:
    for name in names:
        if getattr(want, name) is not None:
            same_bits(getattr(got, name), getattr(want, name))


def flag(scale: float, usable: float, device: str) -> Any:
    return to_device(np.array([1.0, scale, usable], np.float32), device)


def test_twenty_steps_of_torch(device):
    """torch.optim.AdamW in float32, with gradients that are sums over 37 tokens."""
    rng = np.random.default_rng(0)
    starts = [normal("float32", shape, seed=i) for i, shape in enumerate(SHAPES)]
    params = [torch.nn.Parameter(torch.tensor(p)) for p in starts]
    options: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    groups = [
        dict(params=params[0::2], weight_decay=0.1),
        dict(params=params[1::2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, **options)
    leaves = [
        moved(AdamWLeaf(p, p * 0, p * 0, p * 0, decay=i % 2 == 0, tensor=i), device)
        for i, p in enumerate(starts)
    ]
    table, norm = adamw_table(leaves), flag(1 / 37, 1, device)
    for step in range(1, 21):
        for param, leaf in zip(params, leaves, strict=True):
            mean = (rng.standard_normal(param.shape) * 10.0 ** (step % 5)).astype(np.float32)
            param.grad = torch.tensor(mean)
            leaf.grad[...] = to_device(mean * np.float32(37), device)
        optimizer.step()
        scalars = to_device(adamw_scalars(lr=1e-2, step=step, **BETAS), device)
        adamw_step_(table, scalars, norm, **SETTINGS)
    for param, leaf in zip(params, leaves, strict=True):
        if param.numel():
            close(leaf.param, param.detach().numpy(), "float32", terms=20)
            close(leaf.m, optimizer.state[param]["exp_avg"].numpy(), "float32", terms=20)
            close(leaf.v, optimizer.state[param]["exp_avg_sq"].numpy(), "float32", terms=20)


def test_matches_formulas(device):
    """The textbook's formulas in float64. The corrections 1 - beta^3 are exact in float32."""
    settings: dict[str, Any] = dict(beta1=0.5, beta2=0.75, epsilon=2.0**-20, weight_decay=0.125)
    leaf = moved(make((1003,), KINDS[0]), device)
    scalars = adamw_scalars(lr=2.0**-6, step=3, beta1=0.5, beta2=0.75)
    scale = 2.0**-5
    got = adamw_step(leaf, to_device(scalars, device), flag(scale, 1, device), **settings)
    wide = [to_host(x).astype(np.float64) for x in leaf[:4]]
    want = adamw_ref(*wide, lr=2.0**-6, step=3, scale=scale, **settings)
    for have, expected in zip((got.param, got.m, got.v), want, strict=True):
        close(have, expected, "float32")


def test_float64_on_the_host():
    settings: dict[str, Any] = dict(beta1=0.5, beta2=0.75, epsilon=2.0**-20, weight_decay=0.125)
    leaf = make((1003,), KINDS[0])
    wide = [x.astype(np.float64) for x in leaf[:4]]
    scalars = adamw_scalars(lr=2.0**-6, step=3, beta1=0.5, beta2=0.75)
    got = host_step(AdamWLeaf(*wide, decay=True), scalars, **settings)
    want = adamw_ref(*wide, lr=2.0**-6, step=3, **settings)
    for have, expected in zip((got.param, got.m, got.v), want, strict=True):
        close(have, expected, "float64")


def test_torch_order_of_operations():
    """One step from 0.5 with decay first: 0.49918353709, not bitsandbytes' 0.49918361373."""
    one = np.ones(1, np.float64)
    leaf = AdamWLeaf(0.5 * one, 0.1 * one, 0 * one, 0 * one, decay=True)
    settings: dict[str, Any] = dict(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1)
    lr = np.float64(0.5 - 0.49918353709) / (0.1 * 0.5 + 1)  # m / sqrt(v) is 1 in the first step
    scalars = adamw_scalars(lr=float(lr), step=1, **BETAS)
    got = host_step(leaf, scalars, **settings).param[0]
    assert abs(got - 0.49918353709) < 1e-10
    after = (0.5 - lr) * (1 - lr * 0.1)
    assert abs(after - got) > 5e-8


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_host_and_kernel_agree_to_the_bit(kind, device):
    """All tensors in one table, chunks that end inside a tensor, three steps."""
    for chunk in (1024, 16384):
        leaves = [make(shape, kind, index=i) for i, shape in enumerate(SHAPES)]
        there = [moved(leaf, device) for leaf in leaves]
        table = adamw_table(there, chunk=chunk)
        for step in range(5, 8):
            scalars = adamw_scalars(lr=1e-2, step=step, seed=11, **BETAS)
            norm = flag(0.25, 1, "host")
            leaves = [host_step(leaf, scalars, norm, **SETTINGS) for leaf in leaves]
            adamw_step_(table, to_device(scalars, device), flag(0.25, 1, device), **SETTINGS)
        for got, want in zip(there, leaves, strict=True):
            same_leaf(got, want)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[5]], ids=str)
def test_the_ends_of_the_range_give_the_bits_of_the_host(kind, device):
    """Moments and parameters too small or large for the kernel's shortcuts, alone and in groups."""
    first = [0.0, -0.0, 1e-42, -1e-38, 1e-30, 5.5e-20, -5.3e-20, 1e-9, 1.0, -1e17, 1e20, 1e29]
    second = [0.0, 1e-44, 1e-38, 7.8e-31, 8e-31, 1e-12, 1.0, 1e18, 1e20, 1e37]
    pairs = np.array([(m, v) for m in first for v in second], np.float32)
    pairs = np.concatenate([pairs, np.repeat(pairs, 8, axis=0)])  # then groups of one value
    m, v = pairs.T.copy()
    leaf = make(m.shape, kind, seed=4)
    leaf = leaf._replace(m=m.astype(leaf.m.dtype), v=v.astype(leaf.v.dtype))
    leaf.param[::97] = 3.389e38  # next to the largest bfloat16
    for epsilon, scale in ((1e-8, 0.0), (1e-8, 1e-3), (2.0, 1e-3)):
        scalars, norm = adamw_scalars(lr=1e-2, step=9, **BETAS), flag(scale, 1, "host")
        settings = {**SETTINGS, "epsilon": epsilon}
        want = host_step(leaf, scalars, norm, **settings)
        there = to_device(scalars, device), to_device(norm, device)
        same_leaf(adamw_step(moved(leaf, device), *there, **settings), want)


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[5]], ids=str)
def test_unaligned_tensors_and_their_neighbours(kind, device):
    """Views that start anywhere give the bits of aligned ones; nothing beside them is written."""
    leaf = make((1003,), kind)
    want = host_step(leaf, adamw_scalars(lr=1e-2, step=2, seed=3, **BETAS), **SETTINGS)
    for begin in (1, 8):
        bases, views = {}, {}
        for name in ARRAYS:
            array = getattr(leaf, name)
            if array is not None:
                bases[name] = to_device(np.full(1003 + 32, 7, array.dtype), device)
                views[name] = bases[name][begin : begin + 1003]
                views[name][...] = to_device(array, device)
        scalars = to_device(adamw_scalars(lr=1e-2, step=2, seed=3, **BETAS), device)
        table = adamw_table([leaf._replace(**views)], chunk=512)
        adamw_step_(table, scalars, zero_grad=True, **SETTINGS)
        same_leaf(leaf._replace(**views), want, ("param", "m", "v", "master"))
        for base in bases.values():
            outside = np.delete(to_host(base).astype(np.float32), np.s_[begin : begin + 1003])
            assert (outside == 7).all()


def test_master_keeps_what_the_parameter_cannot_show(device):
    """Twenty updates of 1e-4 from 1: each is lost in bfloat16, their sum is in the master."""
    one = np.ones(9, np.float32)
    leaf = AdamWLeaf(one.astype(BF16), -one, 0 * one, 0 * one, one.copy())
    leaf = moved(leaf, device)
    settings: dict[str, Any] = dict(beta1=0.0, beta2=0.0, epsilon=0.0, weight_decay=0.0)
    table = adamw_table([leaf])
    for step in range(1, 61):
        scalars = to_device(adamw_scalars(lr=1e-4, step=step, beta1=0.0, beta2=0.0), device)
        adamw_step_(table, scalars, **settings)
    close(leaf.master, np.full(9, 1.006), "float32", terms=60)
    same_bits(leaf.param, to_host(leaf.master).astype(BF16))
    assert (to_host(leaf.param).astype(np.float32) > 1).all()


def drift(size: int, steps: int, lr: float, device: str) -> np.ndarray:
    """Parameters without master after updates of exactly ``lr`` from 1."""
    one = np.ones(size, np.float32)
    leaf = moved(AdamWLeaf(one.astype(BF16), -one, 0 * one, 0 * one), device)
    table = adamw_table([leaf])
    settings: dict[str, Any] = dict(beta1=0.0, beta2=0.0, epsilon=0.0, weight_decay=0.0)
    for step in range(1, steps + 1):
        scalars = adamw_scalars(lr=lr, step=step, seed=1, beta1=0.0, beta2=0.0)
        adamw_step_(table, to_device(scalars, device), **settings)
    return to_host(leaf.param).astype(np.float64)


def test_rounding_of_parameters_is_unbiased(device):
    """To nearest, all would stay at 1: an update is 1/80 of the gap to the next bfloat16."""
    got = drift(4096, 20, 1e-4, device)
    gap = 2.0**-7
    sigma = gap * np.sqrt(20 * 1e-4 / gap / got.size)  # of the mean of draws with chance lr / gap
    assert abs(got.mean() - 1.002) < 3 * sigma
    assert set(np.unique(got)) <= {1, 1 + gap, 1 + 2 * gap, 1 + 3 * gap, 1 + 4 * gap}


def test_rounding_of_moments_is_unbiased(device):
    """With no gradient, v shrinks by 0.1 % a step, below what rounding to nearest can follow."""
    size, steps = 4096, 20
    one = np.ones(size, np.float32)
    leaf = AdamWLeaf(one, 0 * one, one.astype(BF16), one.astype(BF16))
    leaf = moved(leaf, device)
    for step in range(1, steps + 1):
        scalars = to_device(adamw_scalars(lr=1e-3, step=step, seed=2, **BETAS), device)
        adamw_step_(adamw_table([leaf]), scalars, **SETTINGS)
    gap = 2.0**-8  # below 1
    got_m, got_v = to_host(leaf.m).astype(np.float64), to_host(leaf.v).astype(np.float64)
    assert abs(got_v.mean() - 0.999**steps) < 3 * gap * np.sqrt(steps * 0.001 / gap / size)
    assert abs(got_m.mean() - 0.9**steps) < 3 * gap / 2 * np.sqrt(steps / size)
    assert got_v.std() > 0
    assert abs(np.corrcoef(got_m, got_v)[0, 1]) < 5 / np.sqrt(size)  # no bits are used twice


def test_random_bits_follow_step_seed_and_tensor(device):
    leaf = make((1003,), KINDS[4])

    def param(step: int, seed: int, index: int) -> np.ndarray:
        scalars = adamw_scalars(lr=1e-2, step=7, seed=seed, **BETAS)
        scalars[4:].view(np.uint32)[:] = step  # only the rounding sees another step
        there = moved(leaf._replace(tensor=index), device)
        return to_host(adamw_step(there, to_device(scalars, device), **SETTINGS).param)

    base = param(7, 1, 0)
    same_bits(base, param(7, 1, 0))
    for other in (param(8, 1, 0), param(7, 2, 0), param(7, 1, 1)):
        assert (base.view(np.uint16) != other.view(np.uint16)).any()


def test_a_shard_draws_what_the_whole_would(device):
    leaf = make((2048,), KINDS[5])
    scalars = to_device(adamw_scalars(lr=1e-2, step=7, seed=4, **BETAS), device)
    whole = adamw_step(moved(leaf, device), scalars, **SETTINGS)
    for begin, end in ((0, 1000), (1000, 2048)):
        part = {n: getattr(leaf, n)[begin:end] for n in ("param", "grad", "m", "v")}
        got = adamw_step(moved(leaf._replace(**part, first=begin), device), scalars, **SETTINGS)
        same_bits(got.param, whole.param[begin:end])
        same_bits(got.v, whole.v[begin:end])


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[5]], ids=str)
@pytest.mark.parametrize("zero_grad", [False, True])
def test_an_unusable_gradient_changes_nothing(kind, zero_grad, device):
    leaf = make((1003,), kind)
    leaf.grad[5] = np.nan
    there = moved(leaf, device)
    scalars = to_device(adamw_scalars(lr=1e-2, step=2, **BETAS), device)
    adamw_step_(adamw_table([there]), scalars, flag(0, 0, device), zero_grad=zero_grad, **SETTINGS)
    same_leaf(there, leaf, ("param", "m", "v", "master"))
    if zero_grad:
        assert (to_host(there.grad) == 0).all()  # or the next sum would hold the NaN
    else:
        same_bits(there.grad, leaf.grad)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
def test_zero_grad_changes_only_the_gradient(kind, device):
    leaf = make((4099,), kind)
    scalars = to_device(adamw_scalars(lr=1e-2, step=2, **BETAS), device)
    kept, cleared = moved(leaf, device), moved(leaf, device)
    adamw_step_(adamw_table([kept]), scalars, **SETTINGS)
    adamw_step_(adamw_table([cleared]), scalars, zero_grad=True, **SETTINGS)
    same_leaf(cleared, kept, ("param", "m", "v", "master"))
    assert (to_host(cleared.grad) == 0).all()
    same_bits(kept.grad, leaf.grad)


def test_pure_step_leaves_its_arguments(device):
    leaf = make((65,), KINDS[3])
    there = moved(leaf, device)
    scalars = to_device(adamw_scalars(lr=1e-2, step=2, **BETAS), device)
    got = adamw_step(there, scalars, **SETTINGS)
    same_leaf(there, leaf)
    assert (to_host(got.param) != to_host(there.param)).any()


def test_split_invariance(device):
    """Sums over twice the tokens at half the scale: the same update to the bit."""
    leaf = make((1003,), KINDS[0])
    twice = leaf._replace(grad=leaf.grad * np.float32(2))
    scalars = to_device(adamw_scalars(lr=1e-2, step=2, **BETAS), device)
    once = adamw_step(moved(leaf, device), scalars, flag(1 / 37, 1, device), **SETTINGS)
    other = adamw_step(moved(twice, device), scalars, flag(1 / 74, 1, device), **SETTINGS)
    same_leaf(other, once, ("param", "m", "v"))


def test_scalars():
    got = adamw_scalars(lr=3e-4, step=2, beta1=0.9, beta2=0.0, seed=-1)
    close(got[:3], np.array([3e-4, 0.19, 1.0]), "float32")
    assert got[3:].view(np.uint32).tolist() == [0xFFFFFFFF, 2]
    with pytest.raises(ValueError, match="step counts from 1"):
        adamw_scalars(lr=1e-3, step=0, **BETAS)


def test_refusals():
    leaf = make((16, 4), KINDS[0])
    mastered = make((16, 4), KINDS[2])
    half = leaf.m.astype(BF16)
    for leaves, message in (
        ([], "leaves must not be empty"),
        ([leaf._replace(m=leaf.m.reshape(-1))], "m must be C-contiguous of param's shape"),
        ([leaf._replace(grad=leaf.grad.reshape(4, 16).T)], "grad must be C-contiguous"),
        ([leaf._replace(v=half)], "m and v must have one dtype"),
        ([leaf._replace(master=leaf.param)], "a float32 master belongs to a bfloat16 param"),
        ([leaf._replace(first=4)], "first must be a multiple of 8"),
        ([leaf, mastered], "one combination of dtypes"),
    ):
        with pytest.raises(ValueError, match=message):
            adamw_table(leaves)


def test_no_kernel_for_float64(device):
    leaf = make((16,), KINDS[0])
    wide = AdamWLeaf(*(to_device(x.astype(np.float64), device) for x in leaf[:4]))
    if on_device(wide.param):
        scalars = to_device(adamw_scalars(lr=1e-3, step=1, **BETAS), device)
        with pytest.raises(ValueError, match="no kernel takes float64"):
            adamw_step_(adamw_table([wide]), scalars, **SETTINGS)
