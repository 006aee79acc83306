"""From data sets to packed rows on disk, built once.

The result lies in a folder named by a hash of everything it depends on: the bytes of the data, how
rows are read, the tokenizer and its template, the masks, the length and packing of rows, and the
version of this format. A run that changes none of it tokenises nothing. A folder is written beside
its place, where a build that was killed goes on, and renamed when it is whole; a lock lets
processes that ask for the same rows share one build.
"""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Bool, Int64

from surogate.config import Config, DatasetConfig
from surogate.data.chat import LossScale
from surogate.data.flat import Flat, Places, Progress, jobs_of, remove_flat, write_flat
from surogate.data.formats import Layout, layout_of
from surogate.data.mix import mixed
from surogate.data.pack import Packing, Plan, plan_rows
from surogate.data.packed import Packed, Report, Share, open_packed, write_packed
from surogate.data.sources import Row, Source, counted, open_source
from surogate.data.template import EPOCH, moment
from surogate.data.tokenise import tokenise
from surogate.data.vocabulary import Vocabulary, load_tokenizer
from surogate.errors import UserError
from surogate.kernels.batch import IGNORED

_FORMAT = 2  # change it with anything that changes the arrays or their meaning
_NAMED = 5  # rows with nothing to learn that a report names


class _Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows depend on, besides the content of the data and the tokenizer."""

    sequence_len: int
    vocab_size: int
    packing: Packing | Literal["auto"]
    loss_scale: LossScale
    ratio: float
    seed: int


def prepare(
    datasets: Sequence[DatasetConfig],
    vocabulary: Vocabulary,
    *,
    sequence_len: int,
    vocab_size: int,
    cache_dir: str | Path,
    packing: Packing | Literal["auto"] = "auto",
    loss_scale: LossScale = "default",
    workers: int = 1,
    progress: Progress | None = None,
) -> Packed:
    """Packs the data sets, one after another, or finds them packed in cache_dir.

    packing auto is `split` when every data set is raw text and `fit` otherwise (see pack.py). Data
    sets with weights are mixed by them (see mix.py). Raises UserError for a bad row, and when no
    token is a target.
    """
    return prepare_split(
        datasets,
        vocabulary,
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        cache_dir=cache_dir,
        packing=packing,
        loss_scale=loss_scale,
        workers=workers,
        progress=progress,
    )[0]


def prepare_split(
    datasets: Sequence[DatasetConfig],
    vocabulary: Vocabulary,
    *,
    sequence_len: int,
    vocab_size: int,
    cache_dir: str | Path,
    packing: Packing | Literal["auto"] = "auto",
    loss_scale: LossScale = "default",
    workers: int = 1,
    progress: Progress | None = None,
    ratio: float = 0.0,
    seed: int = 1234,
) -> tuple[Packed, Packed | None]:
    """As `prepare`, with a share of the data set apart for evaluation.

    ratio of the rows of the data, at least one and chosen by seed, go to the second result; all
    documents of a row stay together. If the data are one row (one text file), the last packed rows
    do instead. The second is None when ratio is 0 or there is only one row of either kind.
    """
    recipe = _Recipe(
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        packing=packing,
        loss_scale=loss_scale,
        ratio=ratio,
        seed=seed,
    )
    sources = [
        open_source(
            d.path, subset=d.subset, split=d.split, samples=d.samples, text_field=d.text_field
        )
        for d in datasets
    ]
    date = _date(vocabulary, chosen=True)
    name = _key(recipe, datasets, sources, vocabulary) + (f"-{date}" if date else "")
    folder = Path(cache_dir) / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        reused = folder.is_dir()
        if not reused:
            made = folder.with_suffix(".part")
            made.mkdir(exist_ok=True)
            try:
                _build(made, recipe, datasets, sources, vocabulary, workers, progress)
            except (UserError, OSError):  # going on would meet it again, or the disk is full
                shutil.rmtree(made)
                raise
            made.rename(folder)
    names = _names(datasets)
    train = open_packed(folder / "train", reused=reused, names=names)
    evaluation = folder / "evaluation"
    held = None
    if evaluation.is_dir():
        held = open_packed(evaluation, reused=reused, names=names)
    return train, held


def load_data(
    config: Config,
    model_dir: str | Path,
    tokenizer_file: str | Path | None,
    vocab_size: int,
    cache_dir: str | Path,
    *,
    progress: Progress | None = None,
) -> tuple[Packed, Packed | None]:
    """The training and evaluation rows of a run; the second is None when there is no evaluation.

    Evaluation rows come from validation_datasets, else from validation_split_ratio of the training
    data, chosen by eval_seed.
    """
    vocabulary = load_tokenizer(model_dir, tokenizer_file)
    workers = config.dataloader_num_workers
    own = bool(config.validation_datasets)
    if any(dataset.weight is not None for dataset in config.validation_datasets):
        raise UserError("validation_datasets: weight is for training data; leave it out")

    def packed(datasets: Sequence[DatasetConfig], ratio: float) -> tuple[Packed, Packed | None]:
        return prepare_split(
            datasets,
            vocabulary,
            sequence_len=config.sequence_len,
            vocab_size=vocab_size,
            cache_dir=cache_dir,
            packing="auto" if config.sample_packing else "single",
            loss_scale=config.loss_scale,
            workers=min(os.cpu_count() or 1, 8) if workers is None else workers,
            progress=progress,
            ratio=ratio,
            seed=config.eval_seed,
        )

    train, evaluation = packed(config.datasets, 0.0 if own else config.validation_split_ratio)
    return train, packed(config.validation_datasets, 0.0)[0] if own else evaluation


def _names(datasets: Sequence[DatasetConfig]) -> tuple[str, ...]:
    """What people call the data sets: the last part of each path, with its place if two share it.

    They are not kept with the rows: a file that is moved has the same rows.
    """
    last = [Path(dataset.path).name or dataset.path for dataset in datasets]
    return tuple(
        name if last.count(name) == 1 else f"{name} #{index}" for index, name in enumerate(last)
    )


def _key(
    recipe: _Recipe,
    datasets: Sequence[DatasetConfig],
    sources: Sequence[Source],
    vocabulary: Vocabulary,
) -> str:
    read = [msgspec.structs.replace(dataset, path="") for dataset in datasets]
    content = [source.fingerprint() for source in sources]
    known = msgspec.json.encode([_FORMAT, recipe, read, content, vocabulary.fingerprint])
    return sha256(known).hexdigest()[:32]


def _date(vocabulary: Vocabulary, *, chosen: bool = False) -> str:
    """The day that the chat template writes into rows; empty if it writes none, or if chosen and
    the day is today because nothing else was asked for: rows of another day are still good.
    """
    dated = vocabulary.template is not None and vocabulary.template.dated
    return moment().strftime("%Y-%m-%d") if dated and (EPOCH in os.environ or not chosen) else ""


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(
    folder: Path,
    recipe: _Recipe,
    datasets: Sequence[DatasetConfig],
    sources: Sequence[Source],
    vocabulary: Vocabulary,
    workers: int,
    progress: Progress | None,
) -> None:
    skipped: list[Counter[str]] = [Counter() for _ in sources]
    opened = [
        _first(i, d, s, skipped[i]) for i, (d, s) in enumerate(zip(datasets, sources, strict=True))
    ]
    packing = recipe.packing
    if packing == "auto":
        packing = "split" if all(layout.kind == "text" for layout, _ in opened) else "fit"
    encode = partial(
        tokenise,
        vocabulary,
        vocab_size=recipe.vocab_size,
        loss_scale=recipe.loss_scale,
        workers=workers,
    )
    places = Places()
    rendered = any(layout.kind != "text" for layout, _ in opened)
    date = _date(vocabulary) if rendered else ""
    flat = write_flat(folder, jobs_of(opened, places), places, encode, skipped, progress)
    cut = flat.lengths > recipe.sequence_len if packing != "split" else np.zeros(1, np.bool_)
    limit = np.where(cut, recipe.sequence_len - 1, flat.lengths)
    usable = flat.first_target < limit
    if not usable.any():
        raise _nothing_to_learn(recipe, sources, len(usable), skipped)
    found = _Found(datasets, sources, skipped, flat, places, usable)
    for name, (plan, chosen, left_out) in _parts(found, recipe, packing).items():
        weights = found.weights if name == "train" else None  # evaluation rows are not mixed
        report = _report(found, plan, chosen, left_out, packing, weights)
        report = msgspec.structs.replace(report, date=date)
        part = folder / name
        shutil.rmtree(part, ignore_errors=True)  # of a build that was killed
        write_packed(part, flat, plan, chosen, report, recipe.sequence_len)
    del flat, found
    remove_flat(folder)


def _nothing_to_learn(
    recipe: _Recipe, sources: Sequence[Source], documents: int, skipped: Sequence[Counter[str]]
) -> UserError:
    names = ", ".join(source.name for source in sources)
    kinds = sum(skipped, Counter())
    if documents == 0 and kinds:
        return UserError(f"{names}: every row was skipped: {counted(kinds)}")
    return UserError(
        f"{names}: no token is a target in any of {documents} documents (loss_scale "
        f"{recipe.loss_scale}, sequence_len {recipe.sequence_len}); look at a row's answer"
    )


def _first(
    index: int, dataset: DatasetConfig, source: Source, skipped: Counter[str]
) -> tuple[Layout, Iterator[Row]]:
    rows = source.rows(None if dataset.malformed == "stop" else skipped)
    first = next(rows)
    return layout_of(dataset, first)._replace(source=index), chain([first], rows)


class _Found(NamedTuple):
    """What tokenising found, and which documents have something to learn."""

    datasets: Sequence[DatasetConfig]
    sources: Sequence[Source]
    skipped: Sequence[Counter[str]]
    flat: Flat
    places: Places
    usable: Bool[np.ndarray, " documents"]

    @property
    def weights(self) -> list[float] | None:
        """The weights of the data sets, if they have them."""
        given = [dataset.weight for dataset in self.datasets]
        weights = [weight for weight in given if weight is not None]
        if not weights:
            return None
        if len(weights) < len(given):
            raise UserError(
                f"{self.sources[given.index(None)].name}: has no weight, but other data sets have; "
                "set weight for all of them or for none"
            )
        return weights


_Part = tuple[Plan, Int64[np.ndarray, " chosen"], Bool[np.ndarray, " documents"]]


def _parts(found: _Found, recipe: _Recipe, packing: Packing) -> dict[str, _Part]:
    """Plan, documents and which were left out, of each part."""
    flat, usable = found.flat, found.usable
    rows = np.unique(flat.rows[usable])
    count = min(max(1, round(recipe.ratio * len(rows))), len(rows) - 1) if recipe.ratio else 0
    order = np.argsort(np.random.Philox(key=recipe.seed).random_raw(len(rows)), kind="stable")
    held = np.isin(flat.rows, rows[order[:count]])
    parts: dict[str, _Part] = {}
    for name, member in (("train", ~held), ("evaluation", held)):
        chosen = np.flatnonzero(usable & member)
        if name == "train" and found.weights is not None:
            chosen = _mixed(found, chosen, recipe)
        if len(chosen):
            plan = plan_rows(
                flat.lengths[chosen], sequence_len=recipe.sequence_len, packing=packing
            )
            parts[name] = (plan, chosen, member & ~usable)
    if recipe.ratio and count == 0:
        plan, chosen, left_out = parts["train"]
        last = min(max(1, round(recipe.ratio * plan.rows)), plan.rows - 1)
        if last:
            split = plan.rows - last
            parts["train"] = (_between(plan, 0, split), chosen, left_out)
            nothing = np.zeros_like(left_out)
            parts["evaluation"] = (_between(plan, split, plan.rows), chosen, nothing)
    return parts


def _mixed(
    found: _Found, usable: Int64[np.ndarray, " usable"], recipe: _Recipe
) -> Int64[np.ndarray, " chosen"]:
    assert found.weights is not None
    sources = found.flat.sources[usable]
    for index, source in enumerate(found.sources):
        if index not in sources:
            raise UserError(f"{source.name}: has a weight, but nothing to learn in it")
    lengths = np.minimum(found.flat.lengths[usable], recipe.sequence_len)
    return usable[mixed(lengths, sources, found.weights, seed=recipe.seed)]


def _report(
    found: _Found,
    plan: Plan,
    chosen: Int64[np.ndarray, " chosen"],
    left_out: Bool[np.ndarray, " documents"],
    packing: Packing,
    weights: Sequence[float] | None,
) -> Report:
    """The report without what write_packed counts."""
    flat = found.flat
    begins = np.cumsum(flat.lengths) - flat.lengths
    documents = chosen[plan.document]
    sources = flat.sources[documents]
    at = begins[documents] + plan.start
    supervised = np.array(
        [
            int((flat.labels[begin : begin + length] != IGNORED).sum())
            for begin, length in zip(at.tolist(), plan.length.tolist(), strict=True)
        ],
        np.int64,
    )
    rows = dict.fromkeys(flat.rows[left_out].tolist())
    shares = [
        Share(
            documents=len(np.unique(plan.document[sources == index])),
            tokens=int(plan.length[sources == index].sum()),
            supervised=int(supervised[sources == index].sum()),
            wanted=None if weights is None else weights[index] / sum(weights),
            skipped=dict(found.skipped[index]),
        )
        for index in range(len(found.sources))
    ]
    return Report(
        documents=0,
        tokens=0,
        supervised=0,
        rows=0,
        truncated=0,
        unsupervised=int(left_out.sum()),
        packing=packing,
        fill=0.0,
        nothing=[found.places.name(row) for row in islice(rows, _NAMED)],
        shares=shares,
    )


def _between(plan: Plan, begin: int, end: int) -> Plan:
    keep = (plan.row >= begin) & (plan.row < end)
    return Plan(
        plan.document[keep],
        plan.start[keep],
        plan.length[keep],
        plan.row[keep] - begin,
        end - begin,
        plan.truncated,
    )
