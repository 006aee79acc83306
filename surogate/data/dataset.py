"""From data sets to packed rows on disk, built once.

The result lies in a folder named by a hash of everything it depends on: the bytes of the data, how
rows are read, the tokenizer and its template, the masks, the length and packing of rows, and the
version of this format. A run that changes none of it tokenises nothing. A folder is written beside
its place and renamed when it is whole; a lock lets processes that ask for the same rows share one
build.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from jaxtyping import Int32, Int64

from surogate.config import Config, DatasetConfig
from surogate.data.chat import LossScale
from surogate.data.formats import Layout, layout_of
from surogate.data.pack import Packing, Plan, plan_rows
from surogate.data.packed import Flat, Packed, open_packed, write_packed
from surogate.data.sources import Row, Source, open_source
from surogate.data.tokenise import Chunk, Job, batches, tokenise
from surogate.data.vocabulary import Vocabulary, load_tokenizer
from surogate.errors import UserError
from surogate.kernels.batch import IGNORED

_FORMAT = 1  # change it with anything that changes the arrays or their meaning

Progress = Callable[[int, int], None]  # documents and tokens so far


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

    packing auto is `split` when every data set is raw text and `fit` otherwise (see pack.py).
    Raises UserError for a bad row and when no token is a target.
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
    folder = Path(cache_dir) / _key(recipe, datasets, sources, vocabulary)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        reused = folder.is_dir()
        if not reused:
            for stale in folder.parent.glob(f"{folder.name}.tmp*"):  # of a build that was killed
                shutil.rmtree(stale)
            made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp", dir=folder.parent))
            try:
                _build(made, recipe, datasets, sources, vocabulary, workers, progress)
                made.rename(folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    train = open_packed(folder / "train", reused=reused)
    evaluation = folder / "evaluation"
    held = open_packed(evaluation, reused=reused) if evaluation.is_dir() else None
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
    opened = [_first(dataset, source) for dataset, source in zip(datasets, sources, strict=True)]
    packing = recipe.packing
    if packing == "auto":
        packing = "split" if all(layout.kind == "text" for layout, _ in opened) else "fit"
    chunks = tokenise(
        vocabulary,
        _jobs(opened),
        vocab_size=recipe.vocab_size,
        loss_scale=recipe.loss_scale,
        workers=workers,
    )
    flat = _write_flat(folder, chunks, progress)
    cut = flat.lengths > recipe.sequence_len if packing != "split" else np.zeros(1, np.bool_)
    limit = np.where(cut, recipe.sequence_len - 1, flat.lengths)
    usable = flat.first_target < limit
    if not usable.any():
        names = ", ".join(source.name for source in sources)
        raise UserError(
            f"{names}: no token is a target in any of {len(usable)} documents (loss_scale "
            f"{recipe.loss_scale}, sequence_len {recipe.sequence_len}); look at a row's answer"
        )
    parts = _parts(flat, usable, recipe, packing)
    for name, (plan, chosen, left_out) in parts.items():
        write_packed(folder / name, flat, plan, chosen, left_out, recipe.sequence_len, packing)
    del flat
    for name in ("tokens.bin", "labels.bin"):
        (folder / name).unlink()


def _first(dataset: DatasetConfig, source: Source) -> tuple[Layout, Iterator[Row]]:
    rows = source.rows()
    first = next(rows)
    return layout_of(dataset, first), chain([first], rows)


def _jobs(opened: Sequence[tuple[Layout, Iterator[Row]]]) -> Iterator[Job]:
    count = 0
    for layout, rows in opened:
        for batch in batches(enumerate(rows, count)):
            count = batch[-1][0] + 1
            yield layout, batch


def _write_flat(folder: Path, chunks: Iterator[Chunk], progress: Progress | None) -> Flat:
    lengths, firsts, rows = [], [], []
    documents = tokens = 0
    with (folder / "tokens.bin").open("wb") as ids, (folder / "labels.bin").open("wb") as targets:
        for chunk in chunks:
            labels, first = _labels(chunk)
            chunk.tokens.tofile(ids)
            labels.tofile(targets)
            lengths.append(chunk.lengths)
            firsts.append(first)
            rows.append(chunk.rows)
            documents += len(chunk.lengths)
            tokens += len(chunk.tokens)
            if progress is not None:
                progress(documents, tokens)
    return Flat(
        _stream(folder / "tokens.bin"),
        _stream(folder / "labels.bin"),
        np.concatenate([*lengths, np.empty(0, np.int64)]),
        np.concatenate([*firsts, np.empty(0, np.int64)]),
        np.concatenate([*rows, np.empty(0, np.int64)]),
    )


def _stream(file: Path) -> Int32[np.ndarray, " stream"]:
    if file.stat().st_size == 0:  # cannot be mapped
        return np.empty(0, np.int32)
    return np.asarray(np.memmap(file, np.int32, mode="r"))


def _labels(
    chunk: Chunk,
) -> tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " documents"]]:
    """Shifted labels, and in each document the first position that has one (or its length)."""
    labels = np.full(len(chunk.tokens), IGNORED, np.int32)
    labels[:-1] = np.where(chunk.supervised[1:], chunk.tokens[1:], IGNORED)
    ends = np.cumsum(chunk.lengths)
    labels[ends[chunk.lengths > 0] - 1] = IGNORED
    begins = ends - chunk.lengths
    targets = np.append(np.flatnonzero(labels != IGNORED), len(labels))
    first = targets[np.searchsorted(targets, begins)] - begins
    return labels, np.minimum(first, chunk.lengths)


_Part = tuple[Plan, Int64[np.ndarray, " chosen"], int]


def _parts(flat: Flat, usable: np.ndarray, recipe: _Recipe, packing: Packing) -> dict[str, _Part]:
    """Plan, documents and count of documents left out, of each part."""
    rows = np.unique(flat.rows[usable])
    count = min(max(1, round(recipe.ratio * len(rows))), len(rows) - 1) if recipe.ratio else 0
    order = np.argsort(np.random.Philox(key=recipe.seed).random_raw(len(rows)), kind="stable")
    held = np.isin(flat.rows, rows[order[:count]])
    parts = {}
    for name, member in (("train", ~held), ("evaluation", held)):
        chosen = np.flatnonzero(usable & member)
        if len(chosen):
            plan = plan_rows(
                flat.lengths[chosen], sequence_len=recipe.sequence_len, packing=packing
            )
            parts[name] = (plan, chosen, int((member & ~usable).sum()))
    if recipe.ratio and count == 0:
        plan, chosen, left_out = parts["train"]
        last = min(max(1, round(recipe.ratio * plan.rows)), plan.rows - 1)
        if last:
            split = plan.rows - last
            parts["train"] = (_between(plan, 0, split), chosen, left_out)
            parts["evaluation"] = (_between(plan, split, plan.rows), chosen, 0)
    return parts


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
