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
from surogate.kernels.batch import STAGED
from surogate.kernels.cublaslt import WORKSPACE_BYTES
from surogate.kernels.linear import LoRA
from surogate.kernels.quant.checkpoints import Scheme
from surogate.kernels.quant.nf4 import NESTED_BLOCK
from surogate.kernels.quant.storage import blocks_of
from surogate.models.config import ModelConfig, parameter_shapes
from surogate.models.lora import LoraSpec, Part, build_adapter
from surogate.models.optimizer_memory import state_bytes, table_bytes, update
from surogate.models.pool import Pool
from surogate.models.recipe import Fp8Options, Storage
from surogate.models.walk import BYTE, INT32, Layout, Matrix, Shape, Walk, Work

F64, INT64 = np.dtype(np.float64), np.dtype(np.int64)


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
    updating = len(walk.ledger.events)
    update(walk, trained)
    temporaries = {phase: peak - activations for phase, peak in walk.ledger.peaks.items()}
    step, walk.ledger.events = walk.ledger.events, []
    evaluation = walk.evaluation() if evaluates else 0
    memory = Memory(
        weights=sum(map(layout.bytes, weights)) + _more_weights(walk),
        adapter=sum(map(layout.bytes, adapter)),
        gradients=sum(layout.bytes(shape, work.gradient_dtype) for shape in trained),
        optimizer=state_bytes(work, trained),
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
    for part in (step[updating:], step[:updating], step[:updating]):  # in which it is recorded
        own.run(part)
    held = own.held
    shared.run(walk.ledger.events)
    if graphs:
        return memory._replace(gaps=held - memory.peak, evaluation=shared.held)
    return memory._replace(gaps=held - memory.peak, evaluation=shared.held - held)


def _more_weights(walk: Walk) -> int:
    """What widened weights and weights in codes take more (or less) than plain ones."""
    layout, more = walk.work.layout, 0
    for matrices in walk.of:
        for w in matrices:
            blocks = layout.bytes((w.extra, w.inner)) + layout.bytes((w.outer, w.extra))
            if w.fp8 is not None:
                plain = w.trained or not (
                    w.fp8.scope.products.forward and w.fp8.scope.products.dgrad
                )
                more += _codes(layout, w.fp8, w) + blocks
                more -= 0 if plain else layout.bytes((w.outer, w.inner))
            elif w.nvfp4 is not None:
                products = w.nvfp4.scope.products
                more += layout.bytes((1,), F32) + blocks  # values in the place of the weight
                if w.trained or not (products.forward and products.dgrad):
                    more += layout.bytes((w.outer, w.inner))
                if not w.nvfp4.options.square:
                    more += layout.bytes((w.outer, w.inner))
            elif w.stored is not None:
                more += stored_bytes(layout, w.stored, w) + blocks
                more -= layout.bytes((w.outer, w.inner))
            else:
                more += _wide(layout, w) - layout.bytes((w.outer, w.inner))
    for matrices in zip(*walk.of, strict=True):
        if any(w.stored for w in matrices):  # what they are decoded to, one after another
            more += _wide(layout, matrices[0])
    return more


def _wide(layout: Layout, w: Matrix) -> int:
    return layout.bytes((w.outer + w.extra, w.inner + w.extra))


def _codes(layout: Layout, fp8: Fp8Options, w: Matrix) -> int:
    """Both matrices of codes, and the scales of rows."""
    scales = (w.outer, w.inner) if fp8.scaling == "row" else ()
    codes = 2 * layout.bytes((w.outer, w.inner), BYTE)
    return codes + sum(layout.bytes((n,), F32) for n in scales)


def stored_bytes(layout: Layout, storage: Storage | Scheme, w: Matrix) -> int:
    """A matrix in the arrays of kernels/quant, a piece of it at a time."""
    return sum(
        layout.bytes(shape, dtype)
        for rows in w.pieces
        for shape, dtype in _stored_arrays(storage, rows, w.inner)
    )


def _stored_arrays(
    storage: Storage | Scheme, rows: int, columns: int
) -> Iterator[tuple[Shape, np.dtype]]:
    """Shapes of the arrays of a Quantized."""
    down, across = _block(storage)
    if storage.format == "fp8":
        yield (rows, columns), BYTE
        yield (blocks_of(rows, down), blocks_of(columns, across)), F32
        return
    yield (blocks_of(rows * columns, 2),), BYTE
    if storage.format == "nvfp4":
        yield (rows, columns // 16), BYTE
        yield (1,), F32
        return
    count = blocks_of(rows * columns, across)
    yield (count,), BYTE if storage.double_quant else F32
    if storage.double_quant:
        for size in (blocks_of(count, NESTED_BLOCK), 256, 1):
            yield (size,), F32


def _block(storage: Storage | Scheme) -> tuple[int, int]:
    """Rows and columns that share a scale of fp8; of nf4, the columns are its elements."""
    if isinstance(storage, Scheme):
        return storage.block
    side = storage.block or {"fp8": 128, "nf4": 64, "nvfp4": 16}[storage.format]
    return side, side


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


def _recipe_state(walk: Walk) -> int:
    """Scales, maxima and histories of the fp8 recipe."""
    fp8, layout = walk.work.recipe, walk.work.layout
    if not isinstance(fp8, Fp8Options):
        return 0
    tensors = 3 * sum(w.fp8 is not None for matrices in walk.of for w in matrices)
    shapes = ((tensors, 4), (tensors, 4), (tensors,), (tensors,), (fp8.history, tensors))
    return layout.bytes((tensors,), INT32) + sum(layout.bytes(shape, F32) for shape in shapes)


def _workspace(walk: Walk, trained: list[Shape]) -> int:
    """The micro-batch and the rotary table; on a card the tables of addresses, the partial sums of
    the gradient's norm and cuBLASLt's scratch.
    """
    work, layout, config = walk.work, walk.work.layout, walk.work.config
    half = int(config.head_dim * config.rope.partial_rotary_factor) // 2
    held = layout.bytes((5, work.tokens), INT32) + 2 * layout.bytes((work.longest, half), F32)
    if layout.host:
        return held
    held += _recipe_state(walk) + STAGED * layout.bytes((5, work.tokens), INT32)
    blocks = sum(-(-math.prod(shape) // grad_norm.CHUNK) for shape in trained)
    held += layout.bytes((blocks,), INT32) + layout.bytes((len(trained), 3), INT64)
    held += layout.bytes((blocks,), F64) + table_bytes(walk, trained)
    if work.widen:
        blocks = sum(1 + w.parts for matrices in walk.of for w in matrices if w.extra)
        chunks = sum(-(-math.prod(shape) // multi_tensor.CHUNK) for shape in trained)
        held += layout.bytes((blocks, 7), INT64) + layout.bytes((chunks,), INT32)
    return held + WORKSPACE_BYTES
