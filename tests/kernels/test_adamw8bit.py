"""AdamW with 8-bit moments: bitsandbytes' map and nearest codes, the host's bits, edges."""

from typing import Any

import numpy as np
import pytest

from surogate.kernels import adamw8bit
from surogate.kernels.adamw import AdamWLeaf, adamw_ref, adamw_scalars, adamw_step
from surogate.kernels.adamw8bit import (
    BLOCK,
    AdamW8Leaf,
    AdamW8Table,
    Moment8,
    adamw8bit_step_,
    adamw8bit_table,
    bounds,
    decode,
    encode,
    values,
    zero_moment,
)
from surogate.kernels.arrays import BF16, Backend
from tests.oracle import normal, same_bits, to_device, to_host

BETAS: dict[str, Any] = dict(beta1=0.9, beta2=0.999)
SETTINGS: dict[str, Any] = dict(**BETAS, epsilon=1e-8, weight_decay=0.1)
STORE: dict[str, Any] = dict(beta1=0.0, beta2=0.0, epsilon=1.0, weight_decay=0.0)  # m = g, v = g^2
# Less than a lane's eight, a block, a tail, several chunks, empty, rows that are no blocks.
SHAPES = [(1,), (256,), (1003,), (4099,), (0,), (33, 72)]
KINDS = [
    ("float32", "float32", False),
    ("float32", "bfloat16", False),
    ("bfloat16", "float32", True),
    ("bfloat16", "bfloat16", True),
    ("bfloat16", "bfloat16", False),
]


def published_map(signed: bool) -> np.ndarray:
    """bitsandbytes' create_dynamic_map(signed, 7, 8): midpoints of each decade's even division."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        for mean in 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2:
            found += [mean, -mean] if signed else [mean]
    return np.sort(np.array(found))


def published_codes(x: np.ndarray, signed: bool) -> np.ndarray:
    """Codes of one block by bitsandbytes' rule: the nearest, and for m one toward the sign."""
    table = published_map(signed)
    share = x.astype(np.float64) / np.abs(x).max()
    codes = np.abs(share[:, None] - table).argmin(1)
    wrong = np.signbit(table[codes]) != np.signbit(share)
    return np.where(wrong & signed, codes + np.where(share > 0, 1, -1), codes)


def make(shape: tuple[int, ...], kind: tuple, *, index: int = 0, seed: int = 0) -> AdamW8Leaf:
    """A leaf on the host in the middle of a run, with magnitudes over nine decades."""
    param_dtype, grad_dtype, mastered = kind
    param, grad, m, spread = normal("float32", *[shape] * 4, seed=seed + 10 * index)
    m = m * np.float32(10) ** (2 * spread - 3)
    moments = encode(m, m * m * np.abs(spread))
    return AdamW8Leaf(
        param.astype(BF16 if param_dtype == "bfloat16" else np.float32),
        grad.astype(BF16 if grad_dtype == "bfloat16" else np.float32),
        *moments,
        param if mastered else None,
        decay=index % 2 == 0,
        tensor=index,
    )


def moved(leaf: AdamW8Leaf, device: str) -> AdamW8Leaf:
    """A copy of the leaf on a device."""

    def there(x: Any) -> Any:
        return x if x is None else to_device(x.copy(), device)

    m, v = (Moment8(*map(there, moment)) for moment in (leaf.m, leaf.v))
    arrays = {name: there(getattr(leaf, name)) for name in ("param", "grad", "master")}
    return leaf._replace(m=m, v=v, **arrays)


def arrays_of(leaf: AdamW8Leaf) -> list[Any]:
    found = [leaf.param, leaf.master, *leaf.m, *leaf.v]
    return [to_host(x) for x in found if x is not None]


def same_leaf(got: AdamW8Leaf, want: AdamW8Leaf) -> None:
    for a, b in zip(arrays_of(got), arrays_of(want), strict=True):
        same_bits(a, b)


def step_(leaf: AdamW8Leaf, device: str, norm: Any = None, *, lr: float = 1e-2, **settings: Any):
    """One step in place of a leaf that lies on a device."""
    step = settings.pop("step", 3)
    betas = {k: settings.get(k, SETTINGS[k]) for k in BETAS}
    scalars = to_device(adamw_scalars(lr=lr, step=step, seed=11, **betas), device)
    norm = None if norm is None else to_device(np.array(norm, np.float32), device)
    adamw8bit_step_(adamw8bit_table([leaf]), scalars, norm, **SETTINGS | settings)


def host_step_(table: AdamW8Table, *args: Any, **settings: Any) -> None:
    """The host version, under emulation too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "launch", None)
        adamw8bit_step_(table, *args, **settings)


def stored(x: Any, device: str) -> AdamW8Leaf:
    """What is stored of gradients ``x`` when m = x and v = x^2."""
    x = np.asarray(x, np.float32)
    blank = (zero_moment(x.shape, which, like=x) for which in "mv")
    leaf = moved(AdamW8Leaf(x * 0, x, *blank), device)
    step_(leaf, device, lr=0.0, **STORE)
    return leaf


@pytest.mark.parametrize("which", ["m", "v"])
def test_the_map_is_the_published_one(which):
    """To the last bit but one: the original sums the edges in float32."""
    want = published_map(which == "m")
    assert want.shape == (256,)
    assert (np.abs(values(which) - want) <= 2 * np.spacing(np.abs(want.astype(np.float32)))).all()


@pytest.mark.parametrize("which", ["m", "v"])
def test_worked_codes(which):
    """numbers of a block whose largest magnitude is 1e-3 for m, 1e-6 for v."""
    if which == "m":
        x = np.array([1e-3, 5e-4, -2e-7, 0.0, -1e-3], np.float32)
        moment, _ = encode(x, x * x)
        assert moment.codes.tolist() == [255, 219, 119, 127, 0]
        want = [1e-3, 5.0078e-4, -1.5625e-7, 0.0, -9.9297e-4]
    else:
        x = np.array([1e-6, 1e-9, 1e-12, 1.7e-13, 0.0], np.float32)
        _, moment = encode(np.zeros_like(x), x)
        want = [1e-6, 9.719e-10, 7.75e-13, 3.25e-13, 0.0]
    np.testing.assert_allclose(decode(moment, which), want, rtol=5e-5)


def test_codes_are_the_nearest_of_the_published_rule(device):
    """But for what would be stored as zero."""
    rng = np.random.default_rng(0)
    decades = rng.uniform(-8, 0, 16384) * rng.integers(0, 2, 16384)  # half of them like the rest
    x = (rng.standard_normal(decades.size) * 10**decades).astype(np.float32)
    leaf = stored(x, device)
    m_codes, v_codes = to_host(leaf.m.codes), to_host(leaf.v.codes)
    assert len(np.unique(m_codes)) > 240 and len(np.unique(v_codes)) > 240
    for begin in range(0, x.size, BLOCK):
        block = np.s_[begin : begin + BLOCK]
        for codes, new, signed in ((m_codes, x, True), (v_codes, x * x, False)):
            want = published_codes(new[block].astype(np.float32), signed)
            zero = 127 if signed else 0
            want = np.where(want == zero, zero + 1, want)  # here x > 0: negative ones have 126
            assert codes[block].tolist() == want.tolist()


@pytest.mark.parametrize("which", ["m", "v"])
def test_every_boundary_to_the_last_bit(which, device):
    """Floats at a bound go down, those just above it up. Blocks of m begin with a 1."""
    edge = bounds(which)
    exact = values(which).astype(np.float64)
    exact = exact[127 if which == "m" else 0 :]
    assert (edge <= (exact[1:] + exact[:-1]) / 2).all()
    assert (np.nextafter(edge, np.float32(2)) > (exact[1:] + exact[:-1]) / 2).all()
    zero, two = np.float32([0, 2])
    near = np.concatenate([np.nextafter(edge, zero), edge, np.nextafter(edge, two)])
    if which == "v":  # reached through squares, some of which are on either side
        near = np.sqrt(near)
        near = np.concatenate([near, np.nextafter(near, two)])
    near = np.append(near, np.float32(0.5))
    x = np.insert(near, np.arange(0, near.size, BLOCK - 1), np.float32(1))
    leaf = stored(x, device)
    if which == "m":
        magnitude, codes = x, to_host(leaf.m.codes).astype(int) - 127
        negative = 127 - to_host(stored(-x, device).m.codes).astype(int)
        assert negative.tolist() == np.minimum(codes, 127).tolist()  # there is no -1
    else:
        magnitude, codes = x * x, to_host(leaf.v.codes).astype(int)
    want = np.abs(magnitude.astype(np.float64)[:, None] - exact).argmin(1)
    assert codes.tolist() == np.maximum(want, 1).tolist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_host_and_kernel_agree_to_the_bit(kind, device):
    """All tensors in one table, chunks that end inside a tensor, three steps."""
    for chunk in (2048, 16384):
        leaves = [make(shape, kind, index=i) for i, shape in enumerate(SHAPES)]
        there = [moved(leaf, device) for leaf in leaves]
        host, table = adamw8bit_table(leaves, chunk=chunk), adamw8bit_table(there, chunk=chunk)
        norm = np.array([1, 0.25, 1], np.float32)
        for step in range(5, 8):
            scalars = adamw_scalars(lr=1e-2, step=step, seed=11, **BETAS)
            host_step_(host, scalars, norm, **SETTINGS)
            adamw8bit_step_(table, *(to_device(x, device) for x in (scalars, norm)), **SETTINGS)
        for got, want in zip(there, leaves, strict=True):
            same_leaf(got, want)


@pytest.mark.parametrize("kind", [KINDS[2], KINDS[4]], ids=str)
def test_unaligned_tensors_and_their_neighbours(kind, device):
    """Views that start anywhere give the bits of aligned ones; nothing beside them is written."""
    leaf = make((1003,), kind)
    want = moved(leaf, device)
    step_(want, device, cautious=True)
    bases: list[Any] = []

    def view(array: Any, begin: int) -> Any:
        bases.append(to_device(np.full(array.size + 32, 7, array.dtype), device))
        part = bases[-1][begin : begin + array.size]
        part[...] = to_device(array, device)
        return part

    for begin in (1, 8):
        bases.clear()
        m, v = (Moment8(*(view(x, begin) for x in each)) for each in (leaf.m, leaf.v))
        names = ("param", "grad") if leaf.master is None else ("param", "grad", "master")
        views = {name: view(getattr(leaf, name), begin) for name in names}
        got = leaf._replace(m=m, v=v, **views)
        step_(got, device, cautious=True, zero_grad=True)
        same_leaf(got, want)
        for base in bases:
            outside = np.delete(
                to_host(base).astype(np.float32), np.s_[begin : base.size - 32 + begin]
            )
            assert (outside == 7).all()


def test_a_step_is_adamw_of_the_decoded_moments(device):
    """The parameter follows the moments before they are encoded, to a rounding."""
    leaf = make((1003,), KINDS[0])
    there = moved(leaf, device)
    step_(there, device, step=3)
    wide = [x.astype(np.float64) for x in (leaf.param, leaf.grad)]
    moments = (decode(leaf.m, "m").astype(np.float64), decode(leaf.v, "v").astype(np.float64))
    want, m, v = adamw_ref(*wide, *moments, lr=1e-2, step=3, **SETTINGS)
    np.testing.assert_allclose(to_host(there.param), want, rtol=0, atol=2e-6)
    for which, got, exact in (("m", there.m, m), ("v", there.v, v)):
        new = decode(Moment8(*(to_host(x) for x in got)), which)
        scale = np.repeat(to_host(got.scale), BLOCK)[: exact.size]
        assert (np.abs(new - exact) <= 0.0071 * scale).all()  # half of the widest gap, at -1


def test_the_host_works_in_parts(monkeypatch):
    """Parts of 512 elements, the last one ragged, give the bits of the whole."""
    leaf = make((3, 701), KINDS[4])
    whole, parts = moved(leaf, "host"), moved(leaf, "host")
    step_(whole, "host")
    monkeypatch.setattr(adamw8bit, "HOST_PART", 512)
    step_(parts, "host")
    same_leaf(parts, whole)


def test_zero_gradients_and_moments(device):
    """A fresh state stays one, and only decay moves the parameter; then the first gradient acts as
    it does in AdamW of float32.
    """
    param, grad = normal("float32", (600,), (600,))
    blank = [zero_moment((600,), which, like=param) for which in "mv"]
    leaf = moved(AdamW8Leaf(param, grad * 0, *blank, decay=True), device)
    step_(leaf, device, step=1)
    for got, want in zip((*leaf.m, *leaf.v), (*blank[0], *blank[1]), strict=True):
        same_bits(got, want)
    same_bits(leaf.param, param - np.float32(1e-2) * np.float32(0.1) * param)
    start = to_host(leaf.param).copy()
    grad[::3] = 0  # zeros beside numbers: neither moves nor counts
    leaf.grad[...] = to_device(grad, device)
    step_(leaf, device, step=2)
    wide = AdamWLeaf(start, grad, grad * 0, grad * 0, decay=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "launch", None)
        want = adamw_step(wide, adamw_scalars(lr=1e-2, step=2, **BETAS), **SETTINGS)
    same_bits(leaf.param, want.param)
    assert (to_host(leaf.m.codes)[::3] == 127).all() and (to_host(leaf.v.codes)[::3] == 0).all()


def test_small_second_moments_do_not_explode(device):
    """Gradients down to a billionth of the block's largest: no step is longer than AdamW's own but
    for the roundings of v and m, a third; bitsandbytes' second one is up to 31 times as long.
    """
    grad = np.full(BLOCK, 1.0, np.float32) * np.float32(10) ** -np.linspace(0, 9, BLOCK)
    grad = grad.astype(np.float32)
    blank = (zero_moment(grad.shape, which, like=grad) for which in "mv")
    leaf = moved(AdamW8Leaf(grad * 0, grad, *blank), device)
    settings = {**SETTINGS, "epsilon": 1e-16, "weight_decay": 0.0}
    before = np.zeros(BLOCK, np.float32)
    for step in range(1, 6):
        step_(leaf, device, lr=1.0, step=step, **settings)
        moved_by = before - to_host(leaf.param)
        assert (moved_by > 0).all() and moved_by.max() < 1.4
        before = to_host(leaf.param).copy()
    assert (to_host(leaf.v.codes) > 0).all() and (to_host(leaf.m.codes) > 127).all()


def test_m_without_v_is_never_divided_by_epsilon_alone(device):
    """A gradient whose square vanishes, in a block where others do not."""
    grad = np.ones(BLOCK, np.float32)
    grad[3] = -1e-30
    leaf = stored(grad, device)
    assert to_host(leaf.m.codes)[3] == 126 and to_host(leaf.v.codes)[3] == 1
    leaf.grad[...] = 0
    step_(leaf, device, lr=1.0, step=2, weight_decay=0.0)
    assert abs(to_host(leaf.param)[3]) < 0.01


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[4]], ids=str)
def test_an_element_without_a_usable_gradient_stays(kind, device):
    """Infinite, NaN, or with a square beyond float32; the other 253 of its block do not notice."""
    leaf = make((600,), kind)
    odd = [5, 17, 300]
    leaf.grad[odd] = np.array([np.nan, np.inf, -3e19], np.float32).astype(leaf.grad.dtype)
    got, plain = moved(leaf, device), moved(leaf, device)
    plain.grad[...] = to_device(np.where(np.isin(np.arange(600), odd), 0, leaf.grad), device)
    step_(got, device)
    step_(plain, device)
    assert np.isfinite(to_host(got.m.scale)).all() and np.isfinite(to_host(got.v.scale)).all()
    rest = np.delete(np.arange(600), odd)
    same_bits(to_host(got.param)[rest], to_host(plain.param)[rest])
    same_bits(to_host(got.param)[odd], leaf.param[odd])
    if leaf.master is not None:
        same_bits(to_host(got.master)[odd], leaf.master[odd])
    for which, new, old in (("m", got.m, leaf.m), ("v", got.v, leaf.v)):
        kept = decode(Moment8(*(to_host(x) for x in new)), which)
        scale = np.repeat(to_host(new.scale), BLOCK)[:600]
        assert (np.abs(kept - decode(old, which)) <= 0.0071 * scale)[odd].all()


@pytest.mark.parametrize("zero_grad", [False, True])
def test_an_unusable_norm_changes_nothing(zero_grad, device):
    leaf = make((1003,), KINDS[3])
    leaf.grad[5] = np.nan
    there = moved(leaf, device)
    step_(there, device, [1, 0, 0], zero_grad=zero_grad)
    same_leaf(there, leaf)
    assert zero_grad == (to_host(there.grad) == 0).all()


def test_zero_grad_changes_only_the_gradient(device):
    leaf = make((4099,), KINDS[1])
    kept, cleared = moved(leaf, device), moved(leaf, device)
    step_(kept, device)
    step_(cleared, device, zero_grad=True)
    same_leaf(cleared, kept)
    same_bits(kept.grad, leaf.grad)
    assert (to_host(cleared.grad) == 0).all()


def test_split_invariance(device):
    """Sums over twice the tokens at half the scale: the same update to the bit."""
    leaf = make((1003,), KINDS[0])
    once = moved(leaf, device)
    twice = moved(leaf._replace(grad=leaf.grad * np.float32(2)), device)
    step_(once, device, [1, 1 / 37, 1])
    step_(twice, device, [1, 1 / 74, 1])
    same_leaf(twice, once)


def test_a_shard_is_a_part_of_the_whole(device):
    leaf = make((2048,), KINDS[4])
    whole = moved(leaf, device)
    step_(whole, device)
    for begin, end in ((0, 1024), (1024, 2048)):
        blocks = np.s_[begin // BLOCK : end // BLOCK]
        m, v = (Moment8(x.codes[begin:end], x.scale[blocks]) for x in (leaf.m, leaf.v))
        part = leaf._replace(param=leaf.param[begin:end], grad=leaf.grad[begin:end], m=m, v=v)
        part = moved(part._replace(first=begin), device)
        step_(part, device)
        same_bits(part.param, to_host(whole.param)[begin:end])
        same_bits(part.v.codes, to_host(whole.v.codes)[begin:end])
        same_bits(part.m.scale, to_host(whole.m.scale)[blocks])


def test_a_hundred_steps_beside_float32(device):
    """Noisy gradients of sizes within a decade: the two ways are some per cent of their length
    apart.
    """
    rng = np.random.default_rng(3)
    shape = (700,)
    size = np.float32(10) ** rng.uniform(-1, 0, shape).astype(np.float32)
    zero = np.zeros(shape, np.float32)
    blank = (zero_moment(shape, which, like=zero) for which in "mv")
    leaf = moved(AdamW8Leaf(zero.copy(), zero.copy(), *blank), device)
    p, m, v = (np.zeros(shape) for _ in range(3))
    for step in range(1, 101):
        grad = (size * (0.3 + rng.standard_normal(shape))).astype(np.float32)
        leaf.grad[...] = to_device(grad, device)
        step_(leaf, device, lr=1e-2, step=step, weight_decay=0.0)
        settings = {**SETTINGS, "weight_decay": 0.0}
        p, m, v = adamw_ref(p, grad.astype(np.float64), m, v, lr=1e-2, step=step, **settings)
    assert np.linalg.norm(to_host(leaf.param) - p) < 0.05 * np.linalg.norm(p)


def test_refusals():
    leaf = make((16, 32), KINDS[0])
    for leaves, message in (
        ([], "leaves must not be empty"),
        ([leaf._replace(grad=leaf.grad.reshape(32, 16).T)], "grad must be C-contiguous"),
        ([leaf._replace(m=leaf.m._replace(codes=leaf.m.codes.reshape(-1)))], "m must be C-cont"),
        ([leaf._replace(v=leaf.v._replace(scale=leaf.v.scale[:1]))], "v must be C-contiguous"),
        ([leaf._replace(first=8)], "first must be a multiple of 256"),
        ([leaf, make((16, 32), KINDS[2])], "one combination of dtypes"),
    ):
        with pytest.raises(ValueError, match=message):
            adamw8bit_table(leaves)


def test_refuses_chunks_that_cut_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "launch", lambda *a: None)
        with pytest.raises(ValueError, match="chunk must be a multiple of 256, got 8"):
            adamw8bit_table([make((16,), KINDS[0])], chunk=8)
