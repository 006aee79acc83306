"""The cases of every op: listed without a card, and built and run on the host at small sizes."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench import inputs
from bench.bench_matmul import Shape, shapes
from bench.conftest import ROOT, own_tests
from bench.test_ops import OPS
from surogate.models.config import parameter_shapes
from surogate.models.registry import MODELS, lookup

RNG = np.random.default_rng(0)


def drawn(shape, dtype="f4"):
    return RNG.standard_normal(shape).astype(dtype)


HOST_CUPY = SimpleNamespace(
    **{
        name: getattr(np, name)
        for name in "arange array asarray empty full int32 ndarray ones searchsorted zeros".split()
    },
    linalg=np.linalg,
    random=SimpleNamespace(standard_normal=drawn, randint=RNG.integers),
)
# What makes an op's cases smaller: the function that yields them and its arguments, or tables to
# replace before all are taken.
SMALL: dict[str, tuple[str, tuple, dict[str, Any]]] = {
    "adamw": ("cases", (), {"MODEL": [(5, 8), (3,)], "ADAPTER": [(2, 4)]}),
    "attention": ("cases", (), {"DENSE": {"2 x 8": [8, 8]}, "packed_lengths": lambda *_: [3, 5]}),
    "cross_entropy": ("size_cases", (4, 50), {}),
    "embedding": ("cases", (), {"VOCAB": 50, "SIZES": [(6, 8)]}),
    "fp8": ("cases", (), {"TOKENS": 16, "WIDTHS": (32,), "PRODUCTS": {"w": (48, 32)}}),
    "grad_norm": ("cases", (), {"MODEL": [(5, 8), (3,)], "ADAPTER": [(2, 4)]}),
    "linear": ("weight_cases", ("w", 8, 6, ((0, 4), (4, 6))), {"TOKENS": 5}),
    "lm_head": ("head_cases", ("head", 50, 8), {"TOKENS": 64}),
    "matmul": ("shape_cases", (Shape(5, 8, 6, ("w",)),), {}),
    "normuon": ("cases", (), {"LAYER": [(8, 4)], "LARGE": (4, 8)}),
    "nvfp4": ("cast_cases", (16, 64), {}),
    "qk_norm_rope": ("pair_cases", (4, 2, 1, 8, True), {}),
    "quant": ("format_cases", ("w", 16, 64, 4.5, {"format": "nf4"}), {}),
    "rmsnorm": ("cases", (), {"SHAPES": [(4, 8)], "CAST": (16, 32)}),
    "rope": ("pair_cases", (4, 2, 8), {}),
    "swiglu": ("cases", (), {"TOKENS": (4,), "FFN": (8,), "CAST": (16, 32)}),
    "widened": (
        "cases",
        (),
        {
            "TOKENS": 5,
            "LAYERS": 2,
            "WEIGHTS": {"8B w": (8, 6, ((0, 4), (4, 6))), "0.6B w": (4, 4, ((0, 4),))},
        },
    ),
}
ON_A_CARD = {"attention_cudnn", "attention_hopper"}  # have no host version


def module_of(op):
    return importlib.import_module(f"bench.bench_{op}")


@pytest.mark.parametrize("op", OPS)
def test_cases_are_listed_without_a_card(op):
    cases = list(module_of(op).cases())
    assert cases and len({case.name for case in cases}) == len(cases)
    assert all(bool(case.bytes) != bool(case.flops) for case in cases)


def test_cases_are_listed_without_cupy():
    code = "import sys; sys.modules['cupy'] = None; import bench.test_gemm, bench.test_ops"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_op_is_tried():
    assert SMALL.keys() | ON_A_CARD == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_tests_that_can_run_first(op):
    assert own_tests(op).exists()


@pytest.mark.parametrize("op", SMALL)
def test_cases_run(op, monkeypatch):
    for case in small_cases(op, monkeypatch):
        call = case.build()
        call()
        call()


def small_cases(op: str, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """The cases of an op over NumPy arrays of small sizes."""
    function, arguments, tables = SMALL[op]
    monkeypatch.setattr(inputs, "COLD", 1)
    for name in {op, "linear", "rope", "adamw", "fp8"}:  # modules that others take helpers from
        module = module_of(name)
        for attribute, value in (("cupy", HOST_CUPY), ("random", host_random)):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, value)
    for attribute, value in tables.items():
        monkeypatch.setattr(module_of(op), attribute, value)
    yield from getattr(module_of(op), function)(*arguments)


def host_random(*shape):
    return RNG.standard_normal(shape).astype(ml_dtypes.bfloat16)


def test_every_matrix_of_every_model_has_a_shape():
    found = {place: (shape.outer, shape.inner) for shape in shapes() for place in shape.places}
    for full in MODELS:
        config, name = lookup(full), full.split("/")[1]
        layer = parameter_shapes(config).layers[0]
        assert found[f"{name} qkv"] == layer.w_qkv and found[f"{name} o"] == layer.w_o
        assert found[f"{name} gate up"] == layer.w_gate_up and found[f"{name} down"] == layer.w_down
        assert found[f"{name} head"] == (config.vocab, config.hidden)
    sizes = [shape[:3] for shape in shapes()]
    assert len(set(sizes)) == len(sizes)


def test_packed_lengths_fill_the_tokens():
    lengths = inputs.packed_lengths(200_000, 256, np.random.default_rng(0))
    assert sum(lengths) == 200_000 and min(lengths[:-1]) >= inputs.SHORTEST
    assert np.mean(lengths) == pytest.approx(256, rel=0.1)
