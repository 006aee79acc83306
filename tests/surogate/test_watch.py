"""surogate watch: what the server reads, answers and refuses."""

import gzip
import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surogate.errors import UserError
from surogate.watch import Follower, Server, serve

RUN = {"log": "run", "config": {"run_name": "mine", "model": "tiny"}, "total_steps": 9}


def line(**record: Any) -> bytes:
    return orjson.dumps(record) + b"\n"


def step(number: int, **fields: Any) -> bytes:
    return line(log="step", step=number, **{"loss": 2.5, **fields})


def write(folder: Path, *lines: bytes, name: str = "log.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(line(**RUN) + b"".join(lines))
    return folder / name


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path, 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def get(server: Server, path: str) -> Any:
    reply, body = ask(server, path)
    assert reply.status == 200, body
    return json.loads(body)


def test_lists_runs_and_gives_what_is_new(server, tmp_path):
    log = write(tmp_path / "a", step(1, norm=0.5, memory=7), line(log="eval", step=1, loss=3.0))
    write(tmp_path / "b" / "deep", line(log="end", step=0, status="done", text="x"))
    runs = get(server, "/api/runs")["runs"]
    assert [(r["folder"], r["name"], r["step"], r["total"], r["status"]) for r in runs] == [
        ("a", "mine", 1, 9, "running"),
        ("b/deep", "mine", 0, 9, "done"),
    ]
    place = f"/api/run?id={runs[0]['id']}"
    first = get(server, place)
    assert first["steps"]["loss"] == [2.5] and first["steps"]["sol"] == [None]
    assert [record["log"] for record in first["others"]] == ["run", "eval"]
    with log.open("ab") as file:
        file.write(step(2) + line(log="message", step=2, text="hello"))
    more = get(server, f"{place}&generation=0&steps=1&others=2")
    assert more["from"] == 1 and more["steps"]["step"] == [2]
    assert [record["text"] for record in more["others"]] == ["hello"]
    assert get(server, f"{place}&generation=0&steps=2&others=3")["steps"]["step"] == []


def test_log_that_is_cut_back_by_a_resumption(server, tmp_path):
    """It is replaced by a shorter one: the page starts over."""
    log = write(tmp_path, *(step(number) for number in range(1, 9)))
    [run] = get(server, "/api/runs")["runs"]
    assert get(server, f"/api/run?id={run['id']}")["generation"] == 0
    scratch = write(tmp_path / "x", *(step(number) for number in range(1, 6)))
    os.replace(scratch, log)
    with log.open("ab") as file:
        file.write(b"".join(step(number) for number in range(6, 12)))
    reply = get(server, f"/api/run?id={run['id']}&generation=0&steps=8&others=1")
    assert reply["generation"] == 1 and reply["from"] == 0
    assert reply["steps"]["step"] == list(range(1, 12))


def test_line_that_is_half_written_waits(tmp_path):
    log = write(tmp_path, step(1))
    follower = Follower(log)
    half = step(2)
    for part in (half[:9], half[9:-1]):
        with log.open("ab") as file:
            file.write(part)
        follower.read()
        assert follower.steps["step"] == [1]
    with log.open("ab") as file:
        file.write(b"\n")
    follower.read()
    assert follower.steps["step"] == [1, 2]


def _parts(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = ("log", "step", "loss", "config")
    record = st.fixed_dictionaries(dict.fromkeys(keys, inner))
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner) | record


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5)
LINES = st.binary(max_size=200) | st.recursive(LEAVES, _parts).map(orjson.dumps)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=LINES)
def test_any_line_is_taken(tmp_path, content):
    follower = Follower(write(tmp_path, content + b"\n", step(3)))
    follower.read()
    assert follower.steps["step"][-1] == 3
    assert len({len(values) for values in follower.steps.values()}) == 1
    orjson.dumps(follower.new(0, 0, 0))
    orjson.dumps(follower.summary())


@pytest.mark.parametrize(
    "path",
    [
        "/../secret",
        "/%2e%2e/secret",
        "/secret.jsonl",
        "//etc/passwd",
        "/api/run?id=../secret.jsonl",
        "/api/run?id=%2e%2e%2fsecret.jsonl",
        "/api/run?id=",
        "/api/run",
        "/api",
        "/watch.html",
    ],
)
def test_names_that_are_no_run(server, tmp_path, path):
    (tmp_path / "secret.jsonl").write_text("hidden")
    (tmp_path.parent / "secret").write_text("hidden")
    write(tmp_path)
    get(server, "/api/runs")
    reply, body = ask(server, path)
    assert reply.status == 404 and b"hidden" not in body


@pytest.mark.parametrize("count", ["-1", "x", "1e3", "9" * 5000])
def test_counts_that_are_none(server, tmp_path, count):
    write(tmp_path)
    [run] = get(server, "/api/runs")["runs"]
    assert ask(server, f"/api/run?id={run['id']}&steps={count}")[0].status == 400


def test_only_logs_in_the_folder_are_runs(server, tmp_path):
    outside = write(tmp_path.parent / "outside")
    (tmp_path / "link").symlink_to(outside.parent)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")  # reading it would wait for ever
    write(tmp_path / ".hidden")
    write(tmp_path / "step_00000005")
    write(tmp_path / "1/2/3/4/5")
    write(tmp_path / "1/2/3/4", name="other.log")
    assert [run["folder"] for run in get(server, "/api/runs")["runs"]] == ["1/2/3/4"]


def test_run_that_is_removed_leaves_the_list(server, tmp_path):
    log = write(tmp_path)
    [run] = get(server, "/api/runs")["runs"]
    log.unlink()
    assert ask(server, f"/api/run?id={run['id']}")[0].status == 404
    assert get(server, "/api/runs")["runs"] == []


def test_is_for_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    for name in ("localhost", "localhost:1234", "127.0.0.1:80", "[::1]:9", "[::1]"):
        assert ask(server, "/", Host=name)[0].status == 200
    for name in ("evil.example", "evil.example:8420", "127.0.0.1.evil.example", "", "10.0.0.1"):
        assert ask(server, "/", Host=name)[0].status == 403


def test_reads_only(server):
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method=method)[0].status == 501


def test_page_needs_nothing_from_elsewhere(server):
    reply, body = ask(server, "/")
    text = body.decode()
    assert not re.search(r"(src|href)=\"(?!data:)|https?://|url\(|@import", text)
    assert "innerHTML" not in text and "insertAdjacent" not in text and "eval(" not in text
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_compresses(server):
    reply, body = ask(server, "/", **{"Accept-Encoding": "gzip"})
    assert reply.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == ask(server, "/")[1] == server.page


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match="none: there is no such folder"):
        serve(tmp_path / "none", 0)
    with serve(tmp_path, 0) as one, pytest.raises(UserError, match="in use; use another with"):
        serve(tmp_path, one.server_address[1])


def test_file_stands_for_its_folder(tmp_path):
    with serve(write(tmp_path), 0) as one:
        assert one.runs.folder == tmp_path.resolve()


def test_command_ends_on_ctrl_c(tmp_path):
    code = "from surogate.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert re.match(rf"watching {tmp_path}: http://localhost:\d+ \(Ctrl-C ends\)$", first)
        assert process.stdout.readline().startswith("from another machine: ssh -L ")
        process.send_signal(2)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and errors == ""
