"""A hub of models on the loopback."""

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.http_server import Quiet

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """As much of a hub as the client asks of it."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes], others: Mapping[str, Mapping[str, bytes]] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = files
        """Of acme/open and acme/gated."""
        self.others = others or {}
        """Files of other models, by id."""
        self.asked: list[str] = []
        self.sent: list[tuple[str, int]] = []
        """Content that was sent: the file, and how many bytes of it."""


class HubHandler(Quiet, BaseHTTPRequestHandler):
    """Answers for acme/open (anybody), acme/gated (the token's owner), the hub's others (anybody) and nothing else."""

    server: Hub

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        gated = "acme/gated" in path
        other = next((model for model in self.server.others if f"/{model}/" in f"{path}/"), None)
        if other is not None:
            self._answer_for(other, path, with_content=with_content)
        elif "acme/open" not in path and not gated:
            self._refuse(404, "RepoNotFound")
        elif "/resolve/" in path and gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
        elif "/resolve/" in path:
            self._send_file(path.partition(f"/resolve/{COMMIT}/")[2], with_content=with_content)
        elif "/revision/" in path and not path.endswith(("/revision/main", "/revision/v1", f"/revision/{COMMIT}")):
            self._refuse(404, "RevisionNotFound")
        elif "/tree/" in path:
            self._send([self._entry(name) for name in self.server.files])
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in self.server.files.items()]
            model = "acme/gated" if gated else "acme/open"
            self._send({"_id": "1", "id": model, "sha": COMMIT, "siblings": siblings, "private": False})

    def _answer_for(self, model: str, path: str, *, with_content: bool) -> None:
        files = self.server.others[model]
        if "/resolve/" in path:
            self._send_content(files[path.partition(f"/resolve/{COMMIT}/")[2]], with_content=with_content)
        else:
            self._send({"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})

    def _entry(self, name: str) -> dict[str, object]:
        content = self.server.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, *, with_content: bool) -> None:
        sent_bytes = self._send_content(self.server.files[name], with_content=with_content)
        if with_content:
            self.server.sent.append((name, sent_bytes))

    def _send_content(self, whole: bytes, *, with_content: bool) -> int:
        """Send a file, or as much of it as is asked for; return how many bytes."""
        content = whole
        wanted = self.headers.get("Range")
        if wanted:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            content = whole[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{len(whole)}")
        else:
            self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(whole).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)
        return len(content)
