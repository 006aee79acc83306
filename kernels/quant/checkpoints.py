"""Pre-quantised checkpoints, read as they are: the tensors of a weight become one ``Quantized``.

    method              tensors of X.weight, [outer, inner]
    fp8                 X.weight, X.weight_scale_inv: fine-grained FP8 (DeepSeek, Qwen, MiniMax)
    modelopt            X.weight, X.weight_scale, X.weight_scale_2: NVIDIA's Model-Optimizer, NVFP4
    compressed-tensors  X.weight_packed, X.weight_scale, X.weight_global_scale: its NVFP4
    bitsandbytes        X.weight and X.weight.{absmax, quant_map, quant_state.bitsandbytes__nf4};
                        doubly quantised X.weight.{nested_absmax, nested_quant_map} too
    mxfp4               X_blocks, X_scales: GPT-OSS

All scales multiply but one: compressed-tensors' global scale divides, and is the reciprocal of
Model-Optimizer's weight_scale_2. Scales of activations (input_scale, input_global_scale) and of the
key-value cache (k_scale, v_scale) are for runtimes that quantise those, and are left out. Any other
tensor of a quantised weight that is missing, or that no weight uses, is an error.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from surogate.kernels.arrays import F32, Array, require
from surogate.kernels.quant.codes import E8M0, NF4_VALUES, values_of
from surogate.kernels.quant.quantized import Nested, Quantized, check_quantized
from surogate.kernels.quant.storage import blocks_of

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_U8 = np.dtype(np.uint8)
_SCALARS = (F32, np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
BNB_STATE = "quant_state.bitsandbytes__nf4"
LEFT_OUT = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
ONLY_BESIDE_CODES = (
    *(".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "_blocks", "_scales"),
)


# Lists of the modules that were left as they are, as each method calls it.
_LEFT = ("modules_to_not_convert", "exclude_modules", "ignore", "llm_int8_skip_modules")


class Scheme(NamedTuple):
    """How a checkpoint is quantised, as its configuration tells it.

    ``method`` is who wrote it. ``block`` has the rows and columns that share a scale; of nf4 it is
    what bitsandbytes takes unless it is told otherwise, which the tensors say. ``left`` names
    modules that are not quantised. What a tensor is, its dtype says: the names are for whoever has
    no tensors.
    """

    method: str
    format: str
    block: tuple[int, int]
    double_quant: bool = False
    left: tuple[str, ...] = ()

    def leaves(self, module: str) -> bool:
        """Whether ``left`` names a module: by re: and a regular expression of its beginning, a
        pattern with *, or the name of it, of one that it is in, or its last parts.
        """
        return any(_names(entry, module) for entry in self.left)


def _names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if "*" in entry:
        return fnmatch.fnmatchcase(module, entry)
    return f".{module}.".startswith(f".{entry}.") or f".{module}".endswith(f".{entry}")


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """What config.json, or Model-Optimizer's hf_quant_config.json, says; None if it says nothing.

    Raises ValueError that names a method, or a kind of it, that is not read.
    """
    if "quant_algo" in (config.get("quantization") or {}):
        return _modelopt(config["quantization"])
    found = config.get("quantization_config")
    if not found:
        return None
    require(isinstance(found, Mapping), f"quantization_config must be an object, got {found!r}")
    method = str(found.get("quant_method", found.get("quant_algo")))
    readers: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
        "fp8": _fine_grained,
        "modelopt": _modelopt,
        "compressed-tensors": _compressed,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": lambda found: Scheme("mxfp4", "mxfp4", (1, 32), left=_left(found)),
    }
    require(
        method in readers,
        f"quantization_config: quant_method {method} is not read; must be one of "
        f"{', '.join(readers)}",
    )
    return readers[method](found)


def _left(found: Mapping[str, Any]) -> tuple[str, ...]:
    lists = {key: found[key] for key in _LEFT if found.get(key)}
    for key, names in lists.items():
        require(isinstance(names, list), f"quantization_config: {key} must be a list, got {names}")
    return tuple(str(name) for names in lists.values() for name in names)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _fine_grained(found: Mapping[str, Any]) -> Scheme:
    block: Any = found.get("weight_block_size")
    kind = found.get("fmt", "e4m3")
    require(
        isinstance(block, list) and len(block) == 2 and all(map(_is_size, block)),
        f"quantization_config: fp8 must have a weight_block_size of two numbers, got {block}; "
        "scales of whole tensors or rows are not read",
    )
    require(kind == "e4m3", f"quantization_config: fp8 must have fmt e4m3, got {kind}")
    return Scheme("fp8", "fp8", tuple(block), left=_left(found))


def _modelopt(found: Mapping[str, Any]) -> Scheme:
    kind = found.get("quant_algo")
    require(
        kind in ("NVFP4", "W4A16_NVFP4"),
        f"quantization_config: modelopt must have quant_algo NVFP4, got {kind}",
    )
    size = found.get("group_size", 16)
    require(size in (16, None), f"quantization_config: NVFP4 must have group_size 16, got {size}")
    return Scheme("modelopt", "nvfp4", (1, 16), left=_left(found))


def _compressed(found: Mapping[str, Any]) -> Scheme:
    kind = found.get("format")
    require(
        kind == "nvfp4-pack-quantized",
        "quantization_config: compressed-tensors must have format nvfp4-pack-quantized, "
        f"got {kind}",
    )
    return Scheme("compressed-tensors", "nvfp4", (1, 16), left=_left(found))


def _bitsandbytes(found: Mapping[str, Any]) -> Scheme:
    kind = found.get("bnb_4bit_quant_type", "fp4") if found.get("load_in_4bit") else "int8"
    require(
        kind == "nf4",
        f"quantization_config: bitsandbytes must have bnb_4bit_quant_type nf4, got {kind}",
    )
    double = bool(found.get("bnb_4bit_use_double_quant"))
    return Scheme("bitsandbytes", "nf4", (1, 64), double, _left(found))


def assemble(tensors: Mapping[str, Array], scheme: Scheme) -> dict[str, Any]:
    """The weights of some tensors, say of one layer, under the names that bfloat16 ones would have.

    Values are ``Quantized``, or a tuple of one for each expert of a stack (mxfp4), or the array
    itself where a tensor is not quantised. Arrays are NumPy's, of the dtypes in the file (8-bit
    floats of ml-dtypes, or their codes in uint8), and are not copied.

    Raises ValueError that names the tensor that is missing, unused, or of another shape or dtype
    than expected.
    """
    rest = {name: x for name, x in tensors.items() if not name.endswith(LEFT_OUT)}
    suffix, read = {
        "fp8": (".weight", _read_fp8),
        "modelopt": (".weight", _read_modelopt),
        "compressed-tensors": (".weight_packed", _read_compressed),
        "bitsandbytes": (f".weight.{BNB_STATE}", _read_bitsandbytes),
        "mxfp4": ("_blocks", _read_mxfp4),
    }[scheme.method]
    out: dict[str, Any] = {}
    for name in [name for name in rest if name.endswith(suffix)]:
        if suffix == ".weight" and rest[name].dtype not in (_E4M3, _U8):
            continue  # a layer that was left as it is
        base = name.removesuffix(suffix)
        key = base if scheme.method == "mxfp4" else f"{base}.weight"
        out[key] = read(_Taker(rest, key), base, scheme)
    for name, x in rest.items():
        require(
            not name.endswith(ONLY_BESIDE_CODES) and ".quant_state." not in name,
            f"{name}: belongs to no weight that a {scheme.format} checkpoint of {scheme.method} "
            "has; the file and its quantization_config disagree",
        )
        require(
            x.dtype not in (_E4M3, _U8),
            f"{name}: has {x.dtype} codes, but no tensor says how {scheme.method} scaled them",
        )
        out[name] = x
    return out


class _Taker:
    """Takes the tensors of one weight out of a dict, or says what is wrong with them."""

    def __init__(self, tensors: dict[str, Array], weight: str) -> None:
        self._tensors, self._weight = tensors, weight

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, dtypes: tuple[Any, ...], shape: tuple[int, ...] | None = None) -> Any:
        """A tensor of one of these dtypes; ``shape`` () is that of one number."""
        wanted = " or ".join(str(dtype) for dtype in dtypes) + ("" if shape is None else f"{shape}")
        require(self.has(name), f"{name}: missing; {self._weight} needs it: expected {wanted}")
        x = self._tensors.pop(name)
        fits = shape is None or x.shape == shape or (shape == () and x.size == 1)
        require(
            x.dtype in dtypes and fits,
            f"{name}: expected {wanted} for {self._weight}, got {x.dtype}{x.shape}",
        )
        return np.ascontiguousarray(x).reshape(x.shape)

    def number(self, name: str) -> Any:
        """float32 of shape [1], which is positive and finite."""
        x = self.take(name, (F32,), ()).reshape(1)
        require(bool(0 < x[0] < np.inf), f"{name}: must be positive and finite, got {x[0]}")
        return x


def _read_fp8(taker: _Taker, base: str, scheme: Scheme) -> Quantized:
    codes = _matrix(taker.take(f"{base}.weight", (_E4M3, _U8)), f"{base}.weight")
    grid = tuple(blocks_of(n, side) for n, side in zip(codes.shape, scheme.block, strict=True))
    scales = taker.take(f"{base}.weight_scale_inv", (*_SCALARS, _E8M0, _U8), grid)
    if scales.dtype in (_E8M0, _U8):
        scales = values_of(scales.view(_U8), E8M0)
    q = Quantized("fp8", codes.shape, scheme.block, codes.view(_U8), scales.astype(F32))
    return _checked(q, f"{base}.weight")


def _read_modelopt(taker: _Taker, base: str, scheme: Scheme) -> Quantized:
    return _read_nvfp4(taker, base, f"{base}.weight", taker.number(f"{base}.weight_scale_2"))


def _read_compressed(taker: _Taker, base: str, scheme: Scheme) -> Quantized:
    divisor = taker.number(f"{base}.weight_global_scale")
    return _read_nvfp4(taker, base, f"{base}.weight_packed", np.float32(1) / divisor)


def _read_nvfp4(taker: _Taker, base: str, name: str, tensor_scale: Array) -> Quantized:
    codes = _matrix(taker.take(name, (_U8,)), name)
    outer, half = codes.shape
    scales = taker.take(f"{base}.weight_scale", (_E4M3, _U8), (outer, blocks_of(half, 8)))
    q = Quantized("nvfp4", (outer, 2 * half), (1, 16), codes, scales.view(_U8), tensor_scale)
    return _checked(q, f"{base}.weight")


def _read_bitsandbytes(taker: _Taker, base: str, scheme: Scheme) -> Quantized:
    weight = f"{base}.weight"
    state = _bnb_state(taker.take(f"{weight}.{BNB_STATE}", (_U8,)), f"{weight}.{BNB_STATE}")
    shape, block = tuple(state["shape"]), state["blocksize"]
    require(len(shape) == 2, f"{weight}: must be a matrix, its quant_state has shape {shape}")
    require(
        state["quant_type"] == "nf4",
        f"{weight}: its quant_state must have quant_type nf4, got {state['quant_type']}",
    )
    table = taker.take(f"{weight}.quant_map", (F32,), (16,))
    require(
        np.allclose(table, NF4_VALUES, rtol=0, atol=1e-6),
        f"{weight}.quant_map: must be the table of nf4, got {table.tolist()}",
    )
    codes = taker.take(weight, (_U8, *_SCALARS)).reshape(-1).view(_U8)  # bnb_4bit_quant_storage
    count, nested = blocks_of(shape[0] * shape[1], block), None
    if "nested_offset" in state:
        inner = state["nested_blocksize"]
        nested = Nested(
            taker.take(f"{weight}.nested_absmax", (F32,), (blocks_of(count, inner),)),
            taker.take(f"{weight}.nested_quant_map", (F32,), (256,)),
            np.array([state["nested_offset"]], F32),
            inner,
        )
    absmax = taker.take(f"{weight}.absmax", (_U8 if nested else F32,), (count,))
    return _checked(Quantized("nf4", shape, (1, block), codes, absmax, nested=nested), weight)


def _bnb_state(x: Array, name: str) -> dict[str, Any]:
    try:
        state = json.loads(x.tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: does not hold JSON: {error}") from None
    require(isinstance(state, dict), f"{name}: must hold an object, got {state}")
    keys = {"shape", "blocksize", "quant_type"}
    if "nested_offset" in state:
        keys |= {"nested_blocksize"}
    require(keys <= state.keys(), f"{name}: must have {', '.join(sorted(keys))}, got {state}")
    shape, offset = state["shape"], state.get("nested_offset", 0)
    sizes = [state[key] for key in sorted(keys) if key.endswith("blocksize")]
    require(
        isinstance(shape, list)
        and all(map(_is_size, [*shape, *sizes]))
        and type(offset) in (int, float)
        and abs(offset) < 1e38,
        f"{name}: has a size that is no whole number, or an offset that is no number: {state}",
    )
    return state


def _read_mxfp4(taker: _Taker, base: str, scheme: Scheme) -> Quantized | tuple[Quantized, ...]:
    blocks = taker.take(f"{base}_blocks", (_U8,))
    require(
        blocks.ndim in (3, 4) and blocks.shape[-1] == 16,
        f"{base}_blocks: expected uint8 (rows, blocks, 16), or of experts, got {blocks.shape}",
    )
    scales = taker.take(f"{base}_scales", (_U8, _E8M0), blocks.shape[:-1]).view(_U8)
    rows, across = scales.shape[-2:]

    def matrix(codes: Array, scales: Array) -> Quantized:
        shape = (rows, across * 32)
        q = Quantized("mxfp4", shape, (1, 32), codes.reshape(rows, across * 16), scales)
        return _checked(q, base)

    if blocks.ndim == 3:
        return matrix(blocks, scales)
    return tuple(matrix(*expert) for expert in zip(blocks, scales, strict=True))


def _matrix(x: Array, name: str) -> Array:
    require(x.ndim == 2, f"{name}: expected a matrix, got {x.dtype}{x.shape}")
    return x


def _checked(q: Quantized, name: str) -> Quantized:
    check_quantized(q, name)
    return q
