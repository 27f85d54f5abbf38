"""Objects of a cluster over one kept connection: what a test looks at ten times a second starts no kubectl.

A `kubectl get` takes a tenth of a second of a core, most of it for its own start. While a test waits for an engine,
that is most of what the machine does.
"""

import ssl
import tempfile
from base64 import b64decode
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml

from devcluster.host.errors import ClusterError

Body = dict[str, Any]

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
"""One answer for all groups: https://kubernetes.io/docs/concepts/overview/kubernetes-api/#aggregated-discovery."""
_TIMEOUT_S = 60.0


class ApiReader:
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
                for resource in version["resources"]:
                    scope = "{namespaces}" if resource["scope"] == "Namespaced" else ""
                    plural, singular = resource["resource"], resource["singularResource"]
                    names = (plural, singular, f"{plural}.{name}", *resource.get("shortNames", []))
                    for each in names:
                        found.setdefault(each, (prefix + scope, plural))
        return found

    def _get(self, path: str, query: dict[str, str] | None = None, accept: str = "application/json") -> Body:
        try:
            answer = self._client.get(path, params=query, headers={"Accept": accept})
        except httpx.HTTPError as error:
            raise ClusterError(f"GET {path}: {type(error).__name__}: {error}") from error
        if answer.is_error:
            raise ClusterError(f"GET {path}: {answer.status_code} {answer.text[:500]}")
        body: Body = answer.json()
        return body


def api_reader(kubeconfig: Path) -> ApiReader:
    """Return the reader of the cluster that a file speaks of now; its connection is kept for the whole run."""
    return _reader(kubeconfig.read_text())


@cache
def _reader(kubeconfig: str) -> ApiReader:
    return ApiReader(kubeconfig)


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
