"""The page of surogate watch in a real browser (Chromium): what it shows, in light and in dark."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from surogate.watch import Server, serve
from tests.surogate.test_watch import line, step, write

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    attack = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    records = [step(n, loss=4 / n, norm=1.0, lr=1e-4, memory=2**31) for n in range(1, 41)]
    records += [
        line(log="eval", step=40, loss=0.25, sources={"<b>": {"loss": 0.5, "tokens": 9}}),
        line(log="sample", step=40, prompt="Why?", text=attack),
        line(log="message", step=40, text=attack),
    ]
    write(tmp_path / "runs" / "one", *records)
    with serve(tmp_path / "runs", 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def browse(server: Server, folder: Path, *options: str) -> str:
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1280,1500"),
            *("--virtual-time-budget=5000", *options),
            f"http://localhost:{server.server_address[1]}/",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_shows_a_run_and_texts_as_text(server, tmp_path):
    page = browse(server, tmp_path, "--dump-dom")
    assert "<title>mine · Surogate</title>" in page  # neither script ran
    body = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S)
    assert "<img" not in body
    text = unescape(re.sub(r"<[^>]+>", " ", body))
    assert 'onerror="document.title=1"' in text
    facts = re.sub(r"\s+", " ", text)
    for fact in ("40 / 9", "running", "0.1000", "0.2500 lowest 0.2500", "2.0 GiB", "Why?", "<b>"):
        assert fact in facts


def pixels(server: Server, folder: Path, *options: str) -> np.ndarray:
    file = folder / "page.png"
    browse(server, folder, f"--screenshot={file}", *options)
    return imread(file)[..., :3]


def test_light_and_dark(server, tmp_path):
    light = pixels(server, tmp_path)
    dark = pixels(server, tmp_path, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
    assert np.median(light) > 0.9 and np.median(dark) < 0.2
    for image in (light, dark):
        blue = (image[..., 2] > 0.6) & (image[..., 2] - image[..., 0] > 0.3)
        assert blue[250:500].any(axis=0).sum() > 500  # the curve of the loss goes across
