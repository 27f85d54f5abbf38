"""Reads the Deployment to import: from a file, from standard input, or from the cluster."""

import asyncio
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.cli.input_files import Document, read_objects
from specdecode_operator.cli.text_files import DocumentError
from specdecode_operator.kube.untyped import mapping

_FORMS: Final = ("deployment", "deployments", "deploy", "deployment.apps", "deployments.apps")


class SourceError(Exception):
    """There is no Deployment to read, in one line that says what to do."""


@dataclass(frozen=True)
class Source:
    """A Deployment, where it was read, and the Services of its namespace."""

    place: str
    deployment: Body
    services: tuple[Body, ...]


def read_source(deployment: str | None, file: str | None, namespace: str | None, context: str | None) -> Source:
    """Return the Deployment that the arguments name.

    Raises
    ------
    SourceError
        When they name none, or it cannot be read.
    """
    name = None if deployment is None else _name(deployment)
    if file is not None:
        return _from_file(file, name, namespace)
    if name is None:
        raise SourceError("deployment: nothing: name the Deployment, deployment/NAME, or a file with -f FILE")
    return asyncio.run(_from_cluster(name, namespace, context))


def _name(text: str) -> str:
    kind, slash, name = text.rpartition("/")
    if (slash and kind not in _FORMS) or not name:
        raise SourceError(f"deployment: {text}: write deployment/NAME: only a Deployment can be imported")
    return name


def _from_file(file: str, name: str | None, namespace: str | None) -> Source:
    try:
        found = read_objects(file)
    except DocumentError as error:
        raise SourceError(str(error)) from error
    deployments = [each for each in found if each.body.get("kind") == "Deployment"]
    wanted = [each for each in deployments if name in (None, each.name)]
    if len(wanted) > 1:
        names = ", ".join(f"deployment/{each.name}" for each in wanted)
        raise SourceError(f"{file}: holds {names}: name the one to import")
    if not wanted:
        raise SourceError(_nothing(file, name, found, deployments))
    (chosen,) = wanted
    if namespace:
        chosen.body["metadata"] = {**mapping(chosen.body, "metadata"), "namespace": namespace}
    own = mapping(chosen.body, "metadata").get("namespace")
    services = [each.body for each in found if each.body.get("kind") == "Service"]
    near = [each for each in services if mapping(each, "metadata").get("namespace") in (None, own)]
    return Source(f"{chosen.place} (Deployment {chosen.name})", chosen.body, tuple(near))


def _nothing(file: str, name: str | None, found: list[Document], deployments: list[Document]) -> str:
    if name is not None and deployments:
        names = ", ".join(f"deployment/{each.name}" for each in deployments)
        return f"{file}: holds no deployment/{name} but {names}: name one of these"
    kinds = ", ".join(dict.fromkeys(str(each.body.get("kind") or "nothing") for each in found)) or "nothing"
    return f"{file}: kind: {kinds}: holds no Deployment: name another file"


async def _from_cluster(name: str, namespace: str | None, context: str | None) -> Source:
    # The Kubernetes client takes most of a second to load, which files need not wait for.
    from specdecode_operator.cluster.errors import ClusterError, ForbiddenError  # noqa: PLC0415
    from specdecode_operator.cluster.inspection import open_cluster  # noqa: PLC0415
    from specdecode_operator.kube.resources import DEPLOYMENT, SERVICE  # noqa: PLC0415

    try:
        async with open_cluster(context) as cluster:
            within = namespace or cluster.namespace
            found = await cluster.get(DEPLOYMENT, within, name)
            if found is None:
                raise SourceError(
                    f"deployment/{name}: is not in namespace {within}: name another, or its namespace with -n"
                )
            try:
                services = await cluster.list(SERVICE, within)
            except ForbiddenError:
                services = []
    except ClusterError as error:
        raise SourceError(str(error)) from error
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", **found}
    return Source(f"deployment/{name} in namespace {within}", deployment, tuple(services))
