"""Model directories in the layouts of the libraries that quantise, written and decoded with torch.

A writer takes the name of a module and its weight, and gives the tensors that the library would
write and the matrix in bfloat16 that they decode to.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NF4 = torch.tensor(  # of bitsandbytes' create_normal_map, as published
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
    + [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
    + [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    + [0.7229568362236023, 1.0]
)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fine_grained(module: str, weight: torch.Tensor, block: int = 32) -> Written:
    """FP8 in square blocks, the last ones ragged."""
    rows, columns = weight.shape
    grid = -(-rows // block), -(-columns // block)
    padded = torch.zeros(grid[0] * block, grid[1] * block)
    padded[:rows, :columns] = weight
    scales = padded.view(grid[0], block, grid[1], block).abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    codes = (weight / each).to(torch.float8_e4m3fn)
    tensors = {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}
    return tensors, (codes.float() * each).bfloat16()


def powers_of_two(module: str, weight: torch.Tensor) -> Written:
    """FP8 whose scales are E8M0."""
    tensors, _ = fine_grained(module, weight)
    name = f"{module}.weight_scale_inv"
    scales = torch.exp2(torch.ceil(torch.log2(tensors[name])))
    each = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    each = each[: weight.shape[0], : weight.shape[1]]
    codes = (weight / each).to(torch.float8_e4m3fn)
    stored = {f"{module}.weight": codes, name: scales.to(torch.float8_e8m0fnu)}
    return stored, (codes.float() * each).bfloat16()


def _nvfp4(
    weight: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, E4M3 scales of 16, and what they are worth times ``factor``."""
    blocks = weight.view(len(weight), -1, 16)
    scales = (blocks.abs().amax(-1) / (6 * factor)).to(torch.float8_e4m3fn)
    each = (scales.float() * factor)[..., None]
    codes = ((blocks / each).abs()[..., None] - E2M1).abs().argmin(-1)
    negative = blocks < 0
    values = torch.where(negative, -E2M1[codes], E2M1[codes]) * each
    nibbles = (codes + 8 * negative).to(torch.uint8).view(weight.shape)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales, values.view(weight.shape).bfloat16()


def modelopt(module: str, weight: torch.Tensor) -> Written:
    """NVFP4 whose global scale multiplies, with that of activations."""
    factor = weight.abs().max() / (6 * 448)
    codes, scales, decoded = _nvfp4(weight, factor)
    return {
        f"{module}.weight": codes,
        f"{module}.weight_scale": scales,
        f"{module}.weight_scale_2": factor,
        f"{module}.input_scale": torch.tensor(0.01),
    }, decoded


def compressed(module: str, weight: torch.Tensor) -> Written:
    """NVFP4 whose global scale divides."""
    divisor = 6 * 448 / weight.abs().max()
    codes, scales, decoded = _nvfp4(weight, 1 / divisor)
    return {
        f"{module}.weight_packed": codes,
        f"{module}.weight_scale": scales,
        f"{module}.weight_global_scale": divisor[None],
        f"{module}.input_global_scale": torch.tensor([100.0]),
    }, decoded


def bitsandbytes(module: str, weight: torch.Tensor, *, double: bool = False) -> Written:
    """NF4 in blocks of 64 of the flat matrix, the even elements in the high nibbles.

    Doubly quantised scales are written with a map of our own: readers take the file's.
    """
    name = f"{module}.weight"
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(-1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
    }
    tensors = {f"{name}.absmax": absmax, f"{name}.quant_map": NF4.clone()}
    if double:
        table, offset = torch.linspace(-1, 1, 256), absmax.mean()
        nested = (absmax - offset).abs().max()[None]
        index = (((absmax - offset) / nested)[:, None] - table).abs().argmin(-1)
        absmax = table[index] * nested + offset
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": float(offset),
        }
        tensors[f"{name}.absmax"] = index.to(torch.uint8)
        tensors |= {f"{name}.nested_absmax": nested, f"{name}.nested_quant_map": table}
    codes = ((blocks / absmax[:, None])[..., None] - NF4).abs().argmin(-1)
    flat = codes.to(torch.uint8).view(-1)
    packed = (flat[0::2] << 4 | flat[1::2])[:, None]
    tensors[name] = packed.view(-1).view(torch.bfloat16)[:, None] if double else packed
    text = json.dumps(state).encode()
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.frombuffer(
        bytearray(text), dtype=torch.uint8
    )
    return tensors, (NF4[codes] * absmax[:, None]).view(weight.shape).bfloat16()


def double_quantised(module: str, weight: torch.Tensor) -> Written:
    """bitsandbytes' NF4 with scales of 8 bits, and codes that are called bfloat16."""
    return bitsandbytes(module, weight, double=True)


class Kind(NamedTuple):
    """A way to quantise: its writer, config.json's quantization_config without the list of modules
    that are left, that list's name, and what a run says.
    """

    write: Callable[[str, torch.Tensor], Written]
    settings: dict[str, Any]
    left: str
    words: str


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_DOUBLE = _BNB | {"bnb_4bit_use_double_quant": True}
_COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
_MODELOPT = {"quant_algo": "NVFP4", "group_size": 16}  # in a file of its own
_NF4 = "nf4, blocks of 64"
KINDS = {
    "fp8": Kind(fine_grained, _FP8, "modules_to_not_convert", "fp8, blocks of 32"),
    "fp8 e8m0": Kind(powers_of_two, _FP8, "modules_to_not_convert", "fp8, blocks of 32"),
    "modelopt": Kind(modelopt, _MODELOPT, "exclude_modules", "nvfp4, blocks of 16"),
    "compressed": Kind(compressed, _COMPRESSED, "ignore", "nvfp4, blocks of 16"),
    "nf4": Kind(bitsandbytes, _BNB, "llm_int8_skip_modules", _NF4),
    "nf4 double": Kind(
        double_quantised, _DOUBLE, "llm_int8_skip_modules", f"{_NF4}, scales quantised too"
    ),
}


def quantise(plain: Path, kind: Kind, left: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Quantises a model directory in place, but for the modules that are left, whose names end in
    ``left``. Returns every weight in bfloat16.
    """
    file = plain / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        module = name.removesuffix(".weight")
        if module.endswith(PROJECTIONS) and not module.endswith(left or "nothing"):
            parts, decoded[name] = kind.write(module, weight.float())
            tensors |= {name: part.contiguous() for name, part in parts.items()}
        else:
            tensors[name] = decoded[name] = weight
    save_file(tensors, file, {"format": "pt"})
    settings = kind.settings | {kind.left: ["lm_head", *left]}
    config = json.loads((plain / "config.json").read_text())
    if kind.write is modelopt:
        beside = {"producer": {"name": "modelopt"}, "quantization": settings}
        (plain / "hf_quant_config.json").write_text(json.dumps(beside))
    else:
        config["quantization_config"] = settings
        (plain / "config.json").write_text(json.dumps(config))
    return decoded
