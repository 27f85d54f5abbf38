"""What the operator asked a real API server for, as that wrote it down."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from devcluster.cluster.cluster import Cluster
from devcluster.cluster.control_plane import audit_log
from tests.support.rights import right_for


@dataclass(frozen=True)
class Asked:
    """One request, as RBAC sees it."""

    permission: str
    """Such as ``patch specdecodedeployments.specdecode.io/status``; with the name where it is of that alone."""

    namespace: str
    allowed: bool
    made: bool
    """Whether an object was made, which server-side apply asks for as a patch."""
    user: str

    @property
    def rights(self) -> set[str]:
        """What RBAC must have granted for it."""
        created = f"create {self.permission.partition(' ')[2]}"
        return {self.permission, created} if self.made else {self.permission}

    @property
    def named(self) -> str:
        """The permission and where it was asked for."""
        return f"{self.permission} in {self.namespace or 'the cluster'}"


def asked(cluster: Cluster) -> list[Asked]:
    """Return what service accounts of the operator's namespace asked for; discovery, which all may do, is left out."""
    log = audit_log(cluster.state)
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
    return [
        _asked(event)
        for event in events
        if "objectRef" in event and event["user"]["username"].startswith("system:serviceaccount:")
    ]


def _asked(event: dict[str, Any]) -> Asked:
    about, verdict = event["objectRef"], event["annotations"].get("authorization.k8s.io/decision")
    group = f".{about['apiGroup']}" if about.get("apiGroup") else ""
    subresource = f"/{about['subresource']}" if about.get("subresource") else ""
    return Asked(
        right_for(f"{event['verb']} {about['resource']}{group}{subresource}", about.get("name", "")),
        about.get("namespace", ""),
        verdict == "allow",
        event.get("responseStatus", {}).get("code") == HTTPStatus.CREATED,
        event["user"]["username"],
    )
