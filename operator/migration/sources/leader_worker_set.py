"""A LeaderWorkerSet: one server over several pods, which its leader starts."""

import re
from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, objects
from specdecode_operator.migration.builder import MigrationError, required
from specdecode_operator.migration.sources.workload import Remarks, Workload, name_in, namespace_of, quoted_name, within

_TEMPLATE: Final = "spec.leaderWorkerTemplate"
_KNOWN: Final = ("replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig")


def read_leader_worker_set(body: Mapping[str, Any]) -> Workload:
    """Return the server that the leaders start; the workers only lend it their GPUs.

    Raises
    ------
    MigrationError
        When the size of a group is no number.
    """
    template, spec, remarks = required(body, _TEMPLATE), mapping(body, "spec"), Remarks()
    size = template.get("size", 1)
    if not isinstance(size, int) or not 0 < size <= 1024:  # noqa: PLR2004  more pods than any server has
        raise MigrationError(f"{_TEMPLATE}.size", str(size), "must be the number of pods in a group")
    leader = "leaderTemplate" if mapping(template, "leaderTemplate") else "workerTemplate"
    pod = required(body, f"{_TEMPLATE}.{leader}.spec")
    for key in ("rolloutStrategy", "startupPolicy", "networkConfig"):
        if spec.get(key):
            remarks.own(key, "the operator makes a LeaderWorkerSet of its own where a replica needs several nodes")
    if template.get("subGroupPolicy"):
        remarks.decide(f"{_TEMPLATE}.subGroupPolicy", "is set", "groups are not divided: keep the LeaderWorkerSet")
    remarks.ask_for_rest(spec, _KNOWN, "spec")
    remarks.drop_metadata(body)
    return Workload(
        kind="LeaderWorkerSet",
        name=name_in(body),
        pod=_known_to_the_group(pod, size),
        where=f"{_TEMPLATE}.{leader}.spec.containers",
        metadata=mapping(mapping(template, leader), "metadata"),
        namespace=namespace_of(body),
        spec={"replicas": spec["replicas"]} if "replicas" in spec else {},
        nodes=size,
        end=f"kubectl scale leaderworkerset/{quoted_name(body)} --replicas=0{within(body)}",
        remove=f"kubectl delete leaderworkerset/{quoted_name(body)}{within(body)}",
        remarks=remarks,
    )


def _known_to_the_group(pod: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the pod with the variables that the controller gives a leader, where its command line names them."""
    given = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}
    containers = []
    for container in objects(pod, "containers"):
        text = " ".join(str(container.get(key) or "") for key in ("command", "args"))
        env = [{"name": name, "value": value} for name, value in given.items() if re.search(rf"\b{name}\b", text)]
        containers.append({**container, "env": [*env, *objects(container, "env")]} if env else container)
    return {**pod, "containers": containers}
