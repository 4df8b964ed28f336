"""A stand-in for the Hugging Face Hub on 127.0.0.1: the part of its HTTP API for pushing and loading a model."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

TOKEN = "hf_of_a_test"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by name, and every request."""

    url: str = ""
    role: str = "write"
    refuse: str = ""
    """Requests whose path contains this text are refused"""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    """Commit messages"""
    requests: list[str] = field(default_factory=list)

    def env(self, home: object) -> dict[str, str]:
        """Variables that lead a process here, with a token and a cache of its own."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home)}

    def account(self) -> dict[str, Any]:
        token = {"accessToken": {"role": self.role, "displayName": "test"}}
        return {"type": "user", "name": "me", "orgs": [{"name": "museum"}], "auth": token}

    def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        private = asked.get("private", asked.get("visibility") == "private")
        self.files.setdefault(name, {})
        self.visibility.setdefault(name, "private" if private else "public")
        return {"url": f"{self.url}/{name}"}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}

    def info(self, name: str) -> dict[str, Any]:
        siblings = [{"rfilename": file} for file in self.files[name]]
        return {"id": name, "sha": COMMIT, "private": self.visibility[name] == "private", "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(None)

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes | None) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.requests.append(f"{self.command} {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid credentials"})
        elif hub.refuse and hub.refuse in path:
            self._send(403, {"error": "storage quota exceeded"})
        elif path == "/api/whoami-v2":
            self._send(200, hub.account())
        elif path == "/api/repos/create":
            self._send(200, hub.create(json.loads(body or b"")))
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        else:
            self._answer_about(path, body)

    def _answer_about(self, path: str, body: bytes | None) -> None:
        """Requests about a repository: /api/models/OWNER/NAME/..., and files at /OWNER/NAME/resolve/REVISION/FILE."""
        hub, words = self.hub, path.removeprefix("/api/models").strip("/").split("/")
        name, what = "/".join(words[:2]), words[2] if len(words) > 2 else ""
        if name not in hub.files:
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif what == "preupload":
            asked = json.loads(body or b"")["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            self._send(200, {"files": modes})
        elif what == "commit":
            self._send(200, hub.commit(name, [json.loads(line) for line in (body or b"").splitlines()]))
        elif what == "resolve":
            self._send_file(hub.files[name].get(words[4]))
        else:
            self._send(200, hub.info(name))

    def _send_file(self, content: bytes | None) -> None:
        if content is None:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _send(self, code: int, content: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if code >= 400 and isinstance(content, dict):
            self.send_header("X-Error-Message", str(content["error"]))
        self.send_header(
            "Content-Type", "application/json" if isinstance(content, dict) else "application/octet-stream"
        )
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
