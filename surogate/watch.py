"""``surogate watch DIR``: a page with the runs below a folder, as their logs grow.

A small server of the standard library, bound to 127.0.0.1: nobody else on the network sees it, and
from another machine it is reached through a tunnel, ``ssh -L 8420:localhost:8420 HOST``. It reads
logs and writes nothing. What a request can name is a run of the list, by a hash of its path, never
a path; the page is one file without anything from elsewhere, and puts texts in as text.

    GET /           the page
    GET /api/runs   every run: id, name, folder, step, total steps, status
    GET /api/run    ?id= and what the page has already (generation, steps, others): what is new
"""

import base64
import contextlib
import gzip
import os
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from surogate.errors import UserError

HOST = "127.0.0.1"
PORT = 8420
DEPTH = 4  # folders below DIR that logs are looked for in
COLUMNS = ("step", "loss", "norm", "lr", "tokens_per_second", "sol", "memory", "duration_ms")
# Names by which a browser reaches this machine. Any other is a page elsewhere whose name was made
# to point here (DNS rebinding).
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")
_START = b'{"log":"run"'

Number = int | float | None


class Follower:
    """A log read as it grows. ``generation`` goes up when it was begun anew or cut back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.steps: dict[str, list[Number]] = {name: [] for name in COLUMNS}
        self.others: list[dict[str, Any]] = []  # records of every other kind
        self._file, self._offset = -1, 0
        self._lock = threading.Lock()

    def read(self) -> None:
        """Takes in what is new. A line that is not whole yet waits; one that is no record is left
        out.
        """
        with self._lock, self.path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._file or facts.st_size < self._offset:
                self._forget(facts.st_ino)
            file.seek(self._offset)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._add(line)

    def new(self, generation: int, steps: int, others: int) -> dict[str, Any]:
        """What a page lacks that has so many steps and other records of a generation."""
        with self._lock:
            if generation != self.generation:
                steps = others = 0
            columns = {name: values[steps:] for name, values in self.steps.items()}
            return {
                "generation": self.generation,
                "from": steps,
                "steps": columns,
                "others": self.others[others:],
            }

    def summary(self) -> dict[str, Any]:
        """The line of the list."""
        with self._lock:
            starts = [record for record in self.others if record["log"] == "run"]
            last = self.others[-1] if self.others else {}
            config = starts[-1].get("config") if starts else None
            return {
                "name": config.get("run_name") if isinstance(config, dict) else None,
                "step": self.steps["step"][-1] if self.steps["step"] else 0,
                "total": starts[-1].get("total_steps") if starts else None,
                "status": last.get("status") if last.get("log") == "end" else "running",
                "written": self.path.stat().st_mtime,
            }

    def _forget(self, file: int) -> None:
        self.generation += self._file != -1
        self._file, self._offset = file, 0
        self.others.clear()
        for values in self.steps.values():
            values.clear()

    def _add(self, line: bytes) -> None:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            return
        if not isinstance(record, dict) or "log" not in record:
            return
        if record["log"] != "step":
            self.others.append(record)
            return
        for name, values in self.steps.items():
            values.append(_number(record.get(name)))


def _number(value: Any) -> Number:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class Runs:
    """The logs below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._followers: dict[str, Follower] = {}
        self._lock = threading.Lock()

    def all(self) -> list[dict[str, Any]]:
        """The summary of each run: those that go on first, then by when they were written to."""
        with self._lock:
            for path in _logs(self.folder):
                self._followers.setdefault(_identity(path, self.folder), Follower(path))
            known = dict(self._followers)
        found = []
        for name, follower in known.items():
            try:
                follower.read()
                summary = follower.summary()
            except OSError:  # it was removed
                with self._lock:
                    self._followers.pop(name, None)
                continue
            place = follower.path.parent.relative_to(self.folder)
            found.append({"id": name, "folder": str(place), **summary})
        return sorted(found, key=lambda run: (run["status"] != "running", -run["written"]))

    def get(self, name: str) -> Follower | None:
        """The run of that id, with what is new in it."""
        with self._lock:
            follower = self._followers.get(name)
        if follower is not None:
            follower.read()
        return follower


def _identity(path: Path, folder: Path) -> str:
    return sha256(os.fsencode(path.relative_to(folder))).hexdigest()[:16]


def _logs(folder: Path) -> Iterator[Path]:
    """Every file below the folder that begins as a log. Links to folders are not followed."""
    for place, inner, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        skipped = depth >= DEPTH
        inner[:] = [] if skipped else [n for n in inner if not n.startswith((".", "step_"))]
        for name in names:
            path = Path(place) / name
            if path.suffix in (".jsonl", ".json", ".log") and _begins_as_log(path):
                yield path


def _begins_as_log(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


class Server(ThreadingHTTPServer):
    """Serves the runs of a folder on 127.0.0.1."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.runs = Runs(folder)
        self.page = (files("surogate") / "watch.html").read_bytes()
        super().__init__((HOST, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if host.rsplit(":", 1)[0] not in OWN_NAMES and host not in OWN_NAMES:
            self._fail(HTTPStatus.FORBIDDEN, "open this page as http://localhost")
            return
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path == "/":
            self._send(self.server.page, "text/html")
        elif url.path == "/api/runs":
            self._send_json({"runs": self.server.runs.all()})
        elif url.path == "/api/run":
            self._run(query)
        else:
            self._fail(HTTPStatus.NOT_FOUND, "there is no such page")

    def _run(self, query: Mapping[str, str]) -> None:
        try:
            have = [int(query.get(name, "0")) for name in ("generation", "steps", "others")]
            if min(have) < 0:
                raise ValueError
        except ValueError:
            self._fail(HTTPStatus.BAD_REQUEST, "generation, steps and others are counts")
            return
        try:
            follower = self.server.runs.get(query.get("id", ""))
        except OSError:
            follower = None
        if follower is None:
            self._fail(HTTPStatus.NOT_FOUND, "there is no such run")
            return
        self._send_json(follower.new(*have) | {"now": datetime.now(UTC).isoformat()})

    def _send_json(self, value: Any) -> None:
        self._send(orjson.dumps(value), "application/json")

    def _fail(self, status: HTTPStatus, text: str) -> None:
        self._send(text.encode(), "text/plain", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Content-Security-Policy": _policy(self.server.page),
        }
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000:
            body, headers["Content-Encoding"] = gzip.compress(body, 5), "gzip"
        self.send_response(status)
        for name, value in (*headers.items(), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the terminal is for the address."""


def _policy(page: bytes) -> str:
    """Lets the page run its own script and style, by their hashes, and ask this server alone."""

    def inside(tag: str) -> str:
        _, _, rest = page.partition(f"<{tag}>".encode())
        digest = sha256(rest.partition(f"</{tag}>".encode())[0]).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    return (
        f"default-src 'none'; script-src {inside('script')}; style-src {inside('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def serve(folder: Path, port: int) -> Server:
    """A server that listens; ``serve_forever`` answers. UserError when it cannot be had."""
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    try:
        return Server(folder.resolve(), port)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; use another with --port") from None


def watch_command(folder: str, port: int) -> None:
    """surogate watch: serves until Ctrl-C."""
    with serve(Path(folder), port) as server, contextlib.suppress(KeyboardInterrupt):
        here = server.server_address[1]
        print(f"watching {server.runs.folder}: http://localhost:{here} (Ctrl-C ends)")
        print(f"from another machine: ssh -L {here}:localhost:{here} THIS_MACHINE", flush=True)
        server.serve_forever()
