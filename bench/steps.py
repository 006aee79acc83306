"""A whole training step on a card, at random weights: tokens/s, shares of the ceiling, memory, host
time.

    python -m bench.steps qwen3-0.6b lora --rows 2 --accumulation 4

Prints one JSON line. ``--profile`` runs one eager micro-step and an update for a profiler instead.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.harness import facts
from bench.rows import Row, parser
from surogate.choices import storing
from surogate.device import Device, choose_device
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.batch import IGNORED, Batch, docs_from_lengths, positions_of
from surogate.light import product_rate
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig
from surogate.models.flops import training_flops
from surogate.models.lora import LoraSpec, init_adapter
from surogate.models.memory import memory_of
from surogate.models.names import build
from surogate.models.recipe import (
    Fp8Options,
    Fp8Recipe,
    Nvfp4Recipe,
    Nvfp4Settings,
    Precision,
    Recipe,
    Storage,
)
from surogate.models.registry import lookup
from surogate.models.tree import Model
from surogate.models.walk import CARD, Work
from surogate.models.widen import Put, making_room
from surogate.optim.adamw import AdamWConfig
from surogate.plan import may_use_cudnn
from surogate.step import StepOptions, TrainStep
from surogate.train import stream_of

WARMUP = 2  # steps before those that are timed
HOST_ROUNDS, HOST_MICROS = 5, 4  # steps, and micro-batches of each, whose host time is taken
LEARNING_RATE = 1e-5


def random_model(
    config: ModelConfig,
    device: Device,
    dtype: Any = BF16,
    put: Put = lambda path, array: array,
) -> Model:
    """Weights drawn on the device: norms 1, the rest normal(0, 0.02). The tree holds what ``put``
    makes of each path and array.

    Draws have a pool of their own, so that weights lie where those that a run reads would.
    """
    library = device.library
    library.random.seed(0)
    draws = library.cuda.MemoryPool()

    def make(field: Any) -> Any:
        if field.path.endswith("norm"):
            return put(field.path, library.ones(field.shape, np.float32).astype(dtype))
        size = int(np.prod(field.shape))
        out = library.empty(size, dtype)
        for begin in range(0, size, 1 << 27):  # in pieces: the float32 draw is twice the weight
            part = out[begin : begin + (1 << 27)]
            with library.cuda.using_allocator(draws.malloc):
                draw = library.random.standard_normal(part.size, dtype=np.float32)
                part[...] = draw * np.float32(0.02)
        return put(field.path, out.reshape(field.shape))

    model = build(config, make)
    draws.free_all_blocks()
    return model


def batches(config: ModelConfig, row: Row) -> list[Batch]:
    """The micro-batches of a step: random tokens, each document's last without a label."""
    made = []
    for number in range(row.accumulation):
        rng = np.random.default_rng(number)
        docs = docs_from_lengths(row.lengths(number))
        tokens = rng.integers(0, config.vocab, len(docs.start), dtype=np.int32)
        labels = np.roll(tokens, -1)
        labels[docs.end - 1] = IGNORED
        made.append(Batch(tokens, labels, positions_of(docs), docs))
    return made


def build_step(row: Row, device: Device, *, graphs: bool) -> TrainStep:
    """The step of a row."""
    config = lookup(row.model)
    lora = LoraSpec.of(row.rank, 2 * row.rank, ["all"]) if row.mode == "lora" else None
    recipe = recipe_of(row, config, device)
    put: Put = lambda path, array: array  # noqa: E731
    if lora is not None:
        put = recipe.frozen(put, making_room(put, config, lora), lora)
    model = random_model(config, device, put=put)
    adapter = device.put(init_adapter(config, lora, 0, BF16)) if lora else None
    optimizer = AdamWConfig(
        master_dtype="float32" if lora else "bfloat16", moment_dtype=row.moments
    )
    options = StepOptions(
        tokens=row.rows * row.length,
        recompute=row.recompute,
        chunk=row.chunk,
        gradient_dtype=F32 if lora else BF16,
        max_grad_norm=1.0,
        graphs=graphs,
        longest=row.length,
    )
    return TrainStep(device, model, adapter, Settings(config, lora), optimizer, options, recipe)


def precision_of(row: Row) -> Precision | None:
    """A row's recipe or storage, with the defaults of a configuration file; None: bf16."""
    if row.recipe == "bf16":
        return None
    if row.recipe == "nvfp4":
        return Nvfp4Settings()
    storages = {
        "nf4": Storage("nf4", 64, True),
        "fp8_blocks": Storage("fp8", 128),
        "nvfp4_blocks": Storage("nvfp4", four_over_six=True),
    }
    if row.recipe in storages:
        return storages[row.recipe]
    below = row.recipe.removeprefix("fp8_")
    if below != row.recipe and below in storages:
        return Fp8Options(storage=storages[below])
    scaling: Any = row.recipe.partition("_")[2] or "delayed"
    return Fp8Options(scaling=scaling)


def recipe_of(row: Row, config: ModelConfig, device: Device) -> Recipe:
    """What a row's weights become."""
    precision = precision_of(row)
    if isinstance(precision, Fp8Options):
        below = storing(precision.storage, config)
        return Fp8Recipe(config, precision, device.library, below)
    if isinstance(precision, Nvfp4Settings):
        return Nvfp4Recipe(config, precision, device.library)
    return storing(precision, config)


def planned_bytes(row: Row, step: TrainStep) -> int:
    """What ``surogate plan`` says of a row."""
    options, lora = step.options, step.settings.lora
    work = Work(
        config=step.settings.config,
        lora=lora,
        layout=CARD,
        tokens=options.tokens,
        longest=row.length,
        recompute=row.recompute,
        chunk=row.chunk,
        gradient_dtype=options.gradient_dtype,
        moment_dtype=BF16 if row.moments == "bfloat16" else F32,
        masters=lora is not None,
        widen=lora is not None,
        recipe=precision_of(row),
        cudnn=may_use_cudnn(step.settings.config.head_dim),
    )
    return memory_of(work, graphs=options.graphs, evaluates=False).total


def timed_steps(
    step: TrainStep, micros: Sequence[Batch], steps: int
) -> tuple[list[float], list[float]]:
    """Seconds and losses of so many steps after those that warm up, each from an idle card to the
    loss on the host.
    """
    seconds, losses = [], []
    for _ in range(WARMUP + steps):
        step.device.synchronize()
        start = time.perf_counter()
        for batch in micros:
            step.micro(batch)
        losses.append(step.update(LEARNING_RATE).result().loss)
        seconds.append(time.perf_counter() - start)
    return seconds[WARMUP:], losses[WARMUP:]


def host_seconds(step: TrainStep, micros: Sequence[Batch]) -> float:
    """Seconds that the host itself needs for a step: for its calls of micro and update.

    Calls follow one another as in training, from an idle card on and no more of them than the card
    takes without making the host wait for a place in the launch queue or for a page-locked buffer:
    beyond that, their time would be the card's. A step has as many micro-batches as it has.
    """
    some, micro, update = micros[:HOST_MICROS], [], []
    for _ in range(HOST_ROUNDS):
        step.device.synchronize()
        start = time.perf_counter()
        for batch in some:
            step.micro(batch)
        middle = time.perf_counter()
        step.update(LEARNING_RATE)
        update.append(time.perf_counter() - middle)
        micro.append((middle - start) / len(some))
    return len(micros) * statistics.median(micro) + statistics.median(update)


def held_bytes(device: Device) -> int:
    """Memory that is taken on the card: this process's, when no other uses it."""
    free, total = device.library.cuda.runtime.memGetInfo()
    return total - free


def measure(row: Row, device: Device, *, graphs: bool) -> dict[str, Any]:
    """Runs a row; what it gives is described in docs/benchmarks.md."""
    begin = time.perf_counter()
    config, step = lookup(row.model), build_step(row, device, graphs=graphs)
    micros = batches(config, row)
    seconds, losses = timed_steps(step, micros, row.steps)
    ready = time.perf_counter() - begin - sum(seconds)
    host = host_seconds(step, micros)
    held = held_bytes(device)
    flops = training_flops(
        config,
        tokens=row.tokens,
        cells=sum(int(b.positions.sum()) + len(b.positions) for b in micros),
        lora_rank=row.rank if row.mode == "lora" else None,
        recompute=row.recompute,
    )
    rate, median = product_rate(device), statistics.median(seconds)
    return {
        **row.speed(seconds),
        "speed_of_light": flops.total / rate / median,
        "product_rate": rate,
        "flops": flops.total,
        "host_ms": host * 1e3,
        "memory_gib": held / 2**30,
        "planned_gib": planned_bytes(row, step) / 2**30,
        "loss": [losses[0], losses[-1]],
        "ready_s": ready,
    }


def profile(row: Row, device: Device) -> None:
    """One eager micro-step and an update between the profiler's start and stop, after the same
    without it.
    """
    step = build_step(row, device, graphs=False)
    batch, runtime = batches(lookup(row.model), row)[0], device.library.cuda.runtime
    for profiled in (False, True):
        if profiled:
            runtime.profilerStart()
        step.micro(batch)
        step.update(LEARNING_RATE).result()
    runtime.profilerStop()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--eager", action="store_true", help="without CUDA graphs")
    made.add_argument("--profile", action="store_true")
    args: argparse.Namespace = made.parse_args()
    row, device = Row.of(args), choose_device("cuda")
    with stream_of(device):
        if args.profile:
            profile(row, device)
        else:
            print(json.dumps({**measure(row, device, graphs=not args.eager), **facts()}))


if __name__ == "__main__":
    main()
