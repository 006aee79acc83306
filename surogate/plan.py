"""surogate plan: parameters and memory of a run by group, before anything is loaded.

``predict`` is the whole of it: the groups of models/memory.py for what a configuration asks for.
Around it, ``cheapest_policy`` chooses what to recompute by the memory that is free, and
``remedies`` lists the settings that would make a run fit. A run fits when it leaves 5 % of the
free memory. On a card, CUDA's own memory is part of the plan, and so what this process has of it
already counts as free.
"""

import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from surogate.choices import after_recipe, evaluates, optimizer_of, options_of, precision_of
from surogate.config import Config
from surogate.device import COMPUTE, choose_device
from surogate.errors import UserError
from surogate.kernels import attention_hopper
from surogate.kernels.arrays import BF16
from surogate.models.config import QUANTIZED, ModelConfig, from_hf
from surogate.models.lora import LoraSpec
from surogate.models.memory import CONTEXT_BYTES, Counts, Memory, memory_of, parameter_counts
from surogate.models.registry import hf_config
from surogate.models.stack import Recompute
from surogate.models.walk import CARD, HOST, Walk, Work
from surogate.optim.adamw import needs_master
from surogate.optim.normuon import NorMuonConfig
from surogate.optim.rule import adamw_of
from surogate.schema import show
from surogate.setup import lora_of, model_config_of, model_directory, reported, scaled

Kind = Literal["cpu", "cuda"]
# Of the free memory: a first step measures implementations of an op, which takes memory for them.
SPARE = 0.05
POLICIES: tuple[Recompute, ...] = ("none", "selective", "block")  # fastest first
WIDTH = 80


class Plan(NamedTuple):
    """What a run would take of a device."""

    kind: Kind
    work: Work
    counts: Counts
    memory: Memory
    free: int | None  # bytes; None: not known

    @property
    def fits(self) -> bool:
        """Whether the run leaves some memory to spare, where it is known how much there is."""
        return self.free is None or self.memory.total <= (1 - SPARE) * self.free


def predict(config: Config, model: ModelConfig, kind: Kind, free: int | None = None) -> Plan:
    """The plan of a run of ``config`` on a device of ``kind`` with ``free`` bytes. Where a recipe
    ends before the run does, it is that of the steps that take more.
    """
    config = settled(config, model, kind, free)
    plans = [_predict(each, model, kind, free) for each in (config, after_recipe(config)) if each]
    return max(plans, key=lambda plan: plan.memory.total)


def _predict(config: Config, model: ModelConfig, kind: Kind, free: int | None) -> Plan:
    compute = COMPUTE[kind]
    options, rule = options_of(config, kind, compute), optimizer_of(config)
    optimizer = adamw_of(rule)
    moment = BF16 if optimizer.moment_dtype == "bfloat16" else np.dtype(optimizer.moment_dtype)
    lora: LoraSpec | None = lora_of(config)
    work = Work(
        config=model,
        lora=lora,
        layout=CARD if kind == "cuda" else HOST,
        tokens=options.tokens,
        longest=options.longest or options.tokens,
        recompute=options.recompute,
        chunk=options.chunk,
        gradient_dtype=options.gradient_dtype,
        moment_dtype=moment,
        masters=needs_master(np.empty(0, compute), optimizer),
        widen=lora is not None and (kind == "cuda" if options.widen is None else options.widen),
        recipe=precision_of(config, model),
        normuon=isinstance(rule, NorMuonConfig),
        cudnn=kind == "cuda" and may_use_cudnn(model.head_dim),
        plain_evaluation=options.plain_evaluation,
    )
    memory = _memory(work, graphs=options.graphs, evaluates=evaluates(config))
    return Plan(kind, work, parameter_counts(model, lora), memory, free)


# Remedies lead to the same work by several ways.
_memory = functools.lru_cache(maxsize=256)(memory_of)


@functools.cache
def may_use_cudnn(head_dim: int) -> bool:
    """Whether cuDNN may compute attention's backward on the card at hand; yes where there is none.

    On Hopper our own kernels win at the head sizes that they take, by 1.8 on an H200.
    """
    return choose_device("auto").kind == "cpu" or not attention_hopper.takes(head_dim)


def settled(config: Config, model: ModelConfig, kind: Kind, free: int | None) -> Config:
    """The configuration with recompute = auto decided: the fastest policy that fits, or the one
    that takes least where nobody knows what is free.
    """
    if config.recompute != "auto":
        return config
    policy = "block" if free is None else cheapest_policy(config, model, kind, free)
    return msgspec.structs.replace(config, recompute=policy)


def cheapest_policy(config: Config, model: ModelConfig, kind: Kind, free: int) -> Recompute:
    """The fastest policy that fits in ``free`` bytes; "block", which takes least, if none does."""
    for policy in POLICIES[:-1]:
        changed = msgspec.structs.replace(config, recompute=policy)
        if predict(changed, model, kind, free).fits:
            return policy
    return POLICIES[-1]


class Remedy(NamedTuple):
    """Settings to change, and the plan that they lead to."""

    settings: dict[str, Any]
    plan: Plan

    @property
    def text(self) -> str:
        """The settings as a person writes them."""
        return ", ".join(f"{k} = {show(v)}" for k, v in self.settings.items() if v is not None)


def remedies(config: Config, model: ModelConfig, plan: Plan) -> list[Remedy]:
    """What makes a run smaller: each change alone and, if none is enough, several together.

    The first ones train the same and take longer; then come those that round more or train less.
    """

    def changed(settings: dict[str, Any]) -> Remedy:
        smaller = msgspec.structs.replace(config, **settings)
        return Remedy(settings, predict(smaller, model, plan.kind, plan.free))

    found = [changed(settings) for settings in _changes(config, plan)]
    rows = _fewer_rows(config, changed)
    found[len(POLICIES) - 1 : len(POLICIES) - 1] = [] if rows is None else [rows]
    found = [remedy for remedy in found if remedy.plan.memory.total < plan.memory.total]
    together: dict[str, Any] = {}
    for remedy in found:
        if any(alone.plan.fits for alone in found):
            break
        together = together | remedy.settings
        joined = changed(together)
        if joined.plan.fits or (remedy is found[-1] and len(found) > 1):
            return [*found, joined]
    return found


def _changes(config: Config, plan: Plan) -> Iterator[dict[str, Any]]:
    """Settings that take less memory, but for the batch, in the order in which to try them."""
    for policy in POLICIES[1:]:
        yield {"recompute": policy}
    if config.lmhead_chunks is not None:
        yield {"auto_lmhead_chunks": True, "lmhead_chunks": None}
    if plan.kind == "cuda":
        yield {"gradient_dtype": "bf16"}
        yield {"lora_dtype": "bf16"} if config.lora else {"master_dtype": "bf16"}
    if not config.lora and config.optimizer == "adamw":
        yield {"optimizer": "adamw_8bit"}
    if not config.lora and not config.from_scratch and config.optimizer != "normuon":
        yield {"lora": True}


def _fewer_rows(config: Config, changed: Callable[[dict[str, Any]], Remedy]) -> Remedy | None:
    """The largest part of a batch that fits, with as many more micro-batches; else single rows."""
    rows, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    remedy = None
    for part in range(2, rows + 1):
        if rows % part == 0:
            remedy = changed(
                {
                    "per_device_train_batch_size": rows // part,
                    "gradient_accumulation_steps": accumulation * part,
                }
            )
            if remedy.plan.fits:
                break
    return remedy


def find_model(config: Config) -> tuple[ModelConfig, str]:
    """The model's configuration, and where it is from: its folder, the registry or the Hub.

    The weights need not be there. Raises UserError when the name leads nowhere.
    """
    name = config.model
    if Path(name).expanduser().exists():
        directory = model_directory(name)
        return model_config_of(config, directory), str(directory)
    try:
        raw = hf_config(name)
    except ValueError as unknown:
        return _from_hub(config, str(unknown)), "no such folder here: config.json from the Hub"
    with reported(name):
        return scaled(config, from_hf(raw)), "no such folder here: sizes from the built-in registry"


def _from_hub(config: Config, unknown: str) -> ModelConfig:
    """Reads the configuration of a name on the Hub, and nothing else."""
    name = config.model
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(f"model = {name}: there is no such folder, and {unknown}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = snapshot_download(name, allow_patterns=["config.json", QUANTIZED])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"model = {name}: no such folder, and the Hub says: {first}") from None
    return model_config_of(config, Path(directory))


class Place(NamedTuple):
    """The device that a plan is for."""

    kind: Kind
    name: str
    free: int | None  # bytes, and those of this process's own CUDA context


def place_of(config: Config) -> Place:
    """Where the run would compute. device = cuda is planned for without a card, too."""
    device = choose_device("cpu" if config.device == "cpu" else "auto")
    if device.kind == "cuda":
        free, total = device.library.cuda.runtime.memGetInfo()
        return Place("cuda", device.name, int(free + min(total - free, CONTEXT_BYTES)))
    if config.device == "cuda":
        return Place("cuda", "a card (there is none here)", None)
    return Place("cpu", device.name, _available())


def _available() -> int | None:
    """Bytes of main memory that are free or can be freed; None where the system does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(fields["MemAvailable"].split()[0])


def plan_command(config: Config) -> None:
    """Prints parameters, memory by group, and what would make the run fit."""
    model, source = find_model(config)
    place = place_of(config)
    plan = predict(config, model, place.kind, place.free)
    console = Console(width=WIDTH, highlight=False)
    _say(console, _heading(config, plan, source, place))
    console.print(counts_table(plan.counts))
    console.print()
    console.print(memory_table(plan))
    console.print()
    _say(console, verdict(config, model, plan))
    if place.kind == "cpu" and config.device == "auto":
        card = predict(config, model, "cuda").memory.total
        _say(console, [f"no card here; on one: {in_words(card)} (--set device=cuda shows it)"])


def _say(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _heading(config: Config, plan: Plan, source: str, place: Place) -> list[str]:
    rows, work = config.per_device_train_batch_size, plan.work
    what = "all weights" if work.lora is None else f"LoRA rank {work.lora.rank}"
    if work.config.quantized is not None:
        what += f" on weights in {work.config.quantized.format}, as stored"
    return [
        f"{work.config.architecture} {config.model}",
        f"  {source}",
        f"  on {place.name}, {what}, recompute = {work.recompute}",
        f"  {rows} x {config.sequence_len:,} = {work.tokens:,} tokens in a micro-batch",
        "",
    ]


def counts_table(counts: Counts) -> Table:
    """Parameters by group."""
    table = _table("parameters", "number")
    groups = {
        "embedding": counts.embedding,
        "attention": counts.attention,
        "MLP": counts.mlp,
        "norms": counts.norms,
        "head": counts.head,
    }
    for name, number in groups.items():
        tied = name == "head" and number == 0
        table.add_row(name, "the embedding" if tied else f"{number:,}")
    table.add_row("total", f"{counts.total:,}", style="bold")
    if counts.adapter:
        table.add_row("adapters", f"{counts.adapter:,}")
    table.add_row("trained", f"{counts.trained:,}")
    return table


def memory_table(plan: Plan) -> Table:
    """Memory by group. Indented rows are parts of the group above that do not add up."""
    work, memory = plan.work, plan.memory
    masters = f", {'float32' if work.masters else 'no'} masters"
    table = _table("memory", "size")
    groups: dict[str, int] = {
        f"weights, {work.layout.compute}": memory.weights,
        f"adapters, {work.layout.compute}": memory.adapter,
        f"gradients, {work.gradient_dtype}": memory.gradients,
        f"optimizer, {work.moment_dtype} moments{masters}": memory.optimizer,
        "activations kept for backward": memory.activations,
        "temporaries, the most of": max(memory.temporaries.values()),
    }
    for name, size in groups.items():
        if size:
            table.add_row(name, in_words(size))
    chunk = min(Walk(work).chunk(), work.tokens)
    parts = {
        "forward": "forward of a layer",
        "head": f"head and loss, {chunk:,} tokens at a time",
        "backward": "backward of a layer",
        "update": "update, copies of the largest weight",
    }
    for part, size in memory.temporaries.items():
        if size > 0:
            table.add_row(f"  {parts[part]}", in_words(size), style="dim")
    for name, size in (
        ("gaps between arrays, and in pages", memory.gaps),
        ("evaluation, beside the recorded step", memory.evaluation),
        ("attention, if documents fill rows (cuDNN)", memory.attention),
        ("workspace, batch and tables", memory.workspace),
        ("CUDA context and libraries", memory.context),
    ):
        if size:
            table.add_row(name, in_words(size))
    table.add_row("total", in_words(memory.total), style="bold")
    if plan.free is not None:
        table.add_row("free", in_words(plan.free))
    return table


def verdict(config: Config, model: ModelConfig, plan: Plan) -> Iterator[str]:
    """Whether it fits; if not, what would make it fit; if so, whether something faster fits."""
    if plan.free is None:
        yield f"fits a card with {in_words(int(plan.memory.total / (1 - SPARE)))} free"
        return
    if plan.fits:
        policy = cheapest_policy(config, model, plan.kind, plan.free)
        yield f"fits: {plan.memory.total / plan.free:.0%} of what is free"
        if POLICIES.index(policy) < POLICIES.index(plan.work.recompute):
            yield f"recompute = {policy} fits too, and is faster"
        return
    yield f"does not fit: {SPARE:.0%} of the free memory must be left. What takes less:"
    found = remedies(config, model, plan)
    for remedy in found:
        mark = "fits" if remedy.plan.fits else ""
        start = f"{in_words(remedy.plan.memory.total):>12}  {mark:4}  "
        yield from textwrap.wrap(
            remedy.text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
        )
    if not any(remedy.plan.fits for remedy in found):
        yield "  none of it is enough: use a smaller model, shorter rows, or a larger card"


def in_words(size: int) -> str:
    """1.50 GiB; MiB below a tenth of that."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= 0.1 * unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 2**10:,.2f} KiB"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, width=64, title_justify="left")
    table.add_column(titles[0], ratio=1)
    table.add_column(titles[1], justify="right", no_wrap=True)
    return table
