"""Adapters that begin at what storing their base lost: the best product, and a model nearer to the
plain one.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import surogate
from surogate.kernels import tree
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.batch import IGNORED, Batch, batch_of
from surogate.kernels.quant.quantized import dequantize
from surogate.kernels.quantized_linear import QuantizedWeight
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig
from surogate.models.error_init import error_adapter, factors, input_squares
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec, init_adapter, named_adapter
from surogate.models.names import Field, layout, named
from surogate.models.recipe import Scope, Storage
from surogate.models.stored_recipe import QuantizedRecipe
from surogate.models.tree import Adapter
from surogate.models.widen import refresh_of, widened
from tests.models.tiny import both, documents
from tests.oracle import close, normal, same_bits, to_device, to_host

STORAGES = {
    "nf4": Storage("nf4", 64, double_quant=True),
    "nvfp4": Storage("nvfp4", four_over_six=True),
    "fp8": Storage("fp8", 64),
}
SPEC = LoraSpec.of(8, 16, ["all"])
BASE = "base_model.model."


def weighted(outer: int, inner: int) -> tuple[np.ndarray, np.ndarray]:
    """An error, and sizes of features over four orders of magnitude, one of which is never on."""
    error, sizes = normal("float32", (outer, inner), (inner,))
    sizes = np.exp(2 * sizes)
    sizes[inner // 2] = 0
    return error, sizes


@pytest.mark.parametrize(
    "outer,inner,rank",
    [(1, 1, 1), (96, 64, 8), (40, 700, 16), (700, 40, 16), (512, 384, 64), (64, 96, 64)],
)
@pytest.mark.parametrize("even", [True, False], ids=["even", "weighted"])
def test_product_is_the_best_of_its_rank(outer, inner, rank, even, device):
    """Eckart and Young's, also where singular values are close, as those of a rounding error are
    without weights.
    """
    error, sizes = weighted(outer, inner)
    sizes = np.ones_like(sizes) if even else sizes + np.float32(inner == 1)
    got = factors(to_device(error, device), to_device(sizes, device), rank, 0, "x")
    exact = error.astype(np.float64) * sizes
    values = np.linalg.svd(exact, compute_uv=False)
    left = np.linalg.norm((error - got.b.astype(np.float64) @ got.a) * sizes)
    best = np.linalg.norm(values[rank:])
    assert best - 1e-5 * values[0] <= left <= 1.01 * best + 1e-5 * values[0]
    assert got.share == pytest.approx(1 - (left / np.linalg.norm(exact)) ** 2, abs=1e-5)


def test_product_is_that_of_the_weighted_decomposition():
    """U S V^T diag(1 / s), of singular values that lie apart."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 12)))[0] for n in (48, 32))
    sizes = np.exp(rng.normal(size=32))
    error = (left * 2.0 ** -np.arange(12) @ right.T) / sizes
    got = factors(error.astype(F32), sizes.astype(F32), 5, 0, "x")
    u, s, vt = np.linalg.svd(error * sizes)
    want = (u[:, :5] * s[:5] @ vt[:5]) / sizes
    close(got.b @ got.a, want, "float32", terms=48)


def test_features_that_are_never_on_do_no_harm():
    error, sizes = weighted(64, 48)
    sizes[5:40] = 0
    got = factors(error, sizes, 8, 0, "x")
    assert np.linalg.norm(got.b @ got.a) <= np.linalg.norm(error)


def test_ranks_without_an_error_are_left_out():
    error = np.outer(np.arange(1, 33), np.arange(24)).astype(F32)
    got = factors(error, np.ones(24, F32), 8, 0, "x")
    assert got.a.shape == (1, 24) and got.b.shape == (32, 1)
    close(got.b @ got.a, error, "float32", terms=32)
    got = factors(0 * error, np.ones(24, F32), 8, 0, "x")
    assert got.a.shape == (0, 24) and got.b.shape == (32, 0) and got.share == 0


class Stored(NamedTuple):
    """A model whose matrices are stored, the recipe that did it, and its matrices as they were."""

    config: ModelConfig
    params: Any
    recipe: QuantizedRecipe
    load: Callable[[Field], np.ndarray]
    device: str

    def there(self, value: Any) -> Any:
        return tree.map(lambda x: to_device(x, self.device), value)

    @property
    def table(self) -> Any:
        return self.there(dense.rotary_table(self.config, 64))

    def squares(self, batches: list[Batch]) -> Any:
        return input_squares(
            self.params,
            self.config,
            batches,
            table=self.table,
            begin=self.recipe.begin,
            put=self.there,
        )

    def adapter(self, spec: LoraSpec, squares: Any) -> Adapter:
        adapter, shares = error_adapter(
            self.params,
            self.config,
            spec,
            squares,
            seed=0,
            dtype=self.params.embed.dtype,
            load=self.load,
            put=self.there,
        )
        assert len(shares) == len(spec.targets) * self.config.layers
        assert all(0 < share <= 1 + 1e-6 for share in shares.values())
        return adapter


def stored(plain: Any, config: ModelConfig, storage: Storage, device: str = "host") -> Stored:
    """A model in NumPy, stored."""
    recipe, fields = QuantizedRecipe(config, Scope(), storage), layout(config)

    def there(path: str, leaf: Any) -> Any:
        return to_device(leaf.copy(), device)

    put = recipe.frozen(there, there, SPEC)
    params = tree.map(lambda field, leaf: put(field.path, leaf), fields, plain)
    leaves = dict(zip(tree.leaves(fields), tree.leaves(plain), strict=True))
    return Stored(config, params, recipe, leaves.__getitem__, device)


def rows(*lengths: int, seed: int = 1) -> Batch:
    tokens = np.concatenate([np.array(d, np.int32) for d in documents(*lengths, seed=seed)])
    return batch_of(tokens, lengths)


def padded(batch: Batch) -> Batch:
    """The batch with its last document unsupervised, as padding is."""
    labels = batch.labels.copy()
    labels[batch.docs.start[-1] :] = IGNORED
    return batch._replace(labels=labels)


def test_squares_are_those_of_the_decoded_model(tmp_path):
    """Of transformers' modules, whose weights are what is stored decodes to; padding left out."""
    reference, plain = both("qwen3", tmp_path)
    model = stored(plain.params, plain.config, STORAGES["nf4"])
    decoded = tree.map(
        lambda leaf: np.array(leaf.decoded() if isinstance(leaf, QuantizedWeight) else leaf),
        model.params,
    )
    weights = {name: torch.tensor(x) for name, x in named(decoded, plain.config).items()}
    reference.load_state_dict(weights)
    want: dict[str, Any] = {}

    def watch(path: str) -> Any:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0].detach().double().reshape(-1, inputs[0].shape[-1])
            want[path] = want.get(path, 0) + (x * x).sum(0).numpy()

        return hook

    modules = {"self_attn.k_proj": "w_qkv", "self_attn.o_proj": "w_o"}
    modules |= {"mlp.up_proj": "w_gate_up", "mlp.down_proj": "w_down"}
    for index, layer in enumerate(reference.model.layers):
        for module, field in modules.items():
            layer.get_submodule(module).register_forward_pre_hook(watch(f"layers.{index}.{field}"))
    batches = [rows(20, 13), padded(rows(17, 9, 7, seed=2))]
    for batch, lengths in zip(batches, ([20, 13], [17, 9]), strict=True):
        for tokens in np.split(batch.tokens[: sum(lengths)], np.cumsum(lengths)[:-1]):
            reference(torch.tensor(tokens[None].astype(np.int64)))
    got = model.squares(batches)
    assert got.keys() == want.keys()
    for path, squares in got.items():
        assert np.abs(squares - want[path]).max() <= 1e-5 * want[path].max(), path


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "v_proj", "up_proj"], ["k_proj"]])
@pytest.mark.parametrize("storage", STORAGES)
def test_each_module_gets_the_product_of_its_own_error(tmp_path, storage, targets):
    """Against NumPy's decomposition of what the format does to the tensors of the file."""
    _, plain = both("llama", tmp_path)
    model = stored(plain.params, plain.config, STORAGES[storage])
    spec, squares = LoraSpec.of(4, 6, targets), model.squares([rows(40, 24)])
    pairs = named_adapter(model.adapter(spec, squares), plain.config, spec)
    modules = {"q_proj": "w_qkv", "k_proj": "w_qkv", "v_proj": "w_qkv", "o_proj": "w_o"}
    modules |= {"gate_proj": "w_gate_up", "up_proj": "w_gate_up", "down_proj": "w_down"}
    seen = 0
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stem = f"{BASE}{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in pairs:
            continue
        a, b = (pairs[f"{stem}.lora_{x}.weight"].astype(np.float64) for x in "AB")
        narrow = dequantize(STORAGES[storage].quantized(weight))
        error = weight.astype(np.float64) - narrow.astype(np.float64)
        sizes = np.sqrt(squares[f"layers.{name.split('.')[2]}.{modules[name.split('.')[4]]}"])
        best = np.linalg.norm(np.linalg.svd(error * sizes, compute_uv=False)[4:])
        assert np.linalg.norm((error - 1.5 * b @ a) * sizes) <= 1.01 * best, name
        rms = np.sqrt(np.mean(a * a, 1))
        np.testing.assert_allclose(rms, 1 / math.sqrt(3 * a.shape[1]), rtol=1e-5)
        seen += 1
    assert seen == 2 * len(spec.targets)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("storage", STORAGES)
def test_logits_come_nearer_to_the_plain_models(tmp_path, storage, family):
    """On tokens that nothing was measured on."""
    _, plain = both(family, tmp_path)
    model = stored(plain.params, plain.config, STORAGES[storage])
    squares = model.squares([rows(64, seed=seed) for seed in range(4)])
    unseen = documents(30, 34, seed=9)
    want, settings = surogate.logits(plain, unseen), Settings(plain.config, SPEC)
    apart = []
    for adapter in (init_adapter(plain.config, SPEC, 0, F32), model.adapter(SPEC, squares)):
        model.recipe.begin()
        now = plain._replace(params=model.params, adapter=adapter, settings=settings)
        apart.append(distance(surogate.logits(now, unseen), want))
    assert 0 < apart[1] < 0.75 * apart[0]


@pytest.mark.parametrize("storage", ["nf4", "nvfp4"])
def test_in_bfloat16_beside_what_is_decoded(tmp_path, storage, device):
    """As on a card, where passes read the adapter from blocks beside the weight."""
    _, plain = both("qwen3", tmp_path)
    config = dataclasses.replace(plain.config, head_dim=64, initializer_range=0.2)
    weights, batch = init_model(config, 0, BF16), rows(16, 16)
    model = stored(weights, config, STORAGES[storage], device)
    adapter = model.there(model.adapter(SPEC, model.squares([batch])))
    read, refresh = model.params, lambda: None
    if device != "host":
        read = widened(model.params, adapter)
        refresh = refresh_of(read, adapter, SPEC, config).launch_

    def logits(params: Any, pairs: Any) -> np.ndarray:
        model.recipe.begin()
        settings = Settings(config, SPEC if pairs else None)
        batch_there = model.there(batch)
        found = dense.logits(params, pairs, batch_there, table=model.table, settings=settings)
        return to_host(found)

    want = logits(model.there(weights), None)
    without = logits(read, None)
    refresh()
    assert 0 < distance(logits(read, adapter), want) < 0.8 * distance(without, want)


def test_the_same_twice(tmp_path):
    _, plain = both("qwen3", tmp_path)
    model = stored(plain.params, plain.config, STORAGES["nf4"])
    one, other = (model.adapter(SPEC, model.squares([rows(40)])) for _ in range(2))
    tree.map(same_bits, one, other)
    fresh = init_adapter(plain.config, SPEC, 0, F32)
    leaves = zip(tree.leaves(one), tree.leaves(fresh), strict=True)
    assert not any(np.array_equal(begun, drawn) for begun, drawn in leaves)


def test_ranks_beyond_the_error_stay_as_they_were_drawn(tmp_path):
    """A k_proj of 32 rows has no more; its other ranks can learn still."""
    _, plain = both("qwen3", tmp_path)
    model, spec = (
        stored(plain.params, plain.config, STORAGES["nf4"]),
        LoraSpec.of(40, 40, ["k_proj"]),
    )
    (a, b, *_), (drawn, *_) = map(
        tree.leaves,
        (model.adapter(spec, model.squares([rows(64)])), init_adapter(plain.config, spec, 0, F32)),
    )
    same_bits(a[32:], drawn[32:])
    assert not b[:, 32:].any() and b[:, :31].any(0).all()


def test_numbers_that_are_not_finite_are_refused_by_name(tmp_path):
    _, plain = both("qwen3", tmp_path)
    model = stored(plain.params, plain.config, STORAGES["nf4"])
    squares = model.squares([rows(20)])
    squares["layers.1.w_o"][3] = np.inf
    with pytest.raises(ValueError, match=r"^model.layers.1.self_attn.o_proj: .* not finite"):
        model.adapter(SPEC, squares)
