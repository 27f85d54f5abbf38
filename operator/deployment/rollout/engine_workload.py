"""The workload that starts engines: a Deployment, or a LeaderWorkerSet for engines on several nodes.

Rendered objects that are kept for a long time are stored as compressed JSON.
"""

from typing import Any, Final

import msgspec

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.packing import pack, unpack
from specdecode_operator.cluster.resources import DEPLOYMENT, DEPLOYMENT_LABEL, ENGINE_CONTAINER, JOB, LEADER_WORKER_SET
from specdecode_operator.vllm.arguments import SPECULATIVE_OPTION


def pack_object(body: dict[str, Any]) -> bytes:
    """Return a rendered object as compressed JSON; equal objects give equal bytes."""
    return pack(msgspec.json.encode(body, order="sorted"), _group(body))


def _group(body: Body) -> str:
    """Return the kind and the first word after the owner's name, such as "Job facts" for NAME-facts-HASH."""
    metadata = body.get("metadata") or {}
    owner = (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL)
    suffix = str(metadata.get("name")).removeprefix(owner).removeprefix("-").partition("-")[0] if owner else ""
    return f"{body['kind']} {suffix}"


def unpack_object(packed: bytes) -> dict[str, Any]:
    """Return a new copy of an object that `pack_object` compressed."""
    body: dict[str, Any] = msgspec.json.decode(unpack(packed))
    return body


# Kinds that start engines. An object has one workload, or two while one replaces the other.
WORKLOAD_KINDS: Final = frozenset({DEPLOYMENT.kind, LEADER_WORKER_SET.kind})
_TEMPLATE_FIELD: Final = {
    DEPLOYMENT.kind: "template",
    JOB.kind: "template",
    LEADER_WORKER_SET.kind: "leaderWorkerTemplate",
}
TEMPLATE_KINDS: Final = frozenset(_TEMPLATE_FIELD)


def workload_name(key: Key, kind: str) -> str:
    """Return the name of an object's workload of this kind."""
    return f"{key.name}-lws" if kind == LEADER_WORKER_SET.kind else key.name


def serving_template(workload: Body) -> Body:
    """Return the template of the pods that serve clients."""
    templates: Body = workload["spec"][_TEMPLATE_FIELD[workload["kind"]]]
    template: Body = templates["leaderTemplate"] if workload["kind"] == LEADER_WORKER_SET.kind else templates
    return template


def pod_templates(workload: Body) -> list[Body]:
    """Return the templates of all pods that a workload or a Job starts."""
    template: Body = workload["spec"][_TEMPLATE_FIELD[workload["kind"]]]
    if workload["kind"] != LEADER_WORKER_SET.kind:
        return [template]
    return [template[role] for role in ("leaderTemplate", "workerTemplate") if template.get(role)]


def speculates(workload: Body) -> bool:
    """Return whether the engines of a workload are started with speculation."""
    containers = (each for each in serving_template(workload)["spec"]["containers"] if each["name"] == ENGINE_CONTAINER)
    return any(SPECULATIVE_OPTION in (each.get("command") or []) for each in containers)


def with_pods_of(workload: Body, earlier: Body) -> Body:
    """Return the workload without metadata, but with the pod templates of an earlier workload."""
    if earlier["kind"] != workload["kind"]:
        spec = {**earlier["spec"], "replicas": workload["spec"]["replicas"]}
    else:
        field = _TEMPLATE_FIELD[workload["kind"]]
        spec = {**workload["spec"], field: earlier["spec"][field]}
    return {"apiVersion": earlier["apiVersion"], "kind": earlier["kind"], "spec": spec}


def engine_pods(pods: list[Body], key: Key) -> list[Body]:
    """Return the pods that a controller of the object's workloads has created.

    Everyone who may create pods can copy labels and annotations. A copied owner does not last: the controller deletes
    surplus pods, and the garbage collector deletes pods whose owner does not exist.
    """
    return [pod for pod in pods if _is_controlled(pod["metadata"], key)]


def _is_controlled(metadata: Body, key: Key) -> bool:
    owner: Body = next((each for each in metadata.get("ownerReferences") or [] if each.get("controller")), {})
    if owner.get("kind") == "ReplicaSet":
        suffix = (metadata.get("labels") or {}).get("pod-template-hash")
        names = {workload_name(key, DEPLOYMENT.kind), canary_name(key)}
        return any(owner["name"] == f"{name}-{suffix}" for name in names)
    if owner.get("kind") == "StatefulSet":  # of all leaders, or of the workers of one group
        first, name = workload_name(key, LEADER_WORKER_SET.kind), owner["name"]
        return bool(name == first or (name.startswith(f"{first}-") and name.removeprefix(f"{first}-").isdecimal()))
    return False


def canary_name(key: Key) -> str:
    """Return the name of the Deployment of an object's canary."""
    return f"{key.name}-canary"


def serving_pods(pods: list[Body]) -> list[Body]:
    """Return the pods that serve clients: in a group, only the leader."""
    return [pod for pod in pods if DEPLOYMENT_LABEL in (pod["metadata"].get("labels") or {})]
