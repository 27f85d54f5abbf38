"""Writes the webhook's certificate, and who trusts it, with the rights of the chart's Job."""

from base64 import b64encode
from collections.abc import Mapping
from typing import Final

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.kube.resources import Resource

_SECRET: Final = Resource("v1", "Secret", "secrets")
_CONFIGURATION: Final = Resource(
    "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"
)


async def write_certificate(
    cluster: Cluster, files: Mapping[str, bytes], trust: bytes, secret: tuple[str, str], webhook: tuple[str, str]
) -> None:
    """Have a webhook trusted by ``trust``, then write the files to a Secret, which goes with the webhook.

    ``secret`` is namespace and name, ``webhook`` the name of its configuration and its own in there.

    Raises
    ------
    ClusterError
        When the API server refuses or cannot be reached.
    """
    configuration, name = webhook
    trusting = {
        "apiVersion": _CONFIGURATION.api_version,
        "kind": _CONFIGURATION.kind,
        "metadata": {"name": configuration},
        "webhooks": [{"name": name, "clientConfig": {"caBundle": b64encode(trust).decode()}}],
    }
    owner = await cluster.apply_to(_CONFIGURATION, trusting)
    namespace, secret_name = secret
    body = {
        "apiVersion": _SECRET.api_version,
        "kind": _SECRET.kind,
        "type": "kubernetes.io/tls",
        "metadata": {
            "namespace": namespace,
            "name": secret_name,
            "labels": {"app.kubernetes.io/part-of": "specdecode"},
            "ownerReferences": [
                {
                    "apiVersion": _CONFIGURATION.api_version,
                    "kind": _CONFIGURATION.kind,
                    "name": configuration,
                    "uid": owner["metadata"]["uid"],
                }
            ],
        },
        "data": {file: b64encode(content).decode() for file, content in files.items()},
    }
    await cluster.apply_to(_SECRET, body)
