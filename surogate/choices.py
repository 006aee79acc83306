"""What a configuration decides about a step: dtypes, masters, chunk, graphs.

The training loop and the memory plan both ask here, so that a plan is of the run that will be made.
"""

import numpy as np

from surogate.config import Config
from surogate.kernels.arrays import BF16, F32
from surogate.optim.adamw import AdamWConfig
from surogate.step import StepOptions


def optimizer_of(config: Config) -> AdamWConfig:
    """The update rule. With adapters lora_dtype says whether there are masters, else
    master_dtype.
    """
    master = config.lora_dtype if config.lora else (config.master_dtype or "bf16")
    return AdamWConfig(
        beta1=config.adamw_beta1,
        beta2=config.adamw_beta2,
        epsilon=config.adamw_epsilon,
        weight_decay=config.weight_decay,
        master_dtype="float32" if master == "fp32" else "bfloat16",
        moment_dtype="float32" if config.moment_dtype == "fp32" else "bfloat16",
        seed=config.train_seed & 0xFFFFFFFF,
    )


def options_of(config: Config, kind: str, compute: np.dtype) -> StepOptions:
    """How a step is computed on a device of ``kind`` (cpu or cuda) in the dtype ``compute``."""
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
    )
