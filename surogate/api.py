"""Surogate from Python: load a model, look at its logits and gradients, let it write.

    model = surogate.load("Qwen3-0.6B")
    scores = surogate.logits(model, [[1, 2, 3]])
    result = surogate.loss_and_grads(model, surogate.batch([[1, 2, 3]]))
    texts = surogate.generate(model, ["Once upon a time"])

Everything is a function of plain arrays: NumPy on a machine without a card, CuPy on one with.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surogate.device import Device, choose_device
from surogate.errors import UserError
from surogate.kernels import tree
from surogate.kernels.arrays import FROZEN
from surogate.kernels.batch import Batch, batch_of
from surogate.merge import Origin, through
from surogate.models import dense
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig, read_config
from surogate.models.files import read_json
from surogate.models.hf import ADAPTER_CONFIG, open_model, read_adapter
from surogate.models.lora import named_adapter
from surogate.models.names import build, named
from surogate.models.tree import Adapter, Model
from surogate.setup import model_directory, putter, reported

DTYPES = ("float32", "bfloat16")


class LoadedModel(NamedTuple):
    """A model on a device, with or without an adapter; every field may be replaced."""

    directory: Path
    device: Device
    params: Model
    adapter: Adapter | None
    settings: Settings

    @property
    def config(self) -> ModelConfig:
        """Sizes and rotary settings."""
        return self.settings.config


class LossAndGrads(NamedTuple):
    """Of a batch: sum of the negative log-likelihood (nats), supervised tokens, gradients of the
    SUM.

    ``grads`` are under the names of the checkpoint, or under PEFT's when the model has an adapter
    (whose gradients these then are; the model's own weights have none).
    """

    nll_sum: float
    count: int  # type: ignore[assignment]  # tuples have a method count
    logprobs: Any  # float32 (tokens,): of each label, 0 where it is not supervised
    grads: dict[str, Any]


def load(
    model: str | Path, *, adapter: str | Path | None = None, device: str = "auto"
) -> LoadedModel:
    """Reads a model directory (or a name on the Hub) and, if given, a PEFT adapter.

    The weights are float32 on the CPU and bfloat16 on a card; those that are quantised in the files
    are decoded, and those that a QLoRA run of ours kept in few bits are what its adapter was
    trained on. Raises UserError naming what is wrong.
    """
    where = choose_device(device)
    directory = model_directory(str(model))
    with reported():
        if (directory / ADAPTER_CONFIG).exists() and not (directory / "config.json").exists():
            base = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise UserError(
                f"{model}: is an adapter, not a model; give its base ({base}) with --adapter "
                f"{model}, or write both as one with surogate merge"
            )
        config = read_config(directory)
        storage = None if adapter is None else Origin.beside(Path(adapter)).storage
        change, put = through(storage, config, where), putter(where)
        with open_model(directory, config, where.compute, change=change) as read:
            params = build(config, lambda field: put(field.path, read(field)))
        pair, lora = None, None
        if adapter is not None:
            pair, lora = read_adapter(adapter, config)
            pair = where.put(tree.map(lambda x: x.astype(where.compute), pair))
    return LoadedModel(directory, where, params, pair, Settings(config, lora))


def batch(documents: Sequence[Sequence[int]]) -> Batch:
    """Token lists as one packed batch of NumPy arrays: every token but a document's first is a
    target.
    """
    if not documents or not all(len(document) for document in documents):
        raise ValueError("batch: documents must be one or more lists of one or more tokens")
    tokens = np.concatenate([np.asarray(document, np.int32) for document in documents])
    return batch_of(tokens, [len(document) for document in documents])


def logits(model: LoadedModel, documents: Sequence[Sequence[int]]) -> Any:
    """Float32 logits (tokens, vocab) of all documents, one after another; none sees another."""
    return dense.logits(
        model.params,
        model.adapter,
        _there(model, batch(documents)),
        table=_table(model, documents),
        settings=model.settings,
    )


def loss_and_grads(model: LoadedModel, batch: Batch, *, recompute: str = "none") -> LossAndGrads:
    """Loss and gradients of a batch, whose arrays may lie on the host or the device."""
    length = int(np.asarray(_host(batch.positions)).max()) + 1
    into = None
    if model.adapter is not None:
        frozen = tree.map(lambda _: FROZEN, model.params)
        blank = tree.map(lambda p: model.device.library.zeros(p.shape, np.float32), model.adapter)
        into = dense.Grads(frozen, blank)
    outputs, grads = dense.loss_and_grads(
        model.params,
        model.adapter,
        _there(model, batch),
        table=model.device.put(dense.rotary_table(model.config, length)),
        settings=model.settings,
        recompute=recompute,  # type: ignore[arg-type]
        into=into,
    )
    if model.adapter is None:
        names = named(grads.model, model.config)
    else:
        assert model.settings.lora is not None
        names = named_adapter(grads.adapter, model.config, model.settings.lora)
    return LossAndGrads(float(outputs.nll_sum), int(outputs.count), outputs.logprobs, names)


def generate(
    model: LoadedModel,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    top_p: float = 0.9,
    seed: int = 0,
    chat: bool | None = None,
) -> list[str]:
    """Continues each prompt. ``chat`` None: through the chat template where the model has one.

    Temperature 0 takes the likeliest token. The text of a prompt depends on it, the seed and its
    place in the list alone.
    """
    from surogate.data.vocabulary import load_tokenizer
    from surogate.sample import sample

    vocabulary = load_tokenizer(model.directory)
    if chat and vocabulary.template is None:
        raise UserError(f"{model.directory}: has no chat template; use --raw (chat=False)")
    if vocabulary.template is not None and chat is not False:
        texts = [
            vocabulary.template.render(
                [{"role": "user", "content": prompt}], add_generation_prompt=True
            )
            for prompt in prompts
        ]
        encoded = [vocabulary.tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
    else:
        encoded = [vocabulary.tokenizer.encode(prompt).ids for prompt in prompts]
    if not all(encoded):
        raise ValueError("generate: a prompt must have at least one token")
    highest = max(max(tokens) for tokens in encoded)
    if highest >= model.config.vocab:
        raise UserError(
            f"{model.directory}: the tokenizer gives token {highest}, the model has "
            f"{model.config.vocab}; it belongs to another model"
        )
    written = sample(
        model,
        encoded,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=frozenset(vocabulary.eos_ids),
    )
    return [vocabulary.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]


def _table(model: LoadedModel, documents: Sequence[Sequence[int]]) -> Any:
    length = max(len(document) for document in documents)
    return model.device.put(dense.rotary_table(model.config, length))


def _there(model: LoadedModel, batch: Batch) -> Batch:
    vocab, tokens = model.config.vocab, _host(batch.tokens)
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    if wrong.size:
        raise ValueError(f"batch: tokens must be from 0 to {vocab - 1}, got {wrong[0]}")
    return model.device.put(batch)


def _host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()
