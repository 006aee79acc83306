"""The same training step by transformers and PEFT, for a user who would pick those: random weights,
bf16, SDPA attention, fused AdamW.

    python -m bench.peers qwen3-0.6b lora --rows 2 --accumulation 4 --variant compile

``compile`` compiles each layer with torch.compile, ``liger`` swaps in Liger's kernels. Needs torch
with CUDA, transformers, and peft for LoRA. Prints one JSON line; ``memory_gib`` is the most that
torch's arrays took, without the CUDA context, which is to the peer's advantage.
"""

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

# From a checkout, transformers would take our folder kernels/ for the package of that name.
modules: dict[str, Any] = sys.modules
modules.setdefault("kernels", None)

import torch  # noqa: E402
import transformers  # noqa: E402

from bench.rows import Row, parser  # noqa: E402
from surogate.models.lora import TARGETS  # noqa: E402
from surogate.models.registry import hf_config  # noqa: E402

VARIANTS = ("eager", "compile", "liger")
WARMUP = 2  # steps before those that are timed: the first compiles


def build(config: dict[str, Any], row: Row, variant: str, device: str) -> Any:
    """The model of a config.json, with an adapter on every projection for LoRA."""
    kind = config["model_type"]
    if variant == "liger":
        liger = importlib.import_module("liger_kernel.transformers")
        getattr(liger, f"apply_liger_kernel_to_{kind}")()
    settings = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **settings),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )
    model.config.use_cache = False
    if row.recompute == "block":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.model.layers
    if row.mode == "lora":
        import peft

        lora = peft.LoraConfig(
            r=row.rank, lora_alpha=2 * row.rank, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, lora)
    if variant == "compile":
        for layer in layers:
            layer.compile()
    return model.train()


def measure(config: dict[str, Any], row: Row, variant: str, device: str = "cuda") -> dict[str, Any]:
    """Times steps after those that warm up, each from an idle card to the last update."""
    torch.manual_seed(0)
    model = build(config, row, variant, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    shape = (row.accumulation, row.rows, row.length)
    micros = torch.randint(0, config["vocab_size"], shape, device=device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def backward(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        (loss / row.accumulation).backward()
        return loss.detach()

    seconds, losses = [], []
    for _ in range(WARMUP + row.steps):
        synchronize()
        start = time.perf_counter()
        found = [backward(ids) for ids in micros]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(found[-1].item())
    return {
        **row.speed(seconds[WARMUP:]),
        "loss": [losses[WARMUP], losses[-1]],
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--variant", choices=VARIANTS, default="eager")
    args = made.parse_args()
    row = Row.of(args)
    if row.recipe != "bf16":
        made.error(f"--recipe {row.recipe}: peers run in bf16")
    found = measure(hf_config(row.model), row, args.variant)
    names = ("torch", "transformers", "peft")
    versions = {name: importlib.metadata.version(name) for name in names}
    card = torch.cuda.get_device_name()
    print(json.dumps({**found, "card": card, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
