"""Plans for cuBLASLt: the descriptors and the algorithm of each product that a run meets.

The algorithm is the fastest by measurement among those that cuBLASLt proposes (on an H200 its own
first choice is up to 20 % slower than the best), provided that it gives the same bits twice. The
last measurements of a long product keep the card at work, as training does: what is fastest on a
cool card can be slower where power bounds the clock. The algorithm is kept on disk by card and
library version, so that later runs use it too and repeat bit for bit.

Split sums are reduced in float32 or not at all: never in the type of the output, never in the order
of arrival. Each stream has a workspace of its own, so that products of two streams cannot meet.
"""

import ctypes
import hashlib
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from surogate.kernels.arrays import require
from surogate.kernels.choice import by_speed
from surogate.kernels.nvrtc import cache_directory

WORKSPACE_BYTES = 64 << 20  # more than the L2 cache of an H200, so that clearing it cools the cache
CANDIDATES = 16  # algorithms asked of cuBLASLt
LONG_SECONDS = 0.5e-3  # what products take that bring a card to its limit of power
BUSY_SECONDS = 10e-3  # of runs of such a finalist, one after another
COMPARED_BYTES = 64 << 20  # of a result, when two runs are compared

FOUR_BITS = "float4_e2m1fn"
CUDA_TYPES = {  # cudaDataType_t
    "float32": 0, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29, FOUR_BITS: 33,
}  # fmt: skip
COMPUTE_32F = 68  # cublasComputeType_t: sums in float32; float32 input is not cut to TF32


class Scaling(NamedTuple):
    """Of a and b as codes of 8 or 4 bits: their types, and what each is multiplied by.

    An inverse is one number at an address of 16 bytes, or one for each row of out (a) and each
    column (b); of 4-bit codes, E4M3 scales of 16 values in tiles (kernels/nvfp4.py). ``fast`` lets
    tensor cores add up in fewer bits than float32 has.
    """

    a_type: str
    b_type: str
    a_inverse: Any
    b_inverse: Any
    fast: bool

    @property
    def by_row(self) -> bool:
        """Whether there are numbers for each row and column."""
        return self.a_inverse.size > 1

    def kind(self) -> tuple[str, str, bool, bool]:
        """What an algorithm depends on."""
        return self.a_type, self.b_type, self.by_row, self.fast


class Call(NamedTuple):
    """The arrays of one product on a card; ``added`` is c, or out itself when accumulating."""

    a: Any
    b: Any
    added: Any
    bias: Any
    out: Any
    transpose_a: bool
    transpose_b: bool
    scaling: Scaling | None = None
    device_alpha: bool = False  # alpha is an array

    def alignment(self) -> int:
        """The power of two, at most 16, that divides every address."""
        bits = self.a.data.ptr | self.b.data.ptr | self.out.data.ptr | 16
        if self.added is not None:
            bits |= self.added.data.ptr
        if self.bias is not None:
            bits |= self.bias.data.ptr
        return bits & -bits

    def key(self) -> Any:
        """Whatever decides the plan, as cheap as it can be: this runs at every call."""
        a, b, added, bias, out, transpose_a, transpose_b, scaling, device_alpha = self
        return (
            a.data.device_id, a.shape, a.strides, a.dtype.num, b.shape, b.strides, b.dtype.num,
            out.shape, out.strides, out.dtype.num, transpose_a, transpose_b,
            added is not None and (added is out or (added.shape, added.strides, added.dtype.num)),
            bias is not None and (bias.shape, bias.strides, bias.dtype.num), self.alignment(),
            scaling and scaling.kind(), device_alpha,
        )  # fmt: skip


class Matrix(NamedTuple):
    """Type and layout of an operand. ``leading`` is the distance of its rows in elements."""

    dtype: str
    rows: int
    columns: int
    leading: int

    @classmethod
    def of(cls, name: str, x: Any) -> "Matrix":
        """The layout of an array whose rows hold neighbouring elements; ValueError for others."""
        rows, columns = x.shape
        leading = columns if rows == 1 else x.strides[0] // x.itemsize
        require(
            (columns == 1 or x.strides[1] == x.itemsize) and leading >= columns,
            f"matmul: rows of {name} must hold neighbouring elements, got strides {x.strides} for "
            f"{x.shape} of {x.dtype}; of a transposed view, pass the array itself and transpose_*",
        )
        return cls(str(x.dtype), rows, columns, leading)

    def coded(self, dtype: str) -> "Matrix":
        """Bytes as codes of a type; two of 4 bits share a byte."""
        each = 2 if dtype == FOUR_BITS else 1
        return Matrix(dtype, self.rows, each * self.columns, each * self.leading)


class Problem(NamedTuple):
    """What an algorithm is chosen for; also its name on disk."""

    a: Matrix
    b: Matrix
    added: Matrix | None
    out: Matrix
    in_place: bool
    bias: bool
    transpose_a: bool
    transpose_b: bool
    alignment: int
    scaling: tuple[str, str, bool, bool] | None

    @classmethod
    def of(cls, call: Call) -> "Problem":
        """The problem that a call poses."""
        a, b, added, bias, out, transpose_a, transpose_b, scaling, _ = call
        require(
            bias is None or bias.flags.c_contiguous,
            "matmul: bias must be contiguous, got a strided view",
        )
        left, right = Matrix.of("a", a), Matrix.of("b", b)
        if scaling is not None:
            left, right = left.coded(scaling.a_type), right.coded(scaling.b_type)
        return cls(
            left, right, None if added is None else Matrix.of("c", added), Matrix.of("out", out),
            added is out, bias is not None, transpose_a, transpose_b, call.alignment(),
            scaling and scaling.kind(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Descriptors and algorithm of one problem on one card.

    To cuBLASLt, which is column-major, a row-major matrix is its transpose. It computes
    out^T = op(b)^T op(a)^T, so that its A is our b and its B our a.
    """

    lt: Any
    handle: int
    operation: int
    layouts: tuple[int, int, int, int]  # b, a, added, out
    algorithm: np.ndarray  # 64 opaque bytes
    algorithm_address: int

    def run(self, call: Call, alpha: Any, beta: float = 1.0) -> None:
        """Launches the product on the current stream. ``beta`` multiplies what is added."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        workspace = _workspaces.get((call.a.data.device_id, stream.ptr))
        if workspace is None:
            workspace = _add_workspace(call.a.data.device_id, stream)
        if call.bias is not None:
            _point_at_bias(self.lt, self.operation, call.bias)
        if call.scaling is not None:
            _point_at_inverses(self.lt, self.operation, call.scaling)
        layout_b, layout_a, layout_added, layout_out = self.layouts
        out = call.out.data.ptr
        added, beta = (out, 0.0) if call.added is None else (call.added.data.ptr, beta)
        if call.device_alpha:
            factors = (alpha.data.ptr, _device_address(call.a.data.device_id, beta))
        else:
            factors = (_address(alpha), _address(beta))
        self.lt.matmul(
            self.handle, self.operation, factors[0], call.b.data.ptr, layout_b,
            call.a.data.ptr, layout_a, factors[1], added, layout_added, out, layout_out,
            self.algorithm_address, workspace.ptr, WORKSPACE_BYTES, stream.ptr,
        )  # fmt: skip

    def using(self, algorithm: np.ndarray) -> "Plan":
        """The same problem with another algorithm."""
        return Plan(
            self.lt, self.handle, self.operation, self.layouts, algorithm, algorithm.ctypes.data
        )


plans: dict[Any, Plan] = {}  # by Call.key()
_handles: dict[int, int] = {}
_workspaces: dict[tuple[int, int], Any] = {}
_scalars: dict[float, ctypes.c_float] = {}
_device_scalars: dict[tuple[int, float], Any] = {}


def add_plan(key: Any, call: Call, alpha: Any) -> Plan:
    """Finds the algorithm of a product that is met for the first time. ``out`` may be overwritten.

    Raises RuntimeError when the current stream is being captured, ImportError without nvmath.
    """
    plan = plans[key] = _new_plan(call, Problem.of(call), alpha)
    return plan


def _address(value: float) -> int:
    """Where a float32 lies that holds ``value`` for as long as the process lives."""
    scalar = _scalars.get(value)
    if scalar is None:
        scalar = _scalars[value] = ctypes.c_float(value)
    return ctypes.addressof(scalar)


def _device_address(device: int, value: float) -> int:
    """The same on a card."""
    import cupy

    scalar = _device_scalars.get((device, value))
    if scalar is None:
        _refuse_capture(cupy.cuda.get_current_stream(), f"first product with beta {value}")
        scalar = _device_scalars[device, value] = cupy.full(1, value, cupy.float32)
    return scalar.data.ptr


def _library() -> Any:
    try:
        import nvmath.bindings.cublasLt as lt
    except ImportError as error:
        raise ImportError(
            f"matmul: products on a card need nvmath-python ({error}): "
            "install surogate[cuda13], or surogate[cuda12] for an older driver"
        ) from error
    return lt


def _refuse_capture(stream: Any, what: str) -> None:
    if stream.is_capturing():
        raise RuntimeError(
            f"matmul: {what} while its stream is being captured into a graph: "
            "run the same step once on this stream before capturing it"
        )


def _add_workspace(device: int, stream: Any) -> Any:
    """Scratch memory of a stream, outside all pools since captured graphs keep its address."""
    import cupy

    _refuse_capture(stream, "first product on this stream")
    workspace = cupy.cuda.MemoryPointer(cupy.cuda.Memory(WORKSPACE_BYTES), 0)
    _workspaces[device, stream.ptr] = workspace
    return workspace


def _new_plan(call: Call, problem: Problem, alpha: Any) -> Plan:
    import cupy

    _refuse_capture(cupy.cuda.get_current_stream(), f"first product of {problem}")
    lt, device = _library(), call.a.data.device_id
    current = cupy.cuda.runtime.getDevice()
    require(device == current, f"matmul: arrays are on card {device}, the current one is {current}")
    if device not in _handles:
        _handles[device] = lt.create()
    algorithm = np.zeros(1, lt.matmul_heuristic_result_dtype["algo"])
    plan = Plan(
        lt, _handles[device], _operation(lt, problem, call), _layouts(lt, problem),
        algorithm, algorithm.ctypes.data,
    )  # fmt: skip
    path = _path(lt, device, problem)
    kept = _load(plan, path)
    if kept is None:
        tuned, microseconds = _tune(plan, problem, call, alpha)
        if not path.exists():  # else another process was first: agree with it
            _save(tuned, path, problem, microseconds)
        kept = _load(plan, path) or tuned
    return kept


def _set(setter: Callable[..., None], target: int, attribute: Any, value: int, dtype: Any) -> None:
    buffer = np.array([value], dtype)
    setter(target, int(attribute), buffer.ctypes.data, buffer.nbytes)


def _point_at_bias(lt: Any, operation: int, bias: Any) -> None:
    attribute = lt.MatmulDescAttribute.BIAS_POINTER
    _set(lt.matmul_desc_set_attribute, operation, attribute, bias.data.ptr, np.uint64)


def _point_at_inverses(lt: Any, operation: int, scaling: Scaling) -> None:
    """cuBLASLt's A is our b."""
    attribute, put = lt.MatmulDescAttribute, lt.matmul_desc_set_attribute
    _set(put, operation, attribute.A_SCALE_POINTER, scaling.b_inverse.data.ptr, np.uint64)
    _set(put, operation, attribute.B_SCALE_POINTER, scaling.a_inverse.data.ptr, np.uint64)


def _operation(lt: Any, problem: Problem, call: Call) -> int:
    bias, scaling = call.bias, call.scaling
    operation = lt.matmul_desc_create(COMPUTE_32F, CUDA_TYPES["float32"])
    attribute = lt.MatmulDescAttribute
    put = lt.matmul_desc_set_attribute
    _set(put, operation, attribute.TRANSA, problem.transpose_b, np.int32)
    _set(put, operation, attribute.TRANSB, problem.transpose_a, np.int32)
    if bias is not None:
        _set(put, operation, attribute.EPILOGUE, lt.Epilogue.BIAS, np.uint32)
        _point_at_bias(lt, operation, bias)  # the heuristics read its alignment off this address
    if call.device_alpha:
        _set(put, operation, attribute.POINTER_MODE, lt.PointerMode.DEVICE, np.int32)
    if scaling is not None:
        _set(put, operation, attribute.FAST_ACCUM, scaling.fast, np.int8)
        if scaling.by_row:
            modes = lt.MatmulMatrixScale
            mode = modes.VEC16_UE4M3 if scaling.a_type == FOUR_BITS else modes.OUTER_VEC_32F
            _set(put, operation, attribute.A_SCALE_MODE, mode, np.int32)
            _set(put, operation, attribute.B_SCALE_MODE, mode, np.int32)
        _point_at_inverses(lt, operation, scaling)
    return operation


def _layouts(lt: Any, problem: Problem) -> tuple[int, int, int, int]:
    def layout(matrix: Matrix) -> int:
        return lt.matrix_layout_create(
            CUDA_TYPES[matrix.dtype], matrix.columns, matrix.rows, matrix.leading
        )

    out = layout(problem.out)
    added = out if problem.added is None else layout(problem.added)
    return layout(problem.b), layout(problem.a), added, out


def _candidates(plan: Plan, problem: Problem) -> list[Plan]:
    """Plans with the algorithms that cuBLASLt proposes, its favourite first."""
    lt = plan.lt
    preference = lt.matmul_preference_create()
    attribute = lt.MatmulPreferenceAttribute
    put = lt.matmul_preference_set_attribute
    _set(put, preference, attribute.MAX_WORKSPACE_BYTES, WORKSPACE_BYTES, np.uint64)
    scheme = lt.ReductionScheme.COMPUTE_TYPE  # allows NONE too, which is no bit
    _set(put, preference, attribute.REDUCTION_SCHEME_MASK, scheme, np.uint32)
    for operand in "ABCD":
        name = getattr(attribute, f"MIN_ALIGNMENT_{operand}_BYTES")
        _set(put, preference, name, problem.alignment, np.uint32)
    found = np.zeros(CANDIDATES, lt.matmul_heuristic_result_dtype)
    count = np.zeros(1, np.int32)
    try:
        lt.matmul_algo_get_heuristic(
            plan.handle, plan.operation, *plan.layouts, preference, CANDIDATES,
            found.ctypes.data, count.ctypes.data,
        )  # fmt: skip
    except lt.cuBLASLtError as error:
        raise RuntimeError(f"matmul: cuBLASLt has no algorithm for {problem}: {error}") from error
    finally:
        lt.matmul_preference_destroy(preference)
    usable = [i for i in range(int(count[0])) if found["state"][i] == 0]
    return [plan.using(found["algo"][i : i + 1].copy()) for i in usable]


def _tune(plan: Plan, problem: Problem, call: Call, alpha: Any) -> tuple[Plan, float]:
    """The fastest repeatable algorithm and its microseconds.

    Runs write to out itself, whose values wait on the host if they are needed: tuning at the peak
    of a step takes no more memory on the card.
    """
    plans = _candidates(plan, problem)
    saved = _Saved(call.out) if problem.in_place else None

    def result(tried: Plan) -> bytes:
        if saved is not None:
            saved.restore()
        tried.run(call, alpha)
        rows = max(1, COMPARED_BYTES // (call.out.shape[1] * call.out.itemsize))
        return call.out[:rows].get().tobytes()

    def once(index: int) -> float | None:
        return _time(plans[index], call, alpha)

    def busy(index: int) -> float | None:
        """On a card that has had work for a while: its clock then depends on what it draws."""
        seconds = once(index)
        if seconds is None or seconds < LONG_SECONDS:
            return seconds
        return _time(plans[index], call, alpha, 1 + int(BUSY_SECONDS / seconds))

    try:
        for seconds, index in by_speed(len(plans), once, busy):
            if result(plans[index]) == result(plans[index]):
                return plans[index], seconds * 1e6
    finally:
        if saved is not None:
            saved.restore()
    raise RuntimeError(f"matmul: no algorithm of cuBLASLt runs, or repeats itself, for {problem}")


class _Saved:
    """What an array holds, kept on the host when its memory is contiguous."""

    def __init__(self, out: Any) -> None:
        self.out = out
        self.values = out.get() if out.flags.c_contiguous else out.copy()

    def restore(self) -> None:
        if isinstance(self.values, np.ndarray):
            self.out.set(self.values)
        else:
            self.out[...] = self.values


def _time(plan: Plan, call: Call, alpha: Any, runs: int = 1) -> float | None:
    """Median seconds of runs that follow one another, each with a cool L2 cache; None where the
    algorithm does not run after all.
    """
    import cupy

    stream, device = cupy.cuda.get_current_stream(), call.a.data.device_id
    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(runs)]
    workspace = _workspaces.get((device, stream.ptr)) or _add_workspace(device, stream)
    for begin, end in events:
        workspace.memset_async(0, WORKSPACE_BYTES, stream)
        begin.record(stream)
        try:
            plan.run(call, alpha)
        except plan.lt.cuBLASLtError:
            return None
        end.record(stream)
    stream.synchronize()
    return statistics.median(cupy.cuda.get_elapsed_time(*each) for each in events) / 1e3


def _path(lt: Any, device: int, problem: Problem) -> Path:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
    card = re.sub(r"[^A-Za-z0-9]+", "-", name)
    digest = hashlib.sha256(repr(problem).encode()).hexdigest()[:20]
    return cache_directory() / "matmul" / f"{card}-{lt.get_version()}" / f"{digest}.json"


def _load(plan: Plan, path: Path) -> Plan | None:
    """The plan with the algorithm kept at ``path``, if there is one that the library accepts."""
    if not path.exists():
        return None
    stored = bytearray.fromhex(json.loads(path.read_text())["algorithm"])
    if len(stored) != plan.algorithm.nbytes:
        return None
    algorithm = np.frombuffer(stored, plan.algorithm.dtype)
    checked = np.zeros(1, plan.lt.matmul_heuristic_result_dtype)
    try:
        plan.lt.matmul_algo_check(
            plan.handle, plan.operation, *plan.layouts, algorithm.ctypes.data, checked.ctypes.data
        )
    except plan.lt.cuBLASLtError:
        return None
    fits = int(checked["workspace_size"][0]) <= WORKSPACE_BYTES
    return plan.using(algorithm) if fits else None


def _save(plan: Plan, path: Path, problem: Problem, microseconds: float) -> None:
    row = {
        "problem": repr(problem),
        "algorithm": plan.algorithm.tobytes().hex(),
        "microseconds": microseconds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(row, file)
    os.replace(file.name, path)
