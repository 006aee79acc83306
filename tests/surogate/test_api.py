"""Surogate from Python: loading, logits, losses with their gradients, and text."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import surogate
from surogate.api import LoadedModel
from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.batch import IGNORED
from surogate.models.blocks import Settings
from surogate.models.hf import write_adapter
from surogate.models.lora import LoraSpec, init_adapter
from tests.oracle import close, same_bits
from tests.surogate.runs import EOS, FAMILIES, VOCAB, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> LoadedModel:
    return surogate.load(folder, device="cpu")


def documents(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def saved_adapter(folder: Path, model: LoadedModel, targets: list[str]) -> Path:
    spec = LoraSpec.of(2, 6, targets)
    rng = np.random.default_rng(0)
    adapter = tree.map(
        lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32),
        init_adapter(model.config, spec, 0, np.dtype(np.float32)),
    )
    write_adapter(adapter, model.config, spec, folder, "base")
    return folder


def test_load(folder, model):
    assert (model.device.kind, model.adapter, model.directory) == ("cpu", None, folder)
    assert {leaf.dtype for leaf in tree.leaves(model.params)} == {np.dtype(np.float32)}
    assert model.config.vocab == VOCAB


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_load_computes_in_float32_whatever_is_stored(tmp_path, stored):
    folder = make_model(tmp_path / "m", stored=stored)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    same_bits(surogate.load(folder, device="cpu").params.embed, embed.astype(np.float32))


def test_load_raises_user_errors(tmp_path, folder):
    with pytest.raises(UserError, match="there is no such folder"):
        surogate.load(tmp_path / "none", device="cpu")
    with pytest.raises(UserError, match="adapter_config.json: missing"):
        surogate.load(folder, adapter=tmp_path, device="cpu")


def test_logits_of_documents_one_after_another(model):
    texts = documents(7, 3, 11)
    got = surogate.logits(model, texts)
    assert got.shape == (21, VOCAB) and got.dtype == np.float32
    apart = np.concatenate([surogate.logits(model, [text]) for text in texts])
    close(got, apart, "float32", terms=64)


@pytest.mark.parametrize("bad", [[], [[]], [[1, 2], []]])
def test_batch_refuses_nothing(bad):
    with pytest.raises(ValueError, match="must be one or more lists of one or more tokens"):
        surogate.batch(bad)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary(model, token):
    with pytest.raises(ValueError, match=f"tokens must be from 0 to {VOCAB - 1}, got {token}"):
        surogate.logits(model, [[3, token]])
    with pytest.raises(ValueError, match=f"tokens must be from 0 to {VOCAB - 1}, got {token}"):
        surogate.loss_and_grads(model, surogate.batch([[3, token]]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_loss_follows_from_the_logits(tmp_path, family):
    model = surogate.load(make_model(tmp_path / "m", family=family), device="cpu")
    texts = documents(9, 4, 1)
    batch = surogate.batch(texts)
    result = surogate.loss_and_grads(model, batch)
    scores = surogate.logits(model, texts).astype(np.float64)
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    targets = [(row, int(label)) for row, label in enumerate(batch.labels) if label != IGNORED]
    assert result.count == len(targets) == 8 + 3
    want = -sum(logprobs[row, label] for row, label in targets)
    assert result.nll_sum == pytest.approx(want, rel=1e-6)
    for row, label in enumerate(batch.labels):
        expected = logprobs[row, label] if label != IGNORED else 0.0
        assert result.logprobs[row] == pytest.approx(expected, rel=1e-5)
    assert math.isfinite(result.nll_sum)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradients_have_the_names_and_shapes_of_the_checkpoint(tmp_path, family):
    folder = make_model(tmp_path / "m", family=family)
    model = surogate.load(folder, device="cpu")
    grads = surogate.loss_and_grads(model, surogate.batch(documents(9))).grads
    saved = load_file(folder / "model.safetensors")
    assert {k: v.shape for k, v in grads.items()} == {k: v.shape for k, v in saved.items()}
    assert all(np.isfinite(grad).all() and grad.any() for grad in grads.values())


@pytest.mark.parametrize("targets", [["all"], ["q_proj", "up_proj"]])
def test_gradients_of_an_adapter_have_peft_s_names(tmp_path, folder, model, targets):
    path = saved_adapter(tmp_path / "adapter", model, targets)
    adapted = surogate.load(folder, adapter=path, device="cpu")
    result = surogate.loss_and_grads(adapted, surogate.batch(documents(9)))
    saved = load_file(path / "adapter_model.safetensors")
    assert {k: v.shape for k, v in result.grads.items()} == {k: v.shape for k, v in saved.items()}
    assert all(grad.any() for grad in result.grads.values())
    assert result.nll_sum != surogate.loss_and_grads(model, surogate.batch(documents(9))).nll_sum


def test_gradient_is_the_slope_of_the_loss(tmp_path, folder, model):
    """Along a random direction, by a central difference of float32 losses."""
    path = saved_adapter(tmp_path / "adapter", model, ["all"])
    adapted = surogate.load(folder, adapter=path, device="cpu")
    batch = surogate.batch(documents(20, 9))
    rng = np.random.default_rng(1)
    for subject, field in ((model, "params"), (adapted, "adapter")):
        weights = getattr(subject, field)
        direction = tree.map(lambda x: rng.normal(0, 1, x.shape).astype(np.float32), weights)
        result = surogate.loss_and_grads(subject, batch)
        step = np.float32(2.0**-10)
        sides = []
        for sign in (1, -1):
            moved = tree.map(lambda x, d, s=sign * step: x + s * d, weights, direction)
            sides.append(surogate.loss_and_grads(subject._replace(**{field: moved}), batch).nll_sum)
        slope = (sides[0] - sides[1]) / (2 * float(step))
        want = slope_of(subject._replace(**{field: direction}), result.grads)
        assert slope == pytest.approx(want, rel=0.02)


def slope_of(direction: LoadedModel, grads: dict[str, Any]) -> float:
    """Inner product of a direction, in the place of weights, and gradients by name."""
    from surogate.models.lora import named_adapter
    from surogate.models.names import named

    if direction.adapter is None:
        arrays = named(direction.params, direction.config)
    else:
        assert direction.settings.lora is not None
        arrays = named_adapter(direction.adapter, direction.config, direction.settings.lora)
    return float(sum((grads[name].astype(np.float64) * arrays[name]).sum() for name in grads))


@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_recompute_changes_no_bit(model, recompute):
    batch = surogate.batch(documents(15, 2))
    plain = surogate.loss_and_grads(model, batch)
    again = surogate.loss_and_grads(model, batch, recompute=recompute)
    assert plain.nll_sum == again.nll_sum
    for name, grad in plain.grads.items():
        same_bits(again.grads[name], grad)


def test_loading_and_asking_changes_no_weight(folder, model):
    before = [leaf.copy() for leaf in tree.leaves(model.params)]
    surogate.loss_and_grads(model, surogate.batch(documents(9)))
    surogate.generate(model, ["the cat"], max_new_tokens=3)
    for leaf, want in zip(tree.leaves(model.params), before, strict=True):
        same_bits(leaf, want)


def test_generate_is_reproducible_and_takes_several_prompts(model):
    prompts = ["the cat", "a small dog sees the house and", "one"]
    first = surogate.generate(model, prompts, max_new_tokens=5, seed=3)
    assert first == surogate.generate(model, prompts, max_new_tokens=5, seed=3)
    assert len(first) == 3 and all(EOS not in text for text in first)
    assert first != surogate.generate(model, prompts, max_new_tokens=5, seed=4)


def test_generate_without_a_template(tmp_path):
    folder = make_model(tmp_path / "m")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    model = surogate.load(folder, device="cpu")
    options: dict[str, Any] = dict(max_new_tokens=4, temperature=0.0)
    assert surogate.generate(model, ["the"], **options) == surogate.generate(
        model, ["the"], chat=False, **options
    )
    with pytest.raises(UserError, match="has no chat template; use --raw"):
        surogate.generate(model, ["the"], chat=True, **options)


def test_generate_refuses_an_empty_prompt(model):
    with pytest.raises(ValueError, match="must have at least one token"):
        surogate.generate(model, [""], chat=False)


def test_a_trained_model_says_what_it_was_taught(tmp_path):
    """Forty steps on one sentence: greedy generation gives it back and stops."""
    from tests.surogate.runs import prepare, train

    folder = prepare(tmp_path)
    text = "the red cat sees a small house and runs."
    (folder / "texts.jsonl").write_text((json.dumps({"text": text}) + "\n") * 40)
    train(folder, max_steps=40, learning_rate=0.01, sample_packing=False, sequence_len=24)
    model = surogate.load(folder / "out", device="cpu")
    [said] = surogate.generate(
        model, ["the red cat"], chat=False, temperature=0.0, max_new_tokens=24
    )
    assert said == text.removeprefix("the red cat")


def test_info_prints_what_a_run_would_use():
    from click.testing import CliRunner

    from surogate.cli import main

    result = CliRunner().invoke(main, ["info"])
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names[0] == "device" and {"products", "cache", "surogate", "numpy"} <= set(names)


def test_settings_may_be_replaced(model):
    """A LoadedModel is a plain tuple: scaling the adapter is changing its settings."""
    spec = LoraSpec.of(2, 4, ["q_proj"])
    adapter = init_adapter(model.config, spec, 0, np.dtype(np.float32))
    fresh = model._replace(adapter=adapter, settings=Settings(model.config, spec))
    same_bits(surogate.logits(fresh, [[1, 2, 3]]), surogate.logits(model, [[1, 2, 3]]))
