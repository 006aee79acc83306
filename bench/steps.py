"""Whole training steps on a card, at random weights: tokens/s, share of the speed of light, peak
memory.

    python -m bench.steps qwen3-0.6b lora --rows 2 --accumulation 4

Prints one JSON line a case. ``--profile`` runs one eager micro-step and an update for a profiler
instead.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from bench.ceiling import ideal_seconds
from surogate.device import Device, choose_device
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.batch import Batch, docs_from_lengths, positions_of
from surogate.light import product_rate
from surogate.models.blocks import Settings
from surogate.models.config import ModelConfig
from surogate.models.flops import training_flops
from surogate.models.lora import LoraSpec, init_adapter
from surogate.models.names import build
from surogate.models.registry import lookup
from surogate.models.tree import Model
from surogate.models.widen import Put, making_room
from surogate.optim.adamw import AdamWConfig
from surogate.step import StepOptions, TrainStep
from surogate.train import stream_of


def random_model(
    config: ModelConfig,
    device: Device,
    dtype: Any = BF16,
    put: Put = lambda path, array: array,
) -> Model:
    """Weights drawn on the device: norms 1, the rest normal(0, 0.02). The tree holds what ``put``
    makes of each path and array.
    """
    library = device.library
    library.random.seed(0)

    def make(field: Any) -> Any:
        if field.path.endswith("norm"):
            return put(field.path, library.ones(field.shape, np.float32).astype(dtype))
        size = int(np.prod(field.shape))
        out = library.empty(size, dtype)
        for begin in range(0, size, 1 << 27):  # in pieces: the float32 draw is twice the weight
            part = out[begin : begin + (1 << 27)]
            part[...] = library.random.standard_normal(part.size, dtype=np.float32) * np.float32(
                0.02
            )
        return put(field.path, out.reshape(field.shape))

    return build(config, make)


def lengths_of(rows: int, length: int, mean: int | None, seed: int) -> list[int]:
    """Document lengths of a micro-batch: whole rows, or exponential lengths around a mean."""
    if mean is None:
        return [length] * rows
    rng = np.random.default_rng(seed)
    out: list[int] = []
    for _ in range(rows):
        left = length
        while left:
            size = int(min(max(8, rng.exponential(mean)), left))
            out.append(size)
            left -= size
    return out


def batches(config: ModelConfig, args: argparse.Namespace) -> list[Batch]:
    """The micro-batches of a step."""
    made = []
    for number in range(args.accumulation):
        rng = np.random.default_rng(number)
        lengths = lengths_of(args.rows, args.length, args.documents, number)
        docs = docs_from_lengths(lengths)
        tokens = rng.integers(0, config.vocab, len(docs.start), dtype=np.int32)
        labels = np.roll(tokens, -1)
        labels[docs.end - 1] = -100
        made.append(Batch(tokens, labels, positions_of(docs), docs))
    return made


def build_step(args: argparse.Namespace, device: Device) -> tuple[TrainStep, ModelConfig]:
    """The step of a case."""
    config = lookup(args.model)
    lora = LoraSpec.of(args.rank, 2 * args.rank, ["all"]) if args.mode == "lora" else None
    put: Put = lambda path, array: array  # noqa: E731
    model = random_model(config, device, put=making_room(put, config, lora) if lora else put)
    adapter = device.put(init_adapter(config, lora, 0, BF16)) if lora else None
    optimizer = AdamWConfig(
        master_dtype="float32" if lora else "bfloat16", moment_dtype=args.moments
    )
    options = StepOptions(
        tokens=args.rows * args.length,
        recompute=args.recompute,
        chunk=args.chunk,
        gradient_dtype=F32 if lora else BF16,
        max_grad_norm=1.0,
        graphs=not (args.eager or args.profile),
        longest=args.length,
    )
    return TrainStep(device, model, adapter, Settings(config, lora), optimizer, options), config


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times steps after two that warm up."""
    device = choose_device("cuda")
    with stream_of(device):
        begin = time.perf_counter()
        step, config = build_step(args, device)
        rows = batches(config, args)
        if args.profile:
            runtime = device.library.cuda.runtime
            for profiled in (False, True):  # once to warm up
                if profiled:
                    runtime.profilerStart()
                step.micro(rows[0])
                step.update(1e-5).result()
            runtime.profilerStop()
            return {"profiled": args.model}
        losses, seconds, host = [], [], []
        for number in range(args.steps + 2):
            device.synchronize()
            start = time.perf_counter()
            for batch in rows:
                step.micro(batch)
            pending = step.update(1e-5)
            launched = time.perf_counter()
            losses.append(pending.result().loss)
            if number >= 2:
                seconds.append(time.perf_counter() - start)
                host.append(launched - start)
        median = statistics.median(seconds)
        tokens = args.rows * args.length * args.accumulation
        flops = training_flops(
            config,
            tokens=tokens,
            cells=sum(int(b.positions.sum()) + len(b.positions) for b in rows),
            lora_rank=args.rank if args.mode == "lora" else None,
            recompute=args.recompute,
        )
        ideal = ideal_seconds(
            config,
            lora=args.mode == "lora",
            length=args.length,
            tokens=args.rows * args.length,
            accumulation=args.accumulation,
            recompute=args.recompute == "block",
        )
        free, total = device.library.cuda.runtime.memGetInfo()
        rate = product_rate(device)
        return {
            "model": args.model,
            "mode": args.mode,
            "rows": args.rows,
            "accumulation": args.accumulation,
            "length": args.length,
            "documents": args.documents,
            "recompute": args.recompute,
            "moments": args.moments,
            "tokens_per_second": round(tokens / median),
            "step_ms": round(median * 1e3, 2),
            "host_ms": round(statistics.median(host) * 1e3, 2),
            "ceiling": round(100 * ideal / median, 1),
            "sol": round(100 * flops.total / rate / median, 1),
            "tflops": round(flops.total / median / 1e12),
            "rate": round(rate / 1e12),
            "used_gib": round((total - free) / 2**30, 2),
            "loss": [round(losses[0], 4), round(losses[-1], 4)],
            "started_s": round(seconds and time.perf_counter() - begin, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("mode", choices=["lora", "full"])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--documents", type=int, help="mean document length; whole rows if unset")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "block"])
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--moments", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    print(json.dumps(measure(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
