"""What a configuration decides about a step: dtypes, masters, chunk, graphs.

The training loop and the memory plan both ask here, so that a plan is of the run that will be made.
"""

from typing import Any

import msgspec
import numpy as np

from surogate.config import Config
from surogate.errors import UserError
from surogate.kernels.arrays import BF16, F32
from surogate.kernels.fp8 import MULTIPLE
from surogate.kernels.linear import Products
from surogate.kernels.nvfp4 import SIGNS
from surogate.kernels.nvfp4_linear import Nvfp4Options
from surogate.kernels.quant.checkpoints import Scheme
from surogate.models.config import ModelConfig
from surogate.models.recipe import (
    Fp8Options,
    Fp8Recipe,
    Nvfp4Recipe,
    Nvfp4Settings,
    Precision,
    Recipe,
    Scope,
    Storage,
)
from surogate.models.stored_recipe import QuantizedRecipe, StoredRecipe
from surogate.optim.adamw import AdamWConfig
from surogate.optim.normuon import NorMuonConfig
from surogate.optim.rule import Rule
from surogate.step import StepOptions

MOMENTS: dict[str, Any] = {"fp32": "float32", "bf16": "bfloat16"}


def optimizer_of(config: Config) -> Rule:
    """The update rule. With adapters lora_dtype says whether there are masters, else
    master_dtype.
    """
    master = config.lora_dtype if config.lora else (config.master_dtype or "bf16")
    adamw = AdamWConfig(
        beta1=config.adamw_beta1,
        beta2=config.adamw_beta2,
        epsilon=config.adamw_epsilon,
        weight_decay=config.weight_decay,
        cautious=config.adamw_cautious_wd,
        master_dtype="float32" if master == "fp32" else "bfloat16",
        moment_dtype="uint8" if config.optimizer == "adamw_8bit" else MOMENTS[config.moment_dtype],
        seed=config.train_seed & 0xFFFFFFFF,
    )
    if config.optimizer != "normuon":
        return adamw
    own, rate = config.adamw_learning_rate, config.learning_rate
    return NorMuonConfig(
        adamw=adamw,
        momentum=config.normuon_momentum,
        beta2=config.normuon_beta2,
        cautious=config.normuon_cautious_wd,
        adamw_lr_ratio=own / rate if own else 1.0 if own is None else 0.0,
    )


MODULES = {
    "qkv_proj": "w_qkv",
    "o_proj": "w_o",
    "gate_up_proj": "w_gate_up",
    "down_proj": "w_down",
}


def scope_of(config: Config) -> Scope:
    """Where the recipe applies."""
    return Scope(
        config.skip_quant_first_layers,
        config.skip_quant_last_layers,
        frozenset(MODULES[name] for name in config.skip_quant_modules),
        Products(*(name in config.quantized_products for name in Products._fields)),
        MULTIPLE,
    )


def check_quantized(config: Config, model: ModelConfig) -> None:
    """Raises UserError for what a run cannot do with a checkpoint that is quantised already."""
    if model.quantized is None:
        return
    what = f"model = {config.model}: weights are in {model.quantized.format}"
    if not config.lora:
        raise UserError(f"{what}; set lora = true, or use the bf16 model")
    if config.lora_init == "error":
        raise UserError(
            f"{what}, and what they lost is not known; set lora_init = default, or use the bf16 "
            "model"
        )
    for name in ("qlora_fp8", "qlora_fp4", "qlora_bnb"):
        if getattr(config, name):
            raise UserError(f"{what}, and stay so; set {name} = false, or use the bf16 model")


def after_recipe(config: Config) -> Config | None:
    """The configuration of the steps after ``recipe_until``: bf16 products, as in the last steps of
    arXiv 2509.25149. None where there are no such steps.
    """
    if config.recipe == "bf16" or config.recipe_until == 1:
        return None
    return msgspec.structs.replace(config, recipe="bf16")


def evaluates(config: Config) -> bool:
    """Whether there are rows to evaluate on."""
    return bool(config.validation_datasets) or config.validation_split_ratio > 0


def evaluates_plainly(config: Config) -> bool:
    """Whether evaluations leave the recipe out."""
    asked = config.eval_recipe == "bf16" and config.recipe != "bf16"
    return asked and (evaluates(config) or bool(config.eval_prompts))


def precision_of(config: Config, model: ModelConfig) -> Precision | None:
    """How the layers' matrices are multiplied and stored; None: bf16 and bf16."""
    stored = model.quantized or storage_of(config)
    if config.recipe == "bf16":
        return stored
    if config.recipe == "nvfp4":
        signs = SIGNS if config.fp4_hadamard else None
        options = Nvfp4Options(
            config.fp4_four_over_six,
            config.fp4_stochastic_rounding,
            signs,
            config.fp4_square_blocks,
        )
        return Nvfp4Settings(scope_of(config), options, config.train_seed, stored)
    return Fp8Options(
        scope_of(config),
        config.fp8_scaling,
        config.fp8_amax_history,
        config.fp8_amax_algorithm,
        config.fp8_margin,
        Products(*(name in config.fp8_fast_sums for name in Products._fields)),
        stored,
    )


def storage_of(config: Config) -> Storage | None:
    """What frozen weights are quantised to as they are read; None: nothing."""
    if config.lora and config.qlora_fp8:
        return Storage("fp8", config.qlora_block_size)
    if config.lora and config.qlora_bnb:
        return Storage("nf4", config.qlora_bnb_block_size, config.qlora_bnb_double_quant)
    if config.lora and config.qlora_fp4:
        return Storage("nvfp4", four_over_six=config.qlora_four_over_six)
    return None


def recipe_of(config: Config, model: ModelConfig, library: Any) -> Recipe:
    """The recipe of a run, with its state on the device of ``library``."""
    precision = precision_of(config, model)
    if not isinstance(precision, Fp8Options | Nvfp4Settings):
        return storing(precision, model)
    tokens = config.per_device_train_batch_size * config.sequence_len
    if tokens % MULTIPLE:
        raise UserError(
            f"recipe = {config.recipe}: needs micro-batches of a multiple of {MULTIPLE} tokens, "
            f"per_device_train_batch_size x sequence_len = {tokens}; change one of them"
        )
    below, keep = storing(precision.storage, model), evaluates_plainly(config)
    if isinstance(precision, Nvfp4Settings):
        return Nvfp4Recipe(model, precision, library, below, keep=keep)
    return Fp8Recipe(model, precision, library, below, keep=keep)


def storing(storage: Storage | Scheme | None, model: ModelConfig) -> Recipe:
    """The recipe of weights in codes and bf16 products."""
    if storage is None:
        return Recipe()
    if isinstance(storage, Scheme):
        return StoredRecipe(model, Scope())
    return QuantizedRecipe(model, Scope(), storage)


def options_of(config: Config, kind: str, compute: np.dtype) -> StepOptions:
    """How a step is computed on a device of ``kind`` (cpu or cuda) in the dtype ``compute``."""
    assert config.recompute != "auto", "plan.settled decides it"
    tokens = config.per_device_train_batch_size * config.sequence_len
    wide_grads = config.gradient_dtype == "fp32" or (config.gradient_dtype is None and config.lora)
    return StepOptions(
        tokens=tokens,
        recompute=config.recompute,
        chunk=None if config.lmhead_chunks is None else -(-tokens // config.lmhead_chunks),
        gradient_dtype=np.dtype(BF16 if compute == BF16 and not wide_grads else F32),
        max_grad_norm=config.max_grad_norm,
        graphs=config.use_cuda_graphs and kind == "cuda",
        longest=config.sequence_len,
        plain_evaluation=evaluates_plainly(config),
    )
