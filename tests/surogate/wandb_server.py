"""A stand-in for the W&B server on this machine: what its client asks for in a run, and no more.

The client upserts the run by GraphQL, streams lines to its files, each piece with the number of the
line that it begins at, and puts whole files where the answer to createRunFiles says. For a run that
is gone on with it asks how many lines there are. A table is a file and an artifact.
"""

import gzip
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from typing import Any, NamedTuple
from urllib.parse import unquote

HISTORY, EVENTS = "wandb-history.jsonl", "wandb-events.jsonl"
STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")
STORAGE = "/storage/"
PROJECT = {"id": "id", "name": "project", "entity": {"id": "id", "name": "entity"}}


class Run(NamedTuple):
    """What the server has of a run."""

    settings: dict[str, Any]  # as upserted last: displayName, project, config
    lines: dict[str, list[str]]  # by file
    exits: list[int]  # of each time that the run was over

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        entries = json.loads(self.settings["config"])
        return {name: entry["value"] for name, entry in entries.items()}

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged, a line each."""
        return [json.loads(line) for line in self.lines.get(HISTORY, [])]


class WandbServer:
    """``with WandbServer() as server:`` listens at ``server.url`` and fills ``runs`` and ``files``.

    ``status``: what everything is answered with; other than 200, nothing is taken. ``seen`` is
    called with the path of each request, and may close the server.
    """

    def __init__(self, *, status: int = 200, seen: Callable[[str], None] = lambda _: None) -> None:
        self.status, self.seen = status, seen
        self.runs: dict[str, Run] = {}
        self.files: dict[str, bytes] = {}
        self.connections: list[socket] = []
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "WandbServer":
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops all connections, and refuses others."""
        self._http.shutdown()
        self._http.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """The object that answers a request."""
        streamed = STREAM.fullmatch(path)
        if path == "/graphql":
            request = json.loads(body)
            return {"data": self._graphql(request["query"], request.get("variables") or {})}
        if streamed:
            self._stream(self.runs[streamed[1]], json.loads(body))
        elif path.startswith(STORAGE):
            self.files[unquote(path.removeprefix(STORAGE))] = body
        return {}

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket(" in query:
            return {"upsertBucket": self._upsert(given)}
        if "createRunFiles(" in query:
            files = [{"name": n, "uploadUrl": self.url + STORAGE + n} for n in given["files"]]
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
        if "viewer {" in query:
            return {"viewer": {"id": "id", "entity": "entity", "teams": {"edges": []}}}
        if "artifact(name:" in query:  # is there one?
            return {"project": {"artifact": None}}
        if "createArtifact(" in query:  # the answer for one whose files are there already
            latest = {"latestArtifact": {"id": "id"}}
            made = {"id": "id", "state": "COMMITTED", "artifactSequence": latest}
            return {"createArtifact": {"artifact": made}}
        if "historyTail" in query:
            return {"model": PROJECT | {"bucket": self._so_far(given["name"])}}
        return {}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        name, known = given["name"], self.runs.get(given["name"], Run({}, {}, []))
        changed = {key: value for key, value in given.items() if value is not None}
        inserted = name not in self.runs
        self.runs[name] = known._replace(settings=known.settings | changed)
        count = len(known.lines.get(HISTORY, []))
        project = PROJECT | {"name": changed["project"]}
        bucket = {"id": "id", "name": name, "project": project, "historyLineCount": count}
        return {"bucket": bucket, "inserted": inserted}

    def _so_far(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        history, events = (run.lines.get(file, []) for file in (HISTORY, EVENTS))
        return {
            "id": "id",
            "name": name,
            "config": run.settings["config"],
            "summaryMetrics": (history or ["{}"])[-1],
            "historyLineCount": len(history),
            "historyTail": json.dumps(history[-1:]),
            "eventsLineCount": len(events),
            "eventsTail": json.dumps(events[-1:]),
            "logLineCount": 0,
            "wandbConfig": "{}",
            "tags": [],
        }

    def _stream(self, run: Run, sent: dict[str, Any]) -> None:
        for file, piece in (sent.get("files") or {}).items():
            lines = run.lines.setdefault(file, [])
            lines[piece["offset"] :] = piece["content"]
        if sent.get("complete"):
            run.exits.append(sent["exitcode"])


class _Handler(BaseHTTPRequestHandler):
    stand_in: WandbServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.stand_in.connections.append(self.connection)

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client, or the test, may leave as it likes
            super().handle()

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        status = self.stand_in.status
        self.stand_in.seen(self.path)
        refused = {"errors": [{"message": "not today"}]}
        found = self.stand_in.answer(self.path, body) if status == 200 else refused
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _do

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
