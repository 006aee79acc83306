"""Device memory of a training step, from shapes alone: nothing is read, allocated or computed.

What stays for the whole run (weights, gradients, optimizer) is a sum over leaves. What a micro-batch
needs is found by walking through it as models/dense.py does and keeping a ledger of the arrays that
live: ``Ledger`` has the peak, and models/walk.py the walk.

An array takes its bytes rounded up to the unit of the device's allocator: 512 in CuPy's pool.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels.arrays import BF16, F32
from surogate.kernels.linear import LoRA
from surogate.models.config import ModelConfig, parameter_shapes
from surogate.models.lora import LoraSpec, Part, build_adapter
from surogate.models.stack import Recompute

Shape = tuple[int, ...]
INT32 = np.dtype(np.int32)


class Layout(NamedTuple):
    """How arrays lie on a kind of device."""

    compute: np.dtype  # of weights and activations
    unit: int  # bytes that an allocation is rounded up to
    host: bool  # the host versions run, with temporaries of their own

    def bytes(self, shape: Shape, dtype: np.dtype | None = None) -> int:
        """Bytes of an array; without ``dtype``, of the dtype that the device computes in."""
        size = math.prod(shape) * (dtype or self.compute).itemsize
        return -(-size // self.unit) * self.unit


CARD = Layout(BF16, 512, host=False)
HOST = Layout(F32, 1, host=True)


class Work(NamedTuple):
    """What a step computes, and in what."""

    config: ModelConfig
    lora: LoraSpec | None
    layout: Layout
    tokens: int  # of a micro-batch
    recompute: Recompute
    chunk: int | None  # tokens whose logits exist at a time; None: chosen by size
    gradient_dtype: np.dtype
    moment_dtype: np.dtype
    masters: bool  # float32 copies of what is trained


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


class Ledger:
    """Live arrays by name, and for each phase of a program the most bytes that lived at a time."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arrays: dict[str, int] = {}
        self.live = 0
        self.phase = ""
        self.peaks: dict[str, int] = {}

    def make(self, name: str, *shape: int, dtype: np.dtype | None = None) -> None:
        """An array comes to life."""
        assert name not in self.arrays, f"{name} is alive"
        self.arrays[name] = size = self.layout.bytes(shape, dtype)
        self.live += size
        self.peaks[self.phase] = max(self.live, self.peaks.get(self.phase, 0))

    def drop(self, *names: str) -> None:
        """Arrays die."""
        for name in names:
            self.live -= self.arrays.pop(name)

    def drop_all(self, prefix: str) -> None:
        """Every array dies whose name begins so."""
        self.drop(*[name for name in self.arrays if name.startswith(prefix)])

    def scratch(self, *shape: int, dtype: np.dtype | None = None) -> None:
        """An array that lives within one op."""
        self.make("scratch", *shape, dtype=dtype)
        self.drop("scratch")

    def host_scratch(self, *shape: int, copies: int = 1) -> None:
        """What the host version of an op makes and a kernel does not."""
        if self.layout.host:
            self.scratch(copies, *shape)


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
                yield from found
