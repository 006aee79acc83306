"""Plans of cuDNN for attention: graphs, the scratch memory they run in, and where their arrays lie.

attention_cudnn.py says what they are for. A plan is built when a problem is met for the first time
(about a second) and never while a stream is being captured. Each stream has scratch memory of its
own, as large as its largest plan wants.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from surogate.kernels.arrays import require

INSTALL = "install surogate[cuda13], or surogate[cuda12] for an older driver"


class Strides(NamedTuple):
    """Elements from a token to the next in each array; 0 for one that the problem lacks."""

    q: int
    k: int
    v: int
    o: int
    do: int = 0
    dq: int = 0
    dk: int = 0
    dv: int = 0


class Problem(NamedTuple):
    """What a plan is built for."""

    device: int
    backward: bool
    rows: int
    seq: int  # tokens of a row
    heads: int
    kv_heads: int
    head_dim: int
    strides: Strides
    scale: float
    window: int | None
    scratch_limit: int  # bytes

    def heads_of(self, name: str) -> int:
        """Heads of an array."""
        return self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads

    def layout(self, name: str, parts: int) -> tuple[list[int], list[int]]:
        """Sizes and strides of one of ``parts`` groups of heads, in cuDNN's order of axes."""
        heads = self.heads_of(name) // parts
        if name == "stats":
            return [self.rows, heads, self.seq, 1], [self.heads * self.seq, self.seq, 1, 1]
        stride = getattr(self.strides, name)
        sizes = [self.rows, heads, self.seq, self.head_dim]
        return sizes, [self.seq * stride, self.head_dim, stride, 1]

    def group_bytes(self, name: str, parts: int) -> int:
        """Bytes from a group of heads to the next."""
        heads, (_, strides) = self.heads_of(name) // parts, self.layout(name, parts)
        return heads * strides[1] * (4 if name == "stats" else 2)


class Card:
    """What this file asks of CuPy."""

    def device_of(self, x: Any) -> int:
        """The card that holds an array."""
        return x.data.device_id

    def current(self) -> int:
        """The current card."""
        import cupy

        return cupy.cuda.runtime.getDevice()

    def address(self, x: Any) -> int:
        """Of an array's first element."""
        return x.data.ptr

    def stream(self) -> Any:
        """The current stream."""
        import cupy

        return cupy.cuda.get_current_stream()

    def allocate(self, size: int) -> Any:
        """Memory outside all pools, since captured graphs keep its address."""
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)


class State:
    """What lives as long as the process. Tests put their own in its place."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.plans: dict[Problem, Plan | str] = {}  # a text says why there is none
        self.handles: dict[int, int] = {}  # by card
        self.scratch: dict[tuple[int, int], tuple[Any, int]] = {}  # by card and stream
        self.outgrown: list[tuple[Any, int]] = []  # graphs may still use it


@functools.cache
def library() -> Any:
    """cuDNN's frontend. Raises ImportError that says what to install."""
    try:
        import cudnn
    except ImportError as error:
        raise ImportError(
            f"attention: cuDNN needs nvidia-cudnn-frontend ({error}); {INSTALL}"
        ) from error
    return cudnn


@dataclass(frozen=True, slots=True)
class Plan:
    """A built graph, which computes one of ``parts`` groups of heads."""

    graph: Any
    problem: Problem
    parts: int
    scratch: int  # bytes
    tensors: dict[str, int]  # cuDNN's number of each array

    def run(self, arrays: dict[str, Any]) -> None:
        """Launches it on the current stream."""
        address, stream, device = state.card.address, state.card.stream(), self.problem.device
        scratch, handle = _scratch_of(device, stream, self.scratch), state.handles[device]
        library().set_stream(handle=handle, stream=stream.ptr)
        steps = [
            (number, address(arrays[name]), self.problem.group_bytes(name, self.parts))
            for name, number in self.tensors.items()
        ]
        for part in range(self.parts):
            pack = {number: first + part * step for number, first, step in steps}
            self.graph.execute(pack, scratch, handle=handle)


state = State(Card())


def plan_of(problem: Problem) -> Plan | str:
    """The plan of a problem, or a text that says why cuDNN has none.

    Raises RuntimeError when it would have to be built while the current stream is being captured.
    """
    plan = state.plans.get(problem)
    if plan is None:
        plan = state.plans[problem] = _new_plan(problem)
    return plan


def scratch_bytes() -> int:
    """Scratch memory that this process holds for cuDNN, on all cards and streams."""
    return sum(size for _, size in [*state.scratch.values(), *state.outgrown])


def release_scratch() -> None:
    """Gives scratch memory back. Graphs that were captured with it must not be replayed."""
    state.scratch.clear()
    state.outgrown.clear()


@contextmanager
def borrowed_scratch() -> Iterator[None]:
    """Gives back what scratch memory is taken inside: trials, of which no graph is captured."""
    scratch, outgrown = dict(state.scratch), list(state.outgrown)
    try:
        yield
    finally:
        state.scratch, state.outgrown = scratch, outgrown


def _refuse_capture(stream: Any, what: str) -> None:
    if stream.is_capturing():
        raise RuntimeError(
            f"attention: {what} while its stream is being captured into a graph: "
            "run the same step once on this stream before capturing it"
        )


def _scratch_of(device: int, stream: Any, size: int) -> int:
    """Address of at least ``size`` bytes that only this stream uses."""
    key = (device, stream.ptr)
    held = state.scratch.get(key)
    if held is None or held[1] < size:
        _refuse_capture(stream, "first use of cuDNN's scratch memory")
        if held is not None:
            state.outgrown.append(held)
        held = state.scratch[key] = (state.card.allocate(max(size, 1)), max(size, 1))
    return held[0].ptr


def _new_plan(problem: Problem) -> Plan | str:
    """A plan in as few groups of heads as its scratch memory allows, or why there is none."""
    _refuse_capture(state.card.stream(), f"first {problem}")
    cudnn, device, limit = library(), state.card.current(), problem.scratch_limit
    require(
        problem.device == device,
        f"attention: arrays are on card {problem.device}, the current one is {device}",
    )
    if device not in state.handles:
        state.handles[device] = cudnn.create_handle()
    least, scratch = 1, 0
    for parts in range(1, problem.kv_heads + 1):
        if problem.kv_heads % parts or parts < least:
            continue
        try:
            plan = _build(cudnn, problem, parts)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            return f"attention: cuDNN has no plan for it: {' '.join(str(error).split())[:300]}"
        if plan.scratch <= limit:
            return plan
        scratch, least = plan.scratch, -(-plan.scratch * parts // limit)
    return (
        f"attention: cuDNN's {'backward' if problem.backward else 'forward'} of {problem.rows} "
        f"rows of {problem.seq} tokens takes {scratch / 2**30:.1f} GiB of scratch "
        f"memory, over the limit of {limit / 2**30:.1f} GiB"
    )


class _Drawing:
    """A graph while its tensors are declared."""

    def __init__(self, cudnn: Any, problem: Problem, parts: int) -> None:
        self.kinds, self.problem, self.parts = cudnn.data_type, problem, parts
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=state.handles[problem.device],
        )
        self.tensors: dict[str, Any] = {}

    def _kind(self, name: str) -> Any:
        return self.kinds.FLOAT if name == "stats" else self.kinds.BFLOAT16

    def given(self, name: str) -> Any:
        """Declares an input."""
        sizes, strides = self.problem.layout(name, self.parts)
        tensor = self.graph.tensor(name=name, dim=sizes, stride=strides, data_type=self._kind(name))
        self.tensors[name] = tensor
        return tensor

    def wanted(self, name: str, tensor: Any) -> None:
        """Says where a result goes."""
        sizes, strides = self.problem.layout(name, self.parts)
        tensor.set_output(True).set_data_type(self._kind(name)).set_dim(sizes).set_stride(strides)
        self.tensors[name] = tensor

    def settings(self, cudnn: Any) -> dict[str, Any]:
        """What forward and backward share: scale and masks."""
        settings: dict[str, Any] = {"attn_scale": self.problem.scale}
        if self.problem.window is None:
            settings["use_causal_mask"] = True
        else:
            settings["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
            settings["diagonal_band_left_bound"] = self.problem.window  # counts the query too
            settings["diagonal_band_right_bound"] = 0
        return settings


def _build(cudnn: Any, problem: Problem, parts: int) -> Plan:
    drawing = _Drawing(cudnn, problem, parts)
    (_draw_backward if problem.backward else _draw_forward)(drawing, drawing.settings(cudnn))
    graph = drawing.graph
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return Plan(
        graph,
        problem,
        parts,
        int(graph.get_workspace_size()),
        {name: tensor.get_uid() for name, tensor in drawing.tensors.items()},
    )


def _draw_forward(drawing: _Drawing, settings: dict[str, Any]) -> None:
    q, k, v = (drawing.given(name) for name in ("q", "k", "v"))
    o, stats = drawing.graph.sdpa(name="forward", q=q, k=k, v=v, generate_stats=True, **settings)
    drawing.wanted("o", o)
    drawing.wanted("stats", stats)


def _draw_backward(drawing: _Drawing, settings: dict[str, Any]) -> None:
    q, k, v, o, do, stats = (drawing.given(name) for name in ("q", "k", "v", "o", "do", "stats"))
    results = drawing.graph.sdpa_backward(
        name="backward",
        q=q,
        k=k,
        v=v,
        o=o,
        dO=do,
        stats=stats,
        use_deterministic_algorithm=True,
        **settings,
    )
    for name, tensor in zip(("dq", "dk", "dv"), results, strict=True):
        drawing.wanted(name, tensor)
