"""Rotary positions: frequencies against transformers, rotation against float64 autodiff."""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from surogate.kernels.rope import (
    RopeTable,
    rope,
    rope_bwd,
    rope_frequencies,
    rope_fwd,
    rope_ref,
    rope_table,
    token_stride,
)
from tests.oracle import close, normal, oracle, same_bits, to_device, to_host, unaligned

SIZES = [
    (1, 1, 2, 2),  # least: one pair
    (5, 3, 10, 10),  # five pairs: no 16-byte accesses
    (33, 6, 64, 64),  # a block spans tokens
    (7, 2, 256, 64),  # a quarter is rotary (Qwen3.5)
    (4, 3, 80, 48),  # the rest is one pack and a half of another slot
]
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def table_of(rotary: int, positions: int, device: str = "host") -> RopeTable:
    inv_freq, factor = rope_frequencies(rotary, base=10000.0)
    return RopeTable(
        *[to_device(a, device) for a in rope_table(inv_freq, factor, positions=positions)]
    )


def positions_of(tokens: int, device: str = "host") -> np.ndarray:
    """Any positions below 100, not in order."""
    return to_device(np.random.default_rng(5).integers(0, 100, tokens).astype(np.int32), device)


def in_torch(table: RopeTable, positions: np.ndarray) -> dict:
    import torch

    wide = [torch.tensor(to_host(a).astype(np.float64)) for a in table]
    return {"table": RopeTable(*wide), "positions": torch.tensor(to_host(positions)).long()}


@pytest.mark.parametrize("tokens,heads,head_dim,rotary", SIZES)
@each_dtype
def test_matches_reference(tokens, heads, head_dim, rotary, dtype, device):
    table, positions = table_of(rotary, 100, device), positions_of(tokens, device)
    x, dy = normal(dtype, *[(tokens, heads, head_dim)] * 2, device=device)
    y, dx = oracle(partial(rope_ref, **in_torch(table, positions)), (x,), dy)
    got_y, res = rope_fwd(x, table=table, positions=positions)
    close(got_y, y, dtype)
    close(rope_bwd(res, dy), dx, dtype)
    same_bits(got_y[..., rotary:], x[..., rotary:])


def test_float64_is_computed_in_float64():
    table, positions = table_of(8, 100), positions_of(4)
    x, dy = normal("float64", (4, 2, 12), (4, 2, 12))
    y, dx = oracle(partial(rope_ref, **in_torch(table, positions)), (x,), dy)
    got_y, res = rope_fwd(x, table=table, positions=positions)
    close(got_y, y, "float64")
    close(rope_bwd(res, dy), dx, "float64")


def test_rows_may_lie_apart(device):
    table, positions = table_of(16, 100, device), positions_of(6, device)
    packed = normal("bfloat16", (6, 5, 16), device=device)
    view = packed[:, 1:4]
    want, _ = rope_fwd(view.copy(), table=table, positions=positions)
    same_bits(rope_fwd(view, table=table, positions=positions)[0], want)


@pytest.mark.parametrize("which", ["x", "cos", "sin"])
@each_dtype
def test_arrays_that_begin_off_16_bytes(which, dtype, device):
    table, positions = table_of(16, 100, device), positions_of(6, device)
    x = normal(dtype, (6, 5, 16), device=device)
    want, _ = rope_fwd(x, table=table, positions=positions)
    if which == "x":
        x = unaligned(x, device)
    else:
        table = table._replace(**{which: unaligned(getattr(table, which), device)})
    same_bits(rope_fwd(x, table=table, positions=positions)[0], want)


def test_tokens_that_lie_off_16_bytes(device):
    table, positions = table_of(16, 100, device), positions_of(6, device)
    wide = normal("bfloat16", (6, 5 * 16 + 1), device=device)
    x = wide[:, :80].reshape(6, 5, 16)
    assert x.base is not None and x.strides[0] == 162
    want, _ = rope_fwd(x.copy(), table=table, positions=positions)
    same_bits(rope_fwd(x, table=table, positions=positions)[0], want)


def test_tokens_do_not_depend_on_the_split(device):
    table, positions = table_of(32, 100, device), positions_of(10, device)
    x = normal("bfloat16", (10, 3, 32), device=device)
    y, _ = rope_fwd(x, table=table, positions=positions)
    for part in (slice(0, 5), slice(5, 10)):
        same_bits(rope_fwd(x[part], table=table, positions=positions[part])[0], y[part])


def test_no_tokens(device):
    x = normal("float32", (0, 2, 8), device=device)
    y, res = rope_fwd(x, table=table_of(8, 4, device), positions=positions_of(0, device))
    assert y.shape == rope_bwd(res, y).shape == (0, 2, 8)


def config_of(head_dim: int, maximum: int, **parameters: object) -> SimpleNamespace:
    """As much of a transformers configuration as its frequencies look at."""
    return SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=maximum,
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
    )


# Names of transformers' parameters that ours differ from.
NAMES = {"rope_theta": "base", "original_max_position_embeddings": "original_max_positions"}

SCALINGS = [
    ("linear", 64, {"rope_theta": 1e4, "factor": 4.0}),
    ("linear", 64, {"rope_theta": 1e6, "factor": 8.0, "partial_rotary_factor": 0.25}),
    (
        "llama3",  # Llama 3.1
        128,
        {
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        "llama3",  # Llama 3.2, on a short context: all three bands
        64,
        {
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    ("yarn", 128, {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}),
    (
        "yarn",  # GPT-OSS
        64,
        {
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    (
        "yarn",  # DeepSeek's two magnitudes
        64,
        {
            "rope_theta": 1e4,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    (
        "yarn",  # a factor of its own, a part of the head, ramp ends that meet
        128,
        {
            "rope_theta": 1e4,
            "factor": 2.0,
            "attention_factor": 1.25,
            "partial_rotary_factor": 0.5,
            "beta_fast": 4.0,
            "beta_slow": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 2048,
        },
    ),
]


@pytest.mark.parametrize("kind,head_dim,parameters", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(kind, head_dim, parameters, monkeypatch):
    # transformers looks for a package `kernels`, and would find this repository's folder
    monkeypatch.setitem(sys.modules, "kernels", None)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of(head_dim, 131072, **parameters)
    want, want_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours = {NAMES.get(name, name): value for name, value in parameters.items()}
    got, got_factor = rope_frequencies(head_dim, kind=kind, **ours)
    assert got.dtype == np.float32
    assert got_factor == pytest.approx(want_factor, rel=1e-12)
    # 2: torch's power is not always the nearest float32
    np.testing.assert_array_max_ulp(got, want.numpy(), maxulp=2)


@pytest.mark.parametrize(
    "head_dim,factor,ratios",
    [
        (64, 32.0, {14: 1.0, 16: 0.303743, 18: 1 / 32}),  # Llama 3.2 1B
        (128, 8.0, {30: 0.643743, 32: 0.371122, 34: 0.190211, 36: 1 / 8}),  # Llama 3.1 8B
    ],
)
def test_worked_ratios_of_llama3(head_dim, factor, ratios):
    """Scaled over unscaled frequencies: kept, in the ramp, and divided by the factor."""
    scaling = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    plain, _ = rope_frequencies(head_dim, base=5e5)
    got, _ = rope_frequencies(head_dim, base=5e5, kind="llama3", factor=factor, **scaling)
    for index, ratio in ratios.items():
        assert got[index] / plain[index] == pytest.approx(ratio, abs=1e-6), index


def test_worked_factor_of_yarn():
    _, factor = rope_frequencies(
        128, base=1e6, kind="yarn", factor=4.0, original_max_positions=32768
    )
    assert factor == pytest.approx(0.1 * np.log(4) + 1, rel=1e-12) == pytest.approx(1.138629)


@pytest.mark.parametrize("length", [1, 4096, 5000, 131072])  # within, at and beyond the maximum
def test_dynamic_frequencies_are_those_of_transformers(length, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of(96, 4096, rope_theta=1e4, factor=3.0)
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=length)
    got, factor = rope_frequencies(
        96,
        kind="dynamic",
        base=1e4,
        factor=3.0,
        original_max_positions=4096,
        sequence_len=length,
    )
    assert factor == 1.0
    np.testing.assert_array_max_ulp(got, want.numpy(), maxulp=2)


def test_default_table_is_that_of_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    count = 4096
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(count)[None])
    table = rope_table(*rope_frequencies(128, base=500000.0), positions=count)
    # An angle is off by at most 2 units in the last place of its frequency: 2^-22 of itself.
    angle = np.arange(count)[:, None] * rope_frequencies(128, base=500000.0)[0].astype(np.float64)
    allowed = 2.0**-22 * (angle + 1)
    for got, want in ((table.cos, cos), (table.sin, sin)):
        assert (np.abs(got - want[0, :, :64].numpy()) <= allowed).all()


def test_attention_factor_is_in_the_table():
    inv_freq, factor = rope_frequencies(
        16, base=1e4, kind="yarn", factor=8.0, original_max_positions=64
    )
    table = rope_table(inv_freq, factor, positions=9)
    assert factor > 1.2
    close(table.cos**2 + table.sin**2, np.full((9, 8), factor**2), "float32")


def test_pair_holds_its_functions():
    assert rope.fwd is rope_fwd and rope.bwd is rope_bwd


def test_refuses_what_it_cannot_do(device):
    with pytest.raises(ValueError, match="kind must be one of .*, got 'ntk'"):
        rope_frequencies(8, base=1e4, kind="ntk")
    with pytest.raises(ValueError, match="must be even, got 3"):
        rope_frequencies(8, base=1e4, partial_rotary_factor=0.375)
    with pytest.raises(ValueError, match="yarn needs original_max_positions, got 0"):
        rope_frequencies(8, base=1e4, kind="yarn")
    x = normal("float32", (3, 2, 8), device=device)
    with pytest.raises(ValueError, match="at most 4"):
        rope_fwd(x, table=table_of(16, 4, device), positions=positions_of(3, device))
    with pytest.raises(ValueError, match="heads of a token must lie packed"):
        token_stride("here", x[:, :, ::2])
