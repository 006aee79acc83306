"""Keys that were set but do nothing, each with the reason: another key or the device decides."""

from typing import Any

from surogate.settings import Config

Note = tuple[str, Any, str]  # key, value, reason
NO_EFFECT_ON_CPU = {
    "use_cuda_graphs": "there are no CUDA graphs on the CPU",
    "gradient_dtype": "the CPU computes in float32",
    "master_dtype": "the CPU computes in float32",
    "lora_dtype": "the CPU computes in float32",
    "fp8_fast_sums": "the CPU sums in float32",
}


def without_effect(config: Config) -> list[Note]:
    """Notes on keys that were set but that another key leaves without effect."""
    no_lora = None if config.lora else "lora = false"
    no_stop = None if config.early_stop else "early_stop = false"
    no_wandb = "wandb" not in config.report_to and "report_to does not name wandb"
    no_aim = "aim" not in config.report_to and "report_to does not name aim"
    no_recipe = config.recipe == "bf16" and "recipe = bf16"
    no_fp4 = config.recipe != "nvfp4" and f"recipe = {config.recipe}"
    no_fp8 = config.recipe != "fp8_hybrid" and f"recipe = {config.recipe}"
    other_scaling = config.fp8_scaling != "delayed" and f"fp8_scaling = {config.fp8_scaling}"
    no_history = no_fp8 or other_scaling
    no_bnb = not config.qlora_bnb and "qlora_bnb = false"
    no_normuon = config.optimizer != "normuon" and f"optimizer = {config.optimizer}"
    no_decay = config.weight_decay == 0 and "weight_decay = 0"
    reasons = {
        "num_epochs": config.max_steps > 0 and f"max_steps = {config.max_steps} decides",
        "warmup_ratio": config.warmup_steps > 0 and f"warmup_steps = {config.warmup_steps} decides",
        "wsd_decay_steps_fraction": config.lr_scheduler_type != "wsd"
        and f"lr_scheduler_type = {config.lr_scheduler_type}",
        "init_projections_to_zero": not config.from_scratch and "from_scratch = false",
        "validation_split_ratio": config.validation_datasets and "validation_datasets decides",
        "lmhead_chunks": config.auto_lmhead_chunks and "auto_lmhead_chunks = true decides",
        "max_model_len": not isinstance(config.rope_scaling, str) and "no rope_scaling by name",
        "master_dtype": config.lora and "with lora = true, lora_dtype decides",
        "adamw_learning_rate": no_normuon,
        "adamw_cautious_wd": no_decay,
        "normuon_momentum": no_normuon,
        "normuon_beta2": no_normuon,
        "normuon_cautious_wd": no_normuon or no_decay,
        "moment_dtype": config.optimizer == "adamw_8bit" and "optimizer = adamw_8bit",
        "recipe_until": no_recipe,
        "skip_quant_first_layers": no_recipe,
        "skip_quant_last_layers": no_recipe,
        "skip_quant_modules": no_recipe,
        "quantized_products": no_recipe,
        "fp4_four_over_six": no_fp4,
        "fp4_hadamard": no_fp4,
        "fp4_square_blocks": no_fp4,
        "fp4_stochastic_rounding": no_fp4,
        "fp8_scaling": no_fp8,
        "fp8_amax_history": no_history,
        "fp8_amax_algorithm": no_history,
        "fp8_margin": no_fp8,
        "fp8_fast_sums": no_fp8,
        "qlora_fp8": no_lora,
        "qlora_fp4": no_lora,
        "qlora_bnb": no_lora,
        "qlora_block_size": not config.qlora_fp8 and "qlora_fp8 = false",
        "qlora_four_over_six": not config.qlora_fp4 and "qlora_fp4 = false",
        "qlora_bnb_block_size": no_bnb,
        "qlora_bnb_double_quant": no_bnb,
        "lora_rank": no_lora,
        "lora_alpha": no_lora,
        "lora_dtype": no_lora,
        "lora_init": no_lora,
        "lora_target_modules": no_lora,
        "merge_adapter": no_lora,
        "eval_max_new_tokens": not config.eval_prompts and "no eval_prompts",
        "eval_recipe": no_recipe,
        "early_stop_patience": no_stop,
        "early_stop_threshold": no_stop,
        "wandb_project": no_wandb,
        "wandb_name": no_wandb,
        "wandb_mode": no_wandb,
        "aim_experiment": no_aim,
        "aim_repo": no_aim,
        "aim_name": no_aim,
    }
    return [
        (name, getattr(config, name), reason)
        for name, reason in reasons.items()
        if reason and name in config.origins
    ]


def notes_on(config: Config, kind: str = "") -> list[Note]:
    """(key, value, reason) of each key that was set and does nothing, on a device of that kind."""
    on_cpu = NO_EFFECT_ON_CPU if kind == "cpu" else {}
    known = {name for name, *_ in config.notes}
    return [
        *config.notes,
        *(
            (name, getattr(config, name), reason)
            for name, reason in on_cpu.items()
            if name in config.origins and name not in known
        ),
    ]
