"""Recorded graphs: memsets become kernels that write the same."""

import numpy as np
import pytest

from surogate.kernels import graph_nodes
from surogate.kernels.nvrtc import THREADS
from tests.oracle import to_device, to_host


@pytest.mark.parametrize("size,value", [(1, 0xAB), (2, 0xABCD), (4, 0x80000001)])
@pytest.mark.parametrize("count", [1, 255, 700])
@pytest.mark.parametrize(
    "device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_fill_writes_every_element_and_no_other(device, size, value, count):
    dtype = np.dtype(f"u{size}")
    out = to_device(np.full(count + 1, 7, dtype), device)
    kind = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t"}[size]
    args = [out, np.uint32(value), np.int64(count)]
    graph_nodes.SOURCE.launch("fill", (kind,), 2, THREADS, args)
    got = to_host(out)
    assert (got[:-1] == value).all() and got[-1] == 7


@pytest.mark.gpu
def test_a_captured_step_has_no_memset_and_replays_as_it_was_recorded():
    import cupy

    from surogate.kernels.capture import capture

    x = cupy.arange(1000, dtype="f4")
    counts = cupy.zeros(3, "i4")

    def step():
        total = cupy.zeros(1000, "f4")  # a memset
        total += x
        bytes_ = cupy.empty(5, "u1")
        bytes_.data.memset_async(0x81, 5, cupy.cuda.get_current_stream())
        counts.fill(0)
        return total, bytes_, counts + 1

    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        step()
        recorded = stream.end_capture()
        kinds = [graph_nodes.kind_of(node) for node in graph_nodes.nodes_of(recorded.graph)]
        assert kinds.count(graph_nodes.MEMSET) == 3
        graph_nodes.replace_memsets(recorded.graph)
        after = [graph_nodes.kind_of(node) for node in graph_nodes.nodes_of(recorded.graph)]
        assert graph_nodes.MEMSET not in after and len(after) == len(kinds)

        replay = capture(step)
        for turn in range(3):
            x[:] = turn
            counts.fill(5)
            total, bytes_, ones = replay()
            stream.synchronize()
            assert (total == turn).all() and (bytes_ == 0x81).all() and (ones == 1).all()
