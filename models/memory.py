"""Device memory of a training step by group, from shapes alone: nothing is read or allocated.

What stays for the whole run (weights, gradients, optimizer) is a sum over leaves; what a
micro-batch needs beside it is the peak of models/walk.py. With CUDA graphs, a micro-batch has a
pool of its own and an evaluation, which is not recorded, lies beside it; else they take turns in
one pool. Beside all of them is what CUDA itself takes of a card for a process.
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
from surogate.models.optimizer_memory import state_arrays, table_bytes, update
from surogate.models.pool import Pool, taken
from surogate.models.recipe import Fp8Options, Nvfp4Settings, Storage
from surogate.models.walk import BYTE, INT32, Layout, Matrices, Matrix, Shape, Walk, Work
from surogate.models.walk_recipes import decodes

F64, INT64 = np.dtype(np.float64), np.dtype(np.int64)
# The CUDA context, machine code of our kernels and of the libraries' that ran, and recorded graphs.
# From 14 training steps on an H200 (driver 580, CUDA 13), what they took less what their pools and
# workspaces explain: 0.53 to 0.55 GiB in eight, 0.57 to 0.72 in six that were the first of their
# shape and tried implementations.
CONTEXT_BYTES = 560 << 20


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
    gaps: int  # what the pools hold beside the arrays, and pages that arrays do not fill
    evaluation: int  # beside all of the above; 0 where it takes turns with the step
    attention: int  # cuDNN's scratch memory, should every document fill a row
    workspace: int
    context: int  # CUDA's own, and the libraries'

    @property
    def peak(self) -> int:
        """Arrays of a micro-batch or an update; one part reuses the memory of another."""
        return self.activations + max(self.temporaries.values())

    @property
    def total(self) -> int:
        """All groups."""
        static = self.weights + self.adapter + self.gradients + self.optimizer
        beside = self.evaluation + self.attention + self.workspace + self.context
        return static + self.peak + self.gaps + beside


def memory_of(work: Work, *, graphs: bool, evaluates: bool) -> Memory:
    """The memory of a run that trains as ``work`` says.

    ``graphs``: steps are recorded. ``evaluates``: there are rows to evaluate on.
    """
    layout = work.layout
    walk = Walk(work)
    leaves, adapter = list(model_leaves(work.config)), list(adapter_leaves(work.config, work.lora))
    trained = leaves if work.lora is None else adapter
    static = {
        "weights": list(weight_arrays(walk)),
        "adapter": list(map(layout.bytes, adapter)),
        "gradients": [layout.bytes(shape, work.gradient_dtype) for shape in trained],
        "optimizer": list(state_arrays(work, trained)),
    }
    activations = walk.micro()
    updating = len(walk.ledger.events)
    update(walk, trained)
    step = walk.ledger.events
    temporaries = {phase: peak - activations for phase, peak in walk.ledger.peaks.items()}
    evaluating = evaluation_walk(work) if evaluates else None
    evaluation = evaluating.evaluation() if evaluating else 0
    memory = Memory(
        **{name: sum(sizes) for name, sizes in static.items()},
        activations=activations,
        temporaries=temporaries,
        gaps=0,
        evaluation=0,
        attention=0 if layout.host else _cudnn_scratch(work),
        workspace=_workspace(walk, trained),
        context=0 if layout.host else CONTEXT_BYTES,
    )
    if layout.host:
        return memory._replace(evaluation=max(0, evaluation - memory.peak))
    # A recorded step has a pool of its own, where it runs once before the recording.
    shared = Pool()
    own = Pool() if graphs else shared
    for part in (step[updating:], step[:updating], step[:updating]):  # in which it is recorded
        own.run(part)
    held = own.held
    shared.run(evaluating.ledger.events if evaluating else ())
    pages = sum(taken(size) - size for sizes in static.values() for size in sizes)
    return memory._replace(
        gaps=held - memory.peak + pages, evaluation=shared.held - (0 if graphs else held)
    )


def evaluation_walk(work: Work) -> Walk:
    """The walk whose ``evaluation`` it is. Where products are bf16 for it alone, stored weights are
    decoded to memory that is there for it alone, if the recipe decodes none.
    """
    recipe = work.recipe
    if not (work.plain_evaluation and isinstance(recipe, Fp8Options | Nvfp4Settings)):
        return Walk(work)
    walk = Walk(work._replace(recipe=recipe.storage, plain_evaluation=False))
    for name, matrices in zip(Matrices._fields, zip(*Walk(work).of, strict=True), strict=True):
        w = next((w for w in matrices if w.stored), None)
        if w is not None and not any(map(decodes, matrices)):
            walk.ledger.make(f"decoded.{name}", w.outer + w.extra, w.inner + w.extra)
    return walk


def weight_arrays(walk: Walk) -> Iterator[int]:
    """Bytes of each array of weights: plain ones, widened ones, and those in codes."""
    layout = walk.work.layout
    embed, layers, norm, head = parameter_shapes(walk.work.config)
    inside: list[Any] = [shape for layer in layers for shape in layer if shape is not None]
    vectors = [shape for shape in inside if len(shape) == 1]
    tops: list[Any] = [shape for shape in (embed, norm, head) if shape is not None]
    yield from map(layout.bytes, tops + vectors)
    for matrices in walk.of:
        for w in matrices:
            yield from _matrix_arrays(layout, w)
            if walk.work.plain_evaluation and _kept_beside(w):
                yield _wide(layout, w)
    for matrices in zip(*walk.of, strict=True):
        if any(map(decodes, matrices)):  # what they are decoded to, one after another
            yield _wide(layout, matrices[0])
        cast = next((w for w in matrices if w.stored and (w.fp8 or w.nvfp4)), None)
        if cast is not None:  # and cast to, in one direction at a time
            yield from _cast_arrays(layout, cast)


def _kept_beside(w: Matrix) -> bool:
    """Whether a plain evaluation needs the matrix itself beside its casts."""
    return bool(w.fp8 or w.nvfp4) and not (w.trained or w.stored)


def _matrix_arrays(layout: Layout, w: Matrix) -> Iterator[int]:
    """A matrix, with what its recipe and its adapter's blocks take."""
    recipe = w.fp8 or w.nvfp4
    if recipe is None and w.stored is None:
        yield _wide(layout, w)
        return
    yield from (layout.bytes((w.extra, w.inner)), layout.bytes((w.outer, w.extra)))
    if w.stored is not None:
        for rows in w.pieces:
            yield from (layout.bytes(*each) for each in _stored_arrays(w.stored, rows, w.inner))
        if w.nvfp4 is not None:
            yield layout.bytes((1,), F32)
        return
    assert recipe is not None
    if w.trained or not (recipe.scope.products.forward and recipe.scope.products.dgrad):
        yield layout.bytes((w.outer, w.inner))
    yield from _cast_arrays(layout, w)


def _cast_arrays(layout: Layout, w: Matrix) -> Iterator[int]:
    """Both directions of a weight; of stored ones, which take turns, one."""
    if w.fp8 is not None:  # codes, and the scales of rows
        yield from (1 if w.stored else 2) * [layout.bytes((w.outer, w.inner), BYTE)]
        scales = (w.outer, w.inner) if w.fp8.scaling == "row" else ()
        yield from (layout.bytes((n,), F32) for n in scales)
    if w.nvfp4 is not None:  # values, and those for the other product where they differ
        values, same = layout.bytes((w.outer, w.inner)), w.stored or w.nvfp4.options.square
        yield from [values] if same else [values, values]
        if not w.stored:  # each has its own amax
            yield layout.bytes((1,), F32)


def _wide(layout: Layout, w: Matrix) -> int:
    return layout.bytes((w.outer + w.extra, w.inner + w.extra))


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
    if not work.cudnn or config.head_dim not in HEAD_DIMS:
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
        tables = 2 if work.plain_evaluation else 1
        held += tables * (layout.bytes((blocks, 7), INT64) + layout.bytes((chunks,), INT32))
    return held + WORKSPACE_BYTES
