"""Predicted memory against the arrays that the same step really makes.

On a card: the step runs with its kernels and products left out, and every array that it makes is
counted until it dies, so that the walk must agree to the byte. On the host: NumPy's own peak.
"""

import gc
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest

from surogate.device import Device
from surogate.kernels import arrays, fp8_matmul, matmul, tree
from surogate.kernels.arrays import BF16, F32, Backend
from surogate.kernels.batch import STAGED, batch_of
from surogate.kernels.cublaslt import WORKSPACE_BYTES
from surogate.kernels.linear import Products
from surogate.kernels.nvfp4_linear import Nvfp4Options
from surogate.kernels.widened import Widened
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig, count, from_hf
from surogate.models.init import init_model
from surogate.models.lora import LoraSpec, init_adapter
from surogate.models.memory import evaluation_walk, memory_of, parameter_counts, weight_arrays
from surogate.models.pool import PAGE, Event, Pool, taken
from surogate.models.recipe import (
    Fp8Options,
    Fp8Recipe,
    Nvfp4Recipe,
    Nvfp4Settings,
    Recipe,
    Scope,
    Storage,
)
from surogate.models.registry import MODELS, hf_config, lookup
from surogate.models.stored_recipe import QuantizedRecipe
from surogate.models.walk import CARD, HOST, Walk, Work
from surogate.models.widen import making_room
from surogate.optim.adamw import AdamWConfig
from surogate.step import StepOptions, TrainStep

POLICIES = ("none", "selective", "block")
ALL, SOME = ("all",), ("q_proj", "v_proj", "up_proj", "down_proj")
TOKENS, LONGEST = 200, 100


def tiny(name: str, **sizes: Any) -> ModelConfig:
    """A published architecture at a small size; every width is another number."""
    small = dict(
        vocab_size=1000,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return from_hf(hf_config(name) | small | sizes)


QWEN3 = tiny("Qwen3-8B")
TIED = tiny("Qwen3-0.6B")
TWO = tiny("Qwen3-8B", num_hidden_layers=2)
QWEN2 = tiny("Qwen2.5-7B", hidden_size=256, max_window_layers=3)
LLAMA = tiny("Llama-3.2-1B", num_hidden_layers=1)


class Tracker:
    """Counts arrays from birth to death, each rounded up to 512 bytes."""

    def __init__(self) -> None:
        self.live = self.peak = self.number = 0
        self.events: list[Event] = []

    def add(self, array: np.ndarray) -> np.ndarray:
        size, key = -(-array.nbytes // 512) * 512, str(self.number)
        self.number += 1
        self.live += size
        self.peak = max(self.peak, self.live)
        self.events.append(Event(key, size))
        weakref.finalize(array, self._remove, key, size)
        return array

    def _remove(self, key: str, size: int) -> None:
        self.live -= size
        self.events.append(Event(key, None))

    def most(self, run: Any, *args: Any, **settings: Any) -> int:
        """The most bytes beside those alive before, while ``run`` runs."""
        before = self.peak = self.live
        self.events.clear()
        run(*args, **settings)
        assert self.live == before
        return self.peak - before


@pytest.fixture
def card(monkeypatch) -> Tracker:
    """Ops take the way of a card, but compute nothing, and their arrays are tracked."""
    tracker, plain_zeros = Tracker(), np.zeros
    monkeypatch.setattr(Backend, "launch", lambda *a: None)
    for products in (matmul, fp8_matmul):
        monkeypatch.setattr(products, "_host", lambda *a: None)
    monkeypatch.setattr(arrays, "_filled", lambda s, d, like: tracker.add(np.empty(s, d)))
    monkeypatch.setattr(np, "zeros", lambda *a, **k: tracker.add(plain_zeros(*a, **k)))
    return tracker


def work_of(
    config: ModelConfig,
    targets: tuple[str, ...],
    layout: Any,
    recompute: Any,
    chunk: int | None,
    recipe: Any = None,
) -> Work:
    low = layout.compute == BF16
    return Work(
        config=config,
        lora=LoraSpec.of(4, 8, targets) if targets else None,
        layout=layout,
        tokens=TOKENS,
        longest=LONGEST,
        recompute=recompute,
        chunk=chunk,
        gradient_dtype=BF16 if low and not targets else F32,
        moment_dtype=F32,
        masters=low and bool(targets),
        widen=low and bool(targets),
        recipe=recipe,
    )


def recipe_of(work: Work) -> Recipe:
    if work.recipe is None:
        return Recipe()
    if isinstance(work.recipe, Storage):
        return QuantizedRecipe(work.config, Scope(), work.recipe)
    stored = work.recipe.storage
    storing = QuantizedRecipe(work.config, Scope(), stored) if stored else Recipe()
    if isinstance(work.recipe, Nvfp4Settings):
        return Nvfp4Recipe(work.config, work.recipe, storing=storing, keep=work.plain_evaluation)
    assert isinstance(work.recipe, Fp8Options)
    return Fp8Recipe(work.config, work.recipe, storing=storing, keep=work.plain_evaluation)


def step_of(work: Work) -> TrainStep:
    """The training step that ``work`` describes, with a batch in place."""
    compute = work.layout.compute
    device = Device("cpu", "here", np, compute)
    recipe, put = recipe_of(work), lambda path, array: array
    if work.lora is not None and work.recipe is not None:
        room = making_room(put, work.config, work.lora)
        put = recipe.frozen(put, room, work.lora)
    model = init_model(work.config, 0, compute, put=put)
    adapter = None if work.lora is None else init_adapter(work.config, work.lora, 0, compute)
    options = StepOptions(
        tokens=work.tokens,
        recompute=work.recompute,
        chunk=work.chunk,
        gradient_dtype=work.gradient_dtype,
        max_grad_norm=1.0,
        graphs=False,
        longest=work.longest,
        widen=work.widen,
        plain_evaluation=work.plain_evaluation,
    )
    optimizer = AdamWConfig(master_dtype="float32" if work.masters else "bfloat16")
    settings = Settings(work.config, work.lora)
    step = TrainStep(device, model, adapter, settings, optimizer, options, recipe)
    step._ready = True  # no calibration
    random = np.random.default_rng(0)
    tokens = random.integers(0, work.config.vocab, work.tokens).astype(np.int32)
    step._feed.write(batch_of(tokens, [work.longest] * (work.tokens // work.longest)))
    return step


def forward(step: TrainStep) -> Any:
    return dense.hidden_fwd(
        step._read,
        step.adapter,
        step._feed.batch,
        table=step._table,
        settings=step.settings,
        recompute=step.options.recompute,
    )


def loss(step: TrainStep) -> None:
    dense.loss_fwd(
        step._read,
        step.adapter,
        step._feed.batch,
        table=step._table,
        settings=step.settings,
        chunk=step.options.chunk,
    )


def whole_step(step: TrainStep) -> None:
    step._run_micro(None)
    step.update(1e-3)
    loss(step)


def held(*trees: Any) -> int:
    """Bytes of a tree's arrays in CuPy's pool."""
    return sum(-(-leaf.nbytes // 512) * 512 for leaf in tree.leaves(trees))


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize(
    "config,targets,chunk",
    [
        (QWEN3, (), None),
        (QWEN3, ALL, 64),  # the head in chunks
        (TIED, (), 7),
        (TIED, SOME, None),  # adapters of parts of a stacked matrix
        (QWEN2, (), None),  # biases
        (LLAMA, (), 64),  # one layer, no norm of q and k
    ],
)
def test_a_micro_batch_on_a_card_is_exact(card, config, targets, chunk, recompute):
    check_micro_batch(card, work_of(config, targets, CARD, recompute, chunk))


SOME_OF_IT = Scope(first=1, skipped=frozenset({"w_o"}), products=Products(wgrad=False))
FEW = Fp8Options(SOME_OF_IT)
FEW4 = Nvfp4Settings(SOME_OF_IT, Nvfp4Options(signs=None, square=False))


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("targets", [(), ALL, SOME])
@pytest.mark.parametrize(
    "recipe",
    [Fp8Options(), Fp8Options(scaling="row"), FEW, Nvfp4Settings(), FEW4],
    ids=["fp8", "fp8 by row", "fp8 in part", "nvfp4", "nvfp4 in part"],
)
def test_a_micro_batch_of_a_recipe_is_exact(card, recipe, targets, recompute):
    work = work_of(TWO, targets, CARD, recompute, None, recipe)
    check_micro_batch(card, work._replace(tokens=208, longest=104))


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("targets", [ALL, SOME])
def test_a_micro_batch_of_stored_weights_is_exact(card, targets, recompute):
    check_micro_batch(card, work_of(TWO, targets, CARD, recompute, None, Storage("nf4", 64, True)))


NF4 = Storage("nf4", 64, True)


@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("targets", [ALL, SOME])
@pytest.mark.parametrize(
    "recipe",
    [Fp8Options(), Fp8Options(scaling="row"), FEW, Nvfp4Settings(), FEW4],
    ids=["fp8", "fp8 by row", "fp8 in part", "nvfp4", "nvfp4 in part"],
)
def test_a_micro_batch_of_a_recipe_on_stored_weights_is_exact(card, recipe, targets, recompute):
    work = work_of(TWO, targets, CARD, recompute, None, recipe._replace(storage=NF4))
    check_micro_batch(card, work._replace(tokens=208, longest=104))


@pytest.mark.parametrize("targets", [ALL, SOME])
@pytest.mark.parametrize(
    "recipe",
    [None, Fp8Options(), Fp8Options(scaling="row"), FEW, Nvfp4Settings(), FEW4],
    ids=["bf16", "fp8", "fp8 by row", "fp8 in part", "nvfp4", "nvfp4 in part"],
)
def test_what_stored_weights_take_is_exact(card, recipe, targets):
    stored = Storage("fp8", 64)
    work = work_of(TWO, targets, CARD, "none", None, recipe and recipe._replace(storage=stored))
    work = work._replace(recipe=work.recipe or stored)
    recipe, put = recipe_of(work), lambda path, array: array
    room = making_room(put, work.config, work.lora)
    before = card.live
    model = init_model(work.config, 0, BF16, put=recipe.frozen(put, room, work.lora))
    gc.collect()
    vectors = [leaf for leaf in tree.leaves(model) if len(leaf.shape) == 1]  # not tracked
    assert card.live - before == sum(weight_arrays(Walk(work))) - held(vectors)


@pytest.mark.parametrize(
    "recipe,targets",
    [
        (Fp8Options(), ()),
        (FEW4, ALL),
        (Fp8Options(), SOME),
        (Fp8Options(storage=NF4), SOME),  # decoded for evaluations alone
        (Nvfp4Settings(storage=NF4), ALL),
    ],
    ids=["fp8", "nvfp4 in part lora", "fp8 lora", "fp8 of nf4", "nvfp4 of nf4"],
)
def test_an_evaluation_in_bf16_is_exact(card, recipe, targets):
    work = work_of(TWO, targets, CARD, "none", None, recipe)
    work = work._replace(tokens=208, longest=104, plain_evaluation=True)
    step, walk = step_of(work), evaluation_walk(work)
    assert card.most(step.logprobs, step._feed.batch) == walk.evaluation()
    assert walk.ledger.live == 0


@pytest.mark.parametrize("recipe", [Fp8Options(), Nvfp4Settings()], ids=["fp8", "nvfp4"])
def test_what_a_bf16_evaluation_keeps_is_exact(card, recipe):
    work = work_of(TWO, ALL, CARD, "none", None, recipe)._replace(plain_evaluation=True)
    recipe, put = recipe_of(work), lambda path, array: array
    room = making_room(put, work.config, work.lora)
    before = card.live
    model = init_model(work.config, 0, BF16, put=recipe.frozen(put, room, work.lora))
    gc.collect()
    vectors = [leaf for leaf in tree.leaves(model) if len(leaf.shape) == 1]  # not tracked
    assert card.live - before == sum(weight_arrays(Walk(work))) - held(vectors)


def check_micro_batch(card: Tracker, work: Work) -> None:
    step, walk = step_of(work), Walk(work)
    kept, peaks = walk.micro(), walk.ledger.peaks
    before = card.live
    hidden, res = forward(step)
    assert card.live - before - held(hidden) == kept
    del hidden, res
    assert card.most(forward, step) == peaks["forward"]
    assert card.most(step._run_micro, None) == max(peaks.values())
    pool = Pool()
    for _ in range(2):
        pool.run(list(card.events))
    memory = memory_of(work, graphs=True, evaluates=False)
    assert memory.peak + memory.gaps == pool.held
    assert card.most(loss, step) == walk.evaluation()


@pytest.mark.parametrize("targets", [(), ALL, SOME])
def test_what_stays_on_a_card_is_exact(card, targets):
    work = work_of(QWEN3, targets, CARD, "block", None)
    step = step_of(work)
    memory = memory_of(work, graphs=True, evaluates=False)
    leaves = tree.leaves(step._read)
    assert memory.weights == held([x.rows if isinstance(x, Widened) else x for x in leaves])
    assert memory.adapter == (held(step.adapter) if targets else 0)
    assert memory.gradients == held(step.grads)
    assert memory.optimizer == held(step.state.m, step.state.v, step.state.master)
    tables = [table.tensors for table in step._plan.tables] + [t for _, t in step._norms.tensors]
    tables += [] if step._refresh is None else [step._refresh._table]
    partial = card.most(step._run_update)
    known = held(step._feed._rows, step._table, *[(t.rows, t.chunk_tensor) for t in tables])
    staged = STAGED * held(step._feed._rows)  # this step is on the host, which stages nothing
    # Besides: a few arrays of one to five numbers.
    assert abs(memory.workspace - WORKSPACE_BYTES - known - staged - partial) <= 8 * 512


WIDE = dict(hidden_size=256, vocab_size=4096, num_hidden_layers=2)


@pytest.mark.parametrize(
    "config,targets,recompute,chunk",
    [
        (tiny("Qwen3-8B", hidden_size=256, intermediate_size=768), (), "none", None),
        (tiny("Qwen3-8B", hidden_size=256, intermediate_size=768), ALL, "selective", None),
        (tiny("Qwen3-0.6B", **WIDE), (), "block", 64),
        (tiny("Llama-3.2-1B", **WIDE), (), "selective", 64),
        (tiny("Qwen2.5-7B", **WIDE, max_window_layers=2), SOME, "block", 64),
        (tiny("Qwen2.5-7B", **WIDE, max_window_layers=2), SOME, "none", None),
    ],
)
def test_the_total_on_the_host_is_within_5_percent(monkeypatch, config, targets, recompute, chunk):
    monkeypatch.setattr(Backend, "poison", False)
    work = work_of(config, targets, HOST, recompute, chunk)
    work = work._replace(tokens=512, longest=256)
    whole_step(step_of(work))  # what is imported and compiled once is not the step's
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        whole_step(step_of(work))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    predicted = memory_of(work, graphs=False, evaluates=True).total
    assert predicted == pytest.approx(peak - before, rel=0.05)


def test_policies_keep_less_and_less():
    kept = [
        memory_of(work_of(QWEN3, (), CARD, p, None), graphs=True, evaluates=False) for p in POLICIES
    ]
    assert kept[0].activations > kept[1].activations > kept[2].activations
    assert kept[0].total > kept[1].total > kept[2].total


def test_an_evaluation_lies_beside_a_recorded_step_only():
    work = work_of(QWEN3, (), CARD, "none", None)
    recorded = memory_of(work, graphs=True, evaluates=True)
    assert recorded.evaluation >= Walk(work).evaluation()
    assert memory_of(work, graphs=False, evaluates=True).evaluation < recorded.evaluation
    assert memory_of(work, graphs=True, evaluates=False).evaluation == 0


def test_memory_of_405b_allocates_nothing(monkeypatch):
    def refuse(*args: Any, **settings: Any) -> None:
        raise AssertionError(f"an array was made: {args}")

    for name in ("empty", "zeros", "ones", "arange"):
        monkeypatch.setattr(np, name, refuse)
    work = work_of(lookup("Llama-3.1-405B"), ALL, CARD, "none", None)
    memory = memory_of(work, graphs=True, evaluates=True)
    assert memory.weights >= 2 * 405_853_388_800


def test_cudnn_scratch_stays_below_its_limit():
    base = work_of(lookup("Qwen3-8B"), ALL, CARD, "none", None)
    for tokens, longest, expected in (
        (16384, 2048, 2 << 30),  # all heads at once
        (16384, 4096, 2 << 30),  # two groups
        (65536, 65536, 0),  # one kv head and its queries are too many
    ):
        work = base._replace(tokens=tokens, longest=longest)
        assert memory_of(work, graphs=True, evaluates=False).attention == expected
        work = work._replace(cudnn=False)
        assert memory_of(work, graphs=True, evaluates=False).attention == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_counts_add_up(name):
    config = lookup(name)
    counts = parameter_counts(config, None)
    assert counts.total == counts.trained == count(config)
    assert (counts.head == 0) == config.tied
    assert counts.embedding == config.vocab * config.hidden
    assert counts.mlp == 3 * config.layers * config.hidden * config.ffn


def test_counts_of_an_adapter():
    spec = LoraSpec.of(8, 16, ["q_proj", "down_proj"])
    counts = parameter_counts(QWEN3, spec)
    q = QWEN3.hidden + QWEN3.q_rows
    assert counts.adapter == counts.trained == 8 * QWEN3.layers * (q + QWEN3.ffn + QWEN3.hidden)


def test_pool_takes_the_smallest_chunk_and_splits_it():
    pool = Pool()
    pool.run([Event("a", 4096), Event("b", 2048), Event("a", None), Event("b", None)])
    pool.run([Event("c", 1024), Event("d", 1024), Event("e", 4096)])
    assert pool.held == 4096 + 2048


@pytest.mark.parametrize(
    "size,pages",
    [
        (512, None),  # shares a page with others
        ((1 << 20) - 512, None),
        (1 << 20, 1),
        (2 << 20, 1),
        ((2 << 20) + 512, 2),
    ],
)
def test_pool_takes_whole_pages(size, pages):
    pool = Pool()
    pool.run([Event("a", size), Event("a", None), Event("b", size)])
    assert pool.held == (size if pages is None else pages * PAGE)


def test_what_stays_takes_whole_pages():
    """The matrices of Qwen2.5-1.5B end within pages, those of Qwen3-0.6B with them."""
    for name, least, most in (("Qwen2.5-1.5B", 500 << 20, 600 << 20), ("Qwen3-0.6B", 0, 8 << 20)):
        work = work_of(lookup(name), (), CARD, "block", None)
        work = work._replace(gradient_dtype=BF16, moment_dtype=BF16, masters=False)
        sizes = [*weight_arrays(Walk(work))]
        assert sum(sizes) == memory_of(work, graphs=True, evaluates=False).weights
        assert least <= 4 * sum(taken(size) - size for size in sizes) <= most


def test_pool_joins_neighbours():
    pool = Pool()
    pool.run([Event("a", 4096), Event("a", None)])
    pool.run([Event(k, 1024) for k in "bcde"])
    pool.run([Event(k, None) for k in "bdce"])
    pool.run([Event("f", 4096)])
    assert pool.held == 4096


def test_pool_grows_when_small_arrays_take_a_large_place():
    pool = Pool()
    pool.run([Event("a", 4096), Event("a", None), Event("b", 512), Event("c", 4096)])
    assert pool.held == 8192
