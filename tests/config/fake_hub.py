"""A model hub on loopback: the requests that huggingface_hub makes for a directory's listing and its files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = hashlib.sha1(b"the only commit").hexdigest()


@dataclass
class FakeHub:
    """Repositories by id, each with its files; the branch v2 is the same commit as main."""

    repositories: dict[str, dict[str, bytes]]
    endpoint: str = ""
    #: Files that were asked for with their content.
    sent: list[str] = field(default_factory=list)


@contextmanager
def fake_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub(repositories)

    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = self.path.split("?")[0].strip("/").removeprefix("api/models/").split("/")
            model_id, verb, revision, name = "/".join(parts[:2]), *parts[2:5], *[""] * (5 - len(parts))
            files = hub.repositories.get(model_id)
            if files is None:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("", "main", "v2", COMMIT):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif verb == "tree":
                listing = [{"type": "file", "path": n, "size": len(d), "oid": oid(d)} for n, d in files.items()]
                self.answer(200, json.dumps(listing).encode())
            elif verb == "resolve":
                if self.command == "GET":
                    hub.sent.append(name)
                self.answer(200, files[name], {"ETag": f'"{oid(files[name])}"', "X-Repo-Commit": COMMIT})
            else:
                self.answer(200, json.dumps({"id": model_id, "sha": COMMIT, "siblings": []}).encode())

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
