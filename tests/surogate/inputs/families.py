"""Stock chat templates of model families, and the literals that surround an answer in each.

The templates come from the package trl, which keeps those of the models' repositories byte for
byte; SmolLM2's (Apache-2.0, huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) is written here.
The literals were read off the templates by eye: they are the independent half of test_masks.py.
"""

from functools import cache
from importlib.metadata import files
from typing import NamedTuple


class Family(NamedTuple):
    """header stands before an answer and end behind it; then comes second, if anything.

    empty is a think block without a thought, opened the beginning of one that the prompt writes.
    reasoning is the name of a message's field for it, and calls the form of a call's arguments.
    """

    header: str
    end: str
    empty: str = ""
    opened: str = ""
    second: str = ""
    reasoning: str | None = None
    calls: str | None = None
    call_end: str = ""  # where it differs from end
    after_result: str = ""  # what stands before an answer to a result, where it is no header


CHATML = "<|im_start|>assistant\n"
DEEPSEEK = "<｜Assistant｜>"
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
RESULTS_END = "<｜tool▁outputs▁end｜>"
BLOCK = "<think>\n\n</think>\n\n"
FAMILIES = {
    "smollm2": Family(CHATML, "<|im_end|>"),
    "qwen2_5": Family(CHATML, "<|im_end|>", calls="object"),
    "qwen3": Family(
        CHATML, "<|im_end|>", empty=BLOCK, reasoning="reasoning_content", calls="object"
    ),
    "qwen3_instruct_2507": Family(CHATML, "<|im_end|>", calls="object"),
    "qwen3_5_think": Family(
        CHATML,
        "<|im_end|>",
        empty=BLOCK,
        opened="<think>\n",
        reasoning="reasoning_content",
        calls="object",
    ),
    "nemotron_3_nano": Family(
        CHATML,
        "<|im_end|>",
        empty="<think></think>",
        opened="<think>\n",
        reasoning="reasoning_content",
        calls="object",
    ),
    "llama3": Family("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "llama3_1": Family(
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", calls="object"
    ),
    "llama3_2": Family(  # writes the date
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", calls="object"
    ),
    "gemma3": Family("<start_of_turn>model\n", "<end_of_turn>"),
    "gptoss": Family(
        "<|start|>assistant",
        "<|return|>",
        reasoning="thinking",
        calls="object",
        call_end="<|call|>",
    ),
    "deepseekv3": Family(DEEPSEEK, DEEPSEEK_END, calls="text", after_result=RESULTS_END),
    "deepseek_r1_distill": Family(
        DEEPSEEK,
        DEEPSEEK_END,
        calls="text",
        call_end="<｜tool▁call▁end｜>",
        after_result=RESULTS_END,
    ),
    "phi3": Family("<|assistant|>\n", "<|end|>", second="\n<|endoftext|>"),
    "glm4moe": Family(
        "<|assistant|>",
        "",
        empty="\n<think></think>\n",
        reasoning="reasoning_content",
        calls="object",
    ),
}
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = {
    name: {"bos_token": "<|begin|>", "eos_token": f.second.strip() or f.end or "<|endoftext|>"}
    for name, f in FAMILIES.items()
}
MARKERS = [
    *("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"),
    *("<end_of_turn>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<|user|>"),
    *("<|assistant|>", "<|system|>", "<|observation|>", "<｜tool▁call▁end｜>"),
]


@cache
def stock_template(name: str) -> str:
    """The template of a family."""
    if name == "smollm2":
        return SMOLLM2
    found = [f for f in files("trl") or [] if f.as_posix() == f"trl/chat_templates/{name}.jinja"]
    return found[0].read_text(encoding="utf-8")
