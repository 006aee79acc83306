"""A cuDNN that computes attention in NumPy, through the addresses and strides it is given.

It takes the calls of kernels/attention_plans.py with the frontend's parameter names, and refuses
what the frontend refuses. So all that our side says of memory is put to the test without a card.
"""

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from surogate.kernels.arrays import BF16
from surogate.kernels.attention_plans import Card

Kind = enum.Enum("Kind", ["BFLOAT16", "FLOAT"])
DTYPES = {Kind.BFLOAT16: BF16, Kind.FLOAT: np.dtype("f4")}


class NotSupported(Exception):
    """Stands for cudnn.cudnnGraphNotSupportedError, which is no RuntimeError either."""


class Tensor:
    dim: list[int]
    stride: list[int]
    kind: Kind

    def __init__(self, graph: "Graph") -> None:
        self.graph = graph
        self.number = len(graph.tensors) + 1
        graph.tensors.append(self)

    def _set(self, name: str, value: Any) -> "Tensor":
        setattr(self, name, value)
        return self

    def set_output(self, value: bool) -> "Tensor":
        return self._set("output", value)

    def set_dim(self, value: list[int]) -> "Tensor":
        return self._set("dim", value)

    def set_stride(self, value: list[int]) -> "Tensor":
        return self._set("stride", value)

    def set_data_type(self, value: Kind) -> "Tensor":
        return self._set("kind", value)

    def get_uid(self) -> int:
        assert self.graph.built, "a number is given when the graph is built"
        return self.number


class Graph:
    def __init__(self, library: "Library") -> None:
        self.library, self.built = library, False
        self.tensors: list[Tensor] = []
        self.node: dict[str, Any] = {}
        self.backward = False

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Kind) -> Tensor:
        return Tensor(self).set_dim(dim).set_stride(stride).set_data_type(data_type)

    def sdpa(
        self, *, name, q, k, v, generate_stats, attn_scale, use_causal_mask=False,
        diagonal_alignment=None, diagonal_band_left_bound=None, diagonal_band_right_bound=None,
    ):  # fmt: skip
        assert generate_stats
        outputs = Tensor(self), Tensor(self)
        self.node = {**locals(), "o": outputs[0], "stats": outputs[1]}
        return list(outputs)

    def sdpa_backward(
        self, *, name, q, k, v, o, dO, stats, attn_scale, use_deterministic_algorithm,
        use_causal_mask=False, diagonal_alignment=None, diagonal_band_left_bound=None,
        diagonal_band_right_bound=None,
    ):  # fmt: skip
        assert use_deterministic_algorithm
        outputs = Tensor(self), Tensor(self), Tensor(self)
        self.node = {**locals(), **dict(zip(("dq", "dk", "dv"), outputs, strict=True))}
        self.backward = True
        return list(outputs)

    def validate(self) -> None:
        if self.library.refusal:
            raise self.library.refusal
        node = self.node
        assert node["use_causal_mask"] != (node["diagonal_band_right_bound"] == 0)
        if node["q"].dim[2] == 1:
            raise NotSupported("a sequence of one token is not supported")
        for name in ("q", "k", "v", "o"):
            assert node[name].stride[3] == 1

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def check_support(self) -> None:
        pass

    def build_plans(self) -> None:
        self.built = True
        self.library.builds += 1

    def get_workspace_size(self) -> int:
        batch, heads, seq, _ = self.node["q"].dim
        return batch * heads * seq * seq * 2 if self.backward else 16

    def execute(self, pack: dict[int, int], workspace: int, handle: int) -> None:
        wanted = {t.number for t in self.tensors}
        assert set(pack) == wanted, f"addresses of {set(pack)}, wanted {wanted}"
        assert workspace and handle == self.library.HANDLE
        self.library.executions += 1
        for row in range(self.node["q"].dim[0]):
            self._attend(pack, row)

    def _attend(self, pack: dict[int, int], row: int) -> None:
        node = self.node

        def view(name: str) -> np.ndarray:
            return _row(node[name], pack, row)

        q, k, v = (view(name).astype("f4") for name in "qkv")
        group, length = q.shape[0] // k.shape[0], q.shape[1]
        k, v = (np.repeat(x, group, 0) for x in (k, v))
        i, j = np.arange(length)[:, None], np.arange(length)
        window = node["diagonal_band_left_bound"] or length
        s = node["attn_scale"] * q @ k.transpose(0, 2, 1)
        s[:, (j > i) | (j <= i - window)] = -np.inf
        if not self.backward:
            top = s.max(-1, keepdims=True)
            lse = top + np.log(np.exp(s - top).sum(-1, keepdims=True))
            view("stats")[...] = lse
            view("o")[...] = np.exp(s - lse) @ v
            return
        o, do = view("o").astype("f4"), view("dO").astype("f4")
        p = np.exp(s - view("stats"))
        ds = p * (do @ v.transpose(0, 2, 1) - (o * do).sum(-1, keepdims=True))
        ds *= node["attn_scale"]
        view("dq")[...] = ds @ k
        for name, whole in (("dk", ds.transpose(0, 2, 1) @ q), ("dv", p.transpose(0, 2, 1) @ do)):
            view(name)[...] = whole.reshape(-1, group, *whole.shape[1:]).sum(1)


def _at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: Kind) -> np.ndarray:
    size = DTYPES[kind].itemsize
    extent = size * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
    memory = (ctypes.c_byte * extent).from_address(address)
    return np.ndarray(shape, DTYPES[kind], memory, strides=[s * size for s in strides])


def _row(tensor: Tensor, pack: dict[int, int], row: int) -> np.ndarray:
    """[heads, seq, columns] of a row."""
    address = pack[tensor.number] + row * tensor.stride[0] * DTYPES[tensor.kind].itemsize
    return _at(address, tuple(tensor.dim[1:]), tuple(tensor.stride[1:]), tensor.kind)


class Library:
    """What ``import cudnn`` gives."""

    HANDLE = 7
    __version__ = "1.18.0"
    data_type, cudnnGraphNotSupportedError = Kind, NotSupported
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT")

    def __init__(self, version: int = 91900) -> None:
        self.version, self.builds, self.executions = version, 0, 0
        self.refusal: Exception | None = None
        self.streams: list[int] = []

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> int:
        return self.HANDLE

    def set_stream(self, *, handle: int, stream: int) -> None:
        self.streams.append(stream)

    def pygraph(self, *, io_data_type, intermediate_data_type, compute_data_type, handle) -> Graph:
        assert io_data_type is Kind.BFLOAT16 and handle == self.HANDLE
        assert intermediate_data_type is compute_data_type is Kind.FLOAT
        return Graph(self)


class Memory:
    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, "u1")
        self.ptr = self.bytes.ctypes.data


class Stream:
    def __init__(self, ptr: int = 1) -> None:
        self.ptr, self.capturing = ptr, False

    def is_capturing(self) -> bool:
        return self.capturing


class HostCard(Card):
    """A card that is NumPy."""

    def __init__(self) -> None:
        self.now, self.device = Stream(), 0

    def device_of(self, x: Any) -> int:
        return 0

    def current(self) -> int:
        return self.device

    def address(self, x: Any) -> int:
        return x.ctypes.data

    def stream(self) -> Stream:
        return self.now

    def allocate(self, size: int) -> Memory:
        # Graphs of this file do not use it: a page stands for gigabytes.
        return Memory(min(size, 4096))
