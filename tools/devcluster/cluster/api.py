"""The few calls that bringing a cluster up needs, without starting kubectl for each."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from devcluster.host.errors import ClusterError


class Api:
    """The cluster's API server, as its administrator."""

    def __init__(self, url: str, pki: Path) -> None:
        self._url = url
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        # An empty proxy table: the machine's proxy has no business with a local address.
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({})
        )

    def ready(self) -> bool:
        """Decide whether the API server answers and all its parts are ready."""
        request = urllib.request.Request(f"{self._url}/readyz")
        try:
            with self._opener.open(request, timeout=10) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except (OSError, http.client.HTTPException):
            return False

    def get(self, path: str) -> dict[str, Any]:
        """Return the object or list at `path`."""
        return self._call("GET", path)

    def exists(self, path: str) -> bool:
        """Decide whether there is an object at `path`."""
        return bool(self._call("GET", path, accept=HTTPStatus.NOT_FOUND))

    def apply(self, path: str, manifest: dict[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create the object or bring it to `manifest` (server-side apply), and return it; a dry run stores nothing."""
        dry = "&dryRun=All" if dry_run else ""
        return self._call("PATCH", f"{path}?fieldManager=devcluster&force=true{dry}", manifest)

    def delete(self, path: str) -> None:
        """Delete the object at `path`; one that does not exist is fine."""
        self._call("DELETE", path, accept=HTTPStatus.NOT_FOUND)

    def nodes(self, selector: str = "") -> list[dict[str, Any]]:
        """Return the cluster's nodes, optionally those with a label."""
        found: list[dict[str, Any]] = self.get(f"/api/v1/nodes?labelSelector={quote(selector)}")["items"]
        return found

    def _call(self, method: str, path: str, body: object = None, accept: int = HTTPStatus.OK) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._url}{path}", method=method, data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/apply-patch+yaml"} if body is not None else {},
        )  # fmt: skip
        try:
            with self._opener.open(request, timeout=30) as answer:
                return json.load(answer)  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            if error.code == accept:
                return {}
            message = f"API server: {method} {path}: {error.code} {error.read().decode(errors='replace')[:500]}"
            raise ClusterError(message) from error
        except (OSError, http.client.HTTPException) as error:
            message = f"API server at {self._url} does not answer ({error}): run up again to repair the cluster"
            raise ClusterError(message) from error


def is_ready(node: dict[str, Any]) -> bool:
    """Decide whether a Node object reports Ready."""
    conditions = node.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_established(crd: dict[str, Any]) -> bool:
    """Decide whether a CustomResourceDefinition is in use; one that is a moment old has no conditions."""
    conditions = crd.get("status", {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
