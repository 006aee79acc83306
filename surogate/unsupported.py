"""Keys of other versions' configuration files that this version does not act on, and why.

`Ignored` keys cannot change the result here: they are accepted and reported once. `Refused` keys
ask for a feature that is not there: they may be set to their neutral values only. Nested keys
carry a dot (`distributed.num_nodes`), and the tables that may hold them are in `GROUPS`.
"""

from typing import Any, NamedTuple


class Ignored(NamedTuple):
    """Accepted and reported, with the reason."""

    reason: str


class Refused(NamedTuple):
    """An error unless the value is one of `neutral`. The reason says what to use instead."""

    neutral: tuple[Any, ...]
    reason: str


def _off(reason: str) -> Refused:
    return Refused((False, None), reason)


_NO_FP8 = Ignored("a documented key that was never read; use fp8_amax_history and its neighbours")
_NO_FP4 = Ignored("the card decides which library multiplies")
_ONE_GPU = Ignored("there is nothing to exchange on one GPU")
_NO_OFFLOAD = Ignored("read with the offload keys only")
_NEVER_READ = Ignored("a documented key that was never read")
_TEMPLATE = Ignored("the chat template of the model decides")
_NO_KD = Ignored("read with distillation.teacher_model only")
_NO_DPO = Ignored("read by preference training only")
_NO_EXPERTS = Ignored("read by models with experts only")
_NO_OFFLOAD_YET = _off(
    "offloading to host memory is not there yet; use recompute = block or a smaller batch"
)
_NO_SHARDING = _off("sharding over GPUs is not there yet; use false")

KEYS: dict[str, Ignored | Refused] = {
    # General
    "apply_recommended_values": _off("there is no table of recommended values; use explicit keys"),
    "checkpoint_dir": Ignored("checkpoints go to output_dir"),
    "log_gpu_util": Ignored("GPU telemetry is not recorded"),
    "train_vision": _off("vision training is not there yet; use rows of text alone"),
    "debug_time_breakdown": Ignored("it prints timings and changes nothing"),
    "debug_memory_breakdown": Ignored("it prints sizes and changes nothing"),
    # Model
    "model_type": Ignored("the model's config.json decides"),
    "use_fused_rope": Ignored("the rotary embedding has one implementation"),
    # Training
    "auto_lr_reduction": _off("use a lower learning_rate or a longer warmup_steps"),
    "epoch_adjustment": _off("use num_epochs"),
    "lmhead_drop_ignored_rows": Ignored("it saves memory and changes no result"),
    "attn_bwd_chunks": Ignored("it saves memory and changes no result"),
    "padding_free": _off("use sample_packing = true, which has no padding between documents"),
    # Memory and parallelism
    "offload_residual": _NO_OFFLOAD_YET,
    "offload_saved_tensors": _NO_OFFLOAD_YET,
    "offload_master": _NO_OFFLOAD_YET,
    "offload_quants": _NO_OFFLOAD_YET,
    "offload_optimizer": _NO_OFFLOAD_YET,
    "offload_grads": _NO_OFFLOAD_YET,
    "persistent_quants": _off("quantised copies of weights are not there yet; use false"),
    "use_zero_copy": _NO_OFFLOAD,
    "use_write_combined": _NO_OFFLOAD,
    "cpu_training": _off(
        "weights in host memory are not there yet; use device = cpu to compute on the CPU"
    ),
    "long_context": _off("the tiled MLP is not there yet; use recompute = block"),
    "sequence_chunks": Refused((1, None), "a row is computed in one piece; use 1"),
    "zero_level": Refused((1, None), "sharding over GPUs is not there yet; use 1"),
    "shard_weights": _NO_SHARDING,
    "shard_gradients": _NO_SHARDING,
    "use_all_to_all_reduce": _ONE_GPU,
    "memcpy_all_gather": _ONE_GPU,
    "memcpy_send_recv": _ONE_GPU,
    "ep_size": Refused((1, None), "expert parallelism is not there yet; use 1"),
    "ep_load_balance_threshold": Ignored("read with ep_size above 1 only"),
    "ep_plan_refresh_interval": Ignored("read with ep_size above 1 only"),
    "parallelism": Refused((None,), "training uses one GPU; use null"),
    "distributed.ray_address": Ignored("read with distributed.num_nodes above 1 only"),
    "distributed.num_nodes": Refused((1, None), "training uses one machine; use 1"),
    "distributed.gpus_per_node": Refused((0, 1, None), "training uses one GPU; use 1"),
    "distributed.worker_output_dir": Ignored("read with distributed.num_nodes above 1 only"),
    # Precision
    "fp4_backend": _NO_FP4,
    "no_fp4_stochastic_rounding": Ignored(
        "a documented key that was never read; use fp4_stochastic_rounding"
    ),
    "matmul_dtype": Ignored("the recipe decides"),
    "model_dtype": Ignored("torch_dtype decides"),
    "margin": _NO_FP8,
    "amax_history_len": _NO_FP8,
    "amax_compute_algo": _NO_FP8,
    "reduce_amax": _NO_FP8,
    "backend": _NO_FP4,
    # Adapters and quantised base weights
    "lora_dropout": Refused((0, None), "adapter dropout is not there yet; use 0"),
    "train_router": _off("adapters on a router are not there yet; use false"),
    "adapter_path": Refused(
        (None,), "starting from an adapter is not there yet; use a model with it merged"
    ),
    "adapter_init_mode": Ignored("read with adapter_path only"),
    "qlora_selective_expert_dequant": _NO_EXPERTS,
    "qlora_offload_experts": _NO_EXPERTS,
    # Mixture of experts, preference training, distillation
    "router_aux_loss_coef": Refused((None,), "mixtures of experts are not there yet; use null"),
    "router_z_loss_coef": Refused((None,), "mixtures of experts are not there yet; use null"),
    "loss.type": Refused(
        (None,), "preference training is not there yet; use the verb sft with conversations"
    ),
    "loss.dpo_beta": _NO_DPO,
    "loss.length_norm": _NO_DPO,
    "loss.span_mask": _NO_DPO,
    "loss.reference_free": _NO_DPO,
    "loss.target_margin": _NO_DPO,
    "distillation.teacher_model": Refused(
        (None,), "distillation is not there yet; use sft on text that the teacher wrote"
    ),
    "distillation.top_k": _NO_KD,
    "distillation.temperature": _NO_KD,
    "distillation.kd_weight": _NO_KD,
    "distillation.ce_weight": _NO_KD,
    "distillation.teacher_batch_size": _NO_KD,
    "distillation.kd_dir": _NO_KD,
    "distillation.teacher_api_base": _NO_KD,
    "distillation.teacher_api_key_var": _NO_KD,
    "distillation.teacher_api_concurrency": _NO_KD,
    "distillation.teacher_api_timeout": _NO_KD,
    # Data
    "use_chat_template": _TEMPLATE,
    "template": _TEMPLATE,
    "system": _TEMPLATE,
    "max_length": Ignored("sequence_len decides"),
    "truncation_strategy": _NEVER_READ,
    "padding_side": _NEVER_READ,
    "sequence_parallel_size": _ONE_GPU,
    "response_prefix": _NEVER_READ,
    "max_pixels": _NEVER_READ,
    "norm_bbox": _NEVER_READ,
    "agent_template": _TEMPLATE,
    # Reporting
    "surogate_metrics_path": Ignored("log.jsonl in output_dir has the same"),
}

# Keys of one entry of datasets.
DATASET_KEYS: dict[str, Ignored | Refused] = {
    "prompt_field": _NO_DPO,
    "chosen_field": _NO_DPO,
    "rejected_field": _NO_DPO,
    "enable_thinking_field": _NO_DPO,
}

GROUPS = ("distributed", "loss", "distillation")
