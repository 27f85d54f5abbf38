"""A hub in the cluster: model information, and files by ranges. Runs in a pod, with the standard library only."""

import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(sys.argv[1])
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_test"


class Hub(BaseHTTPRequestHandler):
    """Answers for the folders below its root, to whoever brings the token; each file that it sends is a line of log."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, *, with_content: bool) -> None:
        path = self.path.partition("?")[0]
        found = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(/.*)?", path)
        model, rest = (found[1], found[2] or "") if found else ("", "")
        folder = ROOT / model
        if not model or not folder.is_dir():
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif rest.startswith("/resolve/"):
            self._send_file(folder / rest.split("/", 3)[3], with_content=with_content)
        elif rest.startswith("/tree/"):
            self._send(200, json.dumps([self._entry(path) for path in sorted(folder.iterdir())]).encode())
        else:
            siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in folder.iterdir()]
            body = {"_id": "1", "id": model, "sha": COMMIT, "siblings": siblings, "private": False}
            self._send(200, json.dumps(body).encode())

    def _entry(self, path: Path) -> dict[str, object]:
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": self._etag(path)}

    @staticmethod
    def _etag(path: Path) -> str:
        return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()

    def _send_file(self, path: Path, *, with_content: bool) -> None:
        content, status, more = path.read_bytes(), 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{self._etag(path)}"'}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            more["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
            content, status = content[first : last + 1], 206
        if with_content and status == 200:
            print(f"sent {path.relative_to(ROOT)}", flush=True)  # noqa: T201
        self._send(status, content if with_content else b"", more, length=len(content))

    def _send(self, status: int, body: bytes, more: dict[str, str] | None = None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", 8080), Hub).serve_forever()
