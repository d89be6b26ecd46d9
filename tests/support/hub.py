"""A stub of the hub's HTTP interface."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_SecretOfMine123"


@dataclass
class Hub:
    """What was pushed to a stub, and with which token."""

    status: int = 200
    made: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    bodies: list[bytes] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.status != 200:
            return self.status, {"error": f"no way, {TOKEN}"}
        if path == "/api/repos/create":
            self.made.append(json.loads(body))
            name = self.made[-1]["name"]
            owner = self.made[-1].get("organization") or "me"
            return 200, {"url": f"{self.url}/{owner}/{name}", "name": f"{owner}/{name}"}
        if path.startswith("/api/validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.messages.append(line["value"]["summary"])
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            repo = re.match(r"/api/models/(.+)/commit/", path)
            assert repo is not None
            return 200, {"commitUrl": f"{self.url}/{repo[1]}/commit/abc", "commitOid": "abc", "success": True}
        if method == "GET" and path.startswith("/api/models/"):
            return 200, {"id": "me/x", "sha": "abc", "siblings": []}
        return 404, {"error": path}


@contextmanager
def serving_hub(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization"))
            hub.bodies.append(body)
            status, table = hub.answer(self.command, self.path, body)
            data = json.dumps(table).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status != 200:
                self.send_header("X-Error-Message", f"no way, {TOKEN}")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_HEAD = respond

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
