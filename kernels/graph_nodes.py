"""Recorded graphs without memsets.

A driver launches a graph that is a chain of kernels in a few microseconds, however long it is. One
memset among them and it goes through all nodes again at each launch: on an H200, 900 kernels take
11 us of host time, with 30 memsets among them 62 us. cuBLASLt and ``zeros`` record memsets; here
each becomes a kernel that writes the same.
"""

import ctypes
import functools
from typing import Any

from surogate.kernels.nvrtc import THREADS, Source

MOST_BLOCKS = 1024
MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
_ELEMENTS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t"}  # by bytes

SOURCE = Source("fill", {"fill": [(name,) for name in _ELEMENTS.values()]})


class _MemsetParams(ctypes.Structure):
    _fields_ = [
        ("dst", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("elementSize", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _KernelParams(ctypes.Structure):
    _fields_ = [
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
    ]


class Executable:
    """A graph that is ready to launch."""

    def __init__(self, graph: Any) -> None:
        self._exec = ctypes.c_void_p()
        _call(
            "cuGraphInstantiateWithFlags", ctypes.byref(self._exec), _handle(graph), _unsigned64(0)
        )

    def upload(self, stream: Any) -> None:
        """Brings it to the card, before the first launch."""
        _call("cuGraphUpload", self._exec, _handle(stream.ptr))

    def launch(self, stream: Any) -> None:
        """Enqueues it."""
        _call("cuGraphLaunch", self._exec, _handle(stream.ptr))

    def __del__(self) -> None:
        if self._exec:
            _driver().cuGraphExecDestroy(self._exec)


def executable(recorded: Any) -> Executable:
    """What a capture of CuPy recorded, its memsets replaced by kernels."""
    replace_memsets(recorded.graph)
    return Executable(recorded.graph)


def replace_memsets(graph: int) -> None:
    """Puts a kernel where a graph has a memset of one row."""
    for node in nodes_of(graph):
        if kind_of(node) == MEMSET:
            _replace(graph, node)


def nodes_of(graph: int) -> list[int]:
    """Handles of the nodes."""
    return _list("cuGraphGetNodes", graph)


def kind_of(node: int) -> int:
    """The CUgraphNodeType of a node."""
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", _handle(node), ctypes.byref(kind))
    return kind.value


def _replace(graph: int, node: int) -> None:
    memset = _MemsetParams()
    _call("cuGraphMemsetNodeGetParams", _handle(node), ctypes.byref(memset))
    if memset.height != 1:
        return
    count = memset.width
    values = (
        ctypes.c_uint64(memset.dst),
        ctypes.c_uint(memset.value),
        ctypes.c_int64(count),
    )
    arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    blocks = min(MOST_BLOCKS, -(-count // THREADS))
    function = SOURCE.function("fill", (_ELEMENTS[memset.elementSize],))
    kernel = _KernelParams(
        function.ptr, (blocks, 1, 1), (THREADS, 1, 1), 0, arguments, ctypes.c_void_p()
    )
    before = _list("cuGraphNodeGetDependencies", node)
    after = _list("cuGraphNodeGetDependentNodes", node)
    made = ctypes.c_void_p()
    _call(
        "cuGraphAddKernelNode",
        ctypes.byref(made),
        _handle(graph),
        _handles(before),
        ctypes.c_size_t(len(before)),
        ctypes.byref(kernel),
    )
    if after:
        _call(
            "cuGraphAddDependencies",
            _handle(graph),
            _handles([made.value] * len(after)),
            _handles(after),
            ctypes.c_size_t(len(after)),
        )
    _call("cuGraphDestroyNode", _handle(node))


def _list(name: str, owner: int) -> list[int]:
    """What a function of the driver lists, which first says how many there are."""
    count = ctypes.c_size_t()
    _call(name, _handle(owner), None, ctypes.byref(count))
    found = (ctypes.c_void_p * count.value)()
    if count.value:
        _call(name, _handle(owner), found, ctypes.byref(count))
    return list(found)


def _handles(nodes: list[Any]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)


_handle, _unsigned64 = ctypes.c_void_p, ctypes.c_uint64


def _call(name: str, *arguments: Any) -> None:
    """A function of the driver under its first name, whose arguments stay as they are in newer
    drivers. Raises RuntimeError with the driver's code.
    """
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: the CUDA driver returned error {code}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
