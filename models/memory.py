"""Device memory of a training step by group, from shapes alone: nothing is read or allocated.

What stays for the whole run (weights, gradients, optimizer) is a sum over leaves; what a
micro-batch needs beside it is the peak of models/walk.py. With CUDA graphs, a micro-batch has a
pool of its own and an evaluation, which is not recorded, lies beside it; else they take turns in
one pool.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from surogate.kernels import grad_norm, multi_tensor
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.attention_cudnn import HEAD_DIMS, SCRATCH_BYTES
from surogate.kernels.cublaslt import WORKSPACE_BYTES
from surogate.kernels.linear import LoRA
from surogate.models.config import ModelConfig, parameter_shapes
from surogate.models.lora import LoraSpec, Part, build_adapter
from surogate.models.pool import Pool
from surogate.models.walk import INT32, Shape, Walk, Work

F64, INT64, BYTE = np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.uint8)
HOST_COPIES = 7  # of a leaf that AdamW's host version makes


class Counts(NamedTuple):
    """Numbers of parameters; ``trained`` of them have gradients (or the adapter has, with LoRA)."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int  # 0 when it is the embedding
    adapter: int
    trained: int

    @property
    def total(self) -> int:
        """Parameters of the model, without adapters."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head


class Memory(NamedTuple):
    """Bytes by group. ``total`` is the most that a run takes from its device at a time."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int  # kept between forward and backward
    temporaries: dict[str, int]  # most beside those, in each part of a step
    gaps: int  # what the pools hold beside the arrays
    evaluation: int  # beside all of the above; 0 where it takes turns with the step
    attention: int  # cuDNN's scratch memory, should every document fill a row
    workspace: int

    @property
    def peak(self) -> int:
        """Arrays of a micro-batch or an update; one part reuses the memory of another."""
        return self.activations + max(self.temporaries.values())

    @property
    def total(self) -> int:
        """All groups."""
        static = self.weights + self.adapter + self.gradients + self.optimizer
        return static + self.peak + self.gaps + self.evaluation + self.attention + self.workspace


def memory_of(work: Work, *, graphs: bool, evaluates: bool) -> Memory:
    """The memory of a run that trains as ``work`` says.

    ``graphs``: steps are recorded. ``evaluates``: there are rows to evaluate on.
    """
    layout = work.layout
    walk = Walk(work)
    weights, adapter = list(model_leaves(work.config)), list(adapter_leaves(work.config, work.lora))
    trained = weights if work.lora is None else adapter
    activations = walk.micro()
    temporaries = {phase: peak - activations for phase, peak in walk.ledger.peaks.items()}
    if layout.host:
        copies = HOST_COPIES * max(map(layout.bytes, trained))
        temporaries["update"] = copies - activations
    step, walk.ledger.events = walk.ledger.events, []
    evaluation = walk.evaluation() if evaluates else 0
    memory = Memory(
        weights=sum(map(layout.bytes, weights)) + _room(walk),
        adapter=sum(map(layout.bytes, adapter)),
        gradients=sum(layout.bytes(shape, work.gradient_dtype) for shape in trained),
        optimizer=sum(_state(work, shape) for shape in trained),
        activations=activations,
        temporaries=temporaries,
        gaps=0,
        evaluation=0,
        attention=0 if layout.host else _cudnn_scratch(work),
        workspace=_workspace(walk, trained),
    )
    if layout.host:
        return memory._replace(evaluation=max(0, evaluation - memory.peak))
    # A recorded step has a pool of its own, where it runs once before the recording.
    shared = Pool()
    own = Pool() if graphs else shared
    for _ in range(2):
        own.run(step)
    held = own.held
    shared.run(walk.ledger.events)
    if graphs:
        return memory._replace(gaps=held - memory.peak, evaluation=shared.held)
    return memory._replace(gaps=held - memory.peak, evaluation=shared.held - held)


def _room(walk: Walk) -> int:
    """What widened weights take more than plain ones."""
    layout, more = walk.work.layout, 0
    for w in walk.matrices:
        wide = layout.bytes((w.outer + w.extra, w.inner + w.extra))
        more += wide - layout.bytes((w.outer, w.inner))
    return walk.layers * more


def _state(work: Work, shape: Shape) -> int:
    """Optimizer state of a parameter: two moments, and perhaps a float32 master."""
    master = work.layout.bytes(shape, F32) if work.masters else 0
    return 2 * work.layout.bytes(shape, work.moment_dtype) + master


def parameter_counts(config: ModelConfig, lora: LoraSpec | None) -> Counts:
    """Counts of a model's parameters by what they do. Biases count with their matrix."""
    shapes = parameter_shapes(config)
    size = {
        name: config.layers * math.prod(shape)
        for name, shape in shapes.layers[0]._asdict().items()
        if shape is not None
    }
    norms = sum(size.get(name, 0) for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"))
    adapter = sum(math.prod(shape) for shape in adapter_leaves(config, lora))
    counts = Counts(
        embedding=math.prod(shapes.embed),
        attention=size["w_qkv"] + size.get("b_qkv", 0) + size["w_o"],
        mlp=size["w_gate_up"] + size["w_down"],
        norms=norms + math.prod(shapes.norm),
        head=0 if shapes.head is None else math.prod(shapes.head),
        adapter=adapter,
        trained=0,
    )
    return counts._replace(trained=counts.total if lora is None else adapter)


def model_leaves(config: ModelConfig) -> Iterator[Shape]:
    """The shape of every parameter array."""
    embed, layers, norm, head = parameter_shapes(config)
    leaves: list[Any] = [embed, norm, head, *(shape for layer in layers for shape in layer)]
    return (shape for shape in leaves if shape is not None)


def adapter_leaves(config: ModelConfig, lora: LoraSpec | None) -> Iterator[Shape]:
    """The shape of every array of an adapter; nothing without one."""
    if lora is None:
        return
    rank = lora.rank

    def pair(columns: int, parts: list[Part]) -> LoRA:
        a: Any = (len(parts) * rank, columns)
        b: Any = (parts[-1].b_rows[1], rank)
        return LoRA(a, b)

    for layer in build_adapter(config, lora, pair).layers:
        for found in layer:
            if found is not None:
                yield from (cast(Shape, shape) for shape in found)


def _cudnn_scratch(work: Work) -> int:
    """What cuDNN's backward takes beside the pools for whole rows: the gradient of all scores, in
    groups of heads that stay below a limit; 0 where even one group does not.
    """
    config = work.config
    if config.head_dim not in HEAD_DIMS:
        return 0
    whole = work.tokens * work.longest * config.heads * BF16.itemsize
    for parts in range(1, config.kv_heads + 1):
        if config.kv_heads % parts == 0 and whole <= parts * SCRATCH_BYTES:
            return work.layout.bytes((whole // parts,), BYTE)
    return 0


def _workspace(walk: Walk, trained: list[Shape]) -> int:
    """The micro-batch and the rotary table; on a card the tables of addresses, the partial sums of
    the gradient's norm and cuBLASLt's scratch.
    """
    work, layout, config = walk.work, walk.work.layout, walk.work.config
    half = int(config.head_dim * config.rope.partial_rotary_factor) // 2
    held = layout.bytes((5, work.tokens), INT32) + 2 * layout.bytes((work.longest, half), F32)
    if layout.host:
        return held
    for chunk, columns, sums in ((grad_norm.CHUNK, 3, 1), (multi_tensor.CHUNK, 10, 0)):
        blocks = sum(-(-math.prod(shape) // chunk) for shape in trained)
        held += layout.bytes((blocks,), INT32) + layout.bytes((len(trained), columns), INT64)
        held += sums * layout.bytes((blocks,), F64)
    if work.widen:
        blocks = walk.layers * sum(1 + w.parts for w in walk.matrices if w.extra)
        chunks = sum(-(-math.prod(shape) // multi_tensor.CHUNK) for shape in trained)
        held += layout.bytes((blocks, 7), INT64) + layout.bytes((chunks,), INT32)
    return held + WORKSPACE_BYTES
