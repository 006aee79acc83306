"""A training step against one written out plainly: gradients, clipping and AdamW in NumPy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surogate
from surogate.api import LoadedModel
from surogate.kernels import tree
from surogate.kernels.arrays import F32
from surogate.kernels.batch import IGNORED, Batch
from surogate.models.blocks import Settings
from surogate.models.lora import LoraSpec, init_adapter
from surogate.models.recipe import Recipe
from surogate.optim.adamw import AdamWConfig
from surogate.optim.state import named_leaves
from surogate.step import StepOptions, TrainStep, padding
from tests.oracle import close, same_bits
from tests.surogate.runs import FAMILIES, VOCAB, make_model

OPTIMIZER = AdamWConfig(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
TOKENS = 48
MAX_NORM = 0.1  # below every gradient's here, so that clipping is seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), family=family)
        return made[family]

    return folder


def loaded(folder: Path, *, lora: bool) -> LoadedModel:
    model = surogate.load(folder, device="cpu")
    if not lora:
        return model
    spec = LoraSpec.of(4, 8, ["q_proj", "v_proj", "down_proj"])
    adapter = init_adapter(model.config, spec, 0, np.dtype(F32))
    rng = np.random.default_rng(1)
    # B starts at zero, where A has no gradient.
    adapter = tree.map(lambda x: x + rng.normal(0, 0.05, x.shape).astype(np.float32), adapter)
    return model._replace(adapter=adapter, settings=Settings(model.config, spec))


def train_step(model: LoadedModel, *, recipe: Recipe | None = None, **options: Any) -> TrainStep:
    """A step over copies of the model's trained weights; with a recipe, over its frozen ones."""
    copy = tree.map(np.copy, model.params) if recipe is None else model.params
    adapter = tree.map(np.copy, model.adapter)
    settings = dict(
        tokens=TOKENS,
        recompute="none",
        chunk=None,
        gradient_dtype=np.dtype(F32),
        max_grad_norm=MAX_NORM,
        graphs=False,
    )
    return TrainStep(
        model.device,
        copy,
        adapter,
        model.settings,
        OPTIMIZER,
        StepOptions(**settings | options),  # type: ignore[arg-type]
        recipe,
    )


def batches(count: int, *, seed: int = 0) -> list[Batch]:
    """Micro-batches of three documents whose numbers of supervised tokens differ."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        cuts = [5 + index, 20, TOKENS - 25 - index]
        batch = surogate.batch([rng.integers(0, VOCAB, n).tolist() for n in cuts])
        batch.labels[: 3 * index] = IGNORED
        made.append(batch)
    return made


def plain_adamw(
    params: dict[str, np.ndarray], sums: list[dict[str, np.ndarray]], counts: list[int]
) -> Iterator[tuple[float, dict[str, np.ndarray]]]:
    """Yields (norm, parameters) after each update, in float64, lr 0.01 * step."""
    c = OPTIMIZER
    params = {k: v.astype(np.float64) for k, v in params.items()}
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    for step, (grads, count) in enumerate(zip(sums, counts, strict=True), 1):
        lr = 0.01 * step
        mean = {k: g.astype(np.float64) / count for k, g in grads.items()}
        norm = np.sqrt(sum((g * g).sum() for g in mean.values()))
        factor = min(1.0, MAX_NORM / (norm + 1e-6))
        for k, g in mean.items():
            g = g * factor
            m[k] = c.beta1 * m[k] + (1 - c.beta1) * g
            v[k] = c.beta2 * v[k] + (1 - c.beta2) * g * g
            first = m[k] / (1 - c.beta1**step)
            second = v[k] / (1 - c.beta2**step)
            if params[k].ndim > 1:
                params[k] = params[k] * (1 - lr * c.weight_decay)
            params[k] = params[k] - lr * first / (np.sqrt(second) + c.epsilon)
        yield norm, params


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_equals_plain_adamw(folders, family, lora):
    """Three updates of two micro-batches each, with clipping, decay and another rate each time."""
    model = loaded(folders(family), lora=lora)
    step = train_step(model)
    rows = [batches(2, seed=s) for s in range(3)]
    start = dict(named_leaves(tree.map(np.copy, step.trainable)))
    sums, counts, found = [], [], []
    for number, micro in enumerate(rows, 1):
        # Gradients from the public function at the step's own weights, which are checked below.
        now = model._replace(params=step.model if not lora else model.params, adapter=step.adapter)
        results = [gradients(now, batch) for batch in micro]
        sums.append({k: results[0][2][k] + results[1][2][k] for k in results[0][2]})
        counts.append(sum(r[1] for r in results))
        for batch in micro:
            step.micro(batch)
        result = step.update(0.01 * number).result()
        assert result.applied and result.count == counts[-1]
        assert result.loss == pytest.approx(sum(r[0] for r in results) / counts[-1], rel=1e-6)
        found.append((result.norm, tree.map(np.copy, step.trainable)))
    for (norm, trained), (want_norm, want) in zip(
        found, plain_adamw(start, sums, counts), strict=True
    ):
        assert norm > MAX_NORM
        assert norm == pytest.approx(want_norm, rel=1e-5)
        for name, leaf in named_leaves(trained):
            close(leaf, want[name], "float32", roundings=64)  # divisions by small roots
    if lora:
        for got, want in zip(tree.leaves(step.model), tree.leaves(model.params), strict=True):
            same_bits(got, want)


def gradients(model: LoadedModel, batch: Batch) -> tuple[float, int, dict[str, np.ndarray]]:
    """(nll, count, gradients by place in the tree)."""
    from surogate.models import dense

    outputs, grads = dense.loss_and_grads(
        model.params,
        model.adapter,
        batch,
        table=dense.rotary_table(model.config, TOKENS),
        settings=model.settings,
    )
    wanted = grads.model if model.adapter is None else grads.adapter
    return float(outputs.nll_sum), int(outputs.count), dict(named_leaves(wanted))


def run(step: TrainStep, rows: list[list[Batch]]) -> list[Any]:
    results = []
    for micro in rows:
        for batch in micro:
            step.micro(batch)
        results.append(step.update(0.01).result())
    return results


@pytest.mark.parametrize("recompute", ["selective", "block"])
@pytest.mark.parametrize("lora", [False, True])
def test_recomputation_changes_no_bit(folders, recompute, lora):
    model, rows = loaded(folders("qwen3"), lora=lora), [batches(2), batches(1)]
    plain, other = train_step(model), train_step(model, recompute=recompute)
    assert run(plain, rows) == run(other, rows)
    for (name, got), (_, want) in zip(
        named_leaves(other.trainable), named_leaves(plain.trainable), strict=True
    ):
        assert got.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("fault", ["gradient", "loss"])
def test_an_update_that_is_not_finite_changes_nothing(folders, fault):
    """Weights, moments and the number of updates; what comes after is as if it had not been."""
    model = loaded(folders("llama"), lora=False)
    step, clean = train_step(model), train_step(model)
    first, bad, last = batches(3)
    assert run(step, [[first]]) == run(clean, [[first]])
    embed = step.model.embed.copy()
    if fault == "gradient":
        step.model.embed[bad.tokens[3]] = np.inf
    before = [np.copy(leaf) for leaf in tree.leaves((step.trainable, step.state))]
    with np.errstate(all="ignore"):
        step.micro(bad)
        if fault == "loss":  # a finite gradient may come with an infinite loss
            step._nll[...] = np.inf
        result = step.update(0.01).result()
    assert not result.applied
    assert np.isfinite(result.norm) == (fault == "loss") and not np.isfinite(result.loss)
    step.settle()
    for got, want in zip(tree.leaves((step.trainable, step.state)), before, strict=True):
        assert np.array_equal(got, want, equal_nan=True)
    step.model.embed[...] = embed
    (after,), (want,) = run(step, [[last]]), run(clean, [[last]])
    assert after == want
    assert step.state.step == clean.state.step == 2
    for got, expected in zip(
        tree.leaves((step.trainable, step.state)),
        tree.leaves((clean.trainable, clean.state)),
        strict=True,
    ):
        assert np.array_equal(got, expected)


def test_nothing_supervised_is_not_applied(folders):
    model = loaded(folders("qwen2"), lora=False)
    step = train_step(model)
    before = [leaf.copy() for leaf in tree.leaves(step.trainable)]
    [result] = run(step, [[padding(TOKENS, 20)]])
    assert (result.applied, result.count, result.nll) == (False, 0, 0.0)
    assert np.isnan(result.loss)
    for got, want in zip(tree.leaves(step.trainable), before, strict=True):
        same_bits(got, want)


def test_pending_keeps_its_own_numbers(folders):
    step = train_step(loaded(folders("llama"), lora=False))
    first = step.update(0.0)
    step.micro(batches(1)[0])
    second = step.update(0.0)
    assert first.result().count == 0 < second.result().count


def test_evaluation_equals_the_loss_and_changes_nothing(folders):
    step = train_step(loaded(folders("qwen3"), lora=True))
    batch = batches(1)[0]
    logprobs = step.logprobs(batch)
    assert (logprobs[batch.labels == IGNORED] == 0).all()
    [result] = run(step, [[batch]])
    assert -logprobs.sum() == pytest.approx(result.nll, rel=1e-6)


def test_step_holds_weights_gradients_and_two_moments_and_no_more(folders):
    """16 bytes a parameter, in place: the model's arrays are the caller's."""
    import tracemalloc

    model = loaded(folders("llama"), lora=False)
    size = sum(leaf.nbytes for leaf in tree.leaves(model.params))
    tracemalloc.start()
    try:
        settings = StepOptions(TOKENS, "none", None, np.dtype(F32), 1.0, False)
        step = TrainStep(model.device, model.params, None, model.settings, OPTIMIZER, settings)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 3 * size <= held < 3.3 * size + 100_000
    for mine, theirs in zip(tree.leaves(step.model), tree.leaves(model.params), strict=True):
        assert mine is theirs


def packed(lengths: list[int], *, tokens: int = TOKENS, seed: int = 0) -> tuple[Batch, list[Batch]]:
    """Documents in one batch, and each alone in a batch that padding fills."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    alone = []
    for text in texts:
        rest = tokens - len(text)
        batch = surogate.batch([text, [0] * rest] if rest else [text])
        batch.labels[len(text) :] = IGNORED
        alone.append(batch)
    return surogate.batch(texts), alone


@pytest.mark.parametrize(
    "lengths,longest,rows",
    [
        ([16, 16, 16], 16, 3),  # whole rows
        ([16, 10, 6, 16], 16, None),  # two documents share a row
        ([24, 24], TOKENS, None),  # equal, but shorter than a row
    ],
)
def test_documents_give_what_each_gives_alone(folders, monkeypatch, lengths, longest, rows):
    """Whole rows, which are promised to attention, and packed ones."""
    from surogate.models import dense

    promised, real = [], dense.loss_and_grads

    def watched(model: Any, adapter: Any, batch: Batch, **settings: Any) -> Any:
        promised.append(batch.rows)
        return real(model, adapter, batch, **settings)

    monkeypatch.setattr(dense, "loss_and_grads", watched)
    model = loaded(folders("qwen3"), lora=False)
    together, alone = packed(lengths)
    whole, apart = train_step(model, longest=longest), train_step(model)
    whole.micro(together)
    assert promised == [rows]
    for batch in alone:
        apart.micro(batch)
    for got, want in zip(tree.leaves(whole.grads), tree.leaves(apart.grads), strict=True):
        # Products of other sizes add in another order, through two layers and back.
        close(got, want, "float32", terms=TOKENS, roundings=64)
    one, each = whole.update(0.01).result(), apart.update(0.01).result()
    assert one.count == each.count and one.loss == pytest.approx(each.loss, rel=1e-6)
    logprobs = train_step(model, longest=longest).logprobs(together)
    assert -logprobs.sum() == pytest.approx(one.nll, rel=1e-6)


def test_a_token_weighs_the_same_in_any_micro_batch(folders):
    """10 and 100 targets, together and as two micro-batches: the loss is the sum over 110. In the
    mean of two means a target of the short document would count 5.5 times as much.
    """
    model = loaded(folders("qwen3"), lora=False)
    together, alone = packed([11, 101], tokens=112)
    whole, apart = train_step(model, tokens=112), train_step(model, tokens=112)
    short, long = (-float(whole.logprobs(batch).sum()) for batch in alone)
    assert abs(short / 10 - long / 100) > 0.01
    whole.micro(together)
    for batch in alone:
        apart.micro(batch)
    for got, want in zip(tree.leaves(apart.grads), tree.leaves(whole.grads), strict=True):
        close(got, want, "float32", terms=112, roundings=64)
    for step in (whole, apart):
        result = step.update(0.01).result()
        assert result.count == 110
        assert result.loss == pytest.approx((short + long) / 110, rel=1e-6)


@pytest.mark.parametrize("tokens,longest", [(48, 48), (48, 20), (7, 1)])
def test_padding_is_documents_without_targets(tokens, longest):
    batch = padding(tokens, longest)
    assert (batch.labels == IGNORED).all() and batch.positions.max() < longest
    lengths = batch.docs.end - batch.docs.start
    assert lengths.max() <= longest and (batch.docs.start + batch.positions == range(tokens)).all()


def test_rotary_table_is_of_the_longest_document(folders):
    """Frequencies that depend on the length (dynamic) must not depend on the size of a batch."""
    step = train_step(loaded(folders("qwen3"), lora=False), longest=20)
    assert len(step._table.cos) == 20
