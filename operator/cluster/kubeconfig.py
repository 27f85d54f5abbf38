"""Read-only view of a cluster through a kubeconfig, for CLI commands such as doctor and import."""

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import aiohttp
import yaml
from kubernetes.aio import client, config

from specdecode_operator.api.base import Body
from specdecode_operator.cluster.client import ClusterError, ForbiddenError, NotFoundError, error_message, send
from specdecode_operator.cluster.no_cluster import (
    kubeconfig_exists,
    kubeconfig_path,
    no_kubeconfig,
    unknown_context,
    unreachable,
)
from specdecode_operator.cluster.resources import Resource

_TIMEOUT_S: Final = 15
_MESSAGE_LIMIT: Final = 300


class ClusterView:
    """Read-only client with the rights of a kubeconfig's user."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace
        self.server = str(api.configuration.host)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body | None:
        """Return an object; None if it, or its kind, does not exist."""
        try:
            return await self._ask("GET", resource.path(namespace, name), f"get {resource.qualified_plural} {name}")
        except NotFoundError:
            return None

    async def list(self, resource: Resource, namespace: str | None = None, selector: str = "") -> list[Body]:
        """Return the objects of a kind in one namespace or the cluster."""
        what = f"list {resource.qualified_plural}" + (f" in namespace {namespace}" if namespace else "")
        query = {"labelSelector": selector} if selector else {}
        answer = await self._ask("GET", resource.path(namespace), what, query=query)
        items: list[Body] = answer.get("items", [])
        return items

    async def review(self, resource: Resource, body: Body) -> Body:
        """Create a review object, such as a SubjectAccessReview, which is not stored."""
        return await self._ask("POST", resource.path(), f"create {resource.qualified_plural}", body)

    async def version(self) -> str:
        """Return the version of the API server, such as v1.34.1."""
        return str((await self._ask("GET", "/version", "get /version")).get("gitVersion"))

    async def groups(self) -> Mapping[str, Sequence[str]]:
        """Return the versions of each API group."""
        found = await self._ask("GET", "/apis", "get /apis")
        return {
            each["name"]: [version["version"] for version in each["versions"]] for each in found.get("groups") or []
        }

    async def _ask(
        self, method: str, path: str, what: str, body: Body | None = None, query: Mapping[str, str] | None = None
    ) -> Body:
        try:
            answer = await send(self._api, method, path, body, query, timeout_s=_TIMEOUT_S)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterError(unreachable(self.server, _why(error))) from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise _error(what, answer.status, error_message(answer.text, _MESSAGE_LIMIT))
        try:
            found = json.loads(answer.text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ClusterError(f"{self.server}: is not an API server: set --context or KUBECONFIG to another cluster")
        return found


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "its certificate is not trusted"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    return "the connection broke"


@asynccontextmanager
async def open_cluster(context: str | None, kubeconfig: str | None = None) -> AsyncIterator[ClusterView]:
    """Connect to a context of the kubeconfig, or its current one; in a pod without a kubeconfig, as that pod.

    Raises ClusterError without a usable kubeconfig.
    """
    in_pod = "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ
    if in_pod and context is None and kubeconfig is None:
        config.load_incluster_config()
        namespace = "default"
    else:
        namespace = await _load_kubeconfig(context, kubeconfig)
    api = client.ApiClient()
    try:
        yield ClusterView(api, namespace)
    finally:
        await api.close()


async def _load_kubeconfig(context: str | None, kubeconfig: str | None) -> str:
    """Load the kubeconfig; return the namespace of the context."""
    file = kubeconfig_path(kubeconfig)
    # The client would log a missing file, and then complain about its content.
    if not kubeconfig_exists(kubeconfig):
        raise ClusterError(no_kubeconfig(kubeconfig))
    try:
        contexts, current = config.list_kube_config_contexts(file)
    except config.ConfigException as error:
        raise ClusterError(no_kubeconfig(kubeconfig)) from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "problem", None)
        problem = f"cannot be read ({why})" if why else "not a kubeconfig"
        raise ClusterError(no_kubeconfig(kubeconfig, problem)) from error
    if context is not None and context not in {each["name"] for each in contexts}:
        raise ClusterError(unknown_context(context, kubeconfig))
    chosen = next((each for each in contexts if each["name"] == context), current)
    try:
        await config.load_kube_config(file, context=context)
    except (config.ConfigException, OSError) as error:
        problem = f"context {chosen['name']} cannot be used ({error})"
        raise ClusterError(no_kubeconfig(kubeconfig, problem)) from error
    return str(chosen["context"].get("namespace") or "default")


def _error(what: str, status: int, message: str) -> ClusterError:
    if status == HTTPStatus.FORBIDDEN:
        return ForbiddenError(f"you may not {what}: ask the cluster administrator for the permission")
    if status == HTTPStatus.UNAUTHORIZED:
        return ClusterError("KUBECONFIG: the API server rejects the credentials: sign in again")
    kind = NotFoundError if status == HTTPStatus.NOT_FOUND else ClusterError
    return kind(f"{what}: {message or f'HTTP {status}'}")
