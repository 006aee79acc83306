"""The registry: published parameter counts, spellings of names, refusals."""

import pytest

from surogate.models.config import count
from surogate.models.registry import MODELS, hf_config, lookup, resolve

COUNTS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
}


def test_every_entry_has_a_count() -> None:
    assert COUNTS.keys() == MODELS.keys()


@pytest.mark.parametrize("name,parameters", COUNTS.items())
def test_counts(name: str, parameters: int) -> None:
    assert count(lookup(name)) == parameters


@pytest.mark.parametrize(
    "spelling", ["Qwen/Qwen3-0.6B", "qwen/qwen3-0.6b", "qwen3-0.6b", " QWEN3-0.6b"]
)
def test_spellings(spelling: str) -> None:
    assert resolve(spelling) == "Qwen/Qwen3-0.6B"
    assert lookup(spelling).head_dim == 128


def test_a_copy_is_returned() -> None:
    hf_config("llama-3.2-1b")["rope_scaling"]["factor"] = 1.0
    assert lookup("llama-3.2-1b").rope.factor == 32.0


@pytest.mark.parametrize(
    "name,message",
    [
        ("qwen3-0.6", "did you mean Qwen3-0.6B?"),
        ("Qwen/Qwen3-7B", "did you mean Qwen/Qwen3-"),
        ("gpt-2", "known: Llama-3.1-405B, "),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        lookup(name)
    assert "\n" not in str(error.value)
