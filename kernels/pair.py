"""Pairs, and the transforms that make pairs from pairs: vjp and checkpoint.

A pair is two pure functions:

    X_fwd(*arrays, **settings) -> (outputs, residuals)
    X_bwd(residuals, *cotangents) -> gradients of the arrays, in their order

Positional arguments are differentiated; they may be arrays, None, or trees of arrays (a LoRA pair,
a layer's parameters). Keyword arguments are settings: numbers, or arrays that nobody differentiates
(tokens, positions, document boundaries).

``vjp(f)`` derives the pair of a function that calls pairs. It runs ``f`` once on traced values,
writes down which pairs it called, and from then on replays that program forward and, reversed,
backward. After JAX's transforms of the same names, without a tensor class in user code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from surogate.kernels import tree
from surogate.kernels.add import accumulate_, add_fwd


@dataclass(frozen=True)
class Pair:
    """A forward and its backward. Calling a pair gives the outputs alone; under vjp it is
    recorded.
    """

    fwd: Callable[..., tuple[Any, Any]]
    bwd: Callable[..., Any]

    def __call__(self, *args: Any, **settings: Any) -> Any:
        for leaf in tree.iterate((args, settings)):
            if isinstance(leaf, Traced):
                return leaf._trace.record(self, args, settings)
        return self.fwd(*args, **settings)[0]


def checkpoint(pair: Pair) -> Pair:
    """The same pair with its inputs for residuals: backward runs the forward again.

    Memory is the inputs, time is one more forward (Chen et al. 2016, arXiv 1604.06174).
    """

    def fwd(*args: Any, **settings: Any) -> tuple[Any, Any]:
        return pair.fwd(*args, **settings)[0], (args, settings)

    def bwd(res: Any, *cotangents: Any, **options: Any) -> Any:
        args, settings = res
        return pair.bwd(pair.fwd(*args, **settings)[1], *cotangents, **options)

    return Pair(fwd, bwd)


def vjp(f: Callable[..., Any]) -> Pair:
    """The pair of a function of pairs, derived ahead of time.

    ``f(*args, **settings)`` takes trees of arrays and returns an array or a tuple of arrays, and
    may use its arrays only through pairs: anything else raises TypeError. It is traced once for
    each structure, shape and dtype of its arguments. Arrays that it takes from elsewhere than its
    arguments are constants.

    The backward returns a gradient tree for each positional argument (None for an integer array and
    for one that does not reach the output). ``into`` may give a tree of buffers for each: None
    leaves are fresh, arrays are added to, FROZEN ones are dropped.
    """
    programs: dict[Any, Program] = {}

    def fwd(*args: Any, **settings: Any) -> tuple[Any, Any]:
        key = _signature((args, settings))
        if key in programs:
            return programs[key].forward((args, settings))
        trace = Trace()
        traced_args, traced_settings = trace.inputs((args, settings))
        outputs = f(*traced_args, **traced_settings)
        programs[key] = trace.program(outputs)
        return _concrete(outputs), VjpResiduals(programs[key], trace.residuals, args)

    def bwd(res: VjpResiduals, *cotangents: Any, into: Any = None) -> Any:
        grads = res.program.backward(res.residuals, cotangents, res.args)
        return grads if into is None else _deliver(grads, into)

    return Pair(fwd, bwd)


class VjpResiduals(NamedTuple):
    """The program that ran, its pairs' residuals, and the arguments (for the shape of the
    gradients).
    """

    program: "Program"
    residuals: list[Any]
    args: Any


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a recorded call for the value that some earlier call, or the caller, produced."""

    index: int


class Step(NamedTuple):
    """One recorded call: the pair, its arguments with Slots for arrays, and the slots it fills."""

    pair: Pair
    args: Any
    settings: Any
    outputs: Any


class Traced:
    """A value under vjp. It has a shape and a dtype; pairs alone may look inside."""

    __slots__ = ("_trace", "_slot", "_value")

    def __init__(self, trace: "Trace", slot: Slot, value: Any) -> None:
        self._trace, self._slot, self._value = trace, slot, value

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape

    @property
    def dtype(self) -> np.dtype:
        return self._value.dtype

    @property
    def ndim(self) -> int:
        return self._value.ndim

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(
            f"vjp: a traced value reached .{name}: only pairs (surogate.kernels) may use it, "
            "or its gradient would be lost; call a pair, or give the operation one"
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "vjp: a traced value reached an operation that is not a pair, so its gradient would "
            "be lost; call a pair of surogate.kernels (add(x, y), not x + y), or give the "
            "operation a pair"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = _refuse
    __iadd__ = __isub__ = __imul__ = __itruediv__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = __index__ = _refuse
    __getitem__ = __setitem__ = __len__ = __iter__ = _refuse
    __array__ = __array_ufunc__ = __array_function__ = __dlpack__ = _refuse


class Trace:
    """Runs a function once on traced values and writes down the calls."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.residuals: list[Any] = []
        self.slots = 0
        self.input_slots: Any = None

    def new(self, value: Any) -> Traced:
        slot = Slot(self.slots)
        self.slots += 1
        return Traced(self, slot, value)

    def inputs(self, arguments: Any) -> Any:
        traced = _map_arrays(self.new, arguments)
        self.input_slots = _slots(traced)
        return traced

    def record(self, pair: Pair, args: Any, settings: Any) -> Any:
        outputs, res = pair.fwd(*_concrete(args), **_concrete(settings))
        traced = tree.map(self.new, outputs)
        self.residuals.append(res)
        self.steps.append(Step(pair, _slots(args), _slots(settings), _slots(traced)))
        return traced

    def program(self, outputs: Any) -> "Program":
        for leaf in tree.iterate(outputs):
            if not isinstance(leaf, Traced):
                raise TypeError(
                    f"vjp: the function must return what pairs gave it, got {type(leaf).__name__}"
                )
        return Program(self.steps, self.input_slots, _slots(outputs))


class Program:
    """The recorded calls, run forward on other arrays, or backward with liveness."""

    def __init__(self, steps: list[Step], inputs: Any, outputs: Any) -> None:
        self.steps, self.inputs, self.outputs = steps, inputs, outputs
        last: dict[Slot, int] = {}
        for number, step in enumerate(steps):
            for slot in _slots_in((step.args, step.settings, step.outputs)):
                last[slot] = number
        kept = set(_slots_in(outputs))
        self.dead: list[list[Slot]] = [[] for _ in steps]
        for slot, number in last.items():
            if slot not in kept:
                self.dead[number].append(slot)

    def forward(self, arguments: Any) -> tuple[Any, VjpResiduals]:
        values: dict[Slot, Any] = {}
        _bind(self.inputs, arguments, values)
        residuals = []
        for step, dead in zip(self.steps, self.dead, strict=True):
            outputs, res = step.pair.fwd(*_fill(step.args, values), **_fill(step.settings, values))
            residuals.append(res)
            _bind(step.outputs, outputs, values)
            for slot in dead:
                values.pop(slot, None)
        return _fill(self.outputs, values), VjpResiduals(self, residuals, arguments[0])

    def backward(self, residuals: list[Any], cotangents: Any, args: Any) -> Any:
        grads: dict[Slot, Any] = {}
        outputs = self.outputs if _is_sequence(self.outputs) else (self.outputs,)
        if len(outputs) != len(cotangents):
            raise ValueError(f"vjp: expected {len(outputs)} cotangents, got {len(cotangents)}")
        for slot, cotangent in zip(outputs, cotangents, strict=True):
            _add(grads, slot, cotangent)
        for step, res in zip(reversed(self.steps), reversed(residuals), strict=True):
            slots = step.outputs if _is_sequence(step.outputs) else (step.outputs,)
            incoming = [grads.pop(slot, None) for slot in slots]
            if all(cotangent is None for cotangent in incoming):
                continue
            result = step.pair.bwd(res, *incoming)
            outgoing = result if isinstance(result, tuple) and len(step.args) > 1 else (result,)
            # An argument that was left at its default is not in step.args; its gradient is None.
            for target, grad in zip(step.args, outgoing, strict=False):
                _scatter(grads, target, grad)
        return _gather(self.inputs[0], grads, args)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "ndim")


def _is_sequence(x: Any) -> bool:
    return isinstance(x, (tuple, list))


def _map_arrays(f: Callable[[Any], Any], value: Any) -> Any:
    return tree.map(lambda leaf: f(leaf) if _is_array(leaf) else leaf, value)


def _concrete(value: Any) -> Any:
    return tree.map(lambda leaf: leaf._value if isinstance(leaf, Traced) else leaf, value)


def _walk(f: Callable[[Slot], Any], template: Any) -> Any:
    return tree.map(lambda leaf: f(leaf) if isinstance(leaf, Slot) else leaf, template)


def _slots(value: Any) -> Any:
    return tree.map(lambda leaf: leaf._slot if isinstance(leaf, Traced) else leaf, value)


def _slots_in(template: Any) -> list[Slot]:
    found: list[Slot] = []
    _walk(found.append, template)
    return found


def _fill(template: Any, values: dict[Slot, Any]) -> Any:
    return _walk(values.__getitem__, template)


def _pairs(template: Any, value: Any) -> list[tuple[Slot, Any]]:
    """Matches each Slot of a template to the part of ``value`` that lies at the same place."""
    if template is None or value is None:
        return []
    if isinstance(template, Slot):
        return [(template, value)]
    if isinstance(template, dict):
        return [row for key in template for row in _pairs(template[key], value[key])]
    if isinstance(template, (tuple, list)):
        return [row for t, v in zip(template, value, strict=True) for row in _pairs(t, v)]
    return []


def _bind(template: Any, value: Any, values: dict[Slot, Any]) -> None:
    values.update(_pairs(template, value))


def _add(grads: dict[Slot, Any], slot: Slot, grad: Any) -> None:
    if grad is None:
        return
    have = grads.get(slot)
    grads[slot] = grad if have is None else add_fwd(have, grad)[0]


def _scatter(grads: dict[Slot, Any], template: Any, grad: Any) -> None:
    for slot, part in _pairs(template, grad):
        _add(grads, slot, part)


def _gather(template: Any, grads: dict[Slot, Any], args: Any) -> Any:
    found = _walk(grads.get, template)
    return found if len(found) != 1 else found[0]


def _deliver(grads: Any, into: Any) -> Any:
    """Adds gradients into the caller's buffers, leaf by leaf."""
    if into is None or grads is None:
        return grads
    if _is_sequence(grads):
        parts = [_deliver(g, i) for g, i in zip(grads, into, strict=True)]
        return type(grads)(*parts) if hasattr(grads, "_fields") else type(grads)(parts)
    if isinstance(grads, dict):
        return {key: _deliver(grads[key], into[key]) for key in grads}
    if not _is_array(into):
        return None
    return accumulate_(into, grads)


def _signature(arguments: Any) -> Any:
    """Hashable: the structure, static leaves, shapes and dtypes of the arguments."""

    def of(value: Any) -> Any:
        if _is_array(value):
            return (value.shape, str(value.dtype))
        if isinstance(value, dict):
            return tuple((k, of(v)) for k, v in value.items())
        if isinstance(value, (tuple, list)):
            return (type(value), *(of(v) for v in value))
        return value

    return of(arguments)
