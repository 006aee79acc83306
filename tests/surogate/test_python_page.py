"""docs/python.md is true: its examples run, on a small model in the place that the page names."""

import re
from pathlib import Path

from tests.models.tiny import both

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
MODEL = Path(__file__).parents[2] / "examples" / "shakespeare" / "model"


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    both("qwen3_tied", tmp_path / "runs" / "shakespeare")
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(code): code - 32 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "runs" / "shakespeare" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert "(5, 128)" in capsys.readouterr().out
    assert names["result"].count == 5
