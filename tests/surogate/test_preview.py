"""What `surogate preview` shows is what is trained on, in a terminal and as a page."""

import io
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.image import imread
from rich.console import Console

from surogate.cli import main
from surogate.config import load_config
from surogate.data.loader import Loader
from surogate.data.vocabulary import load_tokenizer
from surogate.preview import preview, show
from surogate.preview_page import page
from surogate.setup import load_rows, locate
from tests.surogate.inputs.tiny import chat, jsonl
from tests.surogate.runs import make_model

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ATTACK = "<script>document.title=1</script>\x1b[31m<img src=x onerror='document.title=2'>&amp;"
TEXTS = ["the cat", "你好 🙂", "a\n\tb", ATTACK]


@pytest.fixture
def config(tmp_path):
    """A run of two data sets, one of them with a malformed row and a question without answer."""
    make_model(tmp_path / "model")
    rows = [{"messages": chat("sees?", text + f" {i}")} for i, text in enumerate(TEXTS * 5)]
    bad = [{"messages": []}, {"messages": chat("never answered")}]
    more = [{"messages": chat("likes?", f"the dog {i}")} for i in range(20)]
    table = {
        "model": str(tmp_path / "model"),
        "output_dir": str(tmp_path / "out"),
        "sequence_len": 128,
        "validation_split_ratio": 0,
        "datasets": [
            {
                "path": jsonl(tmp_path / "rows.jsonl", rows + bad),
                "type": "conversation",
                "malformed": "skip",
                "weight": 3,
            },
            {"path": jsonl(tmp_path / "<b>.jsonl", more), "type": "conversation", "weight": 1},
        ],
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(table))
    return file


def seen_of(file, rows=2):
    config = load_config(file)
    packed = load_rows(config, *locate(config)).train
    vocabulary = load_tokenizer(config.model)
    return preview(packed, vocabulary, rows=rows, config=config), packed, vocabulary


def test_rows_are_those_of_the_first_batch(config):
    seen, packed, vocabulary = seen_of(config)
    batch = Loader(packed, rows_per_batch=2, seed=load_config(config).train_seed).batch(0)
    for row, tokens, labels in zip(
        seen.rows, batch.tokens.reshape(2, -1), batch.labels.reshape(2, -1), strict=True
    ):
        ids = [i for document in row.documents for p in document.pieces for i in p.ids]
        assert ids == tokens[: 128 - row.padding].tolist()
        learned = [
            i for document in row.documents for p in document.pieces if p.target for i in p.ids
        ]
        assert learned == labels[labels != -100].tolist()
        for document in row.documents:
            text = "".join(piece.text for piece in document.pieces)
            all_ids = [i for piece in document.pieces for i in piece.ids]
            assert text == vocabulary.tokenizer.decode(all_ids, skip_special_tokens=False)
            assert "\ufffd" not in text
            starts = np.cumsum([0, *(len(piece.ids) for piece in document.pieces)])
            assert [p.position for p in document.pieces] == starts[:-1].tolist()
            assert document.tokens == starts[-1]
            said = [piece for piece in document.pieces if piece.target]
            assert document.supervised == sum(len(piece.ids) for piece in said)
            assert said[-1].special and said[-1].text == "<|end|>"


def test_facts_and_shares(config):
    seen, packed, _ = seen_of(config)
    facts = dict(seen.facts)
    assert facts["supervised"].startswith(f"{packed.supervised:,} (")
    assert facts["nothing to learn"] == "1 documents"
    assert facts["left out first"].endswith("rows.jsonl row 22")
    shares = [dict(zip(seen.headings, share, strict=True)) for share in seen.shares]
    assert [s["data set"] for s in shares] == ["rows.jsonl", "<b>.jsonl"]
    assert [s["wanted"] for s in shares] == ["75.0%", "25.0%"]
    assert [s["skipped rows"] for s in shares] == ["1 x no messages", ""]
    assert sum(int(s["tokens"].replace(",", "")) for s in shares) == packed.report.tokens


def test_terminal_with_and_without_colours(config):
    seen, _, _ = seen_of(config, rows=99)
    plain = io.StringIO()
    show(seen, Console(file=plain, width=100, soft_wrap=True))
    assert "<|assistant|>⟦the cat " in plain.getvalue() and "<|end|>⟧" in plain.getvalue()
    assert "\x1b" not in plain.getvalue() and "␛[31m" in plain.getvalue()
    coloured = io.StringIO()
    show(seen, Console(file=coloured, width=100, force_terminal=True, soft_wrap=True))
    green = re.findall(r"\x1b\[32m([^\x1b]*)", coloured.getvalue())
    assert "⟦" not in coloured.getvalue()
    assert "the cat" in "".join(green) and "sees" not in "".join(green)


class Elements(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_page_holds_texts_as_text_and_loads_nothing(config):
    seen, _, _ = seen_of(config, rows=99)
    made = page(seen)
    elements = Elements(made).found
    tags = {tag for tag, _ in elements}
    assert not tags & {"script", "img", "b{", "link", "iframe", "object", "base"}
    assert not any({"src", "href", "onerror"} & attrs.keys() for _, attrs in elements)
    assert "url(" not in made and "@import" not in made and "prefers-color-scheme: dark" in made
    shown = unescape(re.sub(r"<[^>]+>", "", made.replace("<i>↵</i>", "")))
    assert ATTACK[:33] in shown and "你好 🙂" in shown and "<b>.jsonl" in shown
    ids = [i for r in seen.rows for d in r.documents for p in d.pieces for i in p.ids]
    titles = [a["title"] for tag, a in elements if tag == "span" and "title" in a]
    assert [int(i) for t in titles for i in t.split(",")[0].split()[1:]] == ids


def test_command(config, tmp_path):
    result = CliRunner().invoke(main, ["preview", str(config), "--rows", "1"])
    assert result.exit_code == 0 and "⟦" in result.output
    assert result.output.count("\nrow ") == 1
    file = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["preview", str(config), "--html", str(file)])
    assert result.exit_code == 0 and file.read_text().startswith("<!doctype html>")
    broken = CliRunner().invoke(main, ["preview", str(config), "--html", f"{tmp_path}/no/x"])
    assert broken.exit_code == 1 and "Traceback" not in broken.output


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_page_in_a_browser(config, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page(seen_of(config, rows=99)[0]))

    def browse(*options: str) -> str:
        done = subprocess.run(
            [
                *(str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,900"),
                *(*options, file.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout

    assert "<title>run: training rows</title>" in browse("--dump-dom")  # no script ran
    grounds = []
    for name, dark in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        picture = tmp_path / f"{name}.png"
        browse(f"--screenshot={picture}", *dark)
        pixels = imread(picture)[..., :3]
        grounds.append(float(np.median(pixels)))
        green = (pixels[..., 1] - pixels[..., 0] > 0.05) & (pixels[..., 1] > pixels[..., 2])
        assert green.mean() > 0.001  # learned text has a ground of its own
    assert grounds[0] > 0.9 and grounds[1] < 0.2
