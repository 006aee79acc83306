"""NorMuon: its paper in plain torch, Polar Express on known values, host and card, edges."""

from typing import Any

import numpy as np
import pytest
import torch

from surogate.kernels.adamw import adamw_scalars
from surogate.kernels.arrays import BF16, Backend
from surogate.kernels.normuon import (
    LEAST_NORM,
    POLAR_EXPRESS,
    NorMuonLeaf,
    NorMuonSettings,
    normalised,
    normuon_ref,
    normuon_step_,
    normuon_table,
    polar_express_,
)
from tests.oracle import close, normal, same_bits, to_device, to_host

PLAIN = NorMuonSettings(weight_decay=0.1)
CAUTIOUS = PLAIN._replace(cautious=True)
# Wide, tall, square, a row, a column, one number, columns that are no multiple of eight.
SHAPES = [(16, 48), (64, 24), (32, 32), (1, 40), (40, 1), (1, 1), (13, 21)]
KINDS = [
    ("float32", "float32", "float32", False),
    ("float32", "bfloat16", "bfloat16", False),
    ("bfloat16", "float32", "float32", True),
    ("bfloat16", "bfloat16", "bfloat16", True),
    ("bfloat16", "bfloat16", "float32", False),
]
ARRAYS = ("param", "grad", "m", "v", "master")


def make(shape: tuple[int, int], kind: tuple, *, index: int = 0) -> NorMuonLeaf:
    """A leaf on the host in the middle of a run: nothing is zero."""
    param_dtype, grad_dtype, moment_dtype, mastered = kind
    param, grad, m, v = normal("float32", shape, shape, shape, shape[:1], seed=10 * index)
    types = {"float32": np.dtype(np.float32), "bfloat16": BF16}
    return NorMuonLeaf(
        param.astype(types[param_dtype]),
        grad.astype(types[grad_dtype]),
        m.astype(types[moment_dtype]),
        v * v / shape[1],
        param if mastered else None,
        tensor=index,
    )


def moved(leaf: NorMuonLeaf, device: str) -> NorMuonLeaf:
    arrays = {n: getattr(leaf, n) for n in ARRAYS}
    return leaf._replace(
        **{n: to_device(a.copy(), device) for n, a in arrays.items() if a is not None}
    )


def step_(
    leaves: list[NorMuonLeaf],
    device: str,
    norm: Any = None,
    *,
    settings: NorMuonSettings = PLAIN,
    lr: float = 1e-2,
    zero_grad: bool = False,
    step: int = 3,
) -> None:
    scalars = to_device(adamw_scalars(lr=lr, step=step, beta1=0.9, beta2=0.9, seed=7), device)
    norm = None if norm is None else to_device(np.array(norm, np.float32), device)
    normuon_step_(normuon_table(leaves), scalars, norm, settings=settings, zero_grad=zero_grad)


def host_step_(leaves: list[NorMuonLeaf], **settings: Any) -> None:
    """The host version, under emulation too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "launch", None)
        step_(leaves, "host", **settings)


def scalar(s: Any) -> Any:
    """What Polar Express makes of a singular value, in float64."""
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return s


def plain_polar(m: torch.Tensor) -> torch.Tensor:
    """Polar Express as its authors publish it, in the precision of ``m``."""
    x = m.mT if m.size(-2) > m.size(-1) else m
    x = x / (x.norm() * 1.02)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if m.size(-2) > m.size(-1) else x


def ideal_polar(m: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    return u @ vh


def of_values(values: Any, rows: int, columns: int, *, seed: int = 0) -> np.ndarray:
    """A matrix of given singular values."""
    rng = np.random.default_rng(seed)
    count = min(rows, columns)
    u, _ = np.linalg.qr(rng.standard_normal((rows, count)))
    v, _ = np.linalg.qr(rng.standard_normal((columns, count)))
    return (u * np.resize(np.asarray(values, np.float64), count)) @ v.T


def test_published_values():
    """Of the published coefficients: a singular value, and what becomes of it."""
    for s, want in ((1e-3, 0.8589), (1e-2, 1.0271), (1.0, 0.8591), (1.02, 1.137)):
        assert abs(scalar(s) - want) < 5e-4
    grid = scalar(np.linspace(0.02, 1, 200001))
    assert abs(grid.min() - 0.8589) < 1e-4 and abs(grid.max() - 1.1411) < 1e-4
    assert abs(scalar(5.3e-4) - 0.5) < 0.01
    assert scalar(1.03) > 2 and scalar(1.05) > 1e100  # it diverges


@pytest.mark.parametrize("rows,columns", [(24, 56), (56, 24), (32, 32)])
def test_polar_express_of_known_singular_values(rows, columns, device):
    """Each singular value goes where the polynomials send it; bfloat16 adds some 2^-8 a product."""
    values = np.geomspace(0.02, 1, 24)
    values /= np.linalg.norm(values) * 1.02
    x = of_values(values, rows, columns)
    got = to_host(polar_express_(to_device(x.astype(BF16), device))).astype(np.float64)
    want = plain_polar(torch.tensor(x) * (1 / 1.02 / np.linalg.norm(x)) * 1.02).numpy()
    assert np.abs(got - want).max() < 0.05
    found = np.linalg.svd(got, compute_uv=False)[: len(values)]
    assert found.min() > 0.82 and found.max() < 1.17


def test_worked_matrix_of_256_by_64(device):
    """Gaussian numbers: singular values from 0.8581 to 1.1409."""
    m = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    got = to_host(polar_express_(to_device(normalised(m), device))).astype(np.float64)
    found = np.linalg.svd(got, compute_uv=False)
    assert abs(found.min() - 0.858) < 0.005 and abs(found.max() - 1.141) < 0.005


def test_the_norm_keeps_polar_express_from_diverging(device):
    """One singular value and nothing else is the worst case: a norm that were too small by a
    fiftieth, or summed in bfloat16, would end in infinity.
    """
    for rows, columns, scale in ((256, 512, 1.0), (512, 64, 1e-12), (96, 96, 1e12)):
        m = (scale * np.outer(*normal("float64", (rows,), (columns,)))).astype(np.float32)
        x = normalised(m)
        assert np.linalg.norm(x.astype(np.float64), 2) < 1
        leaf = NorMuonLeaf(m * 0, m, m * 0, np.zeros(rows, np.float32))
        leaf = moved(leaf, device)
        step_([leaf], device, lr=1.0)
        step = to_host(leaf.param).astype(np.float64)
        assert np.isfinite(step).all()
        assert abs(np.sqrt((step**2).mean()) - 0.2) < 1e-3


@pytest.mark.parametrize("polar", [ideal_polar, plain_polar], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(24, 56), (56, 24), (32, 32)])
def test_five_steps_of_the_paper(shape, polar, device):
    """Beside plain float64: some per cent of a step's length from Polar Express' own numbers, for
    its products are bfloat16; farther from the ideal, whose singular values are all 1.
    """
    rng = np.random.default_rng(1)
    p = torch.tensor(rng.standard_normal(shape))
    m, v = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape[0], dtype=torch.float64)
    start = p.numpy().astype(np.float32)
    leaf = moved(NorMuonLeaf(start, start * 0, start * 0, start[:, 0] * 0), device)
    for step in range(1, 6):
        g = rng.standard_normal(shape) * 10.0 ** (step % 3)
        p, m, v = normuon_ref(p, torch.tensor(g), m, v, polar, lr=1e-2, settings=PLAIN)
        leaf.grad[...] = to_device((37 * g).astype(np.float32), device)
        step_([leaf], device, [1, 1 / 37, 1], step=step)
    close(leaf.m, m.numpy(), "float32", terms=5)
    way = np.linalg.norm(p.numpy() - start)
    apart = np.linalg.norm(to_host(leaf.param) - p.numpy())
    assert apart < (0.02 if polar is plain_polar else 0.15) * way
    if polar is plain_polar:
        close(leaf.v, v.numpy(), "bfloat16")


def test_rows_get_one_size_and_the_step_its_length(device):
    """From a fresh state every row of a step is as long as the others: RMS 0.2 lr, as AdamW's."""
    grad = normal("float32", (256, 64)) * np.linspace(0.1, 3, 256, dtype=np.float32)[:, None]
    leaf = moved(NorMuonLeaf(grad * 0, grad, grad * 0, grad[:, 0] * 0), device)
    step_([leaf], device, lr=1.0)
    rows = np.sqrt((to_host(leaf.param).astype(np.float64) ** 2).mean(1))
    np.testing.assert_allclose(rows, 0.2, rtol=2e-3)


def test_the_second_moment_remembers(device):
    """A row that was large before is held back in a step in which all are alike, as its average
    says; an average that is overwritten would give all rows one size again.
    """
    quiet, loud = normal("float32", (32, 64), (32, 64), seed=5)
    zero = quiet * 0
    v = np.linspace(1, 9, 32, dtype=np.float32) / 64
    leaf = moved(NorMuonLeaf(zero.copy(), quiet, zero.copy(), v.copy()), device)
    step_([leaf], device, lr=1.0, settings=NorMuonSettings(momentum=0.0, beta2=0.9))
    rows = (to_host(leaf.param).astype(np.float64) ** 2).mean(1)
    o = to_host(polar_express_(to_device(normalised(quiet), device))).astype(np.float64)
    mean = (o**2).mean(1)
    np.testing.assert_allclose(to_host(leaf.v), 0.9 * v + 0.1 * mean, rtol=1e-5)
    want = mean / (0.9 * v + 0.1 * mean)
    np.testing.assert_allclose(rows, want * (0.04 / want.mean()), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("settings", [PLAIN, CAUTIOUS], ids=["plain", "cautious"])
def test_host_and_kernel_agree(kind, settings, device):
    """The momentum to the bit. Sums of squares in another order may move a rounding to bfloat16 of
    what goes into the products or comes out of them: half a per cent of the step, once.
    """
    leaves = [make(shape, kind, index=i) for i, shape in enumerate(SHAPES)]
    there = [moved(leaf, device) for leaf in leaves]
    for step in (5, 6):
        norm = [1, 0.25, 1]
        host_step_(leaves, norm=norm, settings=settings, step=step)
        step_(there, device, norm, settings=settings, step=step)
    for got, want in zip(there, leaves, strict=True):
        same_bits(got.m, want.m)
        np.testing.assert_allclose(to_host(got.v), want.v, rtol=2.0**-7)
        a, b = (x.param if x.master is None else x.master for x in (got, want))
        gap = 2.0**-7 * np.abs(b.astype(np.float64)) if a.dtype == BF16 else 0.0
        apart = np.abs(to_host(a).astype(np.float64) - b.astype(np.float64))
        size = 1e-2 * 0.2 * np.sqrt(want.param.size)  # of a step, if one element has all of it
        assert (apart <= 2 * 2.0**-7 * size + gap).all()
        if want.master is not None:
            same_bits(got.param, to_host(got.master).astype(BF16))


def test_cautious_decay_at_its_edges(device):
    """Decay where weight and step agree, or one of them is zero; none where they disagree."""
    grad = np.eye(4, dtype=np.float32)
    param = np.array([[2, 1, -1, 0], [1, -2, 1, -1], [0, 0, 3, 0], [1, 1, 1, 0]], np.float32)
    leaf = moved(NorMuonLeaf(param, grad, grad * 0, grad[:, 0] * 0), device)
    step_([leaf], device, lr=0.5, settings=CAUTIOUS._replace(weight_decay=1.0))
    step = 0.5 * 0.2 * 2 * np.eye(4)  # length 0.2 sqrt(16) lr over four equal rows
    kept = np.where(step * param >= 0, param - 0.5 * param, param)
    assert kept[1, 1] == -2 and kept[0, 0] == 1 and kept[0, 1] == 0.5
    np.testing.assert_allclose(to_host(leaf.param), kept - step, atol=1e-6)


@pytest.mark.parametrize("grad", [0.0, 1e-30])
def test_a_zero_matrix_decays_and_does_not_step(grad, device):
    """A first gradient of zeros, or one so small that its square vanishes."""
    param = normal("float32", (16, 24))
    full = np.full_like(param, grad)
    assert np.linalg.norm(full.astype(np.float64)) < LEAST_NORM
    leaf = moved(NorMuonLeaf(param, full, param * 0, param[:, 0] * 0), device)
    step_([leaf], device)
    same_bits(leaf.param, param - np.float32(1e-2) * np.float32(0.1) * param)
    assert (to_host(leaf.v) == 0).all()


def test_a_zero_row_does_not_step(device):
    """An output that saw no gradient, in a matrix whose others did."""
    leaf = make((16, 24), KINDS[0])
    leaf.grad[3], leaf.m[3], leaf.v[3] = 0, 0, 0
    there = moved(leaf, device)
    step_([there], device, settings=NorMuonSettings())
    same_bits(to_host(there.param)[3], leaf.param[3])
    assert (to_host(there.param)[4] != leaf.param[4]).all()


@pytest.mark.parametrize("zero_grad", [False, True])
def test_an_unusable_gradient_changes_nothing(zero_grad, device):
    leaf = make((16, 48), KINDS[2])
    leaf.grad[5] = np.nan
    there = moved(leaf, device)
    step_([there], device, [1, 0, 0], zero_grad=zero_grad)
    for name in ("param", "m", "v", "master"):
        same_bits(getattr(there, name), getattr(leaf, name))
    assert zero_grad == (to_host(there.grad) == 0).all()


def test_split_invariance(device):
    """Sums over twice the tokens at half the scale: the same update to the bit."""
    leaf = make((24, 56), KINDS[0])
    once = moved(leaf, device)
    twice = moved(leaf._replace(grad=leaf.grad * np.float32(2)), device)
    step_([once], device, [1, 1 / 37, 1])
    step_([twice], device, [1, 1 / 74, 1])
    for name in ("param", "m", "v"):
        same_bits(getattr(twice, name), getattr(once, name))


def test_random_bits_follow_the_tensor(device):
    """Parameters without master are rounded at random, each tensor by its own numbers."""
    leaf = make((24, 56), KINDS[4])
    found = []
    for tensor in (0, 0, 1):
        there = moved(leaf._replace(tensor=tensor), device)
        step_([there], device, lr=1e-3)
        found.append(to_host(there.param))
    same_bits(found[0], found[1])
    assert (found[0] != found[2]).any()


def test_refusals():
    leaf = make((16, 24), KINDS[0])
    for leaves, message in (
        ([], "leaves must not be empty"),
        ([leaf._replace(m=leaf.m.reshape(24, 16).T)], "m must be C-contiguous"),
        ([leaf._replace(v=leaf.v[:3])], "v must have a number for each row"),
        ([leaf._replace(master=leaf.param)], "a float32 master belongs to a bfloat16 param"),
        ([leaf, make((16, 24), KINDS[2])], "one combination of dtypes"),
    ):
        with pytest.raises(ValueError, match=message):
            normuon_table(leaves)
