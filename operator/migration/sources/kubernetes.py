"""Kubernetes' own kinds: Deployment, StatefulSet, Pod."""

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.builder import required
from specdecode_operator.migration.models import USUAL_CACHES
from specdecode_operator.migration.sources.workload import Remarks, Workload, name_in, namespace_of, quoted_name, within

_BOUND: Final = ("nodeName", "restartPolicy", "priority", "preemptionPolicy", "hostname", "subdomain")
"""What the scheduler and admission write into a pod, and names that it alone can have."""

_OF_IDENTITY: Final = ("podManagementPolicy", "serviceName", "persistentVolumeClaimRetentionPolicy", "ordinals")


def read_deployment(body: Mapping[str, Any]) -> Workload:
    """Return the server of a Deployment."""
    return _of_template(body, mapping(body, "spec"), Remarks())


def read_stateful_set(body: Mapping[str, Any]) -> Workload:
    """Return the server of a StatefulSet; a claim that each pod has to itself is none that replicas share."""
    spec, remarks = mapping(body, "spec"), Remarks()
    for key in _OF_IDENTITY:
        if spec.get(key):
            remarks.drop(key, "engines are alike: they need no names of their own")
    if spec.get("updateStrategy"):
        remarks.own("updateStrategy", "an old engine ends before its successor starts")
    claims = [name_in(each) for each in objects(spec, "volumeClaimTemplates")]
    message = "gives each pod a claim of its own: name one that all replicas can read in spec.models, or use the hub"
    for claim in claims:
        if not _is_cache(claim, mapping(mapping(mapping(body, "spec"), "template"), "spec")):
            remarks.decide("spec.models", f"volumeClaimTemplates {claim}", message)
    return _of_template(body, spec, remarks, [{"name": claim, "emptyDir": {}} for claim in claims])


def _is_cache(claim: str, pod: Mapping[str, Any]) -> bool:
    """Return whether a claim holds no more than the hub's cache."""
    mounts = [each for container in objects(pod, "containers") for each in objects(container, "volumeMounts")]
    paths = [str(each.get("mountPath")).rstrip("/") for each in mounts if name_of(each) == claim]
    return all(any(f"{cache}/".startswith(f"{path}/") for cache in USUAL_CACHES) for path in paths)


def read_pod(body: Mapping[str, Any]) -> Workload:
    """Return the server of a single Pod."""
    metadata = mapping(body, "metadata")
    return Workload(
        kind="Pod",
        name=name_in(body),
        pod={key: value for key, value in required(body, "spec").items() if key not in _BOUND},
        where="spec.containers",
        metadata={key: mapping(metadata, key) for key in ("labels", "annotations")},
        namespace=namespace_of(body),
        end=f"kubectl delete pod/{quoted_name(body)}{within(body)}",
    )


def _of_template(
    body: Mapping[str, Any], spec: Mapping[str, Any], remarks: Remarks, volumes: list[dict[str, Any]] | None = None
) -> Workload:
    pod = required(body, "spec.template.spec")
    remarks.drop_metadata(body)
    which = f"{str(body.get('kind')).lower()}/{quoted_name(body)}"
    return Workload(
        kind=str(body.get("kind")),
        name=name_in(body),
        pod={**pod, "volumes": [*objects(pod, "volumes"), *volumes]} if volumes else pod,
        where="spec.template.spec.containers",
        metadata=mapping(required(body, "spec.template"), "metadata"),
        namespace=namespace_of(body),
        match_labels=mapping(mapping(spec, "selector"), "matchLabels"),
        spec=spec,
        end=f"kubectl scale {which} --replicas=0{within(body)}",
        remove=f"kubectl delete {which}{within(body)}",
        remarks=remarks,
    )
