"""An issuer of identity tokens on loopback, as runners of CI have one: Fulcio reads its keys from there."""

import json
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

WORKFLOW = "ORG/REPO/.github/workflows/attest.yml@refs/heads/main"
AUDIENCE = "sigstore"
_CLAIMS = (
    *("actor", "event_name", "job_workflow_sha", "ref", "repository", "repository_id", "repository_owner"),
    *("repository_owner_id", "repository_visibility", "run_attempt", "run_id", "runner_environment", "sha"),
    *("workflow", "workflow_sha"),
)


class Issuer:
    """What signs tokens, and publishes the key to them."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        issuer = self

        class Answering(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(issuer.published(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def published(self, path: str) -> dict[str, Any]:
        if path == "/keys":
            point = self._key.public_key().public_numbers()
            place = {"x": _text(point.x.to_bytes(32)), "y": _text(point.y.to_bytes(32))}
            return {"keys": [{"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "1", **place}]}
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["ES256"],
        }

    def token(self) -> str:
        """Return the token of a run of a workflow, as GitHub's runners get one."""
        now = int(time.time())
        claims = dict.fromkeys(_CLAIMS, "1") | {"job_workflow_ref": WORKFLOW, "workflow_ref": WORKFLOW}
        claims |= {"iss": self.url, "aud": AUDIENCE, "sub": "repo:ORG/REPO:ref:refs/heads/main"}
        header = {"alg": "ES256", "kid": "1", "typ": "JWT"}
        parts = (header, {**claims, "iat": now, "nbf": now, "exp": now + 600})
        text = ".".join(_text(json.dumps(each).encode()) for each in parts)
        r, s = decode_dss_signature(self._key.sign(text.encode(), ec.ECDSA(SHA256())))
        return f"{text}.{_text(r.to_bytes(32) + s.to_bytes(32))}"


@contextmanager
def oidc_issuer() -> Iterator[Issuer]:
    """Serve until the block ends."""
    issuer = Issuer()
    thread = threading.Thread(target=issuer.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.server.shutdown()
        issuer.server.server_close()
        thread.join()


def _text(content: bytes) -> str:
    return urlsafe_b64encode(content).decode().rstrip("=")
