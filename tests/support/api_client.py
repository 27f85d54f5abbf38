"""Objects of a cluster over one kept connection: what a test looks at ten times a second starts no kubectl.

A `kubectl get` takes a tenth of a second of a core and a `kubectl apply` more, most of it for its own start. While a
test waits for an engine, that is most of what the machine does; where hundreds of objects are refused, it is the test.
"""

import json
import ssl
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import yaml

from devcluster.host.errors import ClusterError

Body = dict[str, Any]

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
"""One answer for all groups: https://kubernetes.io/docs/concepts/overview/kubernetes-api/#aggregated-discovery."""
_ROWS = "application/json;as=Table;g=meta.k8s.io;v=v1"
"""What `kubectl get` shows, which says enough where there are thousands."""
_TIMEOUT_S = 60.0


class RefusedError(ClusterError):
    """The API server does not take what was written; each thing that it minds stands on a line of its own."""

    def __init__(self, answer: str) -> None:
        try:
            status = json.loads(answer)
        except ValueError:  # not the API server's own words
            status = {"message": answer}
        causes = (status.get("details") or {}).get("causes") or []
        super().__init__("\n".join(f"{each['field']}: {each['message']}" for each in causes) or status["message"])


class ApiClient:
    """The objects of one API server, as the user of a kubeconfig sees them."""

    def __init__(self, kubeconfig: str) -> None:
        document = yaml.safe_load(kubeconfig)
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        # Nothing of the machine's proxy settings: the address is a local one.
        self._client = httpx.Client(
            base_url=cluster["server"], verify=_tls(cluster, user), timeout=_TIMEOUT_S, trust_env=False
        )
        self._paths: dict[str, tuple[str, str]] = {}

    def object(self, namespace: str, kind: str, name: str) -> Body:
        """Return an object that must exist."""
        return _shown(self._get(f"{self._path(namespace, kind)}/{name}"))

    def objects(
        self, namespace: str, kinds: str, selector: str = "", field_selector: str = "", *, managed_fields: bool = False
    ) -> list[Body]:
        """Return the objects of one or more kinds, such as ``deployments,services``, with their kinds in them.

        Those of all namespaces where ``namespace`` is empty.
        """
        query = {"labelSelector": selector, "fieldSelector": field_selector}
        found = []
        for kind in kinds.split(","):
            answer = self._get(self._path(namespace, kind), query)
            common = {"apiVersion": answer["apiVersion"], "kind": answer["kind"].removesuffix("List")}
            found += [common | item if managed_fields else _shown(common | item) for item in answer["items"]]
        return found

    def apply(self, namespace: str, body: Body) -> None:
        """Bring an object to what is written, as ``kubectl apply --server-side --force-conflicts`` does.

        Raises
        ------
        RefusedError
            When the API server does not take it.
        """
        path = f"{self._path(namespace, body['kind'].lower())}/{body['metadata']['name']}"
        query = {"fieldManager": "kubectl", "force": "true", "fieldValidation": "Strict"}
        self._send("PATCH", path, body, content_type="application/apply-patch+yaml", query=query)

    def patch(self, namespace: str, kind: str, name: str, patch: Body, *, by_key: bool = False) -> None:
        """Merge something into an object, its lists by the keys of their items or whole.

        ``name`` may end with a subresource, such as ``/status``.
        """
        content_type = f"application/{'strategic-merge' if by_key else 'merge'}-patch+json"
        self._send("PATCH", f"{self._path(namespace, kind)}/{name}", patch, content_type=content_type)

    def create(self, namespace: str, kind: str, body: Body, below: str = "") -> None:
        """Create an object, or what is posted below one of its kind, such as ``/NAME/binding``."""
        self._send("POST", self._path(namespace, kind) + below, body, query={"fieldValidation": "Strict"})

    def delete(self, namespace: str, kind: str, name: str = "", grace_period_s: int | None = None) -> None:
        """Delete an object, or all of its kind in the namespace; one that is gone is fine."""
        body = {"propagationPolicy": "Background", "gracePeriodSeconds": grace_period_s}
        path = f"{self._path(namespace, kind)}/{name}".removesuffix("/")
        self._send("DELETE", path, body, fine=HTTPStatus.NOT_FOUND)

    def watch(self, kind: str, field_selector: str, timeout_s: int) -> Iterator[Body]:
        """Yield the objects of all namespaces that are there, then each that changes, for some seconds."""
        query = {"watch": "true", "fieldSelector": field_selector, "timeoutSeconds": str(timeout_s)}
        try:
            with self._client.stream("GET", self._path("", kind), params=query) as answer:
                for line in answer.iter_lines():
                    event = json.loads(line)
                    if event["type"] in {"ADDED", "MODIFIED"}:
                        yield event["object"]
        except (httpx.HTTPError, ValueError) as error:
            raise ClusterError(f"watch of {kind}: {type(error).__name__}: {error}") from error

    def watch_rows(self, kind: str, selector: str) -> Iterator[tuple[str, Body]]:
        """Yield what happens to the objects of all namespaces, and each with its columns, until the API server ends it.

        Those that are there are ADDED first.
        """
        query = {"watch": "true", "labelSelector": selector, "timeoutSeconds": "86400"}
        patient = httpx.Timeout(_TIMEOUT_S, read=None)
        try:
            with self._client.stream(
                "GET", self._path("", kind), params=query, headers={"Accept": _ROWS}, timeout=patient
            ) as answer:
                for line in answer.iter_lines():
                    event = json.loads(line)
                    yield from ((event["type"], row) for row in event["object"].get("rows") or [])
        except (httpx.HTTPError, ValueError) as error:
            raise ClusterError(f"watch of {kind}: {type(error).__name__}: {error}") from error

    def _path(self, namespace: str, kind: str) -> str:
        if kind not in self._paths:  # a kind that was added since
            self._paths = self._discovered()
        if kind not in self._paths:
            raise ClusterError(f"the API server serves no {kind}")
        prefix, plural = self._paths[kind]
        return prefix.format(namespaces=f"namespaces/{namespace}/" if namespace else "") + plural

    def _discovered(self) -> dict[str, tuple[str, str]]:
        """Return the path of each kind by all names that it goes by; the oldest groups win, as with kubectl."""
        found: dict[str, tuple[str, str]] = {}
        for root in ("/api", "/apis"):
            for group in self._get(root, accept=_DISCOVERY)["items"]:
                version, name = group["versions"][0], group["metadata"].get("name")
                prefix = f"{root}/{name}/{version['version']}/" if name else f"{root}/{version['version']}/"
                for resource in version.get("resources") or []:
                    scope = "{namespaces}" if resource["scope"] == "Namespaced" else ""
                    plural, singular = resource["resource"], resource["singularResource"]
                    names = (plural, singular, f"{plural}.{name}", *resource.get("shortNames", []))
                    for each in names:
                        found.setdefault(each, (prefix + scope, plural))
        return found

    def _get(self, path: str, query: dict[str, str] | None = None, accept: str = "application/json") -> Body:
        answer = self._ask("GET", path, query, {"Accept": accept})
        if answer.is_error:
            raise ClusterError(f"GET {path}: {answer.status_code} {answer.text[:500]}")
        body: Body = answer.json()
        return body

    def _send(
        self,
        method: str,
        path: str,
        body: Body,
        *,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
        fine: HTTPStatus = HTTPStatus.OK,
    ) -> None:
        answer = self._ask(method, path, query, {"Content-Type": content_type}, json.dumps(body))
        if answer.is_error and answer.status_code != fine:
            raise RefusedError(answer.text)

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        headers: dict[str, str],
        content: str | None = None,
    ) -> httpx.Response:
        try:
            return self._client.request(method, path, params=query, headers=headers, content=content)
        except httpx.HTTPError as error:
            raise ClusterError(f"{method} {path}: {type(error).__name__}: {error}") from error


def api_client(kubeconfig: Path) -> ApiClient:
    """Return the client of the cluster that a file speaks of now; its connection is kept for the whole run."""
    return _client_of(kubeconfig.read_text())


@cache
def _client_of(kubeconfig: str) -> ApiClient:
    return ApiClient(kubeconfig)


def _tls(cluster: Body, user: Body) -> ssl.SSLContext:
    """Return what the kubeconfig says about certificates; Python takes a client's only from a file."""
    context = ssl.create_default_context(cadata=b64decode(cluster["certificate-authority-data"]).decode())
    pair = b64decode(user["client-certificate-data"]) + b"\n" + b64decode(user["client-key-data"])
    with tempfile.NamedTemporaryFile() as file:
        file.write(pair)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _shown(body: Body) -> Body:
    body["metadata"].pop("managedFields", None)
    return body
