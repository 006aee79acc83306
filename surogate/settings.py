"""The supported settings: every key with its type, default, bounds and one line of help.

This is the only place where a key is declared. config.py reads files into these, schema.py makes
the errors, and docs/configuration.md is printed from them.
"""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from surogate.schema import fields_of

# A size that must be at least one.
Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Tracker = Literal["tensorboard", "wandb", "aim", "surogate"]


def key(description: str, **extra: Any) -> Meta:
    """The help of a key; `also` maps other spellings to a value, `refused` a value to a reason."""
    return Meta(description=description, extra=extra or None)


class DatasetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of rows. `read_by` lists the row types that a column key applies to."""

    path: Annotated[str, key("Local file or folder, or the name of a data set on the Hub")]
    subset: Annotated[str | None, key("Configuration of a Hub data set")] = None
    split: Annotated[str, key("Split of the data set")] = "train"
    samples: Annotated[Count | None, key("Take at most this many rows")] = None
    weight: Annotated[
        Positive | None,
        key(
            "Share of the training tokens, relative to the other data sets; null: as many as it has"
        ),
    ] = None
    malformed: Annotated[
        Literal["stop", "skip"], key("A row that cannot be read: an error, or skipped and counted")
    ] = "stop"
    type: Annotated[
        Literal["text", "instruction", "conversation", "auto"],
        key(
            "What a row is; auto looks at the columns",
            refused={"preference": "preference training (DPO) is not there yet; use conversation"},
        ),
    ]
    text_field: Annotated[str, key("Column of the raw text", read_by=("text",))] = "text"
    instruction_field: Annotated[
        str | None, key("Column of the instruction", read_by=("instruction",))
    ] = None
    output_field: Annotated[str | None, key("Column of the answer", read_by=("instruction",))] = (
        None
    )
    input_field: Annotated[
        str | None, key("Column of the instruction's input", read_by=("instruction",))
    ] = None
    system_prompt_type: Annotated[
        Literal["field", "fixed"] | None,
        key(
            "System prompt from system_prompt_field, or the fixed system_prompt",
            read_by=("instruction",),
        ),
    ] = None
    system_prompt_field: Annotated[
        str | None, key("Column of the system prompt", read_by=("instruction",))
    ] = None
    system_prompt: Annotated[
        str | None, key("The system prompt of every row", read_by=("instruction",))
    ] = None
    prompt_format: Annotated[
        str, key("User turn made of {instruction} and {input}", read_by=("instruction",))
    ] = "{instruction}\n{input}"
    prompt_format_no_input: Annotated[
        str, key("User turn of a row without input", read_by=("instruction",))
    ] = "{instruction}"
    messages_field: Annotated[
        str, key("Column of the list of messages", read_by=("conversation",))
    ] = "messages"
    system_field: Annotated[
        str | None, key("Column of the system prompt", read_by=("conversation",))
    ] = None
    tools_field: Annotated[str | None, key("Column of the tools", read_by=("conversation",))] = None
    completion_field: Annotated[
        str | None,
        key("Column that is appended as an assistant message", read_by=("conversation",)),
    ] = None
    message_property_mappings: Annotated[
        dict[str, str],
        key(
            "Names in a message of role, content, tool_calls, train and weight, if others",
            read_by=("conversation",),
        ),
    ] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every supported key of a configuration file, in the order of docs/configuration.md."""

    run_name: Annotated[str, key("Name of the run; by default the file's name")] = "run"
    num_epochs: Annotated[Count, key("Passes over the training rows")] = 3
    max_steps: Annotated[
        int, Meta(ge=-1), key("Stop after this many updates; -1: num_epochs decides")
    ] = -1
    output_dir: Annotated[str, key("Folder of checkpoints, logs and the result")] = "output"
    resume_from_checkpoint: Annotated[
        bool, key("Continue from the newest checkpoint in output_dir, if there is one")
    ] = True
    save_steps: Annotated[Count, key("Updates between checkpoints")] = 50
    save_total_limit: Annotated[Count, key("Keep this many of the newest checkpoints")] = 5
    async_save: Annotated[
        bool, key("Copy the state to host memory and write it while training goes on")
    ] = True
    verify_export: Annotated[
        bool, key("Load the result again and compare its logits with the trained model's")
    ] = True
    max_skipped_steps: Annotated[
        Count, key("Stop after this many updates in a row without a finite loss and gradient")
    ] = 20
    eval_steps: Annotated[Count, key("Updates between evaluations")] = 100
    logging_steps: Annotated[Count, key("Updates between lines of progress")] = 1
    from_scratch: Annotated[
        bool, key("Random weights in the shape of the model instead of its weights")
    ] = False
    log_file: Annotated[str | None, key("JSON-lines log; by default output_dir/log.jsonl")] = None
    train_seed: Annotated[
        int, Meta(ge=0), key("Seed of the order of rows, adapters and random weights")
    ] = 1234
    eval_seed: Annotated[int, Meta(ge=0), key("Seed of the split into evaluation rows")] = 1234
    device: Annotated[
        Literal["auto", "cpu", "cuda"], key("Where to compute; auto: the GPU if there is one")
    ] = "auto"

    model: Annotated[str, key("Folder of the model, or its name on the Hub")]
    torch_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        key("Type of the weights as they are loaded; auto: as stored"),
    ] = "auto"
    sequence_len: Annotated[int, Meta(ge=2), key("Tokens in a row")] = 1024
    max_model_len: Annotated[
        Count | None, key("Context that rope_scaling stretches to, in tokens")
    ] = None
    rope_scaling: Annotated[
        str | dict[str, Any] | None,
        key("linear, dynamic or yarn (with max_model_len), or the model's rope_scaling table"),
    ] = None
    init_projections_to_zero: Annotated[
        bool, key("With from_scratch: attention output and MLP down projection start at zero")
    ] = False

    per_device_train_batch_size: Annotated[Count, key("Rows in a micro-batch")] = 2
    gradient_accumulation_steps: Annotated[Count, key("Micro-batches in an update")] = 4
    optimizer: Annotated[
        Literal["adamw", "adamw_8bit", "normuon"],
        key(
            "Update rule; adamw_8bit: moments of 4096 elements or more take 8 bits each; normuon: "
            "orthogonal updates of the layers' matrices, AdamW's of the rest (needs lora = false)"
        ),
    ] = "adamw"
    learning_rate: Annotated[float, Meta(ge=0), key("Highest learning rate")] = 2e-4
    adamw_learning_rate: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        key(
            "With normuon, the highest learning rate of embeddings, head, norms and biases; null: "
            "learning_rate"
        ),
    ] = None
    lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant", "wsd"], key("Shape after the warm-up")
    ] = "linear"
    warmup_ratio: Annotated[
        float, Meta(ge=0, le=1), key("Share of all updates that warms up, from zero")
    ] = 0.0
    warmup_steps: Annotated[
        int, Meta(ge=0), key("Updates that warm up; when not 0 it goes before warmup_ratio")
    ] = 0
    cooldown_steps: Annotated[int, Meta(ge=0), key("Updates of a final 1 - sqrt decay")] = 0
    wsd_decay_steps_fraction: Annotated[
        float, Meta(ge=0, le=1), key("Share of all updates that the wsd schedule decays in")
    ] = 0.1
    final_lr_fraction: Annotated[
        float, Meta(ge=0, le=1), key("Last learning rate as a share of the highest")
    ] = 0.0
    weight_decay: Annotated[
        float, Meta(ge=0), key("Decoupled weight decay; never on norms and biases")
    ] = 0.0
    max_grad_norm: Annotated[
        float, Meta(ge=0), key("Clip the gradient to this global norm; 0: do not clip")
    ] = 1.0
    adamw_beta1: Annotated[float, Meta(ge=0, lt=1), key("Decay of the first moment")] = 0.9
    adamw_beta2: Annotated[float, Meta(ge=0, lt=1), key("Decay of the second moment")] = 0.999
    adamw_epsilon: Annotated[float, Meta(gt=0), key("Added to the root of the second moment")] = (
        1e-8
    )
    adamw_cautious_wd: Annotated[
        bool, key("AdamW's weight decay only where the update does not grow the weight")
    ] = False
    normuon_momentum: Annotated[float, Meta(ge=0, lt=1), key("Decay of NorMuon's momentum")] = 0.95
    normuon_beta2: Annotated[
        float, Meta(ge=0, lt=1), key("Decay of the second moment that NorMuon keeps of each row")
    ] = 0.95
    normuon_cautious_wd: Annotated[
        bool, key("NorMuon's weight decay only where the update does not grow the weight")
    ] = True
    loss_scale: Annotated[
        Literal["default", "last_round", "all", "thinking_only", "final_only"],
        key("Which tokens of a conversation are trained on; default: what the assistant says"),
    ] = "default"
    sample_packing: Annotated[
        bool, key("Put several documents in a row; they never see each other")
    ] = True

    use_cuda_graphs: Annotated[bool, key("Record a step once and replay it")] = True
    recompute: Annotated[
        Literal["auto", "none", "block", "selective"],
        key(
            "What backward computes again to save memory; true is block, false is none; auto: the"
            " fastest that fits the free memory",
            also={True: "block", False: "none"},
        ),
    ] = "auto"
    lmhead_chunks: Annotated[
        Count | None, key("Pieces in which the logits are computed; null: chosen by size")
    ] = None
    auto_lmhead_chunks: Annotated[
        bool | None, key("true: choose lmhead_chunks by size; false: one piece unless it is set")
    ] = None
    gpus: Annotated[
        int,
        Meta(ge=0),
        key("GPUs to train on", only=1, why="training uses one GPU; use gpus = 1"),
    ] = 1

    recipe: Annotated[
        Literal["bf16", "fp8_hybrid", "nvfp4"],
        key(
            "Number formats of the layers' matrix products",
            also={"fp8-hybrid": "fp8_hybrid", "fp8": "fp8_hybrid", "fp4-nvfp4": "nvfp4"},
        ),
    ] = "bf16"
    recipe_until: Annotated[
        float,
        Meta(gt=0, le=1),
        key(
            "The recipe computes this share of the steps, the first ones, rounded up to a whole "
            "number; products of those after, and of evaluations from there on, are bf16"
        ),
    ] = 1.0
    skip_quant_first_layers: Annotated[
        int, Meta(ge=0), key("First layers that the recipe leaves in bf16")
    ] = 0
    skip_quant_last_layers: Annotated[
        int, Meta(ge=0), key("Last layers that the recipe leaves in bf16")
    ] = 0
    skip_quant_modules: Annotated[
        tuple[Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ...],
        key("Projections of every layer that the recipe leaves in bf16"),
    ] = ()
    quantized_products: Annotated[
        tuple[Literal["forward", "dgrad", "wgrad"], ...],
        key("Which products of a layer the recipe computes; the others are bf16"),
    ] = ("forward", "dgrad", "wgrad")
    fp8_scaling: Annotated[
        Literal["delayed", "tensor", "row"],
        key("Scales of FP8: by the amax of the last steps, of the tensor, or of each row"),
    ] = "delayed"
    fp8_amax_history: Annotated[Count, key("Steps that delayed scaling looks back")] = 16
    fp8_amax_algorithm: Annotated[
        Literal["max", "most_recent"], key("What delayed scaling takes of its history")
    ] = "max"
    fp8_fast_sums: Annotated[
        tuple[Literal["forward", "dgrad", "wgrad"], ...],
        key("FP8 products whose sums tensor cores keep in fewer bits, a tenth faster"),
    ] = ("forward", "dgrad")
    fp8_margin: Annotated[
        int, Meta(ge=0, le=8), key("Powers of two left free above the amax by FP8 scales")
    ] = 0
    fp4_four_over_six: Annotated[
        bool, key("NVFP4 blocks of weights and activations take the better of two scales")
    ] = True
    fp4_hadamard: Annotated[
        bool, key("Both operands of NVFP4 weight gradients are transformed along tokens")
    ] = True
    fp4_stochastic_rounding: Annotated[bool, key("Round gradients to NVFP4 at random")] = True
    fp4_square_blocks: Annotated[
        bool,
        key("NVFP4 weights in blocks of 16 x 16; false: 1 x 16 along the sum of each product"),
    ] = True
    gradient_dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        key(
            "Type of the gradients; null: fp32 with lora, else as the weights",
            refused={"e5m2": "FP8 gradients are not there yet; use bf16 or fp32"},
        ),
    ] = None
    master_dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        key("Type of the weights that full training updates; null: as they are computed with"),
    ] = None
    moment_dtype: Annotated[
        Literal["fp32", "bf16"], key("Type of the optimizer's moments; bf16 is rounded at random")
    ] = "fp32"

    lora: Annotated[
        bool, key("Train LoRA adapters; unset, false for the verb pt and with from_scratch")
    ] = True
    lora_rank: Annotated[Count, key("Rank of the adapters")] = 16
    lora_alpha: Annotated[Count, key("An adapter's output is scaled by lora_alpha / lora_rank")] = (
        32
    )
    lora_dtype: Annotated[Literal["fp32", "bf16"], key("Type of the adapters' master copy")] = (
        "fp32"
    )
    lora_target_modules: Annotated[
        tuple[str, ...], key("Projections that get an adapter, such as q_proj; all: every one")
    ] = ("all",)
    lora_init: Annotated[
        Literal["default", "error"],
        key(
            "What adapters begin as; default: nothing, with a random A; error: the best product of "
            "their rank for what storing the weights lost (needs qlora_fp8, qlora_fp4 or qlora_bnb)"
        ),
    ] = "default"
    qlora_fp8: Annotated[
        bool, key("Store the frozen weights in FP8, in square blocks of qlora_block_size")
    ] = False
    qlora_fp4: Annotated[bool, key("Store the frozen weights in NVFP4, in blocks of 16")] = False
    qlora_four_over_six: Annotated[
        bool, key("Stored NVFP4 blocks take the better of two scales")
    ] = True
    qlora_bnb: Annotated[bool, key("Store the frozen weights in NF4, as bitsandbytes does")] = False
    qlora_block_size: Annotated[Literal[64, 128, 256], key("Side of an FP8 block")] = 128
    qlora_bnb_block_size: Annotated[Literal[64, 128, 256, 512], key("Elements of an NF4 block")] = (
        64
    )
    qlora_bnb_double_quant: Annotated[bool, key("Quantise the scales of NF4 blocks too")] = True
    merge_adapter: Annotated[bool, key("Add the adapters to the weights at the end")] = False

    datasets: Annotated[tuple[DatasetConfig, ...], key("Training rows: a list of data sets")] = ()
    validation_datasets: Annotated[
        tuple[DatasetConfig, ...], key("Evaluation rows: a list of data sets")
    ] = ()
    validation_split_ratio: Annotated[
        float,
        Meta(ge=0, lt=1),
        key("Share of the training rows kept for evaluation when validation_datasets is empty"),
    ] = 0.1
    dataloader_num_workers: Annotated[
        Count | None, key("Processes that tokenize; null: one a core, 8 at most", also={0: 1})
    ] = None

    eval_prompts: Annotated[
        tuple[str, ...],
        key("Prompts that each evaluation continues, through the chat template if there is one"),
    ] = ()
    eval_max_new_tokens: Annotated[Count, key("Tokens that eval_prompts are continued by")] = 64
    eval_recipe: Annotated[
        Literal["same", "bf16"],
        key(
            "Products of evaluations; same: those of the recipe; bf16: those of the model as it is "
            "exported"
        ),
    ] = "same"
    early_stop: Annotated[
        bool, key("Stop when the evaluation loss has not fallen for early_stop_patience times")
    ] = False
    early_stop_patience: Annotated[
        Count, key("Evaluations in a row without a lower loss that stop the run")
    ] = 3
    early_stop_threshold: Annotated[
        float, Meta(ge=0), key("Nats by which a loss must be below the lowest to be lower")
    ] = 0.0
    best_checkpoint: Annotated[
        Literal["none", "keep", "export"],
        key("Keep the checkpoint of the lowest evaluation loss in best/; export its weights too"),
    ] = "none"

    report_to: Annotated[
        tuple[Tracker, ...],
        key(
            "Trackers beside log.jsonl, which surogate stands for",
            also={"none": ()} | {name: (name,) for name in get_args(Tracker)},
        ),
    ] = ()
    wandb_project: Annotated[str, key("Project in W&B")] = "Surogate"
    wandb_name: Annotated[str | None, key("Name in W&B; null: run_name")] = None
    wandb_mode: Annotated[
        Literal["online", "offline"] | None,
        key("Send to W&B, or keep for `wandb sync`; null: as W&B itself is set up"),
    ] = None
    aim_experiment: Annotated[str | None, key("Experiment in Aim; null: Aim's default")] = None
    aim_repo: Annotated[str | None, key("Folder or server of Aim; null: output_dir")] = None
    aim_name: Annotated[str | None, key("Name in Aim; null: run_name")] = None


class Config(Settings, frozen=True, kw_only=True):
    """The settings of a run, where each came from, and what was ignored.

    `origins` maps the keys that were set to "FILE", "--set", "--recipe" or "verb pt"; a key that
    is not in it has its default. `notes` has one (key, value, reason) for each ignored key.
    """

    origins: dict[str, str] = {}
    notes: tuple[tuple[str, Any, str], ...] = ()


FIELDS = fields_of(Settings)
DATASET_FIELDS = fields_of(DatasetConfig)

# Sections of docs/configuration.md, each by its first key.
SECTIONS = {
    "General": "run_name",
    "Model": "model",
    "Training": "per_device_train_batch_size",
    "Memory and speed": "use_cuda_graphs",
    "Precision": "recipe",
    "Adapters": "lora",
    "Data": "datasets",
    "Evaluation": "eval_prompts",
    "Reporting": "report_to",
}

# Settings that say where and how often things are written, how fast they are computed or when to
# stop early, never what is computed: two runs that differ in these alone take the same steps.
BOOKKEEPING = frozenset(
    "run_name output_dir resume_from_checkpoint save_steps save_total_limit eval_steps"
    " logging_steps log_file device use_cuda_graphs recompute dataloader_num_workers eval_prompts"
    " eval_max_new_tokens eval_recipe early_stop early_stop_patience early_stop_threshold"
    " best_checkpoint report_to wandb_project wandb_name wandb_mode aim_experiment aim_repo"
    " aim_name async_save verify_export max_skipped_steps".split()
)
